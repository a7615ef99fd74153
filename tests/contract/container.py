"""SageMaker's training containers without Docker: each host in namespaces of its own.

A host has its own network, processes, name and files. Its root is the machine's, under a layer in
memory that takes all writes, so nothing outside is touched and everything vanishes with the first
process. Its /opt/ml is a directory of the test, which outlives it.

Inside, the real toolkit starts train.py through the real mpirun, sshd or torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
from runs import SCRIPT

from sm_nanogpt.launcher.sagemaker.request import source_archive
from sm_nanogpt.launcher.source import Source

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("TOOLKIT_PYTHON", REPOSITORY / ".venv-contract/bin/python"))
NEW_TOOLKIT = PYTHON.parents[1] / "toolkit-of-2.11"
LIMIT = 240.0  # seconds until a job counts as hung; some test machines are slow
SSHD = "/usr/sbin/sshd"

# What the SDK adds to the hyperparameters for each `distribution`.
LAUNCHERS: dict[str, dict[str, Any]] = {
    "pytorchddp": dict(
        sagemaker_distributed_dataparallel_enabled=True,
        sagemaker_distributed_dataparallel_custom_mpi_options="--NCCL_DEBUG WARN",
    ),
    "torchrun": dict(sagemaker_torch_distributed_enabled=True),
    # {"pytorchddp": {"enable": True}}, as in a tutorial that many have copied
    "typo": dict(sagemaker_distributed_dataparallel_enabled=False),
}

# The host's directory is $1, its name $2, its address $3, the size of its volume in bytes $4 or ''
# for no limit; the rest are directories to show inside.
BOOT = r"""
set -euo pipefail
exec 2>&1  # what unshare says is none of the container's log
host=$1 name=$2 address=$3 volume=$4
shift 4
read -r _  # until the network is there
hostname "$name"
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up

mount -t tmpfs tmpfs "$host/stage"
cd "$host/stage"
mkdir above work root
cp -a "$host/files/." above
mount -t overlay overlay -o lowerdir=/,upperdir=above,workdir=work root
cd root
mount --rbind /dev dev
mount --rbind /sys sys
mount -t proc proc proc
for place in dev/shm tmp run; do mount -t tmpfs tmpfs $place; done
mkdir run/sshd
mount --bind "$host/ssh" root/.ssh
mount --bind "$host/sshd" etc/ssh
if [ "$volume" ]; then
    mount -t tmpfs -o "size=$volume" tmpfs opt/ml
    cp -a "$host/ml/." opt/ml
else
    mount --bind "$host/ml" opt/ml
fi
for place; do
    mkdir -p ".$place"
    mount --bind --options ro "$place" ".$place"
done
sed -i '/pam_loginuid/s/required/optional/' etc/pam.d/sshd

# As in the images, PID 1 is a bash that waits for the command and handles no signal.
exec chroot . /usr/bin/bash -m /opt/image/start.sh </dev/null
"""

# The toolkit looks for the other host once a second, and sleeps for 30 s at the end; here
# each sleep is 0.2 s at most. It imports torch, for two seconds, to note its version.
TRAIN = """\
import sys, time, types
from importlib.metadata import version
from subprocess import run
from sagemaker_training import mpi, smdataparallel, trainer

hurried = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, 0.2)))
mpi.time = smdataparallel.time = hurried
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__version__ = version("torch")
write = mpi._write_env_vars_to_file

def write_and_edit():
    write()
    run(["sed", "-i", "-f", "/opt/image/environment.sed", "/etc/environment"], check=True)

mpi._write_env_vars_to_file = write_and_edit
trainer.train()
"""

OPEN_MPI = """\
hwloc_base_binding_policy = none
rmaps_base_mapping_policy = slot
"""

SSHD_CONFIG = """\
HostKey /etc/ssh/host_key
PermitRootLogin yes
UsePAM yes
Subsystem sftp internal-sftp
"""

SSH_CONFIG = """\
Host *
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


