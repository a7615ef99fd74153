"""The first day on a real AWS account: steps that prove sm-nanogpt there, for about 6 USD.

    python tests/aws/first_day.py            # every step that has not passed yet
    python tests/aws/first_day.py 0-8 16     # what needs no GPU quota

docs/first-day.md says what each step proves and what to look at. The script stops at the first
surprise. DIRECTORY (first-day/) holds its state, the launcher's home, and transcript.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

BUDGET = 15.0  # USD
ALLOWANCE = 600  # seconds billed besides the run, on which --max-cost counts
NAME = "sm-nanogpt-first-day"  # of the stack and of the IAM user
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
JOB_ID = re.compile(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}(?:-\d+)?")
CHECKPOINTS = re.compile(r"checkpoint-\d+\.safetensors|metrics[\w.-]*\.jsonl")

M5 = ("--instance", "ml.m5.xlarge")
TWO = ("--instance-count", "2")
TORCHRUN = ("--launcher", "torchrun")
# On the emulator, whose hosts have no GPU and one slow core, each job trains this.
EMULATED = (
    "n_layer=1 n_head=2 n_embd=32 block_size=32 batch_size=8 max_steps=10 log_interval=5"
    " eval_interval=5 eval_tokens=1024 sample_length=0 device=cpu precision=float32"
)


class Surprise(Exception):
    """A fact is not what it should be."""


@dataclass(frozen=True)
class Ended:
    """A job that is over: DescribeTrainingJob's answer, `status --json`, `logs --raw`."""

    raw: dict[str, Any]
    status: dict[str, Any]
    log: str


