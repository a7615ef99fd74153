"""What a confined program cannot do, what it still can, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launching
import pytest

from launcher.local import confine
from launcher.local.confine import confined, restrict, version

pytestmark = pytest.mark.skipif(
    not version() and "CI" not in os.environ, reason="this kernel has no Landlock"
)

# Each is an expression that a program evaluates. `secret` is a file beside its own, `other` a
# process outside, and `libc` calls set ctypes' errno.
DENIED = {
    "read a file": "secret.read_bytes()",
    "read it by the C library": "checked(libc.open(str(secret).encode(), 0))",
    "read it as a mapping": "mmap.mmap(os.open(secret, os.O_RDONLY), 0)",
    "read it through its own root": "Path(f'/proc/self/root{secret}').read_bytes()",
    "read it through another's root": "Path(f'/proc/{other}/root{secret}').read_bytes()",
    "read it by another's directory": "Path(f'/proc/{other}/cwd/{secret.name}').read_bytes()",
    "read what another has open": "Path(f'/proc/{other}/fd/0').read_bytes()",
    "read another's memory": "open(f'/proc/{other}/mem', 'rb')",
    "read another's environment": "Path(f'/proc/{other}/environ').read_bytes()",
    "read another's command line": "Path(f'/proc/{other}/cmdline').read_bytes()",
    "copy another's memory": "checked(libc.process_vm_readv(other, memory, 1, memory, 1, 0))",
    "trace another": "checked(libc.ptrace(16, other, 0, 0))",
    "list a directory": "os.listdir(secret.parent)",
    "list processes": "os.listdir('/proc')",
    "link to a file": "os.symlink(secret, scratch / 'link')",
    "link a file": "os.link(secret, scratch / 'link')",
    "move a file": "os.rename(secret, scratch / 'file')",
    "write a file": "secret.write_bytes(b'')",
    "add to a file": "secret.open('ab')",
    "cut a file": "os.truncate(secret, 0)",
    "delete a file": "secret.unlink()",
    "write beside it": "(secret.parent / 'note').write_bytes(b'')",
    "write where all may write": "tempfile.TemporaryFile(dir='/tmp')",
    "write shared memory": "Path('/dev/shm/note').write_bytes(b'')",
    "write its own folder": "(folder / 'note').write_bytes(b'')",
    "make a pipe": "os.mkfifo(scratch / 'pipe')",
    "make a device": "os.mknod(scratch / 'disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
    "reach a server": "socket.create_connection(('127.0.0.1', port))",
    "be a server": "socket.create_server(('127.0.0.1', 0))",
    "reach an abstract socket": "socket.socket(socket.AF_UNIX).connect(abstract)",
    "signal another": "os.kill(other, 0)",
    "signal what confines it": "os.kill(os.getppid(), 0)",
    "mount a disk": "checked(libc.mount(b'none', str(scratch).encode(), b'tmpfs', 0, None))",
}
ALLOWED = {
    "read its folder": "(folder / 'own.txt').read_bytes()",
    "list its folder": "os.listdir(folder)",
    "write its directory": "(scratch / 'a').write_bytes(b'1')",
    "rename its files": "(scratch / 'a').rename(scratch / 'b')",
    "make directories": "(scratch / 'c').mkdir() or (scratch / 'c').rmdir()",
    "make temporary files": "tempfile.TemporaryFile(dir=scratch)",
    "lock its files": "fcntl.flock((scratch / 'l').open('w'), fcntl.LOCK_EX)",
    "look at itself": "Path('/proc/self/maps').read_bytes()",
    "look at its machine": "Path('/proc/meminfo').read_bytes()",
    "write nothing": "Path('/dev/null').write_bytes(b'1')",
    "draw random numbers": "Path('/dev/urandom').open('rb').read(1)",
    "start a program": "subprocess.run([sys.executable, '-c', ''], check=True)",
    "signal its own": "subprocess.Popen(['sleep', '9']).kill()",
    "talk with its own": "multiprocessing.Pipe()",
    "copy a file with its times": "shutil.copy2(folder / 'own.txt', scratch / 'copy')",
}
PROBE = """
import contextlib, ctypes, fcntl, json, mmap, multiprocessing, os, shutil, socket, stat, subprocess
import sys, tempfile, time
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(8)
memory = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

