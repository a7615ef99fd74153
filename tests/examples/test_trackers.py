"""Curves in TensorBoard and MLflow: each value once, however often a job is sent there."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
from launching import Finished
from numpy import float32
from sagemaker_jobs import TAGGED
from tensorboard.backend.event_processing import plugin_event_accumulator as event_accumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_ndarray
from to_tensorboard import Board, write

from sm_nanogpt.launcher.aws import Unreachable
from sm_nanogpt.launcher.curve import Curve, Row
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.tracking import TrackedJob

Points = dict[str, list[tuple[int, float]]]
TAGS = {"loss/train": "train_loss", "loss/val": "val_loss", "bits_per_byte": "bits_per_byte"}


def curve_file(job: Finished) -> Path:
    return job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"


def rows(job: Finished) -> list[Row]:
    return [json.loads(line) for line in curve_file(job).read_text().splitlines()]


def events(directory: Path) -> Any:
    return event_accumulator.EventAccumulator(str(directory)).Reload()


def drawn(directory: Path) -> Points:
    """What a TensorBoard server shows of a directory."""
    accumulator = events(directory)
    return {tag: points_of(accumulator.Tensors(tag)) for tag in TAGS}


def points_of(tensor_events: list[Any]) -> list[tuple[int, float]]:
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in tensor_events]


def points_in(rows: list[Row]) -> Points:
    """What TensorBoard shows of these rows: numbers of 32 bits, in their order."""
    points: Points = {tag: [] for tag in TAGS}
    for row in rows:
        for tag, name in TAGS.items():
            if name in row:
                points[tag].append((int(row["step"]), float(float32(row[name]))))
    return points


@pytest.fixture(autouse=True)
def first_files(monkeypatch):
    """The event files of a test are the first of their process. A number ends their names, and
    TensorBoard sorts those of one second as text, 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path / "a-job")


@pytest.fixture
def launched(cloud, cli, short_text_file):
    """Launches a job on SageMaker that logs rows at the given seconds; returns its id."""

    def launch(*rows: tuple[float, str]) -> str:
        log = [(after, "algo-1", f"{TAGGED}{row}") for after, row in rows]
        cloud.sagemaker.next_script = {"log": log}
        arguments = ("launch", "--instance", "ml.g5.xlarge", "--data", str(short_text_file))
        return str(cli(*arguments).out.strip())

    return launch


def test_each_row_is_drawn_once_however_often_written(job, tmp_path, capsys):
    file = curve_file(job)
    whole = file.read_text()
    first_line = whole.splitlines(keepends=True)[0]
    for text in (first_line, whole, whole):
        file.write_text(text)
        write(["latest"], tmp_path)
        assert capsys.readouterr() == (f"{tmp_path / job.job_id}\n", "")
        assert drawn(tmp_path / job.job_id) == points_in(rows(job))