def execute(arguments: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Runs sm-nanogpt; returns its exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", "from sm_nanogpt.launcher.cli import main; main()", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )
    return done.returncode, done.stdout, done.stderr


def read_state(file: Path) -> dict[str, Any]:
    """What earlier runs kept. Raises ValueError if the file is damaged."""
    state = json.loads(file.read_bytes())
    if not isinstance(state, dict) or {"place", "passed", "jobs"} - state.keys():
        raise ValueError("it lacks a place, passed steps or jobs")
    return state


class Day:
    """What the steps share: commands, clients, checks, and what is kept in DIRECTORY."""

    def __init__(
        self, directory: Path, emulator: bool = False, deploy: str = "", text: str = ""
    ) -> None:
        self.directory = directory.absolute()
        self.emulator = emulator
        self.deploy = deploy
        self.upload_arguments = [str(Path(text).absolute())] if text else []
        self.directory.mkdir(parents=True, exist_ok=True)
        self.poll = 0.3 if emulator else 5.0
        self.number = -1  # of the step that runs
        try:
            self.session = boto3.Session(region_name=os.environ.get("AWS_REGION"))
            if not self.session.region_name:
                raise SystemExit("error: set AWS_REGION")
            identity = self.client("sts").get_caller_identity()
        except (BotoCoreError, ClientError) as error:
            raise SystemExit(f"error: {error}") from None
        self.account, self.who = identity["Account"], identity["Arn"]
        self.file = self.directory / "state.json"
        account_text = f"account {self.account}, {self.session.region_name}"
        self.state: dict[str, Any] = {"place": account_text, "passed": {}, "jobs": {}}
        self.damage = ""  # why the file could not be read
        if self.file.exists():
            try:
                self.state = read_state(self.file)
            except ValueError as error:
                self.damage = str(error)
                if self.transcript.exists():
                    self.add_jobs(self.transcript.read_text("utf-8", "replace"))
        if self.state["place"] != account_text:  # its jobs may run there
            raise SystemExit(
                f"error: {self.directory} is of {self.state['place']}, not {account_text}"
            )
        self.environment = {}
        for name, value in os.environ.items():
            if not name.startswith("SM_NANOGPT_"):
                self.environment[name] = value
        self.environment |= {
            "AWS_REGION": self.session.region_name,
            "SM_NANOGPT_HOME": str(self.directory / "home"),
            "SM_NANOGPT_STACK": NAME,
            "SM_NANOGPT_MAX_COST": "3.3",
        }

    def client(self, service: str) -> Any:
        return self.session.client(service)

    def save(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1))
        new.replace(self.file)

    def add_jobs(self, text: str) -> None:
        """Adds the jobs that commands named; a sweep is none."""
        ids = set(JOB_ID.findall(text))
        sweeps = {job_id.rpartition("-")[0] for job_id in ids}
        for job_id in sorted(ids - sweeps):
            self.state["jobs"].setdefault(job_id, {"step": self.number})

    @property
    def transcript(self) -> Path:
        return self.directory / "transcript.txt"

    def write(self, text: str) -> None:
        """Adds lines to the transcript, which does not tell the account."""
        with self.transcript.open("a", encoding="utf-8") as file:
            print(text.rstrip("\n").replace(self.account, "ACCOUNT"), file=file)

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.write(text)

    def check(self, fact: str, holds: Any, instead: object = "") -> None:
        """Notes a fact that the step proves. Raises Surprise if it does not hold."""
        if not holds:
            raise Surprise(f"expected: {fact}; found: {instead or 'otherwise'}")
        self.say(f"  ok    {fact}")

    def note(self, text: str) -> None:
        self.say(f"  look  {text}")

    # -- commands ----------------------------------------------------------------------------------

    def sm(
        self, *arguments: str, code: int | None = 0, user: Mapping[str, str] | None = None
    ) -> str:
        """Runs a command that must end with this code, if any; returns its stdout."""
        self.write(f"$ {shlex.join(['sm-nanogpt', *arguments])}")
        ended, out, err = execute(arguments, user or self.environment)
        self.write(f"{err}{out}[exit code {ended}, {time.strftime('%H:%M:%S')}]")
        if arguments[0] == "launch":
            self.add_jobs(out + err)
            self.save()
        if code not in (None, ended):
            text = (err.strip().splitlines() or ["nothing"])[-1]
            raise Surprise(f"`sm-nanogpt {shlex.join(arguments)}` ended with {ended}: {text}")
        return out.strip()

    def json(self, *arguments: str) -> Any:
        return json.loads(self.sm(*arguments, "--json"))

    @property
    def text(self) -> str:
        """The URI of the text that all jobs train on."""
        if "text" not in self.state:
            self.state["text"] = self.sm("upload-data", *self.upload_arguments)
        return str(self.state["text"])

    @property
    def bucket(self) -> str:
        return str(self.state["stack"]["store"]).split("/")[2]

    def sets(self, *values: str) -> list[str]:
        return [word for value in values for word in ("--set", value)]

    def size(self, preset: str, *values: str) -> list[str]:
        """The options of a job that ends by itself."""
        if self.emulator:
            return self.sets(*EMULATED.split())
        options = ["--preset", preset] if preset else []
        return options + self.sets(*values)

    def endless(self) -> list[str]:
        """The options of a job that writes many checkpoints until something ends it."""
        if self.emulator:
            tiny = EMULATED.replace("max_steps=10 ", "").split()
            return self.sets(*tiny, "max_steps=1000000", "checkpoint_seconds=1")
        values = ("max_steps=1000000", "checkpoint_seconds=20")
        return ["--preset", "cpu", *self.sets(*values)]

    def launch(self, cost: float, *arguments: str, user: Mapping[str, str] | None = None) -> str:
        data = () if "--resume" in arguments or "--data" in arguments else ("--data", self.text)
        options = ("launch", "--detach", *arguments, *data, "--max-cost", f"{cost:g}")
        job_id = self.sm(*options, user=user)
        self.say(f"  job   {job_id}: {' '.join(arguments[:6])}")
        return job_id

    def describe(self, job_id: str) -> dict[str, Any] | None:
        """DescribeTrainingJob's answer; None if there is no such job."""
        try:
            return dict(self.client("sagemaker").describe_training_job(TrainingJobName=job_id))
        except ClientError as error:
            if "not found" in str(error):
                return None
            raise

    def ended(self, job_id: str, state: str = "Completed") -> Ended:
        """Waits for a job; checks its last state and what is billed; books its cost."""
        log = self.sm("logs", job_id, "--raw", "--follow")
        self.sm("wait", job_id, code=0 if state == "Completed" else 1)
        status, raw = self.json("status", job_id), self.describe(job_id)
        assert raw is not None
        self.book(job_id, status)
        seconds_in = defaultdict[str, float](float)
        for transition in raw["SecondaryStatusTransitions"]:
            if "EndTime" in transition:
                duration = transition["EndTime"] - transition["StartTime"]
                seconds_in[transition["Status"]] += duration.total_seconds()
        times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in seconds_in.items())
        booked = self.state["jobs"][job_id]
        self.note(f"{job_id[-6:]}: {times}; {booked['billed']} s billed, {booked['usd']:.4f} USD")
        self.check(f"it ends as {state}", raw["SecondaryStatus"] == state, self.why(raw))
        started = booked["billed"] - seconds_in["Training"]
        self.check(f"at most {ALLOWANCE} s are billed besides the run", started <= ALLOWANCE)
        return Ended(raw, status, log)

    def why(self, raw: Mapping[str, Any]) -> str:
        return f"{raw['SecondaryStatus']}: {raw.get('FailureReason', 'no reason')}"

    def book(self, job_id: str, status: Mapping[str, Any]) -> None:
        """Adds a job to what was spent: its billed seconds, at the price of instances and disks."""
        billed, usd = status["billable_seconds"] or 0, status["cost"] or 0.0
        self.state["jobs"][job_id] |= {"billed": billed, "usd": usd, "instance": status["instance"]}
        self.save()

    def spent(self, step: int | None = None) -> float:
        total = 0.0
        for job in self.state["jobs"].values():
            if step is None or job["step"] == step:
                total += job.get("usd", 0)
        return total

    def stop_all(self) -> None:
        """Stops and books what may still run, after a surprise or an interruption."""
        for file in self.directory.glob("home*/last-launched.json"):  # by one that was interrupted
            for launched in json.loads(file.read_text()):
                self.state["jobs"].setdefault(launched["job_id"], {"step": self.number})
        for job_id, job in self.state["jobs"].items():
            if "usd" in job:
                continue
            with contextlib.suppress(Surprise):
                self.sm("stop", job_id)
            try:
                self.book(job_id, self.json("status", job_id))
            except Surprise as surprise:
                with contextlib.suppress(BotoCoreError, ClientError):
                    if self.describe(job_id) is None:  # it was never made
                        self.book(job_id, {"billable_seconds": 0, "cost": 0, "instance": ""})
                        continue
                self.say(f"  LOOK  {job_id} may still run: {surprise}")

    # -- facts -------------------------------------------------------------------------------------

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        return list(self.json("metrics", job_id))

    def runs_on(self, job: Ended, hosts: int = 1, gpus: int = 0, launcher: str = "mpirun") -> None:
        machine = rf"{gpus} NVIDIA (A10G|L4)" if gpus and not self.emulator else r"\d+ CPU"
        pattern = rf"running on {hosts} hosts? x {machine} = .*\(launched by {launcher};"
        lines = [line for line in job.log.splitlines() if "running on " in line]
        fact = f"{launcher} starts one group on {hosts} x {gpus or 'no'} GPUs"
        self.check(fact, re.search(pattern, job.log), lines or "no such line in the log")

    def objects(self, prefix: str) -> dict[str, Any]:
        """What lies below a prefix of the store, by name; with sizes and times."""
        paginator = self.client("s3").get_paginator("list_objects_v2")
        objects = {}
        for page in paginator.paginate(Bucket=self.bucket, Prefix=f"nanogpt/{prefix}/"):
            for content in page.get("Contents", []):
                name = content["Key"].split("/", 3)[3]
                objects[name] = content
        return objects

    def watch(self, job_id: str, deleted: int) -> None:
        """Looks at a job's checkpoints in S3 until so many were deleted.

        Raises Surprise if the job ends before, or objects appear that are no checkpoints.
        """
        known_names = set[str]()
        deleted_names = set[str]()
        deadline = time.monotonic() + 1500
        while sum(name.startswith("checkpoint-") for name in deleted_names) < deleted:
            objects = self.objects(f"checkpoints/{job_id}")
            at = time.strftime("%H:%M:%S")
            for name in sorted(objects.keys() - known_names):
                self.write(f"{at} there: {name}, {objects[name]['Size']} bytes")
            for name in sorted(known_names - objects.keys() - deleted_names):
                self.write(f"{at} gone:  {name}")
            deleted_names |= known_names - objects.keys()
            known_names |= objects.keys()
            raw = self.describe(job_id) or {"SecondaryStatus": "gone"}
            is_running = raw.get("TrainingJobStatus") == "InProgress"
            if not is_running or time.monotonic() > deadline:
                fact = f"{deleted} checkpoints go from S3"
                raise Surprise(f"expected: {fact}; found: {self.why(raw)}")
            time.sleep(self.poll)
        strange = sorted(name for name in known_names if not CHECKPOINTS.fullmatch(name))
        self.check("nothing but checkpoints and metrics appears in S3", not strange, strange)
        self.check("what the script deletes goes from S3 too", deleted_names)

    def resumed(self, earlier: str, cost: float) -> Ended:
        """Resumes a stopped job for some steps; checks that its curve continues."""
        earlier_rows = self.metrics(earlier)
        step = self.json("status", earlier)["checkpoint_step"]
        last = step + (20 if self.emulator else 500)
        job_id = self.launch(cost, "--resume", earlier, "--set", f"max_steps={last}")
        restored = self.objects(f"checkpoints/{job_id}")
        job = self.ended(job_id)
        line = f"resumed from the checkpoint of step {step}"
        self.check(f"{line}, the newest in S3", re.search(rf"{line}\b", job.log))
        rows = self.metrics(job_id)
        first_rows = [row for row in earlier_rows if row["step"] <= step]
        n_rows = len(first_rows)
        self.check(f"its metrics begin with the {n_rows} rows before", rows[:n_rows] == first_rows)
        steps = [row["step"] for row in rows]
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
        has_no_gap = all(0 < gap <= steps[0] for gap in gaps) and steps[-1] == last
        self.check(f"and continue to step {last} without a gap", has_no_gap, steps)
        objects = self.objects(f"checkpoints/{job_id}")
        repeated = []
        for name in restored.keys() & objects.keys():
            old, new = restored[name], objects[name]
            if new["ETag"] == old["ETag"] and new["LastModified"] > old["LastModified"]:
                repeated.append(name)
        self.note(f"restored files that a host uploaded again: {', '.join(repeated) or 'none'}")
        self.note(f"left in S3: {', '.join(sorted(objects))}")
        return job


