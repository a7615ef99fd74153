"""Find the fields of a request that SageMaker does not take, before AWS is asked."""

from __future__ import annotations

from collections.abc import Iterator

from sm_nanogpt.launcher.instances import instance_problem
from sm_nanogpt.launcher.job import DEFAULT_RUN_SECONDS, Request
from sm_nanogpt.launcher.limits import violations
from sm_nanogpt.launcher.sagemaker.caller import TAG_KEY

Problem = tuple[str, object, str]  # a field, its value, and what is wrong with it

TAGS = {"type": "map", "key": {"shape": "TagKey"}, "value": {"shape": "TagValue"}}


def problems_of(request: Request) -> Iterator[Problem]:
    """Yield the fields that SageMaker does not take, with their values, and why."""
    problem = instance_problem(request.instances)
    if problem:
        yield "instance", request.instance, problem
    if request.instances and request.processes_per_instance is not None:
        yield "processes_per_instance", None, "is for local; SageMaker takes one per GPU"
    if request.image_uri is not None and "pytorch_version" in request.explicit_fields():
        yield "pytorch_version", None, "is for AWS's image; `image_uri=` names another"
    yield from spot_problems(request)
    if bool(request.subnets) != bool(request.security_group_ids):
        name = "subnets" if request.subnets else "security_group_ids"
        yield name, None, "subnets and security groups need each other"
    yield from limit_problems(request)
    for name in request.environment:
        if name.startswith(("SM_", "SAGEMAKER_")):
            yield "environment", name, "SageMaker sets it"
    for name in request.tags:
        if name.lower().startswith("aws:") or name.startswith(TAG_KEY):
            yield "tags", name, "this key is not for users"


def spot_problems(request: Request) -> Iterator[Problem]:
    shortest_run = request.max_run or (0 if request.max_cost else DEFAULT_RUN_SECONDS)
    if request.spot and len(request.instances) > 1:
        yield "spot", None, "takes one type of instance"
    if request.max_wait is not None and not request.spot:
        yield "max_wait", None, "is for spot jobs"
    if request.max_wait is not None and request.max_wait < shortest_run:
        yield "max_wait", request.max_wait, f"must be at least the time limit, {shortest_run}"
    if request.spot and request.keep_alive is not None:
        rule = "SageMaker keeps no warm pool of spot capacity; leave out one of them"
        yield "keep_alive", request.keep_alive, rule


def limit_problems(request: Request) -> Iterator[Problem]:
    """Yield the fields that are outside of the limits of SageMaker's API."""
    preferences = [{"InstanceType": name} for name in request.instances]
    for name, value, shape in (
        ("instance", preferences, "InstancePreferenceList"),
        ("image_uri", request.image_uri, "AlgorithmImage"),
        ("environment", request.environment, "TrainingEnvironmentMap"),
        ("tags", request.tags, TAGS),
        ("kms_key", request.kms_key, "KmsKeyId"),
        ("subnets", request.subnets, "Subnets"),
        ("security_group_ids", request.security_group_ids, "SecurityGroupIds"),
    ):
        if not value:
            continue
        for violation in violations(value, shape):
            if isinstance(value, dict) and violation.path:  # the value may be secret
                yield name, violation.path[0], f"its value {violation.problem}"
            else:
                yield name, violation.short_value, violation.problem
