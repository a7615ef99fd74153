"""The stages of gpu.py that check train.py on a GPU and with NCCL."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import measure
from measure import ROOT, Failed, Process, Report
from trainers import SHAPES, ours

sys.path += [str(ROOT), str(ROOT / "examples" / "tutorials")]
from ladder import with_switches

SCRIPT = ROOT / "entry_point" / "train.py"
TOGETHER = 4  # runs at once, where nothing is timed
Edits = Sequence[tuple[str, str]]  # (old, new) lines of an edited copy of the folder


class Results:
    """The results of a stage so far, in a file that is complete at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = Report()
        self.failed = False
        self.write()

    def write(self) -> None:
        measure.write_json(self.path, self.report, {})

    def row(self, name: str, **cells: Any) -> None:
        self.report.rows.append({"": name, **cells})
        print(self.report.rows[-1], flush=True)
        self.write()

    def check(self, name: str, value: float, limit: float) -> None:
        """A check that passes if the value is at most the limit; NaN fails."""
        passed = value <= limit
        self.failed |= not passed
        cells = {"found": f"{value:.2g}", "at most": f"{limit:g}"}
        self.row(name, **cells, check="pass" if passed else "FAIL")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the stage; its failure does not stop the other parts."""
        try:
            yield
        except Exception as error:  # torch raises many classes
            self.failed = True
            self.row(name, found=f"{type(error).__name__}: {error}"[:300], check="FAIL")


# ------------------------------------------------------------------------------------------------
# Runs of train.py


@dataclass(frozen=True)
class Variant:
    """A run of train.py, and how far its losses may be from those of another run (relative)."""

    options: Mapping[str, Any]
    edits: Edits = ()
    other: str = ""
    limit: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    switches: str = ""  # torch's switches, as in ladder.py
    says: str = ""  # in its log


def started(args: Namespace, scratch: Path, name: str, variant: Variant) -> tuple[Process, Path]:
    """The process of a variant, and the directory of its results."""
    out = scratch / re.sub(r"\W+", "-", name)
    training = with_switches(ours(args.text, out, variant.options), variant.switches)
    command = list(training.process.command)
    if variant.edits:
        copy = out.with_name(f"{out.name}-code")
        shutil.copytree(SCRIPT.parent, copy)
        for old, new in variant.edits:
            files = [file for file in copy.glob("*.py") if old in file.read_text("utf-8")]
            if not files:
                raise Failed(f"no file of entry_point has {old!r} to replace")
            for file in files:
                file.write_text(file.read_text("utf-8").replace(old, new), "utf-8")
        command[command.index(str(SCRIPT))] = str(copy / "train.py")
    return Process(command, env=variant.env), out


def trained(args: Namespace, scratch: Path, name: str, variant: Variant) -> list[dict[str, Any]]:
    """Runs a variant to its end, with its output in the log; returns the rows of its metrics."""
    process, out = started(args, scratch, name, variant)
    log = ""
    for _, line in measure.lines(process):
        print(f"[{name}] {line}", end="")
        log += line
    if variant.says not in log:
        raise Failed(f"{name} did not say {variant.says!r}")
    return metrics(out)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (out / "output/metrics.jsonl").read_text().splitlines()]


def losses(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [row["train_loss"] for row in rows]


def furthest(mine: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference; infinite if one has more steps."""
    if len(mine) != len(other):
        return math.inf
    return max(abs(a / b - 1) for a, b in zip(mine, other, strict=True))


def compare(
    args: Namespace, scratch: Path, results: Results, variants: Mapping[str, Variant]
) -> None:
    """Runs the variants, some at once; checks each against another, or that its loss falls."""
    curves: dict[str, list[float]] = {}
    waiting = dict(variants)
    pool = ThreadPoolExecutor(TOGETHER)
    try:
        name_of = {}
        for name, variant in variants.items():
            name_of[pool.submit(trained, args, scratch, name, variant)] = name
        for future in as_completed(name_of):
            with results.part(name_of[future]):
                curves[name_of[future]] = losses(future.result())
            for name, variant in list(waiting.items()):
                if name not in curves or variant.other not in ("", *curves):
                    continue
                mine = curves[name]
                if variant.other:
                    far = furthest(mine, curves[variant.other])
                    results.check(f"{name}: loss against {variant.other}", far, variant.limit)
                else:
                    results.check(f"{name}: last loss over first", mine[-1] / mine[0], 0.98)
                del waiting[name]
    finally:
        pool.shutdown(cancel_futures=True)


