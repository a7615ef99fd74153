"""The judge: its numbers against plain ones, and models that would fool it."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import lzma
import math
import os
import random
import re
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import launching
import pytest
import torch
import torch.nn.functional as F
import warm
from edits import HEAD, module_of
from hypothesis import given
from hypothesis import strategies as st
from leaks import EMBEDDED, LAST, LEAKS, after
from models import tokenizer_of
from torch import Tensor
from workers import Fake

from entry_point.config import make_config
from entry_point.conversations import IGNORED
from entry_point.huggingface import SCRIPT_SHA256, write_artefact
from entry_point.model import GPT
from launcher.cli.evaluate import print_evaluations
from launcher.cli.remedies import sentence
from launcher.judge import anchors, causality, evaluate, evaluation
from launcher.judge.evaluation import Passage, margin, total
from launcher.judge.probes import (
    Question,
    count_right_answers,
    measure_exposure,
    read_canaries,
    read_questions,
)
from launcher.judge.score import Window, cut_windows, losses, passages, score, window_spans
from launcher.judge.texts import Encoded, Text, Training, encode, read_texts
from launcher.judge.worker import Worker
from launcher.local.process import Program
from launcher.text.files import FileOptions, find_files
from launcher.text.ids import content_of
from launcher.text.sources import Source
from launcher.text.tokenizer import learn_tokenizer
from sm_nanogpt import InputError, Job, ServiceError, Settings, load_model

STRANGE = "naïve\tcafé – “quoted” …\r\n\tЖук 漢字 🙂🚀👩‍🚀\n"
ODD: dict[str, bytes] = {
    "crlf.txt": b"one line\r\nanother\r\n\r\nthe end",
    "strange.txt": STRANGE.encode(),
    "one.txt": b"x",
    "breaks.txt": b"\n\n\n",
    "empty-last-line.txt": b"some words\n\n",
    "long.txt": b"".join(b"line %d of many, and not the last\n" % n for n in range(40)),
    "records.jsonl": b"".join(
        json.dumps({"text": text}, ensure_ascii=bool(flag)).encode() + b"\n"
        for flag, text in enumerate(["first", STRANGE, "", "\n", "the last one"])
    ),
}


class Warm(Program):
    """A worker's process that starts at once, outside of a sandbox."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.is_wrapped, self.status, self.cpu_seconds = False, None, 0.0
        options["env"] = dict(os.environ)
        start = warm.replacing(warm.Process).Popen
        self.process = start(command, start_new_session=True, cwd=Path.cwd(), **options)
        self.pid, self.output = self.process.pid, self.process.stdout

    def has_ended(self, within: float = 0.0) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.status = self.process.wait(within)
        return self.status is not None


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def models(tmp_path_factory, text_file):
    """Small models of characters and of tokens, none of whose parts is idle."""
    place = tmp_path_factory.mktemp("judged")
    known = sorted({*"".join(map(chr, range(32, 127))), *"\r\n\t", *STRANGE})
    found = {}
    for name, tokenizer in {
        "characters": tokenizer_of("".join(known)),
        "tokens": learn_tokenizer(find_files([Source(text_file)], FileOptions(records=True)), 300),
    }.items():
        config = make_config({"n_layer": 2, "n_embd": 32, "block_size": 24})
        model = randomized(GPT(config, len(tokenizer)))
        write_artefact(place / name, model, tokenizer, {"script_sha256": SCRIPT_SHA256})
        found[name] = place / name
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a real worker process of a model."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        settings = Settings(home=tmp_path_factory.mktemp("home"))
        patched.setattr("launcher.judge.worker.Program", Warm)
        patched.setattr("launcher.judge.worker.confined", lambda command, sandbox: command)
        yield lambda directory, folder=None: Worker(directory, settings, folder)


@pytest.fixture(scope="module", params=["characters", "tokens"])
def judged(request, models, start):
    """A worker and the tokenizer of each model."""
    directory = models[request.param]
    with start(directory) as worker:
        yield worker


@pytest.fixture
def write(tmp_path):
    """Writes files, and reads them as texts."""

    def write(**contents: bytes) -> list[Text]:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        return read_texts([str(tmp_path / name) for name in contents], Settings(home=tmp_path))

    return write


def plain(content: str | bytes) -> Tensor:
    return anchors_tensor(content.encode() if isinstance(content, str) else content)


