"""Check whether this machine and the AWS account are ready for a job. Called by `doctor`.

Each check is a function. It returns what it found, raises `Doubt` for a warning, and InputError or
ServiceError for a failure, whose text says what to do. A check is skipped if one that it needs has
failed.
"""

from __future__ import annotations

import platform
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.aws import aws_session, check_region, code_and_message, quick_client, why
from launcher.errors import InputError, ServiceError
from launcher.job import Request
from launcher.launching.launch import launch
from launcher.local.backend import LocalBackend
from launcher.machines import (
    DEFAULT_VERSION,
    IMAGES,
    default_launcher,
    describe_instance,
    find_image,
    gpus_of,
    has_local_storage,
    looks_like_gpu,
    no_patches,
    problem,
    training_image,
)
from launcher.sagemaker.backend import LOG_GROUP, machines_of, notebook_role, search_jobs
from launcher.sagemaker.cost import Prices, usd
from launcher.sagemaker.quotas import CONSOLE, SPOT, TRAINING, WITHOUT_GPU, read_quota
from launcher.sagemaker.request import sdk_version
from launcher.sagemaker.stack import Stack, find_stack, is_whole
from launcher.settings import Settings
from launcher.text.corpus import last_upload
from launcher.tracking import wait

OK, WARNING, FAILURE = "ok", "warning", "failure"
LEFT_OUT = "not checked: it needs "

MAX_SKEW_SECONDS = 300  # AWS refuses requests if the clock is further off
TRAINING_SECONDS = 300  # for a run that takes ten
DENIED = ("AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation")
# Condition operators that `trusts` evaluates.
WEIGHED = ("ArnEquals", "ArnLike", "StringEquals", "StringLike")


ROOM = 500_000_000  # bytes that a job and its model may take


class Doubt(Exception):
    """Something may be wrong, or could not be checked."""


@dataclass(frozen=True)
class Finding:
    """result is OK, WARNING or FAILURE."""

    check: str
    result: str
    text: str

    @property
    def left_out(self) -> bool:
        """Whether the check was skipped because one that it needs has failed."""
        return self.text.startswith(LEFT_OUT)


@dataclass
class Patient:
    """The settings to check, and what earlier checks found."""

    settings: Settings
    instance: str
    train: bool = True
    session: Any = None
    region: str = ""
    account: str = ""
    answered: str = ""  # Date header of an answer of AWS
    answered_at: float = 0.0  # when it arrived, by this machine's clock
    stack: Stack | None = None
    role: str = ""
    store: str = ""
    clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = quick_client(self.session, service, self.region, attempts=2)
        return self.clients[service]

    def ask(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        """Call AWS. Raises as `asking`."""
        with asking(operation):
            return dict(getattr(self.client(service), operation)(**request))


@contextmanager
def asking(operation: str) -> Iterator[None]:
    """Turn exceptions of boto3 into ours.

    Raises:
        Doubt: the caller lacks the permission for this call.
        ServiceError: AWS refuses for another reason, or cannot be reached.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        if code_and_message(error)[0] in DENIED:
            raise Doubt(f"not checked: {why(error)}") from None
        raise ServiceError(f"{operation}: {why(error)}") from None
    except (BotoCoreError, ResponseParserError) as error:
        raise ServiceError(f"{operation}: {why(error)}") from None


# -- this machine ----------------------------------------------------------------------------------


def check_python(patient: Patient) -> str:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info >= (3, 15):
        raise Doubt(f"{found}: not supported yet; use Python 3.11 to 3.14")
    return found


def check_packages(patient: Patient) -> str:
    from packaging.requirements import Requirement

    again = "reinstall sm-nanogpt with its constraints.txt"
    try:
        needed = [Requirement(line) for line in metadata.requires("sm-nanogpt") or []]
    except metadata.PackageNotFoundError:
        raise InputError(f"sm-nanogpt itself is not installed: {again}") from None
    found, wrong = [], []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        if not version:
            if requirement.name != "sagemaker":  # without it, requests are made here
                wrong.append(f"{requirement.name} is not installed")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        raise InputError(f"{', '.join(wrong)}: {again}")
    without = "" if sdk_version() else "; requests are made without version 2 of the SageMaker SDK"
    return ", ".join(found) + without


def installed(name: str) -> str:
    """The installed version of a distribution, or ''."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_disk(patient: Patient) -> str:
    home = patient.settings.home
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / 1e9:.1f} GB free for {home}"
    if free < ROOM:
        raise InputError(f"{text}: delete files, or move it with SM_NANOGPT_HOME")
    return text


