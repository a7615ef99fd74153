"""The functions that Python users call, and the Job that they get."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_nanogpt.launcher.backends import backend_for
from sm_nanogpt.launcher.description import STATUSES, JobDescription
from sm_nanogpt.launcher.errors import InputError, LauncherError, ServiceError, about
from sm_nanogpt.launcher.files.storage import path_of, write_bytes
from sm_nanogpt.launcher.finding import Listing, find, full_id
from sm_nanogpt.launcher.forecast import forecasting
from sm_nanogpt.launcher.groups.plan import plan_sweep
from sm_nanogpt.launcher.groups.ranking import best_first
from sm_nanogpt.launcher.groups.run import begin_sweep
from sm_nanogpt.launcher.job import FULL_ID, Expected, Request
from sm_nanogpt.launcher.launching import launch as launching
from sm_nanogpt.launcher.launching.forecasts import Forecast
from sm_nanogpt.launcher.models import fetch
from sm_nanogpt.launcher.sagemaker.cost import check_confirmed
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.tracking import TrackedJob, check_yours, with_costs
from sm_nanogpt.launcher.values import plain
from sm_nanogpt.launcher.views.card import card
from sm_nanogpt.launcher.views.page import report_html
from sm_nanogpt.launcher.views.report import compare, read_runs

if TYPE_CHECKING:  # they import torch
    from sm_nanogpt.entry_point.model import GPT
    from sm_nanogpt.entry_point.text import Tokenizer
    from sm_nanogpt.launcher.judge.evaluation import Evaluation

logger = logging.getLogger(__name__)


@dataclass(unsafe_hash=True)
class Job(TrackedJob):
    """A job, by its full id, on this machine or on SageMaker, while it runs and afterwards.

    `name`, `status`, `cost`, and `url` ask the backend until the job has ended; `describe` always
    does. All raise ServiceError, or one of its subclasses, if the job is gone or a service fails.
    """

    _last_description: JobDescription | None = field(default=None, repr=False, compare=False)

    def describe(self) -> JobDescription:
        """The state of the job now, with its cost, name and settings."""
        self._last_description = super().describe()
        return self._last_description

    @property
    def _description(self) -> JobDescription:
        """The state of the job: the last one that was read, if it cannot change any more, or else
        the state now."""
        last = self._last_description
        if last is None or last.is_running or last.has_open_pool(time.time()):
            return self.describe()
        return last

    @property
    def name(self) -> str | None:
        """The name from the request, if it has one."""
        return self._description.name

    @property
    def status(self) -> str:
        """InProgress, Stopping, Completed, Failed or Stopped."""
        return self._description.status

    @property
    def cost(self) -> float | None:
        """USD so far or in total; None on this machine, or if the price is unknown."""
        return self._description.cost

    @property
    def forecast(self) -> Expected | None:
        """The loss that was forecast for the job before its launch; None without a forecast."""
        return self._description.expected

    @property
    def url(self) -> str | None:
        """The job's page in the AWS console; None for a job on this machine."""
        backend = backend_for(self._description.instance, self.settings)
        return backend.console_link(self.id)

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job ends, and return it; timeout is in seconds.

        Raises ServiceError if the job failed, was deleted, or still runs after `timeout`.
        """
        ended = self.wait_for_end(timeout)
        if ended.status == "Failed":
            reason = ended.failure_reason
            raise ServiceError(f"job {self.id} failed: {reason}", job_id=self.id, reason=reason)
        return self

    def metrics(self) -> Any:
        """The curve so far: a pandas DataFrame, or a list of dicts if pandas is not installed.

        Losses are in nats per token, and `time` is in seconds since the epoch. A value that a row
        does not have is NaN in the DataFrame, and missing in the dict.
        """
        rows = self.curve().rows
        try:
            from pandas import DataFrame
        except ImportError:
            return rows
        names = ["step", "train_loss", "val_loss"]
        for row in rows:
            names += row
        return DataFrame(rows, columns=list(dict.fromkeys(names)))

    def model(self, entry_point: str | Path | None = None) -> Path:
        """Download the model, unless it is here, check it, and return its directory.

        For a job that failed or was stopped, it is the model of the newest checkpoint. entry_point
        is the folder that trained it, if the launch of the job kept none on this machine.
        """
        return fetch.fetch_model(self.id, self.settings, path_or_none(entry_point))

    @cached_property
    def _loaded(self) -> tuple[GPT, Tokenizer]:
        from sm_nanogpt.launcher.models.load import load_model

        return load_model(self.model(), self.settings)

    def sample(self, prompt: str | None = None, max_new_tokens: int = 500, **sampling: Any) -> str:
        """Sample a text that starts with the prompt. sampling is as for stream_samples.

        If the model has learned from conversations, the text is its answer to the prompt.
        """
        text = self._answer(prompt, max_new_tokens=max_new_tokens, **sampling)
        _, tokenizer = self._loaded
        if prompt is None or tokenizer.chats:
            return text
        return prompt + text

    def chat(self, messages: Sequence[Mapping[str, str]], **sampling: Any) -> str:
        """Answer a conversation, such as [{"role": "user", "content": "Hello"}].

        Raises InputError if the model has not learned from conversations, or a message lacks its
        role or content.
        """
        from sm_nanogpt.launcher.models.chat import read_messages

        return self._answer(read_messages(messages), **sampling)

    def _answer(self, prompt: Any, **sampling: Any) -> str:
        from sm_nanogpt.launcher.models.sample import stream_answers

        pieces = stream_answers(*self._loaded, prompt, **sampling)
        return "".join(piece for (piece,) in pieces)

    def eval(
        self,
        *texts: str | Path,
        questions: str | Path | None = None,
        find: str | Path | None = None,
        me: str = "",
    ) -> Evaluation:
        """Evaluate the model on texts, which are paths or URIs as for `upload_data`, or uploads.

        questions and find are the files of `--questions` and `--find`. me is the person whose
        messages are the answers, in chats between people. Raises InputError if a file cannot be
        read, and ServiceError if the model looks ahead.
        """
        from sm_nanogpt.launcher.judge.evaluate import evaluate
        from sm_nanogpt.launcher.judge.texts import read_texts

        paths = [plain(text) for text in texts]
        return evaluate(
            self.id,
            self.model(),
            ", ".join(paths),
            read_texts(paths, self.settings, me=me),
            self.settings,
            find=path_or_none(find),
            questions=path_or_none(questions),
        )

    def report(self, path: str | Path | None = None) -> Path:
        """Write a report as one HTML file (default: report-ID.html), and return its path."""
        report_path = path_of(plain(path) or f"report-{self.id}.html")
        report = compare(read_runs([self.id], self.settings))
        write_bytes(str(report_path), report_html(report).encode())
        return report_path

    def page(
        self,
        path: str | Path | None = None,
        bits: int | None = None,
        moments: int | None = None,
    ) -> Path:
        """Write the model as one HTML page that computes by itself, and return its path.

        The default path is model-ID.html. `bits` is the number of bits in which each weight is
        stored (default: the fewest that hardly raise the loss). `moments` is the number of moments
        of the training that the page shows (default: as many of those that the run kept as fit into
        20 MB, or into the limit of `fit`). Raises InputError if an edited folder computes the
        model, or if more than one moment is asked for and the run kept none.
        """
        from sm_nanogpt.launcher.views.saved_page import save_model_page

        page_path = path_of(plain(path) or f"model-{self.id}.html")
        model_directory = self.model()
        model, tokenizer = self._loaded
        save_model_page(
            name=self.id,
            directory=model_directory,
            model=model,
            tokenizer=tokenizer,
            path=page_path,
            settings=self.settings,
            job=self.describe(),
            bits=bits,
            n_moments=moments,
        )
        return page_path

    def delete(self, keep_model: bool = False, *, confirmed: bool = False) -> None:
        """Delete the job and its files, here and on S3; with keep_model, keep its fetched model.

        Raises NotYours if the job is somebody else's, unless confirmed.
        """
        files = self.files(keep_model)
        if not confirmed:
            check_yours(files.job, self.settings)
        if keep_model:
            fetch.keep_model(files.job, self.settings)
        self.remove(files.sizes)
        self._last_description = None

    def resume(self, *, confirmed: bool = False, **changes: Any) -> Job:
        """Launch a job that continues from this job's checkpoint. changes: fields of Request."""
        return launch(Request(resume=self.id, **changes), self.settings, confirmed)

    def _repr_html_(self) -> str:
        try:
            description = self.describe()
        except LauncherError as error:
            return f"<pre>{escape(str(error))}</pre>"
        curve = None
        with suppress(LauncherError):  # that of an old job may have expired
            curve = self.curve()
        return card(description, curve)


