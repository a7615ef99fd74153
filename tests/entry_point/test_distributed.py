"""Hosts and ranks: one group of all of them, or a failure that says why."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from runs import (
    ENDLESS,
    SCRIPT,
    SMALL,
    Ended,
    command_line,
    edited_folder,
    environment,
    free_port,
    make_hosts,
    run,
    run_hosts,
)
from trainings import container, rank_variables

from sm_nanogpt.entry_point import train
from sm_nanogpt.entry_point.container import Container, Ranks
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.processes import start_ranks


def test_a_port_that_is_taken_is_named(monkeypatch, tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        container = Container(
            True, None, None, None, tmp_path, tmp_path, tmp_path, hosts=("localhost", "b")
        )
        with pytest.raises(TrainingError, match=f"at port {port}: .*; set MASTER_PORT"):
            start_ranks(Mock(), container, 1, "cpu")


def test_ranks_do_not_outlive_a_parent_without_a_store(monkeypatch, tmp_path):
    ranks = [Mock(), Mock()]
    context = Mock(Process=Mock(side_effect=ranks))
    store = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    monkeypatch.setattr(dist, "TCPStore", store)
    host = container(tmp_path, hosts=("localhost",), current_host="localhost")
    with pytest.raises(KeyboardInterrupt):
        start_ranks(Mock(), host, 2, "cpu")
    for rank in ranks:
        rank.kill.assert_called_once_with()


def test_ranks_do_not_outlive_one_that_cannot_start(monkeypatch, tmp_path):
    """For example, as no more processes are allowed."""
    started = Mock()
    not_started = Mock(start=Mock(side_effect=BlockingIOError))
    context = Mock(Process=Mock(side_effect=[started, not_started]))
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    host = container(tmp_path, hosts=("localhost",), current_host="localhost")
    with pytest.raises(BlockingIOError):
        start_ranks(Mock(), host, 2, "cpu")
    started.kill.assert_called_once_with()
    not_started.kill.assert_not_called()


def test_a_group_error_omits_the_cpp_stack_trace(monkeypatch):
    message = "NCCL error\nLast error:\nconnect to host failed\n"
    error = RuntimeError(
        f"{message}Exception raised from x at y.cpp:9 (most recent call first):\n..."
    )
    monkeypatch.setattr(
        "sm_nanogpt.entry_point.distributed.connect", lambda *_, **__: dist.HashStore()
    )
    monkeypatch.setattr("sm_nanogpt.entry_point.distributed.wait_for_all", lambda *_: [])
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=error))
    with pytest.raises(TrainingError) as caught:
        Group(Ranks(0, 2, 0, 2, "hand"), torch.device("cpu"), container())
    assert f"{message} (GLOO_" in str(caught.value)


def test_processes_that_no_launcher_started_are_refused(monkeypatch):
    for name, value in rank_variables(0, 1, 0, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match="processes=4, but torchrun started 1"):
        train.main(command_line(data="input.txt", processes=4))


def test_hosts_with_different_text_are_refused(text, tmp_path):
    texts = [text, text.replace("Python", "Pythons", 1)]
    envs = make_hosts(tmp_path / "ml", texts, n_hosts=2)
    ends = run_hosts(command_line(**SMALL), cwd=tmp_path, envs=envs)
    assert all(end.status for end in ends)
    assert re.match(r"ConfigError: the SHA-256 .* on rank 1 \(algo-2\)", ends[1].last_line)
    assert not list(tmp_path.rglob("model.safetensors"))


def test_ranks_that_would_train_apart_are_refused(text_file, tmp_path):
    """An error of the user, before the first step, that names the value."""
    fast = "return any(getattr(torch.cpu, test, lambda: False)() for test in tests)"
    unlike = edited_folder(tmp_path / "train", (fast, 'return os.environ["RANK"] == "0"'))
    arguments = command_line(**{**SMALL, "precision": "auto"}, data=text_file, processes=2)
    end = run(arguments, cwd=tmp_path, command=unlike)
    assert end.status == 2
    message = r"ConfigError: precision is 'float32' on rank 1 \(.+\) and 'bfloat16' on rank 0; "
    assert re.match(message, end.last_line)
    assert "train_loss" not in end.output


def test_replicas_whose_bits_differ_end_the_run(text_file, tmp_path):
    step = "        self.steps_summed += 1\n"
    drift = "        if self.group.rank == 1 and self.step == 7:\n"
    drift += "            self.model.embed.weight.data[0, 0] += 1e-6\n"
    command = edited_folder(tmp_path / "train", (step, step + drift))
    end = run(command_line(**SMALL, data=text_file, processes=2), cwd=tmp_path, command=command)
    assert end.status == 1
    message = (
        "TrainingError: at step 10 the weights of rank 1 are not those of rank 0; the checkpoint"
    )
    assert end.last_line.startswith(f"{message} of step 5 is kept; ")


def test_unequal_hosts_without_names_form_one_group(tmp_path, text_file):
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    envs = [
        env | rank_variables(0, 3, 0, 1),
        env | rank_variables(1, 3, 0, 2),
        env | rank_variables(2, 3, 1, 2),
    ]
    arguments = command_line(**{**SMALL, "max_steps": 1}, data=text_file, out="mine")
    ends = run_hosts(arguments, cwd=tmp_path, envs=envs)
    assert not any(end.status for end in ends), ends
    assert "running on 2 hosts x CPU = 3 processes in one group" in ends[0].output


@pytest.fixture
def copy(text_file, tmp_path):
    """A copy of the folder with a text: starts `train.py` there by a command, as a user does."""
    for file in (text_file, *SCRIPT.parent.glob("*.py")):
        shutil.copy(file, tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def start(command: str, **values: Any) -> Ended:
        small = command_line(data="input.txt", **{**SMALL, "max_steps": 3, **values})
        # torchrun leaves the logs of its ranks in the temporary directory.
        env = environment(PATH=path, NANOGPT_FAULT="1:2:kill", TMPDIR=str(tmp_path))
        return run(["train.py", *small], cwd=tmp_path, env=env, command=command.split())

    return start


def test_a_copy_of_the_folder_trains(copy, tmp_path):
    end = copy("python")
    assert end.status == 0, end.output
    assert "= 1 process in one group" in end.output
    assert list(tmp_path.glob("runs/*/model/model.safetensors"))


def test_a_run_that_torchrun_restarts_resumes(copy, tmp_path):
    torchrun = "torchrun --standalone --max-restarts=1 --nproc_per_node 2"
    end = copy(torchrun, out="mine", checkpoint_seconds=1e-6)
    assert end.status == 0, end.output
    assert "= 2 processes in one group" in end.output
    assert "resumed from the checkpoint of step " in end.output
    assert (tmp_path / "mine/model/model.safetensors").exists()


def test_a_failed_rank_ends_the_job_with_its_reason(tmp_path, text_file):
    """At a step after which the other rank logs nothing more."""
    endless = command_line(**ENDLESS, data=text_file, processes=2)
    envs = [environment(NANOGPT_FAULT=fault) for fault in ("0:4:raise", "1:4:raise", "1:4:kill")]
    first_raised, second_raised, killed = run_hosts(endless, cwd=tmp_path, envs=envs)
    for end in (first_raised, second_raised):
        assert end.status == 1
        assert end.last_line.startswith("OSError: NANOGPT_FAULT asked")
    assert killed.status == 137
    assert killed.last_line.startswith("TrainingError: rank 1 on localhost was killed by SIGKILL")


def test_running_out_of_memory_is_one_line_with_advice(text_file, tmp_path):
    bounded = ("bash", "-c", 'ulimit -v 6000000; exec "$@"', "bash", sys.executable, str(SCRIPT))
    much = {**SMALL, "batch_size": 100_000, "n_embd": 1024, "gradient_accumulation_steps": 1}
    end = run(command_line(**much, data=text_file, processes=1), cwd=tmp_path, command=bounded)
    assert end.status == 1
    assert re.match(r"TrainingError: .*gradient_accumulation_steps \(now 1\)", end.last_line)
    assert "can't allocate memory" in end.last_line
    assert '  File "' not in end.output
