"""A process of its own that computes a model, and the judge's end of it.

The folder that trained a model is its user's code, and may be wrong or dishonest. It runs in the
worker alone: the judge sends ids and gets logits, as bytes.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from entry_point.errors import DataError
from entry_point.files import open_standard_streams
from entry_point.text import Tokenizer, read_json, read_tokenizer
from launcher.errors import LauncherError, ServiceError
from launcher.files.documents import Damaged, Document, parse
from launcher.local.confine import Sandbox, confined, environment, warn_of_unprotected
from launcher.local.process import END_SECONDS, Program, how_it_ended, python_command, remove
from launcher.models.load import Training
from launcher.settings import Settings

logger = logging.getLogger(__name__)

LONGEST_LINE = 1 << 12  # bytes that are logged together

# The most of one pass: so many tokens stay in the cache (41k a second of `laptop`, twice as many
# make 26k), and their logits take 64 MB.
PASS_TOKENS, PASS_LOGITS = 1 << 12, 1 << 24
PATIENT = 600.0  # seconds by the clock that a model may take for an answer
# The most bytes of what a model's process says: a problem, or texts. A larger one is not read.
LONGEST_PROBLEM, LONGEST_ANSWER = 1 << 16, 1 << 26


class Facts(Document):
    """What a worker says of its model: its context, the number of its logits, and of what kind."""

    block_size: Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
    size: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    chats: bool


class Worker:
    """A model in a process of its own, which computes in float32 on the CPU.

    block_size is its context, size the number of its logits; chats: it has learned from
    conversations. It is judged by the tokens of `tokenizer`, or else its own.

    The process reads the model and the folder that trained it, and writes a directory that is
    deleted with it. What it prints is logged, or lost if it is silent. It is ended soon after it
    has computed for `limit` seconds, and the model has PATIENT seconds for an answer. After the
    end, cpu_seconds is what it has computed. Raises ServiceError if it fails, or has fewer logits
    than there are tokens.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        entry_point: Path | None,
        tokenizer: Tokenizer | None = None,
        silent: bool = False,
        limit: float = math.inf,
    ) -> None:
        self.directory, self.tokenizer = directory, tokenizer or read_tokenizer(directory)
        self.silent, self.patience, self.limit = silent, PATIENT, limit
        self.cpu_seconds, self.is_judged = 0.0, False
        self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        open_standard_streams()  # else the pipe may get the number of one
        self.pipe, theirs = Pipe()
        model, scratch = directory.absolute(), Path(self.scratch.name)
        folder = entry_point.absolute() if entry_point else ""
        command = python_command(__name__, theirs.fileno(), model, folder, settings.home)
        readable = [model, *folders_behind(model, settings)]
        if entry_point:
            readable.append(entry_point.absolute())
        if not silent:  # a user's own model, which may consist of links; a run's may not
            readable += [path.resolve() for path in model.iterdir() if path.is_symlink()]
        output = subprocess.DEVNULL if silent else subprocess.PIPE
        warn_of_unprotected()
        self.program = Program(
            confined(command, Sandbox(readable, scratch, cpu_seconds=limit)),
            # Threads that wait leave the judge its cores.
            env={"GOMP_SPINCOUNT": "5000", **environment(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL if silent else subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.printing = threading.Thread(target=self.log_output, daemon=True)
        self.printing.start()
        try:
            facts = parse(self.answer(), Facts, f"{directory}: what its process says")
            if facts.size < (known := len(self.tokenizer)):
                raise ServiceError(f"{directory}: it has {facts.size} logits for {known} tokens")
        except BaseException:
            self.__exit__()
            raise
        self.block_size, self.size, self.chats = facts.block_size, facts.size, facts.chats

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pipe.close()
        self.program.end()
        self.cpu_seconds = self.program.cpu_seconds
        self.printing.join(
            END_SECONDS
        )  # where it may start processes, one may still hold its output
        self.is_judged = True
        remove(Path(self.scratch.name))
        self.scratch.cleanup()

    def log_output(self) -> None:
        """Log what the model's code prints, so that none of it looks like the judge's own words."""
        output = self.program.output
        if output is None:
            return
        for line in iter(partial(output.readline, LONGEST_LINE), b""):
            if self.is_judged:  # after the verdict, nothing is said of the model
                break
            text = line.decode(errors="replace").rstrip()
            logger.info(f"the model's process: {text}")
        output.close()

    def answer(self, *request: bytes, max_bytes: int = LONGEST_ANSWER) -> bytes:
        """Send a request, and return what the process answers.

        Raises ServiceError if it says a problem, ends, answers more than max_bytes, or has not
        taken the whole request and given the whole answer when the patience is over.
        """
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self.program.kill()

        watch = threading.Timer(self.patience, give_up)
        watch.start()
        try:
            for part in request:
                self.pipe.send_bytes(part)
            problem = self.pipe.recv_bytes(LONGEST_PROBLEM)
            content = b"" if problem else self.pipe.recv_bytes(max_bytes)
        except (EOFError, OSError):
            if is_late.is_set():
                problem = f"no answer in {self.patience:g} s".encode()
            else:
                problem = f"its process {self.how_it_ended()}".encode()
        finally:
            watch.cancel()
        if problem:
            raise ServiceError(f"{self.directory}: {problem.decode(errors='replace')}")
        return content

    def how_it_ended(self) -> str:
        if not self.program.has_ended(END_SECONDS):
            return "answers no more"
        if self.program.cpu_seconds > self.limit:
            return f"took over {self.limit:.0f} s of processor time"
        status = self.program.status or 0
        if status > 0 and not self.silent:
            return f"{how_it_ended(status)}; what it printed is above"
        return how_it_ended(status)

    def logits(self, ids: Tensor) -> Tensor:
        """Logits, float32 [n, T, size], of ids [n, T]."""
        request = json.dumps({"shape": ids.shape}).encode()
        size = 4 * ids.numel() * self.size
        answer = self.answer(request, ids.int().contiguous().numpy().tobytes(), max_bytes=size)
        content = bytearray(answer)
        if len(content) != size:
            raise ServiceError(f"{self.directory}: its logits change their shape")
        return torch.frombuffer(content, dtype=torch.float32).view(*ids.shape, self.size)

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The indices of rows of these lengths, the longest first, so many at a time as a pass
        takes."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        while order:
            longest = lengths[order[0]]
            n = max(1, min(PASS_TOKENS, PASS_LOGITS // self.size) // longest)
            yield order[:n]
            order = order[n:]

    def passes(self, windows: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """The logits [n, T, size] of some windows at a time, padded to T, after their indices."""
        for indices in self.batches([len(window) for window in windows]):
            rows = [windows[index] for index in indices]
            yield indices, self.logits(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))

    def sample(self, prompts: Sequence[Any], **sampling: Any) -> list[str]:
        """Texts after each prompt: messages of a conversation, or None, for the start of a text."""
        request = json.dumps({"prompts": prompts, "sampling": sampling}).encode()
        texts: list[str] = json.loads(self.answer(request))
        return texts


def folders_behind(directory: Path, settings: Settings) -> list[Path]:
    """The training folder of a model, if a launch or a search has kept it."""
    try:
        training = parse(read_json(directory / "training.json"), Training, "training.json")
    except (Damaged, DataError, OSError, ValueError):  # another tool's
        return []
    folder = settings.home / "sources" / training.script_sha256
    return [folder] if folder.is_dir() else []


# -- the worker's end ------------------------------------------------------------------------------


def main(fd: str, directory: str, folder: str, home: str) -> None:
    """Answer requests until the judge leaves: each answer is an empty message, then its content."""
    pipe = Connection(int(fd))
    settings = Settings(home=Path(home))  # without config.toml, which it cannot read
    # What a model prints is not lost, although the judge kills its process in the end.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        given = Path(folder) if folder else None
        for answer in answers(pipe, Path(directory), settings, given):
            pipe.send_bytes(b"")
            pipe.send_bytes(answer)
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        kind = "" if isinstance(error, LauncherError) else f"{type(error).__name__}: "
        pipe.send_bytes(f"{kind}{error}".encode() or b"?")


def answers(
    pipe: Connection, directory: Path, settings: Settings, folder: Path | None
) -> Iterator[bytes]:
    from launcher.models.engine import sampling_copy
    from launcher.models.load import is_edited, load_model

    model, tokenizer = load_model(directory, settings, folder)
    model.compute_dtype = torch.float32
    net = model
    # Its products take half the time, and give the same to rounding. Where a folder is named, as a
    # search does, all models are computed in one way, so that their times compare.
    if folder is None and not is_edited(model):
        net = sampling_copy(model, PASS_TOKENS, torch.float32)
    with torch.inference_mode():
        size = net(torch.zeros(1, 1, dtype=torch.int64)).size(-1)
        facts = dict(block_size=model.config.block_size, size=size, chats=tokenizer.chats)
        yield json.dumps(facts).encode()
        while True:
            request = json.loads(pipe.recv_bytes())
            if shape := request.get("shape"):
                ids = torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=torch.int32).view(shape)
                yield net(ids.long()).float().contiguous().numpy().tobytes()
            else:
                texts = sampled(model, tokenizer, request["prompts"], **request["sampling"])
                yield json.dumps(texts).encode()


def sampled(
    model: Any, tokenizer: Any, prompts: Sequence[Any], max_new_tokens: int, **sampling: Any
) -> list[str]:
    from launcher.models.chat import Message
    from launcher.models.sample import prompt_and_limit, stream_samples

    texts = list[str]()
    for prompt in prompts:
        asked: Any = prompt and [Message(**each) for each in prompt]
        if prompt and not tokenizer.chats:  # a base model continues the messages
            asked = "".join(f"{message.content}\n" for message in asked)
        columns = stream_samples(
            model, tokenizer, *prompt_and_limit(model, tokenizer, asked, max_new_tokens), **sampling
        )
        texts += ["".join(pieces) for pieces in zip(*columns, strict=True)]
    return texts
