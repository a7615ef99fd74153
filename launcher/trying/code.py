"""Check that a training folder holds new code, and no data.

Weights, tables, and texts in a folder would be work that no budget counts. How much a file holds
shows when it is packed together with the first folder: 300 lines of new code take 3 to 4 kB, and
most edits under 100 bytes. Trained numbers do not shrink, in whatever form they are written.
"""

from __future__ import annotations

import bisect
import functools
import lzma
from collections.abc import Mapping

from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text.repeats import RUN_BYTES, with_one_space
from sm_nanogpt.launcher.trying.refusal import Refused

MAX_PACKED_BYTES = 8 << 10  # bytes of packed new code: some 700 lines
MAX_NEW_BYTES = 4 << 20  # bytes of new code that are packed, in two seconds
# The filters of `xz -9e`, with a dictionary that is just large enough for both folders.
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 23}]
PART_BYTES = 4  # a run of few different parts of this length repeats itself


def check_code(source: Source, first: Source, judge_text: bytes) -> None:
    """Raise Refused if a folder has more new code than a change takes, or text of the judge.

    first: the folder that the search began with.
    """
    new_files = {}
    for name, content in source.files.items():
        if first.files.get(name) != content:
            new_files[name] = content
    check_size(new_files, first)

    first_lines = set(b"".join(first.files.values()).splitlines())
    judge_runs = runs_in(with_one_space(judge_text))
    for name, content in new_files.items():
        new_lines = {}
        for number, line in enumerate(content.splitlines(), start=1):
            if line not in first_lines:
                new_lines[number] = line
        check_copies(name, new_lines, judge_runs)


# -- data ------------------------------------------------------------------------------------------


def check_size(new_files: Mapping[str, bytes], first: Source) -> None:
    """Raise Refused if new files have more packed bytes than code has. Their names count too."""
    new = names_and_contents(new_files)
    if len(new) > MAX_NEW_BYTES:
        raise refusal_of_size(new_files, f"{len(new):,} bytes", MAX_NEW_BYTES)
    first_code = names_and_contents(first.files)
    n_packed = packed_size(first_code + new) - packed_size(first_code)
    if n_packed > MAX_PACKED_BYTES:
        amount = f"{n_packed:,} bytes when it is packed"
        raise refusal_of_size(new_files, amount, MAX_PACKED_BYTES)


def names_and_contents(files: Mapping[str, bytes]) -> bytes:
    """The names and the contents of files, joined."""
    pieces = []
    for name in sorted(files):
        pieces += [name.encode(), b"\n", files[name]]
    return b"".join(pieces)


@functools.lru_cache(maxsize=2)  # keeps that of the first folder, which each try needs
def packed_size(content: bytes) -> int:
    """The number of bytes to which xz packs a content."""
    return len(lzma.compress(content, lzma.FORMAT_RAW, filters=XZ_FILTERS))


def refusal_of_size(new_files: Mapping[str, bytes], amount: str, max_bytes: int) -> Refused:
    """The refusal of new files that take too much space, with the name of the largest one.

    amount: the space that they take, such as `9,000 bytes`.
    """

    def size_of(name: str) -> int:
        return len(lzma.compress(new_files[name], preset=0))

    largest = max(new_files, key=size_of)
    problem = f"what the search's first folder does not have takes {amount}, most of it {largest}"
    return Refused(f"{problem}; at most {max_bytes:,}: a folder is code, not data")


# -- text of the judge -----------------------------------------------------------------------------


def check_copies(name: str, lines: Mapping[int, bytes], judge_runs: set[bytes]) -> None:
    """Raise Refused if lines of a file contain a run of RUN_BYTES of the judge's text.

    name: of the file. lines: of the file, by their numbers. Each run of white space counts as one
    space. A run that repeats itself, such as a line of dashes, is allowed.
    """
    text = b""
    numbers = []  # of the lines that are in `text`
    starts = []  # where these lines begin in `text`
    for number, line in lines.items():
        squeezed = b" ".join(line.split())
        if squeezed:
            numbers.append(number)
            starts.append(len(text))
            text += b" " + squeezed
    text += b" "

    for start in range(len(text) - RUN_BYTES + 1):
        run = text[start : start + RUN_BYTES]
        if run in judge_runs and not repeats_itself(run):
            n_bytes = end_of_copy(text, start, judge_runs) - start
            number = numbers[bisect.bisect_right(starts, start) - 1]
            excerpt = run.decode(errors="replace")
            problem = f"{name}:{number} has {n_bytes} bytes that the judge's text has too"
            raise Refused(f"{problem}: {excerpt!r}")


def runs_in(text: bytes) -> set[bytes]:
    """All runs of RUN_BYTES of a text."""
    return {text[start : start + RUN_BYTES] for start in range(len(text) - RUN_BYTES + 1)}


def end_of_copy(text: bytes, start: int, judge_runs: set[bytes]) -> int:
    """The position at which the copy of the judge's text ends that begins at `start`."""
    while text[start : start + RUN_BYTES] in judge_runs:
        start += 1
    return start - 1 + RUN_BYTES


def repeats_itself(run: bytes) -> bool:
    """True if a run of n bytes has fewer than n / 2 different parts of PART_BYTES."""
    parts = {run[start : start + PART_BYTES] for start in range(len(run) - PART_BYTES + 1)}
    return len(parts) < len(run) / 2
