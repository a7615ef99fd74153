"""What a confined program cannot do, what it still can, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launching
import probes
import pytest
from probes import DAEMON

from sm_nanogpt.launcher.local import confine, gpus, landlock, syscalls
from sm_nanogpt.launcher.local.confine import (
    BUBBLEWRAP,
    FILTER,
    LANDLOCK,
    Sandbox,
    confined,
    environment,
)
from sm_nanogpt.launcher.local.gpus import LocalGpu, find_gpu
from sm_nanogpt.launcher.local.process import Program

pytestmark = pytest.mark.skipif(
    not {LANDLOCK, FILTER} <= confine.layers() and "CI" not in os.environ,
    reason="this system has no Landlock, or no libseccomp",
)
LAYERS = confine.layers
SANDBOXES = {
    "bubblewrap": {BUBBLEWRAP, LANDLOCK, FILTER},
    "no Landlock": {BUBBLEWRAP, FILTER},
    "no bubblewrap": {LANDLOCK, FILTER},
}
# What refuses: rights, read-only mounts, another file system; no such thing, call, or address.
REFUSALS = re.compile(
    r"PermissionError|KeyError|FileNotFoundError|ProcessLookupError|gaierror"
    r"|ValueError: not allowed|OSError: \[Errno (6|9|18|30|38|97|101)\]"
)


@pytest.fixture(scope="module", params=SANDBOXES)
def sandboxed(request):
    """A sandbox of some layers."""
    layers = frozenset(SANDBOXES[request.param])
    if not layers <= confine.layers():
        if "CI" in os.environ:
            pytest.fail(f"this system has no {layers - confine.layers()}")
        pytest.skip("this system does not have it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confine, "layers", lambda: layers)
        yield layers


# Landlock has no part in how a program starts, computes and ends.
wrapped_or_not = pytest.mark.parametrize(
    "sandboxed", ["bubblewrap", "no bubblewrap"], indirect=True
)
unwrapped = pytest.mark.parametrize("sandboxed", ["no bubblewrap"], indirect=True)


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    base = tmp_path_factory.mktemp("confined")
    paths = {name: base / name for name in ("folder", "scratch", "home")}
    for path in paths.values():
        path.mkdir()
    (paths["folder"] / "own.txt").write_text("own")
    (paths["home"] / "judge.txt").write_text("held out")
    return SimpleNamespace(**paths, secret=paths["home"] / "judge.txt")


def ran(layout: Any, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python that ran confined."""
    whole = confined([sys.executable, *command], Sandbox([layout.folder], layout.scratch))
    env = environment(layout.scratch)
    options = {"capture_output": True, "text": True, "timeout": 100, **options}
    fds = [confine.lease(os.getpid()), *options.pop("pass_fds", [])]
    return subprocess.run(whole, env=env, start_new_session=True, pass_fds=fds, **options)


# -- what it reaches -------------------------------------------------------------------------------


