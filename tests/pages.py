"""The pages of the manual: their blocks of code, and the commands that they show."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPERATORS = set("();<>|&")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The contents of a page's code blocks in a language; "" has the transcripts."""
    return [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]


def commands(line: str) -> Iterator[list[str]]:
    """The arguments of each sm-nanogpt in a shell line: after `$(` and `&&`, and before `|`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for is_operator, tokens in itertools.groupby(lexer, lambda token: set(token) <= OPERATORS):
        # Without the variables that are set for the command.
        command = list(itertools.dropwhile(lambda token: re.match(r"\w+=", token), tokens))
        if not is_operator and command[:1] == ["sm-nanogpt"]:
            yield command[1:]


def shown_commands(page: Path) -> list[list[str]]:
    """The arguments of each sm-nanogpt that a page shows, in scripts and transcripts."""
    lines = []
    for block in blocks(page, "sh"):
        lines += block.replace("\\\n", "").split("\n")
    for block in blocks(page, ""):
        lines += re.findall(r"^\$ (.+)$", block, re.MULTILINE)
    arguments: list[list[str]] = []
    for line in lines:
        arguments += commands(line)
    return arguments


NANOGPT = ROOT / "docs/from-nanogpt.md"
ARCHITECTURE = ROOT / "docs/architecture.md"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
