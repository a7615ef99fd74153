"""The stages of gpu.py that measure speed and the time to a loss."""

from __future__ import annotations

import gc
import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measure
import sampling as sampling_benchmark
import throughput
import time_to_loss
from gpu_checks import (
    COMPILED,
    HALF,
    SHORT,
    Results,
    Variant,
    metrics,
    no_cudnn_attention,
    started,
    trained,
    trainer_of,
)
from ladder import rungs
from measure import Failed, Process
from trainers import (
    NEVER,
    SHAPES,
    NanoGPT,
    Pace,
    Paused,
    Training,
    gpt2_passes,
    gpu_memory,
    our_model,
    our_shape,
    ours,
)


@dataclass(frozen=True)
class Plan:
    """Runs that are compared, and what is done with each of them in each round."""

    trainings: Mapping[str, Training]
    rounds: int
    turn: Callable[[str, Paused], None]
    report: Callable[[], None] = lambda: None


def speed(args: Namespace, scratch: Path, results: Results) -> None:
    """Tokens/s of ours against nanoGPT, with its shapes."""
    plans = []
    for name in ("smoke",) if args.smoke else ("baby", "gpt2"):
        plans.append(against(args, scratch / name, results, name))
    in_turns(plans, args, results, memory=100e9)


def ladder(args: Namespace, scratch: Path, results: Results) -> None:
    """Tokens/s of the tutorial's rungs and a few more."""
    in_turns([climb(args, scratch, results)], args, results, memory=70e9)


def in_turns(plans: Sequence[Plan], args: Namespace, results: Results, memory: float) -> None:
    """Runs all plans, one run at a time.

    If the GPU has more than `memory`, all runs start together, compile, and then pause until their
    turn.
    """
    together = args.smoke or gpu_memory() > memory
    runs: dict[str, Paused] = {}
    try:
        if together:
            for plan in plans:
                for name, training in plan.trainings.items():
                    runs[name] = Paused(training)
        for run in runs.values():  # nothing is timed while another compiles
            with suppress(Failed):  # which its turn raises again
                run.wait(2)
        for plan in plans:
            if together:
                for name in list(plan.trainings) * plan.rounds:
                    with results.part(name):
                        plan.turn(name, runs[name])
            else:
                for name, training in plan.trainings.items():
                    with results.part(name):
                        runs[name] = Paused(training)
                        for _ in range(plan.rounds):
                            plan.turn(name, runs[name])
                    runs.pop(name).end()
            plan.report()
    finally:
        for run in runs.values():
            run.end()


