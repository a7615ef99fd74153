"""What a training prints and leaves."""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from models import ids, lively, tokenizer_of
from runs import (
    SCRIPT,
    SMALL,
    edited_folder,
    environment,
    make_hosts,
    metrics,
    run,
    run_hosts,
    started,
    wait_for_line,
)
from trainings import (
    ALONE,
    LINE,
    OPEN_MPI,
    printed_losses,
    rank_variables,
    small,
    trained,
    trainer_of,
)

from sm_nanogpt.entry_point import train
from sm_nanogpt.entry_point.errors import ConfigError, DataError
from sm_nanogpt.entry_point.faults import read_fault
from sm_nanogpt.entry_point.metrics import best_lines, metric_definitions, metric_line
from sm_nanogpt.entry_point.model import sample
from sm_nanogpt.entry_point.report import memory_text, sample_lines
from sm_nanogpt.entry_point.safetensors_file import read_safetensors
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.models.load import own_model


def test_metric_lines_show_the_memory_of_a_gpu(monkeypatch):
    assert memory_text(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**29)
    total = Mock(return_value=Mock(total_memory=5 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", total)
    assert memory_text(torch.device("cuda")) == " memory=1.5/5.0GiB"


def test_each_metric_regex_finds_only_its_own_number():
    """Also behind the tag of mpirun."""
    row = {
        "step": 250,
        "train_loss": 2.130314,
        "val_loss": 10.5,
        "best_loss": 9.25,
        "learning_rate": 0.00001,
        "bits_per_byte": 2.25,
        "tokens_per_second": 25765.4,
    }
    line = f"[1,mpirank:0,algo-1]<stdout>:{metric_line(row, 2000, 72.4)}"
    numbers = {metric["Name"]: re.findall(metric["Regex"], line) for metric in metric_definitions()}
    assert numbers == {
        "step": ["250"],
        "train_loss": ["2.13031"],
        "val_loss": ["10.50000"],
        "best_loss": ["9.25000"],
        "bits_per_byte": ["2.25000"],
        "learning_rate": ["0.0000100"],
        "tokens_per_second": ["25765"],
    }
    assert re.match(r".*step=250/2000 train_loss=2.13031 .* time_left=0:01:12$", line)
    del row["val_loss"]
    assert "val_loss" not in metric_line(row, 2000, 0)


def test_a_run_whose_log_has_no_reader_ends(tmp_path, sagemaker):
    endless = small(max_steps=10**6, processes=2)
    with started(endless, cwd=tmp_path, env=sagemaker, stderr=subprocess.PIPE) as process:
        wait_for_line(process, "step=5/")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        message = process.stderr.read()
        status = process.wait()
    assert status == 1
    assert message == "BrokenPipeError: [Errno 32] Broken pipe\n"


@pytest.fixture(scope="module")
def mpirun(tmp_path_factory, text):
    """A host on which mpirun has started two processes, and what each printed."""
    base = tmp_path_factory.mktemp("mpirun")
    (env,) = make_hosts(base, text)
    envs = [env | rank_variables(rank, 2, rank, 2, by=OPEN_MPI) for rank in (0, 1)]
    first, second = run_hosts(small(sample_length=90), cwd=base, envs=envs)
    assert first.status == 0, first
    assert second.status == 0, second
    return base / "algo-1", first.output, second.output


def test_under_mpirun_only_rank_0_prints(mpirun):
    host, first, second = mpirun
    assert "2 processes in one group (launched by mpirun" in first
    assert second == ""
    rows = metrics(host / "output/data")
    assert printed_losses(first) == {row["step"]: round(row["train_loss"], 5) for row in rows}
    model, tokenizer = own_model(host / "model")
    parameters = sum(p.numel() for p in model.parameters())
    assert f"\n{parameters:,} parameters; " in first
    assert f" vocabulary {len(tokenizer)}\n" in first


def sample_in(output: str) -> str:
    return "\n".join(re.findall(r"^\| (.*)$", output, re.MULTILINE))


def test_samples_are_printed_before_and_after_training(mpirun):
    _, output, _ = mpirun
    start, from_first_sample = output.split("--- sample before training ---\n")
    training, end = from_first_sample.split("--- sample after training ---\n")

    assert sample_in(start) == ""
    assert len(sample_in(training)) == 30
    assert len(sample_in(end)) == 90

    assert not LINE.search(start)
    assert LINE.search(training)
    assert not LINE.search(end)


def test_a_sample_follows_the_token_that_starts_a_text():
    tokenizer = tokenizer_of("\nabcdefghij")
    corpus = Corpus(tokenizer, ids(99), ids(99), "")
    model = lively()
    expected = tokenizer.decode(sample(model, [tokenizer.start], 9))
    heading, *lines = sample_lines(model, corpus, "now", 9)
    assert heading == "--- sample now ---"
    assert lines == [f"| {line}" for line in expected.split("\n")]


@pytest.fixture(scope="module")
def unforked(tmp_path_factory, text_file):
    """A run of one process, with a log of ASCII, that samples its own model in the end."""
    code = (
        "import pathlib, sys\n"
        "from sm_nanogpt.entry_point import train\n"
        "from sm_nanogpt.entry_point.model import sample\n"
        "from sm_nanogpt.launcher.models.load import own_model\n"
        "status = train.main(sys.argv[1:])\n"
        "model, tokenizer = own_model(pathlib.Path('out/model'))\n"
        "sample(model, [tokenizer.start], 9)\n"
        "print(status, 'torch._dynamo' in sys.modules)"
    )
    arguments = small(sample_length=150, processes=1, data=text_file, out="out")
    env = environment(PYTHONPATH=str(SCRIPT.parents[1]), PYTHONIOENCODING="ascii")
    cwd = tmp_path_factory.mktemp("unforked")
    return run(arguments, cwd=cwd, env=env, command=(sys.executable, "-c", code))


def test_one_process_does_not_import_torchs_compiler(unforked):
    assert unforked.last_line == "0 False", unforked.output


def test_samples_are_escaped_in_a_log_of_ascii(unforked):
    assert "\\u" in unforked.output


def row(step: int, train_loss: float, val_loss: float) -> dict[str, float]:
    return {"step": step, "train_loss": train_loss, "val_loss": val_loss}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(5, 3.0, 3.0), row(10, 2.0, 3.2)], "memorized its text: val_loss rose to 3.2"),
        ([row(4, 3.0, 3.0), row(10, 2.0, 3.1)], "no later val_loss was lower"),  # rose little
        ([row(5, 2.0, 3.0), row(10, 2.0, 3.2)], "no later val_loss was lower"),  # not memorized
        ([row(6, 3.0, 3.0), row(10, 2.0, 3.2)], "no later val_loss was lower"),  # late
        # It started from a model.
        ([{"step": 0, "val_loss": 3.0}, row(10, 0.5, 3.2)], "no later val_loss was lower"),
    ],
)
def test_a_last_line_says_why_an_earlier_step_is_kept(rows, message):
    first, note = best_lines(rows, rows[0]["step"])
    assert first == f"best val_loss 3.00000 at step {rows[0]['step']}"
    assert message in note


