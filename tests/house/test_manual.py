"""The commands and the Python that the manual shows run in their order, and succeed."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from launching import TINY, sets
from pages import ROOT, blocks, shown_commands

from sm_nanogpt.launcher.local import backend

PAGES = (
    "README",
    "docs/changing-the-model",
    "docs/fine-tuning",
    "docs/hyperparameters",
    "docs/report",
    "docs/runs",
    "docs/tokens",
    "docs/troubleshooting",
)
# AWS, servers, compilers, and models of gigabytes have tests of their own.
ELSEWHERE = {
    "doctor",
    "infra",
    "ml.m5.xlarge",
    "ml.g5.12xlarge",
    "play",
    "chat",
    "compile=on",
    "./Qwen3-0.6B",
}
SIZES = {"--preset", "--seeds", "--set"}


def smaller(arguments: list[str]) -> list[str]:
    """A launch as it is shown, but for the size of the model and of the run."""
    if arguments[0] != "launch" or "SWEEP" in arguments:
        return arguments
    others = []
    for option, argument in itertools.pairwise(["", *arguments]):
        if argument not in SIZES and option not in SIZES:
            others.append(argument)
    if "--resume" in arguments:
        return [*others, *sets(max_steps=20)]
    swept = {argument.partition("=")[0] for argument in arguments}
    tiny = {name: value for name, value in TINY.items() if name not in swept}
    return [*others, *sets(**tiny)]


def is_used(later_commands: list[list[str]]) -> bool:
    """Whether the commands after a launch are about its job, or its text. Others do not run: a job
    that was resumed or configured has tests of its own."""
    return any(not {"latest", "SWEEP", "UPLOAD"}.isdisjoint(command) for command in later_commands)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_succeed(page, cli, job, short_text_file, monkeypatch):
    first_text = "sm_nanogpt.launcher.text.first_text.first_text"
    monkeypatch.setattr(first_text, lambda *_: short_text_file)
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    Path("notes/drafts").mkdir(parents=True)
    texts = ("input.txt", "letters.txt", "more.txt", "start.txt", "notes/a.py", "notes/drafts/b.md")
    for name in texts:
        shutil.copy(short_text_file, name)
    reviews = "".join(f'{number},"good, and {number}"\n' for number in range(500))
    Path("reviews.csv").write_text(f"id,review\n{reviews}")
    monkeypatch.setattr("sys.stdin", short_text_file.open())
    Path("my.toml").write_text("max_steps = 10\n")
    upload = cli("upload-data", "input.txt").out.strip().rpartition("/")[2]
    commands = shown_commands(ROOT / f"{page}.md")
    for index, command in enumerate(commands):
        if not ELSEWHERE.isdisjoint(command) or any("://" in argument for argument in command):
            continue
        names = {"JOB-ID": job.job_id, "SWEEP": "latest", "UPLOAD": upload}
        if command[0] == "delete":
            names["JOB-ID"] = "latest"
        arguments = smaller([names.get(argument, argument) for argument in command])
        if command[0] == "delete":
            arguments.append("--yes")
        with monkeypatch.context() as context:
            if command[0] == "launch" and not is_used(commands[index + 1 :]):
                context.setattr(backend, "subprocess", Mock())
                arguments.append("--detach")
            ran = cli(arguments)
        assert ran.code == 0, (arguments, ran.err)


def python_blocks() -> tuple[list[str], list[str]]:
    """The Python of the manual: that of sm_nanogpt, and that of transformers."""
    code = blocks(ROOT / "docs/python.md", "python")
    first = next(n for n, block in enumerate(code) if "from transformers" in block)
    return code[:first], code[first:]


def test_the_transformers_of_the_manual_run_as_they_stand(job, capsys):
    names: dict[str, object] = {}
    model = str(job.directory / "hosts/algo-1/model")
    for block in python_blocks()[1]:
        code = block.replace("runs/20261123-094054-22488/model", model)
        exec(code.replace("ROMEO:", "The ").replace("=50", "=5"), names)
    assert "{'½'}" in capsys.readouterr().out


def test_the_python_of_the_manual_runs_as_it_stands(money, cloud, text_file, monkeypatch, capfd):
    """But for the size of the models. The jobs of SageMaker only seem to run."""
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "10")
    shutil.copy(text_file, "input.txt")
    names: dict[str, object] = {}
    for block in python_blocks()[0]:
        small = block.replace('{"max_steps": 500}', str(TINY)).replace("750", "15")
        exec(small.replace("ROMEO:", "The "), names)
    printed = capfd.readouterr()
    for shown in (" Completed ", "val_loss", "at most 5.00 USD", "I am asked above 10.00 USD"):
        assert shown in printed.out
    assert printed.err == ""
