"""train.py of a job that makes the runs of a search, one after another on each GPU.

The toolkit starts a process of it for each GPU, and each makes its part of the runs in plan.json.
No run is trusted: it is a user of its own, which can read its folder, its text and Python's
packages, and can write into its own directory alone. A filter of system calls keeps it from what is
no file. Containers of jobs have no namespaces for users; without a network, it reaches nobody.
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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
FIRST_USER = 61_000  # the number of the first run's user; nobody else has it
SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # where all users may write
FILTER = ("pyseccomp.py", "syscalls.py")  # beside this file: what closes more than users do
# It takes the rights of the filter from itself, and becomes the run.
START = """
import os, sys
directory, may_fork, *command = sys.argv[1:]
sys.path.insert(0, directory)
import syscalls
if syscalls.is_available():
    syscalls.call_filter(may_fork == "True").load()
os.execv(command[0], command)
"""
OPEN = """\
warning: this image has no libseccomp: runs can share memory of System V and keyrings, and reach
sockets of this container, and the time of processes that they start may not count
"""


def main() -> None:
    began, env = time.monotonic(), os.environ
    plan = json.loads((HERE / "plan.json").read_text())
    rank = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK") or env.get("LOCAL_RANK") or 0)
    size = int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE") or env.get("LOCAL_WORLD_SIZE") or 1)
    models = Path(env["SM_MODEL_DIR"])
    os.umask(0o022)
    close(models.parent)
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    # Of the others, some would make train.py a rank of a job, and some may be secret.
    for_run = {name: value for name, value in env.items() if name in plan["variables"]}
    for_run |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": str(rank)}
    with TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o711)
        copy_files(Path(env["SM_CHANNEL_TRAINING"]), place / "text")
        (place / "filter").mkdir()
        for name in FILTER:
            shutil.copyfile(HERE / name, place / "filter" / name)
        if rank == 0 and not has_filter(place / "filter"):
            sys.stdout.write(OPEN)
        for index in range(rank, len(plan["runs"]), size):
            left = plan["seconds"] - (time.monotonic() - began)
            facts = make(plan, index, place, models / f"run-{index}", left, for_run)
            folder, seed = plan["runs"][index]
            ended = facts["problem"] or f"{facts['seconds']:.1f} s"
            named = f"run {index + 1} of {len(plan['runs'])}: {folder} seed {seed}"
            sys.stdout.write(f"{named}: {ended}\n")  # whole, among the lines of the others
            sys.stdout.flush()


def close(base: Path) -> None:
    """Let other users reach Python, wherever the image has it, but not what is below `base`, nor
    each other."""
    for python in (sys.executable, sys.prefix, sys.base_prefix):
        for above in Path(python).resolve().parents:
            if not above.stat().st_mode & 0o001:
                above.chmod(0o711)
    for shared in SHARED:
        Path(shared).chmod(0o711)
    base.chmod(0o700)


def has_filter(directory: Path) -> bool:
    """Whether this image has libseccomp."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import syscalls"
    code += "; sys.exit(not syscalls.is_available())"
    return subprocess.run([sys.executable, "-P", "-c", code, str(directory)]).returncode == 0


def make(
    plan: Any, index: int, place: Path, target: Path, left: float, env: dict[str, str]
) -> dict[str, Any]:
    """Make a run in at most `left` seconds, and put its model and its facts into the target."""
    folder, seed = plan["runs"][index]
    code, out, limit = place / folder, place / f"run-{index}", max(0.0, min(plan["limit"], left))
    user = FIRST_USER + index
    if not code.exists():
        copy_files(HERE / folder, code)
    out.mkdir(mode=0o700)
    os.chown(out, user, user)
    values = {**plan["values"], "seed": seed, "data": place / "text", "out": out}
    words = [f"--{name}={value}" for name, value in values.items()]
    here = {"HOME": str(out), "TMPDIR": str(out), "USER": "run"}  # where compilers write
    here["SAGEMAKER_BASE_DIR"] = str(out)  # not in a container, for all that train.py sees
    # On a GPU, the clock counts, and a run may start its compiler.
    has_gpu = os.environ.get("SM_NUM_GPUS") not in (None, "", "0")
    start = [sys.executable, "-P", "-c", START, str(place / "filter"), str(has_gpu)]
    began, computed = time.monotonic(), cpu_seconds()
    with (place / "log").open("w+b") as log:
        # Program of launcher.local.process would do, but the container has nothing of the launcher.
        process = subprocess.Popen(
            [*start, sys.executable, str(code / "train.py"), *words],
            env={**env, **here},
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[],
        )
        try:
            status = process.wait(limit)
            problem = last_line(log) or f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"it took over {limit:.0f} s" if limit < left else "the job's time was over"
        seconds = time.monotonic() - began
        if not has_gpu:  # whatever else computes on the CPU
            seconds = cpu_seconds() - computed
        end_all_of(user)
        process.wait()
    target.mkdir()
    if not problem:
        try:
            pack(out / "model", target / "model.tar.gz", plan["room"])
        except OSError as error:
            problem = f"its model cannot be read: {error}"
    shutil.rmtree(out)
    facts = {"seconds": seconds, "problem": problem}
    (target / "facts.json").write_text(json.dumps(facts))
    return facts


def pack(model: Path, target: Path, room: int) -> None:
    """Pack a model, with links as links. Raises OSError if it is none, or too large."""
    if model.is_symlink() or sum(path.lstat().st_size for path in model.rglob("*")) > room:
        raise OSError(f"it is a link, or takes over {room:,} bytes")
    with tarfile.open(target, "w:gz", compresslevel=1) as tar:
        tar.add(model, "model")


def cpu_seconds() -> float:
    """What the processes that have ended have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a directory, so that any user can read them."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def last_line(log: Any) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
    return str(log.read().decode(errors="replace").strip().rpartition("\n")[2])


def end_all_of(user: int) -> None:
    """End what a user has left running."""
    code = f"import os; os.getuid() == {user} and os.kill(-1, 9)"
    command = [sys.executable, "-I", "-c", code]
    subprocess.run(command, user=user, group=user, extra_groups=[], stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
