"""The two sides of a comparison: our train.py as shipped, and an unmodified nanoGPT."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from measure import (
    ROOT,
    Failed,
    Process,
    as_arguments,
    cores,
    lines,
    note,
    output,
    started,
    torch_and_gpu,
)

Options = Mapping[str, Any]

# nanoGPT's shapes, as options that ours understands too. cpu is the one for a CPU, baby its
# train_shakespeare_char, gpt2 its train_gpt2, half a million tokens a step, in gpt2_passes.
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": dict(
        n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0, device="cpu"
    ),
    "baby": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=480, dropout=0.0),
    "smoke": dict(
        n_layer=1, n_head=2, n_embd=16, block_size=32, batch_size=4, dropout=0.0, device="cpu"
    ),
}
NEVER = 10**9  # steps


@dataclass(frozen=True)
class Training:
    """A run that can be started, and the form of its line about a step."""

    name: str
    process: Process
    step_line: re.Pattern[str]


# ------------------------------------------------------------------------------------------------
# Ours


def ours(
    text: Path,
    out: Path,
    options: Options,
    threads: int | None = None,
    folder: Path = ROOT / "entry_point",
) -> Training:
    """The shipped command, or that of another training folder; threads only to compare numbers."""
    script = str(folder / "train.py")
    command = [sys.executable, script, "--data", str(text), "--out", str(out)]
    command += as_arguments(options)
    env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return Training("ours", Process(command, env=env), re.compile(r"step=(\d+)/"))


def our_shape(name: str) -> dict[str, Any]:
    """The options of ours for a shape: the shipped preset, if there is one."""
    return {"preset": name} if name in ("cpu", "baby", "gpt2") else SHAPES[name]


def our_seconds(out: Path) -> float:
    """Seconds of training of a finished run, without evaluations and checkpoints."""
    config = json.loads((out / "model" / "training.json").read_text())["config"]
    seconds = 0.0
    step = 0
    for row in our_metrics(out):
        tokens = (row["step"] - step) * config["batch_size"] * config["block_size"]
        speed = row.get("tokens_per_second", math.inf)  # none at step 0
        seconds += tokens / speed
        step = row["step"]
    return seconds


def our_metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of a finished run's curve."""
    lines = (out / "output" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def our_model(out: Path) -> tuple[Any, Any]:
    """The model (CPU, float32) and the tokenizer of a finished run, loaded by train.py alone."""
    sys.path.insert(0, str(ROOT))
    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.huggingface import load_pretrained
    from sm_nanogpt.entry_point.model import GPT
    from sm_nanogpt.entry_point.text import read_tokenizer

    directory = out / "model"
    tokenizer = read_tokenizer(directory)
    config = json.loads((directory / "training.json").read_text())["config"]
    names = {f.name for f in fields(Config)}  # of another version some may have other names
    values = {name: value for name, value in config.items() if name in names}
    model = GPT(Config(**values), len(tokenizer))
    load_pretrained(model, directory)
    return model.eval(), tokenizer


def our_result(out: Path, text: Path) -> tuple[float, int]:
    """Nats per character of the artefact over the whole validation part; its parameters."""
    model, tokenizer = our_model(out)
    vocabulary = tokenizer.decode(range(len(tokenizer)))
    characters = text.read_bytes().decode()
    validation = characters[int(len(characters) * 0.9) :]
    ids = [vocabulary.index(character) for character in validation]
    loss = whole_loss(model, ids, model.config.block_size)
    return loss, sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------------------------------------
# nanoGPT


class NanoGPT:
    """A checkout of nanoGPT, which runs in a scratch directory and is not written to.

    Its scripts read ./configurator.py, ./config and ./data; there these are links, and its
    prepare.py is a copy, since that one writes beside itself.
    """

    def __init__(self, checkout: Path, text: Path, scratch: Path) -> None:
        self.checkout = checkout
        self.directory = scratch / "nanogpt"
        self.data = self.directory / "data" / "shakespeare_char"
        self.data.mkdir(parents=True)
        for name in ("configurator.py", "config"):
            (self.directory / name).symlink_to(checkout / name)
        source = checkout / "data" / "shakespeare_char" / "prepare.py"
        (self.data / "prepare.py").write_text(source.read_text())
        # Modules that its scripts import but do not use for characters.
        stubs = self.directory / "stubs"
        stubs.mkdir()
        for name in ("requests", "tiktoken"):
            if importlib.util.find_spec(name) is None:
                (stubs / f"{name}.py").touch()
        paths = [str(stubs)]
        if "PYTHONPATH" in os.environ:
            paths.append(os.environ["PYTHONPATH"])
        self.env = {"PYTHONPATH": os.pathsep.join(paths)}
        output(self.prepare(text))

    def prepare(self, text: Path) -> Process:
        """The process that tokenizes a text."""
        link = self.data / "input.txt"
        link.unlink(missing_ok=True)
        link.symlink_to(text)
        command = [sys.executable, str(self.data / "prepare.py")]
        return Process(command, self.directory, {**self.env, "PYTHONUTF8": "1"})

    def variants(
        self, options: Options, quick: bool = False, pass_counts: Sequence[int] = (1,)
    ) -> Iterator[Training]:
        """Each way to run its train.py on this machine; in a smoke run, one.

        The batch_size of the options is that of a step. On a GPU, each number of passes is a way.
        """
        if torch_and_gpu()[1] and options.get("device") != "cpu":
            # Otherwise it would use bfloat16 even where that is emulated.
            code = "import torch; print(torch.cuda.is_bf16_supported(including_emulation=False))"
            has_bfloat16 = output(Process([sys.executable, "-c", code])).strip() == "True"
            dtype = "bfloat16" if has_bfloat16 else "float16"
            for n_passes in pass_counts:
                for compiled in (True, False):
                    name = f"nanoGPT {dtype}, {'compiled' if compiled else 'eager'}"
                    if n_passes > 1:
                        name += f", {n_passes} passes"
                    settings = {**in_passes(options, n_passes), "compile": compiled, "dtype": dtype}
                    yield self.training(name, settings)
            return
        options = {**in_passes(options, pass_counts[-1]), "device": "cpu", "compile": False}
        if quick:
            yield self.training("nanoGPT 1 thread, eager", options, threads=1)
            return
        for compiled in (False, True):
            mode = "compiled" if compiled else "eager"
            options["compile"] = compiled
            for threads in sorted({1, 2, cores()}):
                yield self.training(f"nanoGPT {threads_text(threads)}, {mode}", options, threads)
            yield self.training(f"nanoGPT 2 processes, {mode}", options, processes=2)

    def training(
        self, name: str, options: Options, threads: int | None = None, processes: int = 1
    ) -> Training:
        script = str(self.checkout / "train.py")
        python = [sys.executable]
        if processes > 1:
            share, remainder = divmod(options["batch_size"], processes)
            if remainder:
                raise Failed(f"nanoGPT cannot share a batch of {options['batch_size']} evenly")
            options = {**options, "batch_size": share, "gradient_accumulation_steps": processes}
            options |= {"backend": "gloo"}
            python += ["-m", "torch.distributed.run", "--standalone"]
            python += [f"--nproc_per_node={processes}", str(Path(__file__).with_name("ddp_cpu.py"))]
            threads = 1
        command = [*python, script, "config/train_shakespeare_char.py", *as_arguments(options)]
        env = dict(self.env)
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        return Training(name, Process(command, self.directory, env), re.compile(r"iter (\d+):"))

    def train(
        self, training: Training, options: Options, out: Path
    ) -> tuple[float, float, float, int]:
        """Runs its train.py to the end, with more options.

        Returns the seconds of its training up to its checkpoint, without evaluations, those of the
        whole command, the checkpoint's nats per character over the whole validation part, and its
        parameters.
        """
        began = time.perf_counter()
        arguments = as_arguments({**options, "out_dir": out})
        process = replace(training.process, command=[*training.process.command, *arguments])
        seconds_per_step = seconds_of_iteration(lines(process))
        command_seconds = time.perf_counter() - began
        import torch

        checkpoint = torch.load(out / "ckpt.pt", map_location="cpu")
        training_seconds = seconds_per_step * checkpoint["iter_num"]
        loss, n_parameters = self.result(checkpoint)
        return training_seconds, command_seconds, loss, n_parameters

    def result(self, checkpoint: Mapping[str, Any]) -> tuple[float, int]:
        """The same as our_result, for its model."""
        import torch

        spec = importlib.util.spec_from_file_location("nanogpt_model", self.checkout / "model.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module  # its dataclass looks itself up there
        spec.loader.exec_module(module)
        with contextlib.redirect_stdout(io.StringIO()):  # it says its size
            model = module.GPT(module.GPTConfig(**checkpoint["model_args"]))
        weights = {}
        for name, tensor in checkpoint["model"].items():
            weights[name.removeprefix("_orig_mod.")] = tensor
        model.load_state_dict(weights)
        model.eval()
        path = self.data / "val.bin"
        ids = torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.uint16)
        block_size = checkpoint["model_args"]["block_size"]
        loss = whole_loss(lambda x, y: model(x, y)[1], ids.tolist(), block_size)
        return loss, sum(p.numel() for p in model.parameters())


def gpt2_passes(gpu_memory: float) -> list[int]:
    """Numbers of passes in which nanoGPT may make a step of gpt2; those that are best come first.

    By itself it makes 40, of 12,288 tokens. On GPUs of 80 GB, ours makes 8, of 61,440. Another
    program with this model fits 65,536 there (github.com/karpathy/build-nanogpt).
    """
    return [8, 40] if gpu_memory > 70e9 else [40]


def in_passes(options: Options, n_passes: int) -> dict[str, Any]:
    """nanoGPT's options for a step in so many passes; its batch_size is that of a pass."""
    rows = options["batch_size"] // n_passes
    return {**options, "gradient_accumulation_steps": n_passes, "batch_size": rows}


def gpu_memory() -> int:
    """The bytes of the first GPU, asked in another process; 0 without one."""
    if not torch_and_gpu()[1]:
        return 0
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    return int(output(Process([sys.executable, "-c", code])))


def threads_text(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def seconds_of_iteration(timed: Iterable[tuple[float, str]]) -> float:
    """The mean seconds of the iterations between two lines of nanoGPT without an evaluation.

    Raises:
        Failed: there are none.
    """
    seconds = 0.0
    iterations = 0
    previous = None  # the time and the step of the line before
    for moment, line in timed:
        match = re.match(r"iter (\d+):", line)
        if line.startswith("step "):  # an evaluation, which began after the line before
            previous = None
        elif match is not None:
            step = int(match[1])
            if previous is not None:
                seconds += moment - previous[0]
                iterations += step - previous[1]
            previous = (moment, step)
    if not iterations:
        raise Failed("nanoGPT logged no two iterations without an evaluation between them")
    return seconds / iterations


# ------------------------------------------------------------------------------------------------
# Both


def whole_loss(loss_of: Callable[[Any, Any], Any], ids: list[int], block_size: int) -> float:
    """The mean loss over all windows that do not overlap, computed in float32 on the CPU."""
    import torch

    n_windows = (len(ids) - 1) // block_size
    x = torch.tensor(ids[: n_windows * block_size]).view(n_windows, block_size)
    y = torch.tensor(ids[1 : n_windows * block_size + 1]).view(n_windows, block_size)
    total = 0.0
    with torch.no_grad():
        for inputs, targets in zip(x.split(64), y.split(64), strict=True):
            total += float(loss_of(inputs, targets)) * len(inputs)
    return total / n_windows


@dataclass(frozen=True)
class Pace:
    tokens_per_second: float
    parameters: int


def counted_parameters(line: str) -> set[int]:
    """The parameters in a line of a log. nanoGPT logs two numbers, and each rank may log them."""
    return {int(n.replace(",", "")) for n in re.findall(r"\b([\d,]+) parameters", line)}


def pace(training: Training, options: Options, seconds: float) -> Pace:
    """Tokens per second between two lines of a run in progress, at least `seconds` apart.

    The clock is ours and starts at the second line, so that reading the text, compiling, and the
    first evaluation are not counted. After `seconds`, the run is stopped.
    """
    parameters: set[int] = set()
    n_lines = 0  # about a step
    for moment, line in lines(training.process):
        parameters |= counted_parameters(line)
        match = training.step_line.match(line)
        if match is None:
            continue
        n_lines += 1
        step = int(match[1])
        if n_lines == 2:
            first_moment, first_step = moment, step
        if n_lines >= 5 and moment - first_moment >= seconds:
            tokens = (step - first_step) * options["batch_size"] * options["block_size"]
            return Pace(tokens / (moment - first_moment), sum(parameters))
    raise Failed(f"{training.name}: it ended before it was measured")


class Paused:
    """A run that is measured in turns with others.

    It starts at once, so that several compile together. At its second line about a step it is
    paused, by SIGSTOP, and keeps its memory.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.failure = ""
        self.parameters: set[int] = set()  # as in pace
        self.moments: list[tuple[float, int]] = []  # of the lines about a step
        self.popen: Any = None
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        last_line = "nothing"
        try:
            with started(
                self.training.process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as self.popen:
                for line in self.popen.stdout:
                    last_line = line.strip() or last_line
                    self.parameters |= counted_parameters(line)
                    match = self.training.step_line.match(line)
                    if match is not None:
                        self.note_step(int(match[1]))
        finally:
            with self.changed:
                self.failure = f"{self.training.name}: it ended: {last_line}"
                self.changed.notify_all()

    def note_step(self, step: int) -> None:
        with self.changed:
            self.moments.append((time.perf_counter(), step))
            if len(self.moments) == 2:
                self.signal(signal.SIGSTOP)
            self.changed.notify_all()

    def signal(self, number: int) -> None:
        if self.popen and self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)

    def wait(self, lines: int, start: float = 0.0) -> list[tuple[float, int]]:
        """The moments after one, at least so many. Raises Failed if the run ends before."""

        def later_moments() -> list[tuple[float, int]]:
            return [moment for moment in self.moments if moment[0] > start]

        with self.changed:
            self.changed.wait_for(lambda: len(later_moments()) >= lines or self.failure)
            if len(later_moments()) < lines:
                raise Failed(self.failure)
            return later_moments()

    def pace(self, shape: Options, seconds: float) -> Pace:
        """Tokens per second between two lines that are so far apart, or a little further."""
        self.wait(2)
        began = time.perf_counter()
        self.signal(signal.SIGCONT)
        moments = self.wait(2, began)
        while moments[-1][0] - moments[0][0] < seconds:
            moments = self.wait(len(moments) + 1, began)
        self.signal(signal.SIGSTOP)
        first_moment, first_step = moments[0]
        last_moment, last_step = moments[-1]
        tokens = (last_step - first_step) * shape["batch_size"] * shape["block_size"]
        return Pace(tokens / (last_moment - first_moment), sum(self.parameters))

    def finish(self) -> None:
        """Lets it run to its end. Raises Failed unless it ends well."""
        self.wait(2)
        self.signal(signal.SIGCONT)
        self.reader.join()
        if self.popen.returncode:
            raise Failed(self.failure)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.reader.join()


def fastest_first(
    variants: Iterable[Training], options: Options, seconds: float
) -> list[tuple[Training, Pace]]:
    """The variants by speed, after a short look at each, without those that fail.

    Raises Failed if all do.
    """
    looks = []
    failures = []
    for variant in variants:
        note(f"{variant.name}: a first look")
        try:
            looks.append((variant, pace(variant, options, seconds)))
        except Failed as failure:
            note(f"{variant.name}: it is left out, since it failed: {failure}")
            failures.append(failure)
    if not looks:
        raise failures[-1]
    return sorted(looks, key=lambda look: -look[1].tokens_per_second)
