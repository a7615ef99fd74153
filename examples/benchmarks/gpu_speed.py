"""The stages of gpu.py that measure speed and the time to a loss."""

from __future__ import annotations

import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
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
    Found,
    Variant,
    no_cudnn_attention,
    step,
    trained,
    trainer_of,
)
from ladder import rungs
from measure import Process
from trainers import SHAPES, NanoGPT, our_model, our_shape


def ladder(args: Namespace, scratch: Path, found: Found) -> None:
    """The tutorial's rungs and a few more, with the loss after the same number of steps."""
    steps, device = (20, "cpu") if args.smoke else (200, "cuda")
    name = "smoke" if args.smoke else "baby"
    more = {**SHORT, "device": device, "max_steps": steps, "log_interval": steps // 5}
    size, preset = {**SHAPES[name], **more}, {**our_shape(name), **more}
    runs = [(rung, Variant({**size, **words}, switches=s)) for rung, words, s in rungs(device)]
    if args.smoke:
        runs = runs[:1]
    else:
        half, no_cudnn = {**size, **HALF}, "torch.backends.cuda.enable_cudnn_sdp(False)"
        runs += [
            ("not cuDNN's attention", Variant({**half, **COMPILED}, switches=no_cudnn)),
            ("no dropout", Variant({**half, **COMPILED, "dropout": 0.0})),
            ("eager", Variant(half)),
            ("eager, not cuDNN's attention", Variant(half, switches=no_cudnn)),
            ("preset baby, eager", Variant(preset)),
            ("preset baby, compiled", Variant({**preset, **COMPILED})),
        ]
    for name, variant in runs:
        with found.part(name):
            began = time.perf_counter()
            rows = trained(args, scratch, name, variant)
            seconds = time.perf_counter() - began
            # Without the first line, during which libraries load.
            speed = statistics.median(row["tokens_per_second"] for row in rows[1:])
            loss = f"{rows[-1]['val_loss']:.4f}"
            cells = {"tokens/s": round(speed), f"val_loss at {steps}": loss}
            found.row(name, **cells, **{"whole command s": f"{seconds:.0f}"})


def against(args: Namespace, scratch: Path, found: Found) -> None:
    """Tokens per second of ours and nanoGPT, with nanoGPT's two shapes for GPUs."""
    for name in ("baby",) if args.smoke else ("baby", "gpt2"):
        with found.part(name):
            options = Namespace(**vars(args), shape=name, seconds=5.0, peak=None)
            report = throughput.benchmark(options, scratch / name)
            for row in report.rows:
                found.row(f"{name}: {row.pop('')}", **row)
            found.report.findings |= {f"{name}: {k}": v for k, v in report.findings.items()}
            found.write()


def loss(args: Namespace, scratch: Path, found: Found) -> None:
    """Seconds to nanoGPT's loss on its text."""
    shape = None if args.smoke else "baby"
    options = Namespace(**vars(args), shape=shape, target=None, first_seed=1000)
    found.report = time_to_loss.benchmark(options, scratch)
    found.write()


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


def profile(args: Namespace, scratch: Path, found: Found) -> None:
    """Where the time of a step goes, the largest memory, and how busy the GPU is."""
    from entry_point.config import PRESETS

    if args.smoke:
        runs = {"smoke": {**SHAPES["smoke"], **SHORT}}
    else:
        common = {**SHORT, **HALF, "device": "cuda"}
        baby = {**PRESETS["baby"], **common}
        gpt2 = {**SHAPES["gpt2"], **common, "tie_embeddings": True}
        runs = {
            "baby, compiled": {**baby, **COMPILED},
            "baby, eager": baby,
            "gpt2, compiled": {**gpt2, **COMPILED},
            "gpt2, compiled, 8 passes": {**gpt2, **COMPILED, "gradient_accumulation_steps": 8},
        }
    for name, words in runs.items():
        with found.part(name):
            large = name.startswith("gpt2")
            text = throughput.many_symbols(scratch) if large else args.text
            profiled(name, text, scratch / name, words, 3 if large else 20, found)


def profiled(
    name: str, text: Path, out: Path, words: Mapping[str, Any], steps: int, found: Found
) -> None:
    import torch
    from torch.profiler import ProfilerActivity

    torch.compiler.reset()
    trainer = trainer_of(text, out, words)
    synchronize, cuda = trainer.group.synchronize, trainer.group.device.type == "cuda"
    if trainer.compiled:
        trainer.warm_up()

    def seconds(work: Callable[[], object]) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            work()
        synchronize()
        return (time.perf_counter() - began) / steps

    seconds(lambda: step(trainer))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    whole = seconds(lambda: step(trainer))
    trainer.forward_backward(trainer.step)
    update = seconds(lambda: trainer.optimizer.step(1e-6))
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=kinds) as profiler:
        step(trainer)
        synchronize()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    print(f"[{name}]", averages.table(sort_by=key, row_limit=40, max_name_column_width=100))
    spent, calls = dict.fromkeys([*KINDS, "rest"], 0.0), 0
    for event in averages:
        noted = getattr(event, "is_user_annotation", False) or event.key.startswith(
            ("##", "Torch-")
        )
        if cuda and (event.device_type.name != "CUDA" or noted):
            continue
        fits = (k for k, names in KINDS.items() if re.search(names, event.key, re.IGNORECASE))
        spent[next(fits, "rest")] += getattr(event, key) / 1000
        calls += event.count
    tokens = trainer.config.batch_size * trainer.config.block_size
    cells: dict[str, Any] = {"ms a step": f"{1000 * whole:.2f}", "tokens/s": round(tokens / whole)}
    cells |= {"update ms": f"{1000 * update:.2f}", "kernels": calls}
    cells["busy %"] = f"{100 * sum(spent.values()) / (1000 * whole):.0f}"
    if cuda:
        cells["GB"] = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"
    found.row(name, **cells, **{f"{kind} ms": f"{ms:.2f}" for kind, ms in spent.items()})


