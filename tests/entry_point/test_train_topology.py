"""Hosts, ranks and devices: one group of all of them, or a failure that says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from runs import (
    SCRIPT,
    SMALL,
    Ended,
    edited_folder,
    ended,
    environment,
    free_port,
    listening,
    make_hosts,
    ranks_of,
    run,
    run_hosts,
    started,
    wait_for_line,
    words,
)

from entry_point import train
from entry_point.command_line import Options
from entry_point.config import Config
from entry_point.container import Container, Ranks, read_container, read_ranks
from entry_point.cores import cores
from entry_point.device import choose_device, local_processes, machine_line, rank_device
from entry_point.distributed import Group, Report, Watchdog, start_ranks
from entry_point.errors import ConfigError, DataError, TrainingError, failure_report, report_failure

ENDLESS = {**SMALL, "max_steps": 10**6, "hang_seconds": 5}
CPU = torch.device("cpu")


@pytest.fixture
def base(tmp_path):
    """An /opt/ml of the second of two hosts, with resourceconfig.json."""
    (tmp_path / "input/data/training").mkdir(parents=True)
    (tmp_path / "input/config").mkdir()
    resources = dict(
        current_host="algo-2", hosts=["algo-1", "algo-2"], network_interface_name="eth0"
    )
    (tmp_path / "input/config/resourceconfig.json").write_text(json.dumps(resources))
    return tmp_path


def read(base: Path, **env: str) -> Container:
    return read_container({"SAGEMAKER_BASE_DIR": str(base), **env}, Options())


def container(base: Path = Path("ml"), **changes: Any) -> Container:
    """The container of `base`, with some things changed."""
    values: dict[str, Any] = dict(
        inside=True,
        hosts=("algo-1", "algo-2"),
        current_host="algo-2",
        num_gpus=None,
        interface="eth0",
        training=base / "input/data/training",
        validation=None,
        init_from=None,
        model_dir=base / "model",
        output_dir=base / "output/data",
        checkpoint_dir=base / "checkpoints",
    )
    return Container(**{**values, **changes})


# -- the container ---------------------------------------------------------------------------------


def test_the_variables_set_the_directories(base, tmp_path):
    (tmp_path / "val").mkdir()
    found = read(
        base,
        SM_HOSTS='["a", "b", "c"]',
        SM_CURRENT_HOST="c",
        SM_NUM_GPUS="4",
        SM_CHANNEL_VALIDATION=str(tmp_path / "val"),
        SM_MODEL_DIR="/somewhere/model",
        SM_OUTPUT_DATA_DIR="/somewhere/output",
    )
    assert found == container(
        base,
        hosts=("a", "b", "c"),
        current_host="c",
        num_gpus=4,
        validation=tmp_path / "val",
        model_dir=Path("/somewhere/model"),
        output_dir=Path("/somewhere/output"),
    )


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"SM_HOSTS": "[algo-1,algo-2]", "SM_CURRENT_HOST": "algo-2"},  # quotes stripped
        {"SM_HOSTS": "", "SM_CURRENT_HOST": ""},
        {"SM_HOSTS": '["algo-1", "algo-2"]'},
        {"SM_CURRENT_HOST": "algo-2"},
        dict.fromkeys(("SM_NUM_GPUS", "SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"), ""),
        {"SM_CHANNEL_TRAINING": ""},
    ],
)
def test_missing_or_broken_variables_have_defaults(base, broken):
    assert read(base, **broken) == container(base)


@pytest.mark.parametrize(
    "hosts",
    [
        {"SM_MODEL_DIR": "model"},
        {"SM_HOSTS": '["algo-1"]'},
        {"SM_HOSTS": "[]", "SM_CURRENT_HOST": "algo-1"},
        {"SM_HOSTS": '["algo-3", "algo-4"]', "SM_CURRENT_HOST": "algo-9"},
    ],
)
def test_a_host_that_is_not_named_is_refused(base, hosts):
    (base / "input/config/resourceconfig.json").unlink()
    with pytest.raises(TrainingError, match=r"SM_HOSTS .* SM_CURRENT_HOST"):
        read(base, **hosts)


def test_a_named_channel_is_not_left_out(base, tmp_path):
    """The reader of the text says that it is missing."""
    assert read(base, SM_CHANNEL_VALIDATION=str(tmp_path / "none")).validation == tmp_path / "none"


def test_a_missing_training_channel_names_the_others(base):
    (base / "input/data/training").rmdir()
    with pytest.raises(DataError, match=r"'training' .*: none$"):
        read(base)
    for name in ("train", "text"):
        (base / "input/data" / name).mkdir()
    with pytest.raises(DataError, match=r"'training' .*: text, train$"):
        read(base)


def test_a_named_file_overrides_the_container(base):
    env = {"SAGEMAKER_BASE_DIR": str(base)}
    found = read_container(env, Options(data="input.txt", out="here"))
    assert not found.inside
    assert found.training == Path("input.txt").absolute()
    assert found.checkpoint_dir == Path("here/checkpoints")


@pytest.mark.parametrize("name", ["data", "resume", "out", "validation", "init_from"])
def test_a_sagemaker_job_refuses_path_options(base, name):
    """Each host would train a model of its own, outside of what SageMaker keeps."""
    env = {"SAGEMAKER_BASE_DIR": str(base), "SM_HOSTS": '["algo-1"]'}
    with pytest.raises(ConfigError, match=f"--{name}"):
        read_container(env, Options(**{name: "here"}))  # type: ignore[arg-type]


def test_two_runs_of_one_second_have_own_directories(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    places = []
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        places.append(read_container({}, Options(data="input.txt")).model_dir)
    assert places == [Path("runs/now-1/model"), Path("runs/now-2/model")]


# -- ranks -----------------------------------------------------------------------------------------

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


def told(*place: object, by: Sequence[str] = TORCHRUN) -> dict[str, str]:
    """What a launcher tells a process of its place."""
    return dict(zip(by, map(str, place), strict=True))


@pytest.mark.parametrize(
    "env, ranks",
    [
        (told(5, 8, 1, 4), Ranks(5, 8, 1, 4, "torchrun")),
        (told(5, 8, 1, 4, by=OPEN_MPI), Ranks(5, 8, 1, 4, "mpirun")),
        ({**told(5, 8, 1, 4, by=OPEN_MPI), **told(4, 8, 0, 4)}, Ranks(4, 8, 0, 4, "torchrun")),
        ({**told(5, 8, 1, 4, by=OPEN_MPI), "WORLD_SIZE": "8"}, Ranks(5, 8, 1, 4, "mpirun")),
        ({"MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"}, None),
        ({"WORLD_SIZE": "8"}, None),
    ],
    ids=["torchrun", "mpirun", "torchrun's before mpirun's", "no rank", "no launcher", "a size"],
)
def test_ranks_come_from_the_launcher(env, ranks):
    assert read_ranks(env, 2) == ranks


@pytest.mark.parametrize(
    "env, n_hosts, said",
    [
        (told(5, 8, 1, 4), 3, "torchrun .* 8 with 4 .* 3 hosts"),
        (told(5, 8, 1, 4, by=OPEN_MPI), 3, "mpirun .* 8 with 4 .* 3 hosts"),
        (told(0, 4, 0, 4), 2, "torchrun .* 4 with 4 .* 2 hosts"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, "set LOCAL_RANK, LOCAL_WORLD_SIZE too"),  # as Slurm
    ],
)
def test_impossible_ranks_are_refused(env, n_hosts, said):
    with pytest.raises(TrainingError, match=said):
        read_ranks(env, n_hosts)


def test_a_port_that_is_taken_is_named(monkeypatch, tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        container = Container(
            True, None, None, None, tmp_path, tmp_path, tmp_path, hosts=("localhost", "b")
        )
        with pytest.raises(TrainingError, match=f"at port {port}: .*; set MASTER_PORT"):
            start_ranks(Mock(), container, 1, "cpu")


@pytest.mark.parametrize("error", [NotImplementedError, KeyboardInterrupt])
def test_ranks_do_not_outlive_a_parent_without_a_store(monkeypatch, tmp_path, error):
    """The store of torch 2.6, by libuv, takes no listening socket: it raises the first."""
    ranks = [Mock(), Mock()]
    context = Mock(Process=Mock(side_effect=ranks))
    store = Mock(side_effect=error)
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    monkeypatch.setattr(dist, "TCPStore", store)
    host = container(tmp_path, hosts=("localhost",), current_host="localhost")
    with pytest.raises(error):
        start_ranks(Mock(), host, 2, "cpu")
    assert store.call_args.kwargs["use_libuv"] is False
    for rank in ranks:
        rank.kill.assert_called_once_with()


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts, machine", [(2, "2 CPU"), (3, "CPU")], ids=["equal", "unequal"])
def test_the_first_line_counts_hosts_and_processes(hosts, machine):
    said = f"running on {hosts} hosts x {machine} = 4 processes in one group (launched by torchrun;"
    ranks = Ranks(0, 4, 0, 2, "torchrun")
    assert machine_line(torch.device("cpu"), ranks, hosts).startswith(said)


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    return pretend


@pytest.mark.parametrize(
    "device, counted, seen, said",
    [
        ("auto", 4, 0, "4 GPUs .* sees 0"),
        ("auto", 4, 1, "4 GPUs .* sees 1"),
        ("cuda", None, 0, "device=cuda, .* no such GPU"),
        ("mps", None, 0, "device=mps, .* no such GPU"),
        ("mps", None, 1, "device=mps, .* no such GPU"),
    ],
)
def test_a_missing_device_is_refused(gpus, device, counted, seen, said):
    gpus(seen)
    with pytest.raises(TrainingError, match=said):
        choose_device(Config(device=device), container(num_gpus=counted), 1)


def test_mps_is_not_shared(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    options, here = Options(processes=2), container(num_gpus=0)
    assert local_processes(Config(), here, options) == 2  # on the CPU
    with pytest.raises(TrainingError, match="mps is one device; 2 processes"):
        local_processes(Config(device="mps"), here, options)


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


@pytest.mark.parametrize("asked, before, processes", [(0, 0, 1), (3, 0, 3), (0, 3, 3), (2, 3, 2)])
def test_the_processes_option_sets_the_cpu_processes(gpus, asked, before, processes):
    gpus(0)
    options = Options(processes=asked, processes_before=before)
    assert local_processes(Config(), container(num_gpus=0), options) == processes


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_share_the_cores_of_their_host(monkeypatch, processes):
    """Also under mpirun, where some builds of torch take one thread."""
    threads = Mock()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads)
    monkeypatch.setattr(train, "Group", Mock())
    monkeypatch.setattr(train, "load_corpus", Mock(side_effect=DataError))
    ranks = Ranks(0, processes, 0, processes, "mpirun")
    with pytest.raises(DataError):
        train.train(Config(device="cpu"), Options(), container(), ranks)
    threads.assert_called_once_with(max(1, cores() // processes))


# -- what cannot run -------------------------------------------------------------------------------


@pytest.mark.parametrize("inside, error", [(False, ConfigError), (True, DataError)])
def test_a_restart_outside_a_container_needs_out(monkeypatch, inside, error):
    """In a container it goes on, with the checkpoints that SageMaker keeps."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(train, "Group", Mock(side_effect=DataError))
    host = container(inside=inside)
    with pytest.raises(error, match="" if inside else "--out DIRECTORY"):
        train.train(Config(device="cpu"), Options(), host, Ranks(0, 1, 0, 1, "torchrun"))


