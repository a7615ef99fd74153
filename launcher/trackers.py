"""The curves of jobs in TensorBoard and MLflow. Called by the command `track`.

Everything comes from a job's curve and description, so it works while the job runs and afterwards,
wherever the job runs. Each function may be called again for the same job and place:

    TensorBoard     The event files get the points that they lack. If the run resumed from an
                    earlier step, an event there tells readers to drop what follows, and the new
                    points come after it.
    MLflow          The run of the job gets the points that it lacks. MLflow cannot take a point
                    back, so a step that a resumed run repeats keeps the value that was sent first.

A row that was read from a log has no time; see `with_times`.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from launcher import storage
from launcher.curves import Curve
from launcher.errors import InputError, ServiceError, extra
from launcher.job import JobDescription

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from tensorboard.compat.proto.summary_pb2 import Summary

logger = logging.getLogger(__name__)

STARTED = int(time.time())
EXPERIMENT = "sm-nanogpt"
BATCH = 1000  # points that MLflow takes in a request
TAGS = {"train_loss": "loss/train", "val_loss": "loss/val", "best_loss": "loss/best"}
STATUS = {"Completed": "FINISHED", "Failed": "FAILED", "Stopped": "KILLED"}

# By default, MLflow's client retries for minutes, reports its use to its makers, and prints.
MLFLOW = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Point(NamedTuple):
    """A value of a curve; time is in seconds since the epoch."""

    tag: str
    value: float
    step: int
    time: float


def with_times(curve: Curve, description: JobDescription, seen: dict[int, float]) -> Curve:
    """The curve with a time in each row, in seconds since the epoch.

    A row without one gets the time at which it was first seen, or the end of its job. `seen` keeps
    these times by step between calls.
    """
    now = description.ended or time.time()
    rows = [
        row if "time" in row else {**row, "time": seen.setdefault(int(row["step"]), now)}
        for row in curve.rows
    ]
    return replace(curve, rows=rows)


def points(curve: Curve) -> Iterator[Point]:
    """Each value of the curve, in order of step."""
    for row in curve.rows:
        for name, value in row.items():
            if name not in ("step", "time"):
                yield Point(TAGS.get(name, name), float(value), int(row["step"]), row["time"])


def to_tensorboard(directory: Path, curve: Curve, description: JobDescription) -> str:
    """Add what is new to the event files in DIRECTORY/JOB-ID, and return that path.

    Nothing is ever deleted, since a server that watches the directory would stop there.

    Raises:
        InputError: TensorBoard is not installed.
        ServiceError: the directory cannot be read or written.
    """
    with extra("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import text
    logging.getLogger("tensorboard").setLevel(logging.ERROR)

    place = directory.expanduser() / curve.job_id
    # A process has a file of its own: another's may end inside an event.
    path = place / f"events.out.tfevents.{STARTED}.{os.getpid()}"
    with storage.reported(str(place)):
        place.mkdir(parents=True, exist_ok=True)
        known = EventAccumulator(str(place), {"scalars": 0}).Reload()
    tags = known.Tags()
    there = {(e.step, tag): e.value for tag in tags["scalars"] for e in known.Scalars(tag)}
    # The file holds float32.
    values = {
        (p.step, p.tag): struct.unpack("f", struct.pack("f", p.value))[0] for p in points(curve)
    }
    changed = [step for (step, tag), value in there.items() if values.get((step, tag)) != value]
    kept = min(changed, default=math.inf)  # the values before this step

    events = []
    # Each start but the first makes readers drop what they know from its step on.
    for step in [0] * (known.file_version is None) + sorted(changed)[:1]:
        events.append(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
    for p in points(curve):
        if p.step >= kept or (p.step, p.tag) not in there:
            value = Summary.Value(tag=p.tag, simple_value=p.value)
            events.append(Event(step=p.step, wall_time=p.time, summary=Summary(value=[value])))
    for when, sample in curve.samples.items():
        tag = f"samples/{when.replace(' ', '_')}"
        step = 0 if when.startswith("before") else max((p.step for p in points(curve)), default=0)
        if step >= kept or f"{tag}/text_summary" not in tags["tensors"]:
            block = "".join(f"    {line}\n" for line in sample.split("\n"))  # of Markdown
            events.append(Event(step=step, summary=text(tag, block)))
    for summary in hparams(description):
        if summary.value[0].tag not in known.summary_metadata:
            events.append(Event(summary=summary))
    if events and not path.exists():
        events.insert(0, Event(file_version="brain.Event:2"))
    records = io.BytesIO()
    for event in events:
        event.wall_time = event.wall_time or time.time()
        RecordWriter(records).write(event.SerializeToString())
    if events:
        with storage.reported(str(path)), path.open("ab") as file:
            file.write(records.getvalue())
    return str(place)


def hparams(description: JobDescription) -> Iterator[Summary]:
    """What TensorBoard's table of hyperparameters needs: columns, values, and how the job ended."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
    from torch.utils.tensorboard.summary import hparams

    columns, start, end = hparams(description.hyperparameters, {TAGS["val_loss"]: 0})
    yield columns
    yield start
    if not description.is_running:
        # torch's own end of a run always reports success.
        well = description.status == "Completed"
        status = api_pb2.STATUS_SUCCESS if well else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=description.ended)
        data = plugin_data_pb2.HParamsPluginData(session_end_info=info)
        end.value[0].metadata.plugin_data.content = data.SerializeToString()
        yield end


