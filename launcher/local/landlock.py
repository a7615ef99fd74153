"""Landlock: rights for files, TCP, and signals, of Linux since 5.13. It needs no privilege.

docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
from collections.abc import Mapping, Sequence

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
PR_SET_NO_NEW_PRIVS = 38


def version() -> int:
    """That of the kernel's Landlock; 0 without it."""
    if platform.system() != "Linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE, None, 0, 1))


def restrict(library: ctypes.CDLL, allowed: Mapping[int, Sequence[str]]) -> None:
    """Restrict this thread, and all that it starts, to these rights below paths. Raises OSError."""
    known = library.syscall(CREATE, None, 0, 1)
    rights = SINCE.get(known, 1 << 16) - 1
    fields = [rights]
    if known >= 4:
        fields.append(TCP)
    if known >= 6:
        fields.append(SCOPES)
    handled = struct.pack(f"{len(fields)}Q", *fields)
    rules = checked(library.syscall(CREATE, handled, len(handled), 0))
    # Of /proc, a process may read what is about itself. While this is open, the kernel gives the
    # directory to no other process.
    itself = os.open("/proc/self", os.O_PATH)
    os.set_inheritable(itself, True)
    files = [(READ, itself)]
    for bits, paths in allowed.items():
        files += [(bits, os.open(path, os.O_PATH)) for path in paths]
    for bits, fd in files:
        own = bits & rights
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            own &= OF_FILES
        checked(library.syscall(ADD, rules, 1, struct.pack("=Qi", own, fd), 0))
    checked(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(library.syscall(RESTRICT, rules, 0))


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