def climb(args: Namespace, scratch: Path, results: Results) -> Plan:
    """The tutorial's rungs and a few more, with the loss after the same number of steps."""
    steps, device = (20, "cpu") if args.smoke else (200, "cuda")
    shape = "smoke" if args.smoke else "baby"
    common = {**SHORT, "device": device, "max_steps": steps, "log_interval": steps // 10}
    size = {**SHAPES[shape], **common}
    preset = {**our_shape(shape), **common}
    variants = {}
    for rung, options, switches in rungs(device)[:1] if args.smoke else rungs(device):
        variants[rung] = Variant({**size, **options}, switches=switches)
    if not args.smoke:
        half = {**size, **HALF}
        variants |= {
            "no dropout": Variant({**half, **COMPILED, "dropout": 0.0}),
            "eager, by a CUDA graph": Variant({**half, "compile": "auto"}),
            "eager": Variant(half),
            "preset baby, eager, by a CUDA graph": Variant({**preset, "compile": "auto"}),
            "preset baby, compiled": Variant({**preset, **COMPILED}),
        }
    trainings: dict[str, Training] = {}
    directories: dict[str, Path] = {}
    for name, variant in variants.items():
        process, directories[name] = started(args, scratch, name, variant)
        trainings[name] = Training(name, process, re.compile(r"step=(\d+)/"))

    def turn(name: str, run: Paused) -> None:
        run.finish()
        rows = metrics(directories[name])
        # The third line has the pause in it.
        rate = statistics.median(row["tokens_per_second"] for row in rows[3:])
        loss = f"{rows[-1]['val_loss']:.4f}"
        results.row(name, **{"tokens/s": round(rate), f"val_loss at {steps}": loss})

    return Plan(trainings, 1, turn)


def against(args: Namespace, scratch: Path, results: Results, name: str) -> Plan:
    """Tokens per second of ours and nanoGPT, both compiled, with nanoGPT's shapes for GPUs."""
    scratch.mkdir()
    large, shape = name == "gpt2", SHAPES[name]
    text = throughput.many_symbols(scratch) if large else args.text
    rare = {"log_interval": 1 if large else 10, "eval_interval": NEVER}
    options = {**our_shape(name), **rare, "max_steps": NEVER, **({} if args.smoke else COMPILED)}
    trainings = {f"ours, {name}": ours(text, scratch / name, options)}
    their_side = f"nanoGPT, {name}"
    if args.nanogpt:
        theirs = {**shape, **rare, "max_iters": NEVER, "eval_iters": 1, "out_dir": scratch / "out"}
        pass_counts = gpt2_passes(gpu_memory()) if large else [1]
        nanogpt = NanoGPT(args.nanogpt, text, scratch)
        training = next(nanogpt.variants(theirs, args.smoke, pass_counts))
        if large:
            their_side += f", {pass_counts[0]} passes"
        trainings[their_side] = training
    paces: dict[str, list[Pace]] = {side: [] for side in trainings}
    seconds = 4.0 if large else 2.0
    if args.smoke:
        seconds = 0.2

    def turn(side: str, run: Paused) -> None:
        paces[side].append(run.pace(shape, seconds))

    def report() -> None:
        peak = None if args.smoke else throughput.peak(measure.torch_and_gpu()[1] or "", None)
        rates: dict[str, list[float]] = {}
        for side, paces_of_side in paces.items():
            if paces_of_side:
                cells = throughput.row(side, paces_of_side, shape, peak)
                results.row(cells.pop(""), **cells)
                rates[side] = [pace.tokens_per_second for pace in paces_of_side]
        theirs = rates.pop(their_side, None)
        if theirs:
            for side, mine in rates.items():
                results.report.findings[f"{side}, over nanoGPT"] = measure.ratio(mine, theirs)
        results.write()

    return Plan(trainings, 1 if large else 3, turn, report)


def loss(args: Namespace, scratch: Path, results: Results) -> None:
    """Seconds to nanoGPT's loss on its text."""
    shape = None if args.smoke else "baby"
    options = Namespace(**vars(args), shape=shape, target=None, first_seed=1000)
    results.report = time_to_loss.benchmark(options, scratch)
    results.write()


# The shape of Qwen3-1.7B, with which its memory is measured.
LARGE = dict(n_layer=28, n_head=16, n_kv_head=8, head_dim=128, n_embd=2048, n_hidden=6144)
LARGE |= dict(tie_embeddings=True, vocab_size=151_936, block_size=1024, batch_size=2)

# What a kernel does, by its name; the first match counts.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|mm\b",
    "by Inductor": r"^triton_",
    "optimizer": r"adam|multi_tensor",
    "norms": r"norm",
    "copies": r"copy|memcpy|memset|cat",
    "elementwise": r"elementwise|fill|dropout",
    "sums": r"reduce|softmax|scan",
}


def profile(args: Namespace, scratch: Path, results: Results) -> None:
    """Where the time of a step goes, the largest memory, and how busy the GPU is."""
    from sm_nanogpt.entry_point.presets import PRESETS

    if args.smoke:
        runs = {"smoke": Look({**SHAPES["smoke"], **SHORT})}
    else:
        common = {**SHORT, **HALF, **COMPILED, "device": "cuda"}
        baby, gpt2 = ({**PRESETS[name], **common} for name in ("baby", "gpt2"))
        runs = {"baby": Look(baby, steps=20)}
        for passes in (8, 15, 30):
            options = {**gpt2, "gradient_accumulation_steps": passes}
            runs[f"gpt2, {passes} passes, by a graph"] = Look(options)
            runs[f"gpt2, {passes} passes"] = Look(options, graph=False)
        runs["gpt2, documents, FlexAttention"] = Look(gpt2, documents=True)
        runs["gpt2, documents, a mask"] = Look(gpt2, documents=True, flex=False)
        runs["1.7 B, 2,048 tokens"] = Look({**LARGE, **common, "compile": "off"}, steps=1)
    for name, look in runs.items():
        with results.part(name):
            large = look.options["n_embd"] >= 768
            text = throughput.many_symbols(scratch) if large else args.text
            profiled(name, text, scratch / name, look, results)


