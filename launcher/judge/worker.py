"""A process of its own that computes a model, and the judge's end of it.

The folder that trained a model is its user's code, and may be wrong or dishonest. It runs in the
worker alone: the judge sends ids and gets logits, as bytes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from sm_nanogpt.entry_point.device import keep_freed_memory
from sm_nanogpt.entry_point.errors import DataError
from sm_nanogpt.entry_point.files import read_json
from sm_nanogpt.entry_point.startup import SPIN_COUNT, open_standard_streams
from sm_nanogpt.entry_point.text import Tokenizer, read_tokenizer
from sm_nanogpt.entry_point.waiting import Waiting
from sm_nanogpt.launcher.errors import LauncherError, ServiceError
from sm_nanogpt.launcher.files.documents import Damaged, Document, parse
from sm_nanogpt.launcher.local.confine import (
    Sandbox,
    confined,
    environment,
    lease,
    warn_of_unprotected,
)
from sm_nanogpt.launcher.local.process import (
    END_SECONDS,
    Program,
    describe_status,
    python_command,
    remove,
)
from sm_nanogpt.launcher.models.load import TrainingDocument
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 12  # bytes that are logged together

# Limits of one pass: so many tokens stay in the cache (41k a second of `laptop`, twice as many
# make 26k), and their logits take 64 MB.
PASS_TOKENS = 1 << 12
PASS_LOGITS = 1 << 24
ROW_STEP = 16  # rows that are scored have a multiple of it, or as many ids as the context
MAX_ANSWER_SECONDS = 600.0  # seconds by the clock that a model may take for an answer
# Bytes that a model's process may send of a problem, and of its facts or the pieces of samples. A
# longer message is not read.
MAX_PROBLEM_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 20
# A model may have more logits than tokens: so many, or twice the tokens. The answers of one with
# millions could take more memory than the machine has.
MAX_PADDED_LOGITS = 1 << 16


class ModelFacts(Document):
    """What a worker's process says of its model."""

    block_size: Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
    n_logits: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    chats: bool  # True if it has learned from conversations