# Several chunks of small's batch.
CHUNKS: Edits = (("LOGITS_AT_ONCE = 1 << 28", "LOGITS_AT_ONCE = 1 << 16"),)
SHORT = dict(eval_tokens=1 << 14, eval_interval=10**9, sample_length=0, compile="off")
FULL, HALF, COMPILED = {"precision": "float32"}, {"precision": "bfloat16"}, {"compile": "on"}
# Devices and kernels round float32 differently, and Muon amplifies that with each step.
SAME, CLOSE = 5e-3, 3e-2


def small(args: Namespace) -> dict[str, Any]:
    """A model to compare curves of; its heads are 128 wide, as in the presets for GPUs."""
    if args.smoke:
        return {**SHAPES["smoke"], **SHORT, "log_interval": 1, "max_steps": 20}
    size = dict(n_layer=4, n_head=2, n_embd=256, block_size=256, batch_size=32, max_steps=40)
    return {**size, **SHORT, "log_interval": 1, "device": "cuda"}


def trainer_of(text: Path, out: Path, options: Mapping[str, Any]) -> Any:
    """A Trainer of one process."""
    from sm_nanogpt.entry_point.command_line import Options
    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.container import Ranks, read_container
    from sm_nanogpt.entry_point.device import rank_device
    from sm_nanogpt.entry_point.distributed import Group
    from sm_nanogpt.entry_point.text import load_corpus
    from sm_nanogpt.entry_point.trainer import Trainer

    config = Config(**options)
    container = read_container({}, Options(data=str(text), out=str(out)))
    ranks = Ranks(0, 1, 0, 1, "hand")
    group = Group(ranks, rank_device(config, container, ranks), container)
    corpus = load_corpus(container, config, group)
    return Trainer(config, container, group, corpus)


# ------------------------------------------------------------------------------------------------
# Is it right


