"""train.py as a process that starts at once: a fork of one that has imported torch.

Each start saves two seconds of CPU time. All else is as if Python had been started: a session of
its own, directory, environment, arguments, files, exit status. As a program, this is the server.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LARGEST = 1 << 20  # bytes of a request, which holds the environment
# Taken before any test changes the environment: the server may start at any of them.
STARTING = {**os.environ, "OMP_NUM_THREADS": "1"}


class Process(subprocess.Popen[str]):
    """`python SCRIPT ARGUMENTS ...`, forked by the server. Pipes and waiting are Popen's own."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # As in Python 3.11 to 3.14: directory, environment, and ours and the child's ends of pipes.
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        request = {"argv": args[1:], "cwd": os.fspath(cwd), "env": dict(env)}
        self.pid = ask(request, pipes[0], pipes[3], pipes[5])
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


def serves(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a start may be replaced: of a script by this Python, with nothing that Python, torch,
    or OpenMP reads when it starts."""
    starting = ("PYTHON", "LC_", "TORCH", "TRITON", "CC", "CXX", "OMP", "GOMP")
    names = {name for name in {*env, *STARTING} if name.startswith(starting)}
    usual = all(env.get(name) == STARTING.get(name) for name in names)
    return usual and command[0] == sys.executable and command[1].endswith(".py")


def ask(request: dict[str, Any], *files: int) -> Any:
    channel = server()
    socket.send_fds(channel, [json.dumps(request).encode()], files)
    return json.loads(channel.recv(LARGEST))


@functools.cache
def server() -> socket.socket:
    """The connection to this process's server, which ends when the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        env={**STARTING, "GOMP_SPINCOUNT": "5000", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours


def serve(channel: socket.socket) -> list[str]:
    """Forks for each request; returns in the child alone, with what to run."""
    import torch._dynamo  # noqa: F401  which DistributedDataParallel imports, for a second

    while True:
        message, files, _, _ = socket.recv_fds(channel, LARGEST, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        answer: int | None
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = status if pid else None
        elif answer := os.fork():
            for file in files:
                os.close(file)
        else:
            os.setsid()
            for place, file in enumerate(files):
                os.dup2(file, place)
            for file in {channel.detach(), *files}:
                os.close(file)
            # The server's streams are of files of another kind.
            sys.stdout = os.fdopen(1, "w", os.isatty(1) or -1, closefd=False)
            sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            tempfile.tempdir = None  # which the server has looked up
            return list(request["argv"])
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
