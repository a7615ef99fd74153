"""Fill what a request leaves open, step by step, until each choice of the job is made."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_nanogpt.launcher.aws import Offline
from sm_nanogpt.launcher.backends import Backend, backend_for, rents_gpus
from sm_nanogpt.launcher.errors import InputError, about
from sm_nanogpt.launcher.finding import Listing, remote_launches
from sm_nanogpt.launcher.job import Expected, Request, TrainingJob
from sm_nanogpt.launcher.launching import sizing, start
from sm_nanogpt.launcher.launching.forecasts import (
    MIN_TRAINING_TOKENS,
    Row,
    expected_of,
    forecast_rows,
    in_two_generations,
)
from sm_nanogpt.launcher.launching.names import check_name_here, name_of_a_job_error
from sm_nanogpt.launcher.launching.resume import (
    EarlierJob,
    check_reach,
    find_earlier_job,
    with_earlier_fields,
    with_earlier_folder,
    with_known_hyperparameters,
)
from sm_nanogpt.launcher.launching.summary import summary_of, summary_of_resumed
from sm_nanogpt.launcher.launching.texts import find_texts, readings_of
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Texts
from sm_nanogpt.launcher.text.store import named_by

if TYPE_CHECKING:  # it imports torch
    from sm_nanogpt.launcher.launching.fitting import Fit

logger = logging.getLogger(__name__)

# The fields of a request whose defaults come from the settings.
CONFIGURED_FIELDS = (
    "subnets",
    "security_group_ids",
    "network_isolation",
    "encrypt_traffic",
    "tags",
)


@dataclass
class Draft:
    """A job in the making. Each step fills a part of its request that is still open.

    original is the request as the user made it. models has the initial model and the teacher, by
    the fields `init_from` and `teacher`; base is what people call the model of `init_from`. The
    settings of backend have the job's store and role. twice_fit is the size for twice the bytes of
    the page that `fit` limits.
    """

    original: Request
    settings: Settings
    texts: Texts = field(default_factory=dict)
    request: Request = field(init=False)
    earlier: EarlierJob | None = None
    models: dict[str, start.InitialModel] = field(default_factory=dict)
    base: str | None = None
    twice_fit: Fit | None = None
    backend: Backend = field(init=False)
    job: TrainingJob = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.original

    def change_request(self, **values: Any) -> None:
        self.request = self.request.model_copy(update=values)

    def take_over_earlier_job(self) -> None:
        """Fill the request from the job that it resumes."""
        if self.request.resume is None:
            return
        with about("resume", self.request.resume):
            earlier = find_earlier_job(self.request, self.request.resume, self.settings)
        check_reach(self.request, earlier)
        self.request = with_earlier_folder(self.request, earlier.job, self.settings)
        self.earlier = with_known_hyperparameters(self.request, earlier)
        self.request = with_earlier_fields(self.request, self.earlier.job)
        self.base = earlier.job.base

    def check_name(self) -> None:
        """Raise InputError if a job that this one does not resume has the name."""
        if self.new_name is not None:
            check_name(self.request, self.settings)

    @property
    def new_name(self) -> str | None:
        """The name of the job; None if it has none, or that of the job that it resumes."""
        if self.earlier is not None and self.request.name == self.earlier.job.name:
            return None
        return self.request.name

    def choose_backend(self) -> None:
        """Choose where the job runs, and take the store and other defaults from its settings."""
        self.backend = backend_for(self.request.instance_name, self.settings)
        self.backend.settings = self.backend.launch_settings()
        if self.backend.is_remote:
            self.settings = self.backend.settings
        self.request = with_configured_fields(self.settings, self.request, self.backend)

    def read_training_folder(self) -> None:
        with about("entry_point", self.request.entry_point):
            self.request = with_training_folder(self.request)

    def find_models(self) -> None:
        """Find the initial model and the teacher, and set what the initial model prescribes."""
        for name in ("init_from", "teacher"):
            reference = getattr(self.original, name)
            if reference is None:
                continue
            with about(name, reference):
                model = start.find_model(self.request, self.backend.settings, name)
            self.models[name] = model
            self.change_request(**{name: model.channel.uri})
            if name == "init_from":
                self.change_request(hyperparameters=model.hyperparameters)
                self.base = model.name

    def choose_preset(self) -> None:
        """Choose the preset `baby` on GPUs if the request has no other choice of a model; check the
        hyperparameters."""
        request = self.request
        if request.size is not None or request.has_open_size:
            return
        is_new_model = self.original.resume is None and self.original.init_from is None
        if request.preset is None and is_new_model and rents_gpus(request.instance_name):
            self.change_request(preset="baby")
        self.request.config()  # raises for a mistake before a long text is read

    def find_texts(self) -> None:
        """Find where the job reads its texts, unless another plan has found the same texts."""
        if not self.texts:
            self.texts = find_texts(self.request, self.settings, self.backend.settings)

    def choose_size(self) -> None:
        """Set the hyperparameters that depend on the text."""
        with about("data", self.request.data):
            if self.request.fit is not None:
                self.fit_page(self.request.fit)
            else:
                self.request = sizing.sized(self.request, self.texts)
        self.request = sizing.with_whole_windows(self.request, self.texts["data"])
        if self.earlier is None and "max_steps" not in self.original.hyperparameters:
            self.request = sizing.with_fitting_steps(self.request, self.texts)

    def fit_page(self, page_limit: int) -> None:
        """Set the size by the bytes that the page of the model may have, and what depends on it."""
        from sm_nanogpt.launcher.launching.fitting import fit_sizes  # it imports torch

        fit, self.twice_fit = fit_sizes(self.request, self.texts, [page_limit, 2 * page_limit])
        logger.info(f"fit: {fit}")
        self.change_request(fit=None)
        length = sizing.text_length(self.request, self.texts)
        self.request = sizing.with_chosen_size(self.request, fit.size, length)

    def make_job(self) -> None:
        """Make the job of the request, with the locations of its texts and its launcher."""
        choices = self.request.explicit_fields()
        for name, channel in self.texts.items():
            choices[name] = channel.uri
        choices["source_sha256"] = self.request.source.sha256
        launcher = self.backend.default_launcher(self.request.instance_name)
        if launcher is not None:
            choices.setdefault("launcher", launcher)
        self.job = TrainingJob(**choices, base=self.base)
        self.job.copy_origins(self.request)

    def describe_job(self) -> None:
        """Add the summary, the limit of the page, and the loss that is forecast, to the job."""
        fields: dict[str, Any] = {}
        if self.earlier is not None:
            fields = self.description_by(self.earlier.job)
        else:
            explicit = {*self.original.hyperparameters}
            if "generations" in self.job.hyperparameters:  # chosen together with an open size
                explicit.add("generations")
            fields["summary"] = summary_of(self.job, explicit)
            fields["page_limit"] = self.original.fit
            fields["expected"] = self.forecast_loss()
        self.job = self.job.model_copy(update=fields)

    def description_by(self, earlier: TrainingJob) -> dict[str, Any]:
        """The fields of the earlier job that describe this one too."""
        fields: dict[str, Any] = {
            "summary": summary_of_resumed(self.job, earlier),
            "page_limit": earlier.page_limit,
        }
        if self.job.config() == earlier.config():  # it is the same run
            fields["expected"] = earlier.expected
        return fields

    def forecast_loss(self) -> Expected | None:
        """The loss that is forecast for the run; None if there is no forecast.

        If its page has a limit, the forecast is logged.
        """
        has_page_limit = self.original.fit is not None
        if not is_run_of_size(self.job, self.texts):
            if has_page_limit:
                logger.info("no loss is forecast for a run that differs from that of its size")
            return None
        rows = forecast_rows(self.job, self.texts, self.backend.settings)
        expected = self.expected_of_size(self.job.size or 0, rows)
        if has_page_limit:
            self.log_forecast(expected, rows)
        return expected

    def expected_of_size(self, size: float, rows: list[Row]) -> Expected | None:
        """The loss of a size in as many generations as the job has, by the rows of a forecast.

        None if it is not known. A size other than the job's gets one generation if two are not
        known to gain, as a launch of that size does.
        """
        expected = expected_of(size, rows)
        if expected is None or self.n_generations == 1:
            return expected
        if self.n_generations > 2:  # not measured
            return None
        length = sizing.text_length(self.job, self.texts)
        values = hyperparameters_of_size(self.job, size, length)
        run_of_size = self.job.model_copy(update={"hyperparameters": values})
        readings = readings_of(run_of_size.config(), length.n_tokens)
        if sizing.gains_by_generations(size, readings):
            return in_two_generations(expected, readings)
        return None if size == self.job.size else expected

    @property
    def n_generations(self) -> int:
        return int(self.job.hyperparameters.get("generations", 1))

    def log_forecast(self, expected: Expected | None, rows: list[Row]) -> None:
        """Log the loss that is forecast, and that for a page with twice the bytes."""
        if not rows:
            length = sizing.text_length(self.job, self.texts)
            if length.n_tokens < MIN_TRAINING_TOKENS:
                reason = f"{length.n_tokens:,} {length.unit} to train on are too few for pilots"
                logger.info(f"no loss is forecast for this text: {reason}")
                return
            data = named_by(self.texts["data"].shown, self.backend.settings)
            extra = {"code": "forecast-first", "data": shlex.quote(data)}
            logger.info("no loss is forecast for this text", extra=extra)
            return
        if expected is None:
            logger.info(f"the forecast has no loss for size {self.job.size:g}")
            return
        assert self.twice_fit is not None
        twice_size = self.twice_fit.size
        twice_expected = self.expected_of_size(twice_size, rows)
        if twice_size == self.job.size:
            comparison = "twice the file gives nothing more"
        elif twice_expected is None:
            comparison = f"twice the file is size {twice_size:g}, for which nothing is forecast"
        else:
            comparison = f"twice the file, size {twice_size:g}: {twice_expected.loss:.3f}"
        logger.info(f"forecast: loss {expected}; {comparison}")


def fill(request: Request, settings: Settings, texts: Texts | None = None) -> Draft:
    """Fill what a request leaves open: from the earlier job, the settings, the initial model, the
    text, and the defaults of the machine.

    texts: the channels of another plan with the same texts, so that they are not read again.
    """
    draft = Draft(request, settings, texts or {})
    draft.take_over_earlier_job()
    draft.check_name()
    draft.choose_backend()
    draft.read_training_folder()
    draft.find_models()
    draft.choose_preset()
    draft.find_texts()
    draft.choose_size()
    draft.make_job()
    draft.describe_job()
    return draft


def check_name(request: Request, settings: Settings) -> None:
    """Raise InputError if a job of the caller, or a sweep of this machine, has the name."""
    if request.name is None:
        return
    check_name_here(request.name, settings)
    is_remote = request.backend_class.is_remote
    if not (is_remote or remote_launches(settings)):
        return
    listing = Listing(settings, name=request.name)
    job = next(iter(listing), None)
    if job is not None:
        raise name_of_a_job_error(request.name, job.job_id)
    if listing.failure is not None:
        if is_remote and not isinstance(listing.failure, Offline):
            raise listing.failure
        result = f"of the jobs of this machine, none is named {request.name}"
        logger.info(f"{listing.failure}; {result}", extra={"cause": listing.failure})


def with_configured_fields(settings: Settings, request: Request, backend: Backend) -> Request:
    """The request, with the settings for all jobs in place of fields that it leaves out.

    Tags of both are merged. Raises InputError if a setting does not fit the request.
    """
    explicit = request.explicit_fields()
    defaults = {}
    for name in CONFIGURED_FIELDS:
        value = getattr(settings, name)
        is_open = name == "tags" or name not in explicit
        if value and is_open and backend.takes_field(name):
            defaults[name] = value
    if not defaults:
        return request
    logger.info(f"configured: {', '.join(sorted(defaults))}")
    tags = {**settings.tags, **request.tags}
    try:
        return request.replaced(**{**defaults, **explicit, "tags": tags})
    except InputError as error:
        raise InputError(f"from the settings: {error}") from None


def with_training_folder(request: Request) -> Request:
    """The request with its training folder, which a launch reads once. Raises InputError."""
    source = request.source
    if request.entry_point is not None:
        source.check_complete()
        request = request.model_copy(update={"entry_point": source.directory})
    request._source = source
    return request


def is_run_of_size(job: TrainingJob, texts: Texts) -> bool:
    """True if a job has only the hyperparameters of its size, as the runs of a forecast have.

    The seed and the number of generations may differ.
    """
    if job.size is None or job.teacher is not None:
        return False
    of_size = hyperparameters_of_size(job, job.size, sizing.text_length(job, texts))
    values = dict(job.hyperparameters)
    for name in ("seed", "generations"):
        values.pop(name, None)
    return bool(values == of_size)


def hyperparameters_of_size(
    job: TrainingJob, size: float, length: sizing.TextLength
) -> dict[str, Any]:
    """The hyperparameters of a size for a text, in one process, by the training folder of a job."""
    with job.source.user_errors():
        sizes = job.source.module("sizes")
        return dict(sizes.hyperparameters_for_size(size, length.n_tokens, length.is_of_chats))
