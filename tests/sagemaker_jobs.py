"""What tests look for in jobs on SageMaker: their requests, logs and checkpoints."""

from __future__ import annotations

from typing import Any

from sm_nanogpt.launcher.sagemaker import deploy
from sm_nanogpt.launcher.sagemaker.stack import Stack
from sm_nanogpt.launcher.settings import load_settings

TAGGED = "[1,mpirank:0,algo-1]<stdout>:"  # how mpirun begins a line of rank 0
CHECKPOINT = "some/prefix/checkpoints/{}/checkpoint-00000010.safetensors"  # its key, by a job's id


def part(request: Any, path: str) -> Any:
    """The part of a request at a path with dots, or None."""
    for name in path.split("."):
        request = request[int(name)] if isinstance(request, list) else request.get(name)
    return request


LAUNCH = ("launch", "--instance", "ml.g5.12xlarge")
REGISTRY = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
OWN_ROLE = "arn:aws:iam::123456789012:role/mine"


def deploy_stack(**options: Any) -> Stack:
    deployment = deploy.Deployment(load_settings())
    change_set = deployment.plan(**options)
    assert change_set is not None
    return deployment.execute(change_set)
