"""The command `chat`."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.models import ENTRY_POINT, open_model, samples
from launcher.cli.options import MODEL, Command, settings_of, valued
from launcher.cli.show import note
from launcher.cli.words import sentence
from launcher.errors import InputError, Terminated

if TYPE_CHECKING:
    from entry_point.model import GPT
    from entry_point.text import Tokenizer
    from launcher.models.chat import Message

HELP = "/reset begins anew, /system TEXT with an instruction; /save FILE writes the conversation"
Talk = Callable[[str, int], Generator[str]]  # what is typed, and the number of the turn, to a text


@click.command("chat", cls=Command)
@MODEL
@valued("--system", "TEXT", "Instruct the model before the conversation.")
@samples
@ENTRY_POINT
def chat_command(model: str, system: str | None, entry_point: Path | None, **sampling: Any) -> None:
    """Talk to a model in the terminal. Ctrl-C ends an answer, and Ctrl-D the conversation.

    A model that has learned from conversations answers; any other continues what you type. A line
    that ends with a backslash continues on the next. In a conversation, /reset begins anew,
    /system TEXT too, with an instruction, and /save FILE writes it as a line of JSON.

    \b
    Example:
      sm-nanogpt chat JOB-ID
      sm-nanogpt chat JOB-ID --system "Answer in one word." --temperature 0
    """
    _, loaded, tokenizer = open_model(model, settings_of(), entry_point)
    if tokenizer.chats:
        converse(Conversation(loaded, tokenizer, system, sampling).talk, HELP)
        return
    if system is not None:
        raise InputError("--system is for a model that has learned from conversations")
    from launcher.models.sample import stream_samples

    def continued(prompt: str, n: int) -> Generator[str]:
        wish = {**sampling, "seed": sampling["seed"] + n}
        columns = stream_samples(loaded, tokenizer, prompt or None, **wish)
        yield prompt
        for (piece,) in columns:
            yield piece

    converse(continued, "the model has not learned from conversations: it continues what you type")


class Conversation:
    """The messages so far, and what is typed about them. sampling is as for stream_samples."""

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, system: str | None, sampling: Mapping[str, Any]
    ) -> None:
        from launcher.models.chat import Chat

        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.chat = Chat(model, tokenizer)
        self.messages: list[Message] = []
        self.begin(system or "")

    def begin(self, system: str) -> None:
        """Forget the conversation, and give an instruction."""
        from launcher.models.chat import Message

        messages = [Message("system", system)] * bool(system.strip())
        probe = [*messages, Message("user", "?")]
        self.chat.fitting(probe, self.sampling["max_new_tokens"])  # or no message would fit
        self.messages, self.system = messages, system

    def talk(self, line: str, n: int) -> Generator[str]:
        """The answer to a line, or nothing to a command. Raises InputError; nothing is changed."""
        if line.startswith("/"):
            self.obey(line)
        elif line.strip():
            yield from self.answer(line, n)

    def obey(self, line: str) -> None:
        from launcher.files.storage import path_of

        name, _, text = line.partition(" ")
        match name, text.strip():
            case "/reset", _:
                self.begin(self.system)
            case "/system", text if text:
                self.begin(text)
            case "/save", text if text:
                self.save(path_of(text))
            case _:
                raise InputError(f"{line}: {HELP}")

    def answer(self, line: str, n: int) -> Generator[str]:
        from launcher.models.chat import Message
        from launcher.models.sample import stream_samples

        asked = [*self.messages, Message("user", line)]
        dropped, ids, most = self.chat.fitting(asked, self.sampling["max_new_tokens"])
        if dropped:
            note(f"the context is full: the model no longer sees the oldest {dropped} messages")
        said = ""
        wish = {**self.sampling, "max_new_tokens": most, "seed": self.sampling["seed"] + n}
        columns = stream_samples(self.model, self.tokenizer, ids, **wish)
        try:
            for (piece,) in columns:
                said += piece
                yield piece
        finally:
            if said.strip():  # upload-data refuses an empty message
                self.messages = [*asked, Message("assistant", said)]

    def save(self, path: Path) -> None:
        """Add the conversation to a file."""
        if not any(message.role == "assistant" for message in self.messages):
            raise InputError(f"{path}: there is nothing to save")
        record = {"messages": [asdict(message) for message in self.messages]}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        note(f"saved: {path}")


def converse(talk: Talk, told: str) -> None:
    """Print a text for each line from stdin, until it ends. Ctrl-C stops a text."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        import readline  # noqa: F401  (gives `input` a history)

        note(f"{told}; Ctrl-D quits")
    if isinstance(sys.stdin, io.TextIOWrapper):  # a message that is not UTF-8 is refused alone
        sys.stdin.reconfigure(errors="surrogateescape")
    n = 0
    while True:
        try:
            line = input("> " * terminal).rstrip("\r")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input(". " * terminal).rstrip("\r")
        except EOFError:
            click.echo(nl=terminal)
            return
        except KeyboardInterrupt as error:
            if not terminal or isinstance(error, Terminated):
                raise
            click.echo()  # drops the line that was typed
            continue
        spoke = False
        with ctrl_c_noted() as stopped:
            try:
                with closing(talk(line, n)) as texts:
                    for piece in texts:
                        if n and not spoke and not terminal:
                            click.echo("---")
                        click.echo(piece, nl=False)
                        spoke = True
                        if stopped:
                            break
            except InputError as error:  # a long message, or characters that it does not know
                note(f"error: {sentence(error)}")
        if spoke:
            click.echo()
            n += 1


@contextmanager
def ctrl_c_noted() -> Iterator[list[int]]:
    """A list that is no longer empty after Ctrl-C, which raises nothing meanwhile."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
