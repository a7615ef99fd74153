"""Real trainings for the tests: train.py as processes, in time limits, with nothing left behind."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import warm

from sm_nanogpt.entry_point import train

SCRIPT = Path(train.__file__).resolve()
# Code that makes `train` all that the files of the folder define.
PROBE = f"""\
import importlib, sys, types
sys.path.insert(0, {str(SCRIPT.parents[1])!r})
names = {sorted(path.stem for path in SCRIPT.parent.glob("[a-z]*.py"))!r}
modules = [importlib.import_module("sm_nanogpt.entry_point." + name) for name in names]
found = {{k: v for m in modules for k, v in vars(m).items() if k[0] != "_"}}
train = types.SimpleNamespace(**found)
"""
LIMIT = 240.0  # seconds until a training counts as hung; some test machines are slow

# Trainings of the tests compute the same on every machine: in the precision that stands here, and
# not in that of the CPU, and with one thread per process, which `environment` sets. A test that is
# about precision or threads sets its own.
SMALL: dict[str, Any] = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    block_size=32,
    batch_size=12,
    max_steps=10,
    log_interval=5,
    eval_interval=5,
    eval_tokens=2048,
    sample_length=0,
    device="cpu",
    precision="float32",
)
# A run that ends by a signal, or because a rank hangs for 5 seconds.
ENDLESS: dict[str, Any] = {**SMALL, "max_steps": 10**6, "hang_seconds": 5}


def command_line(**values: Any) -> list[str]:
    """A command line, as the SageMaker toolkit writes it."""
    arguments = []
    for name, value in values.items():
        arguments += [f"--{name}", str(value)]
    return arguments


def environment(**extra: str) -> dict[str, str]:
    """This environment without a trace of a launcher, with one thread per process and no GPU."""
    foreign = re.compile(
        r"(SM_|OMPI_|PMIX_|TORCHELASTIC_|SAGEMAKER_)"
        r"|(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
    )
    variables = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    return {**variables, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **extra}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def make_hosts(base: Path, text: str | Sequence[str], n_hosts: int = 1) -> list[dict[str, str]]:
    """Hosts laid out as SageMaker lays out its containers; returns the environment of each.

    Several texts are those of the hosts in turn.
    """
    names = [f"algo-{i + 1}" for i in range(n_hosts)]
    port = str(free_port())
    environments = []
    for index, name in enumerate(names):
        root = base / name
        training = root / "input/data/training"
        training.mkdir(parents=True)
        host_text = text if isinstance(text, str) else text[index]
        (training / "input.txt").write_text(host_text, encoding="utf-8", newline="")
        config = root / "input/config"
        config.mkdir()
        (root / "output").mkdir()
        (config / "resourceconfig.json").write_text(
            json.dumps({"current_host": name, "hosts": names})
        )
        environments.append(
            environment(
                SAGEMAKER_BASE_DIR=str(root),
                SM_HOSTS=json.dumps(names),
                SM_CURRENT_HOST=name,
                SM_NUM_GPUS="0",
                SM_CHANNEL_TRAINING=str(training),
                SM_MODEL_DIR=str(root / "model"),
                SM_OUTPUT_DATA_DIR=str(root / "output/data"),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
        )
    return environments


@dataclass(frozen=True)
class Ended:
    """How a training ended: its exit status and all it printed."""

    status: int
    output: str

    @property
    def last_line(self) -> str:
        return self.output.rstrip("\n").rpartition("\n")[2]


@contextlib.contextmanager
def started(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, str(SCRIPT)),
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.STDOUT,
) -> Iterator[subprocess.Popen[str]]:
    """A running training, whose processes are all gone afterwards."""
    env = dict(env or environment())
    process = warm.replacing(warm.Process).Popen(
        [*command, *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a training and all the processes that it started, as of a power cut."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def ended(process: subprocess.Popen[str], limit: float = LIMIT) -> Ended:
    output, _ = process.communicate(timeout=limit)
    return Ended(process.returncode, output)


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, str(SCRIPT)),
) -> Ended:
    with started(arguments, cwd=cwd, env=env, command=command) as process:
        return ended(process)


def run_hosts(
    arguments: Sequence[str],
    *,
    cwd: Path,
    envs: Sequence[Mapping[str, str]],
    command: Sequence[str] = (sys.executable, str(SCRIPT)),
) -> list[Ended]:
    """The same training started on each host, alone."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(arguments, cwd=cwd, env=env, command=command))
            for env in envs
        ]
        return [ended(process) for process in processes]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The pids of the ranks that a training started on its host, in their order."""
    listed = subprocess.check_output(["ps", "-A", "-o", "pid=", "-o", "ppid="], text=True)
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    ranks = [pid for pid, parent in pairs if parent == process.pid]
    return sorted(ranks, key=lambda pid: (pid < process.pid, pid))  # the system starts anew at 1


def listening(pids: Collection[int]) -> set[str]:
    """The addresses at which processes listen (Linux)."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed by now
                inodes.update(re.findall(r"^socket:\[(\d+)\]$", str(file.readlink())))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            local, state, inode = columns[1], columns[3], columns[9]
            if state == "0A" and inode in inodes:  # LISTEN
                raw = b"".join(
                    int(local[i : i + 8], 16).to_bytes(4, sys.byteorder)
                    for i in range(0, len(local) - 5, 8)
                )
                addresses.add(str(ipaddress.ip_address(raw)))
    return addresses


def wait_for_line(
    process: subprocess.Popen[str], start: str, stream: IO[str] | None = None
) -> list[str]:
    """Reads the output up to the first line that begins so; returns the lines so far."""
    stream = stream or process.stdout
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line)
        if line.startswith(start):
            return lines
    raise AssertionError(f"it ended without a line {start!r}:\n{''.join(lines)}")


def wait_for_file(directory: Path, pattern: str, limit: float = LIMIT) -> Path:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        for path in directory.glob(pattern):
            return path
        time.sleep(0.01)
    raise AssertionError(f"no {pattern} in {directory}")


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of the last start in a directory of checkpoints or of output."""
    file = max(directory.glob("metrics*.jsonl"))
    return [json.loads(line) for line in file.read_text().splitlines()]


FUTURE = "from __future__ import annotations\n"
USED = "import json, os, signal, socket, sys, threading, time, warnings\n"


def edited_folder(folder: Path, *edits: tuple[str, str]) -> tuple[str, str]:
    """The command of a copy of the training folder with replaced pieces, each there once."""
    shutil.copytree(SCRIPT.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in edits:
        sources = {file: file.read_text() for file in folder.glob("*.py")}
        (file,) = [file for file, source in sources.items() if old in source]
        assert sources[file].count(old) == 1, f"not there once: {old}"
        source = sources[file].replace(old, new)
        if USED not in source:
            source = source.replace(FUTURE, f"{FUTURE}{USED}", 1)
        file.write_text(source)
    return sys.executable, str(folder / "train.py")