@cache
def lacking() -> str:
    """What keeps this machine from having such containers; '' if nothing does."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "they take root"
    for place in (PYTHON, NEW_TOOLKIT):
        if not place.exists():
            return f"no {place} (make .venv-contract/installed)"
    tools = ["mpirun", "torchrun", SSHD, "ssh", "ssh-keygen", "ip", "nsenter", "setpriv", "unshare"]
    path = f"{PYTHON.parent}:/usr/sbin:/sbin:{os.environ['PATH']}"
    if missing := [tool for tool in tools if shutil.which(tool, path=path) is None]:
        return f"not installed: {', '.join(missing)} (see CONTRIBUTING.md)"
    probe = (
        "ip link add eth0 type veth peer name eth1 && mount -t tmpfs tmpfs /mnt && cd /mnt"
        " && mkdir above work root"
        " && mount -t overlay overlay -o lowerdir=/,upperdir=above,workdir=work root"
    )
    command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c", probe]
    ran = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces here: {ran.stderr.strip()}" if ran.returncode else ""


def require() -> None:
    """Skips a test where there can be no containers."""
    if reason := lacking():
        pytest.skip(f"no containers: {reason}")


def write_tree(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.read_bytes().startswith(b"#!"):
            path.chmod(0o755)


@dataclass(frozen=True)
class Host:
    """One host of a job: the directory that holds its /opt/ml and its log."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def ml(self) -> Path:
        return self.directory / "ml"

    @property
    def model(self) -> Path:
        return self.ml / "model"

    @property
    def checkpoints(self) -> Path:
        return self.ml / "checkpoints"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def failure(self) -> str:
        """What SageMaker would show as FailureReason."""
        path = self.ml / "output/failure"
        return path.read_text()[:1024] if path.exists() else ""

    @property
    def status(self) -> int:
        """The exit status of the container; negative when it was killed."""
        return int((self.directory / "status").read_text())

    def lay_out_ml(
        self,
        *,
        hosts: Sequence[str],
        instance_type: str,
        hyperparameters: Mapping[str, str],
        channels: Sequence[str],
    ) -> None:
        """What SageMaker puts into /opt/ml before the container starts, the data apart."""
        group = dict(
            instance_group_name="homogeneousCluster", instance_type=instance_type, hosts=[*hosts]
        )
        resources = dict(
            current_host=self.name,
            current_instance_type=instance_type,
            current_group_name="homogeneousCluster",
            hosts=[*hosts],
            instance_groups=[group],
            network_interface_name="eth0",
        )
        channel = dict(
            TrainingInputMode="File", S3DistributionType="FullyReplicated", RecordWrapperType="None"
        )
        config = {
            "hyperparameters": hyperparameters,
            "resourceconfig": resources,
            "inputdataconfig": dict.fromkeys(channels, channel),
        }
        write_tree(
            self.ml / "input/config",
            {f"{name}.json": json.dumps(value) for name, value in config.items()},
        )
        for place in (
            "model",
            "output/data",
            "checkpoints",
            *(f"input/data/{c}" for c in channels),
        ):
            (self.ml / place).mkdir(parents=True, exist_ok=True)

    def lay_out_image(
        self, *, hosts: Sequence[str], gpus: int, environment_sed: str, keys: Path
    ) -> None:
        """What the image holds, and what is the host's own outside of /opt/ml."""
        bin = "opt/image/bin"  # before all else on the container's PATH
        write_tree(
            self.directory,
            {
                "files/etc/hosts": "127.0.0.1 localhost\n"
                + "".join(f"{address(i)} {host}\n" for i, host in enumerate(hosts)),
                "files/etc/environment": "",
                "files/etc/openmpi/openmpi-mca-params.conf": OPEN_MPI,
                "files/opt/image/start.sh": "train\n",
                "files/opt/image/environment.sed": environment_sed,
                f"files/{bin}/train": f"#!{PYTHON.absolute()}\n{TRAIN}",
                f"files/{bin}/mpirun": '#!/bin/sh\nexec mpirun.real --allow-run-as-root "$@"\n',
                f"files/{bin}/nvidia-smi": "#!/bin/sh\n"
                + "".join(f"echo 'GPU {i}: NVIDIA A10G (UUID: GPU-{i})'\n" for i in range(gpus)),
                "sshd/sshd_config": SSHD_CONFIG,
                "ssh/config": SSH_CONFIG,
            },
        )
        mpirun = shutil.which("mpirun")
        assert mpirun is not None
        (self.directory / "files" / bin / "mpirun.real").symlink_to(mpirun)
        for name in ("root/.ssh", "etc/ssh", "opt/ml", "tmp", "run"):
            (self.directory / "files" / name).mkdir(parents=True, exist_ok=True)
        (self.directory / "stage").mkdir()
        shutil.copy(keys / "host", self.directory / "sshd/host_key")
        shutil.copy(keys / "user", self.directory / "ssh/id_ed25519")
        shutil.copy(keys / "user.pub", self.directory / "ssh/authorized_keys")
        (self.directory / "ssh").chmod(0o700)


def address(index: int) -> str:
    return f"10.0.0.{index + 1}"


