"""The cores that this process may use. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cores() -> int:
    """The cores that this process may use. Beyond a container's quota, threads are halted."""
    return max(1, int(min(available_cores(), cpu_quota())))


def available_cores() -> int:
    """Cores on which this process may run; two hardware threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.exists() else str(cpu))
    return len(siblings)


def cpu_quota() -> float:
    """CPU seconds per second that control groups allow; infinite without a limit."""
    return min(map(quota_of, control_groups()), default=math.inf)


def quota_of(group: Path) -> float:
    """The quota of one control group, of version 2 or 1; infinite if it has none.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, docs.kernel.org/scheduler/sched-bwc.html
    """
    with suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text().split()  # "max 100000" or "150000 100000"
        return math.inf if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit = (group / "cpu.cfs_quota_us").read_text()  # -1 without a limit
        period = (group / "cpu.cfs_period_us").read_text()
        return math.inf if int(limit) < 0 else int(limit) / int(period)
    return math.inf


def control_groups() -> Iterator[Path]:
    """The directories of this process's control groups, and of those that hold them.

    A container may see its own group as the root, and yet be told the path on its host.
    """
    lines = ["0::/", "1:cpu:/"]
    with suppress(OSError):
        lines += OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount = CGROUPS
        elif "cpu" in controllers.split(","):
            mount = CGROUPS / "cpu"
        else:
            continue
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):
            yield mount.joinpath(*names[:depth])
