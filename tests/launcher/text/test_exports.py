"""JSON that is no list of records: what is said about it leads to documents."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text.documents import documents_in
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.skipped import Skipped

TEXTS = [f"This is text {number}." for number in range(9)]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
TELEGRAM = [{"from": "Ann", "text": [text, {"type": "bold", "text": "!"}]} for text in TEXTS]

FORMS: dict[str, Any] = {
    "messages of people": {"name": "Reading circle", "messages": TELEGRAM},
    "arrays in an array": {"chats": [{"notes": RECORDS[:5]}, {"notes": RECORDS[5:]}]},
    "an object of objects": {f"k{number}": record for number, record in enumerate(RECORDS)},
    "columns of pandas": {"text": {str(n): text for n, text in enumerate(TEXTS)}, "id": {"0": 1}},
    "strings": TEXTS,
    "an array of strings": {"sentences": TEXTS},
    "an odd name": {"my records": RECORDS},
}


def read(path: Path) -> list[str]:
    """The documents of a file; as many as the commands in the errors make of it."""
    for _ in range(3):
        try:
            file = detect_file(path)
            return ["".join(document.pieces) for document in documents_in(file, Skipped())]
        except InputError as error:
            command = re.search(r"`(jq .*) FILE > NEW-FILE.jsonl`", str(error))
            if not command:
                raise
        converted = subprocess.run(
            f"{command[1]} {shlex.quote(str(path))}",
            shell=True,
            check=True,
            capture_output=True,
            text=True,
        )
        path = path.with_name(f"records-{path.stem}.jsonl")
        path.write_text(converted.stdout)
    raise AssertionError("the commands lead nowhere")


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
@pytest.mark.parametrize("form", FORMS)
def test_the_command_of_an_error_makes_documents(form, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(FORMS[form], indent=1))
    documents = read(tmp_path / "a.json")
    if form == "messages of people":  # of parts
        assert documents == [f"{text}!" for text in TEXTS]
    else:
        assert documents == TEXTS


def test_a_file_of_one_record_is_one_document(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[0], indent=1))
    assert read(tmp_path / "a.json") == [TEXTS[0]]


def test_an_array_over_many_lines_is_read_by_any_name(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORDS, indent=1))
    assert read(tmp_path / "a.jsonl") == TEXTS


def test_a_notebook_by_another_name_is_known(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"cells": [{}], "nbformat": 4}))
    with pytest.raises(InputError, match="a notebook; `jupyter nbconvert"):
        read(tmp_path / "a.json")


def test_the_array_in_a_packed_object_is_named_and_unpacked(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"items": RECORDS}, indent=1).encode()))
    array = r"one JSON object: .* in `items` \(9\): `jq -c '.items\[\]' .*`"
    with pytest.raises(InputError, match=rf"{array}; unpack it first: `gunzip -k \S*a.json.gz`"):
        list(documents_in(detect_file(path), Skipped()))
