"""Print what torch's compiler makes of the training folder for a GPU, on a machine without one.

    python tests/slow/gpu_kernels.py

The functions are traced on the CPU, with fake tensors. What is traced is then lowered as if its
tensors were on an H100, and nothing is executed. The output is JSON: for each function, the kernels
of its forward and backward pass. Needs triton, and torch 2.13: the steps are those of its compiler.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import triton
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import fake_tensor_prop, view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

from sm_nanogpt.entry_point import kernels, model
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.device import compiler_options

GPU = torch.device("cuda", 0)
H100 = types.SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    gcnArchName="",
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    warp_size=32,
)
H100_HINTS = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)
TOKENS = 1 << 16
WIDTH = 768
BATCH = 64
VOCABULARY = 50_304
SOURCE = re.compile("async_compile.triton\\('\\w+', '''(.*?)'''", re.DOTALL)
Pass = dict[str, Any]  # the kernels of a forward or a backward pass


@contextmanager
def make_believe_gpu() -> Iterator[None]:
    """Within it, torch and triton see an H100 as the machine's GPU."""
    driver = mock.MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    softmax_check = "torch._inductor.fx_passes.post_grad.prepare_softmax_extra_check"
    patches: list[Any] = [
        mock.patch.object(DeviceProperties, "create", lambda device: H100_HINTS),
        mock.patch.object(triton.runtime.driver, "_active", driver, create=True),
        mock.patch("torch.compiler.is_compiling", lambda: True),
        mock.patch(softmax_check, lambda match: True),  # it asks for a tensor on a GPU
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch.cuda.device_count", lambda: 1),
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("torch.cuda.get_device_properties", lambda *_: H100),
        mock.patch("torch.cuda.get_rng_state", lambda *_: torch.zeros(1)),
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.set_rng_state", lambda *_: None),
        mock.patch("torch.utils._triton.has_triton", lambda *_: True),
        mock.patch("torch.version.cuda", "12.8"),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def kernels_of(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Pass]:
    """The kernels of a function (forward) and of its gradient (backward)."""
    passes = {}

    def compiler(name: str) -> Callable[..., Any]:
        def lower(module: torch.fx.GraphModule, arguments: list[Any]) -> Any:
            passes[name] = lowered(copy_of(module), arguments, is_backward=name == "backward")
            return module.forward

        return lower

    traced = aot_function(
        function,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with torch._inductor.config.patch(compiler_options()):
        outputs = traced(*inputs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return passes


def copy_of(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node, copied in zip(module.graph.nodes, graph.nodes, strict=True):
        copied.meta = dict(node.meta)
    return torch.fx.GraphModule(module, graph)


def lowered(module: torch.fx.GraphModule, arguments: Sequence[Any], is_backward: bool) -> Pass:
    """The kernels of a traced module, as torch._inductor.compile_fx makes them.

    sources: their code. reads: for each, the buffers that it reads. n_bytes: for each, the bytes of
    the buffers that it reads or writes; a buffer counts whole if any of it is read.
    """
    view_to_reshape(module)
    with torch.no_grad():
        fake_tensor_prop(module, arguments)
    fake_mode = detect_fake_mode(arguments)
    assert fake_mode is not None
    with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        post_grad_passes(module, is_inference=False)
        with fake_mode, torch.no_grad():
            arguments = moved_to_gpu(module, arguments)
        graph = GraphLowering(module, arguments, is_backward=is_backward)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*arguments)
            code, _ = graph.codegen()
            nodes = [node for node in graph.scheduler.nodes if is_kernel(node)]
            n_bytes = [node.get_read_write_buffers_sizes() for node in nodes]
    reads = [sorted(dependency.name for dependency in node.read_writes.reads) for node in nodes]
    return {"sources": SOURCE.findall(code.value), "reads": reads, "n_bytes": n_bytes}


def moved_to_gpu(module: torch.fx.GraphModule, arguments: Sequence[Any]) -> list[Any]:
    """The arguments on a GPU; what the module makes is described as on the GPU, too."""

    def on_gpu(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)

    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
        if "val" in node.meta:
            node.meta["val"] = tree_map(on_gpu, node.meta["val"])
    module.recompile()
    return [on_gpu(argument) for argument in arguments]


def is_kernel(node: Any) -> bool:
    """False for a product, and for what only names a buffer."""
    return not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode))


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def loss_kernels() -> dict[str, Pass]:
    """The kernels of the loss, whose logits are computed in several chunks."""

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Any:
        return kernels.ChunkedLoss.apply(x, weight, targets)

    x = parameter(TOKENS, WIDTH, dtype=torch.bfloat16)
    targets = torch.empty(TOKENS, dtype=torch.long)
    with mock.patch.object(kernels, "logits_at_once", lambda device: 1 << 30):
        return kernels_of(loss, x, parameter(VOCABULARY, WIDTH), targets)


def module_kernels(
    module: torch.nn.Module, run: Callable[..., Any], *inputs: Tensor
) -> dict[str, Pass]:
    """The kernels of a function that uses a module; its parameters have gradients, too."""
    names = [name for name, _ in module.named_parameters()]

    def with_parameters(*values: Tensor) -> Any:
        parameters = dict(zip(names, values[: len(names)], strict=True))
        with torch.nn.utils.stateless._reparametrize_module(module, parameters):
            return run(*values[len(names) :])

    return kernels_of(with_parameters, *module.parameters(), *inputs)


def main() -> None:
    config = Config(n_layer=1, n_head=12, n_embd=WIDTH, block_size=TOKENS // BATCH, dropout=0.0)
    with make_believe_gpu(), FakeTensorMode():
        x = parameter(BATCH, config.block_size, WIDTH, dtype=torch.bfloat16)
        cos, sin = model.rotary(torch.arange(config.block_size), config, torch.bfloat16)
        attention, mlp = model.Attention(config), model.MLP(config)
        kernels_by_function = {
            "loss": loss_kernels(),
            "heads": module_kernels(attention, attention.heads, x, cos, sin),
            "mlp": module_kernels(mlp, mlp, x),
        }
    json.dump({"tokens": TOKENS, **kernels_by_function}, sys.stdout)


if __name__ == "__main__":
    main()