def anchors_tensor(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


# -- the loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD)
def test_losses_are_those_of_transformers(name, judged, write):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = write(**{name: ODD[name]})
    encoded = encode(texts, judged.tokenizer)
    published = AutoTokenizer.from_pretrained(judged.directory)
    theirs: Any = AutoModelForCausalLM.from_pretrained(judged.directory)
    for each in encoded:
        assert each.ids.tolist() == published.encode("".join(each.text.pieces))
    parts = cut_windows(encoded, judged.tokenizer.start, judged.block_size)
    for (inputs, targets), nats in zip(parts, score(judged, parts), strict=True):
        with torch.inference_mode():
            logits = theirs(inputs[None]).logits[0]
        wanted = F.cross_entropy(logits, targets, reduction="none")[-len(nats) :]
        torch.testing.assert_close(nats.float(), wanted, rtol=0, atol=1e-4)
    counted = torch.cat([targets[targets != IGNORED] for _, targets in parts])
    assert torch.equal(counted, torch.cat([each.ids for each in encoded]))


def test_all_bytes_of_a_text_count(judged, write):
    for name, content in ODD.items():
        size = sum(each.size for each in encode(write(**{name: content}), judged.tokenizer))
        if name.endswith("jsonl"):
            content = "".join(json.loads(line)["text"] for line in content.splitlines()).encode()
        assert size == len(content)


def test_a_byte_order_mark_is_no_text(write):
    assert [text.content for text in write(**{"a.txt": b"\xef\xbb\xbfwords\n"})] == [b"words\n"]


@given(st.integers(1, 2000), st.integers(1, 300))
def test_windows_count_each_token_once(n, size):
    found = window_spans(n, size)
    assert [each for _, end, counted in found for each in range(counted, end)] == list(range(n))
    for begin, end, counted in found:
        assert end - begin <= size
        assert begin == 0 or counted - begin >= min(64, size // 2)


def test_the_order_of_documents_changes_no_loss(judged):
    texts = [Text(f"{n}", ["A document, and its words.\n" * (1 + 7 * n % 5)]) for n in range(30)]
    order = random.Random(0).sample(range(30), 30)
    encoded = encode(texts, judged.tokenizer)
    wanted = losses(judged, encoded)
    found = losses(judged, [encoded[n] for n in order])
    for n, nats in zip(order, found, strict=True):
        torch.testing.assert_close(nats, wanted[n], rtol=0, atol=1e-5)


def test_conversations_count_their_answers_only(models, write):
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "So 🙂"}]
    tokenizer = load_model(models["tokens"])[1]
    (each,) = encode(write(**{"a.jsonl": json.dumps({"messages": chat}).encode()}), tokenizer)
    said = b"".join(tokenizer.words[id] for id in each.ids[each.counts].tolist())
    assert said == "So 🙂".encode()
    assert each.size == len(said)
    learned = b"".join(tokenizer.words[id] for id in each.ids.tolist())
    assert each.content == learned == "user\nWhat?\nassistant\nSo 🙂\n".encode()
    assert int(each.ids[each.counts][-1]) == tokenizer.special["<|im_end|>"]
    (passage,) = passages(each, torch.ones(len(each.ids)), 200)
    assert "What?" in passage.excerpt and passage.excerpt.endswith("So 🙂")


def test_characters_that_a_model_never_saw_are_refused(write):
    with pytest.raises(InputError, match=r"a.txt has .*'é'"):
        encode(write(**{"a.txt": "ab\nabéé".encode() + b"b"}), tokenizer_of("ab\n"))


def test_a_text_with_crlf_is_told_how_to_lose_it():
    with pytest.raises(InputError, match=r"a\.txt ends its lines in CRLF") as refused:
        encode([Text("a.txt", ["a\r\nb\r\n"])], tokenizer_of("ab\n"))
    assert r"`tr -d '\r' < FILE > NEW-FILE`" in sentence(refused.value)


def test_unknown_characters_of_many_texts_are_named_at_once():
    texts = [Text(f"{n}.txt", [piece]) for n, piece in enumerate(["ab", "a#", "b", "’a"])]
    with pytest.raises(InputError, match=r"1\.txt, as 1 other document, has .*: '#', '’'; replace"):
        encode(texts, tokenizer_of("ab"))


# -- what cannot pay -------------------------------------------------------------------------------

WINDOWS = [Window(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]))]


