"""Ways in which a program could reach what is not its own, to be tried inside of a sandbox.

As a program, it evaluates expressions and prints what each raised. `secret` is a file elsewhere,
`other` a process outside, `folder` the program's own folder, and `scratch` the directory in which
it may write. `call` makes a system call by its name.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FILES = {
    "read a file": "secret.read_bytes()",
    "read it by the C library": "checked(libc.open(str(secret).encode(), 0))",
    "read it as a mapping": "mmap.mmap(os.open(secret, os.O_RDONLY), 0)",
    "read it through its own root": "Path(f'/proc/self/root{secret}').read_bytes()",
    "read it by its own directory": "Path('/proc/self/cwd', secret).read_bytes()",
    "read it by a path that goes up": "(folder / '../home' / secret.name).read_bytes()",
    "read it by a handle": "call('open_by_handle_at', -100, buffer, 0)",
    "ask for its handle": "call('name_to_handle_at', -100, b'/', buffer, buffer, 0)",
    "list its directory": "os.listdir(secret.parent)",
    "list the directory above": "os.listdir(scratch.parent / 'home')",
    "read the system's settings": "Path('/etc/hostname').read_bytes()",
    "read passwords": "Path('/etc/shadow').read_bytes()",
    "read what is shared": "os.listdir('/usr/share')",
    "link to a file": "os.symlink(secret, scratch / 'link')",
    "make a pipe": "os.mkfifo(scratch / 'pipe')",
    "link a file": "os.link(secret, scratch / 'link')",
    "link its own folder's file": "os.link(folder / 'own.txt', scratch / 'link')",
    "move a file": "os.rename(secret, scratch / 'file')",
    "write a file": "secret.write_bytes(b'')",
    "add to a file": "secret.open('ab')",
    "cut a file": "os.truncate(secret, 0)",
    "delete a file": "secret.unlink()",
    "write beside it": "(secret.parent / 'note').write_bytes(b'')",
    "write where all may write": "tempfile.TemporaryFile(dir='/tmp')",
    "write a file of no name": "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "write shared memory": "Path('/dev/shm/note').write_bytes(b'')",
    "write its own folder": "(folder / 'note').write_bytes(b'')",
    "write Python": "Path(os.__file__).open('ab')",
    "write the launcher": "Path(launcher, '__init__.py').open('ab')",
    "write settings of the kernel": "Path('/proc/sys/kernel/hostname').open('r+b')",
    "ask the kernel to act": "Path('/proc/sysrq-trigger').open('wb')",
    "open the terminal": "os.open('/dev/tty', os.O_RDWR)",
    "open the machine's memory": "os.open('/dev/mem', os.O_RDONLY)",
    "open a virtual machine": "os.open('/dev/kvm', os.O_RDWR)",
    "open a GPU": "os.open('/dev/nvidiactl', os.O_RDWR)",
    "open a disk of its making": "os.open(make_node('disk', stat.S_IFBLK), os.O_RDONLY)",
    "use a descriptor of its parent": "os.fstat(inherited)",
}
ATTRIBUTES = {
    "change a mode": "os.chmod(secret, 0o666)",
    "change the mode of what it reads": "os.chmod(folder / 'own.txt', 0o666)",
    "change the mode of an open file": "os.fchmod(os.open(folder / 'own.txt', os.O_RDONLY), 0o666)",
    "change an owner": "os.chown(folder / 'own.txt', os.getuid(), os.getgid())",
    "change a time": "os.utime(secret)",
    "change the times of what it reads": "os.utime(folder / 'own.txt')",
    "set an attribute": "os.setxattr(folder / 'own.txt', 'user.note', b'1')",
    "set one of an open file": "os.setxattr(os.open(folder / 'own.txt', 0), 'user.note', b'1')",
    "remove an attribute": "os.removexattr(folder / 'own.txt', 'user.note')",
    "set an attribute by a new call": "number(463)",
    "set a mode by a new call": "number(452)",
    "set flags of a file by a new call": "number(469)",
    "set a flag of what it reads": "fcntl.ioctl(own, 0x40086602, struct.pack('l', 0x40))",
    "set its version": "fcntl.ioctl(own, 0x40087602, struct.pack('l', 1))",
    "set its project": "fcntl.ioctl(own, 0x401C5820, bytes(28))",
    "freeze its file system": "fcntl.ioctl(own, 0xC0045877, 0)",
    "lock what it reads": "fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "lock a part of it": "fcntl.lockf(own, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "lock it by an open file": "fcntl.fcntl(own, 37, struct.pack('hhqqi', 0, 0, 0, 0, 0))",
    "lock it by a wide number": "call('fcntl', own, 6 | 1 << 32, buffer)",
    "lease a file": "fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "hear who opens a file": "fcntl.fcntl(os.open(folder, 0), fcntl.F_NOTIFY, 1)",
    "watch a directory": "checked(libc.inotify_init1(0))",
    "watch a disk": "checked(libc.fanotify_init(0, 0))",
    "see what of a file is in memory": "call('mincore', 0, 4096, buffer)",
    "read only what is in memory": "os.preadv(own, [bytearray(1)], 0, os.RWF_NOWAIT)",
    "drop a file from memory": "os.posix_fadvise(own, 0, 0, os.POSIX_FADV_DONTNEED)",
    "count what is in memory": "number(451)",
    **{
        f"advise how a file is paged, by {advice}": f"mmap.mmap(own, 0, prot=1).madvise({advice})"
        for advice in (1, 3, 20, 21, 22, 23)
    },
}
PROCESSES = {
    "fork": "os.fork()",
    "start a program": "subprocess.run(['true'])",
    "start a shell": "os.posix_spawn('/bin/sh', ['sh', '-c', ':'], {})",
    "fork by clone": "call('clone', 17, 0, 0, 0, 0)",
    "fork by vfork": "call('vfork')",
    "fork by clone3": "number(435)",
    "read another's root": "Path(f'/proc/{other}/root{secret}').read_bytes()",
    "read another's directory": "Path(f'/proc/{other}/cwd/{secret.name}').read_bytes()",
    "read what another has open": "Path(f'/proc/{other}/fd/0').read_bytes()",
    "read another's memory": "open(f'/proc/{other}/mem', 'rb')",
    "read another's environment": "Path(f'/proc/{other}/environ').read_bytes()",
    "read another's command line": "Path(f'/proc/{other}/cmdline').read_bytes()",
    "read its parent's environment": "Path(f'/proc/{parent}/environ').read_bytes()",
    "copy another's memory": "checked(libc.process_vm_readv(other, memory, 1, memory, 1, 0))",
    "change another's memory": "checked(libc.process_vm_writev(other, memory, 1, memory, 1, 0))",
    "trace another": "checked(libc.ptrace(16, other, 0, 0))",
    "seize another": "checked(libc.ptrace(0x4206, other, 0, 0))",
    "be traced": "checked(libc.ptrace(0, 0, 0, 0))",
    "compare itself with another": "call('kcmp', os.getpid(), other, 0, 0, 0)",
    "hold another by a pidfd": "os.pidfd_open(other)",
    "take a descriptor of another": "number(438, 3, 0, 0)",
    "signal another": "os.kill(other, 0)",
    "signal its parent": "os.kill(parent, 0)",
    "signal all": "os.kill(-1, 0)",
    "signal its group": "os.killpg(0, 0)",
    "signal a thread of another": "call('tgkill', other, other, 0)",
    "signal a thread by its number": "call('tkill', other, 0)",
    "queue a signal to another": "call('rt_sigqueueinfo', other, 0, buffer)",
    "have a file signal another": "fcntl.fcntl(pair[0], fcntl.F_SETOWN, other)",
    "have a socket signal another": "fcntl.ioctl(pair[0], 0x8901, struct.pack('i', other))",
    "wake another by a library": "call('futex', libc.printf, 1, 1, 0, 0, 0)",
    "wake another's threads by their bits": "call('futex', libc.printf, 10, 1, 0, 0, -1)",
    "move another's threads": "call('futex', libc.printf, 3, 1, 1, libc.puts, 0)",
    "limit another": "resource.prlimit(other, resource.RLIMIT_CORE)",
    "limit itself anew": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "give another a priority": "os.setpriority(os.PRIO_PROCESS, other, 1)",
    "give all a priority": "os.setpriority(os.PRIO_USER, 0, 1)",
    "give another a core": "os.sched_setaffinity(other, {0})",
    "schedule another": "os.sched_setscheduler(other, os.SCHED_BATCH, os.sched_param(0))",
    "give another a disk's priority": "call('ioprio_set', 1, other, 0)",
    "outlive its parent": "checked(libc.prctl(1, 0, 0, 0, 0))",
    "outlive it by a wide number": "call('prctl', 1 | 1 << 32, 0, 0, 0, 0)",
    "leave its session": "os.setsid()",
    "become another user": "os.setuid(os.getuid())",
    "have no groups": "os.setgroups([])",
}
MEMORY = {
    "keep memory of System V": "call('shmget', 4711, 4096, 0o1666)",
    "keep semaphores of System V": "call('semget', 4711, 1, 0o1666)",
    "keep messages of System V": "call('msgget', 4711, 0o1666)",
    "keep messages of POSIX": "call('mq_open', b'note', 0o102, 0o666, 0)",
    "keep memory of POSIX": "checked(librt.shm_open(b'/note', 0o102, 0o666))",
    "keep a key": "call('add_key', b'user', b'note', b'1', 1, -4)",
    "keep a key in its session": "call('add_key', b'user', b'note', b'1', 1, -3)",
    "find a key": "call('request_key', b'user', b'note', 0, 0)",
    "ask for a keyring": "call('keyctl', 0, -4, 0, 0, 0)",
    "join a session of keys": "call('keyctl', 1, b'note', 0, 0, 0)",
    "handle its own faults": "call('userfaultfd', 0)",
    "ask by a ring": "number(425, 1, buffer)",
}
NETWORK = {
    "reach a server": "socket.create_connection(('127.0.0.1', port))",
    "reach it by MPTCP": "socket.socket(2, 1, 262).connect(('127.0.0.1', port))",
    "reach it by IPv6": "socket.socket(socket.AF_INET6).connect(('::1', port))",
    "send it a datagram": "socket.socket(2, 2).sendto(b'1', ('127.0.0.1', port))",
    "send a raw packet": "socket.socket(2, 3, 1)",
    "send a frame": "socket.socket(socket.AF_PACKET, 3)",
    "ask the kernel for its network": "socket.socket(socket.AF_NETLINK, 3)",
    "reach the host of a virtual machine": "socket.socket(socket.AF_VSOCK)",
    "compute by the kernel": "socket.socket(socket.AF_ALG, 5)",
    "be a server": "socket.create_server(('127.0.0.1', 0))",
    "reach an abstract socket": "socket.socket(socket.AF_UNIX).connect(abstract)",
    "reach a named socket": "socket.socket(socket.AF_UNIX).connect(str(named))",
    "be a named socket": "socket.socket(socket.AF_UNIX).bind(str(scratch / 'socket'))",
    "send datagrams of a pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "connect one of a pair anew": "pair[0].connect(str(named))",
    "bind one of a pair": "pair[0].bind(str(scratch / 'socket'))",
    "ask for a name": "socket.create_connection(('localhost', port))",
}
KERNEL = {
    "have users of its own": "call('unshare', 0x10000000)",
    "have mounts of its own": "call('unshare', 0x20000)",
    "clone with users of its own": "call('clone', 0x10000011, 0, 0, 0, 0)",
    "enter another's namespace": "call('setns', 0, 0)",
    "change its root": "os.chroot(scratch)",
    "mount a disk": "checked(libc.mount(b'none', str(scratch).encode(), b'tmpfs', 0, None))",
    "unmount a disk": "checked(libc.umount2(b'/nothing', 0))",
    "turn its root": "call('pivot_root', b'/nothing', b'/nothing')",
    "open a tree": "number(428, -100, b'/nothing', 0)",
    "open a file system": "number(430, b'tmpfs', 0)",
    "load a program": "call('bpf', 0, 0, 0)",
    "count events": "call('perf_event_open', 0, 0, -1, -1, 0)",
    "read the kernel's log": "call('syslog', 10, 0, 0)",
    "load a module": "call('finit_module', -1, b'', 0)",
    "load a kernel": "call('kexec_load', 0, 0, 0, 1)",
    "swap": "call('swapon', b'/nothing', 0)",
    "restart the machine": "call('reboot', 0, 0, 0, 0)",
    "set the clock": "call('settimeofday', 0, 0)",
    "name the machine": "call('sethostname', 0, -1)",
    "account for processes": "call('acct', b'/nothing')",
    "set quotas": "call('quotactl', 0, 0, 0, 0)",
    "use ports": "call('iopl', 9)",
}
VARIABLES = {
    f"read {name}": f"os.environ[{name!r}]"
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "NVIDIA_API_KEY",
        "SM_NANOGPT_API_KEY",
        "SM_NANOGPT_HOME",
        "SSH_AUTH_SOCK",
        "PYTHONPATH",
    )
}
WAYS = {**FILES, **ATTRIBUTES, **PROCESSES, **MEMORY, **NETWORK, **KERNEL, **VARIABLES}

# What only namespaces close; docs/try.md names these.
WITHOUT_NAMESPACES = {
    "ask for a file's size": "os.stat(secret)",
    "ask for a process": "os.stat(f'/proc/{other}')",
    "ask for another's priority": "os.getpriority(os.PRIO_PROCESS, other)",
    "ask for another's cores": "os.sched_getaffinity(other)",
    "ask for another's session": "os.getsid(other)",
    "ask what another has computed": "time.clock_gettime(~other << 3 | 2)",
}
ALLOWED = {
    "read its folder": "(folder / 'own.txt').read_bytes()",
    "list its folder": "os.listdir(folder)",
    "write its directory": "(scratch / 'a').write_bytes(b'1')",
    "rename its files": "(scratch / 'a').rename(scratch / 'b')",
    "make directories": "(scratch / 'c').mkdir() or (scratch / 'c').rmdir()",
    "make temporary files": "tempfile.TemporaryFile(dir=scratch)",
    "copy a file": "shutil.copyfile(folder / 'own.txt', scratch / 'copy')",
    "look at itself": "Path('/proc/self/maps').read_bytes()",
    "look at its machine": "Path('/proc/meminfo').read_bytes()",
    "count its cores": "os.sched_getaffinity(0)",
    "write nothing": "Path('/dev/null').write_bytes(b'1')",
    "draw random numbers": "Path('/dev/urandom').open('rb').read(1)",
    "start a thread": "threading.Thread(target=print).start()",
    "signal itself": "os.kill(os.getpid(), 0) or signal.raise_signal(signal.SIGWINCH)",
    "talk with itself": "multiprocessing.Pipe()",
    "read its limits": "resource.getrlimit(resource.RLIMIT_NOFILE)",
}


def attempt(expressions: dict[str, str], names: dict[str, Any]) -> dict[str, str]:
    """What each expression raised, or '' if it was evaluated."""
    errors = {}
    for name, expression in expressions.items():
        try:
            eval(expression, names)
            errors[name] = ""
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def names_for(facts: dict[str, Any]) -> dict[str, Any]:
    """What the expressions use: modules, the paths and numbers of the test, and system calls."""
    import ctypes
    import fcntl
    import mmap
    import multiprocessing
    import resource
    import shutil
    import stat
    import tempfile
    import threading
    from pathlib import Path

    libc, librt = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("librt.so.1", use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    memory = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    paths = {name: Path(path) for name, path in facts["paths"].items()}
    scratch = paths["scratch"]
    own_file = os.open(paths["folder"] / "own.txt", os.O_RDONLY)
    pair = socket.socketpair()

    def checked(result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def number(call: int, *arguments: Any) -> int:
        wide = [ctypes.c_long(n) if isinstance(n, int) else n for n in arguments]
        return checked(libc.syscall(call, *wide))

    def call(name: str, *arguments: Any) -> int:
        return number(facts["calls"][name], *arguments)

    def make_node(name: str, kind: int) -> Path:
        os.mknod(scratch / name, kind | 0o600, os.makedev(8, 0))
        return scratch / name

    modules = [ctypes, fcntl, mmap, multiprocessing, os, resource, shutil, signal, socket, stat]
    modules += [struct, subprocess, tempfile, threading, time]
    names: dict[str, Any] = {module.__name__: module for module in modules}
    names |= {"Path": Path, "libc": libc, "librt": librt, "buffer": buffer, "memory": memory}
    names |= {
        "checked": checked,
        "number": number,
        "call": call,
        "make_node": make_node,
        "pair": pair,
    }
    return {**names, **facts["numbers"], **paths, "own": own_file}


def main(facts: dict[str, Any]) -> None:
    names = names_for(facts)
    print("\n" + json.dumps(attempt(facts["expressions"], names)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))


# A process in a session of its own, deaf to signals, that forks itself again and again.
DAEMON = """
import contextlib, os, signal, sys, time
for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
    signal.signal(sign, signal.SIG_IGN)
with contextlib.suppress(PermissionError):
    os.kill(os.getppid(), signal.SIGSTOP)
with contextlib.suppress(PermissionError):
    if os.fork() == 0:
        os.setsid()
        end = time.time() + 60
        while time.time() < end:
            if os.fork():
                os._exit(0)
            beat = time.process_time() + 0.02
            while time.process_time() < beat:
                pass
        os._exit(0)
"""
