"""Models and texts for the judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from edits import module_of
from judged_texts import STRANGE, chat_of
from models import tokenizer_of
from workers import start_workers_at_once

from sm_nanogpt import Settings
from sm_nanogpt.entry_point.config import make_config
from sm_nanogpt.entry_point.huggingface import SCRIPT_SHA256, write_artefact
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.judge import evaluate
from sm_nanogpt.launcher.judge.texts import Text, read_texts
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.text.files import FileOptions, find_files
from sm_nanogpt.launcher.text.sources import TextSource
from sm_nanogpt.launcher.text.tokenizer import learn_tokenizer


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def models(tmp_path_factory, text_file):
    """Small models of characters and of tokens, none of whose parts is idle."""
    directory = tmp_path_factory.mktemp("judged")
    characters = sorted({*"".join(map(chr, range(32, 127))), *"\r\n\t", *STRANGE})
    by_name = {}
    for name, tokenizer in {
        "characters": tokenizer_of("".join(characters)),
        "tokens": learn_tokenizer(
            find_files([TextSource(text_file)], FileOptions(records=True)), 300
        ),
    }.items():
        config = make_config({"n_layer": 2, "n_embd": 32, "block_size": 24})
        model = randomized(GPT(config, len(tokenizer)))
        write_artefact(directory / name, model, tokenizer, {"script_sha256": SCRIPT_SHA256})
        by_name[name] = directory / name
    return by_name


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a real worker process of a model."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        settings = Settings(home=tmp_path_factory.mktemp("home"))
        start_workers_at_once(patched)
        yield lambda directory, folder=None: Worker(directory, settings, folder)


@pytest.fixture
def write(tmp_path):
    """Writes files, and reads them as texts."""

    def write(**contents: bytes) -> list[Text]:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        return read_texts([str(tmp_path / name) for name in contents], Settings(home=tmp_path))

    return write


@pytest.fixture
def edited(tmp_path, start, monkeypatch):
    """Evaluates a small model of an edited folder on a text, which one more process computes."""
    effort = replace(evaluate.EDITED, n_processes=1, n_samples=2)
    monkeypatch.setattr(evaluate, "EDITED", effort)

    def edited(*edits: tuple[str, str], text: str = "bcdefghijk" * 20) -> Any:
        folder, directory = launching.edited(tmp_path / "mine", *edits), tmp_path / "model"
        module = module_of(folder)
        config = module.make_config({"n_layer": 1, "n_embd": 32, "block_size": 16})
        model = randomized(module.GPT(config, 11))
        training = {"script_sha256": module.SCRIPT_SHA256}
        module.write_artefact(directory, model, tokenizer_of("abcdefghijk"), training)
        texts = [Text(str(n), [part]) for n, part in enumerate(text.split())]
        return evaluate.evaluate(
            "mine", directory, "text", texts, Settings(home=tmp_path / "home"), folder
        )

    return edited


@pytest.fixture
def held(job, text, monkeypatch):
    """A copy of a job, a text of its own, and warm workers that give few samples."""
    start_workers_at_once(monkeypatch)
    monkeypatch.setattr(evaluate, "PACKAGED", replace(evaluate.PACKAGED, n_samples=3))
    Path("held.txt").write_text("".join(reversed(text[:6000])))
    Path("secrets.txt").write_text("the code is {8231447}\nanother {abc}\n")
    Path("asked.jsonl").write_text(json.dumps({**chat_of("2 + 3?", "5"), "kind": "sum"}))
    return job