class Worker:
    """A model in a process of its own, which computes in float32 on the CPU.

    block_size, n_logits and chats are as in ModelFacts. The model is judged by the tokens of
    `tokenizer`, or else by its own.

    The process reads the model and the folder that trained it, and writes a directory that is
    deleted with it. What it prints is logged, or lost if it is silent. It is ended soon after it
    has computed for max_cpu_seconds, and has MAX_ANSWER_SECONDS for an answer. After the end,
    cpu_seconds is what it has computed. Raises ServiceError if it fails, or the model has fewer
    logits than there are tokens, or far more.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        entry_point: Path | None,
        tokenizer: Tokenizer | None = None,
        silent: bool = False,
        max_cpu_seconds: float = math.inf,
    ) -> None:
        self.directory = directory
        self.tokenizer = tokenizer or read_tokenizer(directory)
        self.silent = silent
        self.max_cpu_seconds = max_cpu_seconds
        self.max_answer_seconds = MAX_ANSWER_SECONDS
        self.cpu_seconds = 0.0
        self.is_judged = False
        self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.start(settings, entry_point)
        self.logging_thread = threading.Thread(target=self.log_output, daemon=True)
        self.logging_thread.start()
        try:
            facts = self.read_facts()
        except BaseException:
            self.__exit__()
            raise
        self.block_size = facts.block_size
        self.n_logits = facts.n_logits
        self.chats = facts.chats

    def start(self, settings: Settings, entry_point: Path | None) -> None:
        """Start the process in its sandbox, with a pipe to it."""
        open_standard_streams()  # else the pipe may get the number of one
        self.pipe, pipe_of_process = Pipe()
        fd = pipe_of_process.fileno()
        scratch = Path(self.scratch.name)
        n_threads = torch.get_num_threads()

        model = self.directory.absolute()
        readable = [model, *kept_folders(model, settings)]
        if not self.silent:  # a user's own model, which may consist of links; a run's has none
            readable += linked_files(model)
        folder = ""
        if entry_point is not None:
            readable.append(entry_point.absolute())
            folder = str(entry_point.absolute())
        command = python_command(__name__, fd, model, folder, settings.home, n_threads)

        warn_of_unprotected()
        self.program = Program(
            confined(command, Sandbox(readable, scratch, cpu_seconds=self.max_cpu_seconds)),
            # Threads that wait leave the judge its cores.
            env={"GOMP_SPINCOUNT": SPIN_COUNT, **environment(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if self.silent else subprocess.PIPE,
            stderr=subprocess.DEVNULL if self.silent else subprocess.STDOUT,
            pass_fds=[fd, lease(os.getpid())],
        )
        pipe_of_process.close()

    def read_facts(self) -> ModelFacts:
        """The facts with which the process begins. Raises ServiceError if they do not fit."""
        facts = parse(self.answer(), ModelFacts, f"{self.directory}: what its process says")
        n_tokens = len(self.tokenizer)
        if not n_tokens <= facts.n_logits <= max(MAX_PADDED_LOGITS, 2 * n_tokens):
            problem = f"it has {facts.n_logits} logits for {n_tokens} tokens"
            raise ServiceError(f"{self.directory}: {problem}")
        return facts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pipe.close()
        self.program.end()
        self.cpu_seconds = self.program.cpu_seconds
        # Where it may start processes, one of them may still hold its output.
        self.logging_thread.join(END_SECONDS)
        self.is_judged = True
        remove(Path(self.scratch.name))
        self.scratch.cleanup()

    def log_output(self) -> None:
        """Log what the model's code prints, so that none of it looks like the judge's own words."""
        output = self.program.output
        if output is None:
            return
        for line in iter(partial(output.readline, MAX_LINE_BYTES), b""):
            if self.is_judged:  # after the verdict, nothing is said of the model
                break
            text = line.decode(errors="replace").rstrip()
            logger.info(f"the model's process: {text}")
        output.close()

    def answer(self, *request: bytes, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """Send the messages of a request, if any, and return the content of the next answer.

        An answer is two messages: a problem, which is empty, and the content; or a problem alone.
        Raises ServiceError if it reports a problem, ends, answers more than max_bytes, or has not
        read the whole request and sent the whole answer within max_answer_seconds.
        """
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self.program.kill()

        timer = threading.Timer(self.max_answer_seconds, give_up)
        timer.start()
        try:
            for message in request:
                self.pipe.send_bytes(message)
            problem = self.pipe.recv_bytes(MAX_PROBLEM_BYTES)
            content = b"" if problem else self.pipe.recv_bytes(max_bytes)
        except (EOFError, OSError):
            if is_late.is_set():
                problem = f"no answer in {self.max_answer_seconds:g} s".encode()
            else:
                problem = f"its process {self.describe_end()}".encode()
        finally:
            timer.cancel()
        if problem:
            raise ServiceError(f"{self.directory}: {problem.decode(errors='replace')}")
        return content

    def describe_end(self) -> str:
        """Describe why the process answers no more, as the rest of a sentence on it."""
        if not self.program.has_ended(END_SECONDS):
            return "answers no more"
        if self.program.cpu_seconds > self.max_cpu_seconds:
            return f"took over {self.max_cpu_seconds:.0f} s of processor time"
        status = self.program.status or 0
        if status > 0 and not self.silent:
            return f"{describe_status(status)}; what it printed is above"
        return describe_status(status)

    def logits(self, ids: Tensor) -> Tensor:
        """Logits, float32 [n, T, n_logits], of ids [n, T]."""
        shape = json.dumps({"shape": ids.shape}).encode()
        content = ids.int().contiguous().numpy().tobytes()
        n_bytes = 4 * ids.numel() * self.n_logits
        answer = self.answer(shape, content, max_bytes=n_bytes)
        if len(answer) != n_bytes:
            raise ServiceError(f"{self.directory}: its logits change their shape")
        logits = torch.frombuffer(bytearray(answer), dtype=torch.float32)
        return logits.view(*ids.shape, self.n_logits)

    def row_length(self, n_ids: int) -> int:
        """The length of the row in which a window of `n_ids` ids is scored."""
        return min(self.block_size, ROW_STEP * math.ceil(n_ids / ROW_STEP))

    def batches(self, lengths: Sequence[int], are_equal: bool = False) -> Iterator[list[int]]:
        """Yield the indices of the rows of each pass, by their lengths, the longest first.

        are_equal: the rows of a pass have the same length.
        """
        pass_tokens = min(PASS_TOKENS, PASS_LOGITS // self.n_logits)
        indices = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        while indices:
            max_length = lengths[indices[0]]
            batch = indices[: max(1, pass_tokens // max_length)]
            if are_equal:
                batch = [index for index in batch if lengths[index] == max_length]
            yield batch
            indices = indices[len(batch) :]

    def passes(self, windows: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the logits of all windows, pass by pass: indices, and logits [n, T, n_logits].

        All windows of a pass have the row_length T. A model whose rounding depends on the length of
        its rows gives the same logits for such rows again.
        """
        lengths = [self.row_length(len(window)) for window in windows]
        for indices in self.batches(lengths, are_equal=True):
            length = lengths[indices[0]]
            rows = torch.zeros(len(indices), length, dtype=torch.int64)
            for row, index in zip(rows, indices, strict=True):
                window = windows[index]
                row[: len(window)] = window
            yield indices, self.logits(rows)

    def sample(
        self, prompts: Sequence[Any], max_new_tokens: int, num_samples: int = 1, **sampling: Any
    ) -> list[str]:
        """Sample num_samples texts for each prompt.

        A prompt is the messages of a conversation, or None for any text. sampling: other arguments
        of stream_answers.
        """
        sampling |= {"max_new_tokens": max_new_tokens, "num_samples": num_samples}
        texts = list[str]()
        for messages in prompts:
            request = json.dumps({"messages": messages, "sampling": sampling}).encode()
            texts += self.samples(request, max_new_tokens, num_samples)
        return texts

    def samples(self, request: bytes, max_new_tokens: int, num_samples: int) -> list[str]:
        """The samples that the process sends, a piece of each with every answer.

        Each token is an answer, so all together may take longer than max_answer_seconds. The last
        answer is empty.
        """
        texts = [""] * num_samples
        # The bytes of a token, and those of a character that tokens before it began.
        longest_piece = max(map(len, self.tokenizer.words)) + 3
        n_answers = 0
        content = self.answer(request)
        while content:
            n_answers += 1
            pieces = parse(content, list[str], f"{self.directory}: a sample")
            # The last answer ends a character that may never have been completed.
            has_too_many = len(pieces) != num_samples or n_answers > max_new_tokens + 1
            if has_too_many or max(map(len, pieces)) > longest_piece:
                problem = "its process sends other samples than were asked for"
                raise ServiceError(f"{self.directory}: {problem}")
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
            content = self.answer()
        return texts


