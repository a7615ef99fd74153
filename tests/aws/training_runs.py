"""Runs the jobs that SageMaker is sent: the request's data from S3, the real toolkit in containers,
and what it leaves back to S3. All that a job does with S3, it does as its role.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from access import SAGEMAKER, Access, Refusal, principal_of
from botocore.exceptions import ClientError
from container import Cluster, Host
from forked_hosts import ForkedHosts
from sagemaker_service import LOG_GROUP, REGION, Job, split

if TYPE_CHECKING:
    from emulator import Emulator

START_SECONDS = 20.0  # for machines, and again for data and image
GRACE_SECONDS = 120.0  # between SIGTERM and SIGKILL
DOWNLOAD_FAILED = "ClientError: Data download failed:"
SYNC_FAILED = "ClientError: Checkpoint sync failed:"  # our words, as AWS's are not known
UPLOAD_GONE = "InternalServerError: We encountered an internal error. Please try again."


class JobFailed(Exception):
    """A job cannot go on; the text is its FailureReason."""


class Closed(Exception):
    """The emulator ends, and its jobs with it."""


class Containers:
    """A Run that really trains. directory takes what the hosts need of the disk.

    A host shows `gpus` GPUs, whatever the instance type; a rank is started for each. `rate` is how
    many of SageMaker's seconds go by in one of ours. Each rank has `threads`, or as many as it
    takes where that is None; a GiB of the volume is `gib` bytes, or without limit. With `forked`,
    the hosts are no containers.
    """

    def __init__(
        self,
        directory: Path,
        gpus: int = 2,
        rate: float = 1.0,
        threads: int | None = None,
        gib: int | None = None,
        forked: bool = False,
    ) -> None:
        self.directory, self.gpus, self.rate = directory, gpus, rate
        self.threads, self.gib, self.forked = threads, gib, forked
        self.attempts: dict[str, Attempt] = {}  # by job, the one that runs
        self.at_work: list[threading.Thread] = []
        self.closed = threading.Event()

    def attach(self, emulator: Emulator) -> None:
        self.emulator = emulator

    def __call__(self, job: Job) -> None:
        self.at_work.append(threading.current_thread())
        try:
            state, number = "Interrupted", 0
            while state == "Interrupted" and not job.stopping.is_set():
                if number:
                    job.enter("Starting")
                state = self.attempt(job, number)
                number += 1
            if job.ended is None:
                job.end("Stopped")
        except JobFailed as failure:
            job.end("Failed", str(failure))
        except Closed:
            pass
        except BaseException as error:
            job.end("Failed", f"InternalServerError: {error!r}")
            raise

    def attempt(self, job: Job, number: int) -> str:
        """Runs a job once, on new machines; returns the state that it ends in."""
        job.stopping.wait(START_SECONDS / self.rate)
        with contextlib.closing(Attempt(self, job, number)) as attempt:
            self.attempts[job.name] = attempt
            job.enter("Downloading")
            attempt.download()
            job.stopping.wait(START_SECONDS / self.rate)
            job.enter("Training")
            state = attempt.train()
            attempt.send_checkpoints(last=True)
            job.enter("Interrupted" if state == "Interrupted" else "Uploading")
            if state == "Interrupted":
                return state
            attempt.upload(model=state != "Failed")
            job.end(state, attempt.failure() if state == "Failed" else None)
            return state

    def close(self) -> None:
        """Ends all jobs, at once."""
        self.closed.set()
        for thread in self.at_work:
            thread.join()


class Attempt:
    """One start of a job on machines of its own."""

    def __init__(self, containers: Containers, job: Job, number: int) -> None:
        self.containers = containers
        self.job, self.number, self.request = job, number, job.request
        self.directory = containers.directory / f"{job.name}-{number}"
        role = containers.emulator.url + f"/credentials/{job.name}"
        containers.emulator.credentials[f"/credentials/{job.name}"] = self.credentials
        self.emulator = containers.emulator
        self.sts = boto3.client(
            "sts",
            region_name=REGION,
            endpoint_url=containers.emulator.url,
            aws_access_key_id=SAGEMAKER,
            aws_secret_access_key=SAGEMAKER,
        )
        keys = self.credentials()
        as_role = boto3.Session(
            keys["AccessKeyId"], keys["SecretAccessKey"], keys["Token"], region_name=REGION
        )
        self.s3 = as_role.client("s3", endpoint_url=containers.emulator.url)
        self.logs = as_role.client("logs", endpoint_url=containers.emulator.url)
        self.role = principal_of(keys["AccessKeyId"], "sts")
        self.streams: set[str] = set()
        gib, size = containers.gib, self.request["ResourceConfig"]["VolumeSizeInGB"]
        port = containers.emulator.url.rpartition(":")[2]
        cluster = ForkedHosts if containers.forked else Cluster
        self.cluster = cluster(
            self.directory,
            job_name=job.name,
            hosts=job.hosts,
            gpus=containers.gpus,
            threads=containers.threads,
            volume=None if gib is None else gib * size,
            port=int(port),
            variables={
                "AWS_REGION": REGION,
                "TRAINING_JOB_ARN": job.arn,
                "AWS_ENDPOINT_URL": containers.emulator.url,
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": role,
                **self.request.get("Environment", {}),
            },
        )
        self.agents: list[Agent] = []
        self.read: dict[Host, int] = dict.fromkeys(self.cluster.hosts, 0)  # bytes of the logs
        self.servers: list[Any] = []

    def close(self) -> None:
        self.cluster.kill()
        for server in self.servers:
            server.shutdown()
            server.server_close()
        self.servers.clear()
        self.cluster.release()

    def credentials(self) -> dict[str, str]:
        """Of the job's role, as a container gets them."""
        answer = self.sts.assume_role(RoleArn=self.request["RoleArn"], RoleSessionName="SageMaker")
        keys = answer["Credentials"]
        return {
            "AccessKeyId": keys["AccessKeyId"],
            "SecretAccessKey": keys["SecretAccessKey"],
            "Token": keys["SessionToken"],
            "Expiration": keys["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def check(self, *accesses: Access) -> None:
        """What SageMaker does as the role with services that are not here."""
        try:
            self.emulator.judge(self.role, accesses)
        except Refusal as refusal:
            raise JobFailed(f"ClientError: {refusal}") from None

    # -- before ------------------------------------------------------------------------------------

    def download(self) -> None:
        """Pulls the image, as far as that can be seen, and lays out /opt/ml on all hosts."""
        self.check(*image_accesses(self.request["AlgorithmSpecification"]["TrainingImage"]))
        if key := self.request["ResourceConfig"].get("VolumeKmsKeyId"):
            self.check(
                Access("kms:DescribeKey", key),
                Access("kms:CreateGrant", key, {"kms:GrantIsForAWSResource": "true"}),
            )
        channels = {c["ChannelName"]: c["DataSource"] for c in self.request["InputDataConfig"]}
        for host in self.cluster.hosts:
            host.lay_out_ml(
                hosts=self.cluster.names,
                instance_type=self.job.instance or "",
                hyperparameters=self.request["HyperParameters"],
                channels=list(channels),
            )
        for name, source in channels.items():
            self.fetch(source["S3DataSource"]["S3Uri"], f"input/data/{name}")
        if "CheckpointConfig" in self.request:
            # Unlike a channel, all keys that begin so, whether or not the prefix ends a directory:
            # https://github.com/syne-tune/syne-tune/pull/363
            uri = self.request["CheckpointConfig"]["S3Uri"]
            self.fetch(uri, "checkpoints", above=split(uri)[1])
            self.agents = [Agent(self.s3, host, uri) for host in self.cluster.hosts]
        script = json.loads(self.request["HyperParameters"]["sagemaker_submit_directory"])
        if self.containers.forked and script.startswith("s3://"):  # else the toolkit does it
            self.fetch(script, "code")

    def fetch(self, uri: str, directory: str, above: str | None = None) -> None:
        """Copies all keys that begin so to a directory below each host's /opt/ml, named by what
        follows `above`, or the prefix's directory."""
        bucket, prefix = split(uri)
        above = prefix.rpartition("/")[0] if above is None else above
        try:
            pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            keys = [o["Key"] for page in pages for o in page.get("Contents", [])]
            for key in keys:
                if key.endswith("/"):  # what the console makes for a directory
                    continue
                first, *others = [
                    host.ml / directory / key.removeprefix(above).lstrip("/")
                    for host in self.cluster.hosts
                ]
                first.parent.mkdir(parents=True, exist_ok=True)
                body = self.s3.get_object(Bucket=bucket, Key=key)["Body"]
                with first.open("wb") as file:
                    shutil.copyfileobj(body, file)
                for other in others:
                    other.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(first, other)
        except ClientError as error:
            raise JobFailed(f"{DOWNLOAD_FAILED}{error.response['Error']['Message']}") from None
        except OSError as error:
            raise JobFailed(f"{DOWNLOAD_FAILED}{error.strerror}") from None

    # -- meanwhile ---------------------------------------------------------------------------------

    def train(self) -> str:
        """Runs the containers to their end; returns the state that this leads to."""
        if self.job.stopping.is_set():
            return "Stopped"
        self.cluster.start()
        # AWS as the container sees it, at the address that it has outside too.
        for listening in self.cluster.sockets:
            with listening:  # the server has a descriptor of its own
                self.servers.append(self.emulator.serve(listening.fileno()))
        state, kill_at, last_beat = "", math.inf, time.monotonic()
        while True:
            now = time.monotonic()
            self.job.ran += (now - last_beat) * self.containers.rate
            last_beat = now
            if self.containers.closed.is_set():
                raise Closed
            if not state and (state := self.order()):
                self.cluster.signal(signal.SIGTERM)
                kill_at = self.job.ran + GRACE_SECONDS
            self.send_logs()
            self.send_checkpoints()
            codes = self.cluster.poll()
            if None not in codes or self.job.ran > kill_at:
                break
            if any(codes) and not state:  # as one host fails, the others are ended
                state, kill_at = "Failed", self.job.ran + 2 * self.containers.rate
            time.sleep(0.1)
        self.cluster.kill()
        self.send_logs(last=True)
        return state or ("Failed" if any(codes) else "Completed")

    def order(self) -> str:
        """The state that somebody or something wants the job to end in now; else ''."""
        job, condition = self.job, self.request["StoppingCondition"]
        if job.stopping.is_set():
            return "Stopped"
        if job.interrupting.is_set():
            job.interrupting.clear()
            return "Interrupted"
        waited = (time.time() - job.created) * self.containers.rate
        if waited > condition.get("MaxWaitTimeInSeconds", math.inf):
            return "MaxWaitTimeExceeded"
        if job.ran > condition["MaxRuntimeInSeconds"]:
            return "MaxRuntimeExceeded"
        return ""

    def send_logs(self, last: bool = False) -> None:
        """Puts what the hosts have printed since the last call into CloudWatch Logs."""
        for host in self.cluster.hosts:
            with (host.directory / "log").open("rb") as log:
                log.seek(self.read[host])
                new = log.read()
            whole = new if last else new[: new.rfind(b"\n") + 1]
            self.read[host] += len(whole)
            lines = [line for line in whole.decode(errors="replace").split("\n") if line.strip()]
            if lines:
                self.job.measure(lines)
                with contextlib.suppress(ClientError):  # the job goes on without its log
                    self.write_log(self.job.stream(host.name, self.number), lines)

    def write_log(self, stream: str, lines: list[str]) -> None:
        if stream not in self.streams:
            self.streams.add(stream)
            with contextlib.suppress(self.logs.exceptions.ResourceAlreadyExistsException):
                self.logs.create_log_group(logGroupName=LOG_GROUP)
            self.logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=stream)
            self.logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
        now = int(time.time() * 1000)
        events = [{"timestamp": now, "message": line} for line in lines]
        self.logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)

    def send_checkpoints(self, last: bool = False) -> None:
        """What becomes of a job whose role may not do that, AWS does not say; here it fails."""
        try:
            for agent in self.agents:
                agent.finish() if last else next(agent.work)
        except ClientError as error:
            raise JobFailed(f"{SYNC_FAILED}{error.response['Error']['Message']}") from None

    # -- afterwards --------------------------------------------------------------------------------

    def upload(self, model: bool) -> None:
        """Puts model.tar.gz and output.tar.gz of all hosts to S3."""
        bucket, prefix = split(self.request["OutputDataConfig"]["S3OutputPath"])
        directories = {"model.tar.gz": "model"} if model else {}
        for name, directory in {**directories, "output.tar.gz": "output/data"}.items():
            archive = self.directory / name
            with tarfile.open(archive, "w:gz") as tar:
                for host in self.cluster.hosts:
                    for path in sorted((host.ml / directory).iterdir()):
                        tar.add(path, path.name)
            target = f"{prefix}/{self.job.name}/output/{name}"
            encryption = {}
            if key := self.request["OutputDataConfig"].get("KmsKeyId"):
                self.check(Access("kms:Encrypt", key))
                encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}
            self.s3.upload_file(str(archive), bucket, target, ExtraArgs=encryption)
        namespace = {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}
        with contextlib.suppress(JobFailed):  # the job goes on without its metrics
            self.check(Access("cloudwatch:PutMetricData", "*", namespace))

    def failure(self) -> str:
        """FailureReason: what the first host to fail left in /opt/ml/output/failure."""
        failed = self.cluster.failed_first
        assert failed is not None
        return f"AlgorithmError: {failed.failure}, exit code: {failed.status}"


