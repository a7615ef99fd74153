"""A rank that hangs: it is named, and the run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from runs import (
    ENDLESS,
    command_line,
    edited_folder,
    ended,
    listening,
    make_hosts,
    ranks_of,
    started,
    wait_for_line,
)
from trainings import container

from sm_nanogpt.entry_point.container import Ranks
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.watchdog import Report, Watchdog

CPU = torch.device("cpu")
NO_SIGN = r"TrainingError: rank {} on {} gave no sign of life for \d+ s "


@pytest.fixture(scope="module")
def paused(text_file, tmp_path_factory):
    """A run of two ranks whose second pauses, goes on and then stops.

    Where it listened, its status after the pause, and how it ended.
    """
    endless = command_line(**ENDLESS, data=text_file, processes=2)
    with started(endless, cwd=tmp_path_factory.mktemp("run")) as process:
        wait_for_line(process, "step=5/")
        ranks = ranks_of(process)
        addresses = listening([process.pid, *ranks]) if sys.platform == "linux" else set()
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(3)
        os.kill(ranks[1], signal.SIGCONT)
        time.sleep(3)
        status = process.poll()
        os.kill(ranks[1], signal.SIGSTOP)
        return addresses, status, ended(process)


def test_a_rank_may_pause_but_not_hang(paused):
    _, status, end = paused
    assert status is None
    assert end.status == 1
    assert re.match(NO_SIGN.format(1, socket.gethostname()), end.last_line)


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")
def test_a_run_on_one_host_listens_only_on_loopback(paused):
    addresses, *_ = paused
    assert addresses == {"127.0.0.1"}


def test_one_signal_ends_a_hung_run(text_file, tmp_path):
    command = edited_folder(tmp_path / "train", ("STOP_SECONDS = 20.0", "STOP_SECONDS = 0.1"))
    endless = command_line(**{**ENDLESS, "hang_seconds": 600}, data=text_file, processes=2)
    with started(endless, cwd=tmp_path, command=command) as process:
        wait_for_line(process, "step=5/")
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        end = ended(process)
    assert end.status == 128 + signal.SIGTERM
    assert end.last_line.startswith(f"TrainingError: rank 1 on {socket.gethostname()} ")


def test_a_rank_that_waits_for_its_device_forever_is_named(text_file, tmp_path):
    """After hang_seconds, or soon after a signal."""
    begins = 'a checkpoint, may take any time.\n        """\n'
    hangs = "        if self.rank == 1: print('hangs', flush=True), time.sleep(600)\n"
    soon = ("STOP_SECONDS = 20.0", "STOP_SECONDS = 5.0")
    command = edited_folder(tmp_path / "train", (begins, begins + hangs), soon)
    impatient = command_line(**{**ENDLESS, "hang_seconds": 5}, data=text_file, processes=2)
    patient = command_line(**{**ENDLESS, "hang_seconds": 600}, data=text_file, processes=2)
    with (
        started(impatient, cwd=tmp_path, command=command) as hung,
        started(patient, cwd=tmp_path, command=command) as stopped,
    ):
        wait_for_line(stopped, "hangs")
        stopped.send_signal(signal.SIGTERM)
        stopped_end = ended(stopped)
        hung_end = ended(hung)
    assert stopped_end.status == 128 + signal.SIGTERM
    assert hung_end.status == 1
    message = f"TrainingError: rank 1 on {socket.gethostname()} made no progress while "
    assert stopped_end.last_line.startswith(message)
    assert hung_end.last_line.startswith(message)


def test_a_second_signal_ends_a_hung_run(text_file, tmp_path):
    with started(command_line(**ENDLESS, data=text_file, processes=2), cwd=tmp_path) as process:
        wait_for_line(process, "step=5/")
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(1.2)  # a person's second one
        process.send_signal(signal.SIGINT)
        end = ended(process)
    assert end.status == 128 + signal.SIGINT
    assert end.last_line.startswith("ending now; ")


def test_the_other_host_names_a_hung_rank(tmp_path, text):
    """SageMaker then ends the job, and with it the host of the rank that hangs."""
    with ExitStack() as stack:

        def start(name: str, processes: int, fault: str = "") -> list[subprocess.Popen[str]]:
            arguments = command_line(**{**ENDLESS, "processes": processes, "hang_seconds": 10})
            hosts = []
            for env in make_hosts(tmp_path / name, text, n_hosts=2):
                env["NANOGPT_FAULT"] = fault
                hosts.append(stack.enter_context(started(arguments, cwd=tmp_path, env=env)))
            return hosts

        stopped = [start("first", 1), start("second", 1)]
        live = start("live", 2, "2:7:hang")
        for rank, hosts in enumerate(stopped):
            wait_for_line(hosts[0], "step=5/")
            os.kill(ranks_of(hosts[rank])[0], signal.SIGSTOP)
        for rank, hosts in enumerate(stopped):
            end = ended(hosts[1 - rank])
            assert end.status == 1
            assert re.match(NO_SIGN.format(rank, f"algo-{rank + 1}"), end.last_line)
        for end in map(ended, live):
            assert end.status == 1
            message = "TrainingError: rank 2 on algo-2 made no progress while the others waited for"
            assert end.last_line.startswith(f"{message} ")


