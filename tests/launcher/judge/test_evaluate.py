"""`eval` as a whole: what it prints, keeps and refuses."""

from __future__ import annotations

import csv
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import launching
import pytest

from sm_nanogpt import Job
from sm_nanogpt.entry_point.causality import Leak
from sm_nanogpt.launcher.judge import causality, evaluation
from sm_nanogpt.launcher.judge.evaluation import Evaluation


def test_eval_prints_at_most_25_lines(held, cli):
    ran = cli("eval", held.job_id, "held.txt", "--find", "secrets.txt").good
    lines = ran.out.splitlines()
    assert len(lines) <= 25
    assert [line.split()[0] for line in lines].count("exposure") == 2
    assert "6,0" in ran.err
    assert "6,0" not in ran.out
    for name in ("bits per byte", "xz", "5-gram", "overlap", "longest run", "causal", "worst"):
        assert any(line.startswith(name) for line in lines)


def test_eval_prints_all_numbers_as_json(held, cli):
    directory = held.directory / "hosts/algo-1/model"
    arguments = ("--beside", str(directory), "--find", "secrets.txt", "--questions", "asked.jsonl")
    ran = cli("eval", held.job_id, "held.txt", "--json", arguments).good
    ours, other = json.loads(ran.out)
    assert [ours["model"], other["model"]] == [held.job_id, str(directory)]
    assert ours["bits_per_byte"] == pytest.approx(other["bits_per_byte"])
    assert ours["bits_per_byte"] * ours["size"] == pytest.approx(
        sum(each["nats"] for each in ours["documents"]) / math.log(2)
    )
    assert ours["size"] == Path("held.txt").stat().st_size
    assert ours["answers"] == {"sum": [0, 1]}
    assert [canary["line"] for canary in ours["canaries"]][1] == "another {abc}"
    assert 0 <= ours["overlap"] < 0.01
    assert min(ours["ngram"], ours["validation"], ours["xz"], ours["copied"]) > 0
    assert [other[name] for name in ("ngram", "validation", "overlap", "copied")] == [None] * 4
    assert "its training text is not here" in ran.err


def test_eval_prints_a_line_of_csv_for_each_document(held, cli):
    texts = ["The first.", "A second, longer one."]
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    ran = cli("eval", held.job_id, "a.jsonl", "--documents").good
    rows = list(csv.DictReader(ran.out.splitlines()))
    assert {row["place"]: int(row["bytes"]) for row in rows} == {"a.jsonl:1": 10, "a.jsonl:2": 21}
    for row in rows:
        bits = float(row["nats"]) / math.log(2) / int(row["bytes"])
        assert float(row["bits_per_byte"]) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("held.txt", "--find", "held.txt"), "braces"),
        (("held.txt", "--questions", "asked.txt"), "asked.txt"),
        (("empty.txt",), "empty.txt"),
    ],
)
def test_eval_refuses_what_it_cannot_measure(arguments, fact, held, cli):
    Path("empty.txt").write_text("")
    Path("asked.txt").write_text("no JSON")
    assert cli("eval", held.job_id, arguments).failed(2, fact)


def test_eval_counts_characters_that_a_model_never_saw(held, cli):
    straight = "".join(filter(str.isascii, Path("held.txt").read_text()))
    Path("curly.txt").write_text(straight.replace("e", "ϡ", 40))
    ran = cli("eval", held.job_id, "curly.txt", "--json").good
    assert f"never seen 40 of {len(straight):,} characters" in ran.err
    assert "'ϡ'" in ran.err
    [evaluated] = json.loads(ran.out)
    assert evaluated["size"] == len(straight) + 40
    assert 40 * 16 / 6040 < evaluated["unknown_bits"] < 40 * 28 / 6040


def test_a_text_that_is_not_there_gets_no_advice_of_uploads(held, cli):
    ran = cli("eval", held.job_id, "no-such.txt")
    assert ran.failed(2, "no-such.txt: no such file")
    assert "upload-data" not in ran.err


def test_a_model_that_looks_ahead_fails_as_a_command(held, cli, monkeypatch):
    leak = Leak(position=17, token=18, nats=3.2)
    monkeypatch.setattr(causality, "MAX_ROUNDING_NATS", -1)
    monkeypatch.setattr(causality, "find_leak", lambda *_, **options: leak)
    ran = cli("eval", held.job_id, "held.txt")
    assert ran.failed(1, "not causal: logits at 17 depend on token 18 (by 3.2); ")
    assert ran.out == ""


def test_an_evaluation_is_kept_shown_in_reports_and_deleted(held, cli):
    evaluated = Job(held.job_id).eval("held.txt")
    (saved,) = evaluation.saved_evaluations(held.job_id, launching.settings_of(held.home))
    assert saved.bits_per_byte == evaluated.bits_per_byte
    assert saved.documents == []
    page = Job(held.job_id).report().read_text("utf-8")
    facts = {fact.removesuffix(f" in {evaluated.samples}") for fact in evaluated.facts().values()}
    assert all(fact in page for fact in {*facts, evaluated.samples})
    assert cli("delete", held.job_id, "--yes").good
    assert not list(held.home.rglob("eval-*"))


def test_a_long_evaluation_says_how_long_it_goes_on(held, cli, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.files.progress.LINE_SECONDS", 0.1)
    assert f"evaluating {held.job_id}: 0:00:0" in cli("eval", held.job_id, "held.txt").good.err


@pytest.fixture
def saved(held):
    """The file of an evaluation, and what changes it."""
    settings = launching.settings_of(held.home)
    evaluated = Evaluation(
        model=held.job_id, text="held.txt", size=1000, tokens=900, bits_per_byte=2.5, xz=3.5
    )
    evaluation.save_evaluation(evaluated, "text", settings)
    file = settings.models_dir / held.job_id / "eval-text.json"

    def change(drop: Sequence[str], **fields: Any) -> Path:
        record = {**json.loads(file.read_text()), **fields}
        file.write_text(json.dumps({key: record[key] for key in record if key not in drop}))
        return file

    return change


def test_a_report_shows_an_evaluation_of_an_older_version(held, saved, caplog):
    saved(["cuts", "perplexity", "samples", "copied", "xz", "worst"], anchor=2.5)
    caplog.clear()
    page = Job(held.job_id).report().read_text("utf-8")
    (evaluation_,) = evaluation.saved_evaluations(held.job_id, launching.settings_of(held.home))
    assert evaluation_.facts()["bits per byte"] in page
    assert evaluation_.facts()["causal"] == "-"
    assert caplog.messages == []


def test_an_evaluation_without_its_result_breaks_no_report(held, saved, caplog):
    file = saved(["bits_per_byte"])
    caplog.clear()
    assert "On other texts" not in Job(held.job_id).report().read_text("utf-8")
    (message,) = caplog.messages
    assert file.name in message and "bits_per_byte" in message


def test_eval_as_a_process_imports_nothing_of_its_folder(finished, text, tmp_path):
    """With no other way to start a process than the product's."""
    for name in ("random", "json", "types", "token", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    (tmp_path / "known.txt").write_text(text[:6000])
    arguments = ("eval", finished.job_id, "known.txt", "--documents")
    with patch.object(launching.warm, "replacing", lambda start: subprocess):
        ran = launching.command(arguments, home=finished.home, cwd=tmp_path).good
    assert len(ran.out.splitlines()) == 2
    assert "this tests memory" in ran.err
