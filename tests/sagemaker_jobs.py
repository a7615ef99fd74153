"""What tests look for in jobs on SageMaker: their requests, logs and checkpoints."""

from __future__ import annotations

from typing import Any

TAGGED = "[1,mpirank:0,algo-1]<stdout>:"  # how mpirun begins a line of rank 0
CHECKPOINT = "some/prefix/checkpoints/{}/checkpoint-00000010.safetensors"  # its key, by a job's id


def part(request: Any, path: str) -> Any:
    """The part of a request at a path with dots, or None."""
    for name in path.split("."):
        request = request[int(name)] if isinstance(request, list) else request.get(name)
    return request