def test_tensorboard_has_times_hparams_and_samples(job, tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    with (job.directory / "logs/job.log").open("a") as log:
        log.write("--- sample after training ---\n| To be\n|   or not\n")
    write([job.job_id], tmp_path)
    accumulator = events(tmp_path / job.job_id)
    times = [event.wall_time for event in accumulator.Tensors("loss/train")]
    assert times == [row["time"] for row in rows(job)]
    (sample,) = accumulator.Tensors("samples/after_training/text_summary")
    text = sample.tensor_proto.string_val[0].decode()
    assert text.startswith("    To be\n      or not\n")
    metadata = accumulator.summary_metadata["_hparams_/session_start_info"]
    plugin_data = HParamsPluginData.FromString(metadata.plugin_data.content)
    hparams = plugin_data.session_start_info.hparams
    assert hparams["n_embd"].number_value == 32
    assert hparams["precision"].string_value == "float32"


def test_the_example_sends_a_curve_to_mlflow(job, tmp_path):
    from mlflow import MlflowClient
    from to_mlflow import send

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    send(job.job_id, uri)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("sm-nanogpt")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == job.job_id
    assert run.info.status == "FINISHED"
    assert run.data.params["n_embd"] == "32"
    history = client.get_metric_history(run.info.run_id, "val_loss")
    losses = {metric.step: metric.value for metric in history}
    assert losses == {row["step"]: row["val_loss"] for row in rows(job)}
    assert len(history) == len(losses)


def curve_of(losses: dict[int, float]) -> Curve:
    """A curve whose losses are all the same at a step."""
    rows: list[Row] = []
    for step, loss in losses.items():
        row = {"step": step, "train_loss": loss, "val_loss": loss, "bits_per_byte": loss}
        rows.append({**row, "time": 9e8})
    return Curve("a-job", "", rows)


def described(status: str = "InProgress", **values: Any) -> JobDescription:
    return JobDescription("a-job", status, status, "local", 1, 9e8, "file:///data", **values)


def test_a_resumed_run_replaces_the_later_steps(board):
    resumed = curve_of({5: 4.0, 10: 3.5, 12: 3.0})
    board.update(described(), curve_of({5: 4.0}))
    board.update(described(), curve_of({5: 4.0, 10: 3.0, 15: 2.0}))
    board.update(described(), resumed)
    assert drawn(board.directory) == points_in(list(resumed.rows))
    assert len(list(board.directory.iterdir())) == 2


def test_a_row_of_a_log_gets_the_time_it_was_first_seen(board):
    rows: list[Row] = [{"step": 5, "val_loss": 4.0}, {"step": 6, "val_loss": 3.0}]
    board.update(described(), Curve("a-job", "", rows[:1]))
    board.update(replace(described("Completed"), ended=9e8), Curve("a-job", "", rows))
    first, second = (event.wall_time for event in events(board.directory).Tensors("loss/val"))
    assert first == pytest.approx(time.time(), abs=60)
    assert second == 9e8


def test_following_adds_rows_until_the_job_ends(home, short_text_file, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("to_tensorboard.POLL_SECONDS", 0.1)
    arguments = launching.launching("--detach", data=short_text_file, max_steps=30)
    job_id = cli(*arguments).out.strip()
    write([job_id], tmp_path, follow=True)
    rows_at_end = rows(Finished(home, job_id))
    assert rows_at_end[-1]["step"] == 30
    assert drawn(tmp_path / job_id) == points_in(rows_at_end)


def test_a_job_on_sagemaker_gets_all_digits_at_its_end(launched, s3, tmp_path, monkeypatch):
    monkeypatch.setattr("to_tensorboard.POLL_SECONDS", 0.1)
    job_id = launched((-2, "step=5/10 val_loss=2.5"))
    write([job_id], tmp_path)
    assert events(tmp_path / job_id).Tensors("loss/val")[0].step == 5
    rows = b'{"step": 5, "val_loss": 2.5000123, "time": 9e8}\n{"step": 10, "val_loss": 2.25}\n'
    checkpoints = f"s3://{s3.bucket}/some/prefix/checkpoints/{job_id}"
    storage.write_bytes(f"{checkpoints}/metrics-00000001.jsonl", rows)
    write([job_id], tmp_path, follow=True)
    first, second = events(tmp_path / job_id).Tensors("loss/val")
    assert first.wall_time == 9e8
    assert points_of([first]) == [(5, pytest.approx(2.5000123))]
    assert points_of([second]) == [(10, 2.25)]


def test_following_goes_on_after_an_outage(job, tmp_path, monkeypatch, capsys):
    answers = Mock(side_effect=[Unreachable("no answer"), TrackedJob(job.job_id).describe()])
    monkeypatch.setattr("to_tensorboard.POLL_SECONDS", 0)
    monkeypatch.setattr("sm_nanogpt.launcher.tracking.TrackedJob.describe", answers)
    write([job.job_id], tmp_path, follow=True)
    assert capsys.readouterr().err.startswith("no answer; ")
    assert drawn(tmp_path / job.job_id) == points_in(rows(job))
