"""Which files of a folder are taken."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import launching
import pytest
from texts import LONG, stored

from sm_nanogpt import InputError, upload_data
from sm_nanogpt.launcher.text.files import find_files, warn_of_held_out
from sm_nanogpt.launcher.text.sources import TextSource

URL = "https://127.0.0.1:9/a"


@pytest.fixture
def notes(tmp_path):
    """A folder as people have it; each text is another."""
    folder = tmp_path / "notes"
    texts = "a.txt B.TXT c.Md deep/a.txt deep/a.md"
    others = "x.py code/y.py LICENSE scan.pdf chats.jsonl"
    skipped = ".git/config.txt deep/.e.txt env/pyvenv.cfg env/lib/license.txt"
    for name in f"{texts} {others} {skipped}".split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name + LONG)
    (folder / "link").symlink_to(folder / "deep", target_is_directory=True)
    return folder


def test_a_folder_gives_its_texts_and_says_what_it_leaves(cli, notes):
    ran = cli("upload-data", "notes").good
    names = {"a.txt", "B.txt", "c.txt", "deep", "deep/a.txt", "deep/a-2.txt"}
    assert launching.tree(stored(ran.out.strip())) == names
    for reason in (
        "3 files left out: 2 .py, 1 LICENSE; `--include '*.py'` takes such files",
        "1 file left out: 1 .pdf; `pdftotext FILE NEW-FILE.txt`",
        "1 file left out: 1 .jsonl; `sm-nanogpt upload-data notes --tokenizer bpe`",
    ):
        assert f"warning: notes: {reason}" in ran.err
    assert "2 hidden, 1 virtual environment, 1 link to a folder" in ran.err


def test_files_for_tests_are_warned_about(cli, tmp_path):
    names = ("train", "test-00000", "testimony", "validation/a", "dev_b")
    for name in names:
        (tmp_path / f"texts/{name}.txt").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"texts/{name}.txt").write_text(name + LONG)
    options = ["--exclude", "dev_*", "--exclude", "test-*", "--exclude", "validation"]
    ran = cli("upload-data", "texts").good
    assert "trained on too: dev_b.txt, test-00000.txt, validation/a.txt; " in ran.err
    assert f"`{shlex.join(options)}`" in ran.err
    ran = cli("upload-data", "texts", options).good
    assert "for tests" not in ran.err and "2 files" in ran.err
    assert "for tests" not in cli("upload-data", "texts/validation").good.err


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a-train.txt", "b.txt", "my_valid.txt", "latest.txt"), "my_valid.txt"),
        (("training/a.txt", "set-dev.txt"), ""),  # of which nothing says that it is a part
        (("driving-test.txt", "notes.txt", "train.txt"), "driving-test.txt"),
        (("driving-test.txt", "notes.txt"), ""),
    ],
)
def test_a_last_word_names_a_test_beside_training(tmp_path, names, expected, caplog):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    warn_of_held_out(find_files([TextSource(tmp_path)]))
    if expected:
        (record,) = caplog.records
        assert record.getMessage().endswith(f"trained on too: {expected}")
        assert vars(record)["globs"] == [expected]
    else:
        assert not caplog.records


def test_advice_is_for_files_that_were_looked_at(cli, notes):
    (notes / "weights.bin").touch()  # as a copy that was not fetched
    (notes / "packed.xyz").write_bytes(gzip.compress(LONG.encode()))
    ran = cli("upload-data", "notes").good
    assert "1 .bin" in ran.err and "--include '*.bin'" not in ran.err
    assert "1 .xyz" in ran.err and "--include '*.xyz'" not in ran.err


def test_patterns_add_and_leave_out(home, notes):
    def names(**options: Any) -> set[str]:
        return set(upload_data(notes, **options).files)

    plain = {"a.txt", "B.txt", "c.txt", "deep/a.txt", "deep/a-2.txt"}
    assert names(include=["*.py"]) == plain | {"x.txt", "code/y.txt"}
    assert names(include=["x*", "LICENSE"]) == plain | {"x.txt", "LICENSE.txt"}
    assert names(exclude=["deep", "b.txt"]) == {"a.txt", "c.txt"}
    assert names(exclude=["deep/*.md"]) == plain - {"deep/a-2.txt"}
    for option in ("include", "exclude"):
        with pytest.raises(InputError, match=rf"{option}=\*\.rst: fits no file"):
            names(**{option: ["*.rst"]})
    paths = [notes / "a.txt", notes / "x.py", notes / "c.Md"]
    assert upload_data(paths, include=["./x.py"], exclude=["./C.md"]).files == ("a.txt", "x.txt")


def test_what_a_folder_lacks_does_not_stop_others(cli, notes, tmp_path):
    (notes / "gone.txt").symlink_to("nowhere")
    (tmp_path / "attachments").mkdir()
    (tmp_path / "attachments/a.bin").write_bytes(b"\1\0")
    ran = cli("upload-data", "notes", "attachments").good
    assert "1 broken link" in ran.err
    (line,) = [line for line in ran.err.splitlines() if "attachments: no text is there" in line]
    assert "--include" not in line


def test_several_paths_make_one_upload(home, notes, source):
    other = source.parent / "deep/fox.md"
    other.parent.mkdir()
    other.write_text(LONG + "more")
    upload = upload_data([notes / "deep", source, str(other)])
    assert upload.files == ("deep/a.txt", "deep/a-2.txt", "fox.txt", "fox-2.txt")
    assert "/deep-" in upload.uri


def test_equal_and_empty_files_are_left_out_and_counted(cli, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, content in (("a.txt", LONG), ("b.md", LONG), ("c.txt", LONG + "c"), ("d.txt", "")):
        (tmp_path / "texts" / name).write_text(content)
    (tmp_path / "texts/a.txt.gz").write_bytes(gzip.compress(LONG.encode()))
    ran = cli("upload-data", "texts").good
    assert launching.tree(stored(ran.out.strip())) == {"a.txt", "c.txt"}
    assert "warning: 3 files left out: 2 equal to another, 1 empty" in ran.err


def test_the_first_text_that_is_taken_names_the_upload(home, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    excluded = tmp_path / "draft.txt"
    excluded.write_text(LONG)
    text = tmp_path / "poems.txt"
    text.write_text(LONG + "more")
    assert "/poems-" in upload_data([empty, excluded, text], exclude="draft.txt").uri
    tokens = upload_data([empty, text], tokenizer="bpe", vocab_size=257)
    assert "/poems-" in tokens.uri


def test_a_wrong_path_is_refused_by_name(refusal, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/open.txt").write_text(LONG)
    os.mkfifo(tmp_path / "texts/gone.txt")
    os.mkfifo(tmp_path / "pipe")
    assert "texts/gone.txt: not a regular file" in refusal("texts")
    assert "pipe: not a regular file; for a pipe, give -" in refusal("pipe")
    assert "missing.txt: no such file" in refusal("missing.txt").lower()
    assert re.fullmatch(r"https://127\.0\.0\.1:9/a: .*(`curl -L https|download it).*", refusal(URL))


@pytest.mark.skipif(sys.platform == "darwin", reason="which has no such names")
def test_a_name_that_is_not_utf8_is_refused(refusal, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / os.fsdecode(b"caf\xe9.txt")).write_text(LONG)
    assert r"texts/caf\xe9.txt: its name is not UTF-8" in refusal("texts")


def test_a_subdirectory_that_cannot_be_read_is_named(refusal, tmp_path, monkeypatch):
    (tmp_path / "texts/closed").mkdir(parents=True)
    (tmp_path / "texts/open.txt").write_text(LONG)
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    error = refusal("texts")
    assert "texts/closed: permission denied; `--exclude closed`" in error
    assert refusal("texts/closed").endswith("texts/closed: permission denied")
