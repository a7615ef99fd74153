"""The process that runs one local job, in place of SageMaker and its container toolkit.

It creates what /opt/ml is in a container, starts train.py there as the toolkit does (variables,
argv, working directory), logs its output, ends it when the job is to stop or is deleted, and packs
model and output.
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

from launcher.errors import ServiceError
from launcher.files import storage
from launcher.local.backend import CHECKPOINTS, HOST, Record, read_document
from launcher.local.process import how_it_ended
from launcher.settings import Settings, load_settings

STOP_GRACE_SECONDS = 120  # between SIGTERM and SIGKILL, as in StopTrainingJob
FAILURE_REASON_CHARACTERS = 1024
RENDEZVOUS = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): .+")


class Stopped(Exception):
    """The run was asked to stop, or its job was deleted."""


class LocalRun:
    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.directory, self.settings = directory, settings
        record = read_document(directory / "job.json", Record)
        assert record is not None
        self.job, self.record = record.job, record
        self.base = directory / "hosts" / HOST  # /opt/ml in a container
        self.stop_requested = False  # by a signal
        self.state: dict[str, Any] = {"status": "InProgress", "started": time.time()}
        self.error: str | None = None  # train.py's last line that names an error

    def update(self, **changes: Any) -> None:
        self.state.update(changes)
        if not self.deleted():
            storage.write_json(str(self.directory / "state.json"), self.state)

    def run(self) -> None:
        """Run the job to its end; its final state says how it ended."""
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
            status, reason = "Failed", reason[:FAILURE_REASON_CHARACTERS]
        self.update(status=status, reason=reason, ended=time.time())

    def stopping(self) -> bool:
        return self.stop_requested or (self.directory / "stop").exists()

    def deleted(self) -> bool:
        """Whether the job was deleted; a rank may have recreated its directory."""
        return not (self.directory / "job.json").exists()

    def lay_out(self) -> None:
        (self.directory / "logs").mkdir()
        (self.directory / "output").mkdir()
        job, channels = self.job, self.job.channels
        for name in ("input/config", "model", "output/data", "checkpoints"):
            (self.base / name).mkdir(parents=True)
        (self.base / "code").mkdir()
        for path in (self.directory / "code").iterdir():  # contents alone: not all disks have modes
            shutil.copyfile(path, self.base / "code" / path.name)
        for channel, uri in channels.items():
            storage.fetch(uri, self.base / "input" / "data" / channel, settings=self.settings)
        self.write_config(list(channels))
        if job.resume is not None:
            source = self.directory.parent / job.resume / CHECKPOINTS
            if not any(source.glob("checkpoint-*.safetensors")):
                raise ServiceError(f"the checkpoints to resume from are missing: {source} has none")
            for path in sorted(source.glob("*.safetensors")):
                shutil.copyfile(path, self.base / "checkpoints" / path.name)

    def write_config(self, channels: list[str]) -> None:
        values = {name: json.dumps(value) for name, value in self.record.hyperparameters.items()}
        resources = {
            "current_host": HOST,
            "hosts": [HOST],
            "current_instance_type": "local",
            "network_interface_name": LOOPBACK,
        }
        copied = {
            "TrainingInputMode": "File",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        }
        config = self.base / "input" / "config"
        storage.write_json(str(config / "hyperparameters.json"), values)
        storage.write_json(str(config / "resourceconfig.json"), resources)
        storage.write_json(str(config / "inputdataconfig.json"), dict.fromkeys(channels, copied))

    def environment(self) -> dict[str, str]:
        """The variables of the container, without those of an outer SageMaker job or launcher.

        Variables that change Python are dropped too, except PYTHONPATH, which may provide torch.
        """
        base, values = self.base, self.record.hyperparameters
        outer = ("SM_", "OMPI_", "PMIX_", "SAGEMAKER_", "TORCHELASTIC_", "PYTHON")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "PYTHONPATH" or not (name.startswith(outer) or name in RENDEZVOUS)
        }
        channels = {path.name: str(path) for path in sorted((base / "input" / "data").iterdir())}
        return {
            **kept,
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
            **{f"SM_CHANNEL_{name.upper()}": path for name, path in channels.items()},
            "SM_HPS": json.dumps(values),
            **{f"SM_HP_{name.upper()}": str(value) for name, value in values.items()},
            "SM_USER_ARGS": json.dumps(command_line(values)),
            "PYTHONUNBUFFERED": "1",
        }

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "train.py", *command_line(self.record.hyperparameters)]
        if self.record.processes_per_host > 1 and not self.record.gpus_per_host:
            command.append(f"--processes={self.record.processes_per_host}")
        return subprocess.Popen(
            command,
            cwd=self.base / "code",
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def train(self) -> str | None:
        """Run train.py, which starts its ranks, to its end; return why the run failed, or None.

        Raises Stopped if the job was deleted, or stopped as a user asked.
        """
        log = (self.directory / "logs" / "job.log").open("wb", buffering=0)
        process = self.start()
        reader = threading.Thread(target=self.keep_output, args=(process.stdout, log), daemon=True)
        reader.start()
        stopped = {128 + signal.SIGTERM, -signal.SIGTERM}  # exit codes of a run that was asked to
        kill_at: float | None = None
        while process.poll() is None:
            if self.deleted():  # there is nowhere to save
                kill_at = 0.0
            if kill_at is None:
                if self.stopping():
                    kill_at = time.monotonic() + STOP_GRACE_SECONDS
                    self.update(status="Stopping", secondary="Stopping")
                    process.terminate()
            elif time.monotonic() > kill_at or (self.directory / "stop-now").exists():
                stopped.add(-signal.SIGKILL)
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            time.sleep(0.05)
        reader.join(timeout=5)  # a child may keep its output open
        code = process.returncode
        if self.deleted() or (self.stopping() and code in stopped):
            raise Stopped
        if code == 0:
            wrote = any((self.base / "model").iterdir())
            return None if wrote else "ServiceError: train.py exited with code 0 but wrote no model"
        if code > 0 and self.error:
            return self.error
        return f"TrainingError: train.py {how_it_ended(code)}"

    def keep_output(self, output: Iterable[bytes], log: BinaryIO) -> None:
        """Copy the output of train.py to the job's log, line by line.

        Keeps reading if the log cannot be written, since a rank with a full pipe would block.
        """
        for raw in output:
            line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            if ERROR_LINE.match(line):
                self.error = line
            with suppress(OSError):
                log.write(f"{line}\n".encode())

    def pack(self) -> None:
        """Pack model and output. Raises ServiceError."""
        base = self.base
        for source, name in ((base / "model", "model"), (base / "output" / "data", "output")):
            target = self.directory / "output" / f"{name}.tar.gz"
            with (
                storage.reported(str(target)),
                storage.replacing(target) as file,
                tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar,
            ):
                for path in sorted(source.rglob("*")):
                    tar.add(path, arcname=path.relative_to(source).as_posix(), recursive=False)


def command_line(values: Mapping[str, Any]) -> list[str]:
    """argv as in the SageMaker toolkit: sorted by name, with values as text."""
    return [word for n in sorted(values) for word in (f"--{n}", str(values[n]))]


def main(directory: str, lock: str) -> None:
    """Run the job in a directory; `lock` is the descriptor that holds its lock."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # into runner.log
    run = LocalRun(Path(directory), load_settings())  # those of the launch

    def on_signal(signum: int, frame: Any) -> None:
        run.stop_requested = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    run.run()
