"""The pages of the manual: their blocks of code, and the commands that they show."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The contents of a page's code blocks in a language; "" has the transcripts."""
    return [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]


def commands(line: str) -> Iterator[list[str]]:
    """The arguments of each sm-nanogpt in a shell line: after `$(` and `&&`, and before `|`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for is_operator, words in itertools.groupby(lexer, lambda word: set(word) <= set("();<>|&")):
        found = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), words))
        if not is_operator and found[:1] == ["sm-nanogpt"]:
            yield found[1:]


def shown_commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", "").split("\n")]
    transcripts = "\n".join(blocks(page, ""))
    lines += re.findall(r"^\$ (.+)$", transcripts, re.MULTILINE)
    return [words for line in lines for words in commands(line)]


NANOGPT, ARCHITECTURE = ROOT / "docs/from-nanogpt.md", ROOT / "docs/architecture.md"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
