"""Run a program that may read and write only some files, and reach no process but its own.

By Landlock (docs.kernel.org/userspace-api/landlock.html), which Linux has since 5.13, and which
needs no privilege. What it does not cover, a filter of system calls does: sockets, through which
other programs can be asked to act; and what outlives a program besides files, so that none leaves
a note for the next one. What the program leaves running is ended with it, and its CPU time counts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import site
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

CREATE, ADD, RESTRICT = 444, 445, 446  # the system calls, on all that Linux runs on but Alpha
# Bits of rights: to execute, write, read, list; to remove directories and files; to make devices,
# directories, files, sockets, pipes, symbolic links; to link, truncate, and control devices.
LIST = 1 << 3
READ = 1 << 0 | 1 << 2 | LIST
# Nothing but files and directories, so that whoever looks at them meets no link.
WRITE = READ | sum(1 << bit for bit in (1, 4, 5, 7, 8, 13, 14, 15))
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
SINCE = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15}  # rights below it, by version
TCP = 1 << 0 | 1 << 1  # bind and connect, since version 4
SCOPES = 1 << 0 | 1 << 1  # abstract sockets of others, and signals to them, since version 6
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

# What torch, its compiler and the C library read of the system.
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/nix", "/sys")
PROC = ("cpuinfo", "meminfo", "stat", "sys", "filesystems", "modules", "devices", "driver")
DEVICES = ("nvidia*", "dri", "kfd")

# Calls with their numbers on x86_64 and aarch64, from asm/unistd.h; -1: it has none.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SOCKET = "socket 41 198"
REFUSED = """
connect 42 203  shmget 29 194  semget 64 190  msgget 68 186  mq_open 240 180  io_uring_setup 425 425
add_key 248 217  request_key 249 218  keyctl 250 219  setxattr 188 5  lsetxattr 189 6
fsetxattr 190 7  setxattrat 463 463  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
removexattrat 466 466  file_setattr 469 469  inotify_init 253 -1  inotify_init1 294 26
fanotify_init 300 262
"""
WITHOUT_EFFECT = """
chmod 90 -1  fchmod 91 52  fchmodat 268 53  fchmodat2 452 452  chown 92 -1  fchown 93 55
lchown 94 -1  fchownat 260 54  utime 132 -1  utimes 235 -1  futimesat 261 -1  utimensat 280 88
"""
# What Landlock does not see to before version 6.
REFUSED_BEFORE = """
kill 62 129  tkill 200 130  tgkill 234 131  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424  truncate 76 45
"""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # of the filter's machine
ALLOW, REFUSE, DO_NOTHING = 0x7FFF0000, 0x00050001, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # where they stand


def version() -> int:
    """That of the kernel's Landlock; 0 where no program can be confined."""
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
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
    from launcher.settings import process_of  # which the process that confines does without

    if not version():
        return [*command]
    gpus = [path for name in DEVICES if devices for path in Path("/dev").glob(name)]
    write = [*writable, Path("/dev/null"), *gpus]
    read = [*readable, *packages(), Path("/dev/urandom")]
    above = [Path(__file__).parents[2]]  # where Python looks for the launcher
    lists = (os.pathsep.join(map(str, paths)) for paths in (above, read, write))
    return process_of(__name__, os.getpid(), "gpu" if devices else "", *lists, *command)


def main(
    parent: str, devices: str, listable: str, readable: str, writable: str, *command: str
) -> None:
    """Run the command confined, end what it leaves, and end with its exit status."""
    library = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    rights = {LIST: listable, READ: readable, WRITE: writable}
    allowed = {bits: paths.split(os.pathsep) for bits, paths in rights.items()}
    status = 1
    try:
        if os.getppid() == int(parent):  # else it has ended already
            if not (child := os.fork()):
                become(library, allowed, bool(devices), command)
            while (ended := os.wait())[0] != child:
                pass
            status = os.waitstatus_to_exitcode(ended[1])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
    if status < 0:
        with suppress(OSError):
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


def become(
    library: ctypes.CDLL,
    allowed: Mapping[int, Sequence[str]],
    devices: bool,
    command: Sequence[str],
) -> NoReturn:
    """Replace this process by the command, confined."""
    try:
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first to end if memory is full
        restrict(library, allowed)
        known = library.syscall(CREATE, None, 0, 1)
        program = filter_of(platform.machine(), known, devices)
        buffer = ctypes.create_string_buffer(program)
        whole = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
        checked(library.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(whole), 0, 0))
        os.execv(command[0], [*command])
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        os._exit(126)


def restrict(library: ctypes.CDLL, allowed: Mapping[int, Sequence[str]]) -> None:
    """Restrict this thread, and all that it starts, to these rights below paths. Raises OSError."""
    known = library.syscall(CREATE, None, 0, 1)
    rights = SINCE.get(known, 1 << 16) - 1
    fields = [rights, *[TCP] * (known >= 4), *[SCOPES] * (known >= 6)]
    handled = struct.pack(f"{len(fields)}Q", *fields)
    rules = checked(library.syscall(CREATE, handled, len(handled), 0))

    def allow(bits: int, path: str) -> int:
        fd = os.open(path, os.O_PATH)
        own = bits & rights & (~0 if Path(path).is_dir() else OF_FILES)
        checked(library.syscall(ADD, rules, 1, struct.pack("=Qi", own, fd), 0))
        return fd

    for bits, paths in allowed.items():
        for path in paths:
            os.close(allow(bits, path))
    # Of processes it sees itself alone. As long as the file is open, the kernel makes no other.
    os.set_inheritable(allow(READ, "/proc/self"), True)
    for capability in range(2, 64):  # all but that of root to read anyone's files
        library.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    library.prctl(PR_CAPBSET_DROP, 0, 0, 0, 0)
    checked(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(library.syscall(RESTRICT, rules, 0))


def filter_of(machine: str, known: int, devices: bool) -> bytes:
    """The filter's program (docs.kernel.org/userspace-api/seccomp_filter.html).

    CUDA opens a Unix socket, through which it reaches nobody, as it cannot connect it.
    """
    column = 1 + [*ARCHITECTURES].index(machine)
    results = {SOCKET: REFUSE, REFUSED: REFUSE, WITHOUT_EFFECT: DO_NOTHING}
    results |= {REFUSED_BEFORE: REFUSE} if known < 6 else {}
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, 1 << 30),  # the calls of x32
        (RETURN, 0, 0, REFUSE),
    ]
    if devices:
        number = int(SOCKET.split()[column])
        unix = [(LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 1, 0, 1), (RETURN, 0, 0, REFUSE)]
        program += [(EQUAL, 0, 4, number), *unix, (RETURN, 0, 0, ALLOW)]
    for calls, result in results.items():
        words = calls.split()
        for number in map(int, words[column::3]):
            if number >= 0:
                program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, result)]
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *each) for each in program)


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
