"""Run a program that may read and write only some files, and reach no process but its own.

By Landlock (docs.kernel.org/userspace-api/landlock.html), which Linux has since 5.13, and which
needs no privilege. It does not cover named Unix sockets of other programs, shared memory of
System V, attributes and times of files, nor, before Linux 6.12, signals. What the program leaves
running is ended with it, and its CPU time counts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import site
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.local.process import python_command

CREATE, ADD, RESTRICT = 444, 445, 446  # the system calls, on all that Linux runs on but Alpha
# Bits of rights: to execute, write, read, list; to remove directories and files; to make
# directories and files, but no devices, sockets, pipes and links; to move, cut, control devices.
LIST = 1 << 3
READ = 1 << 0 | 1 << 2 | LIST
WRITE = READ | sum(1 << bit for bit in (1, 4, 5, 7, 8, 13, 14, 15))
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
SINCE = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15}  # rights below it, by version
TCP = 1 << 0 | 1 << 1  # bind and connect, since version 4
SCOPES = 1 << 0 | 1 << 1  # abstract sockets of others, and signals to them, since version 6
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38

PATIENCE = 5  # seconds from SIGTERM to SIGKILL
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/nix", "/sys")
PROC = ("cpuinfo", "meminfo", "stat", "sys", "filesystems", "modules", "devices", "driver")


def version() -> int:
    """That of the kernel's Landlock; 0 without it."""
    if platform.system() != "Linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE, None, 0, 1))


def packages() -> list[Path]:
    """Where Python and its packages are, and what they need of the system."""
    system = [*SYSTEM, *(f"/proc/{name}" for name in PROC)]
    here = [sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()]
    found = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    return [Path(each) for each in dict.fromkeys([*system, *here, *found]) if Path(each).exists()]


def confined(
    command: Sequence[str],
    readable: Sequence[Path],
    writable: Sequence[Path],
    devices: bool = False,
) -> list[str]:
    """The command that runs a command so, if this process starts it; as it is where none can be.

    devices: it may use the GPUs of the machine. SIGTERM ends it with all that it started.
    """
    if not version():
        return [*command]
    gpus = [path for name in ("nvidia*", "dri", "kfd") for path in Path("/dev").glob(name)]
    write = [*writable, Path("/dev/null"), *(gpus if devices else [])]
    read = [*readable, *packages(), Path("/dev/urandom")]
    above = [Path(__file__).parents[2]]  # where Python looks for the launcher
    lists = (os.pathsep.join(map(str, paths)) for paths in (above, read, write))
    return python_command(__name__, os.getpid(), *lists, *command)


def environment(scratch: Path) -> dict[str, str]:
    """The variables of a confined program: none of AWS, and a directory in which it may write."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    places = {"HOME": str(scratch), "TMPDIR": str(scratch)}  # where compilers keep what they make
    return {**kept, **places, "PYTHONUSERBASE": site.getuserbase()}  # which else is below HOME


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session; what confines it ends all that it has started."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(parent: str, listable: str, readable: str, writable: str, *command: str) -> None:
    """Run the command confined, end what it leaves, and end with its exit status."""
    library = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    rights, status = {LIST: listable, READ: readable, WRITE: writable}, 1
    try:
        if os.getppid() == int(parent):  # else it has ended already
            if not (child := os.fork()):
                library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                restrict(library, {bits: paths.split(":") for bits, paths in rights.items()})
                os.execv(command[0], command)
            while (ended := os.wait())[0] != child:
                pass
            status = os.waitstatus_to_exitcode(ended[1])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def end_children() -> None:
    """End this process's children, and those that these leave, until there are none."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):
        while True:
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)


def restrict(library: ctypes.CDLL, allowed: Mapping[int, Sequence[str]]) -> None:
    """Restrict this thread, and all that it starts, to these rights below paths. Raises OSError."""
    known = library.syscall(CREATE, None, 0, 1)
    rights = SINCE.get(known, 1 << 16) - 1
    fields = [rights, *[TCP] * (known >= 4), *[SCOPES] * (known >= 6)]
    handled = struct.pack(f"{len(fields)}Q", *fields)
    rules = checked(library.syscall(CREATE, handled, len(handled), 0))
    # Of /proc, a process may read what is about itself. While this is open, the kernel gives the
    # directory to no other process.
    itself = os.open("/proc/self", os.O_PATH)
    os.set_inheritable(itself, True)
    files = [(bits, os.open(path, os.O_PATH)) for bits in allowed for path in allowed[bits]]
    for bits, fd in [*files, (READ, itself)]:
        own = bits & rights & (~0 if stat.S_ISDIR(os.fstat(fd).st_mode) else OF_FILES)
        checked(library.syscall(ADD, rules, 1, struct.pack("=Qi", own, fd), 0))
    checked(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(library.syscall(RESTRICT, rules, 0))


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
