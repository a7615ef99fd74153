"""sm-nanogpt for the tests: in this process or as one of its own, with an empty home each time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import runs
import warm

from sm_nanogpt import Settings

PROGRAM = (sys.executable, "-P", "-c", "from sm_nanogpt.launcher.cli import main; main()")

# The smallest job that is still a whole one; most of its time is the start of its processes.
TINY: dict[str, Any] = dict(
    n_layer=1,
    n_head=2,
    n_embd=32,
    block_size=32,
    batch_size=4,
    max_steps=10,
    log_interval=5,
    eval_interval=5,
    eval_tokens=1024,
    sample_length=0,
    device="cpu",
    precision="float32",
)
# One that does not end by itself while a test looks at it.
ENDLESS: dict[str, Any] = {**TINY, "max_steps": 10_000_000, "eval_interval": 50}


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        assert not self.err.endswith("--debug ...` shows where\n"), f"a crash: {self.err}"

    @property
    def error(self) -> str:
        """Its error, which is the last line on stderr and the only one that is an error."""
        assert "Traceback" not in self.err, self.err
        errors = re.findall("^error: (.*)$", self.err, re.MULTILINE)
        assert len(errors) == 1, self.err
        assert self.err.endswith(f"error: {errors[0]}\n"), self.err
        return str(errors[0])

    @property
    def good(self) -> Ran:
        """Itself, after it was checked that it succeeded."""
        assert self.code == 0, self.err
        return self

    @property
    def table(self) -> list[dict[str, str]]:
        """The rows of the table on stdout, each by the headings of its columns."""
        if not self.out:
            return []
        header, *lines = self.out.splitlines()
        headings = list(re.finditer(r"\S+(?: \S+)*", header))
        ends = [heading.start() for heading in headings[1:]]
        rows = []
        for line in lines:
            row = {}
            for heading, end in zip(headings, [*ends, len(line)], strict=True):
                row[heading[0]] = line[heading.start() : end].strip()
            rows.append(row)
        return rows

    def failed(self, code: int, *facts: str) -> bool:
        """Whether it ended with this code and an error that holds these facts."""
        return self.code == code and all(fact in self.error for fact in facts)


@dataclass(frozen=True)
class Finished:
    """A job that is over, in the home it ran in."""

    home: Path
    job_id: str

    @property
    def directory(self) -> Path:
        return self.home / "jobs" / self.job_id


def sets(**values: Any) -> list[str]:
    """Hyperparameters as `--set` takes them."""
    arguments = []
    for name, value in values.items():
        arguments += ["--set", f"{name}={value}"]
    return arguments


def once(
    factory: pytest.TempPathFactory, name: str, build: Callable[[Path], Sequence[str | Path]]
) -> list[str]:
    """What `build` says of what it made in a directory of its own, once for all the workers."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / name
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = Path(f"{directory}.json")
        if not record.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            record.write_text(json.dumps([str(value) for value in build(directory)]))
        return list(json.loads(record.read_text()))


def pip(python: str | Path, *arguments: str | Path) -> None:
    """pip of an interpreter, which compiles nothing: little of what it installs is imported.

    It does not see this checkout, whose egg-info would make it believe that all is installed.
    """
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    if arguments[0] == "install":
        command.append("--no-compile")
    subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, check=True, timeout=900)


def launching(*extra: str, data: str | Path | None = None, **values: Any) -> list[str]:
    """The arguments of a launch of the tiny job, with some things changed."""
    arguments = ["launch", "--instance", "local"]
    if data is not None:
        arguments += ["--data", str(data)]
    return [*arguments, *sets(**{**TINY, **values}), *extra]


def environment(home: Path, **extra: str) -> dict[str, str]:
    """No settings from outside, and no way to a metadata service."""
    foreign = re.compile("AWS_|SM_NANOGPT_")
    variables = {name: v for name, v in runs.environment().items() if not foreign.match(name)}
    return {
        **variables,
        "HOME": str(home.parent),
        "SM_NANOGPT_HOME": str(home),
        "AWS_EC2_METADATA_DISABLED": "true",
        **extra,
    }


Argument = str | Path | int | Iterable[Any]


def arguments_of(arguments: Iterable[Argument]) -> list[str]:
    """The arguments of a command; a list among them stands for what it holds."""
    texts: list[str] = []
    for argument in arguments:
        if isinstance(argument, Iterable) and not isinstance(argument, str):
            texts += arguments_of(argument)
        else:
            texts.append(str(argument))
    return texts