given = json.loads(sys.argv[1])
names = {k: Path(v) if isinstance(v, str) and v[0] == "/" else v for k, v in given["names"].items()}
globals().update(names)
said = {}
for name, expression in given["expressions"].items():
    try:
        eval(expression)
        said[name] = ""
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    base = tmp_path_factory.mktemp("confined")
    made = {name: base / name for name in ("folder", "scratch", "home")}
    for each in made.values():
        each.mkdir()
    (made["folder"] / "own.txt").write_text("own")
    (made["home"] / "judge.txt").write_text("held out")
    return SimpleNamespace(**made, secret=made["home"] / "judge.txt")


def run(place: Any, *command: str) -> subprocess.CompletedProcess[str]:
    whole = confined([sys.executable, *command], [place.folder], [place.scratch])
    env = {**os.environ, "TMPDIR": str(place.scratch)}
    return subprocess.run(whole, capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture(scope="module")
def said(place):
    """The answers to a program that tries all of them in turn."""
    other = subprocess.Popen(["sleep", "60"], stdin=place.secret.open(), cwd=place.home)
    with contextlib.ExitStack() as stack:
        stack.callback(other.wait)
        stack.callback(other.kill)
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        server = stack.enter_context(socket.socket(socket.AF_INET))
        abstract.bind(f"\0sm-nanogpt-{os.getpid()}")
        server.bind(("127.0.0.1", 0))
        for each in (abstract, server):
            each.listen()
        names = {
            **{name: str(path) for name, path in vars(place).items()},
            "other": other.pid,
            "port": server.getsockname()[1],
            "abstract": f"\0sm-nanogpt-{os.getpid()}",
        }
        given = json.dumps({"names": names, "expressions": {**DENIED, **ALLOWED}})
        done = run(place, "-c", PROBE, given)
        assert done.returncode == 0, done.stderr
        assert other.poll() is None
        yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", DENIED)
def test_a_confined_program_is_refused(name, said):
    # EXDEV: what is linked or moved would get more rights.
    assert said[name].startswith(("PermissionError", "OSError: [Errno 18]")), said[name]


@pytest.mark.parametrize("name", ALLOWED)
def test_a_confined_program_may(name, said):
    assert said[name] == ""


def test_torch_computes_confined_and_maps_no_secret(place):
    code = (
        "import torch; torch.ones(64, 64) @ torch.ones(64, 64)\n"
        f"torch.from_file({str(place.secret)!r}, size=8, dtype=torch.uint8)"
    )
    done = run(place, "-c", code)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr.splitlines()[-1]


# -- how it ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 3, -signal.SIGSEGV, -signal.SIGKILL, -signal.SIGTERM])
def test_the_exit_status_is_that_of_the_program(status, place):
    code = f"import os; os._exit({status}) if {status} >= 0 else os.kill(os.getpid(), {-status})"
    assert run(place, "-c", code).returncode == status


def test_a_program_that_is_not_there_is_told(place):
    whole = confined(["/no/such/program"], [place.folder], [place.scratch])
    done = subprocess.run(whole, capture_output=True, text=True)
    assert done.returncode == 1
    assert "No such file" in done.stderr


# A process in a session of its own, deaf to signals, that forks itself again and again.
DAEMON = """
import os, signal, sys, time
for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(sign, signal.SIG_IGN)
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


def living(mark: str) -> list[str]:
    return [line for _, _, line in launching.processes() if mark in line]


def test_what_a_program_leaves_is_ended_and_counted(place):
    before = os.times()
    done = run(place, "-c", f"{DAEMON}\ntime.sleep(3)", "mark-left")
    after = os.times()
    assert done.returncode == 0
    assert not living("mark-left")
    used = after.children_user + after.children_system
    assert used - before.children_user - before.children_system > 0.6


@pytest.fixture
def started(place):
    """Starts a daemon below a process of its own, which may be killed."""
    processes = list[subprocess.Popen[bytes]]()

    def started(mark: str, *starter: str) -> subprocess.Popen[bytes]:
        whole = confined(
            [sys.executable, "-c", f"{DAEMON}\ntime.sleep(60)", mark],
            [place.folder],
            [place.scratch],
        )
        process = subprocess.Popen([*starter, *whole], start_new_session=True)
        processes.append(process)
        launching.until(lambda: len(living(mark)) > 2)
        return process

    yield started
    for process in processes:
        process.kill()
        process.wait()


def test_sigterm_ends_a_program_with_all_that_it_started(started):
    process = started("mark-term")
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    assert not living("mark-term")


def test_a_program_ends_with_the_process_that_started_it(place):
    code = (
        "import subprocess, sys; from pathlib import Path\n"
        "from launcher.local.confine import confined\n"
        f"command = [sys.executable, '-c', {DAEMON!r} + 'time.sleep(60)', 'mark-parent']\n"
        f"subprocess.run(confined(command, [Path({str(place.folder)!r})],"
        f" [Path({str(place.scratch)!r})]), start_new_session=True)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(confine.__file__).parents[2])
    launching.until(lambda: len(living("mark-parent")) > 3)
    parent.kill()
    parent.wait()
    launching.until(lambda: not living("mark-parent"), 10)


def test_a_program_whose_parent_has_ended_does_not_begin(place):
    whole = confined([sys.executable, "-c", "print('begun')"], [place.folder], [place.scratch])
    at = whole.index(str(os.getpid()))
    whole[at] = "1"
    done = subprocess.run(whole, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


# -- older and newer kernels -----------------------------------------------------------------------

# From include/uapi/linux/landlock.h, by version: the rights for files, those for TCP, and the
# scopes. REFER came with 2, TRUNCATE with 3, TCP with 4, IOCTL_DEV with 5, and scopes with 6.
KERNELS = {
    1: ((1 << 13) - 1,),
    2: ((1 << 14) - 1,),
    3: ((1 << 15) - 1,),
    4: ((1 << 15) - 1, 3),
    5: ((1 << 16) - 1, 3),
    6: ((1 << 16) - 1, 3, 3),
    7: ((1 << 16) - 1, 3, 3),
    9: ((1 << 16) - 1, 3, 3),
}


class Kernel:
    """A library whose kernel has one version of Landlock, and takes what that one takes."""

    def __init__(self, known: int) -> None:
        self.known, self.handled, self.restricted = known, tuple[int, ...](), False

    def prctl(self, *words: Any) -> int:
        return 0

    def syscall(self, number: int, *words: Any) -> int:
        if number == confine.RESTRICT:
            self.restricted = True
        elif number == confine.ADD:
            rights, _ = struct.unpack("=Qi", words[2])
            assert rights & ~self.handled[0] == 0
        elif words[0] is None:
            return self.known
        else:
            self.handled = struct.unpack(f"{len(words[0]) // 8}Q", words[0])
        return 0


@pytest.mark.parametrize("known", KERNELS)
def test_each_kernel_is_asked_for_all_that_it_knows(known, place):
    kernel: Any = Kernel(known)
    restrict(kernel, {confine.WRITE: [str(place.scratch)], confine.READ: [str(place.secret)]})
    assert kernel.handled == KERNELS[known]
    assert kernel.restricted


def test_a_system_without_it_runs_a_command_as_it_is(monkeypatch, place):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert confined(["a", "b"], [place.folder], []) == ["a", "b"]
