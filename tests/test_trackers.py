"""Curves in TensorBoard and MLflow: each value once, however often a job is tracked."""

from __future__ import annotations

import json
import math
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import launching
import pytest
from emulator import Emulator
from launching import Finished, Ran
from tensorboard.backend.event_processing import plugin_event_accumulator as event_accumulator
from tensorboard.util.tensor_util import make_ndarray
from test_sagemaker import TAGGED

from launcher import describe, storage, trackers
from launcher.cli import track
from launcher.curves import Curve, Row
from launcher.job import JobDescription
from launcher.trackers import to_mlflow, to_tensorboard, with_times

Points = dict[str, list[tuple[int, float]]]
TAGS = {"loss/train": "train_loss", "loss/val": "val_loss", "bits_per_byte": "bits_per_byte"}


def curve_file(job: Finished) -> Path:
    return job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"


def rows(job: Finished) -> list[Row]:
    return [json.loads(line) for line in curve_file(job).read_text().splitlines()]


def expected(rows: list[Row]) -> Points:
    return {
        tag: [(int(row["step"]), float(row[name])) for row in rows if name in row]
        for tag, name in TAGS.items()
    }


def events(place: Path) -> Any:
    return event_accumulator.EventAccumulator(str(place)).Reload()


def drawn(place: Path) -> Points:
    """What a TensorBoard server shows of a directory."""
    shown = events(place)
    return {
        tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in shown.Tensors(tag)]
        for tag in TAGS
    }


def runs(uri: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("sm-nanogpt")
    assert experiment is not None
    return client, client.search_runs([experiment.experiment_id])


def sent(uri: str) -> Points:
    """What the only run of an MLflow store holds."""
    client, (run,) = runs(uri)
    return {
        tag: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, tag)]
        for tag in TAGS
    }


