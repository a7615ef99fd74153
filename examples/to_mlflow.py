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
    client, job = MlflowClient(uri), sm.job(job_id).describe()
    experiment = client.get_experiment_by_name("sm-nanogpt")
    made = experiment.experiment_id if experiment else client.create_experiment("sm-nanogpt")
    began = job.started or job.created
    run = client.create_run(made, start_time=round(began * 1000), run_name=job.job_id).info.run_id
    params = [Param(name, str(value)) for name, value in job.hyperparameters.items()]
    client.log_batch(run, params=params)
    points = [
        Metric(name, float(value), round(row.get("time", began) * 1000), int(row["step"]))
        for row in sm.job(job.job_id).curve().rows
        for name, value in row.items()
        if name not in ("step", "time")
    ]
    for start in range(0, len(points), BATCH):
        client.log_batch(run, metrics=points[start : start + BATCH])
    client.set_terminated(run, STATUS.get(job.status, "RUNNING"))
    return run


if __name__ == "__main__":
    print(send(*sys.argv[1:]))
