"""Where a run is: SageMaker's hosts and directories, and the place of a process among the ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .command_line import Options
from .errors import ConfigError, DataError, TrainingError


@dataclass(frozen=True)
class Container:
    """A host's name, the other hosts, and its directories, as SageMaker sets them.

    Outside of a container (`inside` is False) the directories come from Options.
    """

    inside: bool
    training: Path | None
    validation: Path | None
    init_from: Path | None  # the model to start from
    model_dir: Path
    output_dir: Path
    checkpoint_dir: Path
    hosts: tuple[str, ...] = ("localhost",)
    current_host: str = "localhost"
    num_gpus: int | None = None  # as SageMaker counts them; None if it gives no number
    interface: str | None = None  # network interface between the hosts
    teacher: Path | None = None  # a model to learn from, too


def read_hosts(env: Mapping[str, str], config_file: Path) -> tuple[list[str], str, str | None]:
    """The job's hosts, which of them this one is, and the network interface between them.

    On hosts after the first, mpirun carries SM_* through /etc/environment, which strips quotes.
    SM_HOSTS is no JSON there, so the file takes its place. Raises TrainingError without both.
    """
    resources: dict[str, Any] = {}
    if config_file.exists():
        resources = json.loads(config_file.read_text())
    with suppress(KeyError, ValueError):
        resources.update(hosts=json.loads(env["SM_HOSTS"]), current_host=env["SM_CURRENT_HOST"])
    host = resources.get("current_host")
    if host is None or host not in resources.get("hosts", []):
        raise TrainingError("name this host in SM_HOSTS and SM_CURRENT_HOST, or unset all SM_*")
    return resources["hosts"], host, resources.get("network_interface_name")


def read_channels(env: Mapping[str, str], channels: Path) -> dict[str, Path | None]:
    """The directories of a Container's texts and models.

    Raises DataError if the `training` channel is missing.
    """

    def channel(name: str) -> Path | None:
        directory = env.get(f"SM_CHANNEL_{name.upper()}")
        if directory:
            return Path(directory)
        return channels / name if (channels / name).is_dir() else None

    training = channel("training")
    if training is None:
        names = sorted(p.name for p in channels.iterdir()) if channels.is_dir() else []
        raise DataError(
            f"the channel 'training' is missing; the job's channels: {', '.join(names) or 'none'}"
        )
    models = {"init_from": channel("model"), "teacher": channel("teacher")}
    return {"training": training, "validation": channel("validation"), **models}


def read_container(env: Mapping[str, str], options: Options) -> Container:
    """Reads SM_* variables and resourceconfig.json, or outside of a container the options.

    SAGEMAKER_BASE_DIR moves /opt/ml, as in the SageMaker toolkit. Raises ConfigError for an option
    that names a path, in a container.
    """
    base = Path(env.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    config_file = base / "input/config/resourceconfig.json"
    has_variables = any(name in env for name in ("SM_HOSTS", "SM_CURRENT_HOST", "SM_MODEL_DIR"))
    is_by_hand = options.data or options.resume or not config_file.exists()
    if not has_variables and is_by_hand:
        return container_of_options(options)
    names = ("data", "resume", "out", "validation", "init_from", "teacher")
    paths = [f"--{name}" for name in names if getattr(options, name)]
    if paths:
        raise ConfigError(f"leave out {', '.join(paths)}: in a container SageMaker sets the paths")

    hosts, current_host, interface = read_hosts(env, config_file)
    gpus = env.get("SM_NUM_GPUS", "")
    return Container(
        inside=True,
        **read_channels(env, base / "input/data"),
        hosts=tuple(hosts),
        current_host=current_host,
        num_gpus=int(gpus) if gpus.isdecimal() else None,
        interface=interface,
        model_dir=Path(env.get("SM_MODEL_DIR") or base / "model"),
        output_dir=Path(env.get("SM_OUTPUT_DATA_DIR") or base / "output/data"),
        checkpoint_dir=base / "checkpoints",
    )


def container_of_options(options: Options) -> Container:
    """The directories of a run outside of a container."""

    def path_of(path: str) -> Path | None:
        return Path(path).absolute() if path else None

    new = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"  # two may start in one second
    out = Path(options.resume or options.out or new)
    return Container(
        inside=False,
        training=path_of(options.data),
        validation=path_of(options.validation),
        init_from=path_of(options.init_from),
        model_dir=out / "model",
        output_dir=out / "output",
        checkpoint_dir=out / "checkpoints",
        teacher=path_of(options.teacher),
    )


@dataclass(frozen=True)
class Ranks:
    """The place of this process in the group, as its launcher gave it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str


def read_ranks(env: Mapping[str, str], n_hosts: int) -> Ranks | None:
    """torchrun's variables, else Open MPI's; None when nothing launched this process.

    Raises TrainingError if the hosts of a job are not in one group, ConfigError if one is missing.
    """
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    launcher = "torchrun"
    if not {"RANK", "WORLD_SIZE"} <= env.keys():
        names = [f"OMPI_COMM_WORLD_{name.replace('WORLD_', '')}" for name in names]
        launcher = "mpirun"
    if names[1] not in env:
        return None
    missing = [name for name in names if name not in env]
    if missing:
        raise ConfigError(f"{names[1]} is set, so set {', '.join(missing)} too, as torchrun does")
    rank, world_size, local_rank, local_world_size = (int(env[name]) for name in names)
    launcher = env.get("SM_NANOGPT_LAUNCHER", launcher)  # which start_ranks sets
    if n_hosts > 1 and world_size != n_hosts * local_world_size:
        raise TrainingError(
            f"{launcher} made a group of {world_size} with {local_world_size} on this host, but the"
            f" job has {n_hosts} hosts: each would train a model of its own"
        )
    return Ranks(rank, world_size, local_rank, local_world_size, launcher)
