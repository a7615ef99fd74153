"""The command `chat`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.launcher.cli.models import ENTRY_POINT, LoadedModel, open_model, sampling_options
from sm_nanogpt.launcher.cli.options import MODEL, Command, settings_of, value_option
from sm_nanogpt.launcher.cli.remedies import sentence
from sm_nanogpt.launcher.cli.show import note, print_text
from sm_nanogpt.launcher.errors import InputError, Terminated

if TYPE_CHECKING:
    from sm_nanogpt.launcher.models.chat import Chat, Message


@click.command("chat", cls=Command)
@MODEL
@value_option("--system TEXT", "Instruct the model before the conversation.")
@sampling_options
@ENTRY_POINT
def chat_command(model: str, system: str | None, entry_point: Path | None, **sampling: Any) -> None:
    """Talk to a model in the terminal. Ctrl-C ends an answer, and Ctrl-D the conversation.

    A model that has learned from conversations answers; any other continues what you type. A line
    that ends with a backslash continues on the next.

    Example:
      sm-nanogpt chat JOB-ID
      sm-nanogpt chat JOB-ID --system "Answer in one word." --temperature 0
    """
    loaded = open_model(model, settings_of(), entry_point)
    from sm_nanogpt.launcher.models.chat import Chat, Message
    from sm_nanogpt.launcher.models.sample import check_sampling

    check_sampling(**sampling)  # before a line is typed
    messages = [Message("system", system)] if system else []
    if loaded.tokenizer.chats:
        chat = Chat(loaded.model, loaded.tokenizer)
        shortest = [*messages, Message("user", "?")]
        chat.fit(shortest, sampling["max_new_tokens"])  # or no message would fit
        converse(partial(answer, loaded, chat, messages, sampling))
    elif messages:
        raise InputError("--system is for a model that has learned from conversations")
    else:
        note("the model has not learned from conversations: it continues what you type")
        converse(partial(continue_prompt, loaded, sampling))


def answer(
    loaded: LoadedModel,
    chat: Chat,
    messages: list[Message],
    sampling: Mapping[str, Any],
    line: str,
    n_replies: int,
) -> Generator[str]:
    """Yield the answer to a line of a conversation, and add both to its messages.

    n_replies: the number of answers before it, which changes the seed.
    """
    from sm_nanogpt.launcher.models.chat import Message
    from sm_nanogpt.launcher.models.sample import stream_samples

    if not line.strip():
        return
    question = Message("user", line)
    prompt = chat.fit([*messages, question], sampling["max_new_tokens"])
    if prompt.n_dropped:
        oldest = f"the oldest {prompt.n_dropped} messages"
        note(f"the context is full: the model no longer sees {oldest}")
    options = {
        **sampling,
        "seed": sampling["seed"] + n_replies,
        "max_new_tokens": prompt.max_new_tokens,
    }
    text = ""
    try:
        for (piece,) in stream_samples(loaded.model, loaded.tokenizer, prompt.ids, **options):
            text += piece
            yield piece
    finally:
        if text:
            messages.extend([question, Message("assistant", text)])


def continue_prompt(
    loaded: LoadedModel, sampling: Mapping[str, Any], line: str, n_replies: int
) -> Generator[str]:
    """Yield a line, and then the text with which the model continues it.

    n_replies: the number of texts before it, which changes the seed.
    """
    from sm_nanogpt.launcher.models.sample import stream_samples

    options = {**sampling, "seed": sampling["seed"] + n_replies}
    columns = stream_samples(loaded.model, loaded.tokenizer, line or None, **options)
    yield line
    for (piece,) in columns:
        yield piece


def converse(reply: Callable[[str, int], Generator[str]]) -> None:
    """Print the reply to each line of stdin. In a terminal, Ctrl-C ends a reply.

    reply takes the line, and the number of replies before it.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401  (gives `input` a history)

        note("Ctrl-C ends an answer, and Ctrl-D the conversation")
    if isinstance(sys.stdin, io.TextIOWrapper):  # a message that is not UTF-8 is refused alone
        sys.stdin.reconfigure(errors="surrogateescape")
    n_replies = 0
    while True:
        has_printed = False
        try:
            line = read_message(is_terminal)
            with closing(reply(line, n_replies)) as pieces:
                for piece in pieces:
                    if n_replies > 0 and not has_printed and not is_terminal:
                        click.echo("---")
                    print_text(piece, nl=False)
                    has_printed = True
        except EOFError:
            click.echo(nl=is_terminal)
            return
        except InputError as error:  # a long message, or characters that it does not know
            note(f"error: {sentence(error)}")
        except KeyboardInterrupt as error:
            if not is_terminal or isinstance(error, Terminated):
                raise
            click.echo(nl=not has_printed)  # drops the line that was typed
        if has_printed:
            click.echo()
            n_replies += 1


def read_message(is_terminal: bool) -> str:
    """Read a line of stdin, with the lines that continue it after a backslash. Raises EOFError."""
    message = input("> " if is_terminal else "").rstrip("\r")
    while message.endswith("\\"):
        next_line = input(". " if is_terminal else "").rstrip("\r")
        message = f"{message[:-1]}\n{next_line}"
    return message