def to_mlflow(uri: str, curve: Curve, description: JobDescription) -> str:
    """Add what is new to the job's run in an MLflow store, and return the address of that run.

    The run is found again by its tag `sm_nanogpt.job_id`. Samples follow when the job has ended; if
    the store of artifacts refuses them, they are left out and a warning is logged.

    Raises:
        InputError: MLflow, or its plugin for an ARN, is not installed.
        ServiceError: the store does not answer, or refuses.
    """
    if uri.startswith("arn:") and find_spec("sagemaker_mlflow") is None:
        raise InputError("an ARN as --mlflow needs a plugin: `pip install sagemaker-mlflow`")
    for name, setting in MLFLOW.items():
        os.environ.setdefault(name, setting)
    with extra("mlflow"):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
    for name in ("alembic", "mlflow", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        if database := database_of(uri):  # MLflow would retry for minutes
            with closing(sqlite3.connect(database)) as connection:
                connection.execute("PRAGMA schema_version")
        client = MlflowClient(uri)
        run = mlflow_run(client, uri, description)
        run_id = run.info.run_id
        there = {
            (tag, metric.step)
            for tag in run.data.metrics
            for metric in client.get_metric_history(run_id, tag)
        }
        new = [
            Metric(p.tag, p.value, round(p.time * 1000), p.step)
            for p in points(curve)
            if (p.tag, p.step) not in there
        ]
        for start in range(0, len(new), BATCH):
            client.log_batch(run_id, new[start : start + BATCH])
        tags = {"data": description.data, "instance": description.instance}
        if description.failure_reason:
            tags["reason"] = description.failure_reason
        client.log_batch(
            run_id,
            params=[
                Param(name, str(value))
                for name, value in description.hyperparameters.items()
                if name not in run.data.params
            ],
            tags=[RunTag(f"sm_nanogpt.{name}", value) for name, value in tags.items()],
        )
        if not description.is_running:
            for when, text in curve.samples.items():
                try:
                    client.log_text(run_id, text, f"samples/{when.replace(' ', '-')}.txt")
                except Exception as error:  # each store of artifacts has its own
                    logger.warning(f"MLflow does not store the sample {when}: {error}")
            ended = None if description.ended is None else round(description.ended * 1000)
            client.set_terminated(run_id, STATUS[description.status], ended)
    except (MlflowException, sqlite3.Error) as error:
        silent = isinstance(error.__context__, OSError)  # as those of requests are
        later = "does not answer; the same command later adds what is missing"
        refuses = f"refuses: {str(error).strip().splitlines()[0]}"
        raise ServiceError(f"MLflow at {uri} {later if silent else refuses}") from None
    page = f"/#/experiments/{run.info.experiment_id}/runs/"
    return f"{uri.rstrip('/')}{page if uri.startswith('http') else ' '}{run_id}"


def database_of(uri: str) -> Path | None:
    """The file of a URI like `sqlite:///mlflow.db`."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri else Path(path).absolute()


def mlflow_run(client: MlflowClient, uri: str, description: JobDescription) -> Run:
    """Find the run of a job, or create it."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        database = database_of(uri)  # MLflow's default is the working directory
        artifacts = database.with_name("mlartifacts").as_uri() if database else None
        experiment_id = client.create_experiment(EXPERIMENT, artifacts)
    else:
        experiment_id = experiment.experiment_id
    tag = "sm_nanogpt.job_id"
    found = client.search_runs([experiment_id], f"tags.`{tag}` = '{description.job_id}'")
    if found:
        return found[0]
    return client.create_run(
        experiment_id,
        start_time=round((description.started or description.created) * 1000),
        tags={tag: description.job_id},
        run_name=description.job_id,
    )
