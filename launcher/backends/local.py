"""Jobs on this machine: real training in the container's own layout, without Docker.

A job is a directory, HOME/jobs/JOB-ID:

    job.json                what was submitted
    state.json              how it stands, written by its runner alone
    lock                    held by the runner as long as it lives
    stop                    there when somebody asked the job to stop; stop-now: asked again
    code/train.py           an edited script, which a job that goes on from this one runs too
    hosts/algo-1/           what /opt/ml is in a container: input, code, model, output, checkpoints
    runner.log              what the runner said, which tells why it could not start
    logs/algo-1.log         what each host printed; job.log has all of them in order
    output/model.tar.gz     where S3 would have them
    output/output.tar.gz

The runner (launcher.backends.local_runner) is a process of its own that outlives the command which
started it. Its lock tells whether it lives: the kernel frees it however the runner ends, so a job
whose processes are gone is never taken for a running one. To delete the directory is to delete the
job: the runner ends its ranks when job.json is gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from launcher import storage
from launcher.documents import (
    LARGEST,
    Count,
    Damaged,
    Document,
    Moment,
    Number,
    Scalar,
    open_file,
    parse,
)
from launcher.errors import InputError, ServiceError
from launcher.job import (
    JOB_ID,
    LOCAL_FIELDS,
    RUNNING,
    JobDescription,
    TrainingJob,
    UnreadableJob,
    newest_checkpoint,
)
from launcher.settings import Settings

T = TypeVar("T")

TAIL_BYTES = 1 << 14  # of a curve: more than a hundred rows
GONE = (
    "its processes are gone: they were killed, the machine was switched off, or the disk was full"
)
NOT_STARTED = "it could not be started"


# The runner takes the launcher from where this process has it, however it came there, and nothing
# else that lies beside it.
RUNNER = (
    "import sys; sys.path.insert(0, sys.argv.pop()); import launcher; del sys.path[0];"
    " from launcher.backends.local_runner import main; main()"
)


class Record(Document):
    """job.json."""

    job: TrainingJob
    hyperparameters: dict[str, Scalar]
    created: Moment
    processes_per_host: Count
    gpus_per_host: Count
    max_steps: Count
    resume_from: str | None

    @field_validator("job")
    @classmethod
    def _of_data(cls, job: TrainingJob) -> TrainingJob:
        if job.data is None:
            raise ValueError("names no data")
        return job


class State(Document):
    """state.json. given: the checkpoints to go on from, with their times in ns."""

    status: Literal["InProgress", "Stopping", "Completed", "Failed", "Stopped"] = "InProgress"
    secondary: str = "Starting"
    reason: str | None = None
    started: Moment | None = None
    ended: Moment | None = None
    given: dict[str, Count] = Field(default_factory=dict)


Row = dict[str, Number]  # a line of metrics.jsonl


class LocalBackend:
    """The Backend of `--instance local`."""

    place = "on this machine"
    poll_seconds = 0.2

    def __init__(self, settings: Settings) -> None:
        self.jobs_dir = settings.jobs_dir
        self.settings = settings

    def check(self, job: TrainingJob, dry_run: bool = False) -> tuple[int, int]:
        """Processes and GPUs of each host."""
        if dry_run:
            self.request("", job, (0, 0))  # which is refused
        processes, gpus = plan_processes(job)
        job.config(job.instance_count * processes)
        return processes, gpus

    def afford(self, job: TrainingJob, dry_run: bool) -> TrainingJob:
        return job

    def submit(self, job_id: str, job: TrainingJob, plan: tuple[int, int]) -> None:
        processes, gpus = plan
        directory = self.jobs_dir / job_id
        record = {
            "job": job.model_dump(mode="json", include=LOCAL_FIELDS),
            "hyperparameters": job.all_hyperparameters(),
            "created": time.time(),
            "processes_per_host": processes,
            "gpus_per_host": gpus,
            "max_steps": job.config(1).max_steps,
            "resume_from": str(self.jobs_dir / job.resume / CHECKPOINTS) if job.resume else None,
        }
        script = job.script.read_bytes()
        try:
            directory.mkdir(parents=True)
            try:
                self.start(directory, script, record)
            except OSError:  # what no command would list
                shutil.rmtree(directory, ignore_errors=True)
                raise
        except OSError as error:
            raise ServiceError(
                f"{directory}: {error.strerror or error}, so the job was not started; delete old"
                " jobs, or SM_NANOGPT_HOME names another place"
            ) from None

    def start(self, directory: Path, script: bytes, record: dict[str, Any]) -> None:
        """Writes down what the job is, and starts its runner."""
        (directory / "code").mkdir()
        (directory / "code" / "train.py").write_bytes(script)
        # The lock is taken here, before the job can be seen, and handed on: held without a gap.
        from launcher.backends.cpu import cores

        ranks = record["job"]["instance_count"] * record["processes_per_host"]
        with (directory / "lock").open("w") as lock, (directory / "runner.log").open("w") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_json(directory / "job.json", record)
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    RUNNER,
                    str(directory),
                    str(lock.fileno()),
                    str(Path(storage.__file__).parents[1].absolute()),
                ],
                cwd=directory,  # nothing here can be imported by mistake
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
                    or str(max(1, cores() // ranks)),
                    "PYTHONPATH": whole_paths(os.environ.get("PYTHONPATH", "")),
                    "SM_NANOGPT_HOME": str(self.settings.home),
                    "SM_NANOGPT_PROFILE": self.settings.profile,
                    "SM_NANOGPT_REGION": self.settings.region,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal is for the command alone
            )

    def describe(self, job_id: str) -> JobDescription | None:
        if not JOB_ID.fullmatch(job_id):
            return None
        with storage.reported(str(self.jobs_dir / job_id)):
            return self.read(job_id)

    def read(self, job_id: str) -> JobDescription | None:
        """The job as it stands. Raises OSError as well."""
        directory = self.jobs_dir / job_id
        record = read_document(directory / "job.json", Record)
        if record is None:
            return None
        alive = is_held(directory / "lock")
        there = read_document(directory / "state.json", State)
        state = there or State()
        status, reason = state.status, state.reason
        if status in RUNNING and not alive:
            status, reason = "Failed", GONE
            if there is None:
                reason = f"{NOT_STARTED}: {last_line(directory / 'runner.log')}"
        elif status == "InProgress" and (directory / "stop").exists():
            status = "Stopping"
        model = directory / "output" / "model.tar.gz"
        checkpoints = directory / CHECKPOINTS
        step = own_checkpoint(checkpoints, state.given)
        return JobDescription(
            job_id=job_id,
            status=status,
            secondary_status=state.secondary if status in RUNNING else status,
            instance=record.job.instance,
            instance_count=record.job.instance_count,
            created=record.created,
            data=record.job.data or "",
            hyperparameters=record.hyperparameters,
            failure_reason=reason,
            started=state.started,
            ended=state.ended,
            metrics=last_metrics(checkpoints / "metrics.jsonl", record.max_steps),
            model_uri=storage.to_uri(model) if status == "Completed" and model.exists() else None,
            checkpoint_uri=storage.to_uri(checkpoints) if step is not None else None,
            checkpoint_step=step,
        )

    def job(self, job_id: str) -> TrainingJob:
        record = read_document(self.jobs_dir / job_id / "job.json", Record)
        if record is None:
            raise ServiceError(f"there is no job {job_id!r}")
        if record.job.entry_point is None:
            return record.job
        # The copy that was run, not what became of it.
        return record.job.model_copy(update={"entry_point": self.script(job_id)})

    def script(self, job_id: str, sha256: str = "") -> Path:
        return self.jobs_dir / job_id / "code" / "train.py"

    def edited_script(self, job_id: str, job: TrainingJob) -> Path | None:
        return job.entry_point

    def list(self) -> Iterator[JobDescription | UnreadableJob]:
        names = sorted(
            (path.parent.name for path in self.jobs_dir.glob("*/job.json")), reverse=True
        )
        for name in names:
            try:
                description = self.describe(name)
            except ServiceError as error:
                yield UnreadableJob(name, error)
                continue
            if description is not None:
                yield description

    def stop(self, job_id: str) -> None:
        path = self.jobs_dir / job_id / "stop"
        (path.with_name("stop-now") if path.exists() else path).touch()

    def request(self, job_id: str, job: TrainingJob, plan: tuple[int, int]) -> dict[str, Any]:
        raise InputError("--dry-run shows the request to SageMaker; --instance local sends none")

    def console_link(self, job_id: str) -> str | None:
        return None

    def logs(self, job_id: str, follow: bool, raw: bool = False) -> Iterator[str]:
        path = self.jobs_dir / job_id / "logs" / "job.log"
        position, pending = 0, b""
        while True:
            description = self.describe(job_id)
            ended = description is None or not description.is_running
            if path.exists():
                with open_file(path) as file:  # as what is there may end inside a character
                    file.seek(position)
                    pending += file.read()
                    position = file.tell()
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", errors="replace")
            if ended or not follow:
                break
            time.sleep(0.1)
        if pending:
            yield pending.decode("utf-8", errors="replace")


CHECKPOINTS = "hosts/algo-1/checkpoints"


def plan_processes(job: TrainingJob) -> tuple[int, int]:
    """Processes and GPUs per host.

    The hosts of a local job share the machine's GPUs evenly, each GPU with one process; without
    GPUs there are as many processes as asked for, or as train.py finds fastest.

    Raises:
        InputError: it does not come out even.
    """
    import torch

    from launcher.backends.cpu import cpu_processes

    config = job.config(1)
    gpus = torch.cuda.device_count() if config.device in ("auto", "cuda") else 0
    if not gpus:
        if job.processes_per_instance:
            return job.processes_per_instance, 0
        # The hosts share this machine's cores, and MPS is one device.
        mps = config.device != "cpu" and torch.backends.mps.is_available()
        return (1 if mps or job.instance_count > 1 else cpu_processes(config)), 0
    if gpus % job.instance_count:
        raise InputError(
            f"--instance-count {job.instance_count}: cannot share {gpus} GPUs;"
            " --set device=cpu trains without them"
        )
    per_host = gpus // job.instance_count
    if job.processes_per_instance not in (None, per_host):
        raise InputError(
            f"--processes-per-instance {job.processes_per_instance}: each host has {per_host} GPUs,"
            " and each takes one process; --set device=cpu trains without them"
        )
    return per_host, per_host


def whole_paths(paths: str) -> str:
    """The same directories, for a process that works in another one."""
    return os.pathsep.join(str(Path(path).absolute()) for path in paths.split(os.pathsep) if paths)


def is_held(lock: Path) -> bool:
    """Whether some process holds the lock. Askers share it, so they do not disturb each other."""
    try:
        with open_file(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def own_checkpoint(directory: Path, given: dict[str, int]) -> int | None:
    """The step of the newest checkpoint that the job wrote, beside those that it was given.

    Of those the times are known, so that no clock which was set back meanwhile matters.
    """
    written = []
    for path in directory.glob("checkpoint-*.safetensors"):
        with suppress(FileNotFoundError):  # the training drops old ones meanwhile
            if path.stat().st_mtime_ns != given.get(path.name):
                written.append(path.name)
    return newest_checkpoint(written)


def tail(path: Path, size: int) -> list[bytes]:
    """The lines of the last bytes of a file, as many as size; none where no file is."""
    if not path.exists():
        return []
    with open_file(path) as file:
        if file.seek(max(0, path.stat().st_size - size)):
            file.readline()  # of which the beginning may be cut off
        return file.read(size).splitlines()


def last_line(path: Path) -> str:
    lines = [line.decode(errors="replace") for line in tail(path, TAIL_BYTES) if line.strip()]
    return lines[-1] if lines else "nothing is known"


def last_metrics(path: Path, max_steps: int) -> dict[str, Any] | None:
    """The newest numbers of the curve; the newest val_loss is carried on between evaluations.

    A followed job is asked ten times a second, so that only the end of a long curve is read.
    """
    rows: Row = {}
    lines = tail(path, TAIL_BYTES)
    if not any(b'"val_loss"' in line for line in lines):  # its evaluations are far apart
        lines = tail(path, LARGEST)
    for line in lines:
        with suppress(Damaged):  # a line that is being written
            rows.update(parse(line, Row, path))
    return {**rows, "max_steps": max_steps} if rows else None


def read_document(path: Path, kind: type[T]) -> T | None:
    """A document of a job. Raises ServiceError for one that is there and cannot be read."""
    try:
        return storage.read_document(str(path), kind)
    except Damaged as error:
        raise ServiceError(f"{error}; delete {path.parent} to delete the job") from None


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, as somebody may be reading."""
    with storage.replacing(path) as file:
        file.write(storage.json_bytes(value))
