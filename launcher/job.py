"""A job as plain data: what to run, validated, and how it stands; not how or where it is run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from launcher.aws.images import DEFAULT_VERSION
from launcher.aws.instances import check_instances, types_of
from launcher.documents import Scalar, read_file
from launcher.errors import InputError, ServiceError, must_be

if TYPE_CHECKING:
    from launcher.aws.prices import Price

DAY = 86_400  # seconds that a job may run whose limit a cost sets

# What a local job has too; every other field is for SageMaker alone.
LOCAL_FIELDS = {
    "instance",
    "instance_count",
    "processes_per_instance",
    "data",
    "validation",
    "preset",
    "hyperparameters",
    "entry_point",
    "resume",
}

TAG_KEY, TAG_VALUE = "sm-nanogpt", "job"  # marks our jobs
TAG_CHARACTERS = re.compile(r"[\w\s.:/=+\-@]*")
JOB_ID = re.compile(r"[A-Za-z0-9-]{1,63}")
CHECKPOINT = re.compile(r"checkpoint-(\d+)\.safetensors")
RUNNING = ("InProgress", "Stopping")
LONGEST_RUN = 2_419_200  # seconds: 28 days; SageMaker lets no job run longer


def option(name: str) -> str:
    """The command line's word for a field."""
    words = {"subnets": "subnet", "security_group_ids": "security-group", "tags": "tag"}
    return f"--{words.get(name, name).replace('_', '-')}"


# -- what to run -----------------------------------------------------------------------------------


