"""What the command line prints: cleaned, cut and formatted. Every command uses it."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

import click

# What a terminal obeys, or shows in another order: C0 and C1 but for tab and newline, and bidi.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
LONGEST = 1000  # characters that are told at once


def shown(text: str) -> str:
    """Text for a terminal, with control characters escaped, and the middle of a long one left out.

    What comes from outside may hold anything: the names in a file, a log, an answer of AWS.
    """
    text = CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
    if len(text) > LONGEST:  # what to do is at the end
        text = f"{text[: LONGEST - 300]} ... {text[-300:]}"
    return text


def note(text: str) -> None:
    """Something for the person at the terminal."""
    click.echo(shown(text), err=True)


class Screen(logging.Handler):
    """Prints what the library logs, as `note` does."""

    def emit(self, record: logging.LogRecord) -> None:
        warning = "warning: " if record.levelno >= logging.WARNING else ""
        note(f"{warning}{record.getMessage()}")


@contextmanager
def logs_shown() -> Iterator[None]:
    """Prints what the library logs, from INFO on."""
    logger, screen = logging.getLogger("launcher"), Screen()
    level = logger.level
    logger.addHandler(screen)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(screen)
        logger.setLevel(level)


@contextmanager
def byte_progress(label: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, counted in bytes."""
    from tqdm import tqdm

    # Only where somebody watches, and only when it takes long enough to watch.
    quiet = not sys.stderr.isatty()
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=quiet, delay=0.2) as bar:
        yield bar.update


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=asdict))


def print_fields(fields: Mapping[str, str | None]) -> None:
    """One line for each that is there, with the values below each other."""
    width = max(map(len, fields)) + 2
    for name, value in fields.items():
        if value is not None:
            click.echo(shown(f"{name + ':':<{width}}{value}"))


def moment(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def silence(stream: TextIO) -> None:
    """Lets nothing more fail that is said to a reader who has left, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