@contextlib.contextmanager
def facts_for(layout: Any, expressions: dict[str, str]) -> Iterator[str]:
    """What the program of the probes needs to know, with a process and servers to be reached."""
    import pyseccomp

    calls = set(re.findall(r"call\('(\w+)'", str(expressions)))
    name = f"sm-nanogpt-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.ExitStack() as stack:
        other = subprocess.Popen(["sleep", "100"], stdin=layout.secret.open(), cwd=layout.home)
        stack.callback(other.wait)
        stack.callback(other.kill)
        servers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        servers += [socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        for server in servers:
            stack.enter_context(server)
        socket_path = layout.home / "socket"
        socket_path.unlink(missing_ok=True)
        servers[0].bind(f"\0{name}")
        servers[1].bind(str(socket_path))
        servers[2].bind(("127.0.0.1", 0))
        for server in servers[:3]:
            server.listen(100)
        paths = {
            **vars(layout),
            "named": socket_path,
            "launcher": Path(confine.__file__).parents[1],
        }
        inherited = os.dup2(servers[0].fileno(), 200)  # open in programs that are not told to close
        stack.callback(os.close, inherited)
        numbers = {"other": other.pid, "parent": os.getpid(), "inherited": inherited}
        facts = {
            "calls": {each: pyseccomp.resolve_syscall(0, each) for each in calls},
            "expressions": expressions,
            "numbers": {
                **numbers,
                "port": servers[2].getsockname()[1],
                "abstract": f"\0{name}",
            },
            "paths": {each: str(path) for each, path in paths.items()},
        }
        yield json.dumps(facts)
        assert other.poll() is None


@pytest.fixture(scope="module")
def errors(layout, sandboxed):
    """What a confined program that tries all ways in turn is told."""
    expressions = {**probes.WAYS, **probes.WITHOUT_NAMESPACES, **probes.ALLOWED}
    (layout.folder / "probes.py").write_text(Path(probes.__file__).read_text())
    with pytest.MonkeyPatch.context() as patch, facts_for(layout, expressions) as facts:
        for name in probes.VARIABLES:
            patch.setenv(name.removeprefix("read "), "secret")
        done = ran(layout, str(layout.folder / "probes.py"), facts)
        assert done.returncode == 0, done.stderr
        assert layout.secret.read_text() == "held out"
    return json.loads(done.stdout.splitlines()[-1])


def test_a_confined_program_is_refused(errors):
    refused = {name for name in probes.WAYS if REFUSALS.match(errors[name])}
    assert {name: errors[name] for name in probes.WAYS.keys() - refused} == {}


def test_namespaces_hide_what_is_no_content(errors, sandboxed):
    hidden = {name for name in probes.WITHOUT_NAMESPACES if errors[name]}
    assert hidden == (set(probes.WITHOUT_NAMESPACES) if BUBBLEWRAP in sandboxed else set())


def test_a_confined_program_may(errors):
    assert {name: errors[name] for name in probes.ALLOWED} == dict.fromkeys(probes.ALLOWED, "")


@wrapped_or_not
def test_torch_computes_confined_and_maps_no_secret(layout, sandboxed):
    code = (
        "import torch; torch.ones(64, 64) @ torch.ones(64, 64)\n"
        f"torch.from_file({str(layout.secret)!r}, size=8, dtype=torch.uint8)"
    )
    done = ran(layout, "-c", code)
    assert done.returncode == 1
    assert re.search(r"Permission denied|No such file", done.stderr.splitlines()[-1])


def test_each_system_call_of_the_filter_exists():
    import pyseccomp

    names = " ".join(syscalls.FORBIDDEN.values()).split()
    unknown = [name for name in names if pyseccomp.resolve_syscall(0, name) == -1]
    assert unknown == []


def test_texts_beside_programs_are_not_readable():
    """Else a run could read the judge's part of a text that somebody has put there."""
    readable = confine.packages()
    for path in ("/usr/share/dict/words", "/etc/motd", "/usr/games/text", f"{sys.prefix}/text"):
        assert not any(Path(path).is_relative_to(directory) for directory in readable)


@pytest.mark.parametrize(
    ("layers", "reachable"),
    [
        ({LANDLOCK, FILTER}, []),
        ({BUBBLEWRAP}, ["keyrings", "locks of files", "processes whose time nobody counts"]),
        ({FILTER}, ["all files"]),
    ],
)
def test_what_stays_open_is_named(layers, reachable, monkeypatch):
    monkeypatch.setattr(confine, "layers", lambda: layers)
    assert confine.unprotected() == reachable


def test_a_bubblewrap_that_is_not_allowed_is_no_layer(tmp_path, monkeypatch):
    """As in a container, or where AppArmor forbids namespaces of users."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: setting up uid map' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert BUBBLEWRAP not in LAYERS.__wrapped__()


# -- on a GPU --------------------------------------------------------------------------------------

CARDS = {
    "0000:00:1b.0": (2, "GPU-aa11"),
    "0000:00:1c.0": (0, "GPU-aa22"),
    "0001:00:1d.0": (1, "GPU-bb"),
}


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine with three GPUs of NVIDIA, whose devices are numbered in another order."""

    def driver(*models: str) -> None:
        for (bus, (minor, uuid)), model in zip(CARDS.items(), models, strict=True):
            facts = f"Model: \t {model}\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
            (tmp_path / "gpus" / bus).mkdir(parents=True)
            (tmp_path / "gpus" / bus / "information").write_text(facts)
        for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
            (tmp_path / name).touch()

    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "GPU_INFO_DIRECTORY", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return driver


@pytest.mark.parametrize(
    ("name", "uuid", "device"),
    [("2", "GPU-bb", "nvidia1"), ("GPU-aa2", "GPU-aa22", "nvidia0")],
)
def test_a_run_has_the_devices_of_its_gpu_alone(name, uuid, device, driver):
    driver("A10G", "A10G", "A10G")
    gpu = find_gpu(name)
    assert gpu.name == uuid
    assert {path.name for path in gpu.devices} == {device, "nvidiactl", "nvidia-uvm"}


@pytest.mark.parametrize("name", ["0", "MIG-aa11", "GPU-aa"])
def test_a_gpu_that_cannot_be_told_has_all_devices(name, driver):
    driver("A10G", "A10G", "T4")
    gpu = find_gpu(name)
    assert gpu.name == name
    assert len(gpu.devices) == 5


@pytest.mark.skipif(BUBBLEWRAP not in LAYERS(), reason="needs bubblewrap")
def test_a_run_on_a_gpu_may_start_a_compiler(layout, monkeypatch):
    """What it starts ends with it."""
    monkeypatch.setattr(confine, "layers", LAYERS)
    code = "import subprocess as s; s.run(['true'], check=True); s.Popen(['sleep', '4711'])"
    sandbox = Sandbox([layout.folder], layout.scratch, LocalGpu("0", ()))
    command = confined([sys.executable, "-c", code], sandbox)
    fds = [confine.lease(os.getpid())]
    subprocess.run(command, env=environment(layout.scratch), check=True, pass_fds=fds)
    launching.until(lambda: not living("sleep 4711"), 5)


# -- the environment -------------------------------------------------------------------------------


def test_only_harmless_variables_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for name in (
        "HF_TOKEN",
        "MY_KEY",
        "LD_PRELOAD",
        "SM_NANOGPT_API_KEY",
        "AWS_PROFILE",
        "OMP_NOTE",
    ):
        monkeypatch.setenv(name, "secret")
    variables = environment(tmp_path, SEED="1")
    assert "secret" not in variables.values()
    assert variables["HOME"] == variables["TMPDIR"] == str(tmp_path)
    assert [variables[name] for name in ("OMP_NUM_THREADS", "SEED")] == ["3", "1"]
    assert variables["CUDA_VISIBLE_DEVICES"] == ""


def test_no_variable_is_long_enough_to_hold_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_SCHEDULE", "x" * 200)
    monkeypatch.setenv("PATH", os.pathsep.join(f"/text/{n}" for n in range(999)))
    variables = environment(tmp_path)
    assert "OMP_SCHEDULE" not in variables
    assert "PATH" not in variables


def test_a_directory_without_libraries_is_not_readable(tmp_path, monkeypatch):
    libraries = tmp_path / "lib"
    libraries.mkdir()
    (libraries / "libmine.so.1").touch()
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "judge.txt").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{texts}:{libraries}")
    readable = confine.packages()
    assert libraries in readable
    assert texts not in readable
    assert environment(tmp_path)["LD_LIBRARY_PATH"] == str(libraries)