# -- the steps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    expected: float  # USD
    ceiling: float
    run: Callable[[Day], None]

    @property
    def title(self) -> str:
        return str(self.run.__doc__)


STEPS: list[Step] = []


def step(expected: float, ceiling: float) -> Callable[[Callable[[Day], None]], None]:
    """Makes a function the next step; its docstring is the title."""
    return lambda run: STEPS.append(Step(expected, ceiling, run))


def deploy(day: Day, *arguments: str) -> None:
    day.sm("infra", "deploy", "--yes", *shlex.split(day.deploy), *arguments)
    day.state["stack"] = day.json("infra", "show")
    for name in ("store", "role", "policy"):
        day.check(f"the stack has a {name}", day.state["stack"][name])


@step(0, 0)
def new_stack(day: Day) -> None:
    """The stack of its own"""
    deploy(day)


@step(0, 0)
def doctor(day: Day) -> None:
    """Doctor: role, price, quota"""
    for instance in ("ml.m5.xlarge", "ml.g5.xlarge", "ml.g6.xlarge", "ml.g5.12xlarge"):
        out = day.sm("doctor", "--no-train", "--instance", instance, "--json", code=None)
        findings = {finding["check"]: finding for finding in json.loads(out)}
        failed = {name for name in findings if findings[name]["result"] == "failure"}
        may_fail = set() if instance == "ml.m5.xlarge" else {"quota"}
        day.check(f"{instance}: no check fails but quotas of GPUs", failed <= may_fail, failed)
        for name in ("role", "price"):
            if name == "role" or not day.emulator:  # it has few prices
                finding = findings[name]
                day.check(f"{instance}: {name}", finding["result"] == "ok", finding["text"])
        for name in ("price", "quota"):
            day.note(f"{instance}: {findings[name]['text']}")


