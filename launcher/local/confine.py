"""Run a program that reaches its own files alone: no network, no other process, no other memory.

Three layers, each where this system has it: bubblewrap (namespaces of its own), Landlock (files),
and a filter of system calls by libseccomp. By the last, a program starts threads and no processes,
so that its processor time is all that it has computed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.local import landlock, restrict, syscalls
from launcher.local.gpus import Gpu
from launcher.local.process import BWRAP, python_command

logger = logging.getLogger(__name__)

BUBBLEWRAP, LANDLOCK, FILTER = "bubblewrap", "Landlock", "libseccomp"
CLOSED_BY = {  # what a confined program cannot reach, and the layers of which each closes it
    "all files": {BUBBLEWRAP, LANDLOCK},
    "the network": {BUBBLEWRAP, FILTER},
    "other processes": {BUBBLEWRAP, FILTER},
    "memory that outlives them": {BUBBLEWRAP, FILTER},
    "modes and times of files": {BUBBLEWRAP, FILTER},
    "keyrings": {FILTER},
    "locks of files": {FILTER},
    "processes whose time nobody counts": {FILTER},
}
# The program is process 1, so that bwrap waits for it itself, and its processor time counts.
NAMESPACES = [BWRAP, "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
NAMESPACES += ["--proc", "/proc", "--dev", "/dev"]
# After all directories are there. To root's processes, bwrap leaves /proc/sys writable.
FIXED = ["--remount-ro", "/", "--remount-ro", "/dev", "--remount-ro", "/proc"]

# What a confined program reads of the system: programs and libraries below these, and files.
PREFIXES = ("/", "/usr", "/usr/local", sys.prefix, sys.base_prefix)
LIBRARIES = ("bin", "include", "lib", "lib64", "libexec", "pyvenv.cfg", "sbin")
SYSTEM = (
    *("/etc/alternatives", "/etc/group", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd"),
    *("/sys/bus/pci", "/sys/devices", "/sys/module", "/nix/store", "/run/opengl-driver"),
)
PROC = ("cpuinfo", "meminfo", "stat", "sys", "filesystems", "modules", "devices", "driver")
LAUNCHER = Path(__file__).parents[2]  # where Python looks for the launcher
# Variables that a confined program gets. Others may hold keys, or say who the user is.
VARIABLES = {"PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "PYTHONHASHSEED"}
FAMILIES = ("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "CUDA_")


@dataclass(frozen=True)
class Sandbox:
    """What a confined program may use.

    It reads `readable` and Python's packages, and writes below the directory `writable`, in which
    it begins. With a GPU, it has the devices of that one. The kernel ends it soon after
    `cpu_seconds` of computing.
    """

    readable: Sequence[Path]
    writable: Path
    gpu: Gpu | None = None
    cpu_seconds: float = math.inf

    @property
    def may_fork(self) -> bool:
        """Whether it may start processes, as the compiler for a GPU does: there the clock counts
        its time, and bubblewrap ends them with it."""
        return self.gpu is not None and BUBBLEWRAP in layers()

    @property
    def devices(self) -> list[Path]:
        return [*self.gpu.devices] if self.gpu else []


@cache
def layers() -> frozenset[str]:
    """The layers of a sandbox that this system has. Many containers do not allow bubblewrap."""
    available = set[str]()
    if shutil.which(BWRAP):
        trial = subprocess.run([*NAMESPACES, "--ro-bind", "/", "/", "true"], capture_output=True)
        if trial.returncode == 0:
            available.add(BUBBLEWRAP)
    if landlock.version():
        available.add(LANDLOCK)
    if syscalls.is_available():
        available.add(FILTER)
    return frozenset(available)


def open_to() -> list[str]:
    """What a confined program reaches on this system although it should not."""
    return [name for name, closing in CLOSED_BY.items() if not closing & layers()]


def warn_of_open() -> None:
    """Log what a confined program reaches on this system although it should not."""
    if reachable := open_to():
        problem = f"on this system, the code of a folder is not kept from {', '.join(reachable)}"
        logger.warning(problem, extra={"code": "sandbox"})


def packages() -> list[Path]:
    """Where Python, its packages and the launcher are, and what they need of the system.

    Of the directories where programs are installed, these are the programs and libraries alone: a
    text may lie beside them, in /usr/share or /etc.
    """
    paths = [str(Path(prefix, name)) for prefix in PREFIXES for name in LIBRARIES]
    paths += [str(LAUNCHER / name) for name in ("launcher", "entry_point")]
    paths += [*SYSTEM, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    paths += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    paths += [os.path.realpath(path) for path in paths if path.startswith(PREFIXES[3:])]
    return [Path(path) for path in dict.fromkeys(paths) if path and Path(path).exists()]


def is_readable(path: Path) -> bool:
    """Whether each confined program may read a file, as it lies beside programs and libraries."""
    return any(path.resolve().is_relative_to(program.resolve()) for program in packages())


def environment(scratch: Path, **variables: str) -> dict[str, str]:
    """The variables of a confined program: those of ours that hold no secret, a directory in which
    it may write, and these. Without a GPU among them, it sees none."""
    harmless = {
        name: value
        for name, value in os.environ.items()
        if name in VARIABLES or name.startswith(FAMILIES)
    }
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "USER": "run", "CUDA_VISIBLE_DEVICES": ""}
    own["PYTHONUSERBASE"] = site.getuserbase()  # which else is below HOME
    return {**harmless, **own, **variables}


def confined(command: Sequence[str], sandbox: Sandbox) -> list[str]:
    """The command that runs a command in a sandbox, if this process starts it, and ends with it."""
    has = layers()
    processor = None if math.isinf(sandbox.cpu_seconds) else math.ceil(sandbox.cpu_seconds)
    read = [*sandbox.readable, *packages(), Path("/dev/urandom")]
    read += [Path("/proc", name) for name in PROC]
    write = [sandbox.writable, Path("/dev/null"), *sandbox.devices]
    limits = {
        "parent": os.getpid() if BUBBLEWRAP not in has else None,
        "cpu_seconds": processor,
        "listable": [str(LAUNCHER)] if LANDLOCK in has else None,
        "readable": [str(path) for path in read if path.exists()],
        "writable": [str(path) for path in write],
        "directory": str(sandbox.writable),
        "filters": FILTER in has,
        "may_fork": sandbox.may_fork,
    }
    inner = python_command(restrict.__name__, json.dumps(limits), *command)
    if BUBBLEWRAP in has:
        return [*NAMESPACES, *mounts(sandbox), *FIXED, "--", *inner]
    return inner


def mounts(sandbox: Sandbox) -> Iterator[str]:
    """The options of bwrap for the files of a sandbox, outer directories first."""
    options = dict.fromkeys([*packages(), *sandbox.readable], "--ro-bind")
    options |= dict.fromkeys(sandbox.devices, "--dev-bind")
    options[sandbox.writable] = "--bind"
    for path in sorted(options):
        yield from (options[path], str(path), str(path))
