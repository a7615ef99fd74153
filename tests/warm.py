"""Processes that start at once: forks of one that has imported torch and the launcher.

Each start saves one to three seconds of CPU time. All else is as if Python had been started: a
session of its own, directory, environment, arguments, open files, exit status, command line. As a
program, this is the server.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 1 << 20  # bytes of a request, which holds the environment
# Processes of the tests import this checkout, although another one may be installed.
CHECKOUT = str(Path(__file__).parents[1])
EXAMPLES = Path(CHECKOUT, "examples")
paths = [CHECKOUT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))
# Taken before any test changes the environment: the server may start at any of them.
STARTING = {**os.environ, "OMP_NUM_THREADS": "1"}
PADDING = " " * 4000  # room for the command lines of forks
address = ""  # of the server
subprocess_popen = subprocess.Popen  # which a program may have replaced


def serves(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a start may be replaced: of a script or code by this Python, with nothing that
    Python, torch, or OpenMP reads when it starts."""
    starting = ("PYTHON", "LC_", "TORCH", "TRITON", "CC", "CXX", "OMP", "GOMP")
    names = {name for name in {*env, *STARTING} if name.startswith(starting)}
    names -= {"PYTHONUNBUFFERED", "GOMP_SPINCOUNT", "TORCH_CPP_LOG_LEVEL"}
    names -= {"PYTHONDONTWRITEBYTECODE"}  # which changes no result, and which a job does not get
    names -= {"TORCHINDUCTOR_CACHE_DIR"}  # which transformers sets, and nothing reads at the start
    same_variables = all(values_of(name, env) == values_of(name, STARTING) for name in names)
    if sys.platform != "linux" or command[0] != sys.executable:
        return False
    runs_code = command[1] in ("-P", "-c") or command[1].endswith(".py")
    return runs_code and same_variables


def values_of(name: str, env: Mapping[str, str]) -> list[str]:
    """The value of a variable. Each directory of PYTHONPATH counts once."""
    value = env.get(name) or ""
    return list(dict.fromkeys(value.split(os.pathsep))) if name == "PYTHONPATH" else [value]


class Process(subprocess.Popen[Any]):
    """`python SCRIPT ARGUMENTS ...`, forked by the server. Pipes and waiting are Popen's own."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # As in Python 3.11 to 3.14: files to keep, directory, environment, and ours and the child's
        # ends of pipes.
        kept_files, cwd, env, pipes = rest[3], rest[4], rest[5], rest[9:15]
        assert rest[-2], "the server gives each a session of its own: start_new_session"
        request = {
            "argv": list(map(os.fspath, args)),
            "cwd": str(Path(cwd).absolute()),
            "env": dict(env),
            "kept": list(kept_files),
        }
        self.pid = ask(request, *streams_of(pipes), *kept_files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        while (status := ask({"wait": self.pid})) is None:
            if flags & os.WNOHANG:
                return 0, 0
            time.sleep(0.005)
        return self.pid, status

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


class Fork(subprocess.Popen[Any]):
    """The same, as a child of this process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        self.pid = os.fork()
        if self.pid == 0:
            if rest[-1] >= 0:  # process_group
                os.setpgid(0, rest[-1])
            become(args, os.fspath(cwd), env, streams_of(pipes), ())
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def streams_of(pipes: Sequence[int]) -> list[int]:
    """The child's ends of pipes, or this process's own streams."""
    childs = (pipes[0], pipes[3], pipes[5])
    return [own if file == -1 else file for own, file in enumerate(childs)]


def replacing(start: type[subprocess.Popen[Any]]) -> types.SimpleNamespace:
    """The module subprocess, with another way to start what may be replaced."""

    def popen(command: Any, **options: Any) -> Any:
        if isinstance(command, str):
            return subprocess_popen(command, **options)
        words = list(map(os.fspath, command))
        env = dict(options.get("env") or os.environ)
        if not serves(words, env):
            return subprocess_popen(command, **options)
        options |= {"env": env, "cwd": options.get("cwd") or Path.cwd()}
        if start is Process:
            options["start_new_session"] = True
        return start(words, **options)

    return types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def replacing_unmeasured() -> types.SimpleNamespace:
    """The same for examples/benchmarks/measure.py, but for processes whose cost it asks for: these
    have no output, and are to be its own children."""

    def popen(command: Any, **options: Any) -> Any:
        outputs = (options.get("stdout"), options.get("stderr"))
        if outputs == (subprocess.DEVNULL, subprocess.DEVNULL):
            return subprocess_popen(command, **options)
        return replacing(Process).Popen(command, **options)

    return types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})


# -- the client's side -----------------------------------------------------------------------------


asking = threading.Lock()  # an answer is that of the thread's own request


def ask(request: dict[str, Any], *files: int) -> Any:
    with asking:
        channel = server()
        socket.send_fds(channel, [json.dumps(request).encode()], files)
        return json.loads(channel.recv(LARGEST))


