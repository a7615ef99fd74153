"""The protocol of backends: `local` runs jobs on this machine, `sagemaker` on SageMaker.

`submission` and `tracking` choose one by instance type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from launcher.curves import Row
from launcher.job import JobDescription, TrainingJob, UnreadableJob


class Backend(Protocol):
    """Runs jobs in one place."""

    @property
    def place(self) -> str:
        """Where that is, as in `job ID is ...`."""

    @property
    def poll_seconds(self) -> float:
        """Seconds between questions about a job that a command waits for."""

    def plan(self, job_id: str, job: TrainingJob) -> tuple[TrainingJob, Any]:
        """Check a job and limit it to its cost ceiling; log what it may cost.

        Returns:
            The job, and what `submit` needs besides.

        Raises:
            InputError: this backend cannot run the job, or the ceiling is too low.
        """

    def submit(self, job_id: str, job: TrainingJob, plan: Any) -> None:
        """Start a job, as `plan` returned it."""

    def describe(self, job_id: str) -> JobDescription | None:
        """Describe a job; None if it is not here."""

    def job(self, job_id: str) -> TrainingJob:
        """The job as it was submitted."""

    def list(self) -> Iterator[JobDescription | UnreadableJob]:
        """Yield the jobs, newest first."""

    def stop(self, job_id: str) -> None:
        """Ask a job to stop, and return at once."""

    def places(self, job_id: str) -> Sequence[str]:
        """URIs of the directories or prefixes with the files of a job."""

    def forget(self, job_id: str) -> None:
        """Remove a job whose files are deleted from the list of jobs."""

    def console_link(self, job_id: str) -> str | None:
        """URL of the job in a web console, if there is one."""

    def curve(self, job_id: str) -> tuple[Sequence[Row], str]:
        """The rows of a job's training curve so far, and where they were read."""

    def logs(self, job_id: str, follow: bool, raw: bool = False) -> Iterator[str]:
        """Yield the lines that the script printed; with follow, until the job ends.

        raw includes the lines of the SageMaker toolkit.
        """
