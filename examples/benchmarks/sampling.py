"""Characters per second of sampling on the CPU, for one sample and for many at once.

Example:
  python examples/benchmarks/sampling.py --text input.txt --nanogpt ../nanoGPT --characters 2000

Ours is `sm-nanogpt fetch-and-sample` on a local job, timed from its first character to its last.
nanoGPT's sample.py is timed from the loaded model to the line below a sample (with --compile, the
second sample, so that compilation does not count). It makes samples one after the other. For many
at once, the script also calls nanoGPT's model.generate on a batch, for its context and 20
characters more, and takes their speed for the rest. The speed does not depend on the text, so both
models train for one step. nanoGPT first runs once in each way, for as many characters, and the
fastest way then alternates with ours.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import measure
from measure import CLI, Failed, Process, Report, as_arguments, lines, output, started
from trainers import SHAPES, NanoGPT, our_shape, threads_text

GENERATE = """
import sys, time, torch
checkout, out, device, samples, length = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
sys.path.insert(0, checkout)
from model import GPT, GPTConfig
checkpoint = torch.load(out + "/ckpt.pt", map_location="cpu")
model = GPT(GPTConfig(**checkpoint["model_args"])).eval().to(device)
model.load_state_dict(checkpoint["model"])
prompt = torch.zeros(samples, 1, dtype=torch.long, device=device)
settle = torch.cuda.synchronize if device == "cuda" else lambda: None
with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
    if device == "cuda":  # its libraries load with the first operations
        model.generate(prompt, 3, temperature=0.8, top_k=200)
        settle()
    started = time.perf_counter()
    context = min(length, model.config.block_size)
    text = model.generate(prompt, context, temperature=0.8, top_k=200)
    settle()
    seconds = time.perf_counter() - started
    if length > context:  # from here on each character costs the same
        started = time.perf_counter()
        model.generate(text, 20, temperature=0.8, top_k=200)
        settle()
        seconds += (time.perf_counter() - started) * (length - context) / 20
    print("seconds", seconds)
