"""The process of a model: what cannot pay, and what it says of itself."""

from __future__ import annotations

import logging
import math
import os
from unittest.mock import patch

import pytest
import torch
from edits import HEAD
from judged_texts import plain
from leaks import EMBEDDED, LAST, LEAKS, insert_after
from torch import Tensor
from workers import Fake, worker_that_sends

from sm_nanogpt import ServiceError, Settings, load_model
from sm_nanogpt.launcher.judge import anchors, evaluate, measures
from sm_nanogpt.launcher.judge.evaluate import EDITED
from sm_nanogpt.launcher.judge.evaluation import ANCHORS
from sm_nanogpt.launcher.judge.measures import Subject, measure_anchors
from sm_nanogpt.launcher.judge.score import Window, losses_of_windows
from sm_nanogpt.launcher.judge.texts import Text, TrainingText, encode_texts
from sm_nanogpt.launcher.judge.worker import Worker, linked_files
from sm_nanogpt.launcher.text.ids import content_of

WINDOWS = [Window(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]))]


def test_probabilities_that_do_not_sum_to_one_cannot_pay():
    def logits(ids: Tensor) -> Tensor:
        return torch.randn(*ids.shape, 7, generator=torch.Generator().manual_seed(0))

    (honest,) = losses_of_windows(Fake("abcdefg", logits), WINDOWS)
    (inflated,) = losses_of_windows(
        Fake("abcdefg", lambda ids: logits(ids) + math.log(277)), WINDOWS
    )
    torch.testing.assert_close(inflated, honest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value):
    with pytest.raises(ServiceError, match="not finite"):
        losses_of_windows(Fake("abcdefg", lambda ids: torch.full((*ids.shape, 7), value)), WINDOWS)


STATE = "globals().setdefault('STATE', {'n': 0, 'shape': None, 'memory': 0.0})"
REMEMBERS = [
    insert_after(
        LAST,
        f"state = {STATE}; new = state['shape'] != idx.shape\n"
        "        if new: state.update(shape=idx.shape, n=state['n'] + 1)\n"
        "        x = x + 0.1 * state['n']",
    )
]
JUDGED = f"(__import__('os').getpid() != {os.getpid()} and idx.size(1) > 1)"  # not when written
BEHAVES: dict[str, tuple[list[tuple[str, str]], str]] = {
    "looks ahead": ([LEAKS["shift"]], r"not causal: logits at \d+ depend on token \d+"),
    "learns between windows": (REMEMBERS, "not causal: losses depend on other windows"),
    "changes its shape": (
        [(HEAD, f"{HEAD}\n        logits = logits[..., : 11 - {JUDGED}]")],
        "its logits change their shape",
    ),
    "raises": (
        [insert_after(EMBEDDED, f"assert not {JUDGED}, 'too long'")],
        "AssertionError: too long",
    ),
    "dies": (
        [insert_after(EMBEDDED, f"{JUDGED} and __import__('os')._exit(7)")],
        "ended with exit code 7",
    ),
}


@pytest.mark.parametrize("kind", BEHAVES)
def test_a_model_that_misbehaves_is_refused(kind, edited):
    edits, message = BEHAVES[kind]
    with pytest.raises(ServiceError, match=message):
        edited(*edits)


def test_a_model_of_conversations_has_no_compressor_beside_it(models):
    worker = Fake("a", samples=lambda prompts, **sampling: ["first"])
    worker.tokenizer = load_model(models["tokens"])[1]
    encoded = encode_texts([Text("a", ["user\nWhat?", "assistant\nSo"], True)], worker.tokenizer)
    subject = Subject(worker, encoded, TrainingText(plain("the first"), None), n_samples=1)
    values = {"xz": None, "ngram": None, "validation": None, "overlap": 0, "copied": 5}
    assert values.items() <= measure_anchors(subject).items()


def test_each_anchor_that_is_shown_is_measured():
    worker = Fake("abc")
    encoded = encode_texts([Text("a", ["abc"])], worker.tokenizer)
    values = measure_anchors(Subject(worker, encoded, None, n_samples=1))
    assert values.keys() == ANCHORS.keys()


def test_short_turns_count_as_overlap_of_conversations(models):
    worker = Fake("a", samples=lambda prompts, **sampling: ["new"])
    worker.tokenizer = load_model(models["tokens"])[1]
    turns = [f"{speaker}\nSo {n}" for n in range(9) for speaker in ("user", "assistant")]
    encoded = encode_texts([Text("a", turns, True)], worker.tokenizer)
    learned = content_of(encoded[0].ids, worker.tokenizer.words)
    training = TrainingText(anchors.as_tensor(b"before" + learned + b"after"), None)
    assert measures.overlap(Subject(worker, encoded, training, n_samples=1)) == 1