def same(found: Points, rows: list[Row]) -> bool:
    """Whether the points are those of the rows, in their order, up to the digits of a float32."""
    wanted = expected(rows)
    return found.keys() == wanted.keys() and all(
        [step for step, _ in found[tag]] == [step for step, _ in wanted[tag]]
        and all(
            math.isclose(a, b, rel_tol=1e-6)
            for (_, a), (_, b) in zip(found[tag], wanted[tag], strict=True)
        )
        for tag in wanted
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow, which takes seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(database: Path, tmp_path: Path) -> str:
    return f"sqlite:///{shutil.copy(database, tmp_path)}"


@pytest.fixture
def both(cli: Callable[..., Ran], tmp_path: Path, uri: str) -> Callable[..., Ran]:
    return partial(cli, "track", "--tensorboard", str(tmp_path / "runs"), "--mlflow", uri)


def test_each_row_is_there_once_also_when_tracked_twice(
    job: Finished, both: Callable[..., Ran], tmp_path: Path, uri: str
) -> None:
    for _ in range(2):
        ran = both(job.job_id)
        assert ran.code == 0, ran.err
        assert same(drawn(tmp_path / "runs" / job.job_id), rows(job))
        assert same(sent(uri), rows(job))


def test_stdout_names_the_places(
    job: Finished, both: Callable[..., Ran], tmp_path: Path, uri: str
) -> None:
    places = both("latest").out.splitlines()
    (run,) = runs(uri)[1]
    assert places == [str(tmp_path / "runs" / job.job_id), f"{uri} {run.info.run_id}"]


def test_a_job_tracked_half_way_gets_the_rest(
    job: Finished, both: Callable[..., Ran], tmp_path: Path, uri: str
) -> None:
    file, whole = curve_file(job), curve_file(job).read_text()
    file.write_text(whole.splitlines(keepends=True)[0])
    both(job.job_id)
    assert same(sent(uri), rows(job))
    file.write_text(whole)
    both(job.job_id)
    assert same(drawn(tmp_path / "runs" / job.job_id), rows(job))
    assert same(sent(uri), rows(job))


def test_tensorboard_has_times_hparams_and_samples(
    job: Finished, both: Callable[..., Ran], tmp_path: Path
) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    with (job.directory / "logs/job.log").open("a") as log:
        log.write("--- sample after training ---\n| To be\n|   or not\n")
    both(job.job_id)
    shown = events(tmp_path / "runs" / job.job_id)
    times = [event.wall_time for event in shown.Tensors("loss/train")]
    assert times == [row["time"] for row in rows(job)]
    (text,) = shown.Tensors("samples/after_training/text_summary")
    assert text.tensor_proto.string_val[0].decode().split("\n")[:2] == ["    To be", "      or not"]
    told = shown.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = HParamsPluginData.FromString(told).session_start_info.hparams
    assert hparams["n_embd"].number_value == 32
    assert hparams["precision"].string_value == "float32"


def test_mlflow_has_params_tags_times_and_samples(
    job: Finished, both: Callable[..., Ran], uri: str
) -> None:
    import mlflow

    with (job.directory / "logs/job.log").open("a") as log:
        log.write("--- sample after training ---\n| To be\n|   or not\n")
    both(job.job_id)
    client, (run,) = runs(uri)
    assert run.info.run_name == job.job_id
    assert run.info.status == "FINISHED"
    assert run.data.params["n_embd"] == "32"
    assert run.data.tags["sm_nanogpt.data"] == describe(job.job_id).data
    history = client.get_metric_history(run.info.run_id, "loss/train")
    assert [m.timestamp for m in history] == [round(row["time"] * 1000) for row in rows(job)]
    sample = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/samples/after-training.txt")
    assert sample == "To be\n  or not"


def curve_of(*values: tuple[int, float]) -> Curve:
    rows: list[Row] = [
        {"step": step, "train_loss": loss, "val_loss": loss, "bits_per_byte": loss, "time": 9e8}
        for step, loss in values
    ]
    return Curve("a-job", "", rows)


def described(status: str = "InProgress", **values: Any) -> JobDescription:
    return JobDescription("a-job", status, status, "local", 1, 9e8, "file:///data", **values)


def test_a_resumed_run_replaces_the_later_steps_in_tensorboard(tmp_path: Path) -> None:
    resumed = curve_of((5, 4.0), (10, 3.5), (12, 3.0))
    to_tensorboard(tmp_path, curve_of((5, 4.0), (10, 3.0), (15, 2.0)), described())
    to_tensorboard(tmp_path, resumed, described())
    assert same(drawn(tmp_path / "a-job"), list(resumed.rows))


def test_each_process_with_news_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = [curve_of((5, 4.0), (10, 3.0)), curve_of((5, 4.0), (10, 3.5)), curve_of((5, 1.0))]
    for started, curve in enumerate([curves[0], *curves]):
        monkeypatch.setattr(trackers, "STARTED", 1_000_000_000 + started)
        to_tensorboard(tmp_path, curve, described())
        assert same(drawn(tmp_path / "a-job"), list(curve.rows))
    assert len(list((tmp_path / "a-job").iterdir())) == 3


def test_a_resumed_run_keeps_the_first_value_in_mlflow(uri: str) -> None:
    to_mlflow(uri, curve_of((5, 4.0), (10, 3.0)), described())
    to_mlflow(uri, curve_of((5, 4.0), (10, 3.5), (12, 3.0)), described())
    assert sent(uri)["loss/val"] == [(5, 4.0), (10, 3.0), (12, 3.0)]


def test_more_rows_than_a_request_takes_arrive(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "BATCH", 2)
    curve = curve_of((5, 4.0), (10, 3.0))
    to_mlflow(uri, curve, described())
    assert same(sent(uri), list(curve.rows))


@pytest.mark.parametrize(
    ("status", "told"), [("InProgress", "RUNNING"), ("Failed", "FAILED"), ("Stopped", "KILLED")]
)
def test_mlflow_knows_how_a_job_ended(uri: str, status: str, told: str) -> None:
    to_mlflow(uri, curve_of((5, 4.0)), described())
    ended = None if status == "InProgress" else 9e8 + 1
    to_mlflow(uri, curve_of((5, 4.0)), described(status, ended=ended, failure_reason="a bug"))
    _, (run,) = runs(uri)
    assert run.info.status == told
    assert run.info.end_time == (ended and ended * 1000)
    assert run.data.tags["sm_nanogpt.reason"] == "a bug"


def test_tensorboard_knows_that_a_job_failed(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    to_tensorboard(tmp_path, curve_of((5, 4.0)), described())
    to_tensorboard(tmp_path, curve_of((5, 4.0)), described("Failed", ended=9e8))
    told = events(tmp_path / "a-job").summary_metadata["_hparams_/session_end_info"]
    ended = HParamsPluginData.FromString(told.plugin_data.content).session_end_info
    assert ended.status == api_pb2.STATUS_FAILURE


def test_a_row_of_a_log_gets_the_time_it_was_first_seen() -> None:
    curve, seen = Curve("a-job", "", [{"step": 5, "val_loss": 4.0}]), dict[int, float]()
    first = with_times(curve, described(), seen).rows[0]["time"]
    assert first == pytest.approx(time.time(), abs=60)
    assert with_times(curve, described(), seen).rows[0]["time"] == first
    ended = replace(described("Completed"), ended=9e8 + 1)
    assert with_times(curve, ended, {}).rows[0]["time"] == 9e8 + 1


def test_following_adds_rows_until_the_job_ends(
    home: Path,
    text_file: Path,
    cli: Callable[..., Ran],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(track, "POLL_SECONDS", 0.1)
    words = launching.launching("--detach", data=text_file, max_steps=30)
    job_id = cli(*words).out.strip()
    ran = cli("track", job_id, "--tensorboard", str(tmp_path / "runs"), "--follow")
    assert ran.code == 0, ran.err
    assert same(drawn(tmp_path / "runs" / job_id), rows(Finished(home, job_id)))
    assert ran.err == f"{job_id}: 6 rows to step 30; Completed\n"


def test_a_job_on_sagemaker_gets_all_digits_at_its_end(
    cloud: Emulator,
    s3: Any,
    cli: Callable[..., Ran],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(track, "POLL_SECONDS", 0.1)
    cloud.sagemaker.next_script = {"log": [(-2, "algo-1", f"{TAGGED}step=5/10 val_loss=2.5")]}
    job_id = cli("launch", "--instance", "ml.g5.xlarge", "--data", str(text_file)).out.strip()
    words = ("track", job_id, "--tensorboard", str(tmp_path / "runs"))
    assert cli(*words).code == 0
    assert events(tmp_path / "runs" / job_id).Tensors("loss/val")[0].step == 5
    rows = b'{"step": 5, "val_loss": 2.5000123, "time": 9e8}\n{"step": 10, "val_loss": 2.25}\n'
    checkpoints = f"s3://{s3.bucket}/some/prefix/checkpoints/{job_id}"
    storage.write_bytes(f"{checkpoints}/metrics-00000001.jsonl", rows)
    ran = cli(*words, "--follow")
    assert ran.code == 0, ran.err
    points = events(tmp_path / "runs" / job_id).Tensors("loss/val")
    assert [(p.step, round(make_ndarray(p.tensor_proto).item(), 6)) for p in points] == [
        (5, 2.500012),
        (10, 2.25),
    ]
    assert points[0].wall_time == 9e8


def test_several_jobs_have_a_run_each(job: Finished, both: Callable[..., Ran], uri: str) -> None:
    other = job.job_id[:-6] + "abcdef"
    job.directory.with_name(other).symlink_to(job.directory)
    both(job.job_id, "abcdef")
    assert {run.info.run_name for run in runs(uri)[1]} == {job.job_id, other}


def test_without_a_tracker_the_options_are_named(job: Finished, cli: Callable[..., Ran]) -> None:
    ran = cli("track", job.job_id)
    assert (ran.code, ran.error) == (2, "name a tracker: --tensorboard DIR, --mlflow URI, or both")


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_library_is_named_with_its_install_command(
    job: Finished,
    cli: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str,
) -> None:
    for loaded in [each for each in sys.modules if each.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    ran = cli("track", job.job_id, f"--{name}", "here")
    assert ran.code == 2
    assert f"pip install -c constraints.txt -e '.[{name}]'" in ran.error


def test_an_arn_without_its_plugin_is_refused(job: Finished, cli: Callable[..., Ran]) -> None:
    arn = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/mine"
    ran = cli("track", job.job_id, "--mlflow", arn)
    assert ran.code == 2
    assert "`pip install sagemaker-mlflow`" in ran.error


def test_an_mlflow_server_that_is_gone_is_one_line(job: Finished, cli: Callable[..., Ran]) -> None:
    with socket.socket() as taken:  # and not listening
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        ran = cli("track", job.job_id, "--mlflow", uri)
    assert ran.code == 1
    assert ran.err == f"error: {ran.error}\n"
    assert ran.error.startswith(f"MLflow at {uri} does not answer")


def test_a_file_that_is_no_database_is_one_line(
    job: Finished, cli: Callable[..., Ran], tmp_path: Path
) -> None:
    (tmp_path / "mlflow.db").write_text("no database " * 100)
    ran = cli("track", job.job_id, "--mlflow", "sqlite:///mlflow.db")
    assert ran.code == 1
    assert "file is not a database" in ran.error
