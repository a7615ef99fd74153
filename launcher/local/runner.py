"""The process that runs one local job, in place of SageMaker and its container toolkit.

It makes the directories of /opt/ml, starts train.py there as the toolkit does (variables, argv,
working directory), logs its output, ends it when the job is stopped or deleted, and packs model and
output.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.local.backend import CHECKPOINTS, HOST, Record, read_document
from sm_nanogpt.launcher.local.process import Program, describe_status
from sm_nanogpt.launcher.settings import Settings, load_settings

STOP_GRACE_SECONDS = 120  # between SIGTERM and SIGKILL, as in StopTrainingJob
MAX_REASON_CHARACTERS = 1024
# Variables of an outer SageMaker job or launcher, which train.py would read, and those of Python.
OUTER_PREFIXES = ("SM_", "OMPI_", "PMIX_", "SAGEMAKER_", "TORCHELASTIC_", "PYTHON")
OUTER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): .+")


class Stopped(Exception):
    """The run was asked to stop, or its job was deleted."""


class LocalRun:
    """The run of the job in a directory."""

    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.directory = directory
        self.settings = settings
        record = read_document(directory / "job.json", Record)
        assert record is not None
        self.record = record
        self.job = record.job
        self.base = directory / "hosts" / HOST  # /opt/ml in a container
        self.stop_requested = False  # by a signal
        self.state: dict[str, Any] = {"status": "InProgress", "started": time.time()}
        self.error: str | None = None  # train.py's last line that names an error

    def update(self, **changes: Any) -> None:
        """Change fields of the state, and write it unless the job was deleted."""
        self.state.update(changes)
        if not self.is_deleted():
            storage.write_json(str(self.directory / "state.json"), self.state)

    def run(self) -> None:
        """Run the job to its end, and write into its state how it ended."""
        status = "Completed"
        reason: str | None = None
        try:
            self.update(secondary="Downloading")
            self.lay_out()
            self.update(secondary="Training")
            reason = self.train()
            if reason is None:
                self.update(secondary="Uploading")
                self.pack()
        except Stopped:
            status = "Stopped"
        except Exception as error:
            traceback.print_exc()  # into runner.log
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            status = "Failed"
            reason = reason[:MAX_REASON_CHARACTERS]
        self.update(status=status, reason=reason, ended=time.time())

    def is_stopping(self) -> bool:
        return self.stop_requested or (self.directory / "stop").exists()

    def is_deleted(self) -> bool:
        """True if the job was deleted. A rank may have created its directory again."""
        return not (self.directory / "job.json").exists()

    def lay_out(self) -> None:
        """Make the directories of a container, with code, texts, and earlier checkpoints."""
        (self.directory / "logs").mkdir()
        (self.directory / "output").mkdir()
        for name in ("input/config", "model", "output/data", "checkpoints"):
            (self.base / name).mkdir(parents=True)
        (self.base / "code").mkdir()
        for path in (self.directory / "code").iterdir():  # contents alone: not all disks have modes
            shutil.copyfile(path, self.base / "code" / path.name)
        for channel, uri in self.job.channels.items():
            storage.fetch(uri, self.base / "input" / "data" / channel, settings=self.settings)
        self.write_config()
        if self.job.resume is not None:
            source = self.directory.parent / self.job.resume / CHECKPOINTS
            if not any(source.glob("checkpoint-*.safetensors")):
                raise ServiceError(f"the checkpoints to resume from are missing: {source} has none")
            for path in sorted(source.glob("*.safetensors")):
                shutil.copyfile(path, self.base / "checkpoints" / path.name)

    def write_config(self) -> None:
        """Write the files of input/config, as SageMaker does."""
        values = {name: json.dumps(value) for name, value in self.record.hyperparameters.items()}
        resources = {
            "current_host": HOST,
            "hosts": [HOST],
            "current_instance_type": LOCAL,
            "network_interface_name": LOOPBACK,
        }
        channel = {
            "TrainingInputMode": "File",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        }
        config = self.base / "input" / "config"
        storage.write_json(str(config / "hyperparameters.json"), values)
        storage.write_json(str(config / "resourceconfig.json"), resources)
        channels = dict.fromkeys(self.job.channels, channel)
        storage.write_json(str(config / "inputdataconfig.json"), channels)

    def environment(self) -> dict[str, str]:
        """The variables of this process, without those of an outer container; then our container's.

        PYTHONPATH stays, by which Python may find torch.
        """
        variables = {}
        for name, value in os.environ.items():
            is_outer = name.startswith(OUTER_PREFIXES) or name in OUTER_VARIABLES
            if not is_outer or name == "PYTHONPATH":
                variables[name] = value
        return {**variables, **self.container_variables()}

    def container_variables(self) -> dict[str, str]:
        """The variables that SageMaker's toolkit sets, and two of ours: SM_NANOGPT_LAUNCHER, and
        PYTHONUNBUFFERED, by which the log has each line at once."""
        base = self.base
        values = self.record.hyperparameters
        channels = {path.name: str(path) for path in sorted((base / "input" / "data").iterdir())}
        variables = {
            "SAGEMAKER_BASE_DIR": str(base),
            "TRAINING_JOB_NAME": self.directory.name,
            "SM_HOSTS": json.dumps([HOST]),
            "SM_CURRENT_HOST": HOST,
            "SM_NUM_GPUS": str(self.record.gpus_per_host),
            "SM_NUM_CPUS": str(os.cpu_count() or 1),
            "SM_NETWORK_INTERFACE_NAME": LOOPBACK,
            "SM_NANOGPT_LAUNCHER": "sm-nanogpt",
            "SM_MODEL_DIR": str(base / "model"),
            "SM_INPUT_DIR": str(base / "input"),
            "SM_INPUT_CONFIG_DIR": str(base / "input" / "config"),
            "SM_OUTPUT_DIR": str(base / "output"),
            "SM_OUTPUT_DATA_DIR": str(base / "output" / "data"),
            "SM_CHANNELS": json.dumps(list(channels)),
            "SM_HPS": json.dumps(values),
            "SM_USER_ARGS": json.dumps(command_line(values)),
            "PYTHONUNBUFFERED": "1",
        }
        for name, path in channels.items():
            variables[f"SM_CHANNEL_{name.upper()}"] = path
        for name, value in values.items():
            variables[f"SM_HP_{name.upper()}"] = str(value)
        return variables

    def start(self) -> Program:
        """Start train.py in the session of this process, so that a job is one session."""
        command = [sys.executable, "train.py", *command_line(self.record.hyperparameters)]
        if self.record.processes_per_host > 1 and not self.record.gpus_per_host:
            command.append(f"--processes={self.record.processes_per_host}")
        return Program(
            command,
            leads_session=False,
            cwd=self.base / "code",
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def train(self) -> str | None:
        """Run train.py, which starts its ranks, to its end; return why it failed, or None.

        Raises Stopped if the job was deleted, or stopped because a user asked for it.
        """
        log = (self.directory / "logs" / "job.log").open("wb", buffering=0)
        program = self.start()
        reader = threading.Thread(target=self.keep_output, args=(program.output, log), daemon=True)
        reader.start()
        stopped_codes = {128 + signal.SIGTERM, -signal.SIGTERM}  # of a run that obeyed SIGTERM
        kill_at: float | None = None
        while not program.has_ended():
            if self.is_deleted():  # there is nowhere to save
                kill_at = 0.0
            if kill_at is None:
                if self.is_stopping():
                    kill_at = time.monotonic() + STOP_GRACE_SECONDS
                    self.update(status="Stopping", secondary="Stopping")
                    program.terminate()
            elif time.monotonic() > kill_at or (self.directory / "stop-now").exists():
                stopped_codes.add(-signal.SIGKILL)
                program.kill()  # and its ranks
            time.sleep(0.05)
        reader.join(timeout=5)  # a child may keep its output open
        code = program.status or 0
        if self.is_deleted() or (self.is_stopping() and code in stopped_codes):
            raise Stopped
        if code == 0:
            if any((self.base / "model").iterdir()):
                return None
            return "ServiceError: train.py exited with code 0 but wrote no model"
        if code > 0 and self.error:
            return self.error
        return f"TrainingError: train.py {describe_status(code)}"

    def keep_output(self, output: Iterable[bytes], log: BinaryIO) -> None:
        """Copy the output of train.py to the job's log, line by line, and note the last error.

        If the log cannot be written, this still reads: a rank with a full pipe would block.
        """
        for raw_line in output:
            line = raw_line.decode("utf-8", errors="replace").rstrip("\r\n")
            if ERROR_LINE.match(line):
                self.error = line
            with suppress(OSError):
                log.write(f"{line}\n".encode())

    def pack(self) -> None:
        """Pack model and output. Raises ServiceError."""
        archives = self.directory / "output"
        pack_directory(self.base / "model", archives / "model.tar.gz")
        pack_directory(self.base / "output" / "data", archives / "output.tar.gz")


def pack_directory(directory: Path, archive: Path) -> None:
    """Pack all files below a directory. Raises ServiceError.

    Nothing is compressed: that of weights takes long and saves little.
    """
    with (
        storage.errors_about(str(archive)),
        storage.replacing(archive) as file,
        tarfile.open(fileobj=file, mode="w:gz", compresslevel=0) as tar,
    ):
        for path in sorted(directory.rglob("*")):
            tar.add(path, arcname=path.relative_to(directory).as_posix(), recursive=False)


def command_line(hyperparameters: Mapping[str, Any]) -> list[str]:
    """The arguments of train.py as in the SageMaker toolkit: sorted by name, values as text."""
    arguments = []
    for name in sorted(hyperparameters):
        arguments += [f"--{name}", str(hyperparameters[name])]
    return arguments


def main(directory: str, lock: str) -> None:
    """Run the job in a directory; `lock` is the descriptor that holds its lock."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # into runner.log
    run = LocalRun(Path(directory), load_settings())  # the settings of the launch

    def on_signal(signum: int, frame: Any) -> None:
        run.stop_requested = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    run.run()