class Plan(launching.Plan):
    """A job that is complete, checked and priced. It can be submitted, once."""

    def submit(self, confirmed: bool = False) -> Job:
        super().submit(confirmed)
        return Job(self.job_id, self.settings)


def path_or_none(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    return path_of(plain(path))


def with_full_ids(request: Request, settings: Settings) -> Request:
    """The request with the full ids of the jobs that it names."""
    ids = {}
    if request.resume is not None:
        with about("resume", request.resume):
            ids["resume"] = full_id(request.resume, settings, acts=True)
    for name in ("init_from", "teacher"):
        model = getattr(request, name)
        if model is not None:
            with about(name, model):
                ids[name] = full_id(model, settings, reads="model")
    return request.model_copy(update=ids)


def prepare(request: Request, settings: Settings | None = None) -> Plan:
    """Complete, check and price a job. A path as data is uploaded when the job is submitted.

    Without data it uses the last upload; with `resume`, fields that are left out come from that
    job. Raises InputError if the job cannot run.
    """
    settings = settings or load_settings()
    plan = launching.prepare(with_full_ids(request, settings), settings)
    return Plan(**vars(plan))


def launch(request: Request, settings: Settings | None = None, confirmed: bool = False) -> Job:
    """Start a training job and return it at once. Raises what prepare and Plan.submit raise."""
    return prepare(request, settings).submit(confirmed)


def forecast(
    request: Request, settings: Settings | None = None, max_cost: float | None = None
) -> Forecast:
    """What each size would be on the text of a request, from about two minutes of pilots here.

    The request may set instance, data, validation and entry_point. With max_cost, in USD, the
    forecast has the size of the lowest loss that a job on SageMaker may have for it. Each pilot is
    logged. Raises InputError if the request sets another field or nothing can be known, and
    ServiceError if a pilot fails.
    """
    return forecasting.forecast(request, settings or load_settings(), max_cost=max_cost)


def sweep(
    request: Request,
    values: Mapping[str, Iterable[Any]],
    seeds: int = 1,
    parallel: int = 1,
    settings: Settings | None = None,
    confirmed: bool = False,
) -> list[Job]:
    """Run a job for each combination of the values, with each of `seeds` seeds, to their ends.

    values: of hyperparameters, or of `size` or `preset`, as lists, ranges or arrays. `parallel` run
    at a time; max_cost is for all of them. Returns the jobs, that of the lowest loss first. Jobs
    that run when this is interrupted go on. Raises as `launch`.
    """
    settings = settings or load_settings()
    plan = plan_sweep(with_full_ids(request, settings), settings, values, seeds, parallel)
    if not confirmed and plan.backend.bills:
        check_confirmed(plan.worst_cost, request.max_cost, settings)
    events = begin_sweep(plan)
    logger.info(f"sweep: {plan.group.id}")
    for event in events:
        logger.info(f"{event.job_id} {event.what_happened}")
    return [Job(job.job_id, settings) for job in best_first(plan.group.newest)]


def job(reference: str = "latest", settings: Settings | None = None) -> Job:
    """The job with a full id, a name or a part of an id, or `latest`.

    A full id may be that of somebody else's job. It is not looked up before the job is used. Raises
    Missing if any other reference means no job.
    """
    settings = settings or load_settings()
    job_id = full_id(plain(reference), settings)
    if not FULL_ID.fullmatch(job_id):
        find(job_id, settings)  # raises Missing
    return Job(job_id, settings)


def jobs(
    limit: int | None = None,
    status: str | None = None,
    name: str | None = None,
    everyone: bool = False,
    settings: Settings | None = None,
) -> list[Job]:
    """Your jobs, or everyone's in the account, newest first; limit: so many at most.

    It reads no more jobs than it returns. It warns of jobs that cannot be read, and if SageMaker
    does not answer.
    """
    if status not in (None, *STATUSES):
        raise InputError(f"must be one of {', '.join(STATUSES)}", "", "status", status)
    settings = settings or load_settings()
    listing = Listing(settings, everyone, name)
    matching = (job for job in listing if status in (None, job.status))
    descriptions = list(islice(matching, limit))
    for unreadable in listing.unreadable:
        message = f"job {unreadable.job_id} is left out: {unreadable.error}"
        warnings.warn(message, stacklevel=2)
    if listing.failure is not None:
        warnings.warn(f"not all jobs are listed: {listing.failure}", stacklevel=2)
    return [Job(job.job_id, settings, job) for job in with_costs(descriptions, settings)]