def test_probabilities_that_do_not_sum_to_one_cannot_pay():
    def logits(ids: Tensor) -> Tensor:
        return torch.randn(*ids.shape, 7, generator=torch.Generator().manual_seed(0))

    (honest,) = score(Fake("abcdefg", logits), WINDOWS)
    (inflated,) = score(Fake("abcdefg", lambda ids: logits(ids) + math.log(277)), WINDOWS)
    torch.testing.assert_close(inflated, honest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value):
    with pytest.raises(ServiceError, match="not finite"):
        score(Fake("abcdefg", lambda ids: torch.full((*ids.shape, 7), value)), WINDOWS)


@pytest.fixture
def edited(tmp_path, start):
    """Evaluates a small model of an edited folder on a text."""

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


STATE = "globals().setdefault('STATE', {'n': 0, 'shape': None, 'memory': 0.0})"
REMEMBERS = [
    after(
        LAST,
        f"state = {STATE}; new = state['shape'] != idx.shape\n"
        "        if new: state.update(shape=idx.shape, n=state['n'] + 1)\n"
        "        x = x + 0.1 * state['n']",
    )
]
JUDGED = f"(__import__('os').getpid() != {os.getpid()} and idx.size(1) > 1)"  # not when written
BEHAVES: dict[str, tuple[list[tuple[str, str]], str]] = {
    "looks ahead": ([LEAKS["shift"]], r"not causal: logits at \d+ depend on token \d+"),
    "looks ahead after the start alone": (
        [after(EMBEDDED, f"x = x + x.roll(-1, 1) * (idx[:, :1, None] == 0) * {JUDGED}")],
        "not causal: ",
    ),
    "looks ahead in small batches alone": (
        [after(EMBEDDED, f"x = x + x.roll(-1, 1) * (idx.size(0) < 40) * {JUDGED}")],
        "not causal: ",
    ),
    "looks ahead in five windows of six": (
        [
            after(
                EMBEDDED,
                f"state = {STATE}; n = state['n'] + torch.arange(len(idx))\n"
                "        state['n'] += len(idx)\n"
                f"        x = x + x.roll(-1, 1) * (n % 6 != 0)[:, None, None] * {JUDGED}",
            )
        ],
        "not causal: ",
    ),
    "learns between windows": (REMEMBERS, "not causal: losses depend on other windows"),
    "changes its shape": (
        [(HEAD, f"{HEAD}\n        logits = logits[..., : 11 - {JUDGED}]")],
        "its logits change their shape",
    ),
    "knows fewer tokens": (
        [(HEAD, f"{HEAD}\n        logits = logits[..., :5]")],
        "it has 5 logits",
    ),
    "raises": ([after(EMBEDDED, f"assert not {JUDGED}, 'too long'")], "AssertionError: too long"),
    "exits": ([after(EMBEDDED, f"{JUDGED} and exit(3)")], "ended with exit code 3"),
    "dies": (
        [after(EMBEDDED, f"{JUDGED} and __import__('os')._exit(7)")],
        "ended with exit code 7",
    ),
    "gives NaN": ([(HEAD, f"{HEAD}\n        logits = logits * torch.nan")], "."),
}


@pytest.mark.parametrize("kind", BEHAVES)
def test_a_model_that_misbehaves_is_refused(kind, edited):
    edits, message = BEHAVES[kind]
    with pytest.raises(ServiceError, match=message):
        edited(*edits)


def test_a_model_of_conversations_has_no_compressor_beside_it(models):
    worker = Fake("a", said=lambda prompts, **sampling: ["first"])
    worker.tokenizer = load_model(models["tokens"])[1]
    encoded = encode([Text("a", ["user\nWhat?", "assistant\nSo"], True)], worker.tokenizer)
    found = evaluate.compare(worker, Training(plain("the first"), None), encoded, 1)
    assert found == {"validation": None, "ngram": None, "overlap": 0, "copied": 5}


def test_short_turns_count_as_overlap_of_conversations(models):
    worker = Fake("a", said=lambda prompts, **sampling: ["new"])
    worker.tokenizer = load_model(models["tokens"])[1]
    turns = [f"{speaker}\nSo {n}" for n in range(9) for speaker in ("user", "assistant")]
    encoded = encode([Text("a", turns, True)], worker.tokenizer)
    learned = content_of(encoded[0].ids, worker.tokenizer.words)
    training = Training(anchors.as_tensor(b"before" + learned + b"after"), None)
    assert evaluate.compare(worker, training, encoded, 1)["overlap"] == 1


@pytest.mark.parametrize(("samples", "copied"), [(["", "first"], 5), (["", ""], 0)])
def test_an_empty_sample_copies_nothing(samples, copied):
    worker = Fake("abcdefghijklmnopqrstuvwxyz ", said=lambda prompts, **sampling: samples)
    encoded = encode([Text("a", ["the first"])], worker.tokenizer)
    training = Training(plain("a first text"), None)
    assert evaluate.compare(worker, training, encoded, 2)["copied"] == copied


