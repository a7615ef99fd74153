"""Shared by the benchmarks: a quiet machine, timed processes, ratios, a table and JSON."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-c", "from sm_nanogpt.launcher.cli import main; main()")  # of this checkout
QUIET = 1.0  # load average above which other work disturbs the figures
SECONDS_TO_STOP = 30.0

Figure = TypeVar("Figure")


class Failed(Exception):
    """A measured process failed."""


@dataclass
class Report:
    """The results of a benchmark: one row per figure, and conclusions in words below them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------
# A benchmark as a command


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(message, 2)


def parser(
    description: str | None, *, rounds: int, nanogpt: bool = True
) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--text", type=Path, required=True, metavar="FILE", help="text to train on, UTF-8")
    if nanogpt:
        add("--nanogpt", type=Path, metavar="PATH", help="a checkout of nanoGPT to run beside ours")
    add(
        "--ours",
        type=parse_options,
        default={},
        metavar="WORDS",
        help="options for our train.py, as one word: --ours='--processes 2'; where a benchmark has"
        " options of its own, in their place",
    )
    add("--rounds", type=int, default=rounds, metavar="N", help=f"repetitions (default {rounds})")
    add("--json", type=Path, metavar="FILE", help="write machine, rows and findings there too")
    add("--wait", type=float, default=600, metavar="S", help="for a quiet machine (default 600)")
    add("--anyway", action="store_true", help="measure on a busy machine; the table will say so")
    add("--quick", action="store_true", help="a smoke run of seconds, whose figures mean nothing")
    return options


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Names and values as arguments of a command line."""
    return [f"--{name}={value}" for name, value in options.items()]


def run(options: argparse.ArgumentParser, benchmark: Callable[[Any, Path], Report]) -> NoReturn:
    """Measures on a quiet machine, in a scratch directory; prints the table, writes the JSON."""
    args = options.parse_args()
    forget_variables()
    if args.quick:
        args.rounds = 1
        os.environ["OMP_NUM_THREADS"] = "1"  # so that none waits for another
    try:
        check_paths(args)
        waits = not args.quick and not args.anyway
        load = wait_until_quiet(args.wait) if waits else os.getloadavg()[0]
        conditions = machine(args, load)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
            report = benchmark(args, Path(scratch))
    except Failed as error:
        stop(str(error), 1)
    except KeyboardInterrupt:
        stop("interrupted", 130)
    conditions["load average"] += f"; {os.getloadavg()[0]:.2f} at the end"
    print(table(report.rows))
    for name, value in {**report.findings, **conditions}.items():
        print(f"{name}: {value}")
    if args.json:
        write_json(args.json, report, {"machine": conditions})
    sys.exit(0)


def forget_variables() -> None:
    """Drops the settings of the launcher and of threads, which no shipped command has."""
    for name in list(os.environ):
        if name.startswith(("SM_", "OMP_", "MKL_")):
            del os.environ[name]


def write_json(path: Path, report: Report, facts: Mapping[str, Any]) -> None:
    """Writes a report and further facts, whole at any time."""
    document = {**facts, "rows": report.rows, "findings": report.findings}
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
    temporary.replace(path)


def stop(problem: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {problem}\n")
    sys.exit(code)


def note(text: str) -> None:
    """Prints progress to stderr."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")


def check_paths(args: argparse.Namespace) -> None:
    """Refuses paths now that would fail after the measurements."""
    if not args.text.is_file():
        stop(f"--text {args.text}: no such file", 2)
    checkout = getattr(args, "nanogpt", None)
    if checkout and not (checkout / "configurator.py").is_file():
        stop(f"--nanogpt {checkout}: not a checkout of nanoGPT (it has no configurator.py)", 2)
    if args.json and not os.access(args.json.absolute().parent, os.W_OK):
        stop(f"--json {args.json}: its directory is missing or cannot be written to", 2)
    if args.rounds < 1:
        stop(f"--rounds {args.rounds}: must be at least 1", 2)
    args.text = args.text.absolute()
    if checkout:
        args.nanogpt = checkout.absolute()


