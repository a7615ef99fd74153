"""An upload: what it takes, what it sends, and what a failure leaves."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
from texts import LONG, stored, write_notes

from sm_nanogpt import InputError, upload_data
from sm_nanogpt.launcher import locations
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.locations import similar_files
from sm_nanogpt.launcher.text import corpus, writing
from sm_nanogpt.launcher.text.store import find_upload


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("missing.txt", "`sm-nanogpt upload-data` takes tiny Shakespeare"),
        ("a.txt --tokenizer no/where", "no/where: no such file or directory"),
        ("short.txt --tokenizer bpe", "11 characters are too few"),
        ("a.txt --column Review", "--column Review: is for records, and a.txt is plain text"),
    ],
)
def test_upload_data_refuses_what_it_cannot_take(arguments, reason, cli, tmp_path):
    (tmp_path / "a.txt").write_text(LONG)
    (tmp_path / "short.txt").write_text("some words\n")
    assert cli("upload-data", arguments.split()).failed(2, reason)


@pytest.mark.parametrize(
    "arguments",
    [
        "upload-data inptu.txt",
        "upload-data ./inptu.txt --tokenizer bpe",
        "launch --instance local --data inptu.txt",
        "eval latest input.txt --find inptu.txt",
    ],
)
def test_a_mistyped_file_is_answered_by_what_is_like_it(arguments, cli, tmp_path):
    (tmp_path / "input.txt").write_text(LONG)
    ran = cli(arguments.split())
    assert ran.failed(2, "did you mean ")
    assert ran.error.strip().endswith("input.txt?")


def test_a_suggested_file_is_a_path_to_paste(cli, tmp_path):
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "input.txt").write_text(LONG)
    assert cli("upload-data", "many/inptu.txt").failed(2, "did you mean many/input.txt?")


def test_a_suffix_alone_makes_no_files_alike(tmp_path):
    for name in ("input.txt", "big.txt", "inputs", "a.parquet"):
        (tmp_path / name).touch()
    assert similar_files(tmp_path / "inptu.txt", "inptu.txt") == "did you mean input.txt?"
    assert similar_files(tmp_path / "cat.txt", "cat.txt") == ""
    assert similar_files(tmp_path / "b.parquet", "b.parquet") == ""
    assert similar_files(tmp_path / "input", "input") == "did you mean inputs or input.txt?"


def test_few_names_of_a_large_directory_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(locations, "MAX_NAMES_COMPARED", 1)
    for name in ("inputa.txt", "inputb.txt"):
        (tmp_path / name).touch()
    assert " or " not in similar_files(tmp_path / "input.txt", "input.txt")


@pytest.mark.parametrize(
    ("paths", "options", "reason"),
    [([], {}, "no path"), (["a.txt"], {"vocab_size": 300}, "needs the tokenizer bpe")],
)
def test_upload_data_in_python_refuses_as_the_command(paths, options, reason):
    with pytest.raises(InputError, match=reason):
        upload_data(paths, **options)


@pytest.mark.parametrize(("times", "preset"), [(1, " --preset auto"), (60, "")])
def test_the_suggested_launch_fits_a_short_text(cli, source, times, preset):
    source.write_text(LONG * times)
    ran = cli("upload-data", source).good
    assert ran.err.endswith(f"\nnext: sm-nanogpt launch --instance local{preset}\n")


def test_a_text_that_changes_meanwhile_is_refused(home, cli, source, monkeypatch):
    write = storage.write_file

    def write_late(path: Path, *args: Any) -> None:
        path.write_bytes(path.read_bytes() + b"more")
        write(path, *args)

    monkeypatch.setattr(storage, "write_file", write_late)
    assert cli("upload-data", source).failed(2, "the text changed")
    assert list((home / "store/data").glob("*.json")) == []


def test_a_character_may_lie_across_two_chunks(home, tmp_path, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.text.encodings.CHUNK_BYTES", 5)
    (tmp_path / "wide.txt").write_text("🙂漢é" * 300)
    upload = upload_data(tmp_path / "wide.txt")
    assert upload.characters == 900
    assert upload.vocabulary_size == 3


def test_an_upload_prints_only_its_uri(cli, source):
    ran = cli("upload-data", source).good
    assert re.fullmatch(r"file:///\S+/store/data/fox-[0-9a-f]{12}\n", ran.out)
    assert (stored(ran.out.strip()) / "fox.txt").read_text() == LONG
    assert "1 file, 4,500 bytes, 4,500 characters, 30 distinct" in ran.err
    printed = json.loads(cli("upload-data", source, "--json").out)
    assert printed["uri"] == ran.out.strip()
    assert not printed["uploaded"]
    assert printed["size"] == printed["characters"] == 4500


def test_only_a_changed_or_damaged_text_is_sent_again(home, source):
    sizes: list[int] = []
    first, second = upload_data(source), upload_data(source, progress=sizes.append)
    assert second.uri == first.uri
    assert not second.uploaded
    assert sizes == []
    storage.write_bytes(f"{first.uri}/fox.txt", b"cut")
    assert upload_data(source).uploaded
    assert (stored(first.uri) / "fox.txt").read_text() == LONG
    source.write_text(LONG + "more")
    other = upload_data(source)
    assert other.uri != first.uri
    assert other.uploaded
    assert (stored(first.uri) / "fox.txt").read_text() == LONG


def test_a_leftover_file_is_in_no_other_upload(home, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MAX_WRITERS", 1)
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"texts/{name}.txt").write_text(LONG + name)

    def interrupt(_: int) -> None:
        if list(home.glob("store/data/*/a.txt")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload_data(tmp_path / "texts", progress=interrupt)
    (tmp_path / "texts/a.txt").rename(tmp_path / "texts/a1.txt")
    uri = upload_data(tmp_path / "texts").uri
    assert launching.tree(stored(uri)) == {"a1.txt", "b.txt"}
    assert find_upload(uri, launching.settings_of(home)) is not None


def test_an_upload_without_its_manifest_is_none(home, tmp_path):
    folder = write_notes(tmp_path / "notes", 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "digest_of", Mock(side_effect=KeyboardInterrupt))  # the last step
        with pytest.raises(KeyboardInterrupt):
            upload_data(folder)
    assert len(list(home.glob("store/data/*/*.txt"))) == 40
    assert list((home / "store/data").glob("*.json")) == []
    upload = upload_data(folder)
    assert upload.uploaded
    assert find_upload(upload.uri, launching.settings_of(home)) is not None


def test_two_simultaneous_uploads_both_work(home, source):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(upload_data, [source, source])
    assert first.uri == second.uri
    assert find_upload(first.uri, launching.settings_of(home)) is not None
    assert launching.tree(stored(first.uri)) == {"fox.txt"}
