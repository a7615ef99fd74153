"""Hosts, ranks and devices: one group of all of them, or a failure that says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
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
from entry_point.config import Config, Options
from entry_point.container import (
    Container,
    Ranks,
    choose_device,
    local_processes,
    rank_device,
    read_container,
)
from entry_point.distributed import Group, Watchdog, read_ranks
from entry_point.errors import ConfigError, DataError, TrainingError, failure_report
from launcher.machines import cores

TWO_HOSTS = ["algo-1", "algo-2"]


@pytest.fixture
def base(tmp_path):
    """An /opt/ml of the second of two hosts, with resourceconfig.json."""
    (tmp_path / "input/data/training").mkdir(parents=True)
    (tmp_path / "input/config").mkdir()
    resources = dict(current_host="algo-2", hosts=TWO_HOSTS, network_interface_name="eth0")
    (tmp_path / "input/config/resourceconfig.json").write_text(json.dumps(resources))
    return tmp_path


def container_of(base: Path, **env: str) -> Container:
    return read_container({"SAGEMAKER_BASE_DIR": str(base), **env}, Options())


def some_container(**changes: Any) -> Container:
    values: dict[str, Any] = dict(
        inside=True,
        hosts=("algo-1",),
        current_host="algo-1",
        num_gpus=None,
        interface=None,
        training=None,
        validation=None,
        model_dir=Path("model"),
        output_dir=Path("output"),
        checkpoint_dir=Path("checkpoints"),
    )
    return Container(**{**values, **changes})


# -- the container ---------------------------------------------------------------------------------


def test_the_variables_set_the_directories(base, tmp_path):
    (tmp_path / "val").mkdir()
    container = container_of(
        base,
        SM_HOSTS='["a", "b", "c"]',
        SM_CURRENT_HOST="c",
        SM_NUM_GPUS="4",
        SM_CHANNEL_VALIDATION=str(tmp_path / "val"),
        SM_MODEL_DIR="/somewhere/model",
        SM_OUTPUT_DATA_DIR="/somewhere/output",
    )
    assert container == Container(
        inside=True,
        hosts=("a", "b", "c"),
        current_host="c",
        num_gpus=4,
        interface="eth0",
        training=base / "input/data/training",
        validation=tmp_path / "val",
        model_dir=Path("/somewhere/model"),
        output_dir=Path("/somewhere/output"),
        checkpoint_dir=base / "checkpoints",
    )


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"SM_HOSTS": "[algo-1,algo-2]", "SM_CURRENT_HOST": "algo-2"},  # quotes stripped
        {"SM_HOSTS": '["algo-1","al', "SM_CURRENT_HOST": "algo-2"},  # cut
        {"SM_HOSTS": "", "SM_CURRENT_HOST": ""},
        {"SM_HOSTS": "[]", "SM_CURRENT_HOST": "algo-2"},
        {"SM_HOSTS": "2", "SM_CURRENT_HOST": "algo-2"},
        {"SM_HOSTS": '"algo-2"', "SM_CURRENT_HOST": "algo-2"},
        {"SM_HOSTS": '{"algo-2": 1}', "SM_CURRENT_HOST": "algo-2"},
        {"SM_HOSTS": "[1, 2]", "SM_CURRENT_HOST": "algo-2"},
        {"SM_HOSTS": '["algo-1", "algo-2"]'},
        {"SM_CURRENT_HOST": "algo-2"},
        {"SM_NUM_GPUS": "", "SM_MODEL_DIR": ""},
    ],
)
def test_resourceconfig_replaces_missing_or_broken_variables(base, broken):
    container = container_of(base, **broken)
    assert (container.hosts, container.current_host) == (("algo-1", "algo-2"), "algo-2")
    assert container.num_gpus is None


@pytest.mark.parametrize("values", [{}, {"SM_MODEL_DIR": "", "SM_OUTPUT_DATA_DIR": ""}])
def test_directories_have_defaults_without_variables(base, values):
    container = container_of(base, **values, **({"SM_CHANNEL_TRAINING": ""} if values else {}))
    assert container.training == base / "input/data/training"
    assert container.model_dir == base / "model"
    assert container.output_dir == base / "output/data"
    assert container.checkpoint_dir == base / "checkpoints"
    assert container.validation is None


@pytest.mark.parametrize("resources", [None, "{}", "{broken", "[]", '{"hosts": "algo-1"}'])
def test_unknown_hosts_are_an_error(base, resources):
    file = base / "input/config/resourceconfig.json"
    file.unlink()
    if resources is not None:
        file.write_text(resources)
    with pytest.raises(TrainingError, match=r"cannot tell the hosts.*SM_HOSTS='\[algo-1\]'"):
        container_of(base, SM_HOSTS="[algo-1]", SM_CURRENT_HOST="algo-1")


def test_a_current_host_outside_the_hosts_is_an_error(base):
    with pytest.raises(TrainingError, match="SM_CURRENT_HOST='algo-9'"):
        container_of(base, SM_HOSTS='["algo-3", "algo-4"]', SM_CURRENT_HOST="algo-9")


def test_a_missing_training_channel_error_lists_the_channels(base):
    (base / "input/data/training").rmdir()
    with pytest.raises(DataError, match="'training' is missing; the job's channels: none"):
        container_of(base)
    for name in ("train", "text"):
        (base / "input/data" / name).mkdir()
    with pytest.raises(DataError, match="'training' is missing; the job's channels: text, train"):
        container_of(base)


def test_a_named_file_overrides_the_container(base):
    env = {"SAGEMAKER_BASE_DIR": str(base)}
    container = read_container(env, Options(data="input.txt", out="here"))
    assert not container.inside
    assert container.training == Path("input.txt").absolute()
    assert container.checkpoint_dir == Path("here/checkpoints")


@pytest.mark.parametrize("name", ["data", "resume", "out", "validation"])
def test_a_sagemaker_job_refuses_path_options(base, name):
    """Each host would train a model of its own, outside of what SageMaker keeps."""
    env = {"SAGEMAKER_BASE_DIR": str(base), "SM_HOSTS": '["algo-1"]'}
    with pytest.raises(ConfigError, match=f"--{name}: in a container SageMaker sets the paths"):
        read_container(env, Options(**{name: "here"}))  # type: ignore[arg-type]


def test_outside_a_container_each_run_has_its_own_directory(text_file, tmp_path):
    arguments = words(**{**SMALL, "max_steps": 1}, data=text_file)
    for done in [*run_hosts(arguments, cwd=tmp_path, envs=[environment()] * 2)]:
        assert done.status == 0, done.output
    assert len(list(tmp_path.glob("runs/*/model/config.json"))) == 2


# -- ranks -----------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}

OPEN_MPI_ALONE = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


def test_ranks_come_from_torchrun():
    assert read_ranks(TORCHRUN, 2) == Ranks(5, 8, 1, 4, "torchrun")


def test_ranks_come_from_open_mpi():
    assert read_ranks(OPEN_MPI, 2) == Ranks(5, 8, 1, 4, "mpirun")


def test_torchrun_goes_before_open_mpi():
    ranks = read_ranks({**OPEN_MPI, **TORCHRUN, "RANK": "4", "LOCAL_RANK": "0"}, 2)
    assert ranks is not None and (ranks.rank, ranks.local_rank) == (4, 0)


def test_without_local_world_size_hosts_have_equally_many_ranks():
    env = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ranks = read_ranks(env, 2)
    assert ranks is not None and ranks.local_world_size == 4


def test_a_master_address_alone_is_not_a_launcher():
    assert read_ranks({"MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"}, 2) is None


@pytest.mark.parametrize("env", [TORCHRUN, OPEN_MPI], ids=["torchrun", "mpirun"])
def test_a_group_of_too_few_hosts_is_an_error(env):
    with pytest.raises(TrainingError, match=r"group of 8 with 4 on this host, but .* 3 hosts"):
        read_ranks(env, 3)


def test_a_group_of_one_host_among_two_is_an_error():
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(TrainingError, match="each would train a model of its own"):
        read_ranks(env, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "x"},
        {"RANK": "8"},
        {"RANK": "-1"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_RANK": ""},
        {"WORLD_SIZE": "0"},
    ],
)
def test_impossible_ranks_are_an_error(change):
    with pytest.raises(TrainingError):
        read_ranks({**TORCHRUN, **change}, 2)


def test_a_missing_local_rank_is_an_error():
    with pytest.raises(TrainingError, match="LOCAL_RANK='' must be a whole number"):
        read_ranks({"RANK": "0", "WORLD_SIZE": "1"}, 1)


# -- devices ---------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    return pretend


def test_gpus_invisible_to_torch_are_an_error(gpus):
    gpus(0)
    with pytest.raises(TrainingError, match=r"has 4 GPUs but torch .* sees 0"):
        choose_device(Config(), some_container(num_gpus=4), 1)


def test_seeing_only_some_of_the_gpus_is_an_error(gpus):
    gpus(1)
    with pytest.raises(TrainingError, match=r"has 4 GPUs but torch .* sees 1"):
        choose_device(Config(), some_container(num_gpus=4), 4)


def test_device_cpu_asks_for_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", Mock(side_effect=AssertionError))
    assert choose_device(Config(device="cpu"), some_container(num_gpus=4), 1) == "cpu"


def test_device_cuda_without_a_gpu_is_an_error(gpus):
    gpus(0)
    with pytest.raises(TrainingError, match=r"device=cuda, but torch .* sees no GPU"):
        choose_device(Config(device="cuda"), some_container(), 1)


def test_device_mps_without_mps_is_an_error(gpus):
    gpus(0)
    with pytest.raises(TrainingError, match=r"device=mps, but torch .* sees none"):
        choose_device(Config(device="mps"), some_container(), 1)


def test_device_mps_never_selects_cuda(gpus):
    gpus(1)
    with pytest.raises(TrainingError, match=r"device=mps, but torch .* sees none"):
        choose_device(Config(device="mps"), some_container(), 1)


def test_a_rank_selects_its_own_gpu(gpus, monkeypatch):
    gpus(4)
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("set", device)))
    ranks = Ranks(2, 4, 2, 4, "hand")
    device = rank_device(Config(), some_container(num_gpus=4), ranks)
    assert device == torch.device("cuda", 2)
    assert done == [("set", device)]


def test_each_gpu_gets_a_process(gpus):
    gpus(4)
    container = some_container(num_gpus=4)
    assert local_processes(Config(), container, Options()) == 4
    with pytest.raises(TrainingError, match="processes=2, but the host has 4 GPUs"):
        local_processes(Config(), container, Options(processes=2))


def test_a_launcher_that_uses_only_some_gpus_is_an_error(gpus):
    gpus(4)
    ranks = Ranks(0, 1, 0, 1, "mpirun")
    with pytest.raises(TrainingError, match="4 GPUs, and mpirun started 1 process on it"):
        train.train(Config(), Options(), some_container(num_gpus=4), ranks)


def test_the_processes_option_sets_the_cpu_processes(gpus):
    gpus(0)
    assert local_processes(Config(), some_container(num_gpus=0), Options()) == 1
    assert local_processes(Config(), some_container(), Options(processes=3)) == 3


def test_a_group_error_omits_the_cpp_stack_trace(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "NCCL error in: x.cpp:77, unhandled system error\nLast error:\nconnect to host failed\n"
            "Exception raised from x at y.cpp:9 (most recent call first):\nframe #0: ..."
        )

    monkeypatch.setattr("entry_point.distributed.connect", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr("entry_point.distributed.wait_for_all", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(TrainingError) as caught:
        Group(Ranks(0, 2, 0, 2, "hand"), torch.device("cpu"), some_container())
    assert "Last error:\nconnect to host failed\n (GLOO_" in str(caught.value)


# -- real processes --------------------------------------------------------------------------------


def test_hosts_started_alone_form_one_group_and_make_one_model(text, tmp_path):
    first, second = run_hosts(
        words(**SMALL), cwd=tmp_path, envs=make_hosts(tmp_path / "ml", text, n_hosts=2)
    )
    assert (first.status, second.status) == (0, 0), first.output + second.output
    assert "running on 2 hosts x 1 CPU = 2 processes in one group" in first.output
    assert second.output == ""
    models = [p.relative_to(tmp_path / "ml") for p in tmp_path.rglob("model.safetensors")]
    assert models == [Path("algo-1/model/model.safetensors")]


def test_hosts_with_different_text_are_an_error(text, tmp_path):
    texts = [text, text.replace("Python", "Pythons", 1)]
    ends = run_hosts(words(**SMALL), cwd=tmp_path, envs=make_hosts(tmp_path / "ml", texts, 2))
    assert all(end.status for end in ends)
    assert ends[1].last_line.startswith("DataError: rank 1, on host algo-2, has other text than")
    assert not list(tmp_path.rglob("model.safetensors"))


def places_of_two() -> list[dict[str, str]]:
    """What torchrun tells two hosts of one rank each."""
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [{**ranks, "RANK": str(rank)} for rank in range(2)]


def hosts_by_hand() -> list[dict[str, str]]:
    """The environments of such hosts, where no container names them."""
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return [{**env, **place} for place in places_of_two()]


def test_unnamed_hosts_with_different_text_are_named_by_rank(text, tmp_path):
    for name, content in {"0": text, "1": text.replace("Python", "Pythons", 1)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "input.txt").write_text(content, encoding="utf-8")
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(words(**SMALL, data="input.txt"), cwd=tmp_path / env["RANK"], env=env)
            )
            for env in hosts_by_hand()
        ]
        ends = [ended(process) for process in processes]
    assert all(end.status for end in ends)
    assert ends[1].last_line.startswith("DataError: rank 1, on host localhost, has other text than")


def test_processes_share_all_cores_under_any_launcher(tmp_path, text_file):
    """Some builds of torch take one thread when Open MPI's variables are there."""
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    mpirun = {**OPEN_MPI_ALONE, "MASTER_ADDR": "127.0.0.1"}
    for extra, asked, processes in (({}, {}, 1), (mpirun, {}, 1), ({}, {"processes": 2}, 2)):
        arguments = words(**{**SMALL, "max_steps": 1}, data=text_file, **asked)
        end = run(arguments, cwd=tmp_path, env={**env, **extra})
        assert end.status == 0, end.output
        threads = max(1, cores() // processes)
        assert re.findall(r"(\d+) CPU thread", end.output) == [str(threads)]


def test_hosts_of_a_torchrun_group_are_counted(tmp_path, text_file):
    first, second = run_hosts(words(**SMALL, data=text_file), cwd=tmp_path, envs=hosts_by_hand())
    assert (first.status, second.status) == (0, 0), first.output + second.output
    assert "running on 2 hosts x 1 CPU = 2 processes" in first.output


def test_unnamed_hosts_may_have_unequal_numbers_of_ranks(tmp_path, text_file):
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="3")
    envs = [
        {**env, "RANK": str(rank), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks}
        for rank, (local, ranks) in enumerate([("0", "1"), ("0", "2"), ("1", "2")])
    ]
    first, *_ = run_hosts(words(**SMALL, data=text_file), cwd=tmp_path, envs=envs)
    assert first.status == 0, first.output
    assert "running on 2 hosts x CPU = 3 processes in one group" in first.output


