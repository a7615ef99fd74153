"""Check whether this machine and the AWS account are ready for a job.

Each check is a function that takes a Context and gives an Answer: a text if all is well, a Doubt if
something may be wrong, or another LauncherError if something is wrong. It returns or raises that
error.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sm_nanogpt.launcher.aws import check_bucket
from sm_nanogpt.launcher.backends import LOCAL, backend_class
from sm_nanogpt.launcher.errors import InputError, LauncherError, ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.instances import looks_like_gpu
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching.launch import prepare
from sm_nanogpt.launcher.local.backend import LocalBackend
from sm_nanogpt.launcher.local.confine import layers, unprotected
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.sagemaker.account import Account
from sm_nanogpt.launcher.sagemaker.backend import SageMakerBackend
from sm_nanogpt.launcher.sagemaker.cost import Prices, usd
from sm_nanogpt.launcher.sagemaker.stack import Stack, find_stack, has_succeeded, notebook_role
from sm_nanogpt.launcher.settings import Settings

OK = "ok"
WARNING = "warning"
FAILURE = "failure"

TRAINING_TIMEOUT_SECONDS = 300  # for a run that takes ten


class Doubt(ServiceError):
    """Something may be wrong, or could not be checked."""


Answer = str | LauncherError  # what a check returns or raises


@dataclass(frozen=True)
class Finding:
    """The result of a check, which is OK, WARNING, or FAILURE, with its answer as text."""

    check: str
    result: str
    text: str
    answer: Answer

    @property
    def ends_checks(self) -> bool:
        """True if the check failed, and all later checks depend on it."""
        return self.result == FAILURE and self.check in ("credentials", "stack")


@dataclass
class Context:
    """The settings to check, and the results of earlier checks.

    If instance is '', the quotas of all instances with GPUs are checked, and no price is.
    """

    settings: Settings
    instance: str = ""
    stack: Stack | None = None  # the result of check_stack

    @cached_property
    def cloud(self) -> SageMakerBackend:
        return SageMakerBackend(self.settings, attempts=2)

    @property
    def account(self) -> Account:
        return self.cloud.account


Check = Callable[[Context], Answer]


def check_training(context: Context) -> Answer:
    """Train a tiny model for a few steps, as a normal job, in a temporary home."""
    hyperparameters = dict(
        n_layer=1,
        n_head=1,
        n_embd=16,
        block_size=16,
        batch_size=1680,  # 1 to 8, 10, 12, 14, 15 and 16 GPUs can share it evenly
        max_steps=3,
        eval_interval=3,
        eval_tokens=32,
        sample_length=0,
    )
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-doctor-") as directory:
        text = Path(directory, "input.txt")
        lines = [f"{number} is a number that no other line has.\n" for number in range(2000)]
        text.write_text("".join(lines), encoding="utf-8")
        settings = context.settings.model_copy(update={"home": Path(directory), "store": ""})
        start_time = time.monotonic()
        request = Request(instance=LOCAL, data=str(text), hyperparameters=hyperparameters)
        job = prepare(request, settings).submit()
        try:
            description = job.wait_for_end(timeout=TRAINING_TIMEOUT_SECONDS)
        finally:
            # The job outlives this process, and its home is deleted next.
            LocalBackend(settings).stop(job.id)
            job.wait_for_end()
    if description.status != "Completed":
        return ServiceError(description.failure_reason or description.status, "try-locally")
    return f"a tiny model trained here in {time.monotonic() - start_time:.0f} s"


def check_sandbox(context: Context) -> Answer:
    """Check that this machine can confine the code of a training folder."""
    reachable = unprotected()
    if reachable:
        return Doubt(f"the code of a folder is not kept from {', '.join(reachable)}", "sandbox")
    return f"by {', '.join(sorted(layers()))}"


def check_credentials(context: Context) -> Answer:
    """Check that AWS knows the caller, for which it needs a profile or keys, and a region."""
    caller = context.account.client("sts").get_caller_identity()
    return f"{caller['Arn']}, in {context.account.region}"


def check_stack(context: Context) -> Answer:
    if context.settings.store and context.settings.role:
        return "none is needed: store and role are set"
    stack = find_stack(context.settings, context.account.session)
    context.stack = stack
    if stack is None:
        return Doubt("none", code="deploy-stack")
    state = f"{stack.name} is {stack.status}"
    if has_succeeded(stack.status):
        return state
    return Doubt(state, code="show-stack")


def check_role(context: Context) -> Answer:
    role = context.settings.role
    if not role and context.stack is not None:
        role = context.stack.role
    if not role:
        role = notebook_role(context.account.client)
    return role or InputError("no execution role", "no-role")


def check_store(context: Context) -> Answer:
    """Check that the store is in the region of the jobs, and takes and deletes an object."""
    store = context.cloud.launch_settings().store
    if not is_on_s3(store):
        return InputError(f"SageMaker cannot read {store}", "store-on-s3")
    check_bucket(context.account.client("s3"), store, "store", context.account.region)
    uri = storage.join(store, "data", f"doctor-{secrets.token_hex(4)}.txt")
    storage.write_bytes(uri, b"", context.settings)
    try:
        storage.remove(uri, context.settings)
    except ServiceError as error:
        problem = f"{uri} was written, and could not be deleted: {error}"
        return Doubt(problem, error.code, **error.facts)
    return f"{store} is writable"


def check_price(context: Context) -> Answer:
    prices = Prices(context.settings)
    price = prices.of(context.instance)
    if prices.failure:
        return Doubt(prices.failure)
    if price is None:
        return Doubt(f"the price of {context.instance} in {prices.region} is unknown")
    return f"{usd(price.per_hour)} an hour, by {price.source}"


QUOTA_SUFFIX = " for training job usage"  # of the name of a quota, which begins with the type


def check_quota(context: Context) -> Answer:
    """Check that quotas allow training jobs on the instance; without one, on a type with GPUs."""
    try:
        quotas = training_quotas(context)
    except ServiceError as error:
        return Doubt(f"could not check the quotas of instances: {error}", error.code, **error.facts)
    if not context.instance:
        return list_usable_gpus(quotas)
    name = f"{context.instance}{QUOTA_SUFFIX}"
    n_instances = quotas.get(context.instance)
    if n_instances is None:
        return Doubt(f"the account has no quota {name!r}")
    if n_instances < 1:
        code = "no-gpus-yet" if looks_like_gpu(context.instance) else "aws-quota"
        return ServiceError(f"{name!r} is 0", code)
    return f"{name!r} is {n_instances:g}"


def training_quotas(context: Context) -> dict[str, float]:
    """The number of instances, by type, that training jobs may use at the same time."""
    paginator = context.account.client("service-quotas").get_paginator("list_service_quotas")
    pages = paginator.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100})
    quotas = {}
    for page in pages:
        for quota in page["Quotas"]:
            name = quota["QuotaName"]
            if name.endswith(QUOTA_SUFFIX) and "spot" not in name:
                quotas[name.removesuffix(QUOTA_SUFFIX)] = quota["Value"]
    return quotas


def list_usable_gpus(quotas: Mapping[str, float]) -> Answer:
    """List the types with GPUs that training jobs may use, with the numbers of instances; a Doubt
    if there are none."""
    usable = []
    for name, n_instances in sorted(quotas.items()):
        if n_instances >= 1 and looks_like_gpu(name):
            usable.append(f"{n_instances:g} x {name}")
    if not usable:
        return Doubt("no instance with GPUs is allowed", code="no-gpus-yet")
    return ", ".join(usable)


def uses_aws(settings: Settings, instance: str | None) -> bool:
    """True if the account is to be checked: if AWS has the instance, or is configured."""
    if not instance:
        return settings.reaches_aws
    return backend_class(instance) is SageMakerBackend


def run_checks(settings: Settings, instance: str | None, train: bool) -> Iterator[Finding]:
    """Run the checks, and yield what each finds: first those of this machine, if `train`; then
    those of the account, if jobs would use it.

    A failure on which all later checks depend is the last finding.
    """
    checks: dict[str, Check] = {}
    if train:
        checks["local training"] = check_training
        checks["sandbox"] = check_sandbox
    if uses_aws(settings, instance):
        checks["credentials"] = check_credentials
        checks["quota"] = check_quota
        if instance:
            checks["price"] = check_price
        checks["stack"] = check_stack
        checks["role"] = check_role
        checks["store"] = check_store
    context = Context(settings, instance or "")
    for name, check in checks.items():
        finding = run_check(name, check, context)
        yield finding
        if finding.ends_checks:
            return


def run_check(name: str, check: Check, context: Context) -> Finding:
    try:
        answer = check(context)
    except LauncherError as error:
        answer = error
    if isinstance(answer, str):
        return Finding(name, OK, answer, answer)
    if isinstance(answer, Doubt):
        return Finding(name, WARNING, str(answer), answer)
    finding = Finding(name, FAILURE, str(answer), answer)
    if finding.ends_checks:
        return replace(finding, text=f"{answer}; what needs it is not checked")
    return finding