def command(
    *arguments: Argument, home: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Ran:
    """A command as a process of its own."""
    with started(arguments, home=home, cwd=cwd, env=env) as process:
        out, err = process.communicate(timeout=runs.LIMIT)
    return Ran(process.returncode, out, err)


@contextlib.contextmanager
def started(
    *arguments: Argument,
    home: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """A running command, gone afterwards; jobs that it started are not its own processes."""
    process = warm.replacing(warm.Process).Popen(
        [*PROGRAM, *arguments_of(arguments)],
        cwd=cwd or home.parent,
        env={**environment(home), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
        # Under nohup, tests are deaf to a closed terminal, and so were this.
        preexec_fn=hear_hangup,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def hear_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def tree(directory: Path) -> set[str]:
    """All that is below a directory, by relative path."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


def processes() -> list[tuple[int, int, str]]:
    """Pid, parent and command line of all that lives; by ps, as macOS has no /proc."""
    command = ["ps", "-A", "-ww", "-o", "pid=", "-o", "ppid=", "-o", "command="]
    rows = []
    for row in subprocess.check_output(command, text=True, errors="replace").splitlines():
        if "<defunct>" not in row:
            pid, parent, line = row.split(maxsplit=2)
            rows.append((int(pid), int(parent), line))
    return rows


def session_of(leader: int) -> dict[int, str]:
    """The living processes of the session that a process leads, or led: pid to command line."""
    processes_found = {}
    for pid, _, line in processes():
        with contextlib.suppress(ProcessLookupError):  # it ended by now
            if os.getsid(pid) == leader:
                processes_found[pid] = line
    return processes_found


def processes_below(directory: Path) -> dict[int, str]:
    """The living processes of the jobs below a directory, of those whose runner lives.

    A runner's command line names its job, and the ranks are of the session that it leads.
    """
    pattern = re.compile(rf"local\.runner.* {re.escape(str(directory))}[/ ]")
    living: dict[int, str] = {}
    for leader, _, line in processes():
        if pattern.search(line):
            living |= session_of(leader)
    return living


def runner_of(directory: Path) -> int:
    """The pid of a job's runner."""
    (pid,) = [pid for pid, line in processes_below(directory).items() if "local.runner" in line]
    return pid


def ranks_of(directory: Path) -> list[int]:
    """The pids of a job's ranks in their order, without their parents, one for each host."""
    parents = {pid: parent for pid, parent, _ in processes()}
    living = {pid for pid, line in processes_below(directory).items() if "train.py" in line}
    ranks = living - {parents.get(pid) for pid in living}
    return sorted(ranks, key=lambda pid: (parents.get(pid, 0), pid))


def kill_below(directory: Path) -> None:
    for pid in processes_below(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], Any], limit: float = runs.LIMIT) -> Any:
    """Waits for something to become true, and returns it."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)  # asking takes a process or a request
    return value


def wait_for_step(directory: Path) -> None:
    """Waits until a job has trained for a while and has a checkpoint."""
    runs.wait_for_file(directory / "hosts/algo-1/checkpoints", "checkpoint-*.safetensors")


def settings_of(home: Path) -> Settings:
    return Settings(home=home)


def edited(path: Path, *edits: tuple[str, str]) -> Path:
    """A copy of train.py with replaced pieces."""
    runs.edited_folder(path, *edits)
    return path


def all_ended(commands: Sequence[Sequence[str]], home: Path) -> list[Ran]:
    """Several commands at once."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(command, home=home)) for command in commands]
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=runs.LIMIT)
            ended.append(Ran(process.returncode, out, err))
        return ended


def output_of(command: list[str | Path], cwd: Path, environment: dict[str, str]) -> str:
    """What a command prints on stdout; it has to succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(
    name: str, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A script of examples/, as a process of its own, of one thread."""
    command = [sys.executable, str(warm.EXAMPLES / f"{name}.py"), *map(str, arguments)]
    with warm.replacing(warm.Process).Popen(
        command,
        cwd=Path.cwd(),
        env={**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# With neither site nor packages, so that it starts in hundredths of a second.
COMMAND = """\
#!{python} -S
import os, sys
sys.path.insert(0, {tests!r})
import warm
warm.address = {address!r}
command = [sys.executable, "-P", "-c", {code!r}, *sys.argv[1:]]
process = warm.Process(command, cwd=os.getcwd(), env=dict(os.environ), start_new_session=True)
sys.exit(process.wait())
"""


def put_command(directory: Path, code: str = PROGRAM[-1]) -> None:
    """Makes a program `sm-nanogpt`, for scripts that have this directory on their PATH."""
    warm.server()
    program = directory / "sm-nanogpt"
    tests = str(Path(__file__).parent)
    text = COMMAND.format(python=sys.executable, tests=tests, address=warm.address, code=code)
    program.write_text(text)
    program.chmod(0o755)
