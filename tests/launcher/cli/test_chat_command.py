"""Conversations in the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import sys
import termios
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import warm

from sm_nanogpt import InputError, Job, load_model, stream_samples
from sm_nanogpt.entry_point.conversations import CHAT_TEMPLATE
from sm_nanogpt.launcher.cli.chat import answer, converse
from sm_nanogpt.launcher.cli.models import LoadedModel
from sm_nanogpt.launcher.models.chat import Chat, Message
from sm_nanogpt.launcher.models.load import published_model
from sm_nanogpt.launcher.models.sample import stream_answers


def test_a_sample_of_a_tuned_model_names_chat(cli, directory):
    sample = ("fetch-and-sample", str(directory), "--max-new-tokens", "1")
    assert f"`sm-nanogpt chat {directory}`" in cli(sample).good.err


def test_a_prompt_is_answered_as_in_a_chat(cli, tuned, directory, chat, monkeypatch):
    base, job, _ = tuned
    sample_of = ("--max-new-tokens", "6", "--temperature", "1", "--seed", "5")
    ran = cli("fetch-and-sample", directory, sample_of, "--prompt", "What is 3 + 3?").good
    assert ran.out == chat("What is 3 + 3?", heat="1").out
    monkeypatch.setenv("SM_NANOGPT_HOME", str(job.home))
    assert Job(job.job_id).sample("What is 3 + 3?", 6, temperature=1.0, seed=5) == ran.out[:-1]
    assert Job(base.job_id).sample("What", 6).startswith("What")


def test_a_conversation_is_kept(chat, directory):
    first, second = chat("Hi?", "What is 3 + 3?").out.removesuffix("\n").split("\n---\n")
    messages = [
        Message("user", "Hi?"),
        Message("assistant", first),
        Message("user", "What is 3 + 3?"),
    ]
    loaded = load_model(directory)
    pieces = stream_answers(*loaded, messages, 6, temperature=0)
    assert second == "".join(piece for (piece,) in pieces)


def test_a_message_that_is_not_utf8_is_refused_alone(directory, cli, chat, monkeypatch):
    typed = io.BytesIO(b"caf\xe9?\r\nH\\\r\ni\r\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, "utf-8", "strict"))
    ran = cli("chat", directory, "--max-new-tokens", "6", "--temperature", "0").good
    assert ran.err.count("not UTF-8") == 1
    assert ran.out == chat("H\\", "i").out


def test_a_line_that_asks_nothing_has_no_answer(chat):
    assert chat("", " ", "Hi?", "").out == chat("Hi?").out


def test_each_answer_has_its_seed_and_is_kept_if_interrupted(directory):
    model, tokenizer = load_model(directory)
    chat, messages, tokenizer.ends = Chat(model, tokenizer), list[Message](), set()
    prompt = chat.fit([Message("user", "Hi?")], 20)
    limit = prompt.max_new_tokens
    columns = stream_samples(model, tokenizer, prompt.ids, limit, 1, 1.0, seed=5 + 2)
    whole = [piece for (piece,) in columns]
    sampling = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    pieces = answer(LoadedModel(directory, model, tokenizer), chat, messages, sampling, "Hi?", 2)
    assert [next(pieces) for _ in range(9)] == whole[:9]
    pieces.close()
    assert messages[1:] == [Message("assistant", "".join(whole[:9]))]


def test_old_turns_are_dropped_and_that_is_said(chat, directory):
    model, _ = load_model(directory)
    ran = chat(*["What is 1 + 1, and what is 2 + 2?"] * 6)
    assert ran.code == 0
    assert ran.out.count("---") == 5
    assert "oldest 6 messages" in ran.err
    ran = chat("a " * model.config.block_size)
    assert str(model.config.block_size) in ran.error


def test_an_instruction_that_leaves_no_room_is_refused(directory, cli):
    ran = cli("chat", directory, "--system", "a " * 100)
    assert ran.failed(2, "instruction", "128 tokens")


def test_a_closed_stdin_ends_the_chat(cli, directory, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert cli("chat", directory).good.out == ""


def test_a_base_model_continues_what_is_typed(tuned, chat, cli):
    base, _, _ = tuned
    model = str(base.directory / "hosts/algo-1/model")
    ran = chat("The ", "A\\", "class", model=model, heat="1")
    words_of_one = ("fetch-and-sample", model, "--max-new-tokens", "6", "--temperature", "1")
    prompts = (("5", "The "), ("6", "A\nclass"))  # each has the next seed
    texts = [cli(words_of_one, "--seed", seed, "--prompt", text).out for seed, text in prompts]
    assert ran.out == "---\n".join(texts)
    for wrong in (("--system", "x"), ("--top-p", "2")):
        assert cli("chat", model, wrong).code == 2
    with pytest.raises(InputError, match="not learned from conversations"):
        Chat(*load_model(Path(model)))


def test_an_unknown_character_does_not_end_the_session(job, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\x07\n\n"))
    ran = cli("chat", job.job_id, "--max-new-tokens", "5")
    assert ran.code == 0
    assert len(ran.out) == 6
    assert r": '\x07'; replace them or leave them out" in ran.error


def in_front_of(monkeypatch: pytest.MonkeyPatch, *typed: Any) -> None:
    """Let a person in a terminal type this."""
    monkeypatch.setattr("builtins.input", Mock(side_effect=[*typed, EOFError]))
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True, raising=False)


def test_ctrl_c_ends_an_answer_and_not_the_chat(capsys, monkeypatch):
    def talk(line: str, n: int) -> Generator[str]:
        yield f"{line}1"
        if n == 0:
            signal.raise_signal(signal.SIGINT)
        yield "2"

    in_front_of(monkeypatch, "a", "b")
    converse(talk)
    assert capsys.readouterr().out == "a1\nb12\n\n"


def test_ctrl_c_while_typing_drops_the_line(capsys, monkeypatch):
    in_front_of(monkeypatch, KeyboardInterrupt, "b")
    converse(lambda line, n: (piece for piece in [line]))
    assert capsys.readouterr().out == "\nb\n\n"


class Person:
    """Somebody who uses a command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.terminal, commands_end = pty.openpty()
        code = f"import fcntl; fcntl.ioctl(0, {termios.TIOCSCTTY}, 0); {launching.PROGRAM[-1]}"
        self.process = warm.replacing(warm.Process).Popen(
            [sys.executable, "-P", "-c", code, *arguments],
            env={**os.environ, "TERM": "dumb"},
            stdin=commands_end,
            stdout=commands_end,
            stderr=commands_end,
            start_new_session=True,
            preexec_fn=launching.hear_hangup,
        )
        os.close(commands_end)
        self.printed = ""

    def read(self) -> None:
        assert select.select([self.terminal], [], [], 60)[0], self.printed
        self.printed += os.read(self.terminal, 1 << 16).decode(errors="replace")

    def read_until(self, text: str) -> None:
        while text not in self.printed:
            self.read()
        self.printed = self.printed.partition(text)[2]

    def press(self, keys: bytes) -> None:
        """Again, if nothing comes: Python misses a Ctrl-C just before it waits for a key."""
        os.write(self.terminal, keys)
        while not select.select([self.terminal], [], [], 1)[0]:
            os.write(self.terminal, keys)


