"""The process that runs one local job, in place of SageMaker and its container toolkit.

It creates /opt/ml for each host, starts train.py there as the toolkit does (variables, argv,
working directory), logs its output, ends the job when a host fails or the directory is deleted, and
packs model and output.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.local.backend import Record, read_document, write_json
from launcher.settings import Settings, load_settings

STOP_GRACE_SECONDS = 120  # between SIGTERM and SIGKILL, as in StopTrainingJob
PEER_GRACE_SECONDS = 4  # the same after a host has failed; train.py gives its ranks 2
FAILURE_REASON_CHARACTERS = 1024
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): .+")


class Host:
    """One host's train.py, which runs the host's ranks, and its last error line."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name, self.process = name, process
        self.error: tuple[float, str] | None = None  # its time and text

    @property
    def failed(self) -> bool:
        return bool(self.process.returncode)

    def send(self, signum: signal.Signals) -> None:
        """Signal train.py, which ends its ranks; SIGKILL goes to each of them."""
        if self.process.poll() is None:
            if signum == signal.SIGKILL:
                os.killpg(self.process.pid, signum)
            else:
                self.process.send_signal(signum)

    def describe_exit(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"{self.name} ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (was there too little memory?)" if name == "SIGKILL" else ""
        return f"{self.name} was killed by {name}{hint}"


class Stopped(Exception):
    """The run stopped early because it was asked to."""


class LocalRun:
    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.directory, self.settings = directory, settings
        record = read_document(directory / "job.json", Record)
        assert record is not None
        self.job, self.record = record.job, record
        self.hosts = [f"algo-{i + 1}" for i in range(self.job.instance_count)]
        self.stop_requested = False
        self.state: dict[str, Any] = {"status": "InProgress", "started": time.time()}
        self.log_lock = threading.Lock()
        self.gaps: dict[Path, str] = {}  # logs that lack lines, and why

    def update(self, **changes: Any) -> None:
        self.state.update(changes)
        if self.deleted():
            return
        path = self.directory / "state.json"
        try:
            write_json(path, self.state)
        except FileNotFoundError:  # the job was deleted
            pass
        except OSError as error:
            # A full disk has no space for a new file, but some in the old one's last block.
            try:
                with path.open("r+b") as file:
                    file.write(storage.json_bytes(self.state))
                    file.truncate()
            except OSError:
                with suppress(OSError):
                    print(f"{path}: {error}: {self.state}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Run the job to its end; its final state says how it ended."""
        try:
            self.update(secondary="Downloading")
            self.lay_out()
            self.update(secondary="Training")
            failure = self.train()
            if failure is None:
                self.update(secondary="Uploading")
                failure = self.pack()
        except Stopped:
            self.update(status="Stopped", ended=time.time())
            return
        except (InputError, ServiceError, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            # The runner or a rank may have recreated the directory of a deleted job.
            if self.deleted() and not (self.directory / "lock").exists():
                shutil.rmtree(self.directory, ignore_errors=True)
        if failure is None:
            self.update(status="Completed", ended=time.time())
        else:
            reason = failure[:FAILURE_REASON_CHARACTERS]
            self.update(status="Failed", reason=reason, ended=time.time())

    def stopping(self) -> bool:
        return self.stop_requested or (self.directory / "stop").exists()

    def asked_again(self) -> bool:
        return (self.directory / "stop-now").exists()

    def deleted(self) -> bool:
        """Whether the job was deleted; a rank may have recreated its directory."""
        return not (self.directory / "job.json").exists()

    # -- before -----------------------------------------------------------------------------------

    def base(self, host: str) -> Path:
        """The directory that is /opt/ml in the host's container."""
        return self.directory / "hosts" / host

    def lay_out(self) -> None:
        (self.directory / "logs").mkdir()
        (self.directory / "output").mkdir()
        channels = {"training": self.job.data or ""}
        if self.job.validation is not None:
            channels["validation"] = self.job.validation
        if self.job.init_from is not None:
            channels["model"] = self.job.init_from
        for host in self.hosts:
            base = self.base(host)
            for name in ("input/config", "model", "output/data", "checkpoints"):
                (base / name).mkdir(parents=True)
            shutil.copytree(self.directory / "code", base / "code")
            for channel, uri in channels.items():
                storage.fetch(uri, base / "input" / "data" / channel, settings=self.settings)
            self.write_config(host, list(channels))
        if self.record.resume_from is not None:
            source = Path(self.record.resume_from)
            if not any(source.glob("checkpoint-*.safetensors")):
                raise ServiceError(f"the checkpoints to resume from are missing: {source} has none")
            given = sorted(source.glob("*.safetensors"))
            self.update(given={path.name: path.stat().st_mtime_ns for path in given})
            for path in given:
                # Atomically: a partial copy would look like a checkpoint that the job wrote.
                copy = self.base(self.hosts[0]) / "checkpoints" / path.name
                partial = copy.with_name(f"{path.name}{storage.IGNORED}")
                shutil.copy2(path, partial)
                partial.replace(copy)

    def write_config(self, host: str, channels: list[str]) -> None:
        config = self.base(host) / "input" / "config"
        values = self.record.hyperparameters
        write_json(
            config / "hyperparameters.json", {name: json.dumps(values[name]) for name in values}
        )
        write_json(
            config / "resourceconfig.json",
            {
                "current_host": host,
                "hosts": self.hosts,
                "current_instance_type": "local",
                "network_interface_name": LOOPBACK,
            },
        )
        write_json(
            config / "inputdataconfig.json",
            {
                channel: {
                    "TrainingInputMode": "File",
                    "S3DistributionType": "FullyReplicated",
                    "RecordWrapperType": "None",
                }
                for channel in channels
            },
        )

    def environment(self, host: str, port: int) -> dict[str, str]:
        """The variables of the container, without those of an outer SageMaker job or launcher.

        Variables that change Python are dropped too, except PYTHONPATH, which may provide torch.
        """
        base = self.base(host)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "PYTHONPATH"
            or (
                not name.startswith(
                    ("SM_", "OMPI_", "PMIX_", "SAGEMAKER_", "TORCHELASTIC_", "PYTHON")
                )
                and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            )
        }
        gpus, index = self.record.gpus_per_host, self.hosts.index(host)
        if gpus:
            every = [str(i) for i in range(gpus * len(self.hosts))]
            chosen = (
                kept["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in kept else every
            )
            kept["CUDA_VISIBLE_DEVICES"] = ",".join(chosen[index * gpus : (index + 1) * gpus])
        channels = {path.name: str(path) for path in sorted((base / "input" / "data").iterdir())}
        values = self.record.hyperparameters
        arguments = command_line(values)
        return {
            **kept,
            "SAGEMAKER_BASE_DIR": str(base),
            "TRAINING_JOB_NAME": self.directory.name,
            "SM_HOSTS": json.dumps(self.hosts),
            "SM_CURRENT_HOST": host,
            "SM_NUM_GPUS": str(gpus),
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
            "SM_USER_ARGS": json.dumps(arguments),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONUNBUFFERED": "1",
        }

    # -- training ---------------------------------------------------------------------------------

    def start(self) -> list[Host]:
        port = reserve_port()
        command = [sys.executable, "train.py", *command_line(self.record.hyperparameters)]
        if self.record.processes_per_host > 1 and not self.record.gpus_per_host:
            command.append(f"--processes={self.record.processes_per_host}")
        return [
            Host(
                name,
                subprocess.Popen(
                    command,
                    cwd=self.base(name) / "code",
                    env=self.environment(name, port),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                ),
            )
            for name in self.hosts
        ]

    def train(self) -> str | None:
        """Run the hosts to their end; return why the run failed, or None.

        Raises:
            Stopped: the job was deleted, or stopped because a user asked it to.
        """
        hosts = self.start()
        readers = [
            threading.Thread(target=self.keep_output, args=(host,), daemon=True) for host in hosts
        ]
        for reader in readers:
            reader.start()
        failed: list[Host] = []  # those that failed first; others fail as a result
        # Exit codes of hosts that were asked to stop.
        stopped = {128 + signal.SIGTERM, -signal.SIGTERM}
        kill_at: float | None = None
        while None in [host.process.poll() for host in hosts]:  # poll each of them
            failed = failed or [host for host in hosts if host.failed]
            if self.deleted():  # there is nowhere to save
                kill_at = 0.0
            if kill_at is None:
                if failed or self.stopping():
                    grace = PEER_GRACE_SECONDS if failed else STOP_GRACE_SECONDS
                    kill_at = time.monotonic() + grace
                    if not failed:
                        self.update(status="Stopping", secondary="Stopping")
                    for host in hosts:
                        host.send(signal.SIGTERM)
            elif time.monotonic() > kill_at or self.asked_again():
                stopped.add(-signal.SIGKILL)
                for host in hosts:
                    host.send(signal.SIGKILL)
            time.sleep(0.05)
        for reader in readers:
            reader.join(timeout=5)  # a child of a host may keep its output open
        if self.deleted():
            raise Stopped
        failed = failed or [host for host in hosts if host.failed]
        if not failed:
            return None
        # A host that loses a stopped peer fails with its own error.
        if self.stopping() and any(host.process.returncode in stopped for host in failed):
            raise Stopped
        # The first cause: when one host ends, the others lose their connection and fail later.
        errors = sorted(host.error for host in hosts if host.error)
        killed = [host for host in failed if host.process.returncode < 0]
        if errors and not killed:
            reason = errors[0][1]
        else:
            reason = f"HostError: {(killed or failed)[0].describe_exit()}"
        return reason

    def keep_output(self, host: Host) -> None:
        """Copy the output of a host to its log and to that of the job, line by line.

        Keeps reading if a log cannot be written, since a rank with a full pipe would block.
        """
        assert host.process.stdout is not None
        host_log = self.directory / "logs" / f"{host.name}.log"
        job_log = self.directory / "logs" / "job.log"
        speaker = f"{host.name}: " if len(self.hosts) > 1 else ""
        for raw in host.process.stdout:
            line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            if ERROR_LINE.match(line):
                host.error = (time.monotonic(), line)
            with self.log_lock:
                for path, text in ((host_log, line), (job_log, f"{speaker}{line}")):
                    why = self.gaps.get(path)
                    gap = f"(lines are missing here: {why})\n" if why else ""
                    try:
                        with path.open("a", encoding="utf-8") as file:
                            file.write(f"{gap}{text}\n")
                        self.gaps.pop(path, None)
                    except OSError as error:
                        self.gaps[path] = str(error.strerror)

    # -- after ------------------------------------------------------------------------------------

    def pack(self) -> str | None:
        """Pack the model and output of the first host; return why that failed, or None."""
        base = self.base(self.hosts[0])
        if not any((base / "model").iterdir()):
            return "ServiceError: train.py exited with code 0 but wrote no model"
        for source, name in ((base / "model", "model"), (base / "output" / "data", "output")):
            target = self.directory / "output" / f"{name}.tar.gz"
            with (
                storage.reported(str(target)),
                storage.replacing(target) as file,
                tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar,
            ):
                for path in sorted(source.rglob("*")):
                    tar.add(path, arcname=path.relative_to(source).as_posix(), recursive=False)
        return None


def command_line(hyperparameters: Mapping[str, Any]) -> list[str]:
    """argv as in the SageMaker toolkit: sorted by name, with values as text."""
    return [
        word
        for name in sorted(hyperparameters)
        for word in (f"--{name}", str(hyperparameters[name]))
    ]


def reserve_port() -> int:
    """Reserve a port on loopback for a minute.

    A closed connection leaves its port in TIME_WAIT: the kernel does not assign such a port, but
    allows a bind to its number, as rank 0's store does.
    """
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.close()  # closed first, so that this side enters TIME_WAIT
        client.recv(1)
        return int(listener.getsockname()[1])


def main() -> None:
    directory = Path(sys.argv[1])  # argv[2] is the descriptor that holds the lock
    run = LocalRun(directory, load_settings())  # those of the launch

    def on_signal(signum: int, frame: Any) -> None:
        run.stop_requested = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        run.run()
    except BaseException as error:
        run.update(status="Failed", reason=f"{type(error).__name__}: {error}", ended=time.time())
        raise
