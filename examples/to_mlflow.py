"""Send the curve of a job to MLflow: to_mlflow.py JOB-ID [URI], as http://localhost:5000

It needs `pip install mlflow-skinny`. MLflow cannot take a value back, so send a job that has ended,
and once.
"""

from __future__ import annotations

import sys

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

import sm_nanogpt as sm

STATUS = {"Completed": "FINISHED", "Failed": "FAILED", "Stopped": "KILLED"}
BATCH = 1000  # points that MLflow takes in a request


def send(job_id: str, uri: str | None = None) -> str:
    """Make a run in the experiment `sm-nanogpt`; return its id."""
    client = MlflowClient(uri)
    job = sm.job(job_id)
    description = job.describe()
    began = description.started or description.created
    experiment = client.get_experiment_by_name("sm-nanogpt")
    if experiment:
        experiment_id = experiment.experiment_id
    else:
        experiment_id = client.create_experiment("sm-nanogpt")
    run = client.create_run(experiment_id, start_time=milliseconds(began), run_name=job.id)
    run_id: str = run.info.run_id

    params = [Param(name, str(value)) for name, value in description.hyperparameters.items()]
    client.log_batch(run_id, params=params)
    points = []
    for row in job.curve().rows:
        moment = milliseconds(row.get("time", began))
        for name, value in row.items():
            if name not in ("step", "time"):
                points.append(Metric(name, float(value), moment, int(row["step"])))
    for start in range(0, len(points), BATCH):
        client.log_batch(run_id, metrics=points[start : start + BATCH])
    client.set_terminated(run_id, STATUS.get(description.status, "RUNNING"))
    return run_id


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


if __name__ == "__main__":
    print(send(*sys.argv[1:]))