def right(args: Namespace, scratch: Path, results: Results) -> None:
    """Losses with each device, precision, and kernel; then resume, single parts, memory, waits."""
    base = small(args)
    full, half = {**base, **FULL}, {**base, **HALF}
    no_cudnn = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    four, windows = {"gradient_accumulation_steps": 4}, {"short_windows": 0.5}
    drop, adamw, tied = {"dropout": 0.2}, {"optimizer": "adamw"}, {"tie_embeddings": True}
    graph, taught = {"compile": "auto"}, {"generations": 2, "max_steps": 20}
    variants = {
        "CPU": Variant({**full, "device": "cpu"}),
        "float32": Variant(full, (), "CPU", SAME),
        "bfloat16": Variant(half, (), "CPU", CLOSE),
        "float32, 4 passes": Variant({**full, **four}, (), "CPU", SAME),
    }
    if not args.smoke:
        variants |= {
            "tf32": Variant({**base, "precision": "tf32"}, (), "CPU", CLOSE),
            # float16 skips its first steps, until its gradients are finite.
            "float16": Variant({**base, "precision": "float16"}, (), "CPU", 0.3),
            "bfloat16, not cuDNN's attention": Variant(half, (), "CPU", CLOSE, no_cudnn),
            "AdamW, CPU": Variant({**full, **adamw, "device": "cpu"}),
            "AdamW": Variant({**full, **adamw}, (), "AdamW, CPU", SAME),
            "float32, compiled": Variant({**full, **COMPILED}, (), "CPU", SAME),
            "bfloat16, compiled": Variant({**half, **COMPILED}, (), "CPU", CLOSE),
            "loss in chunks": Variant(full, CHUNKS, "CPU", SAME),
            "loss in chunks, compiled": Variant({**full, **COMPILED}, CHUNKS, "CPU", SAME),
            "windows": Variant({**half, **windows}),
            "windows, compiled": Variant({**half, **windows, **COMPILED}, (), "windows", CLOSE),
            "dropout": Variant({**half, **drop}),
            "two generations, CPU": Variant({**full, **taught, "device": "cpu"}),
            "two generations": Variant({**full, **taught}, CHUNKS, "two generations, CPU", SAME),
            "two generations, compiled": Variant(
                {**full, **taught, **COMPILED}, CHUNKS, "two generations", SAME
            ),
            "tied, 4 passes": Variant({**half, **four, **tied}, CHUNKS),
            "recomputed": Variant({**half, "recompute": True}, (), "bfloat16", SAME),
            # In bfloat16 the compiler fuses, and so rounds, differently: by 0.6 %.
            "recomputed, compiled": Variant(
                {**full, "recompute": True, **COMPILED}, (), "float32, compiled", SAME
            ),
            # Other dropout masks, so the losses differ as between seeds.
            "dropout, compiled": Variant({**half, **drop, **COMPILED}, (), "dropout", 0.1),
        }
        for name in ("dropout", "tied, 4 passes", "windows", "two generations"):
            plain = variants[name]
            line = "recorded 4 CUDA graphs" if name == "windows" else "recorded 1 CUDA graph"
            recorded = replace(plain, options={**plain.options, **graph}, says=line)
            variants[f"{name}, by a graph"] = replace(recorded, other=name, limit=1e-6)
    compare(args, scratch, results, variants)
    with results.part("resumed"):
        resumed(args, scratch, results, {**full, **adamw, "learning_rate": 1e-4, "max_steps": 1000})
    with results.part("parts"):
        parts(args, results)
    if not args.smoke:
        with results.part("memory of an evaluation"):
            evaluated(results)
        with results.part("a step does not wait for the GPU"):
            waits(args, scratch, results, half)
        large = {**half, "n_embd": 2048, "n_head": 16, "batch_size": 1 << 15}
        large |= {"gradient_accumulation_steps": 1}
        with results.part("too large a batch"):
            some = "torch.cuda.set_per_process_memory_fraction(0.2)"  # others may be running
            try:
                trained(args, scratch, "large", Variant(large, switches=some))
            except Failed as error:
                results.check(
                    "too large: not named", "gradient_accumulation_steps" not in str(error), 0
                )
            else:
                raise Failed("it fits")


def resumed(args: Namespace, scratch: Path, results: Results, options: Mapping[str, Any]) -> None:
    """A run that was stopped by SIGTERM and resumed, against an undisturbed one."""
    whole = losses(trained(args, scratch, "whole", Variant(options)))
    process, out = started(args, scratch, "stopped", Variant(options))
    with closing(measure.lines(process)) as output:  # closing sends SIGTERM
        for _, line in output:
            if line.startswith("step="):
                break
    python, script, *_ = process.command
    log = measure.output(Process([python, script, "--resume", str(out)]))
    print(log)
    match = re.search(r"resumed from the checkpoint of step (\d+)", log)
    if match is None:
        raise Failed("it began anew")
    difference = furthest(losses(metrics(out)), whole)
    name = f"resumed at step {match[1]}: loss against an uninterrupted run"
    results.check(name, difference, SAME)


