"""A job as validated data: a Request is what a user asks for, and a TrainingJob is what runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from sm_nanogpt.launcher.backends import LOCAL, Backend, backend_class
from sm_nanogpt.launcher.errors import InputError, about, did_you_mean, rephrased
from sm_nanogpt.launcher.files.documents import Bytes, Document, Number, Scalar
from sm_nanogpt.launcher.instances import types_of
from sm_nanogpt.launcher.machines import DEFAULT_VERSION
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.values import in_units, plain

DEFAULT_RUN_SECONDS = 3600
MAX_RUN_SECONDS_BY_COST = 86_400  # a day; if a cost ceiling sets the time limit

SEARCH_VARIABLE = "NANOGPT_SEARCH"  # names the search whose runs a job makes, in its environment
JOB_ID = re.compile(r"[A-Za-z0-9-]{1,63}")
# An id of launch.new_job_id, which may be followed by the numbers of a sweep's job.
FULL_ID = re.compile(r"sm-nanogpt-(\d{8}-\d{6})-[0-9a-f]{6}(-\d+(-try\d+)?)?")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # may name a job
NAME = re.compile(rf"(?!latest$|sm-nanogpt-){WORD.pattern}")
MAX_RUN_SECONDS = 2_419_200  # 28 days; SageMaker lets no job run longer
MAX_POOL_SECONDS = 3600  # the API takes more, and AWS's guide says that this is the limit

Positive = Annotated[Number, Field(gt=0)]


class Expected(Document):
    """The loss that is forecast for a run, in nats per token, with its 80 % interval from low to
    high.

    measured: a pilot was this run, so the loss is measured, and the interval is for other seeds.
    """

    loss: Positive
    low: Positive
    high: Positive
    measured: bool = False

    def __str__(self) -> str:
        if self.measured:
            return f"{self.loss:.3f}, measured by a pilot"
        return f"{self.loss:.3f}, {self.low:.3f} to {self.high:.3f} in 80 % of the cases"


# -- what to run -----------------------------------------------------------------------------------

Instances = Annotated[int, Field(ge=1, le=100)]
Processes = Annotated[int, Field(ge=1, le=1024)]
Seconds = Annotated[int, Field(ge=60, le=MAX_RUN_SECONDS)]
Dollars = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Gibibytes = Annotated[int, Field(ge=1, le=16_384)]
Hyperparameter = Annotated[str, AfterValidator(lambda name: name.replace("-", "_"))]
Launcher = Literal["pytorchddp", "torchrun"]
InputMode = Literal["File", "FastFile"]

DECIMAL_COMMA = re.compile(r"-?[0-9]+,[0-9]+")  # 0,1 for 0.1


class TrainingRequest(BaseModel):
    """The fields of a Request that mean the same wherever a job runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = None  # can be used in place of an id; None: that of the resumed job
    instance: str | None = None  # LOCAL or SageMaker types; None: that of the resumed job
    instance_count: Instances | None = None
    processes_per_instance: Processes | None = None
    data: str | None = None  # URI or path; None: the last upload
    validation: str | None = None
    preset: str | None = None
    size: Annotated[float, Field(ge=0.25, le=16)] | None = None  # in place of a preset
    fit: Bytes | None = None  # in place of a size: the limit of the model's page
    hyperparameters: dict[Hyperparameter, Scalar] = Field(default_factory=dict)
    entry_point: Path | None = None  # training folder; None: that of this package
    init_from: str | None = None  # model to start from: job id, directory or URI
    teacher: str | None = None  # model to learn from, in addition to the text
    resume: str | None = None  # id of the job whose checkpoints to continue from

    @property
    def has_open_size(self) -> bool:
        """True if a launch has to choose the size, by the text or by the bytes of a page."""
        return self.preset == "auto" or self.fit is not None


