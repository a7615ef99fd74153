"""The places that jobs run in, behind one small protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from launcher.job import JobDescription, TrainingJob, UnreadableJob


class Backend(Protocol):
    """A place that jobs run in."""

    @property
    def place(self) -> str:
        """Where that is, in words that follow a job's id."""

    @property
    def poll_seconds(self) -> float:
        """How often to ask about a job that is waited for."""

    def check(self, job: TrainingJob, dry_run: bool = False) -> Any:
        """What this place decides about the job, for `submit` and `request`; logs what it runs in.

        Raises:
            InputError: this place cannot run the job.
        """

    def afford(self, job: TrainingJob, dry_run: bool) -> TrainingJob:
        """The job within its cost ceiling; logs what it may cost.

        Raises:
            InputError: the ceiling cannot be held, or the account may not run such a job.
        """

    def submit(self, job_id: str, job: TrainingJob, plan: Any) -> None:
        """Starts a job whose data is a URI; plan is from `check`."""

    def describe(self, job_id: str) -> JobDescription | None:
        """None when the job is not of this place."""

    def job(self, job_id: str) -> TrainingJob:
        """What was submitted."""

    def script(self, job_id: str, sha256: str) -> Path:
        """Where this machine keeps the script of this SHA-256 that trained the job."""

    def edited_script(self, job_id: str, job: TrainingJob) -> Path | None:
        """This machine's copy of the edited script that a job ran; None for the packaged one.

        Raises:
            InputError: there is no copy here.
        """

    def list(self) -> Iterator[JobDescription | UnreadableJob]:
        """Yield the jobs, newest first."""

    def stop(self, job_id: str) -> None:
        """Asks the job to stop, and returns at once."""

    def request(self, job_id: str, job: TrainingJob, plan: Any) -> dict[str, Any]:
        """What submit sends, without sending it. Raises InputError where none is sent."""

    def console_link(self, job_id: str) -> str | None:
        """Where a browser shows the job, if one can."""

    def logs(self, job_id: str, follow: bool, raw: bool = False) -> Iterator[str]:
        """What the script printed, by lines, without line ends; with follow, until the job ends.

        Outages of the network are reported meanwhile. raw adds what the container printed besides.
        """
