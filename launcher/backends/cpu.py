"""How a local job uses this machine's cores; `local` and `local_runner` ask."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path

from entry_point.config import Config


def cpu_processes(config: Config) -> int:
    """The number of processes that train fastest on this machine's CPU.

    Threads wait for each other at every operation, processes once in a step, but for all
    gradients. On two quiet cores a step of 10**9 operations is faster by a third with two threads
    than with two processes, one of 10**10 by a tenth, and one of 10**12 no more; on busy ones
    threads lose most, as each waits for the slowest.
    """
    if 6 * config.matrix_parameters * config.batch_size * config.block_size < 3e11:
        return 1
    shares = config.batch_size // max(1, config.gradient_accumulation_steps)
    at_once = min(cores() // (chosen_threads() or 1), 8)
    return next((n for n in range(at_once, 1, -1) if shares % n == 0), 1)


def chosen_threads() -> int:
    """The first number in OMP_NUM_THREADS, which has one for each level of nesting; else 0."""
    number = re.match(r"\s*(\d+)", os.environ.get("OMP_NUM_THREADS", ""))
    return int(number[1]) if number else 0


def cores() -> int:
    """The cores that a job may use. Beyond a container's quota, threads are halted."""
    return max(1, int(min(available_cores(), cpu_quota(Path("/")))))


def cpu_quota(root: Path) -> float:
    """CPU seconds per second that this process's control groups allow; infinite without a limit.

    Version 2 has one group with cpu.max ("max 100000", "150000 100000"). Version 1 has one for the
    controller `cpu`, with two files. A container sees its own group at the top of the tree.
    https://docs.kernel.org/admin-guide/cgroup-v2.html, .../scheduler/sched-bwc.html
    """
    quota = math.inf
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return quota
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        own = top / path.lstrip("/")
        for directory in (own, *own.parents):  # each limits the groups below it
            with suppress(OSError):
                words = " ".join((directory / name).read_text() for name in names).split()
                if words[0] not in ("max", "-1"):
                    quota = min(quota, int(words[0]) / int(words[1]))
    return quota


def available_cores() -> int:
    """Cores that this process may use; two hardware threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)
