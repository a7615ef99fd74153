"""The system calls that a confined program may not make, as a filter of libseccomp.

It closes what is no file: sockets, memory that processes share, keyrings, locks, attributes of
files, other processes, and processes of its own, whose computing nobody could count.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyseccomp import SyscallFilter

FORBIDDEN = {
    "other processes": "kcmp migrate_pages move_pages process_vm_readv process_vm_writev ptrace"
    " rt_sigqueueinfo rt_tgsigqueueinfo tkill",
    "how processes run": "ioprio_set sched_setaffinity sched_setattr sched_setparam"
    " sched_setscheduler setpgid setpriority setrlimit setsid",
    "namespaces": "chroot mount pivot_root setns umount2 unshare",
    "users": "capset setfsgid setfsuid setgid setgroups setregid setresgid setresuid setreuid"
    " setuid",
    "sockets": "accept accept4 bind connect listen socket",
    "memory and queues of System V, queues of POSIX": "mq_getsetattr mq_notify mq_open"
    " mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop"
    " semtimedop shmat shmctl shmdt shmget",
    "keyrings": "add_key keyctl request_key",
    "attributes of files": "chmod chown fchmod fchmodat fchown fchownat fremovexattr fsetxattr"
    " futimesat lchown lremovexattr lsetxattr removexattr setxattr utime utimensat utimes",
    "what others do with a file": "fanotify_init inotify_init inotify_init1",
    "what of a file is in memory": "fadvise64 mincore readahead",
    # What reads its directory afterwards would follow a link, and wait for a pipe.
    "links, pipes and devices": "link linkat mknod mknodat symlink symlinkat",
    "handles of files": "name_to_handle_at open_by_handle_at",
    "the kernel": "acct adjtimex bpf clock_adjtime clock_settime delete_module finit_module"
    " init_module ioperm iopl kexec_file_load kexec_load lookup_dcookie perf_event_open quotactl"
    " reboot sethostname setdomainname settimeofday swapoff swapon syslog userfaultfd vhangup",
}
# Since Linux 5.1, a new call has the same number on all processors. A program may make close_range,
# openat2, faccessat2, epoll_pwait2, those of Landlock, memfd_secret, futex_waitv, and
# set_mempolicy_home_node. The others are missing, as on an older kernel: clone3, io_uring, the
# newer ones for mounts, pidfds and attributes, and those of kernels to come.
NEW_CALLS = range(424, 600)
ALLOWED_NEW_CALLS = {436, 437, 439, 441, 444, 445, 446, 447, 449, 450}

INT = 0xFFFFFFFF  # the kernel reads no more of an argument that is an int
# Locks and leases of files, and signals to other processes when they change.
FILE_COMMANDS = [
    fcntl.F_SETLK,
    fcntl.F_SETLKW,
    37,  # F_OFD_SETLK
    38,  # F_OFD_SETLKW
    fcntl.F_SETLEASE,
    fcntl.F_NOTIFY,
    fcntl.F_SETOWN,
    10,  # F_SETSIG
    15,  # F_SETOWN_EX
]
DEVICE_COMMANDS = [0x8901, 0x8902]  # FIOSETOWN and SIOCSPGRP: signals to other processes
# The kinds of commands, by bits 8 to 15, that change flags, versions and projects of a file which
# is open for reading, or freeze its file system: of ext4 and others, XFS, and Btrfs.
FLAG_COMMANDS = [ord("f"), ord("v"), ord("X"), 0x94]
COMMAND_KIND = 0xFF00
# Advice on which pages of a file to keep in memory: MADV_RANDOM, WILLNEED, COLD, PAGEOUT,
# POPULATE_READ and _WRITE. A program would leave pages there as a message to the next one.
PAGING_ADVICE = [1, 3, 20, 21, 22, 23]
# Commands of futex that wake threads, or move them to another address. The same page of a file, a
# library too, has the same addresses in all programs: one could wake another. Threads of a program
# wake each other by private ones.
WAKING = [1, 3, 4, 5, 10, 12]  # WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAKE_BITSET, CMP_REQUEUE_PI
PRIVATE_COMMAND = 0xFF  # the bits of a command and of the flag that says that it is private
PR_SET_PDEATHSIG = 1
CLONE_THREAD = 0x10000
CLONE_NEWUSER = 0x10000000
SOCKET_KIND = 0xF  # the bits of a socket's type besides its flags


def is_available() -> bool:
    """True if libseccomp and its binding are on this machine."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError):  # not on Linux, or without the library
        return False
    return bool(pyseccomp.SyscallFilter)


def binding() -> Path:
    """The file of the binding of libseccomp, one module in plain Python that runs anywhere."""
    spec = find_spec("pyseccomp")
    assert spec is not None, "pyproject.toml names it"
    assert spec.origin is not None
    return Path(spec.origin)


def call_filter(may_fork: bool) -> SyscallFilter:
    """Make the filter of system calls for this process; its caller loads it.

    Without may_fork, the process may start threads and no processes, and signals only itself.
    """
    import pyseccomp
    from pyseccomp import MASKED_EQ, NE, Arg

    denied = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for names in FORBIDDEN.values():
        for name in names.split():
            rules.add_rule(denied, name)
    for number in NEW_CALLS:
        if number not in ALLOWED_NEW_CALLS:
            rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)

    for command in FILE_COMMANDS:
        rules.add_rule(denied, "fcntl", Arg(1, MASKED_EQ, INT, command))
    for command in DEVICE_COMMANDS:
        rules.add_rule(denied, "ioctl", Arg(1, MASKED_EQ, INT, command))
    for kind in FLAG_COMMANDS:
        rules.add_rule(denied, "ioctl", Arg(1, MASKED_EQ, COMMAND_KIND, kind << 8))
    for advice in PAGING_ADVICE:
        rules.add_rule(denied, "madvise", Arg(2, MASKED_EQ, INT, advice))
    for command in WAKING:
        rules.add_rule(denied, "futex", Arg(1, MASKED_EQ, PRIVATE_COMMAND, command))
    # Pairs of stream sockets reach nothing else; a datagram can be sent to any address.
    rules.add_rule(denied, "socketpair", Arg(0, NE, socket.AF_UNIX))
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        rules.add_rule(denied, "socketpair", Arg(1, MASKED_EQ, SOCKET_KIND, kind))
    rules.add_rule(denied, "prctl", Arg(0, MASKED_EQ, INT, PR_SET_PDEATHSIG))
    rules.add_rule(denied, "prlimit64", Arg(0, NE, 0))  # another process
    rules.add_rule(denied, "prlimit64", Arg(2, NE, 0))  # new limits, of processor time as well
    rules.add_rule(denied, "preadv2", Arg(5, NE, 0))  # RWF_NOWAIT: what of a file is in memory
    rules.add_rule(denied, "clone", Arg(0, MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER))
    if may_fork:
        return rules

    for name in ("fork", "vfork", "flock"):
        rules.add_rule(denied, name)
    rules.add_rule(denied, "clone", Arg(0, MASKED_EQ, CLONE_THREAD, 0))
    for name in ("kill", "tgkill"):
        rules.add_rule(denied, name, Arg(0, NE, os.getpid()))
    return rules
