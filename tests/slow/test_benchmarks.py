"""The benchmarks run and say what they found; how fast anything is, is tested nowhere."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from launching import run_example

EXAMPLES = Path(__file__).parents[2] / "examples"
BENCHMARKS = EXAMPLES / "benchmarks"
NAMES = (
    "benchmarks/throughput",
    "benchmarks/time_to_loss",
    "benchmarks/sampling",
    "benchmarks/startup",
    "benchmarks/scaling",
    "benchmarks/precision",
    "benchmarks/fine_tuning",
    "benchmarks/tokens",
    "benchmarks/upload",
    "benchmarks/judging",
    "benchmarks/generations",
    "tutorials/batch_and_context",
    "tutorials/ladder",
    "tutorials/processes",
)

GPU_STAGES = ("right", "nccl", "speed", "ladder", "loss", "profile", "sampling")

# What a benchmark reads of nanoGPT: the files it looks for, and what train.py prints.
STUB_TRAIN = """
import sys, time
assert "--n_embd=16" in sys.argv, sys.argv
print("num decayed parameter tensors: 6, with 4,000 parameters")
print("[rank1] num decayed parameter tensors: 6, with 4,000 parameters")
print("num non-decayed parameter tensors: 3, with 672 parameters")
for step in range(10**9):
    print(f"iter {step}: loss 4.0000, time 1.00ms, mfu -100.00%")
    time.sleep(0.001)
