"""Printing for every command: escape, shorten and format text; show logs and progress."""

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

# Control characters except tab and newline, and marks that reorder text on a terminal.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
LONGEST = 1000  # characters of one message


def shown(text: str) -> str:
    """Escape the control characters of a text and cut the middle of a long one.

    File names, logs and answers of AWS may contain anything.
    """
    text = CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
    if len(text) > LONGEST:  # the end says what to do
        text = f"{text[: LONGEST - 300]} ... {text[-300:]}"
    return text


def note(text: str) -> None:
    """Print a message to stderr."""
    click.echo(shown(text), err=True)


class Screen(logging.Handler):
    """Print log records of the library to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        warning = "warning: " if record.levelno >= logging.WARNING else ""
        note(f"{warning}{record.getMessage()}")


@contextmanager
def logs_shown() -> Iterator[None]:
    """Print log records of the library at level INFO and above."""
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
    """A progress bar on stderr, in bytes."""
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=quiet, delay=0.2) as bar:
        yield bar.update


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=asdict))


def print_fields(fields: Mapping[str, str | None]) -> None:
    """Print a line for each field that is not None, with the values aligned."""
    width = max(map(len, fields)) + 2
    for name, value in fields.items():
        if value is not None:
            click.echo(shown(f"{name + ':':<{width}}{value}"))


def moment(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def silence(stream: TextIO) -> None:
    """Discard further output to a stream whose reader has left, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