# -- how it ends -----------------------------------------------------------------------------------


@wrapped_or_not
@pytest.mark.parametrize(
    ("code", "status"), [("os._exit(3)", 3), ("ctypes.string_at(0)", -signal.SIGSEGV)]
)
def test_the_exit_status_is_that_of_the_program(code, status, layout, sandboxed):
    program = started(layout, f"import os, ctypes; {code}")
    assert program.has_ended(60)
    assert program.status == status


@unwrapped
def test_a_program_that_is_not_there_is_told(layout, sandboxed):
    command = confined(["/no/such/program"], Sandbox([layout.folder], layout.scratch))
    fds = [confine.lease(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=fds)
    assert done.returncode == 1
    assert "No such file" in done.stderr


# Ways to compute where nobody counts: children whose end the kernel tells nobody, and others.
HIDDEN = """
import ctypes, os, signal, subprocess, sys, threading, time
def compute():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
def forks():
    if os.fork() == 0:
        compute()
        os._exit(0)
def daemon():
    if os.fork() == 0:
        os.setsid()
        forks()
        os._exit(0)
def clones():
    if ctypes.CDLL(None).syscall(56, 0, 0, 0, 0, 0) == 0:  # no signal at its end
        compute()
        os._exit(0)
def runs():
    subprocess.run([sys.executable, "-c", "while True: pass"], timeout=0.5)
def ignores():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    forks()
def threads():
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
ways = [forks, daemon, clones, runs, ignores, compute, threads]
for way in ways:
    began = time.monotonic()
    try:
        way()
    except OSError:
        pass
compute()
"""


MARK = f"mark-{os.getpid()}"  # in the command lines of this process's programs


def living(mark: str) -> list[str]:
    return [line for _, _, line in launching.processes() if mark in line]


def started(layout: Any, code: str, *arguments: str, **limits: Any) -> Program:
    sandbox = Sandbox([layout.folder], layout.scratch, **limits)
    command = confined([sys.executable, "-c", code, *arguments], sandbox)
    fds = [confine.lease(os.getpid())]
    return Program(command, env=environment(layout.scratch), pass_fds=fds)


@wrapped_or_not
def test_all_computing_of_a_program_is_counted(layout, sandboxed):
    """It computes for 0.3 seconds three times, by what is allowed, and no process is left."""
    program = started(layout, HIDDEN, MARK)
    assert program.has_ended(60)
    assert program.status == 0
    assert program.cpu_seconds > 0.9
    assert not living(MARK)


@wrapped_or_not
def test_a_program_is_ended_by_its_processor_time(layout, sandboxed):
    """The kernel counts whole seconds."""
    program = started(layout, f"{DAEMON}\nwhile True: pass", cpu_seconds=0.5)
    assert program.has_ended(60)
    assert program.status == -signal.SIGKILL
    assert 0.5 < program.cpu_seconds < 2


@unwrapped
def test_a_program_that_sleeps_is_not(layout, sandboxed):
    program = started(layout, "import time; time.sleep(1.2)", cpu_seconds=0.5)
    assert program.has_ended(60)
    assert program.status == 0


@wrapped_or_not
@pytest.mark.parametrize(
    "code", [DAEMON, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
)
def test_a_program_is_ended_at_once_and_counted(code, layout, sandboxed):
    """Also one that ignores signals, or has stopped itself."""
    program = started(layout, f"{BUSY}\n{code}\nimport time; time.sleep(100)", MARK)
    launching.until(lambda: (layout.scratch / "busy").exists())
    program.end()
    (layout.scratch / "busy").unlink()
    assert program.status == -signal.SIGKILL
    assert program.cpu_seconds > 0.2
    assert not living(MARK)


BUSY = """
import time
while time.process_time() < 0.2:
    pass
open("busy", "w").close()
"""


WAIT = """
open("begun", "w").close()
time.sleep(60)
"""


@wrapped_or_not
def test_a_program_ends_with_the_process_that_started_it(layout, sandboxed):
    code = (
        "import os, subprocess, sys; from pathlib import Path\n"
        "from sm_nanogpt.launcher.local import confine\n"
        f"confine.layers = lambda: {set(sandboxed)!r}\n"
        f"sandbox = confine.Sandbox([], Path({str(layout.scratch)!r}))\n"
        f"command = [sys.executable, '-c', {DAEMON + WAIT!r}, {MARK!r}]\n"
        "fds = [confine.lease(os.getpid())]\n"
        "command = confine.confined(command, sandbox)\n"
        "subprocess.run(command, start_new_session=True, pass_fds=fds)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(confine.__file__).parents[2])
    launching.until((layout.scratch / "begun").exists)  # else it would end by its lease
    (layout.scratch / "begun").unlink()
    parent.kill()
    parent.wait()
    launching.until(lambda: not living(MARK), 10)


@wrapped_or_not
def test_a_program_whose_parent_has_ended_does_not_begin(layout, sandboxed, monkeypatch):
    reader, writer = os.pipe()
    os.close(writer)
    monkeypatch.setattr(confine, "lease", lambda pid: reader)
    done = ran(layout, "-c", "print('begun')")
    os.close(reader)
    assert done.returncode == 1
    assert done.stdout == ""


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
    9: ((1 << 16) - 1, 3, 3),  # one that knows more than we ask for
}


class Kernel:
    """A library whose kernel has one version of Landlock, and takes what that one takes."""

    def __init__(self, abi: int) -> None:
        self.known, self.handled, self.restricted = abi, tuple[int, ...](), False

    def prctl(self, *args: Any) -> int:
        return 0

    def syscall(self, number: int, *args: Any) -> int:
        if number == landlock.RESTRICT:
            self.restricted = True
        elif number == landlock.ADD:
            rights, _ = struct.unpack("=Qi", args[2])
            assert rights & ~self.handled[0] == 0
        elif args[0] is None:
            return self.known
        else:
            self.handled = struct.unpack(f"{len(args[0]) // 8}Q", args[0])
        return 0


@pytest.mark.parametrize("abi", KERNELS)
def test_each_kernel_is_asked_for_all_that_it_knows(abi, layout):
    kernel: Any = Kernel(abi)
    rights = {landlock.WRITE: [str(layout.scratch)], landlock.READ: [str(layout.secret)]}
    landlock.restrict(kernel, rights)
    assert kernel.handled == KERNELS[abi]
    assert kernel.restricted


def test_a_system_without_layers_runs_a_command_as_it_is(monkeypatch, layout):
    monkeypatch.setattr(confine, "layers", frozenset)
    done = ran(layout, "-c", f"open({str(layout.secret)!r}); import os; os.waitpid(os.fork(), 0)")
    assert done.returncode == 0
