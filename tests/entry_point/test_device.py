"""The device, how many processes share it, and what is said of it."""

from __future__ import annotations

import os
from unittest.mock import Mock, patch

import pytest
import torch
from trainings import container

from sm_nanogpt.entry_point import train
from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.container import Ranks
from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.device import choose_device, local_processes, rank_device
from sm_nanogpt.entry_point.errors import DataError, TrainingError
from sm_nanogpt.entry_point.report import machine_line


@pytest.mark.parametrize("hosts, machine", [(2, "2 CPU"), (3, "CPU")], ids=["equal", "unequal"])
def test_the_first_line_counts_hosts_and_processes(hosts, machine):
    message = (
        f"running on {hosts} hosts x {machine} = 4 processes in one group (launched by torchrun;"
    )
    ranks = Ranks(0, 4, 0, 2, "torchrun")
    assert machine_line(torch.device("cpu"), ranks, hosts).startswith(message)


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    return pretend


@pytest.mark.parametrize(
    "device, n_counted, n_visible, message",
    [
        ("auto", 4, 1, "4 GPUs .* sees 1"),
        ("cuda", None, 0, "device=cuda, .* no such GPU"),
        ("mps", None, 1, "device=mps, .* no such GPU"),
    ],
)
def test_a_missing_device_is_refused(gpus, device, n_counted, n_visible, message):
    gpus(n_visible)
    with pytest.raises(TrainingError, match=message):
        choose_device(Config(device=device), container(num_gpus=n_counted), 1)


def test_mps_is_not_shared(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    options = Options(processes=2)
    host = container(num_gpus=0)
    assert local_processes(Config(), host, options) == 2  # on the CPU
    with pytest.raises(TrainingError, match="mps is one device; 2 processes"):
        local_processes(Config(device="mps"), host, options)


def test_device_cpu_asks_for_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", Mock(side_effect=AssertionError))
    assert choose_device(Config(device="cpu"), container(num_gpus=4), 1) == "cpu"


def test_each_gpu_gets_a_process(gpus, monkeypatch):
    gpus(4)
    selected: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    host = container(num_gpus=4)
    assert local_processes(Config(), host, Options()) == 4
    assert rank_device(Config(), host, Ranks(2, 4, 2, 4, "hand")) == torch.device("cuda", 2)
    assert selected == [torch.device("cuda", 2)]
    assert local_processes(Config(), host, Options(processes=2)) == 2  # each of which is refused
    with pytest.raises(TrainingError, match=r"4 GPUs, and train\.py started 2 processes"):
        train.train(Config(), Options(), host, Ranks(0, 2, 0, 2, "train.py"))


@pytest.mark.parametrize("option, earlier, processes", [(0, 0, 1), (0, 3, 3), (2, 3, 2)])
def test_the_processes_option_sets_the_cpu_processes(gpus, option, earlier, processes):
    gpus(0)
    options = Options(processes=option, processes_before=earlier)
    assert local_processes(Config(), container(num_gpus=0), options) == processes


@pytest.fixture
def run_until_the_text_is_read(monkeypatch):
    """Runs one of so many ranks of a host, until it reads its text."""
    monkeypatch.setattr(torch, "set_num_threads", Mock())
    monkeypatch.setattr(train, "Group", Mock())
    monkeypatch.setattr(train, "load_corpus", Mock(side_effect=DataError))

    def run(processes: int) -> None:
        ranks = Ranks(0, processes, 0, processes, "mpirun")
        with pytest.raises(DataError):
            train.train(Config(device="cpu"), Options(), container(), ranks)

    with patch.dict(os.environ):  # which train changes
        yield run


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_share_the_cores_of_their_host(monkeypatch, run_until_the_text_is_read, processes):
    """Also under mpirun, where some builds of torch take one thread."""
    threads = Mock()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads)
    run_until_the_text_is_read(processes)
    threads.assert_called_once_with(max(1, cores() // processes))


@pytest.mark.parametrize(
    "n_cores, processes, chosen, n_compilers",
    [(48, 1, "", "32"), (48, 4, "", "12"), (2, 4, "", "1"), (48, 4, "3", "3")],
)
def test_ranks_share_the_cores_when_they_compile(
    monkeypatch, run_until_the_text_is_read, n_cores, processes, chosen, n_compilers
):
    """Also where torchrun has set the threads, which compile nothing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", chosen)
    monkeypatch.setattr("sm_nanogpt.entry_point.device.cores", lambda: n_cores)
    run_until_the_text_is_read(processes)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == n_compilers