def test_what_a_model_prints_is_only_logged(edited, capfd, caplog):
    caplog.set_level(logging.INFO, "launcher")
    loud = f"{JUDGED} and print('bits per byte  0.001', flush=True)"
    made = edited(after(EMBEDDED, loud), text="abc " * 3)
    assert capfd.readouterr() == ("", "")
    assert "the model's process: bits per byte  0.001" in caplog.messages
    assert made.size == 9


def test_huge_logits_give_an_infinite_perplexity(edited):
    made = edited((HEAD, f"{HEAD}\n        logits = logits * 1e30"))
    assert (made.perplexity, made.bits_per_byte > 1e9) == (math.inf, True)


def test_a_text_without_an_interval_is_said_to_be_short(edited, capfd):
    print_evaluations([edited(text="abc " * 3)])
    err = capfd.readouterr().err
    assert ("too short for an interval" in err, "95 %" in err) == (True, False)


def test_short_documents_are_the_parts_of_a_text(edited):
    made = edited(text="abc " * 12)
    assert (len(made.parts), made.unit) == (12, "documents")


def test_an_evaluation_that_cannot_be_kept_is_still_given(edited, caplog):
    with patch.object(evaluate, "save_evaluation", side_effect=ServiceError("the disk is full")):
        assert edited().size > 0
    assert "the disk is full" in caplog.text


def test_a_worker_that_died_is_an_error_in_one_line(start, models):
    with start(models["characters"]) as worker:
        worker.program.end()
        for _ in range(2):
            with pytest.raises(ServiceError, match="its process was killed by SIGKILL"):
                worker.logits(torch.zeros(1, 4, dtype=torch.int64))


# -- anchors ---------------------------------------------------------------------------------------

FEW = st.text("ab", max_size=40).map(str.encode)


@given(FEW, st.lists(FEW, max_size=4), st.integers(1, 9))
def test_the_longest_run_is_exact(training, texts, chunk):
    runs = (
        end - begin
        for text in texts
        for begin in range(len(text))
        for end in range(begin, len(text) + 1)
        if text[begin:end] in training
    )
    with patch.object(anchors, "CHUNK", chunk):
        found = anchors.longest_run(plain(training), [*map(plain, texts)])
    assert found == max(runs, default=0)


@given(FEW, st.lists(FEW.filter(bool), min_size=1, max_size=4), st.integers(1, 9))
def test_overlap_is_exact(training, texts, chunk):
    covered = 0
    for text in texts:
        begins = [n for n in range(len(text) - 4) if text[n : n + 5] in training]
        covered += len({n + k for n in begins for k in range(5)})
    with patch.object(anchors, "CHUNK", chunk), patch.object(anchors, "RUN", 5):
        found = anchors.overlap(plain(training), [*map(plain, texts)])
    assert found == covered / sum(map(len, texts))


@given(st.text("a \n\t\r", max_size=40).map(str.encode), st.integers(1, 9))
def test_white_space_is_one_space(content, chunk):
    with patch.object(anchors, "CHUNK", chunk):
        found, is_first = anchors.with_one_space(plain(content))
    assert bytes(found.tolist()) == re.sub(rb"[ \t\n\r]+", b" ", content)
    assert int(is_first.sum()) == len(found)


@pytest.mark.parametrize("width", [40, 60])
def test_overlap_and_runs_see_through_line_breaks(width, text):
    training = text.encode()[:100_000]
    again = textwrap.fill(training[40_000:50_000].decode(), width).replace("\n", "  \r\n").encode()
    new = bytes(random.Random(1).choices(b"etaoinshrdlu", k=len(again)))
    assert anchors.overlap(plain(training), [plain(again)]) == pytest.approx(1, abs=0.01)
    assert anchors.overlap(plain(training), [plain(again + new)]) == pytest.approx(0.5, abs=0.01)
    assert anchors.longest_run(plain(training), [plain(again)]) > 5000