class Request(TrainingRequest):
    """What a user asks for: what to train, on which text, and where.

    None stands for a field that is left out, which `launch` chooses. hyperparameters override the
    preset. `config()` validates both with the training folder's own Config, so that a launch and
    the container report the same errors. The fields that this class adds are for SageMaker only.
    Times are in seconds. Raises InputError if a field is invalid, or the backend would refuse the
    job.
    """

    launcher: Launcher | None = None
    pytorch_version: str | None = None
    image_uri: str | None = None  # None: AWS's image of that version
    max_cost: Dollars | None = None  # USD, including the earlier jobs of `resume`
    max_run: Seconds | None = None  # None: an hour, or what the cost ceiling allows
    spot: bool | None = None
    max_wait: Seconds | None = None  # None: twice the time limit, up to 28 days
    keep_alive: Annotated[int, Field(ge=1, le=MAX_POOL_SECONDS)] | None = None
    volume_size: Gibibytes | None = None
    input_mode: InputMode | None = None  # of the text; a model is always copied
    environment: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    kms_key: str | None = None
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    network_isolation: bool | None = None
    encrypt_traffic: bool | None = None  # between hosts

    _inherited_names: frozenset[str] = PrivateAttr(default=frozenset())  # of fields
    _source: Source | None = PrivateAttr(default=None)  # None until a launch has read it

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**plain(values))
        except ValidationError as error:
            raise field_error(error, values) from None
        self._check()

    def _check(self) -> None:
        """Raise InputError if a field is invalid, or cannot be combined with another one."""
        if not (self.instances or self.resume):
            problem = "must be given: local, or a type such as ml.g5.12xlarge"
            raise InputError(problem, field="instance")
        self.backend_class.check_fields(self)
        explicit = self.explicit_fields()
        for name in ("size", "preset", "resume", "init_from"):
            if name not in explicit:
                continue
            problem = f"`{name}=` sets the size of the model too; give one of the two"
            if self.size is not None and name != "size":
                raise InputError(problem, field="size", value=self.size)
            if self.fit is not None:
                raise InputError(problem, field="fit", value=in_units(self.fit))
        if self.preset == "auto" and self.init_from is not None:
            problem = "is for a new model, without `init_from=`"
            raise InputError(problem, field="preset", value="auto")
        if self.name is not None and not NAME.fullmatch(self.name):
            rule = "start with a letter or digit, and not be `latest` or like an id"
            problem = f"must be at most 63 letters, digits, dots, dashes and underscores, {rule}"
            raise InputError(problem, field="name", value=self.name)

    def explicit_fields(self) -> dict[str, Any]:
        """The fields that were given a value, with their values."""
        fields = {}
        for name in self.model_fields_set:
            value = getattr(self, name)
            if value not in (None, (), {}):
                fields[name] = value
        return fields

    def replaced(self, **values: Any) -> Self:
        """The same request with other values, which are validated together."""
        new = type(self)(**{**self.explicit_fields(), **values})
        new.copy_origins(self)
        return new

    def copy_origins(self, other: Request) -> None:
        """Take over from another request what no field holds: which fields are inherited, and the
        training folder that was read."""
        self._inherited_names = other._inherited_names
        self._source = other._source

    def mark_inherited(self, names: Set[str]) -> None:
        """Note which fields were taken over from the job that is resumed."""
        self._inherited_names = frozenset(names)

    @property
    def instance_name(self) -> str:
        """The instance; '' for that of the resumed job, which counts as SageMaker's until then."""
        return self.instance or ""

    @property
    def backend_class(self) -> type[Backend]:
        return backend_class(self.instance_name)

    @property
    def instances(self) -> tuple[str, ...]:
        """The instance types; the job runs on the first that has capacity."""
        if not self.instance:
            return ()
        return types_of(self.instance)

    def origin(self, name: str) -> str:
        """The job from which a field was taken over, as a suffix for messages; or ''."""
        if name not in self._inherited_names:
            return ""
        return f" of job {self.resume}"

    @property
    def source(self) -> Source:
        """The training folder, as a launch has read it; before a launch, as it is now."""
        if self._source is not None:
            return self._source
        if self.entry_point is None:
            return Source.packaged()
        return Source.read(self.entry_point)

    def all_hyperparameters(self) -> dict[str, Scalar]:
        """Every field of the script's Config, for the job's record and the script's arguments.

        A resumed job keeps them, even if a later version has other presets and defaults.
        """
        config = asdict(self.config())
        return {name: value for name, value in config.items() if value not in (None, "")}

    def explicit_hyperparameters(self, defaults: dict[str, Scalar] | None = None) -> dict[str, Any]:
        """The hyperparameters that the preset or the user sets.

        defaults: as for config.
        """
        config = self.config(defaults=defaults)
        names = []
        if self.preset:
            names += self.source.module("presets").PRESETS[self.preset]
        for name, value in self.hyperparameters.items():
            if value != "":
                names.append(name)
        return {name: getattr(config, name) for name in names}

    def config(self, world_size: int = 1, defaults: dict[str, Scalar] | None = None) -> Any:
        """The Config of the training folder. `source` caches those that were checked.

        world_size: the number of processes that have to be able to share a batch. defaults: a value
        for every field of the Config; None: its own.
        """
        source = self.source
        key = json.dumps([self.preset, self.hyperparameters, defaults])
        config = source.configs.get(key)
        if config is not None and world_size == 1:
            return config
        with about("hyperparameters", self.hyperparameters), source.user_errors():
            if config is None:
                config = self._make_config(source, defaults)
            config.check_world_size(world_size)
        source.configs[key] = config
        return config

    def _make_config(self, source: Source, defaults: dict[str, Scalar] | None) -> Any:
        presets = source.module("presets").PRESETS
        if self.preset is not None and self.preset not in presets:
            raise unknown_preset_error(self.preset, ["auto", *presets])
        try:
            with source.user_errors():
                make_config = source.module("config").make_config
                return make_config(self.hyperparameters, self.preset, defaults)
        except InputError as error:
            names = {name.replace("-", "_"): "" for name in self.hyperparameters}
            if source.known_hyperparameters(names) != names:
                raise unknown_hyperparameter_error(str(error), source) from error.__cause__
            raise wrong_value_error(error, self.hyperparameters, source) from error.__cause__

    def metric_definitions(self) -> list[dict[str, str]]:
        with self.source.user_errors():
            return list(self.source.module("metrics").metric_definitions())