@pytest.mark.parametrize(
    ("best_step", "kept"),
    [
        (5, "generation 1 of 3, step 5;"),
        (10, "generation 1 of 3, step 10;"),
        (15, "generation 2 of 3, step 15;"),
        (25, "generation 3 of 3, step 25;"),
    ],
)
def test_a_last_line_says_which_generation_is_kept(best_step, kept):
    rows = [row(step, 3.0, 3.0 if step == best_step else 3.5) for step in range(5, 31, 5)]
    _, note = best_lines(rows, best_step, generations=3)
    assert kept in note


@pytest.mark.parametrize(
    "rows",
    [
        [row(5, 2.0, 3.1), row(10, 3.0, 3.0)],
        # Resumed where it ends.
        [row(5, 2.0, 3.1), {"step": 10, "train_loss": 3.0}, {"step": 10, "val_loss": 3.0}],
    ],
)
def test_where_the_last_step_is_kept_nothing_is_explained(rows):
    assert list(best_lines(rows, 10)) == ["best val_loss 3.00000 at step 10"]


def test_the_first_lines_name_devices_and_choices(tmp_path, capsys):
    trainer_of(tmp_path, precision="bfloat16", gradient_accumulation_steps=2).introduce(ALONE)
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("running on 1 host x 1 CPU = 1 process in one group (launched by hand;")
    assert second == "chosen: bfloat16, eager, 2 passes a step"


