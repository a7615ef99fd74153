"""A folder is code: data in any form, and text of the judge, are refused before anything runs."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.trying.code import MAX_PACKED_BYTES, check_code, check_copies, runs_in
from sm_nanogpt.launcher.trying.refusal import Refused

PACKAGED = Source.packaged()
# Three of its files, which are packed in a tenth of the time.
FIRST = Source(
    PACKAGED.directory,
    {name: PACKAGED.files[name] for name in ("config.py", "model.py", "train.py")},
)
WEIGHTS = random.Random(1).randbytes(MAX_PACKED_BYTES + 1000)
TEXT = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little money in my"
    " purse, I thought I would sail about a little and see the watery part of the world.\n"
)
DASHES = f"# {'-' * 80}\n"
TABLE = "+-------------------+----------+------------------------------+\n"
DNA = "".join(random.Random(2).choices("ACGT", k=200))


def with_files(**contents: str) -> Source:
    """The first folder with other files in it; `model_py` is model.py."""
    files = {name.replace("_py", ".py"): text.encode() for name, text in contents.items()}
    return Source(FIRST.directory, {**FIRST.files, **files})


def edited(name: str, old: str, new: str) -> Source:
    content = FIRST.files[name].decode()
    assert old in content
    return Source(FIRST.directory, {**FIRST.files, name: content.replace(old, new, 1).encode()})


def letters(content: bytes) -> str:
    return base64.b32encode(content).decode().strip("=").lower()


def in_many_files() -> Source:
    size = len(WEIGHTS) // 100
    parts = [WEIGHTS[start : start + size] for start in range(0, len(WEIGHTS), size)]
    return with_files(**{f"w{n}_py": f"W = '{letters(part)}'\n" for n, part in enumerate(parts)})


def in_names_of_files() -> Source:
    parts = [WEIGHTS[start : start + 100] for start in range(0, len(WEIGHTS), 100)]
    return with_files(**{f"w{letters(part)}_py": "" for part in parts})


DATA = {
    "base64": lambda: with_files(weights_py=f"W = '{base64.b64encode(WEIGHTS).decode()}'\n"),
    "a comment": lambda: with_files(weights_py=f"# {base64.b85encode(WEIGHTS).decode()}\n"),
    "a file that was there": lambda: edited(
        "model.py", "class MLP", f"W = '{letters(WEIGHTS)}'\n\n\nclass MLP"
    ),
    "many files": in_many_files,
    "names of files": in_names_of_files,
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("base64", "weights"),
        ("a comment", "weights"),
        ("a file that was there", "model"),
        ("many files", r"w\d+"),
        ("names of files", r"w\w+"),
    ],
)
def test_weights_in_a_folder_are_refused(form, name):
    message = rf"[89],\d+ bytes when it is packed, most of it {name}\.py; at most 8,192"
    with pytest.raises(Refused, match=message):
        check_code(DATA[form](), FIRST, b"")


def test_much_data_is_refused_before_it_is_packed():
    with pytest.raises(Refused, match=r"5,000,\d+ bytes, most of it spaces\.py"):
        check_code(with_files(spaces_py=" " * 5_000_000), FIRST, b"")


def test_a_file_that_python_does_not_import_is_no_part_of_it(tmp_path):
    """So a run never gets it."""
    FIRST.write(tmp_path)
    (tmp_path / "weights.json").write_bytes(WEIGHTS)
    (tmp_path / "notes.txt").write_bytes(WEIGHTS)
    assert Source.read(tmp_path).sha256 == FIRST.sha256


def test_hundreds_of_lines_of_new_code_are_code():
    """Here of this project's own: the judge's process, and this search."""
    launcher = FIRST.directory.parent / "launcher"
    new = (launcher / "judge/worker.py").read_text() + (launcher / "trying/rule.py").read_text()
    assert new.count("\n") > 300
    changed = Source(PACKAGED.directory, {**PACKAGED.files, "new.py": new.encode()})
    check_code(changed, PACKAGED, TEXT.encode())


def test_code_that_only_moves_is_no_new_code():
    files = {f"moved_{name}": content for name, content in FIRST.files.items()}
    check_code(Source(FIRST.directory, {**FIRST.files, **files}), FIRST, b"")


# -- text of the judge -----------------------------------------------------------------------------


def test_a_copy_may_begin_and_end_with_a_space():
    for start in range(4, 60):
        line = TEXT[start : start + 50].encode()
        with pytest.raises(Refused, match=r"hint\.py:1 has"):
            check_copies("hint.py", {1: line}, runs_in(TEXT.encode()))


@pytest.mark.parametrize("n", [50, 160])
def test_text_of_the_judge_is_refused_by_file_and_line(n):
    source = with_files(hint_py=f"a = 1\nb = 2\nTEXT = '{TEXT[:n]}'\n")
    message = rf"hint\.py:3 has {n} bytes that the judge's text has too: '{TEXT[:50]}'"
    with pytest.raises(Refused, match=message):
        check_code(source, FIRST, f"...{TEXT}".encode())


def test_text_that_was_laid_out_anew_is_refused():
    one_word_a_line = TEXT.replace(" ", "\n\t ")
    source = with_files(hint_py=f'TEXT = """\n{one_word_a_line}"""\n')
    with pytest.raises(Refused, match=r"hint\.py:2 has"):
        check_code(source, FIRST, TEXT.encode())


def test_text_of_four_letters_is_text_too():
    with pytest.raises(Refused, match=r"hint\.py:1 has"):
        check_code(with_files(hint_py=f"DNA = '{DNA[20:80]}'\n"), FIRST, DNA.encode())


@pytest.mark.parametrize("line", [DASHES, f"#{TABLE}"])
def test_a_line_that_repeats_itself_is_no_text(line):
    source = edited("model.py", "class MLP", f"{line}\n\nclass MLP")
    check_code(source, FIRST, f"{TEXT}{DASHES}{TABLE}{TEXT}".encode())


def test_lines_of_the_first_folder_are_no_copies():
    judged = FIRST.files["model.py"]
    check_code(edited("model.py", "class MLP", "# mine\nclass MLP"), FIRST, judged)


# -- names of files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my-model.py", f"extra.py\n{'0' * 64}  b.py"])
def test_a_file_whose_name_is_no_identifier_is_refused(name, tmp_path):
    """Else two folders could have one hash, as a line break in a name begins a line of sums."""
    FIRST.write(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(InputError, match="is no Python identifier"):
        Source.read(tmp_path)


def test_packages_and_tests_are_named_as_ever(tmp_path):
    FIRST.write(tmp_path)
    for name in ("__init__.py", "test_mine.py", "_private.py", "größe.py"):
        Path(tmp_path, name).write_text("")
    assert len(Source.read(tmp_path).files) == len(FIRST.files) + 4
