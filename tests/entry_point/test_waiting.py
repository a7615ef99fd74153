"""How OpenMP's threads wait for each other, where other programs use the cores."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainings import trainer_of

from sm_nanogpt.entry_point import waiting
from sm_nanogpt.entry_point.resume import live_tensors
from sm_nanogpt.entry_point.waiting import (
    IdleThreads,
    Waiting,
    core_delay,
    openmp_libraries,
    others_seconds,
)

has_gnu = pytest.mark.skipif(not openmp_libraries(), reason="torch has another OpenMP than GNU's")


class Machine:
    """A clock, and a machine on which other programs take a share of our threads' time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.delay = 0.0
        self.share = 0.0  # seconds in which our threads wait for a core, of each second

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.delay += seconds * self.share


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("time.monotonic", lambda: machine.now)
    monkeypatch.setattr(waiting, "core_delay", lambda: machine.delay)
    monkeypatch.setattr(waiting, "openmp_libraries", lambda: ["libgomp.so.1"])
    monkeypatch.setattr(waiting, "others_seconds", lambda cpus: 0.0)
    monkeypatch.setattr(waiting, "cpus_of_process", lambda: frozenset({0, 1}))
    monkeypatch.setattr(waiting, "cpus_of_threads", lambda: [{0, 1}])
    monkeypatch.setattr(waiting.IdleThreads, "hold", lambda self: self.is_ready.set())
    return machine


@pytest.fixture
def two_threads() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(n_threads)


def have_cpus(monkeypatch: pytest.MonkeyPatch, n_cpus: int) -> None:
    """Lets the machine have n_cpus, on which all threads may run."""
    cpus = frozenset(range(n_cpus))
    monkeypatch.setattr(waiting, "cpus_of_process", lambda: cpus)
    monkeypatch.setattr(waiting, "cpus_of_threads", lambda: [set(cpus), set(cpus)])


def seconds_awake(machine: Machine, threads: Waiting, seconds: float) -> float:
    """Seconds in which threads stay awake, in steps of a tenth of a second."""
    awake = 0.0
    for _ in range(round(seconds * 10)):
        machine.pass_time(0.1)
        awake += 0.1 * (threads.idle_threads is None)
        threads.look()
    return awake


def test_threads_stay_awake_on_a_quiet_machine(machine):
    machine.share = 0.05
    assert seconds_awake(machine, Waiting(2), 60) == pytest.approx(60)


def test_threads_sleep_on_a_busy_machine(machine):
    machine.share = 0.3
    assert seconds_awake(machine, Waiting(2), 120) < 0.05 * 120


def test_threads_wake_when_a_machine_becomes_quiet(machine):
    threads = Waiting(2)
    machine.share = 0.3
    seconds_awake(machine, threads, 120)
    machine.share = 0.0
    seconds_awake(machine, threads, waiting.LONGEST_SLEEP)
    assert seconds_awake(machine, threads, 10) == pytest.approx(10)


def test_a_short_disturbance_costs_a_short_sleep(machine):
    threads = Waiting(2)
    machine.share = 0.3
    seconds_awake(machine, threads, 0.6)
    machine.share = 0.0
    assert seconds_awake(machine, threads, 10) > 10 - 1.2 * waiting.SHORTEST_SLEEP


def test_that_threads_sleep_is_said_once(machine):
    threads = Waiting(2)
    machine.share = 0.3
    looks = []
    for _ in range(200):
        machine.pass_time(0.6)
        looks.append(threads.look())
    assert looks.count(True) == 1


def test_one_thread_waits_for_none(machine):
    machine.share = 0.9
    assert seconds_awake(machine, Waiting(1), 60) == pytest.approx(60)


