"""A training that is stopped and started again."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any
from unittest.mock import Mock

import pytest
from launching import session_of, until
from runs import (
    SCRIPT,
    command_line,
    edited_folder,
    ended,
    environment,
    kill,
    make_hosts,
    metrics,
    run,
    started,
    wait_for_file,
    wait_for_line,
)
from trainings import (
    ALONE,
    CUT,
    EXACT,
    LINE,
    assert_same_end,
    curve_without_clock,
    furthest,
    run_ranks,
    run_until_killed,
    small,
    trained,
    trainer_of,
)

from sm_nanogpt.entry_point import train
from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.container import read_container
from sm_nanogpt.entry_point.errors import ConfigError, TrainingError
from sm_nanogpt.entry_point.resume import save_checkpoint
from sm_nanogpt.entry_point.safetensors_file import read_safetensors
from sm_nanogpt.entry_point.text import Corpus, load_corpus


def steps_in(directory: Path) -> list[int]:
    return [row["step"] for row in metrics(directory)]


def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    assert trainer_of(tmp_path / "calm", **CUT).run()
    run_until_killed(trainer_of(tmp_path / "cut", **CUT), step=17)
    assert trainer_of(tmp_path / "cut", **CUT).run()
    assert_same_end(tmp_path / "cut", tmp_path / "calm")
    assert steps_in(tmp_path / "cut/output") == list(range(1, CUT["max_steps"] + 1))


def test_interrupted_ranks_end_with_the_same_bits(tmp_path, text):
    values = {**EXACT, "processes": 2}
    arguments = small(**values)
    trained(tmp_path, make_hosts(tmp_path / "calm", text)[0], **values)

    env = make_hosts(tmp_path / "cut", text)[0]
    host = tmp_path / "cut/algo-1"
    checkpoints = Checkpoints(host / "checkpoints")
    # First killed in the middle of writing a checkpoint: half of the file is there.
    halfway = "        file.write(encoded)\n"
    stall = "        if '-00000010.' in path.name:\n            file.flush(), time.sleep(600)\n"
    cost = "        self.cost = time.monotonic() - self.saved_at\n"  # may put the second off
    edits = [(halfway, halfway + stall), (cost, "")]
    command = edited_folder(tmp_path / "stalling", *edits)
    with started(arguments, cwd=tmp_path, env=env, command=command) as process:
        wait_for_line(process, "step=10/")
        half = wait_for_file(host / "checkpoints", "*.sagemaker-ignore")
        kill(process)
    assert half.exists()
    assert checkpoints.steps() == [5]

    # Then stopped by a signal.
    with started(arguments, cwd=tmp_path, env=env) as process:
        wait_for_line(process, "resumed from the checkpoint of step 5")
        wait_for_line(process, "step=12/")
        process.send_signal(SIGTERM)
        end = ended(process)
    stopped = checkpoints.steps()[0]
    assert 12 <= stopped < EXACT["max_steps"]
    assert end.status == 128 + SIGTERM
    assert end.last_line == f"stopped by a signal; the checkpoint of step {stopped} is written"
    assert not (host / "model").exists()

    end = trained(tmp_path, env, **values)
    assert f"resumed from the checkpoint of step {stopped}" in end.output
    assert_same_end(host, tmp_path / "calm/algo-1")
    assert steps_in(host / "output/data") == list(range(1, EXACT["max_steps"] + 1))
    assert not list((host / "checkpoints").glob("*.sagemaker-ignore"))


@pytest.mark.parametrize("processes, numbers", [(1, [SIGINT]), (2, [SIGTERM, SIGINT])])
def test_a_run_may_be_resumed_to_end_where_it_stopped(tmp_path, sagemaker, processes, numbers):
    """Between two evaluations, at a step whose train_loss is logged.

    Signals in quick succession are one, as from a supervisor.
    """
    values = dict(processes=processes, eval_interval=1000, log_interval=1)
    with started(small(**values, max_steps=10**6), cwd=tmp_path, env=sagemaker) as process:
        wait_for_line(process, "step=5/")
        for number in numbers:
            if len(numbers) == 1:
                process.send_signal(number)
            else:
                os.killpg(process.pid, number)
        end = ended(process)
    assert end.status in [128 + number for number in numbers]
    assert end.last_line.startswith("stopped by a signal; the checkpoint of step ")
    (step,) = Checkpoints(tmp_path / "algo-1/checkpoints").steps()
    end = trained(tmp_path, sagemaker, **values, max_steps=step)
    best = metrics(tmp_path / "algo-1/output/data")[-1]["val_loss"]
    assert f"best val_loss {best:.5f}" in end.output


def test_ranks_end_when_their_parent_is_killed_alone(tmp_path, text_file):
    """As orphans they would go on writing checkpoints beside whoever is started next."""
    with started(small(data=text_file, max_steps=10**6, processes=2), cwd=tmp_path) as process:
        wait_for_line(process, "step=5/")
        assert len(session_of(process.pid)) == 3
        process.send_signal(SIGKILL)
        process.wait()
        until(lambda: not session_of(process.pid))


def test_a_resumed_run_may_change_its_steps_alone(tmp_path):
    assert trainer_of(tmp_path).run()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    content = checkpoints.path(10).read_bytes()
    other_text = trainer_of(tmp_path, max_steps=20)
    other_text.corpus = dataclasses.replace(other_text.corpus, sha256="other")
    diverging = trainer_of(tmp_path, max_steps=20, log_interval=1, learning_rate=1e37)
    nonfinite = r"the loss is (nan|inf), .* step 1[1-5]; .* step 10 .* learning_rate"
    for trainer, error, message in [
        (trainer_of(tmp_path, n_embd=64, max_steps=20), ConfigError, "n_embd .from 32 to 64"),
        (trainer_of(tmp_path, max_steps=5), ConfigError, r"max_steps \(to 5, .* step 10\)"),
        (other_text, ConfigError, "cannot change its text"),
        (diverging, TrainingError, nonfinite),
    ]:
        with pytest.raises(error, match=message) as caught:
            trainer.run()
        assert caught.type is error
        assert checkpoints.steps()[0] == 10
        assert checkpoints.path(10).read_bytes() == content
    assert trainer_of(tmp_path, max_steps=20).run()
    assert steps_in(tmp_path / "output") == [5, 10, 15, 20]


def test_a_finished_run_started_again_rewrites_its_artefact(tmp_path, capsys):
    assert trainer_of(tmp_path).run()
    model = tmp_path / "model/model.safetensors"
    content = model.read_bytes()
    curve = metrics(tmp_path / "output")
    shutil.rmtree(model.parent)
    capsys.readouterr()
    assert trainer_of(tmp_path).run()
    assert model.read_bytes() == content
    assert metrics(tmp_path / "output") == curve
    assert not LINE.search(capsys.readouterr().out)


def test_an_interruption_does_not_change_a_metric(tmp_path):
    """Checkpoints after every step, and an end between two metric lines."""
    values: dict[str, Any] = dict(log_interval=20, eval_interval=20, max_steps=20)
    values["checkpoint_seconds"] = 1e-6
    assert trainer_of(tmp_path / "calm", **values).run()
    run_until_killed(trainer_of(tmp_path / "cut", **values), step=12)
    stopped = trainer_of(tmp_path / "cut", **values)
    stopped.stop_signal = SIGTERM
    assert not stopped.run()
    assert trainer_of(tmp_path / "cut", **values).run()
    assert curve_without_clock(tmp_path / "cut") == curve_without_clock(tmp_path / "calm")


def test_a_killed_run_resumes_on_any_number_of_ranks(tmp_path, text_file):
    """Between two metric lines, with the losses of one that was not interrupted, to rounding, and
    checkpoints of one form."""
    values: dict[str, Any] = dict(weight_decay=0.1, checkpoint_seconds=1e-6)
    values |= dict(data=text_file, processes=2)
    trained(tmp_path, out="calm", **values)
    fault = environment(NANOGPT_FAULT="1:7:kill")
    trained(tmp_path, fault, out="cut", status=137, **values)

    def losses_in(out: str) -> list[float]:
        return [row["train_loss"] for row in metrics(tmp_path / out / "output")]

    forms = []
    for processes in (1, 3):
        out = f"on {processes}"
        shutil.copytree(tmp_path / "cut", tmp_path / out)
        end = run(command_line(resume=out, processes=processes), cwd=tmp_path)
        assert "resumed from the checkpoint of step 7\nnote: the checkpoint is of 2 " in end.output
        assert furthest(losses_in("calm"), losses_in(out)) < 1e-5
        newest, _ = read_safetensors(Checkpoints(tmp_path / out / "checkpoints").path(10))
        forms.append({name: tensor.shape for name, tensor in newest.items()})
    assert forms[0] == forms[1]


def test_a_disk_full_amid_a_checkpoint_ends_all_ranks(tmp_path, text_file):
    """The limit on the size of a file is reached when the other rank sends what it owns."""
    limited = ("bash", "-c", 'ulimit -f 600; exec "$@"', "bash", sys.executable, str(SCRIPT))
    values: dict[str, Any] = dict(n_embd=64, processes=2, hang_seconds=600, command=limited)
    end = trained(tmp_path, status=1, data=text_file, out="out", **values)
    message = r"TrainingError: cannot write .*/checkpoint-00000005\.\w+: file too large"
    assert re.fullmatch(message, end.last_line)
    assert not list((tmp_path / "out/checkpoints").glob("checkpoint-*"))


def test_outside_sagemaker_only_resume_resumes_a_run(tmp_path, text_file):
    trained(tmp_path, data=text_file, out="mine", processes=2)
    model = tmp_path / "mine/model/model.safetensors"
    content = model.read_bytes()
    again = trained(tmp_path, status=2, data=text_file, out="mine")
    assert again.last_line.startswith("ConfigError: mine already holds a run; ")
    assert model.read_bytes() == content

    resumed = run(command_line(resume="mine", max_steps=20), cwd=tmp_path)
    assert resumed.status == 0, resumed.output
    assert "= 2 processes in one group" in resumed.output
    assert steps_in(tmp_path / "mine/output") == [5, 10, 15, 20]


def test_a_directory_in_use_by_another_run_is_refused(tmp_path, text_file):
    long = dict(data=text_file, max_steps=10**6, log_interval=1, eval_interval=10**6)
    long["checkpoint_seconds"] = 1e-6
    with started(small(**long, out="mine"), cwd=tmp_path) as process:
        wait_for_line(process, "step=5/")
        refused = trained(tmp_path, status=2, **long, resume="mine")
        assert refused.last_line.startswith("ConfigError: mine is in use by another run; ")
    rows = (tmp_path / "mine/checkpoints/metrics-00000001.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows[:-1]]  # the last may be cut off by the end
    assert steps == list(range(1, len(steps) + 1))


def test_a_run_that_began_during_tokenization_is_not_resumed(tmp_path, text_file, monkeypatch):
    def meanwhile(*arguments: Any) -> Corpus:
        save_checkpoint(trainer_of(tmp_path))
        return load_corpus(*arguments)

    monkeypatch.setattr("sm_nanogpt.entry_point.train.load_corpus", meanwhile)
    monkeypatch.setattr("sm_nanogpt.entry_point.train.keep_freed_memory", Mock())
    config, options = train.parse_argv(small(data=text_file, out=tmp_path))
    with pytest.raises(ConfigError, match="already holds a run"):
        train.train(config, options, read_container({}, options), ALONE)


def test_a_directory_that_cannot_be_locked_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "none available")))
    Checkpoints(tmp_path).claim(is_new=False)


def test_ranks_end_together_if_the_loss_of_one_is_nan(tmp_path, text_file):
    probe = (
        "trainer = trainer_of(n_layer=1, n_embd=16, block_size=8)\n"
        "trainer.loss_sum.fill_(float('nan') if group.rank else 1.0)\n"
        "try:\n"
        "    train.save_checkpoint(trainer)\n"
        "except train.TrainingError as error:\n"
        "    print(error)\n"
    )
    for end in run_ranks(tmp_path, text_file, 2, probe):
        assert end.last_line.startswith("the loss is nan, ")