def linked_files(directory: Path) -> list[Path]:
    """The files that are linked into a directory, as a cache of the Hub links them.

    Linked directories are left out: one could be the home of the user.
    """
    return [path.resolve() for path in directory.iterdir() if path.is_symlink() and path.is_file()]


def kept_folders(directory: Path, settings: Settings) -> list[Path]:
    """The training folder of a model, if a launch or a search has kept it; else no folder."""
    try:
        training = parse(read_json(directory / "training.json"), TrainingDocument, "training.json")
    except (Damaged, DataError, OSError, ValueError):  # another tool's
        return []
    folder = settings.home / "sources" / training.script_sha256
    return [folder] if folder.is_dir() else []


# -- the process -----------------------------------------------------------------------------------


def main(fd: str, model_directory: str, training_folder: str, home: str, n_threads: str) -> None:
    """Send ModelFacts, and then answer the requests that the pipe `fd` brings, until it is closed.

    An answer is two messages: an empty one, and the content. If the model fails, the one message is
    the problem, and the process ends. training_folder is '' if the judge names none.
    """
    # Intel's library counts cores by a system call that the sandbox forbids, and would use one.
    torch.set_num_threads(int(n_threads))
    keep_freed_memory()
    pipe = Connection(int(fd))
    settings = Settings(home=Path(home))  # without config.toml, which it cannot read
    # The judge kills this process in the end: what waits in a buffer then would be lost.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        entry_point = Path(training_folder) if training_folder else None
        for answer in answers(pipe, Path(model_directory), settings, entry_point):
            pipe.send_bytes(b"")
            pipe.send_bytes(answer)
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        problem = str(error)
        if not isinstance(error, LauncherError):
            problem = f"{type(error).__name__}: {error}"
        pipe.send_bytes(problem.encode() or b"?")  # an empty message would begin an answer


def answers(
    pipe: Connection, directory: Path, settings: Settings, entry_point: Path | None
) -> Iterator[bytes]:
    """Yield ModelFacts, and then the answer to each request: logits, or texts as JSON."""
    from sm_nanogpt.launcher.models.engine import sampling_copy
    from sm_nanogpt.launcher.models.load import is_edited, load_model

    model, tokenizer = load_model(directory, settings, entry_point)
    model.compute_dtype = torch.float32
    net = model  # which computes the logits
    # The products of a copy take half the time, and give the same to rounding. Where a folder is
    # named, as a search does, all models are computed in one way, so that their times compare.
    if entry_point is None and not is_edited(model):
        net = sampling_copy(model, PASS_TOKENS, torch.float32)
    with torch.inference_mode():
        n_logits = net(torch.zeros(1, 1, dtype=torch.int64)).size(-1)
        facts = dict(block_size=model.config.block_size, n_logits=n_logits, chats=tokenizer.chats)
        yield json.dumps(facts).encode()
        waiting = Waiting(torch.get_num_threads())
        while True:
            waiting.look()
            request = json.loads(pipe.recv_bytes())
            if "shape" in request:
                content = bytearray(pipe.recv_bytes())
                ids = torch.frombuffer(content, dtype=torch.int32).view(request["shape"])
                yield net(ids.long()).float().contiguous().numpy().tobytes()
            else:
                waiting.wake()  # sampling chooses by itself how threads wait
                for pieces in sample_columns(model, tokenizer, **request):
                    yield json.dumps(pieces).encode()
                yield b""


def sample_columns(
    model: Any,
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]] | None,
    sampling: Mapping[str, Any],
) -> Iterator[list[str]]:
    """Yield, token by token, the next piece of each answer of a model to messages.

    A base model continues their texts, or any text.
    """
    from sm_nanogpt.launcher.models.chat import Message
    from sm_nanogpt.launcher.models.sample import stream_answers

    prompt: Any = None
    if messages and tokenizer.chats:
        prompt = [Message(**message) for message in messages]
    elif messages:
        prompt = "".join(f"{message['content']}\n" for message in messages)
    yield from stream_answers(model, tokenizer, prompt, **sampling)
