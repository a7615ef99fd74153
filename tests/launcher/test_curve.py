"""The training curve: its rows, wherever the job runs, and how it is drawn."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import time
from typing import Any

import pytest
from jobs import file_rows
from sagemaker_jobs import TAGGED

from sm_nanogpt.launcher.cli.show import with_progress_bar
from sm_nanogpt.launcher.curve import (
    Curve,
    rows_of_file,
    rows_of_log,
    samples_of_log,
    seconds_left,
    sketch,
    without_repeated_steps,
)
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.sagemaker.logs import LOG_GROUP
from sm_nanogpt.launcher.tracking import TrackedJob


def test_metrics_are_the_rows_of_the_file(job, cli):
    ran = cli("metrics", job.job_id, "--json")
    assert json.loads(ran.out) == file_rows(job)
    assert ran.err.startswith("source: ")


def test_the_tail_of_a_local_log_is_printed(job, cli):
    lines = cli("logs", job.job_id).out.splitlines()
    assert cli("logs", job.job_id, "--tail", "2").out.splitlines() == lines[-2:]
    assert cli("logs", job.job_id, "--tail", "2", "--follow").code == 2


def test_csv_has_a_column_for_each_value(job, cli):
    table = list(csv.DictReader(io.StringIO(cli("metrics", job.job_id, "--csv").out)))
    assert [float(row["val_loss"]) for row in table] == [r["val_loss"] for r in file_rows(job)]


def test_the_table_is_aligned(job, cli):
    head, *rows = cli("metrics", job.job_id).out.splitlines()
    assert head.split()[:2] == ["step", "train_loss"]
    assert {len(row) for row in rows} == {len(head)}


def test_a_job_without_rows_is_one_line(job, cli):
    (job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl").unlink()
    ran = cli("metrics", job.job_id)
    assert ran.code == 1
    assert ran.error == f"job {job.job_id} has written no metrics"


def test_status_draws_the_curve(job, cli):
    lines = cli("status", job.job_id).out.splitlines()
    assert "val_loss:" in lines
    assert (
        f"{max(r['val_loss'] for r in file_rows(job)):.3f}" in lines[lines.index("val_loss:") + 1]
    )


def test_the_curve_of_a_log_is_that_of_the_file(job):
    lines = (job.directory / "logs/job.log").read_text().splitlines()
    rows = file_rows(job)
    for from_log, row in zip(rows_of_log(lines), rows, strict=True):
        del row["time"]
        assert from_log == pytest.approx(row, rel=1e-3, abs=1)


def test_rows_that_a_resumed_run_repeats_count_once():
    steps = ((1, 5), (1, 10), (2, 7), (2, 10), (3, 10))
    rows: Any = [{"step": step, "run": run} for run, step in steps]
    assert without_repeated_steps(rows) == [rows[0], rows[2], rows[4]]


def test_a_line_that_only_resembles_a_row_is_ignored():
    assert rows_of_log(["| step=5/10 and more", "step=5/10", "step=x/10 train_loss=1"]) == []


def test_a_hostile_line_of_a_log_takes_no_time():
    for line in ("step=1/9 " + "a=a" * 24 + "  ", "step=1/9 " * 40_000 + "!"):
        started = time.process_time()
        assert rows_of_log([line, f"step={'9' * 5000}/9 val_loss=1"]) == []
        assert time.process_time() - started < 1


def test_an_odd_row_of_a_curve_is_left_out():
    lines = [
        b'{"step": 7, "val_loss": 2.5}',
        b'{"step": 7.5}',
        b'{"val_loss": 2.0}',
        b'{"step": 8, "\\u001b[2J": 1}',
        b'{"step": 8, "%s": 1}' % (b"a" * 99),
        b'{"step": 9, "val_',
    ]
    assert rows_of_file(lines, "metrics.jsonl") == [{"step": 7, "val_loss": 2.5}]


def test_samples_are_the_marked_lines_of_the_log():
    lines = ["--- sample before training ---", "| a", "| | b", "step=1/2 x=1", "| c"]
    assert samples_of_log(lines) == {"before training": "a\n| b"}


def test_a_braille_character_has_eight_dots():
    assert sketch([(5, 7.0), (24, 0.0)], 10, 2) == [
        "    7.000 ⠉⠒⠢⢄⣀",
        "    0.000 ⠀⠀⠀⠀⠀⠉⠑⠢⠤⣀",
        "     step 5        24",
    ]


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)]])
def test_a_flat_curve_is_drawn(points):
    assert len(sketch(points)) == 9


def test_the_time_left_follows_from_the_speed():
    row = {"step": 10, "tokens_per_second": 100.0}
    assert seconds_left(row, {"max_steps": 30, "batch_size": 4, "block_size": 50}) == 40
    assert seconds_left({}, {}) is None


def test_a_followed_job_has_a_bar_and_then_its_curve(job, monkeypatch, capsys):
    lines = (job.directory / "logs/job.log").read_text().splitlines()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(with_progress_bar(iter(lines), TrackedJob(job.job_id))) == lines
    printed = capsys.readouterr().err
    assert "100% |" in printed
    assert "step 10/10, best loss " in printed
    assert "val_loss:\n" in printed


def test_without_a_terminal_nothing_is_added(job, capsys):
    assert list(with_progress_bar(iter(["step=1/2 x=1"]), TrackedJob(job.job_id))) == [
        "step=1/2 x=1"
    ]
    assert capsys.readouterr().err == ""


def test_status_takes_the_newest_values_from_the_log(cloud, cli, short_text_file, monkeypatch):
    monkeypatch.setattr("sagemaker_service.LOOKS", math.inf)  # it runs until the test is over
    lines = ["step=5/10 val_loss=2.5 bits_per_byte=3.5", "step=6/10 tokens_per_second=100"]
    log = [(-2, "algo-1", f"{TAGGED}{line}") for line in lines]
    cloud.sagemaker.next_script = {"log": log}
    arguments = (
        "--instance",
        "ml.g5.xlarge",
        "--set",
        "max_steps=10",
        "--data",
        str(short_text_file),
    )
    job_id = cli("launch", arguments).out.strip()
    status = " ".join(cli("status", job_id).out.split())
    for field in ("step: 6/10", "best loss: 2.5000", "bits/byte: 3.5", "tokens/s: 100"):
        assert field in status
    assert "time left: " in status
    assert json.loads(cli("status", job_id, "--json").out)["metrics"]["step"] == 6


def test_a_curve_on_sagemaker_is_read_from_log_then_file(cloud, s3, cli, short_text_file):
    line = f"{TAGGED}step=5/10 val_loss=2.5"
    cloud.sagemaker.next_script = {"log": [(-2, "algo-1", line)]}
    job_id = cli("launch", "--instance", "ml.g5.xlarge", "--data", short_text_file).out.strip()
    running = TrackedJob(job_id).curve()
    assert running == Curve(job_id, f"the log in {LOG_GROUP}", [{"step": 5, "val_loss": 2.5}])
    assert cli("wait", job_id).code == 0
    assert TrackedJob(job_id).curve() == running  # checkpoints expire
    for start in (1, 2):  # each has a file; another host may upload an older copy of the first
        uri = f"s3://{s3.bucket}/some/prefix/checkpoints/{job_id}/metrics-{start:08d}.jsonl"
        storage.write_bytes(uri, b'{"step": %d, "val_loss": 1.5}\n' % (5 * start))
    assert TrackedJob(job_id).curve() == Curve(job_id, uri, [{"step": 10, "val_loss": 1.5}])