@step(0.04, 0.15)
def first_job(day: Day) -> None:
    """The first job"""
    job_id = day.launch(0.15, *M5, *day.size("quick"))
    job = day.ended(job_id)
    day.runs_on(job)
    rows = day.metrics(job_id)
    names = {metric["MetricName"] for metric in job.raw["FinalMetricDataList"]}
    day.check("SageMaker reads the metrics", names >= {"step", "val_loss"}, names)
    day.check("the loss falls", rows[-1]["train_loss"] < rows[0]["train_loss"])
    day.check(
        "the last row is of the last step",
        rows[-1]["step"] == job.status["hyperparameters"]["max_steps"],
    )
    artefacts = day.objects(f"jobs/{job_id}").keys()
    archives = {f"output/{name}.tar.gz" for name in ("model", "output")}
    day.check("model and output are in S3", archives <= artefacts, sorted(artefacts))
    sample = day.sm("fetch-and-sample", job_id, "--max-new-tokens", "200")
    day.check("the model writes text", len(sample) > 100, sample)
    day.state["loss"] = rows[-1]["val_loss"]
    for line in job.log.splitlines()[:3]:
        day.note(line)


@step(0.08, 0.20)
def checkpoints(day: Day) -> None:
    """Checkpoints in S3, stop, resume"""
    job_id = day.launch(0.15, *M5, *day.endless(), "--max-run", "900")
    day.watch(job_id, deleted=2)
    day.sm("stop", job_id)
    job = day.ended(job_id, "Stopped")
    day.note(f"SIGTERM reached the script: {'stopped by a signal' in job.log}")
    day.resumed(job_id, 0.2)


