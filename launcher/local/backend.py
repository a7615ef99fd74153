"""The backend for this machine, which trains in the directories of a container, without Docker.

A job is a directory, HOME/jobs/JOB-ID:

    job.json                the job, as it was submitted
    state.json              its state, which only the runner writes
    lock                    the runner holds it while it lives
    stop                    exists if a user asked the job to stop; stop-now: asked twice
    code/                   the training folder
    hosts/algo-1/           /opt/ml of a container: input, code, model, output, checkpoints
    runner.log              output of the runner, such as why it could not start
    logs/job.log            output of train.py
    output/model.tar.gz     as in S3
    output/output.tar.gz

The runner (launcher.local.runner) is a separate process that outlives the command which started it.
Its lock shows whether it lives: the kernel releases the lock however the runner ends.
To delete a job, delete its directory: the runner ends its ranks when job.json is gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.files import open_file
from sm_nanogpt.entry_point.startup import open_standard_streams
from sm_nanogpt.launcher.backends import Backend
from sm_nanogpt.launcher.curve import (
    MAX_CURVE_BYTES,
    Row,
    newest_curve_file,
    newest_values,
    rows_of_file,
)
from sm_nanogpt.launcher.description import (
    RUNNING,
    JobDescription,
    UnreadableJob,
    checkpoints_among,
    time_of,
)
from sm_nanogpt.launcher.errors import InputError, LauncherError, ServiceError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.files.documents import Count, Damaged, Document, Moment, Scalar
from sm_nanogpt.launcher.files.moved import find_moved
from sm_nanogpt.launcher.job import COMMON_FIELDS, JOB_ID, Request, TrainingJob
from sm_nanogpt.launcher.local.process import python_command
from sm_nanogpt.launcher.machines import cpu_processes
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source

logger = logging.getLogger(__name__)

T = TypeVar("T")

TAIL_BYTES = 1 << 18  # of a curve, which are more than a thousand rows
GONE_REASON = "its processes are gone: killed, the machine was switched off, or the disk was full"


class Record(Document):
    """job.json."""

    job: TrainingJob
    hyperparameters: dict[str, Scalar]
    created: Moment
    processes_per_host: Count
    gpus_per_host: Count


class State(Document):
    """state.json."""

    status: Literal["InProgress", "Stopping", "Completed", "Failed", "Stopped"] = "InProgress"
    secondary: str = "Starting"
    reason: str | None = None
    started: Moment | None = None
    ended: Moment | None = None


@dataclass(frozen=True)
class LocalPlacement:
    """The processes and the GPUs of this machine that a job uses."""

    processes: int
    gpus: int


class LocalBackend(Backend):
    """Runs the jobs of `--instance local`."""

    title = "this machine"
    is_remote = False
    bills = False
    stops_at_ctrl_c = True
    saves_when_stopped = True
    shares_cores = True
    logs_more_than_script = False
    poll_seconds = 0.2
    run_maker = "sm_nanogpt.launcher.trying.local.LocalRuns"
    location = "on this machine"

    def __init__(self, settings: Settings, attempts: int | None = None) -> None:
        super().__init__(settings)
        self.jobs_dir = settings.home / "jobs"

    @classmethod
    def why_not_configured(cls, settings: Settings) -> str:
        return ""

    @classmethod
    def takes_field(cls, name: str) -> bool:
        return name in COMMON_FIELDS

    @classmethod
    def check_fields(cls, request: Request) -> None:
        for name, value in sorted(request.explicit_fields().items()):
            if value is not False and not cls.takes_field(name):
                raise InputError(f"is for SageMaker, not for {request.instance}", field=name)
        n_hosts = request.instance_count
        if n_hosts not in (None, 1):
            problem = "this machine is one host, of several processes"
            raise InputError(problem, field="instance_count", value=n_hosts)

    @classmethod
    def count_ranks(cls, request: Request) -> int:
        import torch

        return request.processes_per_instance or torch.cuda.device_count() or 1

    @classmethod
    def has_gpus(cls, instance: str) -> bool:
        import torch

        return torch.cuda.is_available()

    @classmethod
    def disk_of(cls, instance: str) -> Literal["home"]:
        return "home"

    def launch_settings(self) -> Settings:
        return self.settings.model_copy(update={"store": ""})

    def check(self, job: TrainingJob) -> LocalPlacement:
        placement = plan_processes(job)
        job.config(placement.processes)
        return placement

    def price(self, job: TrainingJob, earlier: object) -> TrainingJob:
        return job  # it costs nothing

    def request(self, job_id: str, job: TrainingJob, placement: LocalPlacement) -> dict[str, Any]:
        return {
            "job": job.model_dump(mode="json", include=COMMON_FIELDS),
            "hyperparameters": job.all_hyperparameters(),
            "processes_per_host": placement.processes,
            "gpus_per_host": placement.gpus,
        }

    def submit(
        self, job_id: str, job: TrainingJob, placement: LocalPlacement, request: Mapping[str, Any]
    ) -> None:
        directory = self.jobs_dir / job_id
        record = {**request, "created": time.time()}
        try:
            with storage.errors_about(str(directory)):
                self.start(directory, job.source, record)
        except LauncherError:
            is_listed = (directory / "job.json").exists()
            if not is_listed:  # the user can look at a listed job, and delete it
                shutil.rmtree(directory, ignore_errors=True)
            raise

    def start(self, directory: Path, source: Source, record: dict[str, Any]) -> None:
        """Write the files of a job, and start its runner, which holds its lock."""
        n_threads = max(1, cores() // (record["processes_per_host"] * self.parallel))
        variables = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(n_threads),
            "SM_NANOGPT_HOME": str(self.settings.home),
            "SM_NANOGPT_PROFILE": self.settings.profile,
            "SM_NANOGPT_REGION": self.settings.region,
        }
        open_standard_streams()  # or the lock may get the number of stdin, and not be passed on
        source.write(directory / "code")
        # Take the lock before the job is visible, and pass it on, so that it is held without a gap.
        with (directory / "lock").open("w") as lock, (directory / "runner.log").open("w") as log:
            locks.lock(lock)
            storage.write_json(str(directory / "job.json"), record)
            subprocess.Popen(
                python_command("sm_nanogpt.launcher.local.runner", directory, lock.fileno()),
                cwd=directory,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal must reach only the command
            )

    def describe(self, job_id: str) -> JobDescription | None:
        if not JOB_ID.fullmatch(job_id):
            return None
        with storage.errors_about(str(self.jobs_dir / job_id)):
            return self.read(job_id)

    def read(self, job_id: str) -> JobDescription | None:
        """Describe a job; None if there is no such job. Also raises OSError."""
        directory = self.jobs_dir / job_id
        record = self.record(job_id)
        if record is None:
            return None
        job = record.job
        state = read_state(directory)
        model = directory / "output" / "model.tar.gz"
        has_model = state.status == "Completed" and model.exists()
        checkpoints = directory / CHECKPOINTS
        names = [path.name for path in checkpoints.glob("*.safetensors")]
        step = max(checkpoints_among(names), default=None)
        return JobDescription(
            job_id=job_id,
            status=state.status,
            secondary_status=state.secondary if state.status in RUNNING else state.status,
            instance=job.instance,
            instance_count=job.instance_count,
            created=record.created,
            data=job.data,
            hyperparameters=record.hyperparameters,
            name=job.name,
            summary=job.summary,
            expected=job.expected,
            page_limit=job.page_limit,
            inputs=job.channels,
            failure_reason=state.reason,
            started=state.started,
            ended=state.ended,
            metrics=last_metrics(self.curve_file(job_id)),
            model_uri=storage.to_uri(model) if has_model else None,
            checkpoint_uri=None if step is None else storage.to_uri(checkpoints),
            checkpoint_step=step,
        )

    def job(self, job_id: str) -> TrainingJob:
        record = self.record(job_id)
        assert record is not None
        return record.job

    def record(self, job_id: str) -> Record | None:
        """Read the record of a job, with the present locations of its texts and models.

        Returns None if there is no such job.
        """
        record = read_document(self.jobs_dir / job_id / "job.json", Record)
        if record is None:
            return None
        inputs = {}
        for name in ("data", "validation", "init_from", "teacher"):
            uri = getattr(record.job, name)
            if uri is not None:
                inputs[name] = find_moved(uri, self.settings)
        return record.model_copy(update={"job": record.job.model_copy(update=inputs)})

    def list(
        self, everyone: bool = False, name: str | None = None
    ) -> Iterator[JobDescription | UnreadableJob]:
        """Yield the jobs, newest first. name: only jobs of this name. All jobs are the caller's."""
        for path in sorted(self.jobs_dir.glob("*/job.json"), key=by_launch, reverse=True):
            job_id = path.parent.name
            try:
                description = self.describe(job_id)
            except ServiceError as error:
                yield UnreadableJob(job_id, error)
                continue
            if description is not None and name in (None, description.name):
                yield description

    @classmethod
    def check_no_later(cls, job: JobDescription, settings: Settings, acts: bool) -> None:
        pass  # jobs of this machine are nowhere else

    def stop(self, job_id: str) -> None:
        path = self.jobs_dir / job_id / "stop"
        with storage.errors_about(str(path.parent)):
            if path.exists():
                path = path.with_name("stop-now")
            path.touch()

    def directories(self, job_id: str) -> Sequence[str]:
        return [storage.to_uri(self.jobs_dir / job_id)]

    def forget(self, job_id: str) -> None:
        pass  # nothing remains of a job without its files

    def curve_file(self, job_id: str) -> Path:
        directory = self.jobs_dir / job_id / CHECKPOINTS
        return directory / newest_curve_file(path.name for path in directory.glob("metrics-*"))

    def curve(self, job_id: str) -> tuple[Sequence[Row], str]:
        path = self.curve_file(job_id)
        with storage.errors_about(str(path)):
            return rows_of_file(tail(path, MAX_CURVE_BYTES), path), str(path)

    def logs(
        self, job_id: str, follow: bool, raw: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        lines = self.all_lines(job_id, follow)
        return lines if tail is None else iter(deque(lines, maxlen=tail))

    def all_lines(self, job_id: str, follow: bool) -> Iterator[str]:
        """Yield the lines that the script printed. follow: wait for more until the job ends."""
        path = self.jobs_dir / job_id / "logs" / "job.log"
        position = 0
        incomplete_line = b""  # it may end inside a character
        while True:
            description = self.describe(job_id)
            has_ended = description is None or not description.is_running
            if path.exists():
                with storage.errors_about(str(path)), open_file(path) as file:
                    file.seek(position)
                    content = incomplete_line + file.read()
                    position = file.tell()
                *lines, incomplete_line = content.split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", errors="replace")
            if has_ended or not follow:
                break
            time.sleep(0.1)
        if incomplete_line:
            yield incomplete_line.decode("utf-8", errors="replace")


HOST = "algo-1"
CHECKPOINTS = f"hosts/{HOST}/checkpoints"


def plan_processes(job: TrainingJob) -> LocalPlacement:
    """Choose the numbers of processes and GPUs.

    Each GPU gets one process. Without GPUs, the job has the requested number of processes, or the
    number with which the CPU trains fastest.
    """
    import torch

    config = job.config()
    requested = job.processes_per_instance
    n_gpus = torch.cuda.device_count() if config.device in ("auto", "cuda") else 0
    if n_gpus:
        if requested not in (None, n_gpus):
            raise InputError(
                f"this machine has {n_gpus} GPUs, and each takes one process",
                code="train-on-cpu",
                field="processes_per_instance",
                value=requested,
            )
        return LocalPlacement(n_gpus, n_gpus)
    if requested:
        return LocalPlacement(requested, 0)
    if config.device != "cpu" and torch.backends.mps.is_available():
        return LocalPlacement(1, 0)  # MPS is one device
    return LocalPlacement(cpu_processes(config), 0)


def read_state(directory: Path) -> State:
    """Read the state of the job in a directory. If its runner is gone, it has failed."""
    path = directory / "state.json"
    state = read_document(path, State) or State()
    if state.status in RUNNING and not locks.is_locked(directory / "lock"):
        last_state = read_document(path, State)  # the job may have just ended
        state = last_state or State()
        if state.status in RUNNING:
            reason = GONE_REASON
            if last_state is None:
                reason = f"it could not be started: {last_log_line(directory / 'runner.log')}"
            return state.model_copy(update={"status": "Failed", "reason": reason})
    if state.status == "InProgress" and (directory / "stop").exists():
        return state.model_copy(update={"status": "Stopping"})
    return state


def by_launch(path: Path) -> tuple[str, float]:
    """A key to sort the records of jobs: the time in the id, and then the time of the file."""
    with suppress(FileNotFoundError):  # the job was just deleted
        return time_of(path.parent.name), path.stat().st_mtime
    return "", 0.0


def tail(path: Path, n_bytes: int) -> list[bytes]:
    """Read the lines in the last n_bytes of a file; [] if there is no file."""
    if not path.exists():
        return []
    with open_file(path) as file:
        if file.seek(max(0, path.stat().st_size - n_bytes)):
            file.readline()  # the first line may be cut
        return file.read(n_bytes).splitlines()


def last_log_line(path: Path) -> str:
    """Read the last line of a log that is not blank; `nothing is known` if there is none."""
    lines = [line for line in tail(path, TAIL_BYTES) if line.strip()]
    return lines[-1].decode(errors="replace") if lines else "nothing is known"


def last_metrics(path: Path) -> dict[str, Any] | None:
    """Read the newest value of each metric; None if there is none.

    Only the end of a long curve is read, since a command that follows a job calls this five times a
    second.
    """
    rows = rows_of_file(tail(path, TAIL_BYTES), path)
    return newest_values(rows) or None


def read_document(path: Path, kind: type[T]) -> T | None:
    """Read a document of a job. Raises ServiceError if it exists and cannot be read."""
    try:
        return storage.read_document(str(path), kind)
    except Damaged as error:
        raise ServiceError(f"{error}; delete {path.parent} to delete the job") from None