def listen(pid: int, port: int) -> socket.socket:
    """A socket that listens on a port in the network of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    sockets: list[socket.socket | OSError] = []

    def inside() -> None:
        # The thread moves there and ends there; the socket stays where it was made.
        with Path(f"/proc/{pid}/ns/net").open() as network:
            if libc.setns(network.fileno(), 0):
                sockets.append(OSError(ctypes.get_errno(), "setns"))
                return
        sockets.append(socket.create_server(("0.0.0.0", port), backlog=64))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    (result,) = sockets
    if isinstance(result, OSError):
        raise result
    return result


def python_homes() -> list[str]:
    """The directories of the containers' Python, which may lie under /tmp or on other disks."""
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    return subprocess.check_output([PYTHON, "-c", code], text=True).splitlines()


class Cluster:
    """The hosts of a job, one or two; as a context, nothing of them runs on afterwards.

    Each host has `gpus` GPUs as far as nvidia-smi knows, and the launchers start one rank for each.
    What is in /opt/ml when the hosts start is up to the caller, who writes below Host.ml.

    With `threads`, each rank has so many; without, as many as it takes by itself. With `volume`,
    /opt/ml is a volume of so many bytes. With `port`, `sockets` has for each host a socket that
    listens there inside the host, for the caller to answer. With `new_image`, the hosts have the
    toolkit of AWS's images for GPUs since PyTorch 2.11.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job_name: str,
        hosts: int,
        gpus: int,
        threads: int | None,
        second_environment_sed: str = "",
        variables: Mapping[str, str] | None = None,
        volume: int | None = None,
        port: int | None = None,
        new_image: bool = False,
    ) -> None:
        assert hosts in (1, 2)
        self.volume, self.port = volume, port
        self.sockets: list[socket.socket] = []
        self.descriptors: list[int] = []
        self.names = [f"algo-{i + 1}" for i in range(hosts)]
        self.hosts = [Host(directory / name) for name in self.names]
        self.containers: list[subprocess.Popen[bytes]] = []
        self.failed_first: Host | None = None
        self.failed_at = 0.0
        self.variables = {"TRAINING_JOB_NAME": job_name, **(variables or {})}
        if threads is not None:
            self.variables.setdefault("OMP_NUM_THREADS", str(threads))
        if new_image:
            self.variables["PYTHONPATH"] = str(NEW_TOOLKIT)
            # Their start script preloads a library that it cannot make, as it lacks the source.
            self.variables["LD_PRELOAD"] = "/libchangehostname.so"
        self.make_images(directory, gpus, second_environment_sed)

    def make_images(self, directory: Path, gpus: int, second_environment_sed: str) -> None:
        """Lays out what the images hold."""
        keys = directory / "keys"
        keys.mkdir(parents=True)
        for name in ("user", "host"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
            subprocess.run(command, check=True)
        for index, host in enumerate(self.hosts):
            host.lay_out_image(
                hosts=self.names,
                gpus=gpus,
                environment_sed=second_environment_sed if index else "",
                keys=keys,
            )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        # The two outer words make the containers die with the tests, however those end.
        inside = "setpriv --pdeathsig KILL unshare --kill-child --fork --mount --uts --pid --net"
        homes = python_homes()
        env = {
            "PATH": f"/opt/image/bin:{PYTHON.absolute().parent}:/usr/local/sbin:/usr/local/bin"
            ":/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": "/usr/local/lib",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
            **self.variables,
        }
        for index, host in enumerate(self.hosts):
            volume = "" if self.volume is None else str(self.volume)
            place = [str(host.directory), host.name, address(index), volume]
            with (host.directory / "log").open("wb") as log:
                process = subprocess.Popen(
                    [*inside.split(), "bash", "-c", BOOT, "boot", *place, *homes],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self.containers.append(process)
        first, last = self.pid1(0), self.pid1(len(self.hosts) - 1)
        peer = f"eth0 netns {last}" if first != last else "eth1"
        link = f"ip link add eth0 type veth peer name {peer}"
        subprocess.run(["nsenter", f"--net=/proc/{first}/ns/net", *link.split()], check=True)
        if self.port is not None:
            self.sockets = [listen(self.pid1(i), self.port) for i in range(len(self.hosts))]
        for process in self.containers:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()
        if self.volume is not None:
            self.hold_volumes()

    def hold_volumes(self) -> None:
        """Makes each Host.ml the volume inside, which then outlives its host."""
        for index, host in enumerate(self.hosts):
            root = Path(f"/proc/{self.pid1(index)}/root")
            deadline = time.monotonic() + 30
            while not (root / "opt/image").exists():
                assert self.containers[index].poll() is None and time.monotonic() < deadline, (
                    host.log
                )
                time.sleep(0.01)
            descriptor = os.open(root / "opt/ml", os.O_RDONLY)
            self.descriptors.append(descriptor)
            host.ml.rename(host.directory / "ml-laid-out")
            host.ml.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")

    def release(self) -> None:
        """Lets the volumes go."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def pid1(self, index: int) -> int:
        """The machine's number for the first process of a host."""
        outer = self.containers[index].pid
        children = Path(f"/proc/{outer}/task/{outer}/children")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if pids := children.read_text().split():
                return int(pids[0])
            time.sleep(0.01)
        raise AssertionError(f"no container: {self.hosts[index].log}")

    def poll(self) -> list[int | None]:
        """The exit statuses of the hosts that have ended; notes who failed first."""
        codes = [process.poll() for process in self.containers]
        if any(codes) and self.failed_first is None:
            self.failed_first = next(h for h, c in zip(self.hosts, codes, strict=True) if c)
            self.failed_at = time.time()
        return codes

    def wait(self, limit: float = LIMIT) -> None:
        """Until all hosts have ended. As on SageMaker, one that fails takes the others along."""
        deadline = time.time() + limit
        while True:
            codes = self.poll()
            if self.failed_first is not None:
                deadline = min(deadline, self.failed_at + 3)
            if None not in codes or time.time() > deadline:
                break
            time.sleep(0.05)
        self.kill()
        assert None not in codes or any(codes), f"hung:\n{self.log}"

    def processes(self, index: int) -> list[list[str]]:
        """The command line of each process of a host, followed by those of the ones above it.

        There is none before all hosts are started.
        """
        if len(self.containers) < len(self.hosts):
            return []

        def below(pid: int, above: list[str]) -> Iterator[list[str]]:
            with contextlib.suppress(OSError):  # gone meanwhile
                command_line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                lines = [command_line.replace("\0", " ").strip(), *above]
                yield lines
                for task in Path(f"/proc/{pid}/task").iterdir():
                    for child in (task / "children").read_text().split():
                        yield from below(int(child), lines)

        return list(below(self.pid1(index), []))

    def signal(self, signum: int) -> None:
        for index, process in enumerate(self.containers):
            if process.poll() is None:
                os.kill(self.pid1(index), signum)

    def kill(self) -> None:
        running = [process.poll() is None for process in self.containers]
        # With its first process, a container ends whole, before that process counts as ended.
        self.signal(signal.SIGKILL)
        for host, process, killed in zip(self.hosts, self.containers, running, strict=False):
            status = process.wait()  # unshare's own, which tells nothing of a killed container
            (host.directory / "status").write_text(str(-signal.SIGKILL if killed else status))
        self.containers.clear()

    @property
    def log(self) -> str:
        """The logs of all hosts, one after the other."""
        return "".join(host.log for host in self.hosts)


