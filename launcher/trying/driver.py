"""The train.py of a job that makes the runs of a search, one after another on each GPU.

The toolkit starts a process of this file for each GPU. Each process makes its share of the runs in
plan.json. No run is trusted. Each has a user of its own, who can read the run's folder, its text,
and Python's packages, and can write only into the run's directory. A filter of system calls closes
what is not a file. A run reaches no network, as the job has none. Namespaces of users are not
available in the containers of jobs.

The container does not have the launcher, so this file imports only Python's standard library.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

JOB_FOLDER = Path(__file__).resolve().parent  # of the job: it has this file, and the runs' folders
FIRST_USER_ID = 61_000  # the user id of the first run, which no other user of the image has
SHARED_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")  # directories in which all users may write
FILTER_FILES = ("pyseccomp.py", "syscalls.py")  # the files of the filter, beside this file
# This program loads the filter into its own process, and then becomes the run.
FILTER_PROGRAM = """
import os, sys
directory, may_fork, *command = sys.argv[1:]
sys.path.insert(0, directory)
import syscalls
if syscalls.is_available():
    syscalls.call_filter(may_fork == "True").load()
os.execv(command[0], command)
"""
NO_FILTER_WARNING = """\
warning: this image has no libseccomp: runs can share memory of System V and keyrings, and reach
sockets of this container, and the time of processes that they start may not count
"""


@dataclass(frozen=True)
class PlannedRun:
    """A run of the plan: its index there, the name of its training folder, and its seed."""

    index: int
    folder: str
    seed: int

    @property
    def user_id(self) -> int:
        return FIRST_USER_ID + self.index


class Driver:
    """Makes the runs of one GPU, each in a new directory below `directory`.

    rank is the number of this process among the world_size processes that share the runs.
    """

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self.directory = directory
        self.rank = rank
        self.world_size = world_size
        self.start_time = time.monotonic()
        self.plan = json.loads((JOB_FOLDER / "plan.json").read_text())
        # On a GPU, runs are timed by the clock, and may start the compiler of kernels.
        self.has_gpu = os.environ.get("SM_NUM_GPUS") not in (None, "", "0")
        self.filter = directory / "filter"
        self.text = directory / "text"

    def set_up(self, text: Path) -> None:
        """Copy the text and the filter, which all runs read, so that any user can read them."""
        self.directory.chmod(0o711)
        copy_files(text, self.text)
        self.filter.mkdir()
        for name in FILTER_FILES:
            shutil.copyfile(JOB_FOLDER / name, self.filter / name)

    def runs(self) -> list[PlannedRun]:
        """The runs of this process."""
        runs = []
        for index, (folder, seed) in enumerate(self.plan["runs"]):
            runs.append(PlannedRun(index, folder, seed))
        return runs[self.rank :: self.world_size]

    def make_all(self, models: Path) -> None:
        """Make the runs of this process, and log how each ended."""
        for run in self.runs():
            facts = self.make(run, models / f"run-{run.index}")
            outcome = facts["problem"] or f"{facts['seconds']:.1f} s"
            number = f"run {run.index + 1} of {len(self.plan['runs'])}"
            # In one write, since other processes write their lines to the same log.
            sys.stdout.write(f"{number}: {run.folder} seed {run.seed}: {outcome}\n")
            sys.stdout.flush()

    def make(self, run: PlannedRun, target: Path) -> dict[str, Any]:
        """Make a run in the time that is left, and write its model and its facts into `target`."""
        folder = self.directory / run.folder
        if not folder.exists():
            copy_files(JOB_FOLDER / run.folder, folder)
        output = self.directory / f"run-{run.index}"
        output.mkdir(mode=0o700)
        os.chown(output, run.user_id, run.user_id)

        seconds, problem = self.train(run, folder, output)
        target.mkdir()
        if not problem:
            try:
                pack(output / "model", target / "model.tar.gz", self.plan["largest_model"])
            except OSError as error:
                problem = f"its model cannot be read: {error}"
        shutil.rmtree(output)
        facts = {"seconds": seconds, "problem": problem}
        (target / "facts.json").write_text(json.dumps(facts))
        return facts

    def train(self, run: PlannedRun, folder: Path, output: Path) -> tuple[float, str]:
        """Train by a folder; return the seconds that it took, and its problem, or ''."""
        seconds_left = max(0.0, self.plan["seconds"] - (time.monotonic() - self.start_time))
        limit = min(self.plan["limit"], seconds_left)
        problem = ""
        began = self.seconds_used()
        with (self.directory / "log").open("w+b") as log:
            process = self.start(run, folder, output, log)
            try:
                status = process.wait(limit)
                if status:
                    problem = last_line(log) or f"it ended with status {status}"
            except subprocess.TimeoutExpired:
                problem = "the job's time was over"
                if limit < seconds_left:
                    problem = f"it took over {limit:.0f} s"
            seconds = self.seconds_used() - began
            kill_processes_of(run.user_id)
            process.wait()
        return seconds, problem

    def start(
        self, run: PlannedRun, folder: Path, output: Path, log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start the run as its user, behind the filter."""
        filtered = [sys.executable, "-P", "-c", FILTER_PROGRAM, str(self.filter), str(self.has_gpu)]
        command = [*filtered, sys.executable, str(folder / "train.py")]
        values = {**self.plan["values"], "seed": run.seed, "data": self.text, "out": output}
        for name, value in values.items():
            command.append(f"--{name}={value}")
        return subprocess.Popen(
            command,
            env=self.environment(output),
            cwd=output,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            user=run.user_id,
            group=run.user_id,
            extra_groups=[],
        )

    def seconds_used(self) -> float:
        """Seconds by the clock, on a GPU; on a CPU, the processor time of all runs so far."""
        if self.has_gpu:
            return time.monotonic()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def environment(self, output: Path) -> dict[str, str]:
        """The environment variables of a run.

        Few are passed on: some variables of the container would make train.py a rank of a job, and
        some may be secret.
        """
        passed_on = {}
        for name in self.plan["variables"]:
            if name in os.environ:
                passed_on[name] = os.environ[name]
        n_threads = max(1, len(os.sched_getaffinity(0)) // self.world_size)
        return {
            **passed_on,
            "OMP_NUM_THREADS": str(n_threads),
            # Intel's library counts cores by a call that the filter forbids, and would take one.
            "MKL_DYNAMIC": "FALSE",
            "CUDA_VISIBLE_DEVICES": str(self.rank),
            # The directories in which compilers write.
            "HOME": str(output),
            "TMPDIR": str(output),
            "USER": "run",
            # Without this, train.py would use the directories of the container.
            "SAGEMAKER_BASE_DIR": str(output),
        }


def main() -> None:
    env = os.environ
    rank = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK") or env.get("LOCAL_RANK") or 0)
    world_size = int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE") or env.get("LOCAL_WORLD_SIZE") or 1)
    models = Path(env["SM_MODEL_DIR"])
    os.umask(0o022)
    close_directories(models.parent)
    with TemporaryDirectory() as name:
        driver = Driver(Path(name), rank, world_size)
        driver.set_up(Path(env["SM_CHANNEL_TRAINING"]))
        if rank == 0 and not has_filter(driver.filter):
            sys.stdout.write(NO_FILTER_WARNING)
        driver.make_all(models)


def close_directories(base: Path) -> None:
    """Let other users reach Python, wherever the image has it, and close directories to them.

    These are `base`, and SHARED_DIRECTORIES, through which they could reach each other.
    """
    for python in (sys.executable, sys.prefix, sys.base_prefix):
        for parent in Path(python).resolve().parents:
            if not parent.stat().st_mode & 0o001:
                parent.chmod(0o711)
    for directory in SHARED_DIRECTORIES:
        Path(directory).chmod(0o711)
    base.chmod(0o700)


def has_filter(directory: Path) -> bool:
    """True if this image has libseccomp."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import syscalls"
    code += "; sys.exit(not syscalls.is_available())"
    ended = subprocess.run([sys.executable, "-P", "-c", code, str(directory)])
    return ended.returncode == 0


def pack(model: Path, target: Path, max_bytes: int) -> None:
    """Pack the directory of a model; links in it stay links.

    Raises OSError if the directory is a link, or has over max_bytes.
    """
    n_bytes = sum(path.lstat().st_size for path in model.rglob("*"))
    if model.is_symlink() or n_bytes > max_bytes:
        raise OSError(f"it is a link, or takes over {max_bytes:,} bytes")
    with tarfile.open(target, "w:gz", compresslevel=1) as tar:
        tar.add(model, "model")


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a directory, so that any user can read them."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def last_line(log: IO[bytes]) -> str:
    """The last line of a log that is not blank, or ''."""
    n_bytes = log.seek(0, os.SEEK_END)
    log.seek(max(0, n_bytes - 4096))
    text = log.read().decode(errors="replace").strip()
    return text.rpartition("\n")[2]


def kill_processes_of(user_id: int) -> None:
    """Kill all processes of a user, by its id."""
    code = f"import os; os.getuid() == {user_id} and os.kill(-1, 9)"
    command = [sys.executable, "-I", "-c", code]
    subprocess.run(command, user=user_id, group=user_id, extra_groups=[], stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