def check_training(patient: Patient) -> str:
    """Train a tiny model for a few steps, as a normal job, in a temporary home."""
    if not patient.train:
        raise Doubt("not checked: --no-train")
    tiny = dict(n_layer=1, n_head=1, n_embd=16, block_size=16, max_steps=3, eval_interval=3)
    # 1 to 8, 10, 12, 14, 15 and 16 GPUs can share this batch evenly.
    tiny |= dict(batch_size=1680, eval_windows=2, sample_length=0)
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-doctor-") as directory:
        text = Path(directory, "input.txt")
        text.write_text("To be, or not to be, that is the question.\n" * 50, encoding="utf-8")
        settings = patient.settings.model_copy(update={"home": Path(directory), "store": ""})
        began = time.monotonic()
        job_id = launch(Request(data=str(text), hyperparameters=tiny), settings)
        try:
            ended = wait(job_id, settings, timeout=TRAINING_SECONDS)
        except ServiceError:
            raise ServiceError(f"a tiny model did not train within {TRAINING_SECONDS} s") from None
        finally:
            # The job outlives this process, and its home is deleted next.
            LocalBackend(settings).stop(job_id)
            wait(job_id, settings)
    if ended.status != "Completed":
        raise ServiceError(
            f"{ended.failure_reason or ended.status}; `sm-nanogpt launch --instance local` shows"
            " the full log"
        )
    return f"a tiny model trained here in {time.monotonic() - began:.0f} s"


# -- the account -----------------------------------------------------------------------------------


def check_profile(patient: Patient) -> str:
    patient.session = aws_session(patient.settings)
    return str(patient.session.profile_name)


def check_the_region(patient: Patient) -> str:
    patient.region = check_region(patient.session)
    return patient.region


def check_credentials(patient: Patient) -> str:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = patient.client("sts").get_caller_identity()
    except ClientError as error:
        note_date(patient, error.response)
        raise ServiceError(why(error)) from None
    except BotoCoreError as error:
        raise ServiceError(why(error)) from None
    note_date(patient, answer)
    patient.account = answer["Account"]
    return str(answer["Arn"])


def note_date(patient: Patient, answer: Mapping[str, Any]) -> None:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    patient.answered, patient.answered_at = headers.get("date", ""), time.time()


def check_clock(patient: Patient) -> str:
    """Needs no valid credentials, since a wrong clock makes AWS reject them."""
    if not patient.answered:
        raise Doubt("not checked: AWS has not answered")
    skew = patient.answered_at - parsedate_to_datetime(patient.answered).timestamp()
    offset = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} AWS"
    if abs(skew) > MAX_SKEW_SECONDS:
        raise ServiceError(
            f"this machine's clock is {offset}, and AWS allows {MAX_SKEW_SECONDS} s: correct it"
        )
    if abs(skew) > MAX_SKEW_SECONDS / 5:
        raise Doubt(f"this machine's clock is {offset}; AWS allows {MAX_SKEW_SECONDS} s")
    return offset


def check_stack(patient: Patient) -> str:
    configured = bool(patient.settings.store and patient.settings.role)
    try:
        stack = patient.stack = find_stack(patient.settings, patient.session)
    except ServiceError as error:
        if configured:
            raise Doubt(f"not checked: {error}") from None
        raise
    if stack is None:
        if configured:
            return "none, and none is needed: store and role are set"
        raise Doubt("none: `sm-nanogpt infra deploy` creates a bucket and a role")
    if not is_whole(stack.status):
        raise Doubt(f"{stack.name} is {stack.status}: `sm-nanogpt infra show` shows why")
    return f"{stack.name} is {stack.status}"