class Job(Cluster):
    """A training job without SageMaker around it: the training folder with `values`, on `text`."""

    def __init__(
        self,
        directory: Path,
        *,
        text: str,
        values: Mapping[str, Any],
        launcher: str = "pytorchddp",
        hosts: int = 1,
        gpus: int = 2,
        threads: int | None = 1,  # the cores are those of other tests too
        folder: Path = SCRIPT.parent,
        second_environment_sed: str = "",
        variables: Mapping[str, str] | None = None,
        new_image: bool = False,
    ) -> None:
        super().__init__(
            directory,
            job_name="sm-nanogpt-contract",
            hosts=hosts,
            gpus=gpus,
            threads=threads,
            second_environment_sed=second_environment_sed,
            variables=variables,
            new_image=new_image,
        )
        hyperparameters = {
            **values,
            "sagemaker_submit_directory": "/opt/image/sourcedir.tar.gz",
            "sagemaker_program": "train.py",
            "sagemaker_container_log_level": 20,
            "sagemaker_job_name": "sm-nanogpt-contract",
            "sagemaker_region": "us-east-1",
            "sagemaker_instance_type": "ml.g5.12xlarge",
            **LAUNCHERS[launcher],
        }
        for host in self.hosts:
            host.lay_out_ml(
                hosts=self.names,
                instance_type="ml.g5.12xlarge",
                hyperparameters={k: json.dumps(v) for k, v in hyperparameters.items()},
                channels=["training"],
            )
            (host.ml / "input/data/training/input.txt").write_text(text)
            archive = host.directory / "files/opt/image/sourcedir.tar.gz"
            archive.write_bytes(source_archive(Source.read(folder), launcher))