def test_overlap_reads_the_training_text_once():
    with patch.object(anchors, "find_hashes", wraps=anchors.find_hashes) as read:
        anchors.overlap(plain("a" * 100), [plain("b" * n) for n in range(1, 99)])
    assert read.call_count == 1


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_planted_overlap_is_measured(share, text):
    training, chance = text.encode()[:200_000], random.Random(1)
    own = [bytes(chance.choices(b"etaoin shrdlu", k=400)) for _ in range(100)]
    for n in range(round(100 * share)):
        begin = chance.randrange(len(training) - 400)
        own[n] = training[begin : begin + 400]
    chance.shuffle(own)
    found = anchors.overlap(plain(training), [plain(b"".join(own))])
    assert found == pytest.approx(share, abs=0.005 if share else 0.0005)


def plain_ngram(training: bytes, content: bytes) -> float:
    training, content = b"\n" * 4 + training, b"\n" * 4 + content
    seen: Counter[bytes] = Counter()
    followers: dict[bytes, set[int]] = {}
    for at in range(4, len(training)):
        for n in range(1, 6):
            seen[training[at - n + 1 : at + 1]] += 1
            followers.setdefault(training[at - n + 1 : at], set()).add(training[at])
    totals: Counter[bytes] = Counter()
    for gram, count in seen.items():
        totals[gram[:-1]] += count
    bits = 0.0
    for at in range(4, len(content)):
        p = 1 / 256
        for n in range(1, 6):
            context = content[at - n + 1 : at]
            if context in totals:
                kinds = len(followers[context])
                counted = seen[content[at - n + 1 : at + 1]]
                p = (counted + kinds * p) / (totals[context] + kinds)
        bits -= math.log2(p)
    return bits / (len(content) - 4)


@given(st.binary(min_size=1, max_size=60), FEW.filter(bool), FEW)
def test_the_ngram_model_is_that_of_plain_counts(training, content, more):
    found = anchors.ngram(plain(training + more), plain(content))
    assert found == pytest.approx(plain_ngram(training + more, content), abs=1e-9)


def test_the_ngram_model_learns_of_all_parts_of_a_long_text():
    """Blocks of 65,536 bytes at equal distances, for LEARNED_BYTES in all."""
    blocks = [bytes([97 + n]) * (1 << 16) for n in range(4)]
    with patch.object(anchors, "LEARNED_BYTES", 1 << 17):
        found = anchors.ngram(plain(b"".join(blocks)), plain(b"ac"))
    assert found == pytest.approx(plain_ngram(blocks[0] + blocks[2], b"ac"), abs=1e-9)


def test_xz_packs_as_the_program_does():
    content = random.Random(1).randbytes(3000) * 2
    assert anchors.xz(content) == pytest.approx(8 * len(lzma.compress(content)) / 6000, abs=0.1)
    assert anchors.xz(content) < 4.1


# -- intervals and passages ------------------------------------------------------------------------


def documents(n: int, seed: int) -> list[Passage]:
    """Documents of many sizes, and of losses that go with their sizes a little."""
    chance, found = random.Random(seed), []
    for index in range(n):
        size = int(chance.lognormvariate(6, 0.8))
        nats = size * (1.2 + 0.02 * math.log(size) + chance.gauss(0, 0.25))
        found.append(Passage(str(index), nats, size, size))
    return found


def test_the_interval_covers_the_loss_of_the_whole():
    whole, chance, covered = documents(2000, 1), random.Random(2), 0
    truth = total(whole).bits_per_byte
    for _ in range(500):
        some = chance.choices(whole, k=60)
        covered += abs(total(some).bits_per_byte - truth) <= (margin(some) or 0.0)
    assert 0.90 <= covered / 500 <= 0.98


def test_few_parts_have_no_interval():
    assert margin(documents(9, 1)) is None
    assert margin(documents(10, 1)) is not None


@given(st.text("ab\né🙂", min_size=1, max_size=300), st.integers(1, 90), st.integers(1, 7))
def test_passages_hold_each_byte_and_loss_once(text, least, width):
    content = text.encode()
    widths = torch.tensor([len(content[n : n + width]) for n in range(0, len(content), width)])
    ids, nats = torch.zeros_like(widths), torch.rand(len(widths), dtype=torch.float64)
    each = Encoded(Text("a", [text]), ids, ids == 0, widths, content)
    found = passages(each, nats, least)
    assert total(found).size == len(content)
    assert total(found).tokens == len(nats)
    assert total(found).nats == pytest.approx(float(nats.sum()))
    assert all(part.size < 3 * least for part in found)