@contextmanager
def in_a_terminal(*arguments: str) -> Iterator[Person]:
    person = Person(*arguments)
    try:
        yield person
    finally:
        person.process.kill()
        person.process.wait()
        os.close(person.terminal)


def test_a_signal_ends_the_chat_at_its_prompt(job):
    with in_a_terminal("chat", str(job.directory / "hosts/algo-1/model")) as person:
        person.read_until("> ")
        deadline = time.monotonic() + 20
        while person.process.poll() is None:
            assert time.monotonic() < deadline
            person.process.send_signal(signal.SIGHUP)  # again, for the same reason
            time.sleep(0.2)


def test_a_pseudo_terminal_streams_stops_and_ends(job):
    """The model continues without an end, until Ctrl-C; Ctrl-D then ends the command."""
    model = str(job.directory / "hosts/algo-1/model")
    with in_a_terminal("chat", model, "--max-new-tokens", "100000000") as person:
        person.read_until("> ")
        person.press(b"half a line\x03")
        person.read_until("> ")
        person.press(b"The \n")
        person.read_until("The \r\nThe ")  # what is typed, and its continuation
        while len(person.printed) < 200:
            person.read()
        person.press(b"\x03")
        person.read_until("\r\n> ")
        person.press(b"\x04")
        assert person.process.wait(60) == 0


def test_a_published_model_directory_chats(chat, directory, tmp_path):
    transformers = pytest.importorskip("transformers")
    published = tmp_path / "published"
    transformers.AutoModelForCausalLM.from_pretrained(directory).save_pretrained(published)
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(published)
    ran = chat("What is 3 + 3?", model=str(published))
    assert ran.code == 0
    assert ran.out == chat("What is 3 + 3?").out
    assert "chat template" not in ran.err
    (published / "chat_template.jinja").write_text(THINKING)
    assert "not the model's own" in chat("Hi?", model=str(published)).err
    for ends in ([7, 8], 7):
        (published / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert 7 in published_model(published)[1].ends
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    ran = chat("Hi", model=str(published))
    assert ran.code == 2
    assert "llama" in ran.error


THINKING = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message.content if loop.last else message.content.split('</think>')[-1].lstrip())",
)