def test_a_run_without_text_names_the_option(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(DataError, match=r"^no text: .*--data FILE"):
        train.main([])


def test_a_group_error_omits_the_cpp_stack_trace(monkeypatch):
    said = "NCCL error\nLast error:\nconnect to host failed\n"
    error = RuntimeError(f"{said}Exception raised from x at y.cpp:9 (most recent call first):\n...")
    monkeypatch.setattr("entry_point.distributed.connect", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr("entry_point.distributed.wait_for_all", lambda *_: [])
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=error))
    with pytest.raises(TrainingError) as caught:
        Group(Ranks(0, 2, 0, 2, "hand"), torch.device("cpu"), container())
    assert f"{said} (GLOO_" in str(caught.value)


# -- real processes --------------------------------------------------------------------------------


def test_processes_that_no_launcher_started_are_refused(tmp_path, text_file):
    place = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT="0")
    env = place | {"MASTER_ADDR": "127.0.0.1"}
    end = run(words(**SMALL, data=text_file, processes=4), cwd=tmp_path, env=env)
    assert (end.status, "processes=4, but torchrun started 1" in end.output) == (1, True)


def test_hosts_started_alone_make_one_model(text, tmp_path):
    envs = make_hosts(tmp_path / "ml", text, n_hosts=2)
    first, second = run_hosts(words(**SMALL), cwd=tmp_path, envs=envs)
    assert (first.status, second.status) == (0, 0), first.output + second.output
    assert "running on 2 hosts x 1 CPU = 2 processes in one group" in first.output
    assert second.output == ""
    models = [p.relative_to(tmp_path / "ml") for p in tmp_path.rglob("model.safetensors")]
    assert models == [Path("algo-1/model/model.safetensors")]