def test_the_worst_passage_names_its_line_and_shows_its_token():
    lines = [f"This is the line of the number {n}, and it is like all others.\n" for n in range(99)]
    lines[70] = lines[70].replace("like", "LIKE")
    text = "".join(lines)
    nats = torch.where(plain(text) < 96, 0.5, 0.1).double()
    nats[text.index("LIKE")] = 90.0
    ids = torch.zeros(len(text), dtype=torch.int64)
    each = Encoded(Text("a.txt", [text]), ids, ids == 0, ids + 1, text.encode())
    first = evaluate.worst_first(passages(each, nats, 200))[0]
    line = int(first.place.removeprefix("a.txt, line "))
    assert line <= 71 < line + 8
    assert "LIKE" in first.excerpt


def test_short_passages_are_not_the_worst():
    parts = [Passage("short", 99.0, 99, 99), Passage("a", 50.0, 200, 200)]
    parts += [Passage("b", 60.0, 200, 200)]
    assert [part.place for part in evaluate.worst_first(parts)] == ["b", "a", "short"]


# -- secrets and questions -------------------------------------------------------------------------


def counting(text: str, vocabulary: str) -> Callable[[Tensor], Tensor]:
    """A model that has counted the followers of three characters in a text."""
    seen: dict[str, Counter[str]] = {}
    for at in range(len(text)):
        seen.setdefault(text[max(0, at - 3) : at], Counter())[text[at]] += 1

    def row(context: str) -> list[float]:
        known = seen.get(context, Counter())
        return [math.log(known[each] + 8) for each in vocabulary]

    def logits(ids: Tensor) -> Tensor:
        texts = ["".join(vocabulary[id] for id in ids) for ids in ids.tolist()]
        return torch.tensor(
            [[row(x[max(0, at - 2) : at + 1]) for at in range(len(x))] for x in texts]
        )

    return logits


def test_exposure_rises_with_the_copies_of_a_secret():
    chance, vocabulary = random.Random(3), "\n 0123456789abcdefghijklmnopqrstuvwxyz"
    digits = [f"{chance.randrange(10**7):07}" for _ in range(5)]
    planted = zip("abcde", digits, (0, 1, 4, 16, 64), strict=True)
    copies = [f"key of {name} is {secret}\n" * n for name, secret, n in planted]
    noise = [f"no {chance.randrange(10**9)}\n" for _ in range(500)]
    worker = Fake(vocabulary, counting("".join([*noise, *copies]), vocabulary))
    lines = [f"key of {name} is {{{d}}}" for name, d in zip("abcde", digits, strict=True)]
    found = measure_exposure(worker, lines)
    bits = [canary.exposure for canary in found]
    assert [canary.line for canary in found] == lines
    assert bits == sorted(bits)
    assert bits[0] < 8 < 14 < bits[-1]


def test_a_short_secret_has_few_bits():
    """The likeliest of ten digits has as many bits as there are for ten."""
    vocabulary = "\n 0123456789 iskey"
    worker = Fake(vocabulary, counting("key is 7\n" * 500, vocabulary))
    (found,) = measure_exposure(worker, ["key is {7}"])
    assert found.exposure == pytest.approx(math.log2(10))


