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

    def check(self, job: TrainingJob, dry_run: bool = False) -> Any:
        """Decide what the job leaves open, for `submit` and `request`.

        Raises:
            InputError: this backend cannot run the job.
        """

    def afford(self, job: TrainingJob, dry_run: bool) -> TrainingJob:
        """Limit the job to its cost ceiling; log what it may cost.

        Raises:
            InputError: the ceiling is too low, or a quota of the account is.
        """

    def submit(self, job_id: str, job: TrainingJob, plan: Any) -> None:
        """Start a job whose data is a URI; plan comes from `check`."""

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

    def request(self, job_id: str, job: TrainingJob, plan: Any) -> dict[str, Any]:
        """What `submit` would send. Raises InputError if this backend sends nothing."""

    def console_link(self, job_id: str) -> str | None:
        """URL of the job in a web console, if there is one."""

    def curve(self, job_id: str) -> tuple[Sequence[Row], str]:
        """The rows of a job's training curve so far, and where they were read."""

    def logs(self, job_id: str, follow: bool, raw: bool = False) -> Iterator[str]:
        """Yield the lines that the script printed; with follow, until the job ends.

        raw includes the lines of the SageMaker toolkit.
        """