@dataclass(frozen=True)
class Look:
    """A run to profile: its settings, and what takes the place of what it would choose."""

    options: Mapping[str, Any]
    graph: bool = True
    flex: bool = True
    documents: bool = False  # of 500 tokens
    steps: int = 3


def profiled(name: str, text: Path, out: Path, look: Look, results: Results) -> None:
    import torch
    from torch.profiler import ProfilerActivity

    from sm_nanogpt.entry_point import kernels

    torch.compiler.reset()
    gc.collect()  # the run before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    kernels.FLEX_DEVICE = "cuda" if look.flex else "none"
    trainer, steps = trainer_of(text, out, look.options), look.steps
    synchronize, cuda = trainer.group.synchronize, trainer.group.device.type == "cuda"
    trainer.passes.uses_graphs &= look.graph
    if look.documents:
        trainer.passes.end = 0
        trainer.corpus.train[::500] = 0
    trainer.passes.warm_up()

    def seconds(work: Callable[[], object]) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            work()
        synchronize()
        return (time.perf_counter() - began) / steps

    seconds(trainer.train_step)
    whole = seconds(trainer.train_step)
    trainer.passes.forward_backward(trainer.step)
    update = seconds(lambda: trainer.optimizer.step(1e-6))
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=kinds) as profiler:
        trainer.train_step()
        synchronize()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    print(f"[{name}]", averages.table(sort_by=key, row_limit=40, max_name_column_width=100))
    spent = dict.fromkeys([*KINDS, "rest"], 0.0)  # milliseconds
    calls = 0
    for event in averages:
        if cuda and not is_kernel(event):
            continue
        spent[kind_of(event.key)] += getattr(event, key) / 1000
        calls += event.count
    tokens = trainer.config.batch_size * trainer.config.block_size
    cells: dict[str, Any] = {"ms a step": f"{1000 * whole:.2f}", "tokens/s": round(tokens / whole)}
    cells |= {"update ms": f"{1000 * update:.2f}", "kernels": calls}
    cells["busy %"] = f"{100 * sum(spent.values()) / (1000 * whole):.0f}"
    if cuda:
        cells["GB"] = f"{torch.cuda.max_memory_reserved() / 1e9:.1f}"
    for kind, milliseconds in spent.items():
        cells[f"{kind} ms"] = f"{milliseconds:.2f}"
    results.row(name, **cells)


def is_kernel(event: Any) -> bool:
    """Whether an event of the profiler is work of the GPU, and no heading over such work."""
    is_heading = getattr(event, "is_user_annotation", False)
    is_heading = is_heading or event.key.startswith(("##", "Torch-"))
    return event.device_type.name == "CUDA" and not is_heading


def kind_of(kernel: str) -> str:
    for kind, names in KINDS.items():
        if re.search(names, kernel, re.IGNORECASE):
            return kind
    return "rest"