def test_ranks_train_without_local_world_size(tmp_path, text_file):
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="4")
    envs = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)} for rank in range(4)]
    ends = run_hosts(words(**SMALL, data=text_file, out="mine"), cwd=tmp_path, envs=envs)
    assert [end.status for end in ends] == [0, 0, 0, 0], ends
    assert "running on 2 hosts x CPU = 4 processes in one group" in ends[0].output


@pytest.mark.parametrize("container", [True, False])
def test_a_run_that_torchrun_restarts_resumes(text, text_file, tmp_path, container):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1")
    places = {} if container else {"data": text_file, "out": tmp_path / "ml/algo-1"}
    end = run(
        words(**SMALL, checkpoint_seconds=1e-6, **places),
        cwd=tmp_path,
        env={
            **(make_hosts(tmp_path / "ml", text)[0] if container else environment()),
            "NANOGPT_FAULT": "1:7:kill",
        },
        command=(*torchrun, "--nproc_per_node=2", str(SCRIPT)),
    )
    assert end.status == 0, end.output
    assert "resumed from the checkpoint of step " in end.output
    assert (tmp_path / "ml/algo-1/model/model.safetensors").exists()


def test_a_restart_without_a_directory_is_refused(tmp_path, text_file):
    end = run(
        words(**SMALL, data=text_file),
        cwd=tmp_path,
        env=environment(TORCHELASTIC_RESTART_COUNT="1"),
    )
    assert end.status == 2
    assert end.last_line.endswith("only with --out DIRECTORY can it continue")