@step(0.15, 0.40)
def two_hosts(day: Day) -> None:
    """Two hosts, stop, resume"""
    job_id = day.launch(0.2, *M5, *TWO, *day.endless())
    day.watch(job_id, deleted=1)
    day.sm("stop", job_id)
    day.runs_on(day.ended(job_id, "Stopped"), hosts=2)
    day.runs_on(day.resumed(job_id, 0.4), hosts=2)


@step(0.06, 0.20)
def two_hosts_of_torchrun(day: Day) -> None:
    """Two hosts under torchrun"""
    job_id = day.launch(0.2, *M5, *TWO, *TORCHRUN, *day.size("cpu"))
    day.runs_on(day.ended(job_id), hosts=2, launcher="torchrun")


@step(0.12, 0.45)
def isolated_and_fast(day: Day) -> None:
    """No network; text and tokens by FastFile"""
    fast = ("--input-mode", "FastFile")
    isolated = day.launch(0.15, *M5, *day.size("quick"), "--network-isolation")
    text = day.launch(0.15, *M5, *day.size("quick"), *fast)
    arguments = (*day.upload_arguments, "--tokenizer", "bpe", "--vocab-size", "512")
    encoded = ("--data", day.sm("upload-data", *arguments))
    job = day.ended(isolated)
    day.check("it was isolated", job.raw["EnableNetworkIsolation"])
    tokens = day.launch(0.15, *M5, *day.size("quick"), *fast, *encoded)
    for job_id in (text, tokens):
        (channel,) = day.ended(job_id).raw["InputDataConfig"]
        day.check("it read by FastFile", channel["InputMode"] == "FastFile", channel)
    for job_id in (isolated, text):
        loss = day.metrics(job_id)[-1]["val_loss"]
        same = abs(loss - day.state.get("loss", loss)) < 0.02
        day.check("its loss is that of the first job", same, loss)