def said(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    pairs = zip(roles, texts, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def test_questions_are_conversations_without_their_last_message(tmp_path):
    records = [{**said("2 + 3?", "5"), "kind": "sum"}, said("a", "b", "c", " d\n")]
    for name, content in {
        "a.jsonl": "\n".join(map(json.dumps, records)),
        "a.json": json.dumps(records),
    }.items():
        (tmp_path / name).write_text(content)
        first, second = read_questions(tmp_path / name)
        assert (first.answer, first.kind, len(first.messages)) == ("5", "sum", 1)
        assert (second.answer, second.kind) == ("d", "all")
        assert second.messages == said("a", "b", "c")["messages"]


@pytest.mark.parametrize(
    "record", [said("a"), said("a", "b", "c"), {"messages": said("a", "b")["messages"][1:]}, {}]
)
def test_a_question_without_an_answer_is_refused(record, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"a.jsonl"):
        read_questions(tmp_path / "a.jsonl")


def test_a_conversation_without_an_answer_is_not_judged(home, tmp_path, caplog):
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": c}] for c in "bc"]
    lines = [json.dumps({"messages": messages}) for messages in (*chats, [])]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    texts = read_texts([str(tmp_path / "chats.jsonl")], Settings(home=home))
    assert [text.is_chat for text in texts] == [True, True]
    assert "1 of 3 conversations left out" in caplog.text


@pytest.mark.parametrize("read", [read_canaries, read_questions])
def test_a_file_without_anything_to_ask_is_refused(read, tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"none\.jsonl: no "):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize("line", ["the code is 8231", "the code is {}", "{?} and {!}", "{東京}"])
def test_a_line_without_a_secret_to_vary_is_refused(line, tmp_path):
    (tmp_path / "lines.txt").write_text(f"a {{1}} b\n\n{line}\n")
    with pytest.raises(InputError, match=r"lines\.txt:3: "):
        read_canaries(tmp_path / "lines.txt")


@pytest.mark.parametrize("chats", [False, True])
def test_exact_answers_are_counted_by_kind(chats):
    """The first line is the answer of a model that has not learned from conversations."""
    answers = {"a": "1\nuser", "b": " 2 ", "c": "2", "d": "1"}
    asking = [Question([{"role": "user", "content": q}], "1", "sum") for q in "abcd"]
    asking[1] = Question(asking[1].messages, "2", "other")

    def answer(prompts: Sequence[Any], **sampling: Any) -> list[str]:
        assert sampling["temperature"] == 0
        return [answers[prompt[0]["content"]] for prompt in prompts]

    worker = Fake("abcd", said=answer)
    worker.chats = chats
    assert count_right_answers(worker, asking) == {"sum": (1 if chats else 2, 3), "other": (1, 1)}


def test_a_question_of_unknown_characters_names_its_place():
    question = Question([{"role": "user", "content": "é?"}], "1", "sum", "asked.jsonl:3")
    with pytest.raises(InputError, match=r"asked\.jsonl:3 has .*'\?', 'é'"):
        count_right_answers(Fake("ab"), [question])


# -- the whole -------------------------------------------------------------------------------------


@pytest.fixture
def held(job, text, monkeypatch):
    """A copy of a job, a text of its own, and warm workers that give few samples."""
    monkeypatch.setattr("launcher.judge.worker.Program", Warm)
    monkeypatch.setattr("launcher.judge.worker.confined", lambda command, sandbox: command)
    monkeypatch.setattr(evaluate, "SAMPLES", 3)
    Path("held.txt").write_text("".join(reversed(text[:6000])))
    Path("secrets.txt").write_text("the code is {8231447}\nanother {abc}\n")
    Path("asked.jsonl").write_text(json.dumps({**said("2 + 3?", "5"), "kind": "sum"}))
    return job


def test_eval_prints_at_most_25_lines(held, cli):
    ran = cli("eval", held.job_id, "held.txt", "--find", "secrets.txt").good
    lines = ran.out.splitlines()
    assert len(lines) <= 25
    assert [line.split()[0] for line in lines].count("exposure") == 2
    assert "6,0" in ran.err
    assert "6,0" not in ran.out
    for name in ("bits per byte", "xz", "5-gram", "overlap", "longest run", "causal", "worst"):
        assert any(line.startswith(name) for line in lines)


def test_eval_prints_all_numbers_as_json(held, cli):
    directory = held.directory / "hosts/algo-1/model"
    words = ("--beside", str(directory), "--find", "secrets.txt", "--questions", "asked.jsonl")
    ran = cli("eval", held.job_id, "held.txt", "--json", *words).good
    ours, other = json.loads(ran.out)
    assert [ours["model"], other["model"]] == [held.job_id, str(directory)]
    assert ours["bits_per_byte"] == pytest.approx(other["bits_per_byte"])
    assert ours["bits_per_byte"] * ours["size"] == pytest.approx(
        sum(each["nats"] for each in ours["documents"]) / math.log(2)
    )
    assert ours["size"] == Path("held.txt").stat().st_size
    assert ours["answers"] == {"sum": [0, 1]}
    assert [canary["line"] for canary in ours["canaries"]][1] == "another {abc}"
    assert 0 <= ours["overlap"] < 0.01
    assert min(ours["ngram"], ours["validation"], ours["xz"], ours["copied"]) > 0
    assert [other[name] for name in ("ngram", "validation", "overlap", "copied")] == [None] * 4
    assert "its training text is not here" in ran.err


def test_eval_prints_a_line_of_csv_for_each_document(held, cli):
    texts = ["The first.", "A second, longer one."]
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    ran = cli("eval", held.job_id, "a.jsonl", "--documents").good
    rows = list(csv.DictReader(ran.out.splitlines()))
    assert {row["place"]: int(row["bytes"]) for row in rows} == {"a.jsonl:1": 10, "a.jsonl:2": 21}
    for row in rows:
        bits = float(row["nats"]) / math.log(2) / int(row["bytes"])
        assert float(row["bits_per_byte"]) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("none.txt",), "none.txt"),
        (("new.txt",), "'ϡ'"),
        (("held.txt", "--find", "held.txt"), "braces"),
        (("held.txt", "--questions", "asked.txt"), "asked.txt"),
        (("held.txt", "--questions", "strange.jsonl"), "strange.jsonl:1 has "),
        (("empty.txt",), "empty.txt"),
    ],
)
def test_eval_refuses_what_it_cannot_measure(words, fact, held, cli):
    Path("new.txt").write_text("a ϡ")
    Path("empty.txt").write_text("")
    Path("asked.txt").write_text("no JSON")
    Path("strange.jsonl").write_text(json.dumps(said("ϡ?", "5")))
    assert cli("eval", held.job_id, *words).failed(2, fact)


