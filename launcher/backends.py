"""The interface of the backends, which run jobs, and the table of all backends.

A new backend is a class in a file of its own, and a row of BACKENDS.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from sm_nanogpt.launcher.curve import Row
    from sm_nanogpt.launcher.description import JobDescription, UnreadableJob
    from sm_nanogpt.launcher.job import Request, TrainingJob
    from sm_nanogpt.launcher.settings import Settings

LOCAL = "local"  # the instance that is this machine

# The class for each kind of instance; the first pattern that matches decides. The classes are
# named and not imported, since Request, which they import, asks them which fields they take.
BACKENDS = {
    LOCAL: "sm_nanogpt.launcher.local.backend.LocalBackend",
    ".*": "sm_nanogpt.launcher.sagemaker.backend.SageMakerBackend",
}


class Backend(ABC):
    """Runs jobs in one place. A subclass declares the facts and implements the methods."""

    # -- facts that hold for every job ------------------------------------------------------------

    title: ClassVar[str]
    is_remote: ClassVar[bool]  # behind a network; lists of jobs are late and lack some facts
    bills: ClassVar[bool]  # jobs cost money: they have prices and a ceiling, and need consent
    stops_at_ctrl_c: ClassVar[bool]  # Ctrl-C in the command that launched a job stops the job
    saves_when_stopped: ClassVar[bool]  # a job that is stopped first writes a checkpoint
    shares_cores: ClassVar[bool]  # parallel jobs share the cores of one machine
    logs_more_than_script: ClassVar[bool]  # `logs` with `raw` also has lines of the service
    poll_seconds: float  # between two questions about a running job
    run_maker: ClassVar[str] = ""  # the RunMaker of a search here, as text; "": it has no runs here

    settings: Settings
    parallel = 1  # the number of parallel jobs, if they share cores

    def __init__(self, settings: Settings, attempts: int | None = None) -> None:
        """attempts: as for make_client of launcher/aws.py; a local backend needs none."""
        self.settings = settings

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the jobs are, as a phrase for messages, such as `in us-east-1`."""

    @classmethod
    @abstractmethod
    def why_not_configured(cls, settings: Settings) -> str:
        """Why commands do not ask this backend, or ''."""

    @classmethod
    def launched_last(cls, settings: Settings) -> Sequence[str]:
        """The ids of the jobs that this home launched last, which `list` may not have yet."""
        return ()

    # -- before a job ------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def takes_field(cls, name: str) -> bool:
        """True if this backend takes a field of a Request."""

    @classmethod
    @abstractmethod
    def check_fields(cls, request: Request) -> None:
        """Raise InputError if the backend refuses a field of a request."""

    @classmethod
    @abstractmethod
    def count_ranks(cls, request: Request) -> int:
        """The number of processes that will share a batch, as far as it is known before `check`."""

    @classmethod
    @abstractmethod
    def has_gpus(cls, instance: str) -> bool:
        """True if a job on this instance, or on one of several types, has GPUs."""

    @classmethod
    @abstractmethod
    def disk_of(cls, instance: str) -> Literal["home", "instance", "volume"]:
        """Which disk the files of a job have to fit on."""

    @classmethod
    def default_launcher(cls, instance: str) -> str | None:
        """The default launcher for an instance; None if there is no choice of launchers."""
        return None

    @abstractmethod
    def launch_settings(self) -> Settings:
        """The settings with the store that a job uses, and with its role, if it has one."""

    @abstractmethod
    def check(self, job: TrainingJob) -> Any:
        """Decide what the job leaves to the backend. Raises InputError if the job cannot run."""

    @abstractmethod
    def price(
        self, job: TrainingJob, earlier: tuple[TrainingJob, JobDescription] | None
    ) -> TrainingJob:
        """The job with a time limit that keeps it below its ceiling. earlier: the job that it
        resumes."""

    @abstractmethod
    def request(self, job_id: str, job: TrainingJob, placement: Any) -> dict[str, Any]:
        """What `submit` sends or records, which a dry run shows."""

    @abstractmethod
    def submit(
        self, job_id: str, job: TrainingJob, placement: Any, request: Mapping[str, Any]
    ) -> None:
        """Start a job. placement and request are what `check` and `request` returned."""

    # -- after -------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self, job_id: str) -> JobDescription | None:
        """The state of a job; None if there is no such job."""

    @abstractmethod
    def job(self, job_id: str) -> TrainingJob:
        """An existing job as it was submitted."""

    @abstractmethod
    def list(
        self, everyone: bool = False, name: str | None = None
    ) -> Iterator[JobDescription | UnreadableJob]:
        """Yield the caller's jobs, or everyone's, newest first. name: only jobs of this name."""

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """Ask a running job to stop."""

    @abstractmethod
    def directories(self, job_id: str) -> Sequence[str]:
        """The URIs of the directories, or prefixes of S3, that hold the files of a job."""

    @abstractmethod
    def forget(self, job_id: str) -> None:
        """Delete what remains of a job whose files were deleted."""

    @abstractmethod
    def curve(self, job_id: str) -> tuple[Sequence[Row], str]:
        """The rows of a job's training curve so far, and the location of their file or log."""

    @abstractmethod
    def logs(
        self, job_id: str, follow: bool, raw: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        """Yield the lines that the script printed. follow: wait for new lines until the job ends.

        raw: include the lines of the service. tail: yield only this number of last lines.
        """

    def console_link(self, job_id: str) -> str | None:
        """The address of a job's page in the console of its service; None if it has none."""
        return None

    def other_owner(self, job: JobDescription) -> str:
        """The owner of another caller's job; '' for a job of the caller."""
        return ""

    @classmethod
    @abstractmethod
    def check_no_later(cls, job: JobDescription, settings: Settings, acts: bool) -> None:
        """Log that a later job than `job` is where these settings do not look.

        acts: the job is to be changed; then this raises InputError.
        """


def load_object(path: str) -> Any:
    """The class or function that a table names by its module and name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def backend_class(instance: str) -> type[Backend]:
    """The backend that runs jobs on an instance, or on one of several types."""
    for pattern, path in BACKENDS.items():
        if re.fullmatch(pattern, instance, re.DOTALL):
            backend: type[Backend] = load_object(path)
            return backend
    raise AssertionError(f"no backend for {instance}")  # the last pattern matches all


def rents_gpus(instance: str) -> bool:
    """True if a job on this instance is billed for GPUs."""
    backend = backend_class(instance)
    return backend.bills and backend.has_gpus(instance)


def backend_for(instance: str, settings: Settings) -> Backend:
    return backend_class(instance)(settings)


def all_backends() -> list[type[Backend]]:
    """The backends in the order of the table."""
    return [load_object(path) for path in BACKENDS.values()]


def configured_backends(settings: Settings) -> list[type[Backend]]:
    """The backends that may have jobs."""
    return [backend for backend in all_backends() if not backend.why_not_configured(settings)]