# -- what a job needs ------------------------------------------------------------------------------


def check_role(patient: Patient) -> str:
    """The execution role exists, and SageMaker may assume it."""
    patient.role = patient.settings.role or (patient.stack.role if patient.stack else "")
    patient.role = patient.role or notebook_role(patient.client)
    if not patient.role:
        raise InputError(
            "no execution role: create one with `sm-nanogpt infra deploy`, or set --role"
        )
    name = patient.role.rsplit("/", 1)[-1]
    role = patient.ask("iam", "get_role", RoleName=name)["Role"]
    job = f"arn:{patient.role.split(':')[1]}:sagemaker:{patient.region}:{patient.account}"
    origin = {
        "aws:sourceaccount": patient.account,
        "aws:sourcearn": f"{job}:training-job/sm-nanogpt-any",
    }
    if not trusts(role["AssumeRolePolicyDocument"], "sagemaker.amazonaws.com", origin):
        raise InputError(
            f"the trust policy of {patient.role} does not let sagemaker.amazonaws.com assume it for"
            f" training jobs of account {patient.account} in {patient.region}"
        )
    return patient.role


def trusts(policy: Mapping[str, Any], service: str, origin: Mapping[str, str]) -> bool:
    """Whether a trust policy lets a service assume the role, given the keys of `origin`.

    IAM's simulation does not evaluate trust policies.

    Raises:
        Doubt: it depends on another condition.
    """

    def listed(value: Any) -> list[Any]:
        return list(value) if isinstance(value, list) else [value]

    def holds(operator: str, key: str, values: Any) -> bool:
        if key.lower() not in origin or operator not in WEIGHED:
            raise Doubt(f"not checked: the trust policy has a condition on {key}")
        return any(fnmatchcase(origin[key.lower()], value) for value in listed(values))

    def allows(statement: Mapping[str, Any]) -> bool:
        principal = statement.get("Principal", {})
        conditions = statement.get("Condition", {})
        return (
            statement["Effect"] == "Allow"
            and any(fnmatchcase("sts:AssumeRole", each) for each in listed(statement["Action"]))
            and isinstance(principal, dict)
            and service in listed(principal.get("Service", []))
            and all(
                holds(operator, key, values)
                for operator, keys in conditions.items()
                for key, values in keys.items()
            )
        )

    return any(allows(statement) for statement in listed(policy["Statement"]))


def check_store(patient: Patient) -> str:
    """Write and delete an empty object in the store."""
    patient.store = patient.settings.store or (patient.stack.store if patient.stack else "")
    if not patient.store:
        raise InputError(
            "no store: create one with `sm-nanogpt infra deploy`, or set"
            " --store or SM_NANOGPT_STORE to s3://bucket/prefix"
        )
    bucket, prefix = bucket_and_prefix(patient.store)
    key = f"{prefix}doctor-{secrets.token_hex(4)}.txt"
    encryption = {}
    if patient.settings.kms_key:
        encryption = dict(ServerSideEncryption="aws:kms", SSEKMSKeyId=patient.settings.kms_key)
    try:
        patient.ask("s3", "put_object", Bucket=bucket, Key=key, Body=b"", **encryption)
    except Doubt as denied:
        raise ServiceError(f"{patient.store} cannot be written: {denied}") from None
    try:
        patient.ask("s3", "delete_object", Bucket=bucket, Key=key)
    except Doubt:
        left = f"s3://{bucket}/{key}"
        raise Doubt(f"{patient.store} is writable, but {left} could not be deleted") from None
    return f"{patient.store} is writable"


def bucket_and_prefix(store: str) -> tuple[str, str]:
    """Split a store into bucket and `some/prefix/`. Raises InputError if it is not on S3."""
    if not store.startswith("s3://"):
        raise InputError(f"SageMaker cannot read {store}: set --store to s3://bucket/prefix")
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    return bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""