class TrainingJob(BaseModel):
    """One training.

    hyperparameters go over those of the preset; both are held against the training script's own
    Config, by `config()`, so a launch and the container refuse the same things in the same words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance: str = "local"  # or SageMaker types; with `resume`: the earlier job's, if not given
    instance_count: int = Field(default=1, ge=1, le=100)
    processes_per_instance: int | None = Field(default=None, ge=1, le=1024)
    data: str | None = None  # URI or path; None: the last upload
    validation: str | None = None
    preset: str | None = None
    hyperparameters: dict[str, Scalar] = Field(default_factory=dict)
    entry_point: Path | None = None  # None: the script of this package
    resume: str | None = None  # id of the job whose checkpoints this one goes on from

    # What only SageMaker has, as LOCAL_FIELDS leaves it out. Times are in seconds.
    launcher: Literal["pytorchddp", "torchrun"] = "pytorchddp"
    pytorch_version: str = DEFAULT_VERSION
    image_uri: str | None = None  # None: AWS's image of that version
    max_cost: float | None = Field(
        default=None, gt=0, le=1e9, allow_inf_nan=False
    )  # USD, with `resume`'s
    max_run: int = Field(default=3600, ge=60, le=LONGEST_RUN)
    affordable_run: int | None = Field(default=None, ge=60)  # found from the ceiling, at launch
    worst_cost: float | None = None  # USD, found at launch; None: no price is known
    spot: bool = False
    max_wait: int | None = Field(default=None, ge=60)  # None: twice max_run, up to 28 days
    keep_alive: int | None = Field(default=None, ge=1, le=3600)
    volume_size: int = Field(default=50, ge=1, le=16_384)  # GiB
    environment: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    kms_key: str | None = None
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    network_isolation: bool = False
    encrypt_traffic: bool = False  # between hosts

    _taken_over: frozenset[str] = PrivateAttr(default=frozenset())  # fields, from `resume`'s

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name, *inner = (str(part) for part in first["loc"])
            if name == "hyperparameters" and inner:
                name = inner[0]
            unknown = first["type"] == "extra_forbidden"
            problem = "there is no such field" if unknown else must_be(first["msg"])
            raise InputError(f"{name}={first['input']!r}: {problem}") from None

    @model_validator(mode="after")
    def _refuse_what_aws_refuses(self) -> TrainingJob:
        check_instances(self.instances)
        local = self.instance == "local"
        said = {name for name in self.model_fields_set if getattr(self, name) is not False}
        cloud = said - LOCAL_FIELDS  # what is switched off is asked of nobody
        problem = None
        if local and cloud and not self.instance_is_open:
            problem = f"{option(min(cloud))} is for SageMaker, not for --instance local"
        elif not local and self.processes_per_instance is not None:
            problem = (
                "--processes-per-instance is for --instance local; SageMaker takes one per GPU"
            )
        elif self.image_uri is not None and "pytorch_version" in said:
            problem = "--pytorch-version is of AWS's image, and --image-uri names another; say one"
        elif self.spot and len(self.instances) > 1:
            problem = "--spot takes one --instance type; several go with --on-demand alone"
        elif self.max_wait is not None and not self.spot:
            problem = "--max-wait is for --spot jobs"
        elif self.max_wait is not None and self.max_wait < self.max_run and not self.limit_is_open:
            problem = f"--max-wait {self.max_wait} has to be at least --max-run {self.max_run}"
        elif self.spot and self.keep_alive is not None:
            problem = "--keep-alive does not go with --spot"
        elif bool(self.subnets) != bool(self.security_group_ids):
            problem = "--subnet and --security-group go together"
        elif len(self.environment) > 100:
            problem = f"--environment: {len(self.environment)} variables, and AWS allows 100"
        elif len(self.tags) > 48:
            problem = f"--tag: {len(self.tags)} tags, and AWS allows 48 beside ours"
        for name, value in self.environment.items():
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}", name) or len(value) > 512:
                problem = (
                    f"--environment {name}: a name is of letters, digits and _, and a value has 512"
                    " characters at most"
                )
        for name, value in self.tags.items():
            ours = name.lower().startswith("aws:") or name == TAG_KEY
            if ours or not (TAG_CHARACTERS.fullmatch(name) and 1 <= len(name) <= 128):
                problem = f"--tag {name}: the key is not allowed (letters, digits and _.:/=+-@)"
            elif not TAG_CHARACTERS.fullmatch(value) or len(value) > 256:
                problem = f"--tag {name}={value}: the value is not allowed (as the key, up to 256)"
        if problem:
            raise InputError(problem)
        return self

    @property
    def instances(self) -> tuple[str, ...]:
        """The instance types; the job runs on the first that has capacity."""
        return types_of(self.instance)

    @property
    def instance_is_open(self) -> bool:
        """Whether the instance type is still to be found, from the job that this one resumes."""
        return self.resume is not None and "instance" not in self.model_fields_set

    @property
    def limit_is_open(self) -> bool:
        """Whether the time limit is still to be found, from the cost ceiling."""
        return self.max_cost is not None and "max_run" not in self.model_fields_set

    def origin(self, name: str) -> str:
        """Words behind an option that nobody typed for this job, but for the one it resumes."""
        return f" of job {self.resume}" if name in self._taken_over else ""

    @property
    def time_limit(self) -> int:
        """Seconds that the job may run: the smallest of the limits that it has."""
        own = DAY if self.limit_is_open else self.max_run
        limits = (own, self.affordable_run, self.max_wait)
        return min(limit for limit in limits if limit is not None)

    @property
    def script(self) -> Path:
        """The file that trains."""
        if self.entry_point is not None:
            return self.entry_point
        spec = importlib.util.find_spec("entry_point.train")
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin)

    def script_module(self) -> ModuleType:
        """The training script as a module; importing it runs nothing.

        Raises:
            InputError: the entry point is not a copy of train.py.
        """
        if self.entry_point is None:
            from entry_point import train

            return train
        if self.entry_point.suffix != ".py":
            raise InputError(f"{self.entry_point}: not a Python file (*.py)")
        try:
            source = read_file(self.entry_point)
        except FileNotFoundError:
            raise InputError(f"{self.entry_point}: no such file") from None
        except OSError as error:
            raise InputError(f"{self.entry_point}: {error.strerror}") from None
        return load_script(self.entry_point, source)

    def all_hyperparameters(self) -> dict[str, Scalar]:
        """Every field of the script's Config, as the job's record keeps it and the script is told.

        A later version may have other presets and defaults, and a resumed job keeps these.
        """
        config = asdict(self.config(1))
        return {name: value for name, value in config.items() if value not in (None, "")}

    def hyperparameter_names(self) -> set[str]:
        return {f.name for f in fields(self.script_module().Config)}

    def explicit_hyperparameters(
        self, base: Mapping[str, Scalar] | None = None
    ) -> dict[str, Scalar]:
        """The preset's values and those given over them, under the fields' names.

        With a base, all of a Config, the preset goes over that, as in the script.
        """
        config = self.config(1, base)
        given = {
            name.replace("-", "_"): value
            for name, value in self.hyperparameters.items()
            if value != ""
        }
        preset = self.script_module().PRESETS[self.preset] if self.preset else {}
        return {name: getattr(config, name) for name in {**preset, **given}}

    def config(self, world_size: int, base: Mapping[str, Scalar] | None = None) -> Any:
        """The script's Config of this job, over a base in place of the defaults.

        Raises:
            InputError: an unknown or impossible hyperparameter, or a batch that world_size
                processes cannot share.
        """
        module = self.script_module()
        try:
            config = module.make_config(self.hyperparameters, self.preset, base)
            config.check_world_size(world_size)
        except module.ConfigError as error:
            raise InputError(str(error)) from None
        return config

    def check_resumable(self, before: TrainingJob, earlier: JobDescription) -> None:
        """Raises InputError unless this job can go on from `before`, which stands as `earlier`.

        One that ended at its last step goes on as long as it has no model, to write that.
        """
        module = self.script_module()
        jobs = [
            {"config": asdict(job.config(1)), "corpus_sha256": (job.data, job.validation)}
            for job in (before, self)
        ]
        try:
            module.check_resumable(*jobs)
        except module.TrainingError as error:
            raise InputError(str(error)) from None
        step, max_steps = earlier.checkpoint_step or 0, self.config(1).max_steps
        if step > max_steps or (step == max_steps and earlier.model_uri is not None):
            raise InputError(
                f"max_steps={max_steps}: the earlier job came to step {step} already;"
                f" `--set max_steps=N`, with N above {step}, goes on from there"
            )


@lru_cache(maxsize=8)  # a launch asks for it a dozen times
def load_script(file: Path, source: bytes) -> ModuleType:
    """Executes an edited copy of train.py, once for each content of the file.

    Raises:
        InputError: it is no such copy.
    """
    module = ModuleType(f"user_train_{hashlib.sha256(source).hexdigest()[:12]}")
    module.__file__ = str(file)
    try:
        sys.modules[module.__name__] = module  # dataclasses look their module up there
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
        _ = module.make_config, module.PRESETS, module.metric_definitions
        _ = module.script_sha256, module.with_weights, module.write_artefact
    except AttributeError as error:
        raise InputError(
            f"{file}: not an edited copy of this version's train.py ({error}); start from the file"
            " that `sm-nanogpt copy-script` writes"
        ) from None
    except SyntaxError as error:
        raise InputError(f"{file}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what ends a process, too
        raise InputError(f"{file}: cannot be imported ({type(error).__name__}: {error})") from None
    return module


# -- how it stands ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobDescription:
    """A job as it stands.

    status is SageMaker's: InProgress, Stopping, Completed, Failed or Stopped. instance is the type
    that the job runs on; until SageMaker has chosen one of several, all of them with commas between
    them. created, started and ended are seconds since the epoch. metrics holds the newest numbers
    of the curve. model_uri is None as long as no model is there. checkpoint_uri and checkpoint_step
    are None as long as no checkpoint is there, and for a job on SageMaker also while it runs and in
    a list of jobs, where S3 is not asked.
    """

    job_id: str
    status: str
    secondary_status: str
    instance: str
    instance_count: int
    created: float
    data: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    failure_reason: str | None = None
    started: float | None = None
    ended: float | None = None
    metrics: dict[str, Any] | None = None
    model_uri: str | None = None
    checkpoint_uri: str | None = None
    checkpoint_step: int | None = None  # of the newest
    message: str | None = None  # what the service says of the present state
    billable_seconds: int | None = None  # SageMaker only, as is what follows
    training_seconds: int | None = None
    volume_size: int = 0  # GiB of disk for each instance
    keep_alive: int | None = None  # seconds of warm pool that were asked for
    warm_pool_seconds: int | None = None  # billed after the end; None until the pool is gone
    spot: bool = False
    cost: float | None = None  # USD at `price`, so far or in the end, as launcher.aws.money has it
    price: Price | None = None

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    @property
    def is_placed(self) -> bool:
        """Whether one of its instance types was chosen; before that a job costs nothing."""
        return len(types_of(self.instance)) == 1

    @property
    def state(self) -> str:
        """The status, with what it means just now where that has a name of its own."""
        if self.status == self.secondary_status:
            return self.status
        return f"{self.status} ({self.secondary_status})"

    @property
    def has_open_pool(self) -> bool:
        """Whether a warm pool came after the job, and its seconds are not told yet."""
        had_machines = bool(self.billable_seconds or self.started)
        asked = self.ended is not None and self.keep_alive is not None
        return had_machines and asked and self.warm_pool_seconds is None

    def billed_seconds(self, now: float) -> float:
        """Of each instance, in the end or so far.

        What is not told yet is counted by the clock, and a warm pool with all that it may last.
        """
        warm = (self.keep_alive if self.has_open_pool else self.warm_pool_seconds) or 0
        if self.billable_seconds is not None:
            return self.billable_seconds + warm
        if self.started is None:
            return 0.0
        return max(0.0, (self.ended or now) - self.started) + warm


@dataclass(frozen=True)
class UnreadableJob:
    """A job whose record is damaged or of another version, and the error that says so."""

    job_id: str
    error: ServiceError


def newest_checkpoint(names: Iterable[str]) -> int | None:
    """The highest step of the checkpoints among these file names."""
    steps = [int(m[1]) for name in names if (m := CHECKPOINT.fullmatch(name))]
    return max(steps, default=None)