def sampling(args: Namespace, scratch: Path, found: Found) -> None:
    """Characters per second; the model's text does not matter, so it is trained for a step."""
    import torch

    from launcher.models import engine

    name, length, many = ("smoke", 60, 4) if args.smoke else ("baby", 500, 16)
    device = "cpu" if args.smoke else "cuda"
    words = {**our_shape(name), **SHORT, "device": device, "batch_size": 2, "max_steps": 1}
    trained(args, scratch, "ours", Variant(words))
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
        ("with a cache", engine.generate),
        ("the plain loop", engine.generate_plainly),
    ):
        for samples in (1, many):
            with found.part(side):
                found.row(f"ours {side}, {samples} at once", **row_of(rate(generate, samples)))
    if not args.nanogpt:
        return
    nanogpt = NanoGPT(args.nanogpt, args.text, scratch)
    out = sampling_benchmark.their_checkpoint(nanogpt, name, scratch)
    batch = sampling_benchmark.their_batch(nanogpt, out, device, many)
    with found.part("nanoGPT at once"):
        found.row(
            f"nanoGPT, {many} at once",
            **row_of(sampling_benchmark.their_batch_rate(batch, many, length)),
        )
    script = [sys.executable, str(nanogpt.checkout / "sample.py")]
    for compiled in (False,) if args.smoke else (False, True):
        way = f"nanoGPT, 1 at once, {'compiled' if compiled else 'eager'}"
        words = {"out_dir": out, "device": device, "compile": compiled}
        process = Process([*script, *measure.as_options(words)], nanogpt.place, nanogpt.env)
        with found.part(way):
            found.row(way, **row_of(sampling_benchmark.their_rate(process, 2, length)))


def row_of(characters: float) -> dict[str, Any]:
    return {"characters/s in all": round(characters)}