def test_hosts_with_different_text_are_refused(text, tmp_path):
    texts = [text, text.replace("Python", "Pythons", 1)]
    ends = run_hosts(words(**SMALL), cwd=tmp_path, envs=make_hosts(tmp_path / "ml", texts, 2))
    assert all(end.status for end in ends)
    assert re.match(r"ConfigError: the SHA-256 .* on rank 1 \(algo-2\)", ends[1].last_line)
    assert not list(tmp_path.rglob("model.safetensors"))


def test_ranks_that_would_train_apart_are_refused(text_file, tmp_path):
    """An error of the user, before the first step, that names the value."""
    fast = "return any(getattr(torch.cpu, test, lambda: False)() for test in tests)"
    unlike = edited_folder(tmp_path / "train", (fast, 'return os.environ["RANK"] == "0"'))
    arguments = words(**{**SMALL, "precision": "auto"}, data=text_file, processes=2)
    end = run(arguments, cwd=tmp_path, command=unlike)
    assert end.status == 2
    said = r"ConfigError: precision is 'float32' on rank 1 \(.+\) and 'bfloat16' on rank 0; "
    assert re.match(said, end.last_line)
    assert "train_loss" not in end.output


def test_replicas_whose_bits_differ_end_the_run(text_file, tmp_path):
    step = "        self.steps_summed += 1\n"
    drift = "        if self.group.rank == 1 and self.step == 7:\n"
    drift += "            self.model.embed.weight.data[0, 0] += 1e-6\n"
    command = edited_folder(tmp_path / "train", (step, step + drift))
    end = run(words(**SMALL, data=text_file, processes=2), cwd=tmp_path, command=command)
    assert end.status == 1
    said = "TrainingError: at step 10 the weights of rank 1 are not those of rank 0; the checkpoint"
    assert end.last_line.startswith(f"{said} of step 5 is kept; ")