def check_permissions(patient: Patient) -> str:
    """Permissions of the role, by IAM's simulation, which ignores the bucket policy."""
    bucket, prefix = bucket_and_prefix(patient.store)
    partition = patient.role.split(":")[1]
    logs = f"arn:{partition}:logs:{patient.region}:{patient.account}:log-group:{LOG_GROUP}"
    needed = {
        f"arn:{partition}:s3:::{bucket}/{prefix}jobs/any": ["s3:GetObject", "s3:PutObject"],
        f"arn:{partition}:s3:::{bucket}/{prefix}checkpoints/any": ["s3:DeleteObject"],
        f"arn:{partition}:s3:::{bucket}": ["s3:ListBucket"],
        f"{logs}:log-stream:sm-nanogpt-any": ["logs:CreateLogStream", "logs:PutLogEvents"],
        "*": ["cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"],
    }
    if patient.settings.subnets:
        needed["*"].append("ec2:CreateNetworkInterface")
    for repository in image_repositories(patient, partition):
        needed[repository] = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    if key := patient.settings.kms_key or (patient.stack and patient.stack.kms_key):
        needed[key] = ["kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"]
        if not has_local_storage(patient.instance):  # whose disks the key encrypts
            needed[key] += ["kms:CreateGrant", "kms:DescribeKey"]
    entries = {
        "aws:ResourceAccount": patient.account,
        "aws:SecureTransport": "true",
        "cloudwatch:namespace": "/aws/sagemaker/TrainingJobs",
        "kms:GrantIsForAWSResource": "true",
        "s3:prefix": f"{prefix}jobs/any/",
    }
    context = [
        {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
        for key, value in entries.items()
    ]
    denied: list[str] = []
    undecided: list[str] = []
    for resource, actions in needed.items():
        asked = dict(PolicySourceArn=patient.role, ActionNames=actions, ResourceArns=[resource])
        try:
            results = patient.ask(
                "iam", "simulate_principal_policy", ContextEntries=context, **asked
            )["EvaluationResults"]
        except ServiceError as error:
            raise Doubt(f"not checked: {error}") from None
        for result in results:
            if result["EvalDecision"] != "allowed":
                found = undecided if result.get("MissingContextValues") else denied
                found.append(f"{result['EvalActionName']} on {resource}")
    if denied:
        stack = patient.stack
        # The role of an older stack may lack new permissions.
        own = stack and (patient.role, patient.store) == (stack.role, stack.store)
        words = f"infra deploy{' --vpc' * bool(patient.settings.subnets)}"
        deploy = f"update it with `sm-nanogpt {words}`"
        remedy = deploy if own else "change its policies"
        raise InputError(f"the role may not {', nor '.join(denied)}: {remedy}")
    if undecided:
        raise Doubt(f"not checked, since it depends on conditions: {', '.join(undecided)}")
    return "the role may read and write the store, log, and pull the image"


def image_repositories(patient: Patient, partition: str) -> list[str]:
    """The ARNs of the image repositories: the default one's; for the stack's role, all of them."""
    registry, _, name = default_image(patient).partition("/")
    account, region = registry.split(".")[0], registry.split(".")[3]
    names = [name.partition(":")[0]]
    if patient.stack and patient.role == patient.stack.role:
        names = sorted({image.repository for image in IMAGES})
    return [f"arn:{partition}:ecr:{region}:{account}:repository/{name}" for name in names]


def check_data(patient: Patient) -> str:
    """The text that a launch would use."""
    settings = patient.settings.model_copy(update={"store": patient.store})
    try:
        return last_upload(settings)
    except InputError as error:
        raise Doubt(str(error)) from None


def check_instance_type(patient: Patient) -> str:
    description = describe_instance(patient.instance)
    if gpus_of(patient.instance) is None:
        raise Doubt(description)
    return description


def check_image(patient: Patient) -> str:
    """The default image runs on the instance type, and AWS patches it."""
    uri, launcher, today = default_image(patient), default_launcher(patient.instance), date.today()
    if unfit := problem(uri, patient.instance, launcher):
        raise InputError(unfit)
    image = find_image(DEFAULT_VERSION)
    if image.patched_until < today:
        raise Doubt(no_patches(image, uri, patient.instance, launcher, today))
    return f"{uri}, patched until {image.patched_until}"


def default_image(patient: Patient) -> str:
    return training_image(patient.region, DEFAULT_VERSION, looks_like_gpu(patient.instance))


def check_price(patient: Patient) -> str:
    prices = Prices(patient.settings, patient.region, patient.session)
    price = prices.of(patient.instance)
    quoted = "" if price is None else f"{usd(price.per_hour)} an hour, by {price.source}"
    if prices.trouble:
        raise Doubt(f"{prices.trouble}{f'; {quoted}' if quoted else ''}")
    if price is None:
        raise Doubt(f"the price of {patient.instance} in {patient.region} is unknown")
    return quoted


def check_quota(patient: Patient) -> str:
    return compare_quota(patient, TRAINING)


def check_spot_quota(patient: Patient) -> str:
    try:
        return compare_quota(patient, SPOT)
    except InputError as error:
        raise Doubt(f"{error} (only for --spot)") from None


def compare_quota(patient: Patient, use: str) -> str:
    """Compare a quota with the instances in use."""
    name = f"{patient.instance} for {use}"
    try:
        allowed = read_quota(name, patient.settings, patient.session)
    except ServiceError as error:
        raise Doubt(f"could not check {name!r}: {error}") from None
    if allowed < 1:
        first = f"; meanwhile, {WITHOUT_GPU}" if looks_like_gpu(patient.instance) else ""
        raise InputError(f"{name!r} is {allowed:g}: request an increase in {CONSOLE}{first}")
    used = running_instances(patient, spot=use == SPOT)
    if used >= allowed:
        raise Doubt(f"{name!r} is {allowed:g}, and all are in use: wait, or stop a job")
    return f"{name!r} is {allowed:g}; {used} in use"


def running_instances(patient: Patient, spot: bool) -> int:
    """The number of instances of the type that training jobs use, on spot capacity or not."""
    with asking("search"):
        running = list(search_jobs(patient.client("sagemaker"), "TrainingJobStatus", "InProgress"))
    machines = [
        machines_of(job["ResourceConfig"])
        for job in running
        if job.get("EnableManagedSpotTraining", False) == spot
    ]
    return sum(count for instance, count in machines if instance == patient.instance)


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[Patient], str]
    needs: tuple[str, ...] = ()