@pytest.mark.parametrize("fault", ["1:kill", "0:4:explode"])
def test_an_impossible_fault_is_refused(fault):
    with pytest.raises(ConfigError, match="RANK:STEP:ACTION"):
        read_fault(fault)


@pytest.fixture
def garbage():
    """Has Python look for garbage as before, after a test in which a run did not."""
    yield gc
    gc.unfreeze()
    gc.enable()


def test_a_run_never_looks_for_garbage_among_its_imports(monkeypatch, garbage):
    """With those of torch, each checkpoint would take a tenth of a second longer."""
    frozen: list[int] = []
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    monkeypatch.setattr(
        "sm_nanogpt.entry_point.train.main", lambda _: frozen.append(gc.get_freeze_count())
    )
    with pytest.raises(SystemExit):
        train.run([])
    assert frozen[0] > 100_000
    assert not gc.isenabled()


@pytest.mark.usefixtures("garbage")
def test_what_may_be_an_echo_of_a_failure_is_reported_late(monkeypatch):
    """The first cause may be on the same log, which takes the last line for the reason."""
    slept: list[float] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    for error in (DataError("none"), AttributeError("gleu"), RuntimeError("closed by peer")):
        monkeypatch.setattr("sm_nanogpt.entry_point.train.main", Mock(side_effect=error))
        with pytest.raises(SystemExit):
            train.run([])
    assert slept == [5]


# Where every rank comes by, before it joins the group.
EARLY = "    device_type = choose_device(config, container, ranks.world_size)\n"


def test_a_warning_is_printed_without_its_class_name(tmp_path, text_file):
    """SageMaker would take that for the reason of a failure."""
    warning = "    warnings.warn('two\\nlines')\n    raise ConfigError('none')\n"
    command = edited_folder(tmp_path / "train", (EARLY, warning + EARLY))
    end = trained(tmp_path, status=2, data=text_file, processes=1, command=command)
    assert end.output == "note: two lines\nConfigError: none\n"


def test_a_rank_that_ignores_signals_ends_after_a_failure(tmp_path, text_file):
    deaf = (
        "    if ranks.rank == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        time.sleep(600)\n"
        "    raise ConfigError('that is enough')\n"
    )
    command = edited_folder(tmp_path / "train", (EARLY, deaf + EARLY))
    end = trained(tmp_path, status=2, data=text_file, processes=2, command=command)
    assert end.last_line == "ConfigError: that is enough"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone gives memory back so eagerly")
def test_freed_tensors_memory_is_reused(tmp_path):
    code = (
        "import resource, torch\n"
        "from sm_nanogpt.entry_point import train\n"
        "train.keep_freed_memory()\n"
        "def pages_asked_for():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    tensors = [torch.ones(10 << 20) for _ in range(3)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "print(*(pages_asked_for() for _ in range(30)))\n"
    )
    end = run([], cwd=tmp_path, command=(sys.executable, "-c", code))
    pages = [int(number) for number in end.output.split()]
    assert statistics.median(pages[1:]) < pages[0] / 10  # the first few still arrange the heap


def test_the_buffers_of_an_edit_count_steps_alone(text_file, tmp_path):
    """The steps before the first one, which lay out DDP's buckets, leave no trace."""
    blocks = "        self.blocks = "
    buffer = '        self.register_buffer("seen", torch.zeros(()))\n'
    last_norm = "        x = norm(x, self.norm)\n"
    count = "        if self.training:\n            self.seen = self.seen + 1\n"
    edits = [(blocks, buffer + blocks), (last_norm, count + last_norm)]
    command = edited_folder(tmp_path / "mine", *edits)
    trained(tmp_path, data=text_file, out="out", processes=2, command=command)
    newest = max((tmp_path / "out/checkpoints").glob("checkpoint-*"))
    tensors, _ = read_safetensors(newest)
    assert int(tensors["model.seen"]) == SMALL["max_steps"]