@contextlib.contextmanager
def launching_user(day: Day) -> Iterator[dict[str, str]]:
    """The environment of an IAM user with LauncherPolicy alone; deletes the user at the end."""
    iam = day.client("iam")
    remove_user(day)
    iam.create_user(UserName=NAME)
    try:
        iam.attach_user_policy(UserName=NAME, PolicyArn=day.state["stack"]["policy"])
        keys = iam.create_access_key(UserName=NAME)["AccessKey"]
        hidden = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN")
        yield {
            **{name: value for name, value in day.environment.items() if name not in hidden},
            "AWS_ACCESS_KEY_ID": keys["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": keys["SecretAccessKey"],
            "SM_NANOGPT_HOME": str(day.directory / "home-of-user"),
        }
    finally:
        remove_user(day)


def remove_user(day: Day) -> None:
    iam = day.client("iam")
    with contextlib.suppress(iam.exceptions.NoSuchEntityException):
        for key in iam.list_access_keys(UserName=NAME)["AccessKeyMetadata"]:
            iam.delete_access_key(UserName=NAME, AccessKeyId=key["AccessKeyId"])
        for policy in iam.list_attached_user_policies(UserName=NAME)["AttachedPolicies"]:
            iam.detach_user_policy(UserName=NAME, PolicyArn=policy["PolicyArn"])
        iam.delete_user(UserName=NAME)


@step(0.03, 0.15)
def least_privilege(day: Day) -> None:
    """A user with LauncherPolicy alone"""
    with launching_user(day) as user:
        for attempt in range(12):  # IAM takes some seconds to know the user everywhere
            with contextlib.suppress(Surprise):
                day.sm("jobs", user=user)
                break
            time.sleep(attempt and 10)
        as_user = boto3.Session(user["AWS_ACCESS_KEY_ID"], user["AWS_SECRET_ACCESS_KEY"])
        try:
            as_user.client("iam", region_name=user["AWS_REGION"]).list_users()
            answer = "they are listed"
        except ClientError as error:
            answer = error.response["Error"]["Code"]
        day.check("the user may not list users", answer.startswith("AccessDenied"), answer)
        job_id = day.launch(0.15, *M5, *day.endless(), user=user)
        latest = json.loads(day.sm("status", "latest", "--json", user=user))["job_id"]
        day.check("latest is the job just launched", latest == job_id, latest)
        listed = {job["job_id"] for job in json.loads(day.sm("jobs", "--json", user=user))}
        others = day.state["jobs"].keys() - {job_id}
        day.check("no job of another user is listed", not others & listed, listed)
        day.note(f"AWS's Search knows the job at once: {job_id in listed}")
        day.sm("stop", "latest", user=user)
        day.ended(job_id, "Stopped")
        day.sm("delete", job_id, "--yes", user=user)
        remaining = {**day.objects(f"jobs/{job_id}"), **day.objects(f"checkpoints/{job_id}")}
        day.check(
            "delete leaves nothing",
            not remaining and day.describe(job_id) is None,
            sorted(remaining),
        )


@step(0.15, 0.60)
def limits(day: Day) -> None:
    """Time limit, failure, sweep"""
    limit = "60" if day.emulator else "120"
    late = day.launch(0.15, *M5, *day.endless(), "--max-run", limit)
    fault = ("--environment", "NANOGPT_FAULT=0:5:raise")
    faulty = day.launch(0.15, *M5, *day.size("quick"), *fault)
    broken = day.ended(faulty, "Failed")
    reason = broken.status["failure_reason"]
    day.check("the reason is the script's", "NANOGPT_FAULT asked for this" in reason, reason)
    day.note(f"FailureReason of AWS: {broken.raw['FailureReason'][:200]!r}")
    late_raw = day.ended(late, "MaxRuntimeExceeded").raw
    day.note(f"left after the limit: {sorted(day.objects(f'checkpoints/{late}'))}")
    day.check("the limit is a stop", late_raw["TrainingJobStatus"] == "Stopped")
    sweep = ("--sweep", "learning_rate=0.01,0.02", "--parallel", "2", "--max-cost", "0.3")
    arguments = ("launch", *M5, *day.size("quick"), "--data", day.text, *sweep)
    group = day.sm(*arguments).splitlines()[0]
    for member in (1, 2):
        day.ended(f"{group}-{member}")
    ranking = day.sm("jobs", "--group", group)
    day.check("both are ranked", {"0.01", "0.02"} <= set(ranking.split()), ranking)


G5 = ("--instance", "ml.g5.xlarge")
BABY = ("baby", "max_steps=300")


def on_gpu(day: Day, job_id: str, hosts: int = 1, gpus: int = 1, launcher: str = "mpirun") -> Ended:
    """A job of `baby` on GPUs, whose log names them."""
    job = day.ended(job_id)
    day.runs_on(job, hosts=hosts, gpus=gpus, launcher=launcher)
    speed = job.status["metrics"].get("tokens_per_second", 0)
    day.note(f"{speed:,.0f} tokens/s; {job.log.count('ld.so')} lines of ld.so")
    return job


@step(0.25, 0.50)
def first_gpu(day: Day) -> None:
    """The first GPU"""
    on_gpu(day, day.launch(0.5, *G5, *day.size(*BABY)))


@step(0.25, 0.50)
def newest_image(day: Day) -> None:
    """The newest image"""
    newest = ("--pytorch-version", "2.14", *TORCHRUN)
    job_id = day.launch(0.5, *G5, *newest, *day.size(*BABY))
    job = on_gpu(day, job_id, launcher="torchrun")
    image = job.raw["AlgorithmSpecification"]["TrainingImage"]
    day.check("the image is of 2.14", ":2.14" in image, image)


@step(0.35, 1.00)
def spot_and_types(day: Day) -> None:
    """Spot capacity; a choice of types"""
    limits = ("--spot", "--max-wait", "7200", "--max-run", "600")
    spot = day.launch(0.5, *G5, *limits, *day.size(*BABY))
    types = day.launch(0.5, "--instance", "ml.g5.xlarge,ml.g6.xlarge", *day.size(*BABY))
    raw = on_gpu(day, spot).raw
    billed, trained = raw["BillableTimeInSeconds"], raw["TrainingTimeInSeconds"]
    day.check("spot is billed for no more than it ran", billed <= trained, (billed, trained))
    day.note(f"spot: {billed} s billed of {trained} s")
    chosen = on_gpu(day, types).status["instance"]
    day.check("status names the type it ran on", chosen in ("ml.g5.xlarge", "ml.g6.xlarge"), chosen)


@step(0.90, 1.60)
def two_gpu_hosts(day: Day) -> None:
    """Two hosts with a GPU each, under both launchers"""
    for launcher, arguments in (("mpirun", ()), ("torchrun", TORCHRUN)):
        job_id = day.launch(0.8, *G5, *TWO, *arguments, *day.size(*BABY))
        on_gpu(day, job_id, hosts=2, launcher=launcher)


@step(1.40, 2.40)
def default_command(day: Day) -> None:
    """The default command: four GPUs"""
    job_id = day.launch(2.4, "--instance", "ml.g5.12xlarge", *day.size(""))
    day.runs_on(day.ended(job_id), gpus=4)
    sample = day.sm("fetch-and-sample", job_id, "--max-new-tokens", "200")
    day.check("the model writes text", len(sample) > 100, sample)


@step(2.00, 3.30)
def two_large_hosts(day: Day) -> None:
    """Two hosts with four GPUs each"""
    job_id = day.launch(3.3, "--instance", "ml.g5.12xlarge", *TWO, *day.size(*BABY))
    on_gpu(day, job_id, hosts=2, gpus=4)


@step(0.05, 0.15)
def own_key(day: Day) -> None:
    """A KMS key of your own"""
    deploy(day, "--kms")
    key = day.state["stack"]["kms_key"]
    day.check("the stack has a key", key)
    job_id = day.launch(0.15, *M5, *day.size("quick"))
    raw = day.ended(job_id).raw
    encrypted = {
        raw["OutputDataConfig"].get("KmsKeyId"),
        raw["ResourceConfig"].get("VolumeKmsKeyId"),
    }
    day.check("the request names the key for output and disks", encrypted == {key}, encrypted)
    model = f"nanogpt/jobs/{job_id}/output/model.tar.gz"
    head = day.client("s3").head_object(Bucket=day.bucket, Key=model)
    day.check("the key encrypts the model", head.get("SSEKMSKeyId") == key, head.get("SSEKMSKeyId"))
    day.sm("fetch-and-sample", job_id, "--max-new-tokens", "20")


def empty_and_delete(s3: Any, bucket: str) -> None:
    with contextlib.suppress(s3.exceptions.NoSuchBucket):
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for content in page.get("Contents", []):
                s3.delete_object(Bucket=bucket, Key=content["Key"])
        s3.delete_bucket(Bucket=bucket)


@step(0, 0)
def nothing_left(day: Day) -> None:
    """Nothing is left"""
    day.stop_all()
    if jobs := [job_id for job_id in day.state["jobs"] if day.describe(job_id)]:
        day.sm("delete", "--yes", *jobs)
    remove_user(day)
    # Without a stack in the state, step 0 failed, or the state was lost.
    if "stack" not in day.state and (shown := day.sm("infra", "show", "--json", code=None)):
        day.state["stack"] = json.loads(shown)
    day.sm("infra", "destroy", "--yes")
    bucket = ""
    key = ""
    if "stack" in day.state:
        bucket = day.bucket
        key = (day.state["stack"]["kms_key"] or "").rpartition("/")[2]
    s3 = day.client("s3")
    kms = day.client("kms")
    logs = day.client("logs")
    if bucket:
        empty_and_delete(s3, bucket)
    if key and kms.describe_key(KeyId=key)["KeyMetadata"]["KeyState"] != "PendingDeletion":
        kms.schedule_key_deletion(KeyId=key, PendingWindowInDays=7)
    streams = logs.get_paginator("describe_log_streams")
    for job_id in day.state["jobs"]:
        with contextlib.suppress(logs.exceptions.ResourceNotFoundException):
            for page in streams.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=job_id):
                for stream in page["logStreams"]:
                    name = stream["logStreamName"]
                    logs.delete_log_stream(logGroupName=LOG_GROUP, logStreamName=name)
    remaining = [job_id for job_id in day.state["jobs"] if day.describe(job_id)]
    day.check("no job is left", not remaining, remaining)
    day.sm("infra", "show", code=1)
    buckets = {each["Name"] for each in s3.list_buckets()["Buckets"]}
    day.check("no bucket is left", bucket not in buckets, bucket)
    if key:
        day.note("the key is deleted in 7 days, and costs nothing meanwhile")
    for name in ("stack", "text"):
        day.state.pop(name, None)