def parts(args: Namespace, results: Results) -> None:
    """Gradients, the loss in chunks and sampling, in float32 unless said."""
    import torch

    from sm_nanogpt.entry_point import kernels
    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.model import GPT
    from sm_nanogpt.entry_point.optim import gradient_of
    from sm_nanogpt.launcher.models import engine

    device = torch.device("cpu" if args.smoke else "cuda:0")
    config = Config(n_layer=2, n_head=2, n_embd=256, block_size=128, norm_weights=True)
    model = GPT(config, 300)
    model.init_weights(1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():  # weights that begin at zero would hide errors of others
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(300, (4, 129), generator=generator)

    def gradients(device: torch.device, end: int | None = None, net: Any = model) -> torch.Tensor:
        model.to(device).zero_grad()
        inputs, targets = ids[:, :-1].to(device), ids[:, 1:].to(device)
        net(inputs, targets, end=end).backward()
        parts = []
        for parameter in model.parameters():
            parts.append(gradient_of(parameter).flatten().cpu())
        return torch.cat(parts)

    def error(values: torch.Tensor, exact: torch.Tensor) -> float:
        return float((values - exact).norm() / exact.norm())

    for name, end in (("gradients", None), ("gradients within documents", 7)):
        on_cpu = gradients(torch.device("cpu"), end)
        results.check(f"{name}, device against CPU", error(gradients(device, end), on_cpu), 5e-4)
    torch.compiler.reset()
    traced = torch.compile(model, backend="eager" if args.smoke else "inductor", dynamic=False)
    compiled = gradients(device, 7, traced)  # by FlexAttention, on a GPU
    results.check("gradients within documents, compiled", error(compiled, on_cpu), 5e-4)
    model.compute_dtype = torch.bfloat16  # which has another kernel for attention with a mask
    rounded = gradients(device, 7)
    results.check("gradients within documents, bfloat16", error(rounded, on_cpu), 5e-2)
    model.compute_dtype = torch.float32
    whole = gradients(device)
    logits_at_once = kernels.LOGITS_AT_ONCE
    kernels.LOGITS_AT_ONCE = 1 << 15
    results.check("gradients, loss in chunks against whole", error(gradients(device), whole), 5e-4)
    kernels.LOGITS_AT_ONCE = logits_at_once

    by_cache: list[torch.Tensor] = []  # logits [2, V] of each new token
    prompt = ids[:2, :10].to(device)
    with no_cudnn_attention(), torch.no_grad():
        new_ids = engine.generate(
            model, prompt, 60, temperature=0, watch=lambda logits, _: by_cache.append(logits)
        )
        text = torch.cat((prompt, torch.stack(list(new_ids), dim=1)), dim=1)  # [2, 70]
        at_once = model(text)[:, 9:-1]
    difference = error(torch.stack(by_cache, 1), at_once)
    results.check("logits, sampled by a cache against at once", difference, 5e-4)


def evaluated(results: Results) -> None:
    """An evaluation of a large vocabulary keeps no gradient, and never has all logits."""
    import torch

    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.model import GPT

    device = torch.device("cuda:0")
    config = Config(n_layer=2, n_head=2, n_embd=256, block_size=512)
    model = GPT(config, 50_304, torch.bfloat16).to(device)
    model.init_weights(1)
    ids = torch.randint(50_304, (64, 513), device=device)
    torch.cuda.reset_peak_memory_stats()
    bytes_of_model = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(ids[:, :-1], ids[:, 1:])
    bytes_of_evaluation = torch.cuda.max_memory_allocated() - bytes_of_model
    results.check("GB of an evaluation, whose logits are 6.6", bytes_of_evaluation / 1e9, 1.2)


def no_cudnn_attention() -> Any:
    """Without cuDNN's attention, which is planned anew for each number of keys, for 20 ms or more.

    It has also corrupted generated text (github.com/pytorch/pytorch/issues/193893).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels)


def waits(args: Namespace, scratch: Path, results: Results, options: Mapping[str, Any]) -> None:
    """Nothing in a step may wait for the GPU."""
    import torch

    trainer = trainer_of(args.text, scratch / "waits", options)
    trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results.check("operations of a step that wait for the GPU", 0, 0)


# ------------------------------------------------------------------------------------------------
# NCCL

# A group of one uses the same code as a larger one.
GROUP: Edits = (
    ("world_size > 1", "world_size > 0"),
    ("world_size == 1:", "world_size == 0:"),
)
# NCCL refuses two ranks on one GPU. gloo allows them, but is correct only in float32.
TWO: Edits = (
    ("if ranks.local_world_size != gpus:", "if False:"),
    ('torch.device("cuda", ranks.local_rank)', 'torch.device("cuda", 0)'),
    ("return torch.cuda.device_count()", "return 2"),
    ('"cpu:gloo,cuda:nccl" if on_gpu', '"gloo" if on_gpu'),
    ("device_id=self.device if on_gpu else None", "device_id=None"),
)


NO_GRAPH: Edits = (('return device.type == "cuda" and may_record', "return False"),)


def nccl(args: Namespace, scratch: Path, results: Results) -> None:
    """A group of one with NCCL, and two ranks on one GPU with gloo, against one process.

    Compiled passes are recorded, and one all-reduce averages their gradients; without a graph,
    DistributedDataParallel does.
    """
    base = small(args)
    full, half, one = {**base, **FULL}, {**base, **HALF}, "one process"
    compiled, graph = {**half, **COMPILED}, {**full, "compile": "auto"}
    four = {"gradient_accumulation_steps": 4}
    two = Variant({**full, "processes": 2}) if args.smoke else Variant(full, TWO)
    variants = {
        one: Variant(full),
        "group of one, float32": Variant(full, GROUP, one, SAME),
        "group of one, bfloat16": Variant(half, GROUP, one, CLOSE),
        "two ranks by gloo, float32": replace(two, other=one, limit=SAME),
    }
    if not args.smoke:
        wide = {**half, "n_embd": 1024, "n_head": 8, "max_steps": 15}  # gradients in many buckets
        variants |= {
            "4 passes": Variant({**full, **four}, GROUP, one, SAME),
            "by a graph": Variant(graph, GROUP, one, SAME, says="recorded"),
            "by a graph, 4 passes": Variant({**graph, **four}, GROUP, one, SAME, says="recorded"),
            "two ranks by graphs and gloo": Variant(graph, TWO, one, SAME, says="recorded"),
            "bfloat16 sent": Variant({**full, "reduce_precision": "bfloat16"}, GROUP, one, CLOSE),
            "compiled": Variant(compiled, GROUP, one, CLOSE, says="recorded"),
            "compiled, DDP": Variant(compiled, (*GROUP, *NO_GRAPH), one, CLOSE),
            "compiled, 4 passes": Variant({**compiled, **four}, (*GROUP, *NO_GRAPH), one, CLOSE),
            "compiled, loss in chunks": Variant(compiled, (*GROUP, *NO_GRAPH, *CHUNKS), one, CLOSE),
            "wide, one process": Variant(wide),
            "wide": Variant(wide, GROUP, "wide, one process", CLOSE),
            "wide, compiled": Variant(
                {**wide, **COMPILED}, (*GROUP, *NO_GRAPH), "wide, one process", CLOSE
            ),
        }
    compare(args, scratch, results, variants)
    with results.part("a rank that hangs"):
        hangs(args, scratch, results, two)


def hangs(args: Namespace, scratch: Path, results: Results, two: Variant) -> None:
    """A rank whose kernel never ends is found in hang_seconds, and the log names it alone."""
    forever = "time.sleep(1e6)" if args.smoke else "torch.cuda._sleep(10**13)"
    step = "        self.loss_sum += self.passes.forward_backward(self.step)\n"
    hang = f"        if (self.step, self.group.rank) == (5, 1):\n            {forever}\n"
    hang_seconds = 10
    options = {**two.options, "hang_seconds": hang_seconds}
    edited = replace(two, options=options, edits=(*two.edits, (step, hang + step)))
    process, _ = started(args, scratch, "hangs", edited)
    last_step = time.perf_counter()
    log = ""
    try:
        for moment, line in measure.lines(process):
            print(f"[hangs] {line}", end="")
            log += line
            if "step" in line:
                last_step = moment
    except Failed as error:
        log += str(error)
    seconds = time.perf_counter() - last_step
    results.check("a rank that hangs: seconds to the end", seconds, hang_seconds + 15)
    ranks = set(re.findall(r"rank (\d+) on", log))
    is_named_alone = ranks == {"1"}
    results.check("a rank that hangs: it alone is not named", float(not is_named_alone), 0)