def sampling(args: Namespace, scratch: Path, results: Results) -> None:
    """Characters per second; the model's text does not matter, so it is trained for a step."""
    import torch

    from sm_nanogpt.launcher.models import engine

    name, length, many = ("smoke", 60, 4) if args.smoke else ("baby", 500, 64)
    device = "cpu" if args.smoke else "cuda"
    options = {**our_shape(name), **SHORT, "device": device, "batch_size": 2, "max_steps": 1}
    trained(args, scratch, "ours", Variant(options))
    model, _ = our_model(scratch / "ours")
    model.to(device).compute_dtype = torch.float32 if args.smoke else torch.bfloat16

    def rate(generate: Callable[..., Iterator[Any]], samples: int) -> float:
        prompt = torch.zeros(samples, 1, dtype=torch.long, device=device)
        with no_cudnn_attention():
            for tokens in (5, length):  # the first samples load libraries
                began = time.perf_counter()
                *_, last = generate(model, prompt, tokens, temperature=0.8)
                last.tolist()  # waits for the GPU
        return samples * length / (time.perf_counter() - began)

    for side, generate in (
        ("by a graph", sampled_by_graph),
        ("with a cache", engine.generate),
        ("the plain loop", partial(engine.generate, use_cache=False)),
    ):
        for samples in (1, many):
            with results.part(side):
                results.row(f"ours {side}, {samples} at once", **row_of(rate(generate, samples)))
    if not args.nanogpt:
        return
    nanogpt = NanoGPT(args.nanogpt, args.text, scratch)
    out = sampling_benchmark.their_checkpoint(nanogpt, name, scratch)
    batch = sampling_benchmark.their_batch(nanogpt, out, device, many)
    with results.part("nanoGPT at once"):
        results.row(
            f"nanoGPT, {many} at once",
            **row_of(sampling_benchmark.their_batch_rate(batch, many, length)),
        )
    script = [sys.executable, str(nanogpt.checkout / "sample.py")]
    options = {"out_dir": out, "device": device, "compile": False}  # compiled, it is slower
    process = Process([*script, *measure.as_arguments(options)], nanogpt.directory, nanogpt.env)
    with results.part("nanoGPT, 1 at once"):
        rate_of_one = sampling_benchmark.their_rate(process, 2, length)
        results.row("nanoGPT's sample.py, 1 at once", **row_of(rate_of_one))


def sampled_by_graph(
    model: Any, prompt: Any, max_new_tokens: int, temperature: float
) -> Iterator[Any]:
    """engine.generate of a prompt of one token, whose step is a CUDA graph (on a CPU, none)."""
    import torch
    import torch.nn.functional as F

    from sm_nanogpt.entry_point.kernels import repeat_kv
    from sm_nanogpt.entry_point.model import norm, rotary
    from sm_nanogpt.launcher.models import engine

    model, device = engine.sampling_copy(model, len(prompt), model.compute_dtype), prompt.device
    cache = engine.KeyValueCache(model, len(prompt), max_new_tokens + 1)
    ids, position = prompt.clone(), torch.zeros(1, dtype=torch.long, device=device)
    generator = torch.cuda.default_generators[0] if prompt.is_cuda else torch.Generator()

    def step() -> None:
        cos, sin = rotary(position, model.config, model.compute_dtype)
        is_past = (torch.arange(cache.size, device=device) <= position)[None, None, None]
        x = model.embed(ids).to(model.compute_dtype)
        for layer, block in enumerate(model.blocks):
            q, k, v = block.attention.heads(norm(x, block.attention_norm), cos, sin)
            cache.k[layer].index_copy_(2, position % cache.size, k)
            cache.v[layer].index_copy_(2, position % cache.size, v)
            keys = repeat_kv(cache.k[layer], q.size(1))
            values = repeat_kv(cache.v[layer], q.size(1))
            y = F.scaled_dot_product_attention(q, keys, values, is_past)
            x = x + block.attention.out(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(norm(x, block.mlp_norm))
        head = model.embed if model.head is None else model.head
        last = norm(x[:, -1], model.norm)
        logits = F.linear(last, head.weight.to(x.dtype)).float()
        ids.copy_(engine.draw(logits, temperature, 0, 1.0, generator)[:, None])
        position.add_(1)

    replay = step
    with torch.inference_mode():
        if prompt.is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
            ids.copy_(prompt)
            position.zero_()
        for _ in range(max_new_tokens):
            replay()
            yield ids[:, 0].clone()


def row_of(characters: float) -> dict[str, Any]:
    return {"characters/s in all": round(characters)}