# -- the day ---------------------------------------------------------------------------------------


def step_numbers(arguments: list[str]) -> list[int]:
    """The numbers of steps from arguments such as 3 and 5-8; without any, all."""
    numbers: set[int] = set()
    for word in arguments or [f"0-{len(STEPS) - 1}"]:
        first, _, last = word.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise SystemExit(f"error: {word}: name steps as 3 or 5-8")
        numbers |= set(range(int(first), int(last or first) + 1))
    return [number for number in range(len(STEPS)) if number in numbers]


def work(day: Day, numbers: list[int]) -> None:
    """Runs the steps that have not passed."""
    passed: dict[str, float] = day.state["passed"]
    todo = [number for number in numbers if str(number) not in passed]
    cleaning = len(STEPS) - 1
    if todo and "stack" not in day.state and todo != [cleaning]:
        todo = sorted({0, *todo})
        passed.pop(str(cleaning), None)
    for number in todo:
        step, day.number = STEPS[number], number
        expected = f"expected {step.expected:.2f} USD, at most {step.ceiling:.2f}"
        day.say(f"step {number}: {step.title} ({expected})")
        spent = day.spent()
        if spent + step.ceiling > BUDGET:
            raise Surprise(f"{spent:.2f} USD are spent: this step could exceed {BUDGET:.0f}")
        step.run(day)
        cost = day.spent() - spent
        day.check(f"it costs at most {step.ceiling:.2f} USD", cost <= step.ceiling, cost)
        passed[str(number)] = cost
        day.save()
        day.say(f"step {number} passed: {cost:.2f} USD; {day.spent():.2f} USD so far")


