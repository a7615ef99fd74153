"""How the threads of OpenMP wait for each other: awake, or asleep if others use the cores.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Set
from contextlib import suppress
from functools import cache
from pathlib import Path

TASKS = Path("/proc/self/task")
LIBRARIES = Path("/proc/self/maps")
CPU_TIMES = Path("/proc/stat")

LOOK_SECONDS = 0.25  # between two looks at the delay
BUSY = 0.3  # seconds in which threads wait for a core, of each second by the clock
# Seconds that threads sleep, before a look at how long they wait for a core when they are awake. It
# doubles as long as the cores are in use.
SHORTEST_SLEEP, LONGEST_SLEEP = 2.0, 30.0


class Waiting:
    """Has the threads of GNU's OpenMP sleep while they wait for each other, if the cores are busy.

    A thread that waits first stays awake, for GOMP_SPINCOUNT looks, since to wake it takes long.
    But if another program uses its core, the system halts the thread that was awake longest, for
    milliseconds in which all others wait for it. One that has slept gets its core back at once.

    OpenMP looks a hundred times at most while it has more threads than there are CPUs
    (gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). So some idle threads put the others to
    sleep. And threads that sleep share the CPUs that other programs leave: there they take turns
    within microseconds, where two CPUs with other programs would keep them waiting for each other.
    As many threads compute as before, since the last bits of a sum depend on their number.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads  # that compute
        self.idle_threads: IdleThreads | None = None
        self.has_slept = False
        self.sleep_seconds = SHORTEST_SLEEP
        self.libraries: list[str] = []
        if n_threads > 1 and not os.environ.get("OMP_WAIT_POLICY"):  # else the user has chosen
            self.libraries = openmp_libraries()
        self.all_cpus = cpus_of_process() if self.libraries else frozenset[int]()
        self.cpus = self.all_cpus  # on which the threads may run now
        self.measure(LOOK_SECONDS)

    def __str__(self) -> str:
        threads = f"the {self.n_threads} threads sleep while they wait for each other"
        if self.cpus == self.all_cpus:
            return threads
        return f"{threads}, on {len(self.cpus)} of {len(self.all_cpus)} CPUs"

    def measure(self, seconds: float) -> None:
        """Measures anew, for some seconds."""
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.delay = core_delay()
        self.others_seconds = others_seconds(self.all_cpus)

    def look(self) -> bool:
        """Chooses how threads wait. True if they sleep from now on, for the first time.

        Call it as often as you like, between operations that threads share: it measures four times
        a second at most.
        """
        now = time.monotonic()
        if not self.libraries or now < self.ends:
            return False
        if self.idle_threads is not None:  # to see whether the cores are still in use
            self.wake()
            return False
        seconds = now - self.began
        is_busy = core_delay() - self.delay > BUSY * seconds
        if not is_busy:
            self.sleep_seconds = SHORTEST_SLEEP
            self.measure(LOOK_SECONDS)
            return False
        self.sleep((others_seconds(self.all_cpus) - self.others_seconds) / seconds)
        is_first = not self.has_slept
        self.has_slept = True
        return is_first

    def sleep(self, n_used: float) -> None:
        """Has threads sleep, for a while. Other programs use n_used CPUs."""
        # With those that compute, one more than there are CPUs, as OpenMP counts them.
        n_idle = max(1, len(self.all_cpus) + 1 - self.n_threads)
        self.idle_threads = IdleThreads(self.libraries, n_idle)
        self.run_on(self.cpus_to_share(n_used))
        self.measure(self.sleep_seconds)
        self.sleep_seconds = min(2 * self.sleep_seconds, LONGEST_SLEEP)

    def wake(self) -> None:
        """Has threads stay awake."""
        self.run_on(self.all_cpus)
        if self.idle_threads is not None:
            self.idle_threads.end()
        self.idle_threads = None
        self.measure(LOOK_SECONDS)

    def cpus_to_share(self, n_used: float) -> frozenset[int]:
        """The CPUs for threads that sleep: all, unless other programs use half of them or more.

        Each gets equally many threads, since all wait for those that take longest. Where others use
        fewer CPUs, the system finds room for most threads; that was not measured. All too, if any
        thread may not run on all CPUs: the user has bound it, or another Waiting of this process.
        """
        if any(cpus != self.all_cpus for cpus in cpus_of_threads()):
            return self.all_cpus
        n_free = max(1, round(len(self.all_cpus) - n_used))
        threads_per_cpu = math.ceil(self.n_threads / n_free)
        if threads_per_cpu == 1 or 2 * n_free > len(self.all_cpus):
            return self.all_cpus
        n_shared = math.ceil(self.n_threads / threads_per_cpu)
        # The system has put this thread where it found room. The next CPUs come after it.
        current = current_cpu()
        cpus = sorted(self.all_cpus, key=lambda cpu: (cpu < current, cpu))
        return frozenset(cpus[:n_shared])

    def run_on(self, cpus: frozenset[int]) -> None:
        """Has all threads of this process run on these CPUs, unless the system forbids it.

        A thread stays where another program, such as taskset, has put it meanwhile. If the system
        forbids it halfway, self.cpus are the fewer CPUs, so that the next call moves threads back.
        """
        if cpus == self.cpus:
            return
        previous = self.cpus
        with suppress(OSError):  # a sandbox forbids it, or a container has other CPUs now
            for task in TASKS.iterdir():
                with suppress(ProcessLookupError):  # a thread that has just ended
                    thread_id = int(task.name)
                    if os.sched_getaffinity(thread_id) == previous:
                        os.sched_setaffinity(thread_id, cpus)
                        if cpus != self.all_cpus:
                            self.cpus = cpus
            self.cpus = cpus