def test_unequal_hosts_without_names_form_one_group(tmp_path, text_file):
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    places = [(0, 3, 0, 1), (1, 3, 0, 2), (2, 3, 1, 2)]
    arguments = words(**{**SMALL, "max_steps": 1}, data=text_file, out="mine")
    ends = run_hosts(arguments, cwd=tmp_path, envs=[{**env, **told(*place)} for place in places])
    assert not any(end.status for end in ends), ends
    assert "running on 2 hosts x CPU = 3 processes in one group" in ends[0].output


@pytest.fixture
def copy(text_file, tmp_path):
    """A copy of the folder with a text: starts `train.py` there by a command, as a user does."""
    for file in (text_file, *SCRIPT.parent.glob("*.py")):
        shutil.copy(file, tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def start(command: str, **values: Any) -> Ended:
        small = words(data="input.txt", **{**SMALL, "max_steps": 3, **values})
        env = environment(PATH=path, NANOGPT_FAULT="1:2:kill")
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
    endless = words(**ENDLESS, data=text_file, processes=2)
    envs = [environment(NANOGPT_FAULT=fault) for fault in ("0:4:raise", "1:4:raise", "1:4:kill")]
    *raised, killed = run_hosts(endless, cwd=tmp_path, envs=envs)
    for end in raised:
        assert end.status == 1
        assert end.last_line.startswith("OSError: NANOGPT_FAULT asked")
    assert killed.status == 137
    assert killed.last_line.startswith("TrainingError: rank 1 on localhost was killed by SIGKILL")


def test_running_out_of_memory_is_one_line_with_advice(text_file, tmp_path):
    bounded = ("bash", "-c", 'ulimit -v 6000000; exec "$@"', "bash", sys.executable, str(SCRIPT))
    much = {**SMALL, "batch_size": 100_000, "n_embd": 1024, "gradient_accumulation_steps": 1}
    end = run(words(**much, data=text_file, processes=1), cwd=tmp_path, command=bounded)
    assert end.status == 1
    assert re.match(r"TrainingError: .*gradient_accumulation_steps \(now 1\)", end.last_line)
    assert "can't allocate memory" in end.last_line
    assert '  File "' not in end.output


# -- a rank that hangs -----------------------------------------------------------------------------

NO_SIGN = r"TrainingError: rank {} on {} gave no sign of life for \d+ s "


@pytest.fixture(scope="module")
def paused(text_file, tmp_path_factory):
    """A run of two ranks whose second pauses, goes on and then stops.

    Where it listened, its status after the pause, and how it ended.
    """
    endless, place = words(**ENDLESS, data=text_file, processes=2), tmp_path_factory.mktemp("run")
    with started(endless, cwd=place) as process:
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
    endless = words(**{**ENDLESS, "hang_seconds": 600}, data=text_file, processes=2)
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
    with ExitStack() as stack:
        left_alone, stopped = (
            stack.enter_context(started(arguments, cwd=tmp_path, command=command))
            for arguments in (
                words(**{**ENDLESS, "hang_seconds": seconds}, data=text_file, processes=2)
                for seconds in (5, 600)
            )
        )
        wait_for_line(stopped, "hangs")
        stopped.send_signal(signal.SIGTERM)
        ends = [ended(stopped), ended(left_alone)]
    assert [end.status for end in ends] == [128 + signal.SIGTERM, 1]
    named = f"TrainingError: rank 1 on {socket.gethostname()} made no progress while "
    assert all(end.last_line.startswith(named) for end in ends)


def test_a_second_signal_ends_a_hung_run(text_file, tmp_path):
    with started(words(**ENDLESS, data=text_file, processes=2), cwd=tmp_path) as process:
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
            arguments = words(**{**ENDLESS, "processes": processes, "hang_seconds": 10})
            return [
                stack.enter_context(
                    started(arguments, cwd=tmp_path, env={**env, "NANOGPT_FAULT": fault})
                )
                for env in make_hosts(tmp_path / name, text, n_hosts=2)
            ]

        stopped, live = [start("first", 1), start("second", 1)], start("live", 2, "2:7:hang")
        for rank, hosts in enumerate(stopped):
            wait_for_line(hosts[0], "step=5/")
            os.kill(ranks_of(hosts[rank])[0], signal.SIGSTOP)
        for rank, hosts in enumerate(stopped):
            end = ended(hosts[1 - rank])
            assert end.status == 1
            assert re.match(NO_SIGN.format(rank, f"algo-{rank + 1}"), end.last_line)
        for end in map(ended, live):
            assert end.status == 1
            said = "TrainingError: rank 2 on algo-2 made no progress while the others waited for "
            assert end.last_line.startswith(said)


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
    first = [Report(0, 0, 1800, "here"), Report(0, 0, 1800, "there")]
    watchdog = Watchdog(dist.HashStore(), 0, first, 10.0, "rank 0 on here", CPU)
    found = []
    for second in range(1, seconds + 1):
        here = Report(second, heartbeats[0], timeouts[0], "here")
        there = Report(0 if second in silent else second, heartbeats[1], timeouts[1], "there")
        found.append(watchdog.find_hung([here, there]))
    said = next(filter(None, found), "")
    assert re.match(hung, said) if hung else not said


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
    asked = threading.Event()

    def query() -> bool:
        assert devices[threading.get_ident()] == torch.device("cuda", 1)
        asked.set()
        return True

    def set_device(device: torch.device) -> None:
        devices[threading.get_ident()] = device

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    reports = [Report(0, 0, 1800, "here")] * 2
    store = Mock(multi_get=lambda keys: [json.dumps(report) for report in reports])
    watchdog = Watchdog(store, 1, reports, 10.0, "rank 0", torch.device("cuda", 1))
    watchdog.events.append(Mock(query=query))
    assert asked.wait(10)
    watchdog.end()


@pytest.mark.parametrize("gone", [False, True], ids=["stopped", "gone"])
def test_a_store_that_does_not_answer_is_a_hang(monkeypatch, gone):
    ended = threading.Event()
    found: list[str] = []

    def multi_get(keys: list[str]) -> list[str]:
        if not gone:
            ended.wait(10)
        raise RuntimeError  # which ends the thread

    def end(why: str) -> None:
        found.append(why)
        ended.set()
        watchdog.ended.set()

    monkeypatch.setattr("entry_point.distributed.end_hung", end)
    reports = [Report(0, 0, 1800, "here"), Report(0, 0, 1800, "there")]
    watchdog = Watchdog(Mock(multi_get=multi_get), 1, reports, -1.9, "rank 0 on here", CPU)
    assert ended.wait(10)
    watchdog.end()
    assert [words.partition(",")[0] for words in found] == ["rank 0 on here"]


# -- what is said ----------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["", "TheFirst: cause"])
def test_the_first_failure_is_the_reason_for_sagemaker(tmp_path, monkeypatch, there):
    failure = tmp_path / "output/failure"
    failure.parent.mkdir()
    if there:
        failure.write_text(there)
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    report_failure("  at trainer.py:9 in run\nOSError: cause")
    assert failure.read_text() == (there or "OSError: cause")


def test_an_unexpected_error_hides_code_in_containers(monkeypatch):
    with pytest.raises(OSError) as caught:
        raise OSError("none")
    report = failure_report(caught.value)
    assert re.search(r'^  File ".*\.py", line \d+, in test_an_unexpected_\w+\n', report)
    assert report.endswith('    raise OSError("none")\nOSError: none')
    monkeypatch.setenv("SM_FRAMEWORK_MODULE", "training:main")
    report = failure_report(caught.value)
    assert re.fullmatch(r"  at \w+\.py:\d+ in test_an_unexpected_\w+\nOSError: none", report)


def test_a_failure_is_one_line_for_the_toolkit(monkeypatch):
    assert failure_report(DataError("two\nlines")) == "DataError: two lines"
    monkeypatch.setenv("SM_FRAMEWORK_MODULE", "sagemaker_pytorch_container.training:main")
    assert failure_report(DataError("none")) == "DataError: none [Exception]"
    assert failure_report(OSError("none")) == "OSError: none"
    assert failure_report(json.JSONDecodeError("none", "", 0)).endswith(" [ValueError]")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        MemoryError(),
    ],
)
def test_out_of_memory_has_one_name_on_every_device(monkeypatch, text_file, error):
    monkeypatch.setattr("entry_point.train.train", Mock(side_effect=error))
    with pytest.raises(TrainingError, match="gradient_accumulation_steps"):
        train.main(words(**SMALL, data=text_file, processes=1))
