"""Run a program that reaches only its files: no network, no other process, and no shared memory.

There are three layers, of which this system may have some: bubblewrap (own namespaces), Landlock
(files), and a filter of system calls by libseccomp. With the filter, a program can start threads
and no processes, so that its processor time is all that it has computed.
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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sm_nanogpt.launcher.local import landlock, restrict, syscalls
from sm_nanogpt.launcher.local.gpus import LocalGpu
from sm_nanogpt.launcher.local.process import BWRAP, python_command

logger = logging.getLogger(__name__)

BUBBLEWRAP = "bubblewrap"
LANDLOCK = "Landlock"
FILTER = "libseccomp"
# What a confined program must not reach, with the layers of which each closes it.
CLOSED_BY = {
    "all files": {BUBBLEWRAP, LANDLOCK},
    "the network": {BUBBLEWRAP, FILTER},
    "other processes": {BUBBLEWRAP, FILTER},
    "memory that outlives them": {BUBBLEWRAP, FILTER},
    "modes and times of files": {BUBBLEWRAP, FILTER},
    "keyrings": {FILTER},
    "locks of files": {FILTER},
    "processes whose time nobody counts": {FILTER},
}
# The program is process 1: so bwrap itself waits for it, and its processor time counts.
BWRAP_COMMAND = [BWRAP, "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
BWRAP_COMMAND += ["--proc", "/proc", "--dev", "/dev"]
# These options come after all mounts. Without them, processes of root could write to /proc/sys.
READ_ONLY_OPTIONS = ["--remount-ro", "/", "--remount-ro", "/dev", "--remount-ro", "/proc"]

# A confined program reads programs and libraries below these prefixes, and files of the system.
SYSTEM_PREFIXES = ("/", "/usr", "/usr/local")
PYTHON_PREFIXES = (sys.prefix, sys.base_prefix)
LIBRARIES = ("bin", "include", "lib", "lib64", "libexec", "pyvenv.cfg", "sbin")
SYSTEM_FILES = (
    "/etc/alternatives",
    "/etc/group",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/passwd",
    "/sys/bus/pci",
    "/sys/devices",
    "/sys/module",
    "/nix/store",
    "/run/opengl-driver",
)
PROC_FILES = ("cpuinfo", "meminfo", "stat", "sys", "filesystems", "modules", "devices", "driver")
PACKAGE = Path(__file__).parents[2]  # the directory of sm_nanogpt
# Variables that a confined program gets. Others may have keys, or the name of the user. A long
# value, or many variables, could have a model or a text.
VARIABLES = {
    "language": "LANG LANGUAGE LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC"
    " LC_TIME TZ",
    "Python": "PYTHONHASHSEED",
    "OpenMP": "GOMP_CPU_AFFINITY GOMP_SPINCOUNT KMP_AFFINITY KMP_BLOCKTIME KMP_DUPLICATE_LIB_OK"
    " OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE OMP_STACKSIZE"
    " OMP_WAIT_POLICY",
    "matrix products": "ATEN_CPU_CAPABILITY DNNL_MAX_CPU_ISA MKL_CBWR MKL_DEBUG_CPU_TYPE"
    " MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS MKL_NUM_THREADS MKL_THREADING_LAYER ONEDNN_MAX_CPU_ISA",
    "CUDA": "CUDA_CACHE_DISABLE CUDA_DEVICE_ORDER CUDA_HOME CUDA_LAUNCH_BLOCKING"
    " CUDA_MODULE_LOADING CUDA_PATH CUDA_VISIBLE_DEVICES",
}
# The kernel ends a program at KERNEL_LIMIT_FACTOR times its limit. It counts ticks, with an error
# of a few percent, and the measured time of a program that was ended has to be over the limit.
KERNEL_LIMIT_FACTOR = 1.1
MAX_VALUE_BYTES = 128  # of a variable
MAX_PATHS_BYTES = 2048  # of a variable that lists directories


@dataclass(frozen=True)
class Sandbox:
    """What a confined program may use.

    It can read `readable` and Python's packages, and write below the directory `writable`, which is
    its working directory. It may use the devices of its GPU. The kernel ends it soon after it has
    computed for `cpu_seconds`.
    """

    readable: Sequence[Path]
    writable: Path
    gpu: LocalGpu | None = None
    cpu_seconds: float = math.inf

    @property
    def may_fork(self) -> bool:
        """True if the program may start processes, as a compiler for GPUs needs.

        A program on a GPU is timed by the clock, which includes such processes. bubblewrap ends
        them together with the program.
        """
        return self.gpu is not None and BUBBLEWRAP in layers()

    @property
    def devices(self) -> list[Path]:
        return [] if self.gpu is None else list(self.gpu.devices)


@cache
def layers() -> frozenset[str]:
    """Find the layers of a sandbox that this system has. Many containers forbid bubblewrap."""
    available: set[str] = set()
    if shutil.which(BWRAP):
        trial = subprocess.run([*BWRAP_COMMAND, "--ro-bind", "/", "/", "true"], capture_output=True)
        if trial.returncode == 0:
            available.add(BUBBLEWRAP)
    if landlock.version():
        available.add(LANDLOCK)
    if syscalls.is_available():
        available.add(FILTER)
    return frozenset(available)


def unprotected() -> list[str]:
    """The keys of CLOSED_BY for which this system has no layer."""
    return [name for name, closing in CLOSED_BY.items() if not closing & layers()]


def warn_of_unprotected() -> None:
    """Warn of what a confined program can reach on this system although it must not."""
    reachable = unprotected()
    if reachable:
        problem = f"on this system, the code of a folder is not kept from {', '.join(reachable)}"
        logger.warning(problem, extra={"code": "sandbox"})


def packages() -> list[Path]:
    """The paths of Python, its packages, and the launcher, and the system's paths that they need.

    Of a directory such as /usr or /etc, only programs, libraries, and a few files are among them: a
    text may lie beside these.
    """
    paths = []
    for prefix in (*SYSTEM_PREFIXES, *PYTHON_PREFIXES):
        paths += [str(Path(prefix, name)) for name in LIBRARIES]
    paths.append(str(PACKAGE))
    # These are links in a checkout.
    paths += [os.path.realpath(PACKAGE / name) for name in ("launcher", "entry_point")]
    paths += SYSTEM_FILES
    paths += library_directories()
    paths += site.getsitepackages()
    paths.append(site.getusersitepackages())
    paths += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # Parts of an environment may be links to another one.
    paths += [os.path.realpath(path) for path in paths if path.startswith(PYTHON_PREFIXES)]
    return [Path(path) for path in dict.fromkeys(paths) if path and Path(path).exists()]


def is_readable(path: Path) -> bool:
    """True if every confined program can read a file, because it is among the packages."""
    return any(path.resolve().is_relative_to(program.resolve()) for program in packages())


def environment(scratch: Path, **variables: str) -> dict[str, str]:
    """The environment variables of a confined program, which writes into the directory `scratch`.

    They are the variables of this process that have no secret and no data, and `variables`. If
    these do not have CUDA_VISIBLE_DEVICES, the program sees no GPU.
    """
    env = harmless_variables()
    env["HOME"] = str(scratch)
    env["TMPDIR"] = str(scratch)
    env["USER"] = "run"
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["PYTHONUSERBASE"] = site.getuserbase()  # Python would look for it below HOME
    env.update(variables)
    return env


def variable_names() -> list[str]:
    return " ".join(VARIABLES.values()).split()


def harmless_variables() -> dict[str, str]:
    """The variables of this process that have no secret, and are too short to have data."""
    env: dict[str, str] = {}
    for name in variable_names():
        add_if_short(env, name, os.environ.get(name, ""), MAX_VALUE_BYTES)
    command_directories = [path for path in directories_of("PATH") if is_readable(Path(path))]
    add_if_short(env, "PATH", os.pathsep.join(command_directories), MAX_PATHS_BYTES)
    add_if_short(env, "LD_LIBRARY_PATH", os.pathsep.join(library_directories()), MAX_PATHS_BYTES)
    return env


def add_if_short(env: dict[str, str], name: str, value: str, max_bytes: int) -> None:
    """Add a variable to the environment, unless it is empty or longer than max_bytes."""
    if value and len(os.fsencode(value)) <= max_bytes:
        env[name] = value


def directories_of(name: str) -> list[str]:
    """The different directories that a variable of this process lists, without links."""
    paths = os.environ.get(name, "").split(os.pathsep)
    directories = [os.path.realpath(path) for path in paths if path and Path(path).is_dir()]
    return list(dict.fromkeys(directories))


def library_directories() -> list[str]:
    """The directories of LD_LIBRARY_PATH that hold libraries."""
    directories = directories_of("LD_LIBRARY_PATH")
    return [path for path in directories if next(Path(path).glob("*.so*"), None)]


@cache
def lease(pid: int) -> int:
    """Return a descriptor that every confined program of this process, `pid`, inherits.

    It is the end of a pipe. Only this process holds the other end, so the pipe is at its end when
    this process has ended. A program checks that before it begins: its parent may have ended while
    bwrap prepared the sandbox, which bwrap does not notice.
    """
    reader, _ = os.pipe()
    return reader


def confined(command: Sequence[str], sandbox: Sandbox) -> list[str]:
    """Return the command that runs a command in a sandbox. Only this process can use it.

    The program inherits `lease`, and ends with this process.
    """
    is_wrapped = BUBBLEWRAP in layers()
    readable = [*sandbox.readable, *packages(), Path("/dev/urandom")]
    readable += [Path("/proc", name) for name in PROC_FILES]
    writable = [sandbox.writable, Path("/dev/null"), *sandbox.devices]
    limits = {
        "lease": lease(os.getpid()),
        "cpu_seconds": None,
        "has_landlock": LANDLOCK in layers(),
        "listable": [str(PACKAGE.parent)],
        "readable": [str(path) for path in readable if path.exists()],
        "writable": [str(path) for path in writable],
        "directory": str(sandbox.writable),
        "has_filter": FILTER in layers(),
        "may_fork": sandbox.may_fork,
    }
    if not math.isinf(sandbox.cpu_seconds):
        limits["cpu_seconds"] = math.ceil(KERNEL_LIMIT_FACTOR * sandbox.cpu_seconds)
    restricted = python_command(restrict.__name__, json.dumps(limits), *command)
    if not is_wrapped:
        return restricted
    return [*BWRAP_COMMAND, *mounts(sandbox), *READ_ONLY_OPTIONS, "--", *restricted]


def mounts(sandbox: Sandbox) -> list[str]:
    """The options of bwrap for the files of a sandbox, outer directories first."""
    options = dict.fromkeys([*packages(), *sandbox.readable], "--ro-bind")
    options |= dict.fromkeys(sandbox.devices, "--dev-bind")
    options[sandbox.writable] = "--bind"
    arguments = []
    for path in sorted(options):
        arguments += [options[path], str(path), str(path)]
    return arguments
