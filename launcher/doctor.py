"""Check whether this machine and the AWS account are ready for a job.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.aws import (
    QUOTA,
    aws_session,
    check_region,
    code_and_message,
    make_client,
    service_errors,
    why,
)
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.job import Request
from launcher.launching.launch import launch
from launcher.local.backend import LocalBackend
from launcher.machines import (
    DEFAULT_VERSION,
    default_launcher,
    describe_instance,
    find_image,
    gpus_of,
    looks_like_gpu,
    no_patches,
    problem,
    training_image,
)
from launcher.sagemaker.cost import Prices, usd
from launcher.sagemaker.request import sdk_version
from launcher.sagemaker.stack import Stack, find_stack, is_whole, notebook_role
from launcher.settings import Settings
from launcher.text.corpus import last_upload
from launcher.tracking import wait

OK, WARNING, FAILURE = "ok", "warning", "failure"
LEFT_OUT = "not checked: it needs "

TRAINING_SECONDS = 300  # for a run that takes ten
DENIED = ("AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation")
WITHOUT_GPU = "`launch --instance ml.m5.xlarge --preset quick` needs no GPU"  # for new accounts
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
    stack: Stack | None = None
    role: str = ""
    store: str = ""
    clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = make_client(self.session, service, self.region, attempts=2)
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
        job_id = launch(Request(instance="local", data=str(text), hyperparameters=tiny), settings)
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
    with service_errors("GetCallerIdentity"):
        return str(patient.client("sts").get_caller_identity()["Arn"])


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
    """The execution role exists."""
    patient.role = patient.settings.role or (patient.stack.role if patient.stack else "")
    patient.role = patient.role or notebook_role(patient.client)
    if not patient.role:
        raise InputError(
            "no execution role: create one with `sm-nanogpt infra deploy`, or set --role"
        )
    name = patient.role.rsplit("/", 1)[-1]
    patient.ask("iam", "get_role", RoleName=name)
    return patient.role


def check_store(patient: Patient) -> str:
    """Write and delete an empty object in the store."""
    patient.store = patient.settings.store or (patient.stack.store if patient.stack else "")
    if not patient.store:
        raise InputError(
            "no store: create one with `sm-nanogpt infra deploy`, or set"
            " --store or SM_NANOGPT_STORE to s3://bucket/prefix"
        )
    if not patient.store.startswith("s3://"):
        raise InputError(
            f"SageMaker cannot read {patient.store}: set --store to s3://bucket/prefix"
        )
    place = storage.join(patient.store, f"doctor-{secrets.token_hex(4)}.txt")
    bucket, _, key = place.removeprefix("s3://").partition("/")
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
        raise Doubt(f"{patient.store} is writable, but {place} could not be deleted") from None
    return f"{patient.store} is writable"


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
    uri = training_image(patient.region, DEFAULT_VERSION, looks_like_gpu(patient.instance))
    launcher, today = default_launcher(patient.instance), date.today()
    if unfit := problem(uri, patient.instance, launcher):
        raise InputError(unfit)
    image = find_image(DEFAULT_VERSION)
    if image.patched_until < today:
        raise Doubt(no_patches(image, uri))
    return f"{uri}, patched until {image.patched_until}"


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
    """The number of instances of the type that training jobs may use."""
    name = f"{patient.instance} for training job usage"
    try:
        with asking("list_service_quotas"):
            pages = (
                patient.client("service-quotas")
                .get_paginator("list_service_quotas")
                .paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100})
            )
            values = {
                quota["QuotaName"]: quota["Value"] for page in pages for quota in page["Quotas"]
            }
    except ServiceError as error:
        raise Doubt(f"could not check {name!r}: {error}") from None
    if name not in values:
        raise Doubt(f"the account has no quota {name!r}")
    if values[name] < 1:
        first = f"; meanwhile, {WITHOUT_GPU}" if looks_like_gpu(patient.instance) else ""
        raise InputError(f"{name!r} is 0: {QUOTA}{first}")
    return f"{name!r} is {values[name]:g}"


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
    Check("stack", check_stack, needs=("credentials",)),
    Check("role", check_role, needs=("credentials", "stack")),
    Check("store", check_store, needs=("credentials", "stack")),
    Check("data", check_data, needs=("store",)),
    Check("instance", check_instance_type),
    Check("image", check_image, needs=("region",)),
    Check("price", check_price, needs=("credentials",)),
    Check("quota", check_quota, needs=("credentials",)),
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
