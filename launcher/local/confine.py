"""Run a program that may read and write only some files, and reach nobody by TCP.

By Landlock (docs.kernel.org/userspace-api/landlock.html), which Linux has since 5.13, and which
needs no privilege. What the program leaves running is ended with it, and its CPU time counts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import site
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.settings import process_of

CREATE, ADD, RESTRICT = 444, 445, 446  # the system calls, on all that Linux runs on but Alpha
# Bits of rights: to execute, write, read, list; to remove and make entries; to link, truncate, and
# control devices.
LIST = 1 << 3
READ = 1 << 0 | 1 << 2 | LIST
WRITE = READ | 1 << 1 | sum(1 << bit for bit in range(4, 16))
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
SINCE = {1: 1 << 13, 2: 1 << 14, 3: 1 << 14, 4: 1 << 15, 5: 1 << 16}  # rights below it, by version
TCP = 1 << 0 | 1 << 1  # bind and connect
PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 38, 36, 1


def version() -> int:
    """That of the kernel's Landlock; 0 without it."""
    if platform.system() != "Linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE, None, 0, 1))


def packages() -> list[Path]:
    """Where Python and its packages are, and what they need of the system."""
    system = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/nix", "/proc", "/sys")
    here = [sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()]
    found = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    return [Path(each) for each in dict.fromkeys([*system, *here, *found]) if Path(each).exists()]


def confined(
    command: Sequence[str],
    readable: Sequence[Path],
    writable: Sequence[Path],
    devices: bool = False,
) -> list[str]:
    """The command that runs a command so; as it is where the system cannot.

    devices: it may use those of the machine, such as GPUs.
    """
    if not version():
        return [*command]
    write = [*writable, Path("/dev" if devices else "/dev/null")]
    read = [*readable, *packages(), Path("/dev/urandom")]
    above = [Path(__file__).parents[2]]  # where Python looks for the launcher
    lists = (os.pathsep.join(map(str, paths)) for paths in (above, read, write))
    return process_of(__name__, *lists, *command)


def main(listable: str, readable: str, writable: str, *command: str) -> None:
    """Confine this process, run the command in it, and end with its exit status."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    rights = {LIST: listable, READ: readable, WRITE: writable}
    restrict(library, {bits: paths.split(os.pathsep) for bits, paths in rights.items()})
    status = subprocess.run(command, close_fds=False).returncode
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def restrict(library: ctypes.CDLL, allowed: Mapping[int, Sequence[str]]) -> None:
    """Restrict this thread, and all that it starts, to these rights below paths. Raises OSError."""
    known = library.syscall(CREATE, None, 0, 1)
    rights = SINCE.get(known, 1 << 16) - 1
    fields = [rights, TCP] if known >= 4 else [rights]
    handled = struct.pack(f"{len(fields)}Q", *fields)
    rules = checked(library.syscall(CREATE, handled, len(handled), 0))
    for bits, paths in allowed.items():
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            own = bits & rights & (~0 if Path(path).is_dir() else OF_FILES)
            checked(library.syscall(ADD, rules, 1, struct.pack("=Qi", own, fd), 0))
            os.close(fd)
    checked(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(library.syscall(RESTRICT, rules, 0))


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
