"""Hosts of a job without containers: a rank of each is a fork of one process, which runs train.py.

They start in tenths of a second, for tests of what SageMaker does with a job. How its toolkit
starts train.py, and where a container differs from this machine, the containers show.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import warm
from container import Cluster, Host
from runs import command_line, environment, free_port

START = "Invoking script with the following command:"
TORCHRUN = "sagemaker_torch_distributed_enabled"  # a hyperparameter


class ForkedHosts(Cluster):
    """The hosts of a job, with one rank each; /opt/ml/code holds the archive of the script."""

    def make_images(self, directory: Path, gpus: int, second_environment_sed: str) -> None:
        assert gpus == 1 and self.volume is None and not second_environment_sed
        for host in self.hosts:
            host.directory.mkdir(parents=True)
        warm.wait_for_server()  # now, since the time of `start` is billed

    def start(self) -> None:
        port = free_port()
        for rank, host in enumerate(self.hosts):
            self.containers.append(self.start_rank(rank, host, port))

    def start_rank(self, rank: int, host: Host, port: int) -> subprocess.Popen[Any]:
        """Starts train.py as the toolkit does, which meets the other ranks at a port."""
        parameters = json.loads((host.ml / "input/config/hyperparameters.json").read_text())
        values = {name: json.loads(value) for name, value in parameters.items()}
        code = host.ml / "code"
        unpack(host, values["sagemaker_submit_directory"], code)
        script = [sys.executable, str(code / values["sagemaker_program"]), *arguments_of(values)]
        env = environment(
            SAGEMAKER_BASE_DIR=str(host.ml),
            SM_HOSTS=json.dumps(self.names),
            SM_CURRENT_HOST=host.name,
            SM_NUM_GPUS="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            **rank_variables(rank, len(self.hosts), TORCHRUN in values),
            **self.variables,
        )
        with (host.directory / "log").open("wb") as log:
            log.write(f"{START}\n\n{script}\n\n".encode())
            log.flush()
            return warm.Process(
                script,
                cwd=code,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, signum: int) -> None:
        """As in a container, whose first process passes no signal on, only SIGKILL ends a rank."""
        for process in self.containers:
            if signum == signal.SIGKILL and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)


def unpack(host: Host, archive_path: str, code: Path) -> None:
    """Unpacks the archive of the script: of a channel, or the one that was downloaded to `code`."""
    if archive_path.startswith("/opt/ml/"):
        archive = host.ml / archive_path.removeprefix("/opt/ml/")
    else:
        archive = code / archive_path.rpartition("/")[2]
    with tarfile.open(archive) as tar:
        tar.extractall(code, filter="data")


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """The command line of the script: hyperparameters without those of the toolkit."""
    script_values = {}
    for name in sorted(values):
        if not name.startswith("sagemaker_"):
            script_values[name] = values[name]
    return command_line(**script_values)


def rank_variables(rank: int, size: int, by_torchrun: bool) -> dict[str, str]:
    """What a launcher sets for the one rank of a host."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    if not by_torchrun:
        names = [f"OMPI_COMM_WORLD_{name.replace('WORLD_', '')}" for name in names]
    return dict(zip(names, map(str, (rank, size, 0, 1)), strict=True))
