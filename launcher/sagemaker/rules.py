"""Check the fields of a request against the rules of SageMaker, before AWS is asked."""

from __future__ import annotations

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.instances import instance_problem
from sm_nanogpt.launcher.job import DEFAULT_RUN_SECONDS, Request
from sm_nanogpt.launcher.limits import violations
from sm_nanogpt.launcher.sagemaker.caller import TAG_KEY

# The tags of a request are a dictionary. For the API they are a list of pairs.
TAGS_SHAPE = {"type": "map", "key": {"shape": "TagKey"}, "value": {"shape": "TagValue"}}


def check_fields(request: Request) -> None:
    """Raise InputError if SageMaker does not take a field of a request."""
    instance_fault = instance_problem(request.instances)
    if instance_fault:
        raise InputError(instance_fault, field="instance", value=request.instance)
    if request.instances and request.processes_per_instance is not None:
        problem = "is for local; SageMaker takes one per GPU"
        raise InputError(problem, field="processes_per_instance")
    if request.image_uri is not None and "pytorch_version" in request.explicit_fields():
        problem = "is for AWS's image; `image_uri=` names another"
        raise InputError(problem, field="pytorch_version")
    check_spot(request)
    if bool(request.subnets) != bool(request.security_group_ids):
        name = "subnets" if request.subnets else "security_group_ids"
        raise InputError("subnets and security groups need each other", field=name)
    check_limits(request)
    for name in request.environment:
        if name.startswith(("SM_", "SAGEMAKER_")):
            raise InputError("SageMaker sets it", field="environment", value=name)
    for name in request.tags:
        if name.lower().startswith("aws:") or name.startswith(TAG_KEY):
            raise InputError("this key is not for users", field="tags", value=name)


def check_spot(request: Request) -> None:
    """Raise InputError if the fields about spot capacity and time limits do not fit together."""
    # A limit of the cost sets the time limit later, so that any wait may be long enough.
    time_limit = request.max_run or (0 if request.max_cost else DEFAULT_RUN_SECONDS)
    max_wait = request.max_wait
    if request.spot and len(request.instances) > 1:
        raise InputError("takes one type of instance", field="spot")
    if max_wait is not None and not request.spot:
        raise InputError("is for spot jobs", field="max_wait")
    if max_wait is not None and max_wait < time_limit:
        problem = f"must be at least the time limit, {time_limit}"
        raise InputError(problem, field="max_wait", value=max_wait)
    if request.spot and request.keep_alive is not None:
        problem = "SageMaker keeps no warm pool of spot capacity; leave out one of them"
        raise InputError(problem, field="keep_alive", value=request.keep_alive)


def check_limits(request: Request) -> None:
    """Raise InputError if a field is outside of the limits of SageMaker's API.

    The message names a variable or a tag without its value, which may be secret.
    """
    preferences = [{"InstanceType": name} for name in request.instances]
    for field, value, shape in (
        ("instance", preferences, "InstancePreferenceList"),
        ("image_uri", request.image_uri, "AlgorithmImage"),
        ("environment", request.environment, "TrainingEnvironmentMap"),
        ("tags", request.tags, TAGS_SHAPE),
        ("kms_key", request.kms_key, "KmsKeyId"),
        ("subnets", request.subnets, "Subnets"),
        ("security_group_ids", request.security_group_ids, "SecurityGroupIds"),
    ):
        violation = next(violations(value, shape), None) if value else None
        if violation is None:
            continue
        if isinstance(value, dict) and violation.path:  # of the value of this variable or tag
            problem = f"its value {violation.problem}"
            raise InputError(problem, field=field, value=violation.path[0])
        raise InputError(violation.problem, field=field, value=violation.short_value)
