"""Check and measure train.py on a GPU, within half an hour.

Examples:
  python examples/benchmarks/gpu.py --out runs/gpu --text input.txt --nanogpt ../nanoGPT
  python examples/benchmarks/gpu.py right nccl --out runs/gpu
  python examples/benchmarks/gpu.py --smoke --out runs/smoke

It needs torch (2.8 or later), for nanoGPT also NumPy, and no network. Each stage is a process
with a time limit. In the directory of --out it leaves STAGE.log, and STAGE.json with the results up
to then. If a stage fails, the next one still runs. The last output is a table of the stages, also
in summary.md; the exit code is 1 if a stage failed.

Stages, with their limits:
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import measure
from gpu_checks import Results, nccl, right
from gpu_speed import ladder, loss, profile, sampling, speed
from measure import ROOT, Process, note


@dataclass(frozen=True)
class Stage:
    run: Callable[[argparse.Namespace, Path, Results], None]
    minutes: float  # its limit
    expect: str  # about how long it takes on an H100, and what it shows


STAGES = {
    "right": Stage(right, 6, "takes 3; losses, resuming, memory: a line for each check"),
    "nccl": Stage(nccl, 5, "takes 3; groups against one process: a line for each check"),
    "speed": Stage(speed, 6, "takes 2; tokens/s of ours and of nanoGPT, with nanoGPT's shapes"),
    "ladder": Stage(ladder, 6, "takes 2; tokens/s and loss of each setting"),
    "loss": Stage(loss, 8, "takes 4; seconds to nanoGPT's loss, and the loss"),
    "profile": Stage(profile, 9, "takes 4; ms of a step by kinds of kernels, memory"),
    "sampling": Stage(sampling, 5, "takes 1; characters/s, one and 64 at once"),
}


def arguments() -> argparse.Namespace:
    description = str(__doc__)
    for name, stage in STAGES.items():
        description += f"  {name:<9} {stage.minutes:>2} min  {stage.expect}\n"
    parser = measure.Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="(default: all)")
    add("--out", type=Path, required=True, metavar="DIR", help="for the results")
    add("--text", type=Path, metavar="FILE", help="UTF-8 (default: the files of this checkout)")
    add("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT to run beside ours")
    add("--smoke", action="store_true", help="tiny, on the CPU; its figures mean nothing")
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # the process of one stage
    args = parser.parse_args()
    for name in args.stages:
        if name not in STAGES:
            parser.error(f"{name}: there is no such stage; the stages: {' '.join(STAGES)}")
    args.stages = args.stages or list(STAGES)
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.absolute()
    args.text = args.text or own_text(args.out / "text.txt")
    args.json = None
    args.rounds, args.quick, args.anyway, args.ours = 1, args.smoke, True, {}  # of a benchmark
    measure.check_paths(args)
    return args


def own_text(path: Path) -> Path:
    """A text of some megabytes, for a machine that has no other: the files of this clone."""
    text = ""
    for file in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.md")]):
        if ".venv" not in str(file):
            text += file.read_text("utf-8")
    path.write_text(text, "utf-8")
    return path


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a stage as a process with a time limit; returns its row of the summary."""
    command = [sys.executable, __file__, name, "--inside", "--out", str(args.out)]
    command += ["--text", str(args.text)]
    if args.smoke:
        command.append("--smoke")
    if args.nanogpt:
        command += ["--nanogpt", str(args.nanogpt)]
    note(f"{name}: {args.out / name}.log")
    began = time.perf_counter()
    (args.out / f"{name}.json").unlink(missing_ok=True)
    with (
        (args.out / f"{name}.log").open("wb") as log,
        measure.started(Process(command), stdout=log, stderr=subprocess.STDOUT) as popen,
    ):
        try:
            code = popen.wait(60 * STAGES[name].minutes)
            state = "ok" if code == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            state = "FAILED: out of time"
    minutes = (time.perf_counter() - began) / 60
    try:
        results = json.loads((args.out / f"{name}.json").read_text("utf-8"))
    except (OSError, ValueError):
        results = {"rows": [], "findings": {}}
        state += ", and found nothing"
    table = measure.table(results["rows"]) if results["rows"] else ""
    print(f"\n## {name}\n\n{table}\n")
    for figure, value in results["findings"].items():
        print(f"* {figure}: {value}")
    return {
        "stage": name,
        "state": state,
        "checks": passed_checks(results["rows"]),
        "minutes": f"{minutes:.1f}",
        "limit": STAGES[name].minutes,
    }


def passed_checks(rows: Sequence[Mapping[str, Any]]) -> str:
    """`5 of 6`, or nothing if there are no checks among the rows of a stage."""
    checks = [row["check"] for row in rows if "check" in row]
    return f"{checks.count('pass')} of {len(checks)}" if checks else ""


def end(signum: int, frame: Any) -> NoReturn:
    for popen in list(measure.RUNNING):  # threads may wait for these variables
        popen.terminate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGCONT)  # it may be paused
    sys.exit(1)


def inside(name: str, args: argparse.Namespace) -> int:
    """The process of a stage."""
    signal.signal(signal.SIGTERM, end)
    measure.SECONDS_TO_STOP = 10  # before the parent's time limit
    measure.forget_variables()
    if args.smoke:
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    results = Results(args.out / f"{name}.json")
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch, results.part(name):
        STAGES[name].run(args, Path(scratch), results)
    return 1 if results.failed else 0


def main() -> int:
    args = arguments()
    if args.inside:
        return inside(args.stages[0], args)
    conditions = ""
    for name, value in measure.machine(args, os.getloadavg()[0]).items():
        conditions += f"{name}: {value}\n"
    rows = []
    for name in args.stages:
        rows.append(run(name, args))
        text = f"{measure.table(rows)}\n\n{conditions}"
        (args.out / "summary.md").write_text(text, "utf-8")
    print(f"\n## Stages of {shlex.join(sys.argv[1:])}\n\n{text}", end="")
    return 0 if all(row["state"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