def field_error(error: ValidationError, values: Mapping[str, Any]) -> InputError:
    """The error for the first field that pydantic refused. values has the values of all fields."""
    details = error.errors()[0]
    name, *inner = map(str, details["loc"])
    problem = rephrased(details["msg"])
    value = details["input"]
    if details["type"] == "missing":
        problem = "is missing"
        value = None
    elif details["type"] == "extra_forbidden":
        problem = "there is no such field"
    if name != "hyperparameters" or not inner:
        return InputError(problem, field=name, value=value)

    if len(inner) > 1:  # inner[1] is one of the types that a value may have
        problem = "must be a finite number, a text, or True or False"
    hyperparameter_error = InputError(f"{inner[0]}={value!r}: {problem}")
    hyperparameter_error.field = name  # which the message does not name
    hyperparameter_error.value = values[name]
    return hyperparameter_error


class TrainingJob(Request):
    """What runs: a Request in which every choice is made. job.json keeps it."""

    instance: str = LOCAL
    instance_count: Instances = 1
    data: str  # URI, as are validation, init_from and teacher
    source_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    launcher: Launcher = "pytorchddp"
    pytorch_version: str = DEFAULT_VERSION
    affordable_run: Annotated[int, Field(ge=60)] | None = None  # seconds, by the cost ceiling
    worst_cost: float | None = None  # USD; None: no known price
    # What the jobs that this one resumes had cost when it was submitted, in USD.
    earlier_cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    base: str | None = None  # what people call the model of init_from: a job's id, or a name
    summary: str = ""  # as summary.summary_of says
    expected: Expected | None = None  # the loss that was forecast for it
    page_limit: Bytes | None = None  # the limit of its page, from `fit`
    spot: bool = False
    volume_size: Gibibytes = 50
    input_mode: InputMode = "File"
    network_isolation: bool = False
    encrypt_traffic: bool = False

    @property
    def channels(self) -> dict[str, str]:
        """The URIs that the job reads, by their names in /opt/ml/input/data."""
        uris = {
            "training": self.data,
            "validation": self.validation,
            "model": self.init_from,
            "teacher": self.teacher,
        }
        return {name: uri for name, uri in uris.items() if uri is not None}

    @property
    def time_limit(self) -> int:
        """The seconds that the job may run, by the smallest of its limits."""
        default = MAX_RUN_SECONDS_BY_COST if self.max_cost else DEFAULT_RUN_SECONDS
        limits = (self.max_run or default, self.affordable_run, self.max_wait)
        return min(seconds for seconds in limits if seconds)

    @property
    def wait_limit(self) -> int:
        """The seconds that a spot job may take, including its interruptions."""
        return self.max_wait or min(2 * self.time_limit, MAX_RUN_SECONDS)


def unknown_preset_error(name: str, presets: Sequence[str]) -> InputError:
    problem = f"must be one of {', '.join(presets)}"
    suggestion = did_you_mean(name, presets, limit=1)
    if suggestion:
        problem += f"; {suggestion}"
    if "," in name:
        sweep = shlex.quote(f"preset={name}")
        return InputError(problem, "list-of-values", field="preset", value=name, sweep=sweep)
    return InputError(problem, field="preset", value=name)


def unknown_hyperparameter_error(problem: str, source: Source) -> InputError:
    if source.is_packaged:
        return InputError(problem, code="list-hyperparameters")
    folder = shlex.quote(str(source.directory))
    return InputError(problem, code="list-edited-hyperparameters", folder=folder)


def wrong_value_error(
    error: InputError, hyperparameters: Mapping[str, Scalar], source: Source
) -> InputError:
    """The error for a value that the training folder refused.

    It has a code if the value is a list of values, or a number with a decimal comma.
    """
    types = {field.name: field.type for field in fields(source.module("config").Config)}
    for name, value in hyperparameters.items():
        if "," not in str(value) or not error.problem.startswith(f"{name}="):
            continue
        if types.get(name) == "float" and DECIMAL_COMMA.fullmatch(str(value)):
            decimal = f"{name}={value}".replace(",", ".")
            return InputError(error.problem, code="decimal-comma", decimal=decimal)
        sweep = shlex.quote(f"{name}={value}")
        return InputError(error.problem, code="list-of-values", sweep=sweep)
    return error


# The fields that a backend other than SageMaker records of a job.
RECORDED_FIELDS = ("source_sha256", "base", "summary", "expected", "page_limit")
COMMON_FIELDS = {*TrainingRequest.model_fields, *RECORDED_FIELDS}