@pytest.mark.parametrize(
    "heartbeats, timeouts, silent, seconds, hung",
    [
        ((3, 3), (1800, 1800), {*range(5, 13), *range(14, 22)}, 24, ""),
        ((3, 3), (1800, 1800), range(5, 19), 19, "rank 1 on there gave no sign of life for 11 s "),
        ((3, 4), (1, 1), (), 19, "rank 0 on here made no progress while .* for 11 s "),
        ((3, 3), (1, 1), (), 19, "rank 0 on here, rank 1 on there made no progress for 11 s "),
        ((3, 4), (15, 1), (), 13, ""),
    ],
    ids=["pauses twice", "stops", "falls behind", "all stand still", "announced a long step"],
)
def test_the_watchdog_names_the_rank_that_hangs(
    monkeypatch, heartbeats, timeouts, silent, seconds, hung
):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    first_reports = [Report(0, 0, 1800, "here"), Report(0, 0, 1800, "there")]
    watchdog = Watchdog(dist.HashStore(), 0, first_reports, 10.0, "rank 0 on here", CPU)
    messages = []
    for second in range(1, seconds + 1):
        sign_of_life = 0 if second in silent else second
        reports = [
            Report(second, heartbeats[0], timeouts[0], "here"),
            Report(sign_of_life, heartbeats[1], timeouts[1], "there"),
        ]
        message = watchdog.find_hung(reports)
        if message:
            messages.append(message)
    if hung:
        assert re.match(hung, messages[0])
    else:
        assert messages == []


def test_a_heartbeat_counts_once_the_gpu_has_come_to_it(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    watchdog = Watchdog(dist.HashStore(), 0, [Report(0, 0, 1800, "here")] * 2, 10.0, "rank 0", CPU)
    group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container())
    group.watchdog, group.device = watchdog, torch.device("cuda")
    events = [Mock(query=Mock(return_value=done)) for done in (True, False, False)]
    stream = Mock(record_event=Mock(side_effect=events))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    for _ in events:
        group.heartbeat()
    assert watchdog.count_heartbeats() == 1
    for event in events:
        event.query.return_value = True
    assert watchdog.count_heartbeats() == 3


def test_the_watchdog_asks_the_gpu_of_its_rank(monkeypatch):
    """A thread begins with the first GPU, whose memory its queries would take."""
    devices: dict[int, torch.device] = {}  # by thread
    queried = threading.Event()

    def query() -> bool:
        assert devices[threading.get_ident()] == torch.device("cuda", 1)
        queried.set()
        return True

    def set_device(device: torch.device) -> None:
        devices[threading.get_ident()] = device

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    reports = [Report(0, 0, 1800, "here")] * 2
    store = Mock(multi_get=lambda keys: [json.dumps(report) for report in reports])
    watchdog = Watchdog(store, 1, reports, 10.0, "rank 0", torch.device("cuda", 1))
    watchdog.events.append(Mock(query=query))
    assert queried.wait(10)
    watchdog.end()


@pytest.mark.parametrize("fails", [False, True], ids=["stopped", "gone"])
def test_a_store_that_does_not_answer_is_a_hang(monkeypatch, fails):
    ended = threading.Event()
    reasons: list[str] = []

    def multi_get(keys: list[str]) -> list[str]:
        if not fails:
            ended.wait(10)
        raise RuntimeError  # which ends the thread

    def end(why: str) -> None:
        reasons.append(why)
        ended.set()
        watchdog.ended.set()

    monkeypatch.setattr("sm_nanogpt.entry_point.watchdog.end_hung", end)
    reports = [Report(0, 0, 1800, "here"), Report(0, 0, 1800, "there")]
    watchdog = Watchdog(Mock(multi_get=multi_get), 1, reports, -1.9, "rank 0 on here", CPU)
    assert ended.wait(10)
    watchdog.end()
    (reason,) = reasons
    assert reason.startswith("rank 0 on here,")


def test_after_a_signal_a_disk_may_stall_for_20_seconds(monkeypatch):
    """While rank 0 writes the last checkpoint."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    reports = [Report(0, 0, 1800, "here")] * 2
    watchdog = Watchdog(Mock(), 0, reports, 150.0, "rank 0 on here", CPU)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        signal.raise_signal(signal.SIGUSR1)  # which wakes the watchdog
    finally:
        signal.signal(signal.SIGUSR1, handler)

    class Ended(Exception):
        pass

    seconds = Mock(return_value=False)  # in which no answer comes
    monkeypatch.setattr(watchdog.ended, "wait", seconds)
    monkeypatch.setattr("sm_nanogpt.entry_point.watchdog.end_hung", Mock(side_effect=Ended))
    with pytest.raises(Ended):
        watchdog.watch_store()
    assert 20 < seconds.call_count < 30
    assert watchdog.hang_seconds == 20  # also of ranks that give no sign of life