def parse_options(text: str) -> dict[str, str]:
    """`--name value --name=value` as names and values."""
    words = shlex.split(text.replace("=", " "))
    names, values = words[::2], words[1::2]
    if len(names) != len(values) or not all(name.startswith("--") for name in names):
        raise argparse.ArgumentTypeError(f"{text!r}: must be pairs of --name value")
    options = {}
    for name, value in zip(names, values, strict=True):
        options[name.removeprefix("--").replace("-", "_")] = value
    return options


def picture(text: str) -> Path:
    """The file of a plot; refused now if it could not be drawn after the measurements."""
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text}: must end in .png or .svg")
    return path


# ------------------------------------------------------------------------------------------------
# The machine


def wait_until_quiet(seconds: float) -> float:
    """The load average, once it is under QUIET."""
    deadline = time.monotonic() + seconds
    load = os.getloadavg()[0]
    if load >= QUIET and time.monotonic() <= deadline:
        note(f"load average {load:.2f}: waiting until it is under {QUIET:g}")
    while load >= QUIET:
        if time.monotonic() > deadline:
            stop(f"the load average is {load:.2f}, not under {QUIET:g}; wait, or pass --anyway", 2)
        time.sleep(5)
        load = os.getloadavg()[0]
    return load


def machine(args: argparse.Namespace, load: float) -> dict[str, Any]:
    """The machine, the versions, and the command behind the figures."""
    torch_version, gpu = torch_and_gpu()
    hardware = f"{cpu_name()}, {cores()} cores"
    if gpu:
        hardware += f", {gpu}"
    load_text = f"{load:.2f} at the start"
    if load >= QUIET:
        load_text += f": NOT under {QUIET:g}"
    conditions = {
        "machine": hardware,
        "load average": load_text,
        "versions": f"torch {torch_version}, Python {platform.python_version()}",
        "commits": commits(getattr(args, "nanogpt", None)),
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.quick:
        conditions["smoke run"] = "these figures mean nothing"
    return conditions


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if names:
            return str(names[0])
    return platform.processor()


@functools.cache
def torch_and_gpu() -> tuple[str, str | None]:
    """torch's version and its GPU, asked in another process so that this one stays small.

    A build for CPUs says so in its version, and is not asked.
    """
    version = importlib.metadata.version("torch")
    if version.endswith("+cpu"):
        return version, None
    ask = """import json, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps([torch.__version__, gpu]))"""
    version, gpu = json.loads(output(Process([sys.executable, "-c", ask])))
    return version, gpu


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commits(nanogpt: Path | None) -> str:
    texts = []
    for name, path in (("sm-nanogpt", ROOT), ("nanoGPT", nanogpt)):
        if path is not None and shutil.which("git"):
            command = ["git", "-C", str(path), "describe", "--always", "--dirty"]
            answer = subprocess.run(command, capture_output=True, text=True)
            texts.append(f"{name} {answer.stdout.strip() or 'unknown'}")
    return ", ".join(texts)


# ------------------------------------------------------------------------------------------------
# Processes


@dataclass(frozen=True)
class Process:
    """A command, its working directory, and what its environment has in addition to ours."""

    command: Sequence[str]
    cwd: Path = ROOT
    env: Mapping[str, str] = field(default_factory=dict)


RUNNING: set[subprocess.Popen[Any]] = set()


@contextlib.contextmanager
def started(process: Process, **streams: Any) -> Iterator[subprocess.Popen[Any]]:
    """A running process; it and its children are gone afterwards."""
    paths = [str(ROOT)]  # this checkout comes before an installed one
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": gpus[0],  # one GPU, as nanoGPT uses by default
        **process.env,
    }
    popen = subprocess.Popen(
        process.command, cwd=process.cwd, env=env, start_new_session=True, **streams
    )
    RUNNING.add(popen)
    try:
        yield popen
    finally:
        RUNNING.discard(popen)
        if popen.poll() is None:
            # torchrun's workers are in sessions of their own, so stop torchrun first.
            popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(SECONDS_TO_STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def lines(process: Process) -> Generator[tuple[float, str], None, None]:
    """Each line of a process's output, with the time at which it came, in seconds.

    The process is stopped when the caller stops iterating.

    Raises:
        Failed: it ended with a status other than 0.
    """
    last_lines = ["nothing"]
    with started(process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as popen:
        assert popen.stdout is not None
        for line in popen.stdout:
            yield time.perf_counter(), line
            if line.strip():
                last_lines = [*last_lines[-20:], line.rstrip()]
        if popen.wait():
            raise Failed(f"{shlex.join(process.command)}: {cause_in(last_lines)}")


def cause_in(lines: Sequence[str]) -> str:
    """The last line that names an error, or else the last."""
    for line in reversed(lines):
        if re.match(r"\w*Error\b", line):
            return line
    return lines[-1]


def output(process: Process) -> str:
    """The whole output of a process."""
    return "".join(line for _, line in lines(process))


def cost(process: Process) -> tuple[float, float]:
    """Wall seconds, and peak memory in MB of the process or of one that it started."""
    begin = time.perf_counter()
    with started(process, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as popen:
        _, status, usage = os.wait4(popen.pid, 0)
        seconds = time.perf_counter() - begin
        popen.returncode = os.waitstatus_to_exitcode(status)
    if popen.returncode:
        raise Failed(f"{shlex.join(process.command)}: exit status {popen.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return seconds, usage.ru_maxrss * unit / 1e6


# ------------------------------------------------------------------------------------------------
# Figures


def alternate(rounds: int, sides: Mapping[str, Callable[[int], Figure]]) -> dict[str, list[Figure]]:
    """The measurements of each side, by round; a round runs the sides one after the other."""
    figures: dict[str, list[Figure]] = {side: [] for side in sides}
    for index in range(rounds):
        for side, measure_side in sides.items():
            note(f"round {index + 1} of {rounds}: {side}")
            figures[side].append(measure_side(index))
    return figures


def column(rounds: Sequence[tuple[Any, ...]], index: int) -> list[Any]:
    """One figure of each round, where a round gives several."""
    return [figures[index] for figures in rounds]


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours less theirs, paired round by round."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def seeds(args: argparse.Namespace) -> str:
    """The seeds of the rounds, in words."""
    return f"{args.first_seed} to {args.first_seed + args.rounds - 1}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Ours over theirs, paired round by round: `median x (least to most)`."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    text = f"{statistics.median(ratios):.2f}x"
    if len(ratios) > 1:
        text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    return text


def spread(values: Sequence[float], digits: int) -> str:
    """`median (least to most)`, or the only value."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


# The 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
# fmt: off
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23,
           2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09)
# fmt: on


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half width of its 95 % interval, of two values at least."""
    quantile = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return statistics.mean(values), quantile * statistics.stdev(values) / len(values) ** 0.5


def plus_minus(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4f} (n=1)"
    mean, margin = interval(values)
    return f"{mean:.4f} ± {margin:.4f} (mean and its 95 % interval, n={len(values)})"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, with a column for each key of any row."""
    names: dict[str, None] = {}  # in the order in which they come
    for row in rows:
        names |= dict.fromkeys(row)
    columns = []
    rule = "|"
    for name in names:
        cells = [name, *(show(row.get(name)) for row in rows)]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
        rule += "-" * (width + 2) + "|"
    lines = [f"| {' | '.join(line)} |" for line in zip(*columns, strict=True)]
    lines.insert(1, rule)
    return "\n".join(lines)


def show(value: Any) -> str:
    """A cell of a table; a list is shown as its spread."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, list):
        return str(value)
    if min(value) >= 1000:
        return spread(value, digits=0)
    if min(value) >= 10:
        return spread(value, digits=1)
    return spread(value, digits=3)
