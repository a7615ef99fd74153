"""SageMaker's training jobs as a service: requests, refusals and states. What runs them is a `Run`.

It behaves like AWS where a client can tell: states take time, names are unique, quotas count what
runs, capacity runs out, and what AWS refuses is refused with AWS's codes and words.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import botocore.session
import regex
from access import ACCOUNT, Refusal, policies_of, role_of, trusts
from botocore.model import ListShape, MapShape, Shape, StructureShape
from moto.logs.models import logs_backends
from moto.s3.models import s3_backends
from policies import allowed

REGION = "us-east-1"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PAGE = 3  # jobs in an answer of Search
SPOT_SHARE = 0.3  # of the time that is billed

# Secondary states, and the state that each belongs to.
STATES = {
    **dict.fromkeys(("Starting", "Pending", "Downloading", "Training", "Uploading"), "InProgress"),
    "Interrupted": "InProgress",
    "Stopping": "Stopping",
    "Completed": "Completed",
    "Failed": "Failed",
    **dict.fromkeys(("Stopped", "MaxRuntimeExceeded", "MaxWaitTimeExceeded"), "Stopped"),
}
MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Uploading": "Uploading generated training model",
    "Interrupted": "Managed spot training instances were interrupted",
    "Pending": "Insufficient capacity error from EC2 while launching instances, retrying!",
    "Stopping": "Stopping the training job",
}
LONGEST_PENDING = 3600  # seconds, of a job that names none; AWS does not say how many
CAPACITY_ERROR = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a"
    " different ML instance type."
)
ACCELERATED = ("ml.g", "ml.p", "ml.trn")  # a job waits for machines of such types


@dataclass
class Job:
    """A training job. Its request never changes; whoever runs it moves it from state to state."""

    request: dict[str, Any]
    rate: float = 1.0  # SageMaker's seconds in one of ours
    created: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    secondary: str = "Starting"
    instance: str | None = None  # the type that was chosen
    transitions: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    training_seconds: int | None = None
    ran: float = 0.0  # of SageMaker's seconds, over all its starts
    stopping: threading.Event = field(default_factory=threading.Event)
    interrupting: threading.Event = field(default_factory=threading.Event)
    script: dict[str, Any] = field(default_factory=dict)  # for a run that needs one
    looks: int = 0  # how often it was described in its training
    unwritten: list[tuple[float, str, str]] = field(default_factory=list)  # the script's log
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        return str(self.request["TrainingJobName"])

    @property
    def tags(self) -> list[dict[str, str]]:
        """Search tells them, DescribeTrainingJob does not."""
        return list(self.request.get("Tags", []))

    @property
    def arn(self) -> str:
        return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{self.name}"

    @property
    def instances(self) -> list[str]:
        """The types that it may run on, the preferred one first."""
        resources = self.request["ResourceConfig"]
        preferred = [each["InstanceType"] for each in resources.get("InstancePreferences", [])]
        return preferred or [resources["InstanceType"]]

    @property
    def uses(self) -> list[str]:
        """What its quotas are called: of the type that was chosen, before that of each."""
        spot = "spot " * bool(self.request.get("EnableManagedSpotTraining"))
        instances = [self.instance] if self.instance else self.instances
        return [f"{instance} for {spot}training job usage" for instance in instances]

    @property
    def status(self) -> str:
        return STATES[self.secondary]

    @property
    def hosts(self) -> int:
        return int(self.request["ResourceConfig"]["InstanceCount"])

    def enter(self, secondary: str) -> None:
        """Goes on to a state; a job that was told to stop is never in progress again."""
        with self.lock:
            if self.stopping.is_set() and STATES[secondary] == "InProgress":
                return
            now = time.time()
            if self.transitions:
                self.transitions[-1]["EndTime"] = now
            message = MESSAGES.get(secondary, f"Training job {secondary.lower()}")
            self.transitions.append(
                {"Status": secondary, "StartTime": now, "StatusMessage": message}
            )
            if secondary == "Downloading" and self.started is None:
                self.started = now
            self.secondary = secondary

    def stop(self) -> None:
        with self.lock:
            if not self.stopping.is_set():
                self.enter("Stopping")
                self.stopping.set()

    def end(self, secondary: str, reason: str | None = None) -> None:
        """The last state; SageMaker keeps 1024 characters of the reason of a failure."""
        self.reason = reason and reason[:1024]
        self.ended = time.time()
        if self.training_seconds is None and self.started is not None:
            self.training_seconds = max(1, round((self.ended - self.started) * self.rate))
        self.enter(secondary)

    def stream(self, host: str, attempt: int = 0) -> str:
        """The host's stream in CloudWatch Logs; each start of a job has its own."""
        return f"{self.name}/{host}-{int(self.created) + attempt}"

    def measure(self, lines: Iterable[str]) -> None:
        """Takes the metrics out of lines of log, as the request defines them."""
        for definition in self.request["AlgorithmSpecification"].get("MetricDefinitions", []):
            for line in lines:
                if found := re.search(definition["Regex"], line):
                    self.metrics[definition["Name"]] = float(found[1])

    def warm_pool(self) -> dict[str, Any]:
        """What is left of the machines after the end; seconds are told when they are gone."""
        keep = self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds", 0)
        if not keep or self.training_seconds is None or self.ended is None:
            return {}
        if self.reason and not self.reason.startswith(("AlgorithmError", "ClientError")):
            return {}  # after an error of SageMaker's own, nothing is kept
        if (time.time() - self.ended) * self.rate < keep:
            return {"Status": "Available"}
        return {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": keep}

    def described(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer."""
        self.looks += self.secondary == "Training"
        spot = self.request.get("EnableManagedSpotTraining", False)
        directory = f"{self.request['OutputDataConfig']['S3OutputPath']}/{self.name}/output"
        times = {
            "CreationTime": self.created,
            "TrainingStartTime": self.started,
            "TrainingEndTime": self.ended,
            "LastModifiedTime": self.transitions[-1]["StartTime"],
        }
        description: dict[str, Any] = {
            **{name: value for name, value in self.request.items() if name != "Tags"},
            **{name: at for name, at in times.items() if at is not None},
            "TrainingJobArn": self.arn,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
            "SecondaryStatusTransitions": self.transitions,
            "ModelArtifacts": {"S3ModelArtifacts": f"{directory}/model.tar.gz"},
        }
        if self.instance and "InstancePreferences" in self.request["ResourceConfig"]:
            description["ResourceConfig"] = {
                **self.request["ResourceConfig"],
                "SelectedInstanceType": self.instance,
                "SelectedInstanceCount": self.hosts,
            }
        if self.reason is not None:
            description["FailureReason"] = self.reason
        if self.ended is not None:
            description["FinalMetricDataList"] = [
                {"MetricName": name, "Value": value, "Timestamp": self.ended}
                for name, value in self.metrics.items()
            ]
            if self.training_seconds is not None:
                description["TrainingTimeInSeconds"] = self.training_seconds
                share = SPOT_SHARE if spot else 1
                description["BillableTimeInSeconds"] = round(self.training_seconds * share)
            if pool := self.warm_pool():
                description["WarmPoolStatus"] = pool
        return description


Run = Callable[[Job], None]


class SageMaker:
    """The operations on training jobs that sm-nanogpt calls."""

    def __init__(self, run: Run, rate: float = 1.0) -> None:
        self.run, self.rate = run, rate
        self.jobs: dict[str, Job] = {}
        # Instances by use; of the others 20.
        self.quota = {"ml.g6.48xlarge for training job usage": 0}
        self.search_lag = 0.0  # seconds of ours until Search finds a job
        self.exhausted: set[str] = set()  # the types of which no machine is free
        self.next_script: dict[str, Any] = {}

    def call(self, operation: str, body: dict[str, Any]) -> Any:
        handler = getattr(self, operation, None)
        if handler is None:
            raise Refusal("UnknownOperationException", operation)
        return handler(body)

    def CreateTrainingJob(self, body: dict[str, Any]) -> Any:
        validate(body)
        self.check(body)
        log = sorted(self.next_script.get("log", []))
        job = Job(body, self.rate, script=self.next_script, unwritten=log)
        if self.jobs.setdefault(job.name, job) is not job:
            raise Refusal(
                "ResourceInUse",
                "Training job names must be unique within an AWS account and region, and a training"
                f" job with this name already exists ({job.arn})",
            )
        job.enter("Starting")
        write_script(job)  # lines dated in the past can be read as soon as the job is there
        threading.Thread(target=self.start, args=(job,), daemon=True).start()
        return {"TrainingJobArn": job.arn}

    def start(self, job: Job) -> None:
        """Runs a job on its first type that has capacity. Without any, a job is pending for a time
        if one of its types is accelerated, and then it fails."""
        waits = any(instance.startswith(ACCELERATED) for instance in job.instances)
        longest = job.request["StoppingCondition"].get("MaxPendingTimeInSeconds", LONGEST_PENDING)
        while not job.stopping.is_set():
            free = [instance for instance in job.instances if instance not in self.exhausted]
            if free:
                job.instance = free[0]
                if job.secondary == "Pending":
                    job.enter("Starting")
                return self.run(job)
            if not waits or (time.time() - job.created) * self.rate > longest:
                return job.end("Failed", CAPACITY_ERROR)
            if job.secondary != "Pending":
                job.enter("Pending")
            job.stopping.wait(0.05)
        return job.end("Stopped")

    def check(self, body: dict[str, Any]) -> None:
        """What AWS refuses of requests that are well formed."""
        resources, stopping = body["ResourceConfig"], body["StoppingCondition"]
        if body.get("EnableManagedSpotTraining"):
            if stopping.get("MaxWaitTimeInSeconds", 0) < stopping["MaxRuntimeInSeconds"]:
                raise invalid(
                    "MaxWaitTimeInSeconds above 0 and greater or equal to MaxRuntimeInSeconds is"
                    " required when EnableManagedSpotTraining is true"
                )
            if resources.get("KeepAlivePeriodInSeconds"):
                raise invalid("Managed Spot Training does not support KeepAlivePeriodInSeconds")
        elif "MaxWaitTimeInSeconds" in stopping:
            raise invalid("MaxWaitTimeInSeconds requires EnableManagedSpotTraining")
        check_instances(body)
        for use in Job(body).uses:
            self.check_quota(use, resources["InstanceCount"])
        check_role(body)

    def check_quota(self, use: str, count: int) -> None:
        limit = self.quota.get(use, 20)
        used = sum(job.hosts for job in self.jobs.values() if job.ended is None and use in job.uses)
        if used + count > limit:
            raise Refusal(
                "ResourceLimitExceeded",
                f"The account-level service limit '{use}' is {limit} Instances, with current"
                f" utilization of {used} Instances and a request delta of {count} Instances. Please"
                " use AWS Service Quotas to request an increase for this quota. If AWS Service"
                " Quotas is not available, contact AWS support to request an increase for this"
                " quota.",
            )

    def job(self, body: dict[str, Any]) -> Job:
        if body["TrainingJobName"] not in self.jobs:
            raise invalid("Requested resource not found.")
        return self.jobs[body["TrainingJobName"]]

    def DescribeTrainingJob(self, body: dict[str, Any]) -> Any:
        return self.job(body).described()

    def StopTrainingJob(self, body: dict[str, Any]) -> Any:
        job = self.job(body)
        if job.status not in ("InProgress", "Stopping"):
            raise invalid(
                f"The request was rejected because the training job is in status {job.status}."
            )
        job.stop()
        return {}

    def DeleteTrainingJob(self, body: dict[str, Any]) -> Any:
        job = self.job(body)
        if job.status in ("InProgress", "Stopping") or job.warm_pool().get("Status") == "Available":
            raise invalid(f"The training job is in status {job.status}, or has a warm pool.")
        del self.jobs[job.name]
        return {}

    def Search(self, body: dict[str, Any]) -> Any:
        objects_wanted = {
            f["Name"].removeprefix("Tags."): f["Value"] for f in body["SearchExpression"]["Filters"]
        }
        found = [
            job
            for job in sorted(self.jobs.values(), key=lambda job: -job.created)
            if time.time() > job.created + self.search_lag
            and objects_wanted.items() <= searchable(job).items()
        ]
        first = int(body.get("NextToken", 0))
        page = found[first : first + PAGE]
        answer: dict[str, Any] = {
            "Results": [{"TrainingJob": {**job.described(), "Tags": job.tags}} for job in page]
        }
        if first + PAGE < len(found):
            answer["NextToken"] = str(first + PAGE)
        return answer


def searchable(job: Job) -> dict[str, str]:
    """What Search finds a job by: its tags, and its name."""
    tags = {tag["Key"]: tag["Value"] for tag in job.tags}
    return {**tags, "TrainingJobName": job.name}


# -- refusals --------------------------------------------------------------------------------------


def invalid(message: str) -> Refusal:
    return Refusal("ValidationException", message)


def validate(body: dict[str, Any]) -> None:
    """Holds a CreateTrainingJob request against the limits that AWS publishes for its parts."""
    service = botocore.session.get_session().get_service_model("sagemaker")
    problems: list[str] = []
    look(service.operation_model("CreateTrainingJob").input_shape, body, "", problems)
    if problems:
        n = len(problems)
        found = f"{n} validation error{'s' * (n > 1)} detected: "
        raise invalid(found + "; ".join(problems))


def look(shape: Shape | None, value: Any, path: str, problems: list[str]) -> None:
    """Adds what is wrong with a value of that shape."""
    assert shape is not None
    if isinstance(shape, StructureShape):
        for name, member in shape.members.items():
            if name in value:
                look(member, value[name], f"{path}.{name[0].lower()}{name[1:]}", problems)
    elif isinstance(shape, ListShape):
        for item in value:
            look(shape.member, item, f"{path}.member", problems)
    elif isinstance(shape, MapShape):
        for key, item in value.items():
            look(shape.key, key, f"{path}.key", problems)
            look(shape.value, item, f"{path}.{key}", problems)
    limits, size = shape.metadata, value if isinstance(value, int | float) else len(value)
    measure = "value" if isinstance(value, int | float) else "length"
    failed = f"Value '{value}' at '{path.lstrip('.')}' failed to satisfy constraint: Member must"
    if "min" in limits and size < limits["min"]:
        problems.append(f"{failed} have {measure} greater than or equal to {limits['min']}")
    if "max" in limits and size > limits["max"]:
        problems.append(f"{failed} have {measure} less than or equal to {limits['max']}")
    if "enum" in limits and value not in limits["enum"]:
        problems.append(f"{failed} satisfy enum value set: {limits['enum']}")
    # The patterns are Java's, which know classes as \p{L}.
    if "pattern" in limits and not regex.fullmatch(limits["pattern"], value):
        problems.append(f"{failed} satisfy regular expression pattern: {limits['pattern']}")


def check_instances(body: dict[str, Any]) -> None:
    """A job has one instance type, or a list of preferences. That each of those may have a count of
    its own is left out, as no request here does that."""
    resources = body["ResourceConfig"]
    preferences = resources.get("InstancePreferences", [])
    types = [each["InstanceType"] for each in preferences]
    if ("InstanceType" in resources) == bool(preferences):
        raise invalid("Exactly one of InstanceType and InstancePreferences must be specified")
    if preferences and body.get("EnableManagedSpotTraining"):
        raise invalid("InstancePreferences is not supported with EnableManagedSpotTraining")
    if len(set(types)) < len(types):
        raise invalid("An instance type can appear only once in InstancePreferences")
    if "InstanceCount" not in resources or any("InstanceCount" in each for each in preferences):
        raise invalid("InstanceCount must be specified once for the job")
    if read_only := [name for name in resources if name.startswith("Selected")]:
        raise invalid(f"{', '.join(read_only)}: read-only")


def check_role(body: dict[str, Any]) -> None:
    """SageMaker looks at input and keys as the role before it accepts a job."""
    arn, role = body["RoleArn"], role_of(body["RoleArn"])
    job = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{body['TrainingJobName']}"
    origin: dict[str, str | list[str]] = {"aws:SourceAccount": ACCOUNT, "aws:SourceArn": job}
    if role is None or not trusts(role, "sagemaker.amazonaws.com", origin):
        raise invalid(
            f"Could not assume role {arn}. Please ensure that the role exists and allows principal"
            " 'sagemaker.amazonaws.com' to assume the role."
        )
    for channel in body.get("InputDataConfig", []):
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        bucket, prefix = split(uri)
        may = allowed(
            policies_of(role), "s3:ListBucket", f"arn:aws:s3:::{bucket}", {"s3:prefix": prefix}
        )
        if not may or not any_object(bucket, prefix):
            raise invalid(
                f'No S3 objects found under S3 URL "{uri}" given in input data source. Please'
                f" ensure that the bucket exists in the selected region ({REGION}), that objects"
                f' exist under that S3 prefix, and that the role "{arn}" has "s3:ListBucket"'
                f' permissions on bucket "{bucket}".'
            )


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of s3://bucket/key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def any_object(bucket: str, prefix: str) -> bool:
    found = s3_backends[ACCOUNT]["aws"].buckets.get(bucket)
    if found is None or found.region_name != REGION:
        return False
    return any(key.startswith(prefix) for key in found.keys)


# -- jobs that only seem to run --------------------------------------------------------------------

STAGES = (("Starting", 0.2), ("Downloading", 0.2), ("Training", math.inf), ("Uploading", 0.2))
# That many end the training, and no clock does: a test that waits for the end waits little, and one
# that needs a running job has it on a slow machine too.
LOOKS = 5.0
FAILING_SECONDS = 0.2  # of the training of a job that is to fail
STOPPING_SECONDS = 0.2
LOG_DELAY_SECONDS = 0.3


def write_log(job: Job, host: str, at: float, line: str) -> None:
    logs = logs_backends[ACCOUNT][REGION]
    if LOG_GROUP not in logs.groups:
        logs.create_log_group(LOG_GROUP, {})
    if job.stream(host) not in logs.groups[LOG_GROUP].streams:
        logs.create_log_stream(LOG_GROUP, job.stream(host))
    event = {"timestamp": int(at * 1000), "message": line}
    logs.put_log_events(LOG_GROUP, job.stream(host), [event])
    job.measure([line])


def write_script(job: Job) -> None:
    """Writes the lines of the script's log whose time has come."""
    while job.unwritten and time.time() > job.created + job.unwritten[0][0] + LOG_DELAY_SECONDS:
        after, host, line = job.unwritten.pop(0)
        write_log(job, host, job.created + after, line)


def scripted(job: Job) -> None:
    """A Run by the job's script: `reason` lets it fail after its training, `log` holds
    (seconds after its creation, host, line)."""
    job.training_seconds = 100

    def live() -> None:
        for stage, seconds in STAGES:
            if stage != job.secondary:
                job.enter(stage)
            fails = stage == "Training" and "reason" in job.script
            end = time.time() + (FAILING_SECONDS if fails else seconds)
            while time.time() < end and (job.looks < LOOKS or job.unwritten):
                if job.stopping.wait(0.02):
                    break
                write_script(job)
            if job.stopping.is_set():
                time.sleep(STOPPING_SECONDS)
                return job.end("Stopped")
            if fails:
                return job.end("Failed", job.script["reason"])
        job.metrics = {"val_loss": 1.5, "step": 1000.0}
        return job.end("Completed")

    live()
    while job.unwritten:
        write_script(job)
        time.sleep(0.02)