"""


def benchmark(args: Namespace, scratch: Path) -> Report:
    name = "smoke" if args.quick else args.shape
    length = 400 if args.quick else args.characters
    job = our_job(args, scratch, name)
    one, many = "ours, 1 sample", f"ours, {args.samples} at once"
    sides: dict[str, Callable[[int], float]] = {
        one: lambda index: our_rate(job, 1, length),
        many: lambda index: our_rate(job, args.samples, length),
    }
    looks: dict[str, float] = {}
    if args.nanogpt:
        nanogpt = NanoGPT(args.nanogpt, args.text, scratch)
        out = their_checkpoint(nanogpt, name, scratch)
        ways = their_ways(nanogpt, out, args)
        for way, rate in ways.items():
            measure.note(f"{way}: a first look")
            looks[way] = rate(length)
        for batch in (False, True):
            best = max((way for way in ways if ("at once" in way) == batch), key=looks.__getitem__)
            sides[best] = partial(lambda rate, index: rate(length), ways[best])

    rates = measure.alternate(args.rounds, sides)
    report = Report()
    for side, side_rates in rates.items():
        n_samples = args.samples if "at once" in side else 1
        of_each = [rate / n_samples for rate in side_rates]
        report.rows.append({"": side, "characters/s in all": side_rates, "of each": of_each})
    for way, characters_per_second in looks.items():
        if way not in sides:
            report.rows.append(
                {"": f"{way} (one look)", "characters/s in all": [characters_per_second]}
            )
    if args.nanogpt:
        single, batched = list(sides)[2:]
        # Generating them one by one is one of the ways.
        better = [max(pair) for pair in zip(rates[single], rates[batched], strict=True)]
        report.findings["1 sample, ours over theirs"] = measure.ratio(rates[one], rates[single])
        ratio = measure.ratio(rates[many], better)
        report.findings[f"{args.samples} samples in all, ours over the better of theirs"] = ratio
    return report


# ------------------------------------------------------------------------------------------------
# Ours


def our_job(args: Namespace, scratch: Path, name: str) -> Process:
    """The command that samples from a finished job, without the options for length and number."""
    options = {
        **our_shape(name),
        "batch_size": 2,
        "max_steps": 1,
        "eval_tokens": 256,
        "sample_length": 1,
        "device": "cpu",
        **args.ours,
    }
    command = [*CLI, "launch", "--instance", "local", "--data", str(args.text)]
    for option, value in options.items():
        command.append(f"--preset={value}" if option == "preset" else f"--set={option}={value}")
    env = {"SM_NANOGPT_HOME": str(scratch / "home")}
    printed = output(Process(command, env=env))
    job_id = next(line for line in printed.splitlines() if re.fullmatch(r"sm-nanogpt-[\w-]+", line))
    return Process([*CLI, "fetch-and-sample", job_id], env=env)


def our_rate(job: Process, samples: int, length: int) -> float:
    """Characters per second of all samples together, from the first character to the end."""
    command = [*job.command, f"--num-samples={samples}", f"--max-new-tokens={length}"]
    with started(
        replace(job, command=command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as popen:
        assert popen.stdout is not None
        first = last = 0.0
        while os.read(popen.stdout.fileno(), 1 << 16):
            last = time.perf_counter()
            first = first or last
        if popen.wait():
            raise Failed(f"{shlex.join(command)}: exit status {popen.returncode}")
    if last == first:
        raise Failed(f"{shlex.join(command)}: its text came in one piece; take more --characters")
    return samples * (length - 1) / (last - first)


# ------------------------------------------------------------------------------------------------
# nanoGPT


def their_checkpoint(nanogpt: NanoGPT, name: str, scratch: Path) -> Path:
    out = scratch / "nanogpt-out"
    options = {
        **SHAPES[name],
        "batch_size": 2,
        "max_iters": 1,
        "eval_interval": 1,
        "eval_iters": 1,
        "device": "cpu",
        "compile": False,
        "always_save_checkpoint": True,
        "out_dir": out,
    }
    output(nanogpt.training("nanoGPT", options).process)
    return out


def their_ways(nanogpt: NanoGPT, out: Path, args: Namespace) -> dict[str, Callable[[int], float]]:
    """Each way to sample: a function that takes a length and returns characters per second."""
    ways: dict[str, Callable[[int], float]] = {}
    for threads in [1] if args.quick else sorted({1, 2, measure.cores()}):
        env = {**nanogpt.env, "OMP_NUM_THREADS": str(threads)}
        for compiled in [False] if args.quick else [False, True]:
            mode = "compiled" if compiled else "eager"
            options = {"out_dir": out, "device": "cpu", "compile": compiled}
            command = [sys.executable, str(nanogpt.checkout / "sample.py"), *as_arguments(options)]
            process = Process(command, nanogpt.directory, env)
            rate = partial(their_rate, process, 2 if compiled else 1)
            ways[f"nanoGPT {threads_text(threads)}, {mode}"] = rate
        process = replace(their_batch(nanogpt, out, "cpu", args.samples), env=env)
        batch_rate = partial(their_batch_rate, process, args.samples)
        ways[f"nanoGPT {args.samples} at once, {threads_text(threads)}, eager"] = batch_rate
    return ways


def their_batch(nanogpt: NanoGPT, out: Path, device: str, samples: int) -> Process:
    """The command that generates many samples at once, without the length."""
    options = [str(nanogpt.checkout), str(out), device, str(samples)]
    return Process([sys.executable, "-c", GENERATE, *options], nanogpt.directory, nanogpt.env)


def their_rate(process: Process, samples: int, length: int) -> float:
    arguments = as_arguments({"num_samples": samples, "max_new_tokens": length})
    process = replace(process, command=[*process.command, *arguments])
    moments = []
    for moment, line in lines(process):
        if line.startswith(("Loading meta", "---------------")):
            moments.append(moment)
    return length / (moments[-1] - moments[-2])


def their_batch_rate(process: Process, samples: int, length: int) -> float:
    printed = output(replace(process, command=[*process.command, str(length)]))
    return samples * length / float(printed.split("seconds")[-1])


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3)
    parser.add_argument("--shape", choices=("cpu", "baby"), default="baby", help="(default: baby)")
    parser.add_argument("--characters", type=int, default=2000, metavar="N", help="(default 2000)")
    parser.add_argument("--samples", type=int, default=16, metavar="N", help="at once (default 16)")
    measure.run(parser, benchmark)
