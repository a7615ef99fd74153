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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import measure
from gpu_checks import Found, nccl, right
from gpu_speed import ladder, loss, profile, sampling, speed
from measure import ROOT, Process, note


@dataclass(frozen=True)
class Stage:
    run: Callable[[argparse.Namespace, Path, Found], None]
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
    described = "\n".join(
        f"  {name:<9} {stage.minutes:>2} min  {stage.expect}" for name, stage in STAGES.items()
    )
    parser = measure.Parser(
        description=f"{__doc__}{described}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="(default: all)")
    add("--out", type=Path, required=True, metavar="DIR", help="for the results")
    add("--text", type=Path, metavar="FILE", help="UTF-8 (default: the files of this checkout)")
    add("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT to run beside ours")
    add("--smoke", action="store_true", help="tiny, on the CPU; its figures mean nothing")
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # the process of one stage
    args = parser.parse_args()
    if unknown := [name for name in args.stages if name not in STAGES]:
        parser.error(f"{unknown[0]}: there is no such stage; the stages: {' '.join(STAGES)}")
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
    names = [n for kind in ("*.py", "*.md") for n in ROOT.rglob(kind) if ".venv" not in str(n)]
    path.write_text("".join(name.read_text("utf-8") for name in sorted(names)), "utf-8")
    return path


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a stage as a process with a time limit; returns its row of the summary."""
    command = [sys.executable, __file__, name, "--inside", "--out", str(args.out)]
    command += ["--text", str(args.text), *(["--smoke"] if args.smoke else [])]
    command += ["--nanogpt", str(args.nanogpt)] if args.nanogpt else []
    note(f"{name}: {args.out / name}.log")
    began, state = time.perf_counter(), "ok"
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
        found = json.loads((args.out / f"{name}.json").read_text("utf-8"))
        checks = [row["check"] for row in found["rows"] if "check" in row]
    except (OSError, ValueError):
        found, checks, state = {"rows": [], "findings": {}}, [], f"{state}, and found nothing"
    print(f"\n## {name}\n\n{measure.table(found['rows']) if found['rows'] else ''}\n")
    for what, value in found["findings"].items():
        print(f"* {what}: {value}")
    passed = f"{sum(c == 'pass' for c in checks)} of {len(checks)}" if checks else ""
    row = {"stage": name, "state": state, "checks": passed}
    return row | {"minutes": f"{minutes:.1f}", "limit": STAGES[name].minutes}


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
    for other in [other for other in os.environ if other.startswith(("SM_", "OMP_", "MKL_"))]:
        del os.environ[other]
    if args.smoke:
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = Found(args.out / f"{name}.json")
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch, found.part(name):
        STAGES[name].run(args, Path(scratch), found)
    return 1 if found.failed else 0


def main() -> int:
    args = arguments()
    if args.inside:
        return inside(args.stages[0], args)
    about = measure.machine(args, os.getloadavg()[0])
    rows = []
    for name in args.stages:
        rows.append(run(name, args))
        summary = "\n".join(f"{what}: {value}" for what, value in about.items())
        text = f"{measure.table(rows)}\n\n{summary}\n"
        (args.out / "summary.md").write_text(text, "utf-8")
    print(f"\n## Stages of {shlex.join(sys.argv[1:])}\n\n{text}", end="")
    return 0 if all(row["state"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
