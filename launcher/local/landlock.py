"""Restrict the files, TCP, and signals of a process by Landlock, which needs no privilege.

Linux has it since 5.13:

docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
from collections.abc import Mapping, Sequence

# The numbers of the system calls, on all architectures except Alpha.
CREATE = 444
ADD = 445
RESTRICT = 446
# Rights, of which each is a bit.
ALL_RIGHTS = (1 << 16) - 1
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
LIST = 1 << 3
MAKE_SPECIAL = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12  # devices, sockets, pipes, links
MOVE = 1 << 13
TRUNCATE = 1 << 14
CONTROL_DEVICE = 1 << 15
READ = EXECUTE | READ_FILE | LIST
WRITE = ALL_RIGHTS & ~MAKE_SPECIAL
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | CONTROL_DEVICE  # not of directories
# The first right that each version lacks. It has all rights below that.
FIRST_MISSING = {1: MOVE, 2: TRUNCATE, 3: CONTROL_DEVICE, 4: CONTROL_DEVICE}
TCP_RIGHTS = 1 << 0 | 1 << 1  # bind and connect, since version 4
SCOPES = 1 << 0 | 1 << 1  # abstract sockets and signals of other processes, since version 6
PR_SET_NO_NEW_PRIVS = 38


def version() -> int:
    """The version of Landlock in the kernel; 0 if it has none."""
    if platform.system() != "Linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE, None, 0, 1))


def restrict(library: ctypes.CDLL, allowed: Mapping[int, Sequence[str]]) -> None:
    """Restrict this thread, and all that it starts, to files below the allowed paths.

    allowed has the paths by their rights. TCP, and the sockets and processes of others, are closed
    if the kernel's version can do that. Raises OSError.
    """
    kernel_version = library.syscall(CREATE, None, 0, 1)
    kernel_rights = ALL_RIGHTS
    if kernel_version in FIRST_MISSING:
        kernel_rights = FIRST_MISSING[kernel_version] - 1
    restricted = [kernel_rights]
    if kernel_version >= 4:
        restricted.append(TCP_RIGHTS)
    if kernel_version >= 6:
        restricted.append(SCOPES)
    attributes = struct.pack(f"{len(restricted)}Q", *restricted)
    ruleset = checked(library.syscall(CREATE, attributes, len(attributes), 0))

    # A process may read its own directory in /proc. While this descriptor is open, the kernel gives
    # the directory to no other process.
    own_proc = os.open("/proc/self", os.O_PATH)
    os.set_inheritable(own_proc, True)
    allow(library, ruleset, own_proc, READ & kernel_rights)
    for rights, paths in allowed.items():
        for path in paths:
            allow(library, ruleset, os.open(path, os.O_PATH), rights & kernel_rights)
    checked(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(library.syscall(RESTRICT, ruleset, 0))


def allow(library: ctypes.CDLL, ruleset: int, file: int, rights: int) -> None:
    """Allow rights below an open directory, or to an open file. Raises OSError."""
    if not stat.S_ISDIR(os.fstat(file).st_mode):
        rights &= FILE_RIGHTS
    checked(library.syscall(ADD, ruleset, 1, struct.pack("=Qi", rights, file), 0))


def checked(result: int) -> int:
    """Return the result of a system call. Raises OSError if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
