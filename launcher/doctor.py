"""Check whether this machine and the AWS account are ready for a job.

Each check is a function. It returns what it found, raises `CheckWarning` for a warning, and
InputError or ServiceError for a failure, whose text says what to do.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.aws import QUOTA, aws_session, check_bucket, check_region, make_client, service_errors
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.job import Request
from launcher.launching.launch import prepare
from launcher.local.backend import LocalBackend
from launcher.machines import looks_like_gpu
from launcher.sagemaker.cost import Prices, usd
from launcher.sagemaker.stack import Stack, find_stack, is_whole, notebook_role
from launcher.settings import Settings
from launcher.tracking import wait

OK, WARNING, FAILURE = "ok", "warning", "failure"

TRAINING_SECONDS = 300  # for a run that takes ten
WITHOUT_GPU = (  # for new accounts
    "`sm-nanogpt launch --instance ml.m5.xlarge --preset quick --max-cost 0.20` needs no GPU"
)


class CheckWarning(Exception):
    """Something may be wrong, or could not be checked."""


@dataclass(frozen=True)
class Finding:
    """result is OK, WARNING or FAILURE."""

    check: str
    result: str
    text: str


@dataclass
class Context:
    """The settings to check, and what earlier checks found. Without an instance, no price is
    checked, and the quotas of all instances with GPUs are."""

    settings: Settings
    instance: str | None = None
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


# -- this machine ----------------------------------------------------------------------------------


def check_training(context: Context) -> str:
    """Train a tiny model for a few steps, as a normal job, in a temporary home."""
    tiny = dict(n_layer=1, n_head=1, n_embd=16, block_size=16, max_steps=3, eval_interval=3)
    # 1 to 8, 10, 12, 14, 15 and 16 GPUs can share this batch evenly.
    tiny |= dict(batch_size=1680, eval_windows=2, sample_length=0)
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-doctor-") as directory:
        text = Path(directory, "input.txt")
        text.write_text("To be, or not to be, that is the question.\n" * 2000, encoding="utf-8")
        settings = context.settings.model_copy(update={"home": Path(directory), "store": ""})
        began = time.monotonic()
        request = Request(instance="local", data=str(text), hyperparameters=tiny)
        job_id = prepare(request, settings).submit()
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


def check_credentials(context: Context) -> str:
    """The profile and the region are known, and AWS knows the caller."""
    context.session = aws_session(context.settings)
    context.region = check_region(context.session)
    with service_errors("GetCallerIdentity"):
        return f"{context.client('sts').get_caller_identity()['Arn']}, in {context.region}"


def check_stack(context: Context) -> str:
    configured = bool(context.settings.store and context.settings.role)
    try:
        stack = context.stack = find_stack(context.settings, context.session)
    except ServiceError as error:
        if configured:
            raise CheckWarning(f"not checked: {error}") from None
        raise
    if stack is None:
        if configured:
            return "none, and none is needed: store and role are set"
        raise CheckWarning("none: `sm-nanogpt infra deploy` creates a bucket and a role")
    if not is_whole(stack.status):
        raise CheckWarning(f"{stack.name} is {stack.status}: `sm-nanogpt infra show` shows why")
    return f"{stack.name} is {stack.status}"


# -- what a job needs ------------------------------------------------------------------------------


def check_role(context: Context) -> str:
    """The execution role that jobs get."""
    context.role = context.settings.role or (context.stack.role if context.stack else "")
    context.role = context.role or notebook_role(context.client)
    if not context.role:
        raise InputError(
            "no execution role: create one with `sm-nanogpt infra deploy`, or set --role"
        )
    return context.role


def check_store(context: Context) -> str:
    """The store is in the region of the jobs; write and delete an empty object there."""
    context.store = context.settings.store or (context.stack.store if context.stack else "")
    if not context.store:
        raise InputError(
            "no store: create one with `sm-nanogpt infra deploy`, or set"
            " --store or SM_NANOGPT_STORE to s3://bucket/prefix"
        )
    if not context.store.startswith("s3://"):
        raise InputError(
            f"SageMaker cannot read {context.store}: set --store to s3://bucket/prefix"
        )
    check_bucket(context.client("s3"), context.store, "store", context.region)
    place = storage.join(context.store, "data", f"doctor-{secrets.token_hex(4)}.txt")
    storage.write_bytes(place, b"", context.settings)
    try:
        storage.remove(place, context.settings)
    except ServiceError as error:
        raise CheckWarning(f"{place} was written, and could not be deleted: {error}") from None
    return f"{context.store} is writable"


def check_price(context: Context) -> str:
    assert context.instance is not None
    prices = Prices(context.settings, context.region, context.session)
    price = prices.of(context.instance)
    quoted = "" if price is None else f"{usd(price.per_hour)} an hour, by {price.source}"
    if prices.trouble:
        raise CheckWarning(f"{prices.trouble}{f'; {quoted}' if quoted else ''}")
    if price is None:
        raise CheckWarning(f"the price of {context.instance} in {context.region} is unknown")
    return quoted


def check_quota(context: Context) -> str:
    """The instances that training jobs may use: of one type, or of all types with GPUs."""
    use = " for training job usage"
    try:
        with service_errors("ListServiceQuotas"):
            pages = (
                context.client("service-quotas")
                .get_paginator("list_service_quotas")
                .paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100})
            )
            values = {
                quota["QuotaName"].removesuffix(use): quota["Value"]
                for page in pages
                for quota in page["Quotas"]
                if quota["QuotaName"].endswith(use) and "spot" not in quota["QuotaName"]
            }
    except ServiceError as error:
        raise CheckWarning(f"could not check the quotas of instances: {error}") from None
    if not context.instance:
        gpus = {name: n for name, n in values.items() if n >= 1 and looks_like_gpu(name)}
        if not gpus:
            raise CheckWarning(
                f"no instance with GPUs is allowed: {QUOTA}; meanwhile, {WITHOUT_GPU}"
            )
        return ", ".join(f"{n:g} x {name}" for name, n in sorted(gpus.items()))
    name = f"{context.instance}{use}"
    if context.instance not in values:
        raise CheckWarning(f"the account has no quota {name!r}")
    if values[context.instance] < 1:
        first = f"; meanwhile, {WITHOUT_GPU}" if looks_like_gpu(context.instance) else ""
        raise InputError(f"{name!r} is 0: {QUOTA}{first}")
    return f"{name!r} is {values[context.instance]:g}"


Checks = dict[str, Callable[[Context], str]]  # by name


def checks(settings: Settings, instance: str | None, train: bool) -> Checks:
    """What to check: this machine, unless `train` is off; the account, unless the instance is
    `local` or none is named and no AWS account is configured."""
    chosen: Checks = {"local training": check_training} if train else {}
    if instance == "local" or not (instance or settings.reaches_aws):
        return chosen
    chosen |= {"credentials": check_credentials, "quota": check_quota}
    chosen |= {"price": check_price} if instance else {}
    return {**chosen, "stack": check_stack, "role": check_role, "store": check_store}


def run_checks(
    settings: Settings, instance: str | None = None, train: bool = True
) -> Iterator[Finding]:
    """Yield the finding of each check."""
    context = Context(settings, instance)
    for name, check in checks(settings, instance, train).items():
        try:
            yield Finding(name, OK, check(context))
        except CheckWarning as warning:
            yield Finding(name, WARNING, str(warning))
        except (InputError, ServiceError) as error:
            ends = name in ("credentials", "stack")  # the checks after it need it
            yield Finding(name, FAILURE, f"{error}{'; what needs it is not checked' * ends}")
            if ends:
                return