HERE = (
    Check("python", check_python),
    Check("packages", check_packages),
    Check("disk", check_disk),
    Check("local training", check_training, needs=("packages", "disk")),
)
AWS = (
    Check("profile", check_profile),
    Check("region", check_the_region, needs=("profile",)),
    Check("credentials", check_credentials, needs=("region",)),
    Check("clock", check_clock, needs=("region",)),
    Check("stack", check_stack, needs=("credentials",)),
    Check("role", check_role, needs=("credentials", "stack")),
    Check("store", check_store, needs=("credentials", "stack")),
    Check("permissions", check_permissions, needs=("role", "store")),
    Check("data", check_data, needs=("store",)),
    Check("instance", check_instance_type),
    Check("image", check_image, needs=("region",)),
    Check("price", check_price, needs=("credentials",)),
    Check("quota", check_quota, needs=("credentials",)),
    Check("spot quota", check_spot_quota, needs=("credentials",)),
)


def examine(settings: Settings, instance: str, train: bool = True) -> Iterator[Finding]:
    """Yield the finding of each check for an instance type; `local` checks only this machine."""
    patient = Patient(settings, instance, train)
    missing: set[str] = set()  # failed or skipped
    for check in HERE if instance == "local" else HERE + AWS:
        lacking = [name for name in check.needs if name in missing]
        if lacking:
            missing.add(check.name)
            yield Finding(check.name, WARNING, LEFT_OUT + " and ".join(lacking))
            continue
        try:
            yield Finding(check.name, OK, check.look(patient))
        except Doubt as doubt:
            yield Finding(check.name, WARNING, str(doubt))
        except (InputError, ServiceError) as error:
            missing.add(check.name)
            yield Finding(check.name, FAILURE, str(error))
        except Exception as error:  # a bug in one check must not stop the others
            missing.add(check.name)
            yield Finding(check.name, FAILURE, f"{type(error).__name__}: {error}")