def summary(day: Day) -> None:
    for number, step in enumerate(STEPS):
        result = "passed" if str(number) in day.state["passed"] else "-"
        billed = 0
        for job in day.state["jobs"].values():
            if job["step"] == number:
                billed += job.get("billed", 0)
        day.say(
            f"{number:>2}  {result:<6}  {billed:>5} s  {day.spent(number):>6.2f} USD"
            f"  (expected {step.expected:.2f}, at most {step.ceiling:.2f})  {step.title}"
        )
    day.say(f"{day.spent():.2f} USD in all, of {BUDGET:.0f}")


def agreed(question: str) -> bool:
    try:
        return input(question).lower() == "y"
    except EOFError:
        raise SystemExit("error: there is no terminal to ask in: agree with --yes") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="3 or 5-8 (default: all)")
    parser.add_argument("--directory", type=Path, default=Path("first-day"))
    parser.add_argument("--deploy", default="", help="more options of `infra deploy`, in quotes")
    parser.add_argument("--text", default="", help="text to train on (default: tiny Shakespeare)")
    parser.add_argument("--emulator", action="store_true", help="`make emulator`: tiny CPU jobs")
    parser.add_argument("--yes", action="store_true", help="do not ask before the first step")
    args = parser.parse_args(arguments)
    if args.emulator != ("AWS_ENDPOINT_URL" in os.environ):
        raise SystemExit("error: --emulator and AWS_ENDPOINT_URL go together")
    numbers = step_numbers(args.steps)
    day = Day(args.directory, args.emulator, args.deploy, args.text)
    cleaning = len(STEPS) - 1
    if day.damage and numbers != [cleaning]:
        raise SystemExit(
            f"error: {day.file} is damaged ({day.damage}): clean up with `first_day.py {cleaning}`,"
            " which takes the jobs from the transcript"
        )
    account_text = f"account {day.account} ({day.who}), {day.session.region_name}"
    if not args.yes and not agreed(f"Spend up to {BUDGET:.0f} USD in {account_text}? [y/N] "):
        return 1
    day.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} in {day.session.region_name}")
    try:
        day.stop_all()
        work(day, numbers)
        return 0
    except (Surprise, BotoCoreError, ClientError) as error:
        day.say(f"SURPRISE in step {day.number}: {error}")
        day.say(f"send us {day.transcript}; step {cleaning} cleans up")
        return 1
    finally:
        day.stop_all()
        summary(day)


if __name__ == "__main__":
    sys.exit(main())