@pytest.fixture
def lone_copy(text_file, tmp_path):
    """A directory with a copy of the folder's files and a text, and nothing else."""
    for file in SCRIPT.parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    shutil.copy(text_file, tmp_path / "input.txt")
    return tmp_path


@pytest.mark.parametrize(
    "command, processes",
    [
        (["python", "train.py"], 1),
        (["torchrun", "--nproc_per_node", "2", "train.py"], 2),
    ],
    ids=["python", "torchrun"],
)
def test_a_copy_of_the_folder_trains(lone_copy, command, processes):
    env = environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if command[0] == "torchrun":
        # Any free port, so that tests side by side do not meet at torchrun's usual one.
        command = ["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *command[1:]]
    end = run(
        ["--data", "input.txt", *words(max_steps=3, eval_windows=32)],
        cwd=lone_copy,
        env=env,
        command=command,
    )
    assert end.status == 0, end.output
    assert f"= {processes} process" in end.output
    assert list(lone_copy.glob("runs/*/model/model.safetensors"))


def test_a_run_without_text_says_how_to_name_one(tmp_path):
    end = run([], cwd=tmp_path, env=environment(SAGEMAKER_BASE_DIR=str(tmp_path)))
    assert (end.status, end.last_line) == (2, "DataError: no text: name it with --data FILE")


def test_a_batch_the_processes_cannot_share_is_refused(text_file, tmp_path):
    end = run([*words(data=text_file, processes=5)], cwd=tmp_path)
    assert end.status == 2
    assert end.last_line.startswith("ConfigError: batch_size=12 cannot be shared by 5 processes")
    assert end.last_line.endswith("batch_size=10 or 15")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_ranks_reason_is_the_last_line(text_file, tmp_path, rank):
    line = "        self.step += 1\n"
    failing = (
        f"        if self.step == 3 and self.group.rank == {rank}:\n"
        "            raise ConfigError('the dog ate it')\n"
    )
    command = edited_folder(tmp_path / "mine", (line, line + failing))
    end = run(words(**SMALL, data=text_file, processes=2), cwd=tmp_path, command=command)
    assert end.status == 2
    assert end.last_line == "ConfigError: the dog ate it"


@pytest.mark.parametrize("container", [True, False])
def test_an_unexpected_error_shows_code_outside_of_the_toolkit(text_file, tmp_path, container):
    edit = ("    corpus = load_corpus(container, config, group)\n", "    corpus = 1 / 0\n")
    command = edited_folder(tmp_path / "mine", edit)
    env = environment(**{"SM_FRAMEWORK_MODULE": "training:main"} if container else {})
    end = run(words(**SMALL, data=text_file), cwd=tmp_path, command=command, env=env)
    assert end.status == 1
    assert end.last_line == "ZeroDivisionError: division by zero"
    place = (
        r"^  at train\.py:\d+ in train$" if container else r'^  File ".*/train\.py", line \d+, in'
    )
    assert re.search(place, end.output, re.MULTILINE)
    assert ("    corpus = 1 / 0\n" in end.output) is not container


def test_a_killed_rank_ends_the_job_with_a_reason(text_file, tmp_path):
    line = "        self.step += 1\n"
    killing = (
        "        if self.step == 3 and self.group.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = edited_folder(tmp_path / "mine", (line, line + killing))
    end = run(words(**SMALL, data=text_file, processes=2), cwd=tmp_path, command=command)
    assert end.status == 137
    assert end.last_line == (
        "TrainingError: rank 1 on localhost was killed by SIGKILL (was there too little memory?)"
    )


def test_running_out_of_memory_is_one_line_with_advice(text_file, tmp_path):
    bounded = ("bash", "-c", 'ulimit -v 6000000; exec "$@"', "bash", sys.executable, str(SCRIPT))
    much = {**SMALL, "batch_size": 100_000, "n_embd": 1024, "gradient_accumulation_steps": 1}
    end = run(words(**much, data=text_file, processes=1), cwd=tmp_path, command=bounded)
    assert end.status == 1
    advice = "TrainingError: set a larger gradient_accumulation_steps (now 1), or a smaller"
    assert end.last_line.startswith(advice)
    assert "can't allocate memory" in end.last_line
    assert '  File "' not in end.output


def test_a_port_in_use_is_one_line(tmp_path, text):
    env = make_hosts(tmp_path, text, n_hosts=2)[0]
    with socket.create_server(("127.0.0.1", int(env["MASTER_PORT"]))):
        end = run(words(**SMALL, processes=1), cwd=tmp_path, env=env)
    assert end.status == 1
    assert re.fullmatch(r"TrainingError: port \d+: .*; MASTER_PORT names another\n", end.output)


# -- a rank that hangs -----------------------------------------------------------------------------

ENDLESS = {**SMALL, "max_steps": 10**6, "hang_seconds": 3}
NO_SIGN = r"TrainingError: rank {} on {} gave no sign of life for \d+ s "


@pytest.fixture
def hanging(text_file, tmp_path):
    """A run of two ranks, the second of which is stopped."""
    endless = words(**ENDLESS, data=text_file, processes=2)
    with started(endless, cwd=tmp_path) as process:
        wait_for_line(process, "step=5/")
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        yield process


def test_a_hung_rank_ends_the_run_with_its_name(hanging):
    end = ended(hanging, limit=30)
    assert end.status == 1
    assert re.match(NO_SIGN.format(1, socket.gethostname()), end.last_line)


def test_one_signal_ends_a_hung_run_in_seconds(text_file, tmp_path):
    command = edited_folder(tmp_path / "train", ("STOP_SECONDS = 5.0", "STOP_SECONDS = 0.1"))
    endless = words(**{**ENDLESS, "hang_seconds": 60}, data=text_file, processes=2)
    with started(endless, cwd=tmp_path, command=command) as process:
        wait_for_line(process, "step=5/")
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        end = ended(process, limit=30)
    assert end.status == 128 + signal.SIGTERM
    assert end.last_line.startswith(f"TrainingError: rank 1 on {socket.gethostname()} ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_hung_run(hanging, number):
    hanging.send_signal(number)
    time.sleep(1.2)  # a person's second one
    hanging.send_signal(number)
    began = time.monotonic()
    end = ended(hanging, limit=30)
    assert time.monotonic() - began < 4
    assert end.status == 128 + number
    assert end.last_line == "ending now; steps after the newest checkpoint are lost"


def test_a_rank_that_pauses_briefly_is_not_ended(hanging):
    time.sleep(1.5)
    os.kill(ranks_of(hanging)[1], signal.SIGCONT)
    time.sleep(2.5)
    hanging.send_signal(signal.SIGINT)
    end = ended(hanging, limit=30)
    assert end.status == 128 + signal.SIGINT
    assert end.last_line.startswith("stopped by a signal; the checkpoint of step ")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_host_names_a_hung_rank(tmp_path, text, rank):
    """SageMaker then ends the job, and with it the host of the rank that hangs."""
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(started(words(**ENDLESS, processes=1), cwd=tmp_path, env=env))
            for env in make_hosts(tmp_path / "ml", text, n_hosts=2)
        ]
        wait_for_line(hosts[0], "step=5/")
        os.kill(ranks_of(hosts[rank])[0], signal.SIGSTOP)
        end = ended(hosts[1 - rank], limit=40)
        assert end.status == 1
        assert re.match(NO_SIGN.format(rank, f"algo-{rank + 1}"), end.last_line)


def test_a_live_rank_without_progress_is_named(text, tmp_path):
    hosts = make_hosts(tmp_path / "ml", text, n_hosts=2)
    envs = [{**host, "NANOGPT_FAULT": "2:7:hang"} for host in hosts]
    for end in run_hosts(words(**ENDLESS, processes=2), cwd=tmp_path, envs=envs):
        assert end.status == 1
        assert end.last_line.startswith(
            "TrainingError: rank 2 on algo-2 made no progress while the others waited for "
        )


# What a rank reports: round, heartbeats, timeout, host.
LIVE = [[[n, 3, 1800.0, "here"], [n, 3, 1800.0, "there"]] for n in range(1, 5)]


@pytest.mark.parametrize(
    ("seconds", "hung"),
    [
        ([*LIVE, *[[[n, 3, 1800.0, "here"], LIVE[-1][1]] for n in range(5, 14)]], ""),
        (
            [*LIVE, *[[[n, 3, 1800.0, "here"], LIVE[-1][1]] for n in range(5, 20)]],
            "rank 1 on there gave no sign of life for ",
        ),
        (
            [[[n, 3, 1.0, "here"], [n, 4, 1.0, "there"]] for n in range(1, 20)],
            "rank 0 on here made no progress while the others waited for 11 s ",
        ),
        (
            [[[n, 3, 1.0, "here"], [n, 3, 1.0, "there"]] for n in range(1, 20)],
            "rank 0 on here, rank 1 on there made no progress for 11 s ",
        ),
        ([[[n, 3, 15.0, "here"], [n, 4, 1.0, "there"]] for n in range(1, 14)], ""),
    ],
    ids=["pauses", "stops", "falls behind", "all stand still", "announced a long step"],
)
def test_the_watchdog_names_the_rank_that_hangs(monkeypatch, seconds, hung):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    watchdog = Watchdog(dist.HashStore(), 0, 2, "here", 10.0, "rank 0 on here")
    found = [words for reports in seconds if (words := watchdog.find_hung(reports))]
    assert "".join(found[:1]).startswith(hung)
    assert bool(found) is bool(hung)


def test_a_store_that_does_not_answer_is_a_hang(monkeypatch):
    ended = threading.Event()
    found: list[str] = []

    def multi_get(keys: list[str]) -> list[str]:
        ended.wait(10)
        raise RuntimeError  # which ends the thread

    def end(why: str) -> None:
        found.append(why)
        ended.set()

    monkeypatch.setattr("entry_point.distributed.end_hung", end)
    watchdog = Watchdog(Mock(multi_get=multi_get), 1, 2, "there", -1.9, "rank 0 on here")
    watchdog.thread.join(10)
    assert [words.partition(",")[0] for words in found] == ["rank 0 on here"]


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")
def test_a_run_on_one_host_listens_only_on_loopback(tmp_path, text_file):
    endless = words(**ENDLESS, data=text_file, processes=2)
    with started(endless, cwd=tmp_path) as process:
        wait_for_line(process, "step=5/")
        assert listening([process.pid, *ranks_of(process)]) == {"127.0.0.1"}


def test_a_failure_is_reported_in_one_line():
    line = failure_report(DataError("two\nlines"))
    assert line == "DataError: two lines"


@pytest.mark.parametrize("there", ["", "TheFirst: cause"])
def test_the_first_failure_is_the_reason_that_sagemaker_reads(tmp_path, text, there):
    env = make_hosts(tmp_path, text)[0]
    failure = tmp_path / "algo-1/output/failure"
    if there:
        failure.write_text(there)
    end = run(words(**{**SMALL, "batch_size": 7}, processes=2), cwd=tmp_path, env=env)
    assert end.last_line.startswith("ConfigError: ")
    assert failure.read_text() == (there or end.last_line)


def test_a_failure_in_a_container_has_a_name_the_toolkit_knows(monkeypatch):
    monkeypatch.setenv("SM_FRAMEWORK_MODULE", "sagemaker_pytorch_container.training:main")
    assert failure_report(DataError("none")) == "DataError: none [Exception]"
    assert failure_report(OSError("none")) == "OSError: none"
    decode = json.JSONDecodeError("none", "", 0)
    assert failure_report(decode).endswith("none: line 1 column 1 (char 0) [ValueError]")


def test_an_invalid_port_is_one_line(tmp_path, text):
    env = {**make_hosts(tmp_path, text, n_hosts=2)[0], "MASTER_PORT": "any"}
    end = run(words(**SMALL, processes=1), cwd=tmp_path, env=env)
    assert end.status == 1
    assert end.output == "TrainingError: MASTER_PORT='any' must be a whole number\n"


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
    with pytest.raises(TrainingError, match="a larger gradient_accumulation_steps"):
        train.main(words(**SMALL, data=text_file, processes=1))
