"""What the log says of a run, besides its metrics."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .container import Ranks
from .conversations import END_OF_TURN, Packed
from .errors import counted
from .model import GPT, sample
from .passes import Passes
from .text import Corpus, Ids


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def machine_line(device: torch.device, ranks: Ranks, hosts: int) -> str:
    """`running on 1 host x 4 NVIDIA A10G = 4 processes in one group (...)`."""
    machine = torch.cuda.get_device_name() if device.type == "cuda" else device.type.upper()
    if hosts * ranks.local_world_size == ranks.world_size:
        machine = f"{ranks.local_world_size} {machine}"
    return (
        f"running on {counted(hosts, 'host')} x {machine}"
        f" = {counted(ranks.world_size, 'process')} in one group (launched by {ranks.launcher};"
        f" {counted(torch.get_num_threads(), 'CPU thread')} each)"
    )


def choices_line(passes: Passes) -> str:
    """What a run has chosen by itself: `chosen: bfloat16, compiled, 8 passes a step`."""
    precision = dtype_name(passes.model.compute_dtype)
    if passes.config.precision == "tf32":
        precision = "tf32"
    compiled = "compiled" if passes.compiled else "eager"
    return f"chosen: {precision}, {compiled}, {counted(passes.n_passes, 'pass')} a step"


def data_lines(corpus: Corpus, n_parameters: int) -> Iterator[str]:
    """The sizes of the model and of its data."""
    tokenizer = corpus.tokenizer
    yield (
        f"{n_parameters:,} parameters; {count_ids(corpus.train):,} {tokenizer.unit} to train on,"
        f" {count_ids(corpus.val):,} to validate on, vocabulary {len(tokenizer):,}"
    )
    for name, part in (("train", corpus.train), ("val", corpus.val)):
        if isinstance(part, Packed):
            yield f"{name}: {part.summary()}"


def count_ids(part: Ids) -> int:
    """The tokens of a part of the text, without those that fill the rows of conversations."""
    return part.n_ids if isinstance(part, Packed) else len(part)


def sample_lines(model: GPT, corpus: Corpus, when: str, length: int) -> list[str]:
    """`length` tokens from the start of a document, or of a line, or an answer, under a heading."""
    tokenizer = corpus.tokenizer
    question: list[int] = []
    if isinstance(corpus.val, Packed):
        question = corpus.val.question()
    ids = sample(model, question or [tokenizer.start], length)
    if corpus.is_chat:
        end_of_turn = tokenizer.special[END_OF_TURN]
        if end_of_turn in ids:
            ids = ids[: ids.index(end_of_turn)]

    lines = [f"--- sample {when} ---"]
    for line in tokenizer.decode(question + ids).split("\n"):
        lines.append(f"| {line}")  # the bar distinguishes it from lines of the log
    return lines


def memory_text(device: torch.device) -> str:
    """` memory=18.2/22.5GiB`: the most so far of this rank's GPU, and all of it; '' on CPUs."""
    if device.type != "cuda":
        return ""
    used = torch.cuda.max_memory_reserved()  # a graph's memory counts as reserved alone
    total = torch.cuda.get_device_properties(device).total_memory
    return f" memory={used / 2**30:.1f}/{total / 2**30:.1f}GiB"
