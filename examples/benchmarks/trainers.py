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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from measure import (
    ROOT,
    Failed,
    Process,
    as_options,
    cores,
    lines,
    note,
    output,
    started,
    torch_and_gpu,
)

Words = Mapping[str, Any]

# nanoGPT's shapes, as options that ours understands too. cpu is the one for a CPU, baby its
# train_shakespeare_char, gpt2 its train_gpt2, half a million tokens a step, by GPT2_PASSES passes.
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
GPT2_PASSES = 40
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
    words: Words,
    threads: int | None = None,
    folder: Path = ROOT / "entry_point",
) -> Training:
    """The shipped command, or that of another training folder; threads only to compare numbers."""
    script = str(folder / "train.py")
    command = [sys.executable, script, "--data", str(text), "--out", str(out), *as_options(words)]
    env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return Training("ours", Process(command, env=env), re.compile(r"step=(\d+)/"))


def our_shape(name: str) -> dict[str, Any]:
    """The options of ours for a shape: the shipped preset, if there is one."""
    return {"preset": name} if name in ("cpu", "baby", "gpt2") else SHAPES[name]


def our_seconds(out: Path) -> float:
    """Seconds of training of a finished run, without evaluations and checkpoints."""
    config = json.loads((out / "model" / "training.json").read_text())["config"]
    seconds, step = 0.0, 0
    for line in (out / "output" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        tokens = (row["step"] - step) * config["batch_size"] * config["block_size"]
        speed = row.get("tokens_per_second", math.inf)  # none at step 0
        seconds, step = seconds + tokens / speed, row["step"]
    return seconds


def our_model(out: Path) -> tuple[Any, Any]:
    """The model (CPU, float32) and the tokenizer of a finished run, loaded by train.py alone."""
    sys.path.insert(0, str(ROOT))
    from entry_point.config import Config
    from entry_point.huggingface import load_pretrained
    from entry_point.model import GPT
    from entry_point.text import read_tokenizer

    directory = out / "model"
    tokenizer = read_tokenizer(directory)
    config = json.loads((directory / "training.json").read_text())["config"]
    known = {f.name for f in fields(Config)}  # of another version some may have other names
    of_both = {name: value for name, value in config.items() if name in known}
    model = GPT(Config(**of_both), len(tokenizer))
    load_pretrained(model, directory)
    return model.eval(), tokenizer


def our_result(out: Path, text: Path) -> tuple[float, int]:
    """Nats per character of the artefact over the whole validation part; its parameters."""
    model, tokenizer = our_model(out)
    vocabulary = tokenizer.decode(range(len(tokenizer)))
    characters = text.read_bytes().decode()
    part = characters[int(len(characters) * 0.9) :]
    loss = whole_loss(model, [vocabulary.index(c) for c in part], model.config.block_size)
    return loss, sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------------------------------------
# nanoGPT


class NanoGPT:
    """A checkout of nanoGPT, which runs in a scratch directory and is not written to.

    Its scripts read ./configurator.py, ./config and ./data; there these are links, and its
    prepare.py is a copy, since that one writes beside itself.
    """

    def __init__(self, checkout: Path, text: Path, scratch: Path) -> None:
        self.checkout, self.place = checkout, scratch / "nanogpt"
        self.data = self.place / "data" / "shakespeare_char"
        self.data.mkdir(parents=True)
        for name in ("configurator.py", "config"):
            (self.place / name).symlink_to(checkout / name)
        source = checkout / "data" / "shakespeare_char" / "prepare.py"
        (self.data / "prepare.py").write_text(source.read_text())
        # Modules that its scripts import but do not use for characters.
        stubs = self.place / "stubs"
        stubs.mkdir()
        for name in ("requests", "tiktoken"):
            if importlib.util.find_spec(name) is None:
                (stubs / f"{name}.py").touch()
        paths = [str(stubs), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {"PYTHONPATH": os.pathsep.join(paths)}
        output(self.prepare(text))

    def prepare(self, text: Path) -> Process:
        """The process that tokenizes a text."""
        link = self.data / "input.txt"
        link.unlink(missing_ok=True)
        link.symlink_to(text)
        command = [sys.executable, str(self.data / "prepare.py")]
        return Process(command, self.place, {**self.env, "PYTHONUTF8": "1"})

    def variants(self, words: Words, quick: bool = False) -> Iterator[Training]:
        """Each way to run its train.py on this machine; in a smoke run, one."""
        if torch_and_gpu()[1] and words.get("device") != "cpu":
            # Otherwise it would use bfloat16 even where that is emulated.
            ask = "import torch; print(torch.cuda.is_bf16_supported(including_emulation=False))"
            fast = output(Process([sys.executable, "-c", ask])).strip() == "True"
            dtype = "bfloat16" if fast else "float16"
            for compiled in (True, False):
                name = f"nanoGPT {dtype}, {'compiled' if compiled else 'eager'}"
                yield self.training(name, {**words, "compile": compiled, "dtype": dtype})
            return
        words = {**words, "device": "cpu"}
        for compiled in (False,) if quick else (False, True):
            how = "compiled" if compiled else "eager"
            words = {**words, "compile": compiled}
            for threads in (1,) if quick else sorted({1, 2, cores()}):
                name = f"nanoGPT {threads} thread{'s' * (threads > 1)}, {how}"
                yield self.training(name, words, threads)
            if not quick:
                yield self.training(f"nanoGPT 2 processes, {how}", words, processes=2)

    def training(
        self, name: str, words: Words, threads: int | None = None, processes: int = 1
    ) -> Training:
        script, python = str(self.checkout / "train.py"), [sys.executable]
        if processes > 1:
            share, rest = divmod(words["batch_size"], processes)
            if rest:
                raise Failed(f"nanoGPT cannot share a batch of {words['batch_size']} evenly")
            words = {**words, "batch_size": share, "gradient_accumulation_steps": processes}
            words |= {"backend": "gloo"}
            python += ["-m", "torch.distributed.run", "--standalone"]
            python += [f"--nproc_per_node={processes}", str(Path(__file__).with_name("ddp_cpu.py"))]
            threads = 1
        command = [*python, script, "config/train_shakespeare_char.py", *as_options(words)]
        env = {**self.env, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        return Training(name, Process(command, self.place, env), re.compile(r"iter (\d+):"))

    def train(self, training: Training, words: Words, out: Path) -> tuple[float, float, float, int]:
        """Runs its train.py to the end, with more options.

        Returns the seconds of its training up to its checkpoint, without evaluations, those of the
        whole command, the checkpoint's nats per character over the whole validation part, and its
        parameters.
        """
        started = time.perf_counter()
        more = as_options({**words, "out_dir": out})
        process = replace(training.process, command=[*training.process.command, *more])
        each = seconds_of_iteration(lines(process))
        whole = time.perf_counter() - started
        import torch

        checkpoint = torch.load(out / "ckpt.pt", map_location="cpu")
        steps = checkpoint["iter_num"]
        return each * steps, whole, *self.result(checkpoint)

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
        weights = {k.removeprefix("_orig_mod."): v for k, v in checkpoint["model"].items()}
        model.load_state_dict(weights)
        model.eval()
        path = self.data / "val.bin"
        ids = torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.uint16)
        block_size = checkpoint["model_args"]["block_size"]
        loss = whole_loss(lambda x, y: model(x, y)[1], ids.tolist(), block_size)
        return loss, sum(p.numel() for p in model.parameters())


def seconds_of_iteration(timed: Iterable[tuple[float, str]]) -> float:
    """The mean seconds of the iterations between two lines of nanoGPT without an evaluation.

    Raises:
        Failed: there are none.
    """
    seconds, iterations, before = 0.0, 0, None
    for moment, line in timed:
        if line.startswith("step "):  # an evaluation, which began after the line before
            before = None
        elif found := re.match(r"iter (\d+):", line):
            step = int(found[1])
            if before:
                seconds += moment - before[0]
                iterations += step - before[1]
            before = moment, step
    if not iterations:
        raise Failed("nanoGPT logged no two iterations without an evaluation between them")
    return seconds / iterations


# ------------------------------------------------------------------------------------------------
# Both


def whole_loss(loss_of: Callable[[Any, Any], Any], ids: list[int], block_size: int) -> float:
    """The mean loss over all windows that do not overlap, computed in float32 on the CPU."""
    import torch

    count = (len(ids) - 1) // block_size
    x = torch.tensor(ids[: count * block_size]).view(count, block_size)
    y = torch.tensor(ids[1 : count * block_size + 1]).view(count, block_size)
    with torch.no_grad():
        pairs = zip(x.split(64), y.split(64), strict=True)
        return sum(float(loss_of(a, b)) * len(a) for a, b in pairs) / count


@dataclass(frozen=True)
class Pace:
    tokens_per_second: float
    parameters: int


def counted_parameters(line: str) -> set[int]:
    """The parameters in a line of a log. nanoGPT logs two numbers, and each rank may log them."""
    return {int(n.replace(",", "")) for n in re.findall(r"\b([\d,]+) parameters", line)}


def pace(training: Training, words: Words, seconds: float) -> Pace:
    """Tokens per second between two lines of a run in progress, at least `seconds` apart.

    The clock is ours and starts at the second line, so that reading the text, compiling, and the
    first evaluation are not counted. After `seconds`, the run is stopped.
    """
    counted: set[int] = set()
    began = None
    passed = 0
    for moment, line in lines(training.process):
        counted |= counted_parameters(line)
        if not (found := training.step_line.match(line)):
            continue
        passed, step = passed + 1, int(found[1])
        if passed == 2:
            began = moment, step
        if began and passed >= 5 and moment - began[0] >= seconds:
            tokens = (step - began[1]) * words["batch_size"] * words["block_size"]
            return Pace(tokens / (moment - began[0]), sum(counted))
    raise Failed(f"{training.name}: it ended before it was measured")


class Paused:
    """A run that is measured in turns with others.

    It starts at once, so that several compile together. At its second line about a step it is
    paused, by SIGSTOP, and keeps its memory.
    """

    def __init__(self, training: Training) -> None:
        self.training, self.failure = training, ""
        self.parameters: set[int] = set()  # as in pace
        self.moments: list[tuple[float, int]] = []  # of the lines about a step
        self.popen: Any = None
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        last = "nothing"
        try:
            with started(
                self.training.process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as self.popen:
                for line in self.popen.stdout:
                    last = line.strip() or last
                    self.parameters |= counted_parameters(line)
                    if found := self.training.step_line.match(line):
                        with self.changed:
                            self.moments.append((time.perf_counter(), int(found[1])))
                            if len(self.moments) == 2:
                                self.signal(signal.SIGSTOP)
                            self.changed.notify_all()
        finally:
            with self.changed:
                self.failure = f"{self.training.name}: it ended: {last}"
                self.changed.notify_all()

    def signal(self, number: int) -> None:
        if self.popen and self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)

    def wait(self, lines: int, after: float = 0.0) -> list[tuple[float, int]]:
        """The moments after one, at least so many. Raises Failed if the run ends before."""

        def found() -> list[tuple[float, int]]:
            return [moment for moment in self.moments if moment[0] > after]

        with self.changed:
            self.changed.wait_for(lambda: len(found()) >= lines or self.failure)
            if len(found()) < lines:
                raise Failed(self.failure)
            return found()

    def pace(self, shape: Words, seconds: float) -> Pace:
        """Tokens per second between two lines that are so far apart, or a little further."""
        self.wait(2)
        began, lines = time.perf_counter(), 2
        self.signal(signal.SIGCONT)
        while (found := self.wait(lines, began))[-1][0] - found[0][0] < seconds:
            lines = len(found) + 1
        self.signal(signal.SIGSTOP)
        (first, step), (last, last_step) = found[0], found[-1]
        tokens = (last_step - step) * shape["batch_size"] * shape["block_size"]
        return Pace(tokens / (last - first), sum(self.parameters))

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
    variants: Iterable[Training], words: Words, seconds: float
) -> list[tuple[Training, Pace]]:
    """The variants by speed, after a short look at each."""
    looks = []
    for variant in variants:
        note(f"{variant.name}: a first look")
        looks.append((variant, pace(variant, words, seconds)))
    return sorted(looks, key=lambda look: -look[1].tokens_per_second)