def test_a_wait_policy_of_the_user_is_obeyed(machine, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    machine.share = 0.9
    assert seconds_awake(machine, Waiting(2), 60) == pytest.approx(60)


def test_without_linux_no_thread_sleeps(monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "TASKS", tmp_path / "none")
    monkeypatch.setattr(waiting, "CPU_TIMES", tmp_path / "none")
    monkeypatch.setattr(waiting, "LIBRARIES", tmp_path / "none")
    assert core_delay() == 0.0
    assert others_seconds({0}) == 0.0
    assert openmp_libraries() == []


def test_the_delays_of_all_threads_are_added(monkeypatch, tmp_path):
    for name, numbers in {"7": "900 1500000000 3", "8": "5 250000000 1", "9": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(numbers)
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    assert core_delay() == 1.75


@pytest.mark.parametrize(
    ("n_cpus", "n_threads", "n_used", "n_shared"),
    [
        (2, 2, 0.2, 2),
        (2, 2, 0.9, 1),
        (2, 2, 1.9, 1),
        (4, 4, 1.0, 4),
        (4, 4, 2.1, 2),
        (4, 4, 3.0, 1),
        (4, 2, 2.0, 4),  # there is one for each thread
        (8, 8, 5.0, 3),
    ],
)
def test_sleeping_threads_share_the_cpus_that_others_leave(
    machine, monkeypatch, n_cpus, n_threads, n_used, n_shared
):
    have_cpus(monkeypatch, n_cpus)
    assert len(Waiting(n_threads).cpus_to_share(n_used)) == n_shared


def test_cpus_are_shared_from_where_the_thread_runs(machine, monkeypatch):
    have_cpus(monkeypatch, 4)
    monkeypatch.setattr(waiting, "current_cpu", lambda: 3)
    assert Waiting(4).cpus_to_share(n_used=2.0) == {3, 0}


def test_other_programs_use_what_this_one_does_not(monkeypatch, tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    rows = [
        f"cpu  {9 * ticks} 0 0 0 0",
        f"cpu0 {2 * ticks} {ticks} {ticks} 70 5",
        f"cpu1 {3 * ticks} 0 0 0 0",
        f"cpu2 {4 * ticks} 0 0 0 0",
        "intr 7",
    ]
    (tmp_path / "stat").write_text("\n".join(rows))
    monkeypatch.setattr(waiting, "CPU_TIMES", tmp_path / "stat")
    monkeypatch.setattr("time.process_time", lambda: 1.5)
    assert others_seconds({0, 1}) == 4 + 3 - 1.5


@has_gnu
def test_idle_threads_are_there_until_they_end():
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    n_first = count()
    libraries = openmp_libraries()
    idle = IdleThreads(libraries, n_idle=3)
    assert count() - n_first == 1 + 3 * len(libraries)
    idle.end()
    deadline = time.monotonic() + 30
    while count() > n_first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == n_first


@has_gnu
def test_threads_that_wake_run_on_all_cpus(two_threads):
    cpus = os.sched_getaffinity(0)
    threads = Waiting(2)
    threads.sleep(n_used=float(len(cpus)))
    shared = os.sched_getaffinity(0)
    threads.wake()
    assert len(shared) == 1
    assert all(allowed == cpus for allowed in waiting.cpus_of_threads())


def test_a_thread_that_the_user_has_bound_stays_so(machine, monkeypatch):
    have_cpus(monkeypatch, 4)
    monkeypatch.setattr(waiting, "cpus_of_threads", lambda: [{0, 1, 2, 3}, {1}])
    threads = Waiting(4)
    assert threads.cpus_to_share(n_used=3.0) == threads.all_cpus


def test_two_that_sleep_at_once_leave_all_cpus(machine, monkeypatch):
    have_cpus(monkeypatch, 4)
    affinity = {"all": {0, 1, 2, 3}}
    monkeypatch.setattr(waiting, "cpus_of_threads", lambda: [affinity["all"]])
    monkeypatch.setattr("os.sched_getaffinity", lambda task: affinity["all"])
    monkeypatch.setattr("os.sched_setaffinity", lambda task, cpus: affinity.update(all=set(cpus)))
    first = Waiting(4)
    first.sleep(n_used=2.0)
    second = Waiting(4)
    assert len(affinity["all"]) == 2
    second.sleep(n_used=3.0)
    first.wake()
    second.wake()
    assert affinity["all"] == {0, 1, 2, 3}


def test_a_thread_that_was_moved_meanwhile_stays(machine, monkeypatch, tmp_path):
    """As taskset moves it, while the threads sleep on fewer CPUs."""
    have_cpus(monkeypatch, 4)
    cpus_by_thread = {1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}}
    for thread_id in cpus_by_thread:
        (tmp_path / str(thread_id)).mkdir()
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", cpus_by_thread.__getitem__)
    monkeypatch.setattr("os.sched_setaffinity", cpus_by_thread.__setitem__)
    threads = Waiting(4)
    threads.sleep(n_used=2.0)
    cpus_by_thread[1] = {3}
    threads.wake()
    assert cpus_by_thread == {1: {3}, 2: {0, 1, 2, 3}}


@pytest.mark.parametrize("failing_move", [2, 4])  # the second of sleep, or of wake
def test_a_failed_move_leaves_no_thread_on_fewer_cpus(machine, monkeypatch, tmp_path, failing_move):
    have_cpus(monkeypatch, 4)
    cpus_by_thread = {1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}}
    moves = []

    def move(thread_id: int, cpus: set[int]) -> None:
        moves.append(thread_id)
        if len(moves) == failing_move:
            raise OSError
        cpus_by_thread[thread_id] = cpus

    for thread_id in cpus_by_thread:
        (tmp_path / str(thread_id)).mkdir()
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    monkeypatch.setattr(waiting, "cpus_of_threads", lambda: list(cpus_by_thread.values()))
    monkeypatch.setattr("os.sched_getaffinity", cpus_by_thread.__getitem__)
    monkeypatch.setattr("os.sched_setaffinity", move)
    threads = Waiting(4)
    for _ in range(2):
        threads.sleep(n_used=2.0)
        threads.wake()
    assert len(moves) >= failing_move
    assert cpus_by_thread == {1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}}


def test_no_cpus_are_named_where_a_sandbox_forbids_to_choose(machine, monkeypatch):
    def forbid(task: int, cpus: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr("os.sched_setaffinity", forbid)
    threads = Waiting(2)
    threads.sleep(n_used=1.5)
    assert "CPUs" not in str(threads)
    threads.wake()
    assert threads.cpus == threads.all_cpus


def test_a_system_that_counts_no_times_has_no_others(monkeypatch, tmp_path):
    (tmp_path / "stat").write_text("cpu\ncpu0\n")
    monkeypatch.setattr(waiting, "CPU_TIMES", tmp_path / "stat")
    assert others_seconds({0}) <= 0.0


@has_gnu
def test_how_threads_wait_changes_no_bit(tmp_path, two_threads):
    ends = []
    for sleeps in (False, True):
        trainer = trainer_of(tmp_path / str(sleeps), n_embd=128)
        if sleeps:
            trainer.waiting.sleep(n_used=2.0)
        trainer.train_step()
        trainer.waiting.wake()
        trainer.train_step()
        ends.append(live_tensors(trainer))
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