class IdleThreads:
    """Threads of OpenMP that do nothing until `end`: n_idle of each library, and Python's own."""

    def __init__(self, libraries: list[str], n_idle: int) -> None:
        self.libraries = libraries
        self.n_idle = n_idle
        self.is_ready = threading.Event()
        self.may_end = threading.Event()
        self.thread = threading.Thread(target=self.hold, daemon=True)
        self.thread.start()
        self.is_ready.wait()

    def hold(self) -> None:
        """Starts the threads, as a team of this thread. They end with it."""
        try:
            free = ctypes.CDLL(None).free
            for library in self.libraries:
                run_by_team = ctypes.CDLL(library).GOMP_parallel
                run_by_team(free, None, 1 + self.n_idle, 0)  # to free nothing does nothing
        finally:
            self.is_ready.set()
        self.may_end.wait()

    def end(self) -> None:
        self.may_end.set()
        self.thread.join()


def openmp_libraries() -> list[str]:
    """The paths of GNU's OpenMP in this process: none, or that of torch, or of a compiler too."""
    paths = set()
    with suppress(OSError):  # not Linux
        for line in LIBRARIES.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith("libgomp"):
                paths.add(path)
    return sorted(paths)


def core_delay() -> float:
    """Seconds in which threads of this process could run, but other programs used the cores.

    Those of all threads are added up. 0.0 where the system does not count them.

    https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat
    """
    nanoseconds = 0
    with suppress(OSError):
        for task in TASKS.iterdir():
            with suppress(OSError, ValueError):  # a thread that has just ended
                _, delay, _ = (task / "schedstat").read_text().split()
                nanoseconds += int(delay)
    return nanoseconds / 1e9


@cache
def cpus_of_process() -> frozenset[int]:
    """The CPUs on which this process could run when this was first asked."""
    return frozenset(os.sched_getaffinity(0))


def cpus_of_threads() -> list[set[int]]:
    """The CPUs on which each thread of this process may run."""
    cpus = []
    for task in TASKS.iterdir():
        with suppress(ProcessLookupError):  # a thread that has just ended
            cpus.append(os.sched_getaffinity(int(task.name)))
    return cpus


def current_cpu() -> int:
    """The number of the CPU on which this thread runs."""
    return int(ctypes.CDLL(None).sched_getcpu())


def others_seconds(cpus: Set[int]) -> float:
    """Seconds for which other programs have used these CPUs so far, added up.

    0.0 where the system does not count them. https://docs.kernel.org/filesystems/proc.html
    """
    try:
        lines = CPU_TIMES.read_text().splitlines()
    except OSError:
        return 0.0
    ticks = 0
    for line in lines:
        name, *counts = line.split()
        number = name.removeprefix("cpu")
        if number.isdecimal() and int(number) in cpus:
            ticks += sum(map(int, counts[:3]))  # user, nice, and system
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