@pytest.mark.parametrize(("samples", "copied"), [(["", "first"], 5), (["", ""], 0)])
def test_an_empty_sample_copies_nothing(samples, copied):
    worker = Fake("abcdefghijklmnopqrstuvwxyz ", samples=lambda prompts, **sampling: samples)
    encoded = encode_texts([Text("a", ["the first"])], worker.tokenizer)
    training = TrainingText(plain("a first text"), None)
    assert measures.copied(Subject(worker, encoded, training, n_samples=2)) == copied


def test_what_a_model_prints_is_only_logged(edited, capfd, caplog):
    caplog.set_level(logging.INFO, "sm_nanogpt")
    loud = f"{JUDGED} and print('bits per byte  0.001', flush=True)"
    evaluated = edited(insert_after(EMBEDDED, loud), text="abc " * 3)
    assert capfd.readouterr() == ("", "")
    assert "the model's process: bits per byte  0.001" in caplog.messages
    assert evaluated.size == 9


def test_an_edited_folder_is_asked_again_by_four_processes(edited, monkeypatch):
    monkeypatch.setattr(evaluate, "EDITED", EDITED)
    evaluated = edited(text="abc " * 12)
    assert evaluated.cuts == 4 * evaluated.size == 4 * 36


def test_huge_logits_give_an_infinite_perplexity(edited):
    evaluated = edited((HEAD, f"{HEAD}\n        logits = logits * 1e30"))
    assert evaluated.perplexity == math.inf
    assert evaluated.bits_per_byte > 1e9


def test_short_documents_are_the_parts_of_a_text(edited):
    evaluated = edited(text="abc " * 12)
    assert len(evaluated.parts) == 12
    assert evaluated.unit == "documents"


def test_an_evaluation_that_cannot_be_kept_is_still_given(edited, caplog):
    with patch.object(evaluate, "save_evaluation", side_effect=ServiceError("the disk is full")):
        assert edited().size > 0
    assert "the disk is full" in caplog.text


def test_a_model_reads_the_files_it_links_and_no_directory(tmp_path):
    """A stranger's model could link the home of the user, or the text that it is judged on."""
    home, model = tmp_path / "home", tmp_path / "model"
    home.mkdir()
    model.mkdir()
    weights = home / "weights"
    weights.touch()
    (model / "model.safetensors").symlink_to(weights)
    (model / "all").symlink_to(home)
    (model / "gone").symlink_to(home / "gone")
    (model / "config.json").touch()
    assert linked_files(model) == [weights]


def test_a_worker_that_died_is_an_error_in_one_line(start, models):
    with start(models["characters"]) as worker:
        worker.program.end()
        for _ in range(2):
            with pytest.raises(ServiceError, match="its process was killed by SIGKILL"):
                worker.logits(torch.zeros(1, 4, dtype=torch.int64))


def test_a_worker_computes_with_as_many_threads_as_its_judge(models, monkeypatch):
    """In its sandbox, Intel's library would count one core."""
    commands = []

    def record(command: list[str], **_: object) -> None:
        commands.append(command)
        raise ServiceError("no process")

    monkeypatch.setattr("sm_nanogpt.launcher.judge.worker.Program", record)
    monkeypatch.setattr("sm_nanogpt.launcher.judge.worker.confined", lambda command, _: command)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(ServiceError, match="no process"):
        Worker(models["characters"], Settings(), None)
    *_, n_threads, _ = commands[0]
    assert n_threads == "3"


def test_each_token_of_a_sample_has_the_patience_of_an_answer(start, models):
    """All of them together may take hours, if a large model keeps no keys and values."""
    with start(models["characters"]) as worker:
        with patch.object(worker, "answer", wraps=worker.answer) as answer:
            [sample] = worker.sample([None], max_new_tokens=20)
        assert len(sample) == 20
        assert answer.call_count >= 20


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([b"5"], "a sample is damaged"),
        ([b'["a"]', b'["b", "c"]'], "other samples than were asked for"),
        ([b'["a"]'] * 4, "other samples than were asked for"),
        ([b'["aaaaa"]'], "other samples than were asked for"),  # a token is one of three letters
    ],
)
def test_samples_that_were_not_asked_for_are_refused(answers, problem):
    messages = [part for content in answers for part in (b"", content)]
    with pytest.raises(ServiceError, match=problem):
        worker_that_sends(*messages).sample([None], max_new_tokens=2)