@functools.cache
def server() -> socket.socket:
    """The connection to the server, which this process starts if it is not of the server's."""
    global address
    if not address:
        address = f"\0warm-{os.getpid()}-{time.monotonic_ns()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(100)
        subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), address[1:], PADDING],
            env={**STARTING, "GOMP_SPINCOUNT": "5000", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        listener.close()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    channel.connect(address)
    return channel


def wait_for_server() -> None:
    """Returns when the next process starts at once."""
    ask({"wait": 0})


# -- the server's side -----------------------------------------------------------------------------


def serve(listener: socket.socket) -> NoReturn:
    """Forks for each request, until the process that started it has ended."""
    import torch._dynamo  # noqa: F401  which DistributedDataParallel imports, for a second

    import sm_nanogpt.launcher.cli
    import sm_nanogpt.launcher.local.runner
    import sm_nanogpt.launcher.models.sample  # noqa: F401

    owner, _ = listener.accept()
    clients, statuses = {owner}, {}
    while True:
        ready, _, _ = select.select([listener, *clients], [], [], 0.05)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = ended[1]
        for channel in ready:
            if channel is listener:
                clients.add(listener.accept()[0])
                continue
            try:
                message, files, _, _ = socket.recv_fds(channel, LARGEST, 8)
            except ConnectionError:
                message = b""
            if not message:
                clients.discard(channel)
                channel.close()
                if channel is owner:
                    os._exit(0)
                continue
            request = json.loads(message)
            if "wait" in request:
                channel.send(json.dumps(statuses.pop(request["wait"], None)).encode())
                continue
            has_session, with_session = os.pipe()
            if pid := os.fork():
                for file in (*files, with_session):
                    os.close(file)
                os.read(has_session, 1)  # until then, its group is that of the server
                os.close(has_session)
                channel.send(json.dumps(pid).encode())
            else:
                os.setsid()
                os.close(has_session)
                os.close(with_session)
                for each in (listener, *clients):
                    each.close()
                server.cache_clear()
                argv, kept_files = request["argv"], zip(request["kept"], files[3:], strict=True)
                become(argv, request["cwd"], request["env"], files[:3], list(kept_files))


def become(
    argv: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    streams: Sequence[int],
    kept_files: Sequence[tuple[int, int]],
) -> NoReturn:
    """Makes this fork what `argv` starts, and ends with it."""
    status = 1
    try:
        # A file gets the number that it has in the process that asked. All are duplicated first,
        # so that none is overwritten before its turn.
        high = [(number, os.dup(file)) for number, file in kept_files]
        for number, file in enumerate([os.dup(file) for file in streams]):
            os.dup2(file, number)
        for number, file in high:
            os.dup2(file, number)
        numbers = {0, 1, 2, *(number for number, _ in kept_files)}
        for file in {int(each.name) for each in Path("/proc/self/fd").iterdir()} - numbers:
            with suppress(OSError):
                os.close(file)
        for sign in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(sign, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        buffering = 1 if "PYTHONUNBUFFERED" in env or os.isatty(1) else -1
        sys.stdout = os.fdopen(1, "w", buffering, closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        sys.stdin = os.fdopen(0, closefd=False)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # which the server has looked up
        rename(argv)
        run(list(argv[1:]))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
        finally:
            os._exit(status)


def run(argv: list[str]) -> None:
    """Runs code or a script as the main module."""
    sys.modules["warm"] = sys.modules["__main__"]
    is_safe = argv[0] == "-P"  # without the current directory in sys.path
    argv = argv[is_safe:]
    sys.argv = argv if argv[0] != "-c" else ["-c", *argv[2:]]
    if argv[0] == "-c":
        from sm_nanogpt.launcher.local import backend, process

        backend.subprocess = replacing(Process)  # type: ignore[assignment]
        if "local.runner" in argv[1]:  # its train.py
            process.subprocess = replacing(Fork)  # type: ignore[assignment]
        if is_safe:
            del sys.path[0]
        else:
            sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    elif EXAMPLES in Path(argv[0]).parents:
        from sm_nanogpt.launcher.local import backend

        backend.subprocess = replacing(Process)  # type: ignore[assignment]
        sys.path[0] = str(Path(argv[0]).parent)
        sys.path.append(str(EXAMPLES / "benchmarks"))
        measure = importlib.import_module("measure")
        vars(measure)["subprocess"] = replacing_unmeasured()
        runpy.run_path(argv[0], run_name="__main__")
    else:  # it may be an edited one, and knows no launcher
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("entry_point", "sm_nanogpt"):
                del sys.modules[name]
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def rename(argv: Sequence[str]) -> None:
    """Shows `argv` as this process's command line, over that of the server."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(map(os.fsencode, argv))[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    address = f"\0{sys.argv[2]}"
    sys.path[:0] = [str(Path(__file__).parent), CHECKOUT]
    serve(socket.socket(fileno=int(sys.argv[1])))
