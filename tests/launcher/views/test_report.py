"""The report: one page that holds all of some runs, and asks for nothing."""

from __future__ import annotations

import fcntl
import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import file_rows, sibling
from reports import reported_run, with_rows

from sm_nanogpt.launcher.cli.jobs import launch_again
from sm_nanogpt.launcher.curve import Row
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.judge.evaluation import Evaluation
from sm_nanogpt.launcher.views.page import report_html as page
from sm_nanogpt.launcher.views.report import Report, ReportedRun, compare


@pytest.fixture
def text_of(cli):
    """The page about some jobs."""

    def write(*arguments: str) -> str:
        ran = cli("report", arguments)
        assert ran.code == 0, ran.err
        return Path(ran.out.strip()).read_text("utf-8")

    return write


def json_fields_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', text)
    assert match
    return dict(json.loads(match[1]))


def test_a_report_replaces_the_one_before_and_opens(job, cli, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    Path("a.html").write_text("<!doctype html>\nold")
    assert cli("report", job.job_id, "-o", "a.html").code == 0
    assert opened == []
    assert cli("report", job.job_id, "-o", "a.html", "--open").code == 0
    assert opened == [Path("a.html").absolute().as_uri()]
    assert job.job_id in Path("a.html").read_text()


def test_a_job_that_is_named_twice_is_reported_once(job, cli):
    ran = cli("report", job.job_id, "latest").good
    assert ran.out == f"report-{job.job_id}.html\n"


def test_the_points_are_those_of_the_metrics(job, text_of):
    points = json_fields_of(text_of("latest"))["points"]
    for series, name in (("training", "train_loss"), ("validation", "val_loss")):
        drawn = [(p["step"], p["loss"]) for p in points if p["series"] == series]
        assert drawn == [(row["step"], row[name]) for row in file_rows(job)]
    assert points[0]["tokens"] == points[0]["step"] * 4 * 32  # of a batch of the tiny job
    assert {point["color"] for point in points} == {"training", "validation"}


def test_the_page_requests_nothing():
    text = html.unescape(page(compare([reported_run("a")])))
    assert not re.search(r"<[^<>]*\b(src|href)\s*=", re.sub(r"(?s)<script>.*?</script>", "", text))
    assert "content=\"default-src 'none'; script-src 'unsafe-inline';" in text
    assert "unsafe-eval" not in text
    assert len(text) < 5_000_000


def test_a_hostile_sample_is_inert():
    run = reported_run("a")
    run = with_rows(run, run.curve.rows, after="</script><img src=x onerror=alert(1)>")
    text = page(compare([run]))
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in text
    assert "<img" not in re.sub(r"(?s)<script>.*?</script>", "", text)


def test_a_hostile_name_is_inert_in_the_data():
    run = replace(reported_run("a"), label="</script><b>")
    text = page(Report([run], [], False))
    assert r"\u003c/script\u003e\u003cb\u003e" in text


def test_differences_come_first_and_the_best_on_top(job, text_of):
    best = sibling(job, 1, loss=0.5, learning_rate=0.25)
    text = text_of(job.job_id, best)
    table = text[text.index("<tbody>") : text.index("</tbody>")]
    assert re.findall(r"</svg>([0-9a-f]{6}[-0-9]*)</th>", table) == [best[-8:], job.job_id[-6:]]
    assert ">0.25</td>" in table
    assert text.index("</tbody>") < text.index('id="loss"')
    assert Path("report-2-runs.html").exists()


@pytest.mark.parametrize(("n_rows", "dots"), [(1, True), (2, False)])
def test_a_training_line_of_one_point_is_a_dot(n_rows, dots):
    run = reported_run("a")
    rows: list[Row] = [{"step": n, "train_loss": 1.0} for n in range(n_rows)]
    speed = json_fields_of(page(compare([with_rows(run, rows)])))["plots"]["speed"]
    assert bool(speed["layer"][0]["mark"]["point"]) == dots


def test_samples_have_the_color_of_their_run():
    best = reported_run("j1", 1, 1)
    run = reported_run("j2", 2, 2)
    run = with_rows(run, run.curve.rows, after="text")
    samples = page(compare([best, run])).partition('id="samples"')[2]
    assert "--run-1" in samples.partition("</h3>")[0]


def test_three_runs_are_plotted_by_what_varies():
    runs = []
    for n in (1, 2, 3):
        config: dict[str, Any] = {"x:Q": n, "seed": n}  # a hyperparameter may have any name
        runs.append(reported_run(f"j{n}", n, n, **config))
    assert compare(runs).varied == ["x:Q"]
    assert '<div id="by-x:Q"' in page(compare(runs))
    assert compare(runs[:2]).varied == []


def of_size(size: float, **explicit: Any) -> ReportedRun:
    run = reported_run(f"s{size:g}", size, size, n_embd=64 * size, **explicit)
    summary = f"size {size:g}"
    for name, value in explicit.items():
        summary += f" {name}={value}"
    return replace(run, job=TrainingJob(data="/data", size=size, summary=summary))


def test_runs_of_several_sizes_differ_in_their_size():
    report = compare([of_size(1), of_size(2), of_size(3)])
    assert report.differing == ["size"]
    assert report.varied == ["size"]
    assert "n_embd" not in report.shared
    assert [run.label for run in report.runs] == ["s1, size 1", "s2, size 2", "s3, size 3"]


def test_runs_of_one_name_have_different_labels():
    runs = []
    for job_id in ("sm-nanogpt-20261130-055203-b8e312", "sm-nanogpt-20261130-055209-8f40ca"):
        runs.append(replace(reported_run(job_id), job=TrainingJob(data="/data", name="first")))
    assert [run.label for run in compare(runs).runs] == ["first b8e312", "first 8f40ca"]


def test_what_is_set_besides_a_size_is_a_difference():
    assert compare([of_size(1, max_steps=7), of_size(2)]).differing == ["max_steps", "size"]


def test_runs_of_a_size_are_ranked_over_their_seeds():
    runs = [
        of_size(1, seed=1),
        of_size(1, seed=2),
        of_size(2, seed=1),
        of_size(2, seed=2),
    ]
    ranks = compare(runs).over_seeds
    assert [rank.values["size"] for rank in ranks] == [1, 2]
    assert [len(rank.losses) for rank in ranks] == [2, 2]


def test_several_seeds_have_a_mean_and_a_spread():
    runs = [
        reported_run("a", 2.0, dropout=0.1, seed=1),
        reported_run("b", 3.0, dropout=0.1, seed=2),
        reported_run("c", 2.25, dropout=0.2, seed=1),
        reported_run("d", 2.5, dropout=0.2, seed=2),
    ]
    text = page(compare(runs))
    table = text[text.index("Over the seeds") :].partition("</table>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", table)
    assert cells[:5] == ["0.2", "2.3750", "2.2500", "2.5000", "2"]
    assert cells[5:] == ["0.1", "2.5000", "2.0000", "3.0000", "2"]
    assert "Over the seeds" not in page(compare([reported_run("a")]))


def test_a_report_says_that_generations_begin_anew():
    twice = reported_run("a", generations=2, max_steps=30)
    assert "trains 2 generations of 30 steps" in page(compare([twice]))
    once = reported_run("b", max_steps=30)
    assert "generations" not in page(compare([once])).partition("<script")[0]


def test_resume_is_no_difference_and_its_pause_no_time():
    run = reported_run("a")
    resumed = replace(run, job=TrainingJob(data="/data", resume="b"))
    assert compare([run, resumed]).differing == []

    rows: list[Row] = [
        {"step": 0, "time": 100},
        {"step": 1, "time": 110},
        {"step": 2, "time": 550},
        {"step": 3, "time": 560},
    ]
    run = with_rows(run, rows)
    started_once = replace(run, description=replace(run.description, started=90))
    assert started_once.times == [10, 20, 460, 470]
    started_again = replace(run, description=replace(run.description, started=540))
    assert started_again.times == [0, 10, 20, 30]


def test_two_tokenizers_are_compared_by_bits_per_byte():
    characters = reported_run("c", 1.5, 2.2)
    report = compare([characters, reported_run("t", 4.5, 2.1, unit="tokens")])
    assert [run.label for run in report.runs] == ["t", "c"]
    text = page(report)
    assert {point["loss"] for point in json_fields_of(text)["points"]} == {2.1, 2.2}
    assert "different tokenizers" in text


def test_the_command_repeats_the_job_without_its_secrets():
    job = TrainingJob(
        instance="ml.g5.xlarge",
        data="/data",
        environment={"KEY": "secret"},
        spot=True,
        hyperparameters={"max_steps": 5},
    )
    command = launch_again(job)
    options = "--instance ml.g5.xlarge --data /data --set max_steps=5 --spot --environment KEY=..."
    assert command.replace("\\", "").split() == f"sm-nanogpt launch {options}".split()


def test_a_running_job_is_reported_so_far(job, text_of):
    (job.directory / "state.json").write_text('{"status": "InProgress"}')
    with (job.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = text_of(job.job_id)
    assert "still running" in text
    assert "10 of 10 steps" in text


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_a_regular_file_is_replaced(job, cli, tmp_path, kind):
    (tmp_path / "there").write_text("mine")
    os.mkfifo("pipe")
    Path("link").symlink_to("there")
    ran = cli("report", job.job_id, "-o", kind)
    assert ran.code == 2
    assert ran.error.partition(":")[0] == kind
    assert Path("link").is_symlink()
    assert Path("pipe").is_fifo()


def test_no_text_is_replaced_by_a_report(job, cli, short_text_file):
    text = short_text_file.read_bytes()
    ran = cli("report", job.job_id, "-o", str(short_text_file))
    assert ran.code == 2
    assert short_text_file.read_bytes() == text


def test_evaluations_with_different_facts_share_a_table():
    judged = Evaluation(
        "", "a.txt", size=9, tokens=9, bits_per_byte=2.0, half=None, unit="passages"
    )
    with_unknown = replace(judged, text="b.txt", n_unknown=3, unknown_bits=0.25)
    run = replace(reported_run("a"), evaluations=[judged, with_unknown])
    facts = run.evaluation_facts
    assert facts["unknown characters"] == ["-", "3, which cost 0.250 of the bits"]
    assert "unknown characters" in page(compare([run]), launch_again)


def test_a_report_needs_a_curve(job, cli):
    (job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl").unlink()
    ran = cli("report", job.job_id)
    assert ran.code == 1
    assert ran.error == f"job {job.job_id} has no curve yet; it is Completed"