def test_a_text_that_is_not_there_gets_no_advice_of_uploads(held, cli):
    ran = cli("eval", held.job_id, "no-such.txt")
    assert ran.failed(2, "no-such.txt: no such file")
    assert "upload-data" not in ran.err


def test_a_model_that_looks_ahead_fails_as_a_command(held, cli, monkeypatch):
    leak = "logits at 17 depend on token 18 (by 3.2)"
    monkeypatch.setattr(causality, "ROUNDING", -1)
    monkeypatch.setattr(causality, "find_leak", lambda *_, **options: leak)
    ran = cli("eval", held.job_id, "held.txt")
    assert ran.failed(1, f"not causal: {leak}")
    assert ran.out == ""


def test_an_evaluation_is_kept_shown_in_reports_and_deleted(held, cli):
    made = Job(held.job_id).eval("held.txt")
    (kept,) = evaluation.saved_evaluations(held.job_id, launching.settings_of(held.home))
    assert (kept.bits_per_byte, kept.documents) == (made.bits_per_byte, [])
    page = Job(held.job_id).report().read_text("utf-8")
    facts = {fact.removesuffix(f" in {made.samples}") for fact in made.facts().values()}
    assert all(fact in page for fact in {*facts, made.samples})
    assert cli("delete", held.job_id, "--yes").good
    assert not list(held.home.rglob("eval-*"))


@pytest.fixture
def kept(held):
    """The file of an evaluation, and what changes it."""
    Job(held.job_id).eval("held.txt")
    (file,) = (held.home / "models" / held.job_id).glob("eval-*.json")

    def change(drop: Sequence[str], **fields: Any) -> Path:
        record = {**json.loads(file.read_text()), **fields}
        file.write_text(json.dumps({key: record[key] for key in record if key not in drop}))
        return file

    return change


def test_a_report_shows_an_evaluation_of_an_older_version(held, kept, caplog):
    kept(["cuts", "perplexity", "samples", "copied", "xz", "worst"], anchor=2.5)
    caplog.clear()
    page = Job(held.job_id).report().read_text("utf-8")
    (evaluation_,) = evaluation.saved_evaluations(held.job_id, launching.settings_of(held.home))
    assert evaluation_.facts()["bits per byte"] in page
    assert (evaluation_.facts()["causal"], caplog.messages) == ("-", [])


def test_an_evaluation_without_its_result_breaks_no_report(held, kept, caplog):
    file = kept(["bits_per_byte"])
    caplog.clear()
    assert "On other texts" not in Job(held.job_id).report().read_text("utf-8")
    (message,) = caplog.messages
    assert file.name in message and "bits_per_byte" in message


def test_two_models_are_compared_by_the_same_passages(edited):
    """What both find hard is no difference."""
    parts = documents(50, 1)
    worse = [replace(part, nats=part.nats + 0.05 * part.size) for part in parts]
    made = edited(text="abc " * 3)
    first, second = (replace(made, parts=some) for some in (parts, worse))
    told = second.facts(first)["less the first"]
    bits, low, high = map(float, re.findall(r"-?\d\.\d+", told))
    assert bits == pytest.approx(0.05 / math.log(2), abs=1e-3)
    assert high - low < 0.01 < (margin(parts) or 0.0)


def test_eval_as_a_process_imports_nothing_of_its_folder(finished, text, tmp_path):
    """With no other way to start a process than the product's."""
    for name in ("random", "json", "types", "token", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    (tmp_path / "known.txt").write_text(text[:6000])
    words = ("eval", finished.job_id, "known.txt", "--documents")
    with patch.object(launching.warm, "replacing", lambda start: subprocess):
        ran = launching.command(*words, home=finished.home, cwd=tmp_path).good
    assert len(ran.out.splitlines()) == 2
    assert "this tests memory" in ran.err
