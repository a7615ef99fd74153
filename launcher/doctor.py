"""Check whether this machine and the AWS account are ready for a job.

Each check is a function. It returns what it found: a text if all is well, a Doubt of what may be
wrong, or another LauncherError for what is. It may raise them too.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launcher.aws import check_bucket
from launcher.backends import backend_class
from launcher.errors import InputError, LauncherError, ServiceError
from launcher.files import storage
from launcher.instances import looks_like_gpu
from launcher.job import Request
from launcher.launching.launch import prepare
from launcher.local.backend import LocalBackend
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.cost import Prices, usd
from launcher.sagemaker.stack import Stack, find_stack, is_whole, notebook_role
from launcher.settings import Settings
from launcher.tracking import wait

OK, WARNING, FAILURE = "ok", "warning", "failure"

TRAINING_SECONDS = 300  # for a run that takes ten


class Doubt(ServiceError):
    """What may be wrong, or could not be checked."""


Found = str | LauncherError


@dataclass(frozen=True)
class Finding:
    """result is OK, WARNING or FAILURE."""

    check: str
    result: str
    text: str
    found: Found


@dataclass
class Context:
    """The settings to check, and what earlier checks found. Without an instance, no price is
    checked, and the quotas of all instances with GPUs are."""

    settings: Settings
    instance: str = ""
    stack: Stack | None = None

    @cached_property
    def cloud(self) -> SageMakerBackend:
        return SageMakerBackend(self.settings, attempts=2)


def check_training(context: Context) -> Found:
    """Train a tiny model for a few steps, as a normal job, in a temporary home."""
    tiny = dict(n_layer=1, n_head=1, n_embd=16, block_size=16, max_steps=3, eval_interval=3)
    # 1 to 8, 10, 12, 14, 15 and 16 GPUs can share this batch evenly.
    tiny |= dict(batch_size=1680, eval_tokens=32, sample_length=0)
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-doctor-") as directory:
        text = Path(directory, "input.txt")
        lines = [f"{number} is a number that no other line has.\n" for number in range(2000)]
        text.write_text("".join(lines), encoding="utf-8")
        settings = context.settings.model_copy(update={"home": Path(directory), "store": ""})
        began = time.monotonic()
        request = Request(instance="local", data=str(text), hyperparameters=tiny)
        job_id = prepare(request, settings).submit()
        try:
            ended = wait(job_id, settings, timeout=TRAINING_SECONDS)
        finally:
            # The job outlives this process, and its home is deleted next.
            LocalBackend(settings).stop(job_id)
            wait(job_id, settings)
    if ended.status != "Completed":
        return ServiceError(ended.failure_reason or ended.status, "try-locally")
    return f"a tiny model trained here in {time.monotonic() - began:.0f} s"


def check_credentials(context: Context) -> Found:
    """The profile and the region are known, and AWS knows the caller."""
    caller = context.cloud.client("sts").get_caller_identity()
    return f"{caller['Arn']}, in {context.cloud.region}"


def check_stack(context: Context) -> Found:
    if context.settings.store and context.settings.role:
        return "none is needed: store and role are set"
    stack = context.stack = find_stack(context.settings, context.cloud.session)
    if stack is None:
        return Doubt("none", code="deploy-stack")
    state = f"{stack.name} is {stack.status}"
    return state if is_whole(stack.status) else Doubt(state, code="show-stack")


def check_role(context: Context) -> Found:
    role = context.settings.role or (context.stack.role if context.stack else "")
    role = role or notebook_role(context.cloud.client)
    return role or InputError("no execution role", "no-role")


def check_store(context: Context) -> Found:
    """The store is in the region of the jobs; write and delete an empty object there."""
    store = context.cloud.launch_settings().store
    if not store.startswith("s3://"):
        return InputError(f"SageMaker cannot read {store}", "store-on-s3")
    check_bucket(context.cloud.client("s3"), store, "store", context.cloud.region)
    place = storage.join(store, "data", f"doctor-{secrets.token_hex(4)}.txt")
    storage.write_bytes(place, b"", context.settings)
    try:
        storage.remove(place, context.settings)
    except ServiceError as error:
        problem = f"{place} was written, and could not be deleted: {error}"
        return Doubt(problem, error.code, **error.facts)
    return f"{store} is writable"


def check_price(context: Context) -> Found:
    prices = Prices(context.settings)
    price = prices.of(context.instance)
    if prices.trouble or price is None:
        unknown = f"the price of {context.instance} in {prices.region} is unknown"
        return Doubt(prices.trouble or unknown)
    return f"{usd(price.per_hour)} an hour, by {price.source}"


def check_quota(context: Context) -> Found:
    """The instances that training jobs may use: of one type, or of all types with GPUs."""
    use = " for training job usage"
    try:
        paginator = context.cloud.client("service-quotas").get_paginator("list_service_quotas")
        pages = paginator.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100})
        values = {
            quota["QuotaName"].removesuffix(use): quota["Value"]
            for page in pages
            for quota in page["Quotas"]
            if quota["QuotaName"].endswith(use) and "spot" not in quota["QuotaName"]
        }
    except ServiceError as error:
        return Doubt(f"could not check the quotas of instances: {error}", error.code, **error.facts)
    if not context.instance:
        gpus = {name: n for name, n in values.items() if n >= 1 and looks_like_gpu(name)}
        if not gpus:
            return Doubt("no instance with GPUs is allowed", code="no-gpus-yet")
        return ", ".join(f"{n:g} x {name}" for name, n in sorted(gpus.items()))
    name, n = f"{context.instance}{use}", values.get(context.instance)
    if n is None:
        return Doubt(f"the account has no quota {name!r}")
    if n < 1:
        code = "no-gpus-yet" if looks_like_gpu(context.instance) else "aws-quota"
        return ServiceError(f"{name!r} is 0", code)
    return f"{name!r} is {n:g}"


def uses_aws(settings: Settings, instance: str | None) -> bool:
    """True if the account is to be checked: for an instance, or where AWS is configured."""
    if not instance:
        return settings.reaches_aws
    return backend_class(instance) is SageMakerBackend


def run_checks(settings: Settings, instance: str | None, train: bool) -> Iterator[Finding]:
    """Check this machine, unless `train` is off; and the account, if jobs there use it."""
    checks: dict[str, Callable[[Context], Found]]
    checks = {"local training": check_training} if train else {}
    if uses_aws(settings, instance):
        checks |= {"credentials": check_credentials, "quota": check_quota}
        checks |= {"price": check_price} if instance else {}
        checks |= {"stack": check_stack, "role": check_role, "store": check_store}
    context = Context(settings, instance or "")
    for name, check in checks.items():
        try:
            found = check(context)
        except LauncherError as error:
            found = error
        result = OK if isinstance(found, str) else WARNING if isinstance(found, Doubt) else FAILURE
        ends = result == FAILURE and name in ("credentials", "stack")  # the checks after it need it
        yield Finding(name, result, f"{found}{'; what needs it is not checked' * ends}", found)
        if ends:
            return
