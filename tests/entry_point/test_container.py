"""SageMaker's hosts, directories and ranks, as train.py finds them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from trainings import OPEN_MPI, container, rank_variables

from sm_nanogpt.entry_point import train
from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.container import Container, Ranks, read_container, read_ranks
from sm_nanogpt.entry_point.errors import ConfigError, DataError, TrainingError


def read(base: Path, **env: str) -> Container:
    return read_container({"SAGEMAKER_BASE_DIR": str(base), **env}, Options())


def test_the_variables_set_the_directories(base, tmp_path):
    (tmp_path / "val").mkdir()
    host = read(
        base,
        SM_HOSTS='["a", "b", "c"]',
        SM_CURRENT_HOST="c",
        SM_NUM_GPUS="4",
        SM_CHANNEL_VALIDATION=str(tmp_path / "val"),
        SM_MODEL_DIR="/somewhere/model",
        SM_OUTPUT_DATA_DIR="/somewhere/output",
    )
    assert host == container(
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
        {
            "SM_NUM_GPUS": "",
            "SM_MODEL_DIR": "",
            "SM_OUTPUT_DATA_DIR": "",
            "SM_CHANNEL_TRAINING": "",
        },
    ],
)
def test_missing_or_broken_variables_have_defaults(base, broken):
    assert read(base, **broken) == container(base)


@pytest.mark.parametrize(
    "hosts",
    [
        {"SM_MODEL_DIR": "model"},
        {"SM_HOSTS": '["algo-1"]'},
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
    host = read_container(env, Options(data="input.txt", out="here"))
    assert not host.inside
    assert host.training == Path("input.txt").absolute()
    assert host.checkpoint_dir == Path("here/checkpoints")


def test_a_sagemaker_job_refuses_path_options(base):
    """Each host would train a model of its own, outside of what SageMaker keeps."""
    env = {"SAGEMAKER_BASE_DIR": str(base), "SM_HOSTS": '["algo-1"]'}
    options = Options(data="a", resume="a", out="a", validation="a", init_from="a", teacher="a")
    names = "--data, --resume, --out, --validation, --init_from, --teacher"
    with pytest.raises(ConfigError, match=f"^leave out {names}:"):
        read_container(env, options)


def test_two_runs_of_one_second_have_own_directories(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    directories = []
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        directories.append(read_container({}, Options(data="input.txt")).model_dir)
    assert directories == [Path("runs/now-1/model"), Path("runs/now-2/model")]


@pytest.mark.parametrize(
    "env, ranks",
    [
        (rank_variables(5, 8, 1, 4), Ranks(5, 8, 1, 4, "torchrun")),
        (rank_variables(5, 8, 1, 4, by=OPEN_MPI), Ranks(5, 8, 1, 4, "mpirun")),
        (
            {**rank_variables(5, 8, 1, 4, by=OPEN_MPI), **rank_variables(4, 8, 0, 4)},
            Ranks(4, 8, 0, 4, "torchrun"),
        ),
        (
            {**rank_variables(5, 8, 1, 4, by=OPEN_MPI), "WORLD_SIZE": "8"},
            Ranks(5, 8, 1, 4, "mpirun"),
        ),
        ({"WORLD_SIZE": "8"}, None),
    ],
    ids=["torchrun", "mpirun", "torchrun's before mpirun's", "no rank", "no launcher"],
)
def test_ranks_come_from_the_launcher(env, ranks):
    assert read_ranks(env, 2) == ranks


@pytest.mark.parametrize(
    "env, n_hosts, message",
    [
        (rank_variables(5, 8, 1, 4, by=OPEN_MPI), 3, "mpirun .* 8 with 4 .* 3 hosts"),
        (rank_variables(0, 4, 0, 4), 2, "torchrun .* 4 with 4 .* 2 hosts"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, "set LOCAL_RANK, LOCAL_WORLD_SIZE too"),  # as Slurm
    ],
)
def test_impossible_ranks_are_refused(env, n_hosts, message):
    with pytest.raises(TrainingError, match=message):
        read_ranks(env, n_hosts)


@pytest.mark.parametrize(
    "inside, error, message",
    [(False, ConfigError, "--out DIRECTORY"), (True, DataError, None)],
)
def test_a_restart_outside_a_container_needs_out(monkeypatch, inside, error, message):
    """In a container it goes on, with the checkpoints that SageMaker keeps."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(train, "Group", Mock(side_effect=DataError))
    host = container(inside=inside)
    with pytest.raises(error, match=message):
        train.train(Config(device="cpu"), Options(), host, Ranks(0, 1, 0, 1, "torchrun"))


def test_a_run_without_text_names_the_option(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(DataError, match=r"^no text: .*--data FILE"):
        train.main([])
