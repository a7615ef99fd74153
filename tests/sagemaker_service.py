"""SageMaker, CloudWatch Logs and STS on loopback, as far as the launcher calls them.

It behaves like the service where a client can tell: states take time, names are unique, what AWS
refuses is refused with AWS's error codes, logs come late and in pages. Jobs do not run; a test says
what becomes of one by its hyperparameters or by `jobs[...]`. S3 is moto's, beside it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACCOUNT = "123456789012"
STAGES = (("Starting", 0.2), ("Downloading", 0.2), ("Training", 3.0), ("Uploading", 0.2))
STOPPING_SECONDS = 0.5
LOG_DELAY_SECONDS = 0.3
PAGE = 3


class Refusal(Exception):
    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass
class Job:
    request: dict[str, Any]
    created: float
    reason: str | None = None  # set: the job fails after its training
    stop_at: float | None = None
    log: list[tuple[float, str, str]] = field(
        default_factory=list
    )  # seconds after start, host, line

    def status(self) -> tuple[str, str]:
        now = time.time()
        if self.stop_at is not None:
            done = now - self.stop_at > STOPPING_SECONDS
            return ("Stopped", "Stopped") if done else ("Stopping", "Stopping")
        age = now - self.created
        for stage, seconds in STAGES:
            if age < seconds:
                return "InProgress", stage
            age -= seconds
            if stage == "Training" and self.reason is not None:
                return "Failed", "Failed"
        return "Completed", "Completed"


class Service:
    """What the servers share, and what a test may look at or change."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refuse: dict[str, tuple[str, str]] = {}  # operation: code and message
        self.quota = {"ml.g6.48xlarge": 0}
        self.next_job: dict[str, Any] = {}  # fields of the next Job

    def call(self, operation: str, body: dict[str, Any], key: str) -> Any:
        self.calls.append((operation, body))
        if key == "EXPIRED":
            raise Refusal(
                "ExpiredTokenException", "The security token included in the request is expired"
            )
        if key == "WRONG":
            raise Refusal(
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
            )
        if operation in self.refuse:
            raise Refusal(*self.refuse[operation])
        handler = getattr(self, operation, None)
        if handler is None:
            raise Refusal("UnknownOperationException", operation)
        return handler(body)

    # -- SageMaker --------------------------------------------------------------------------------

    def CreateTrainingJob(self, body: dict[str, Any]) -> Any:
        name, resources = body["TrainingJobName"], body["ResourceConfig"]
        if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
            raise Refusal("ValidationException", f"Value '{name}' at 'trainingJobName' failed")
        if name in self.jobs:
            raise Refusal("ResourceInUse", f"Job name must be unique. {name} exists already")
        stopping = body["StoppingCondition"]
        if body.get("EnableManagedSpotTraining"):
            if stopping.get("MaxWaitTimeInSeconds", 0) < stopping["MaxRuntimeInSeconds"]:
                raise Refusal(
                    "ValidationException",
                    "MaxWaitTimeInSeconds must be at least MaxRuntimeInSeconds",
                )
            if resources.get("KeepAlivePeriodInSeconds"):
                raise Refusal("ValidationException", "Managed Spot does not support warm pools")
        limit = self.quota.get(resources["InstanceType"], 4)
        if resources["InstanceCount"] > limit:
            raise Refusal(
                "ResourceLimitExceeded",
                "The account-level service limit"
                f" '{resources['InstanceType']} for training job usage' is {limit} Instances, with"
                f" current utilization of 0 Instances and a request delta of"
                f" {resources['InstanceCount']} Instances.",
            )
        self.jobs[name] = Job(body, time.time(), **self.next_job)
        return {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/{name}"}

    def DescribeTrainingJob(self, body: dict[str, Any]) -> Any:
        job = self.jobs.get(body["TrainingJobName"])
        if job is None:
            raise Refusal("ValidationException", "Requested resource not found.")
        request, (status, secondary) = job.request, job.status()
        kept = (
            "TrainingJobName",
            "HyperParameters",
            "AlgorithmSpecification",
            "RoleArn",
            "InputDataConfig",
            "OutputDataConfig",
            "ResourceConfig",
            "StoppingCondition",
            "CheckpointConfig",
            "EnableManagedSpotTraining",
        )
        described = {
            **{name: request[name] for name in kept if name in request},
            "TrainingJobStatus": status,
            "SecondaryStatus": secondary,
            "CreationTime": job.created,
        }
        if secondary not in ("Starting",):
            described["TrainingStartTime"] = job.created + STAGES[0][1]
        if status in ("Completed", "Failed", "Stopped"):
            described["TrainingEndTime"] = job.created + 120
            described["TrainingTimeInSeconds"] = 100
            spot = request.get("EnableManagedSpotTraining")
            described["BillableTimeInSeconds"] = 30 if spot else 100
        if status == "Failed":
            described["FailureReason"] = job.reason
        prefix = f"{request['OutputDataConfig']['S3OutputPath']}/{body['TrainingJobName']}"
        described["ModelArtifacts"] = {"S3ModelArtifacts": f"{prefix}/output/model.tar.gz"}
        if status == "Completed":
            described["FinalMetricDataList"] = [
                {"MetricName": name, "Value": value, "Timestamp": job.created}
                for name, value in (("val_loss", 1.5), ("step", 5000.0))
            ]
        return described

    def StopTrainingJob(self, body: dict[str, Any]) -> Any:
        job = self.jobs.get(body["TrainingJobName"])
        if job is None:
            raise Refusal("ValidationException", "Requested resource not found.")
        if job.status()[0] not in ("InProgress", "Stopping"):
            raise Refusal(
                "ValidationException",
                "The request was rejected because the training job is in status"
                f" {job.status()[0]}.",
            )
        job.stop_at = job.stop_at or time.time()
        return {}

    def Search(self, body: dict[str, Any]) -> Any:
        wanted = {
            f["Name"].removeprefix("Tags."): f["Value"] for f in body["SearchExpression"]["Filters"]
        }
        names = [
            name
            for name, job in sorted(self.jobs.items(), key=lambda item: -item[1].created)
            if wanted.items() <= {t["Key"]: t["Value"] for t in job.request.get("Tags", [])}.items()
        ]
        first = int(body.get("NextToken", 0))
        page = names[first : first + PAGE]
        answer: dict[str, Any] = {
            "Results": [
                {"TrainingJob": self.DescribeTrainingJob({"TrainingJobName": name})}
                for name in page
            ]
        }
        if first + PAGE < len(names):
            answer["NextToken"] = str(first + PAGE)
        return answer

    # -- CloudWatch Logs --------------------------------------------------------------------------

    def visible(self, name: str) -> dict[str, list[tuple[float, str]]]:
        """Lines by stream, as far as they have arrived."""
        job = self.jobs[name]
        streams: dict[str, list[tuple[float, str]]] = {}
        for after, host, line in job.log:
            at = job.created + after
            if time.time() > at + LOG_DELAY_SECONDS:
                streams.setdefault(f"{name}/{host}-1700000000", []).append((at, line))
        return streams

    def DescribeLogStreams(self, body: dict[str, Any]) -> Any:
        name = body["logStreamNamePrefix"].rstrip("/")
        if not any(job.log for job in self.jobs.values()):
            raise Refusal("ResourceNotFoundException", "The specified log group does not exist.")
        streams = sorted(self.visible(name)) if name in self.jobs else []
        first = int(body.get("nextToken", 0))
        answer: dict[str, Any] = {
            "logStreams": [{"logStreamName": s} for s in streams[first : first + 1]]
        }
        if first + 1 < len(streams):
            answer["nextToken"] = str(first + 1)
        return answer

    def GetLogEvents(self, body: dict[str, Any]) -> Any:
        name = body["logStreamName"].partition("/")[0]
        events = self.visible(name).get(body["logStreamName"], [])
        first = int(body.get("nextToken", "f/0").partition("/")[2])
        page = events[first : first + PAGE]
        return {
            "events": [{"timestamp": int(at * 1000), "message": line} for at, line in page],
            "nextForwardToken": f"f/{first + len(page)}",
            "nextBackwardToken": "b/0",
        }


def make_handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            key = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
            target = self.headers.get("X-Amz-Target", "")
            if not target:  # STS speaks the query protocol
                self.answer_identity()
                return
            try:
                answer = service.call(
                    target.rpartition(".")[2], json.loads(body or b"{}"), key[1] if key else ""
                )
                self.answer(200, answer)
            except Refusal as refusal:
                said = {"__type": refusal.code, "message": str(refusal), "Message": str(refusal)}
                self.answer(refusal.status, said)

        def answer(self, status: int, value: Any) -> None:
            self.send(status, "application/x-amz-json-1.1", json.dumps(value).encode())

        def answer_identity(self) -> None:
            xml = (
                '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
                f"<GetCallerIdentityResult><Arn>arn:aws:iam::{ACCOUNT}:user/test</Arn>"
                f"<UserId>AIDA</UserId><Account>{ACCOUNT}</Account></GetCallerIdentityResult>"
                "</GetCallerIdentityResponse>"
            )
            self.send(200, "text/xml", xml.encode())

        def send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving() -> Iterator[tuple[Service, str]]:
    """The service, and the URL to reach it at."""
    service = Service()
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(service))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
