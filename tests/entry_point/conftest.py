"""CUDA and torch's compiler, in place of those that a CPU has not."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from runs import make_hosts


@pytest.fixture
def graphs(monkeypatch):
    """What torch's compiler is given from here on, each a whole function; it runs as it is."""
    graphs = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiler = functools.partial(torch.compile, backend=keep, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiler)
    torch.compiler.reset()
    return graphs


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's calls around a graph, which a CPU cannot make: nothing is recorded."""
    cuda = MagicMock()
    cuda.max_memory_allocated.return_value = 3
    cuda.get_device_properties.return_value.total_memory = 10
    monkeypatch.setattr("sm_nanogpt.entry_point.cuda_graphs.torch.cuda", cuda)
    return cuda


@pytest.fixture
def base(tmp_path):
    """An /opt/ml of the second of two hosts, with resourceconfig.json."""
    (tmp_path / "input/data/training").mkdir(parents=True)
    (tmp_path / "input/config").mkdir()
    resources = dict(
        current_host="algo-2", hosts=["algo-1", "algo-2"], network_interface_name="eth0"
    )
    (tmp_path / "input/config/resourceconfig.json").write_text(json.dumps(resources))
    return tmp_path


@pytest.fixture
def sagemaker(tmp_path, text):
    """The environment of a host that is laid out as SageMaker does it, in algo-1."""
    return make_hosts(tmp_path, text)[0]