class Agent:
    """Copies what is new in /opt/ml/checkpoints of one host to S3, and deletes there what is gone.

    https://docs.aws.amazon.com/sagemaker/latest/dg/model-checkpoints.html has it so. By AWS's
    XGBoost container (checkpointing.py), the marker `.sagemaker-uploading` lies beside a file that
    is being uploaded, later with `.sagemaker-uploaded`; a file must not be deleted in between; and
    names in `.sagemaker-ignore` are left out. What is not known is as bad as it can be: a deletion
    in between fails the job, and what was restored is uploaded again at the end, host by host.
    """

    def __init__(self, s3: Any, host: Host, uri: str) -> None:
        self.s3, self.directory = s3, host.checkpoints
        self.bucket, self.prefix = split(uri)
        self.restored = self.files()
        self.sent = dict(self.restored)  # what is in S3
        self.work = self.uploads()

    def files(self) -> dict[Path, tuple[int, int]]:
        """Size and time in ns of each."""
        found = {}
        for path in sorted(self.directory.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if path.is_file() and ".sagemaker-" not in path.name:
                    found[path] = (stat.st_size, stat.st_mtime_ns)
        return found

    def key(self, path: Path) -> str:
        return f"{self.prefix.rstrip('/')}/{path.relative_to(self.directory)}"

    def news(self) -> dict[Path, tuple[int, int]]:
        """The files to upload; those that are gone are deleted in S3."""
        files = self.files()
        for path in [path for path in self.sent if path not in files]:
            self.s3.delete_object(Bucket=self.bucket, Key=self.key(path))
            del self.sent[path]
            for kind in ("uploading", "uploaded"):
                marker(path, kind).unlink(missing_ok=True)
        return {path: state for path, state in files.items() if self.sent.get(path) != state}

    def put(self, path: Path, state: tuple[int, int]) -> None:
        self.s3.put_object(Bucket=self.bucket, Key=self.key(path), Body=path.read_bytes())
        self.sent[path] = state

    def uploads(self) -> Iterator[None]:
        """One file after another; the script runs on wherever this yields."""
        while True:
            oldest = sorted(self.news().items(), key=lambda item: item[1][1])[:1]
            for path, state in oldest:
                marker(path, "uploaded").unlink(missing_ok=True)
                marker(path, "uploading").touch()
                yield  # the script may have looked for the marker just before
                if not path.exists():
                    marker(path, "uploading").unlink()
                    continue
                yield
                try:
                    self.put(path, state)
                except FileNotFoundError:
                    raise JobFailed(UPLOAD_GONE) from None
                marker(path, "uploaded").touch()
            yield

    def finish(self) -> None:
        """Uploads what is left after the end of the container."""
        for path, state in self.files().items():
            if self.restored.get(path) == state:
                del self.sent[path]
        for path, state in self.news().items():
            self.put(path, state)


def marker(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.sagemaker-{kind}")


def image_accesses(image: str) -> list[Access]:
    """What pulling an image of ECR takes."""
    registry, _, name = image.partition("/")
    account, region = registry.split(".")[0], registry.split(".")[3]
    repository = f"arn:aws:ecr:{region}:{account}:repository/{name.split(':')[0]}"
    actions = ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer")
    login = Access("ecr:GetAuthorizationToken", "*")
    return [login, *(Access(f"ecr:{action}", repository) for action in actions)]