"""
STUB_PREPARE = """
from pathlib import Path
here = Path(__file__).parent
(here / "train.bin").write_text((here / "input.txt").read_text(encoding="utf-8"), encoding="utf-8")
"""
STUBS = {
    "train.py": STUB_TRAIN,
    "configurator.py": "",
    "config/some.py": "",
    "data/shakespeare_char/prepare.py": STUB_PREPARE,
}


def stub_nanogpt(checkout: Path) -> Path:
    """A checkout of what a benchmark reads of nanoGPT."""
    for name, content in STUBS.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(content)
    return checkout


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import measure

    return measure


# The tutorials run in their notebook: test_examples.py.
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("tutorials/")])
def test_a_smoke_run_writes_the_same_table_and_json(name, tmp_path, short_text_file):
    ran = run_example(name, "--text", short_text_file, "--quick", "--json", tmp_path / "found.json")
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    lines = ran.stdout.splitlines()
    _, *table_rows = [line for line in lines if line.startswith("| ")]
    assert result["rows"]
    assert len(table_rows) == len(result["rows"])
    for row in result["rows"]:
        assert row[""] in ran.stdout
        assert any(name and value for name, value in row.items()), row  # it has a figure
    assert "smoke run: these figures mean nothing" in lines
    assert result["machine"]["command"] in ran.stdout


def test_generations_of_several_sizes_are_compared(tmp_path, short_text_file):
    report = tmp_path / "report.json"
    ran = run_example(
        "benchmarks/generations",
        *("--text", short_text_file, "--quick", "--sizes", "0.5", "1", "--json", report),
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    assert [row[""] for row in rows] == ["size 0.5", "size 1"]
    assert all(row["two generations"] and row["one run"] for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_a_command_that_can_be_copied(name):
    ran = run_example(name, "--help")
    assert f"python examples/{name}.py --text input.txt" in ran.stdout


def test_all_stages_for_a_gpu_run_on_a_cpu(tmp_path, short_text_file):
    ran = run_example("benchmarks/gpu", "--smoke", "--out", tmp_path, "--text", short_text_file)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert summary in ran.stdout
    for stage in GPU_STAGES:
        assert f"\n| {stage} " in summary
        rows = json.loads((tmp_path / f"{stage}.json").read_text(encoding="utf-8"))["rows"]
        assert rows
        assert {row.get("check", "pass") for row in rows} == {"pass"}


def test_a_failed_stage_does_not_stop_the_next(tmp_path):
    text = tmp_path / "text"
    text.write_text("too short")
    options = ["--smoke", "--out", tmp_path / "out", "--text", text]
    ran = run_example("benchmarks/gpu", *options, "speed", "sampling")
    assert ran.returncode == 1
    failed = re.findall(r"^\| (\w+) +\| FAILED", ran.stdout, re.MULTILINE)
    assert failed == ["speed", "sampling"]


def test_a_stage_ends_when_its_time_is_over(measure, tmp_path, short_text_file, monkeypatch):
    import gpu

    stage = dataclasses.replace(gpu.STAGES["right"], minutes=0.1)
    monkeypatch.setitem(gpu.STAGES, "right", stage)
    arguments = ["--smoke", "--out", str(tmp_path), "--text", str(short_text_file)]
    monkeypatch.setattr("sys.argv", ["gpu.py", *arguments])
    row = gpu.run("right", gpu.arguments())
    assert row["state"].startswith("FAILED: out of time")
    ran = subprocess.check_output(["ps", "-A", "-o", "args="], text=True)
    assert str(tmp_path) not in ran


def test_without_a_text_the_stages_read_this_checkout(measure, tmp_path, monkeypatch):
    import gpu

    for name in ("b.py", "a.md", ".venv/c.py", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert gpu.own_text(tmp_path / "text").read_text() == "a.md\nb.py\n"


@pytest.mark.parametrize("stage", ["right", "nccl", "profile"])
def test_the_runs_of_a_stage_for_a_gpu_are_valid(stage, measure, tmp_path, text_file, monkeypatch):
    import gpu
    import gpu_checks
    import gpu_speed

    from sm_nanogpt.entry_point import train
    from sm_nanogpt.entry_point.config import Config

    runs = []

    def started(args: Any, scratch: Path, name: str, variant: Any) -> list[dict[str, Any]]:
        command = gpu_checks.started(args, scratch, name, variant)[0].command
        runs.append(train.parse_argv(command[command.index("--data") :])[0])
        if name == "large":
            raise measure.Failed("TrainingError: set a larger gradient_accumulation_steps")
        return [dict(train_loss=loss, val_loss=loss, tokens_per_second=9) for loss in (4.0, 3.0)]

    def profiled(name: str, text: Path, out: Path, look: Any, result: Any) -> None:
        runs.append(Config(**look.options))

    for module in (gpu_checks, gpu_speed):
        monkeypatch.setattr(module, "trained", started)
    for part in ("resumed", "parts", "evaluated", "waits", "hangs"):
        monkeypatch.setattr(gpu_checks, part, Mock())
    monkeypatch.setattr(gpu_speed, "profiled", profiled)
    monkeypatch.setattr("throughput.many_symbols", Mock())
    result = gpu_checks.Results(tmp_path / "found.json")
    gpu.STAGES[stage].run(Namespace(smoke=False, text=text_file), tmp_path, result)
    assert not result.failed, result.report.rows
    assert {config.device for config in runs} >= {"cuda"}


@pytest.mark.usefixtures("measure")
def test_a_step_for_a_cuda_graph_samples_as_the_engine_does():
    import torch
    from gpu_speed import sampled_by_graph

    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.model import GPT
    from sm_nanogpt.launcher.models import engine

    model = GPT(Config(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, block_size=16), 70)
    model.init_weights(1)
    torch.manual_seed(1)
    for parameter in model.parameters():  # some begin at zero
        torch.nn.init.normal_(parameter, std=0.1)
    prompt = torch.zeros(3, 1, dtype=torch.long)
    samples = list(sampled_by_graph(model, prompt, 40, 0.0))  # the context slides
    expected = list(engine.generate(model, prompt, 40, temperature=0.0))
    assert torch.equal(torch.stack(samples), torch.stack(expected))


def test_the_timed_runs_for_a_gpu_are_valid(measure, tmp_path, text_file, monkeypatch):
    import gpu_speed

    from sm_nanogpt.entry_point import train

    monkeypatch.setattr("throughput.many_symbols", lambda scratch: text_file)
    args = Namespace(smoke=False, text=text_file, nanogpt=None)
    result = Mock()

    def configs_of(plan: Any) -> list[Any]:
        configs = []
        for training in plan.trainings.values():
            command = training.process.command
            config, _ = train.parse_argv(command[command.index("--data") :])
            configs.append(config)
        return configs

    baby = configs_of(gpu_speed.climb(args, tmp_path, result))
    baby += configs_of(gpu_speed.against(args, tmp_path / "baby", result, "baby"))
    gpt2 = configs_of(gpu_speed.against(args, tmp_path / "gpt2", result, "gpt2"))
    assert {config.n_layer for config in baby} == {6}
    assert [config.n_layer for config in gpt2] == [12]
    assert {config.compile for config in baby + gpt2} == {"off", "auto", "on"}


def test_a_paused_run_computes_nothing_until_its_turn(measure):
    from trainers import Paused, Training

    count = "import time\nfor n in range(10**6): print(f'step={n}/', flush=True); time.sleep(0.001)"
    process = measure.Process([sys.executable, "-c", count])
    run = Paused(Training("a count", process, re.compile(r"step=(\d+)/")))
    try:
        run.wait(2)
        time.sleep(0.05)
        n_steps = len(run.moments)
        paused_at, paused_step = run.moments[-1]
        time.sleep(1)
        assert len(run.moments) == n_steps
        pace = run.pace({"batch_size": 1, "block_size": 1}, 0.05)
        ended_at, last_step = run.moments[-1]
        speed_with_pause = (last_step - paused_step) / (ended_at - paused_at)
        assert pace.tokens_per_second > speed_with_pause
        assert len(run.moments) > n_steps
    finally:
        run.end()
    with pytest.raises(measure.Failed, match="a count"):
        run.wait(10**6)


def test_benchmarks_run_a_nanogpt_checkout_unchanged(short_text_file, tmp_path):
    nanogpt = stub_nanogpt(tmp_path / "nanogpt")
    files = sorted(nanogpt.rglob("*"))
    ran = run_example(
        "benchmarks/throughput", "--text", short_text_file, "--quick", "--nanogpt", nanogpt
    )
    assert ran.returncode == 0, ran.stderr
    assert "ours against nanoGPT 1 thread, eager: " in ran.stdout
    assert "| 4,672 " in ran.stdout  # its parameters, as it says them
    assert sorted(nanogpt.rglob("*")) == files


def test_nanogpt_gets_passes_as_large_as_ours(measure, tmp_path, monkeypatch, short_text_file):
    """On a GPU for which ours takes larger ones than nanoGPT does by itself."""
    import trainers

    from sm_nanogpt.entry_point.config import TOKENS_PER_PASS, make_config

    checkout = stub_nanogpt(tmp_path / "checkout")
    monkeypatch.setattr(trainers, "torch_and_gpu", lambda: ("2.13.0", "NVIDIA H100"))
    monkeypatch.setattr(trainers, "output", lambda process: "True")
    nanogpt = trainers.NanoGPT(checkout, short_text_file, tmp_path)
    pass_counts = trainers.gpt2_passes(85e9)
    compiled, *_ = nanogpt.variants(trainers.SHAPES["gpt2"], pass_counts=pass_counts)
    n_passes = make_config({}, "gpt2").passes(1, 4 * TOKENS_PER_PASS)
    assert compiled.name == f"nanoGPT bfloat16, compiled, {n_passes} passes"
    assert f"--gradient_accumulation_steps={n_passes}" in compiled.process.command
    assert f"--batch_size={480 // n_passes}" in compiled.process.command
    assert trainers.gpt2_passes(24e9) == [40]


def test_a_way_to_run_nanogpt_that_fails_is_left_out(measure, monkeypatch, capsys):
    """For example, if its passes do not fit into a GPU."""
    import trainers

    def pace(training: Any, *_: Any) -> Any:
        if training.name == "fails":
            raise measure.Failed("OutOfMemoryError")
        return trainers.Pace(tokens_per_second=1.0, parameters=1)

    monkeypatch.setattr(trainers, "pace", pace)
    fails, works = [
        trainers.Training(name, measure.Process([]), re.compile("")) for name in ("fails", "works")
    ]
    ((fastest, _),) = trainers.fastest_first([fails, works], {}, 1.0)
    assert fastest is works
    assert "OutOfMemoryError" in capsys.readouterr().err
    with pytest.raises(measure.Failed, match="OutOfMemoryError"):
        trainers.fastest_first([fails], {}, 1.0)


def test_nanogpts_time_excludes_evaluations(measure):
    import trainers

    lines = {
        0.0: "step 0: train",
        5.0: "iter 0: a",
        6.0: "iter 10: b",
        8.0: "step 20: train",
        9.0: "iter 20: c",
        11.0: "iter 30: d",
    }
    seconds = trainers.seconds_of_iteration(lines.items())
    assert seconds == pytest.approx((1.0 + 2.0) / 20)


def test_a_text_that_arrives_in_one_piece_has_no_rate(measure):
    import sampling

    at_once = measure.Process([sys.executable, "-c", "import os; os.write(1, 40 * b'a')"])
    with pytest.raises(measure.Failed, match="in one piece"):
        sampling.our_rate(at_once, 1, 40)


def test_a_failed_run_gives_its_own_error(short_text_file):
    ran = run_example(
        "benchmarks/throughput", "--text", short_text_file, "--quick", "--ours=--n_layers 3"
    )
    assert ran.returncode == 1
    last_line = ran.stderr.splitlines()[-1]
    assert last_line.startswith("error: ")
    assert "did you mean n_layer?" in last_line


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("benchmarks/throughput", "--text nowhere.txt", "nowhere.txt"),
        ("benchmarks/throughput", "--text input.txt --ours=--foo", "--name value"),
        ("benchmarks/throughput", "--text input.txt --nanogpt .", "checkout of nanoGPT"),
        ("benchmarks/throughput", "--text input.txt --json nowhere/found.json", "nowhere"),
        ("tutorials/processes", "--text input.txt --plot curves.pdf", ".png or .svg"),
    ],
)
def test_invalid_options_are_refused_before_measuring(
    tmp_path, monkeypatch, name, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text("a text")
    ran = run_example(name, *arguments.split())
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1
    assert message in ran.stderr


def test_a_busy_machine_is_refused_in_one_line(measure, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (3.5, 3.0, 2.0))
    with pytest.raises(SystemExit) as exit:
        measure.wait_until_quiet(-1)
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "3.50" in line and "--anyway" in line


def test_ratios_compare_figures_of_the_same_round(measure):
    assert measure.ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == "3.00x (2.00 to 4.00)"


def test_the_confidence_interval_is_students_t(measure):
    mean, margin = measure.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert margin == pytest.approx(1.963, abs=0.005)  # 2.776 * 1.581 / sqrt(5)
