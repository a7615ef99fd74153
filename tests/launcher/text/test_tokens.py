"""Uploads of tokens: their shards, runs on them, and the three commands."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import torch
from runs import SMALL, command_line, metrics, run
from texts import stored
from token_texts import BPE, FOX, corpus_of, documents_of, encode_text, ids_of, stories

from sm_nanogpt import InputError, upload_data
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.data import Batches
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.errors import ConfigError, DataError
from sm_nanogpt.entry_point.text import Corpus, Tokenizer
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.s3 import S3Location
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.text import documents as text_documents
from sm_nanogpt.launcher.text import run_corpus, tokens
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.corpus import send
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.tokenizer import END_OF_TEXT

# -- shards ----------------------------------------------------------------------------------------


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def corpus_in(directory: Path, path: Path, tokenizer: Tokenizer) -> Corpus:
    """The corpus of a text, whose tokens are written into a new directory."""
    directory.mkdir()
    return corpus_of(encode_text(path, tokenizer, directory))


def test_a_tenth_of_the_documents_validates(token_upload):
    corpus = corpus_of(token_upload)
    trained = documents_of(corpus, corpus.train)
    validated = documents_of(corpus, corpus.val)
    assert sorted(trained + validated) == sorted(stories(300))
    assert trained != stories(300)[: len(trained)]  # they are shuffled
    assert 25 <= len(validated) <= 35


def test_a_vocabulary_beyond_uint16_has_ids_of_uint32(tokenizer, document, tmp_path):
    """The end of a text moves to the first id that uint16 lacks; all others stay."""
    end = document["added_tokens"][0]
    earlier_id = end["id"]
    end["id"] = 1 << 16
    vocabulary = document["model"]["vocab"]
    vocabulary.pop(end["content"], None)
    for number in range(len(vocabulary) + 2, 1 << 16):
        vocabulary[f"{number}a"] = number
    path = write_texts(tmp_path / "a.jsonl", stories(20))
    large = corpus_in(tmp_path / "large", path, Tokenizer(document, END_OF_TEXT))
    meta = json.loads((tmp_path / "large/meta.json").read_text())
    assert meta["dtype"] == "uint32"
    ids = large.train[0 : len(large.train)].tolist()
    assert 1 << 16 in ids
    with_earlier_end = [earlier_id if id == 1 << 16 else id for id in ids]
    assert with_earlier_end == ids_of(corpus_in(tmp_path / "small", path, tokenizer).train)


@pytest.mark.parametrize(
    ("lengths", "validates"),
    [([9, 9, 9000, 9, 9], [9, 9, 9, 9]), ([700, 500, 600], [500])],
)
def test_the_longest_document_is_trained_on(lengths, validates):
    ends = array("Q", itertools.accumulate(lengths))
    parts = tokens.split(ends, range(len(lengths)))
    assert [lengths[index] for index in parts["val"]] == validates
    assert sorted(parts["train"] + parts["val"]) == list(range(len(lengths)))


def test_copies_are_all_in_one_part(tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO, "sm_nanogpt")
    path = write_texts(tmp_path / "twice.jsonl", stories(60) * 2)
    corpus = corpus_in(tmp_path / "tokens", path, tokenizer)
    assert "60 of 120 documents are copies; each is in the same part" in caplog.text
    trained = documents_of(corpus, corpus.train)
    validated = documents_of(corpus, corpus.val)
    assert sorted(trained + validated) == sorted(stories(60) * 2)
    assert 8 <= len(validated) <= 14
    assert not set(trained) & set(validated)


def test_documents_that_are_all_equal_are_refused():
    with pytest.raises(InputError, match="all 2 documents are equal; give one of them"):
        tokens.split(array("Q", [9, 18]), [1, 1])


def test_a_large_validation_part_is_a_warning(caplog):
    tokens.report_parts(80, 20)
    assert not caplog.messages
    tokens.report_parts(79, 21)
    assert "21% of the tokens are for validation" in caplog.text


def test_the_last_tenth_of_a_single_text_validates(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(text_documents, "MAX_PIECE", 1000)  # and the cut is in a later one
    text = "".join(stories(30)).replace("\0", "")
    (tmp_path / "a.txt").write_text(text, newline="")
    corpus = corpus_in(tmp_path / "tokens", tmp_path / "a.txt", tokenizer)
    cut = int(0.9 * len(text))
    assert documents_of(corpus, corpus.train) == [text[:cut]]
    assert documents_of(corpus, corpus.val) == [text[cut:]]


@pytest.fixture
def sharded(documents, tokenizer, tmp_path, monkeypatch):
    """The corpus of these documents in shards of 5 kB."""
    monkeypatch.setattr(tokens, "SHARD_BYTES", 5000)
    corpus = corpus_in(tmp_path / "sharded", documents, tokenizer)
    assert len(list((tmp_path / "sharded").glob("train-*.bin"))) > 3
    return corpus


def test_shards_hold_what_one_file_would(sharded, token_upload):
    whole = corpus_of(token_upload)
    assert ids_of(sharded.val) == ids_of(whole.val)
    assert ids_of(sharded.train) == ids_of(whole.train)


def test_windows_may_lie_across_shards(sharded):
    ids = ids_of(sharded.train)
    batches = Batches(sharded.train, Config(block_size=64, batch_size=8), torch.device("cpu"))
    rows = batches.rows(3, 0, 1)[0].tolist()
    for start, row in zip(batches.window_starts(3).tolist(), rows, strict=True):
        assert row == ids[start : start + 64]


def test_eval_fetches_only_the_first_shard_of_a_part(
    documents, home, s3, tmp_path, monkeypatch, caplog
):
    """Files are fetched once, and the store stays as it is."""
    monkeypatch.setattr(tokens, "SHARD_BYTES", 5000)
    caplog.set_level(logging.INFO, "sm_nanogpt")
    uri = upload_data(documents, tokenizer="bpe", vocab_size=300).uri
    settings = load_settings()
    names: list[str] = []
    fetch_file = S3Location.fetch_file

    def fetch(self: S3Location, name: str, *arguments: Any) -> None:
        names.append(name)
        fetch_file(self, name, *arguments)

    monkeypatch.setattr(S3Location, "fetch_file", fetch)
    data = {"data": Channel("plays", uri)}
    caplog.clear()
    beginning = run_corpus.corpus_of(data, settings)
    shards = [name for name in names if name.endswith(".bin")]
    assert shards == ["train-00000.bin", "val-00000.bin"]
    assert re.fullmatch(r"plays: copying \d+\.\dkB", caplog.messages[0])
    directory = tmp_path / "whole"
    directory.mkdir()
    storage.fetch(uri, directory, settings=settings)
    whole = corpus_of(directory)
    assert len(beginning.train) < len(whole.train)
    assert ids_of(beginning.train) == ids_of(whole.train)[: len(beginning.train)]


def change_shard(**values: Any) -> Callable[[Path], None]:
    """A change of what meta.json says of the first shard for training."""

    def change(directory: Path) -> None:
        meta = json.loads((directory / "meta.json").read_text())
        meta["train"]["shards"][0].update(values)
        (directory / "meta.json").write_text(json.dumps(meta))

    return change


def put_an_id_beyond_the_vocabulary(directory: Path) -> None:
    content = (directory / "train-00000.bin").read_bytes()
    (directory / "train-00000.bin").write_bytes(content[:-2] + b"\xff\xff")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: (d / "meta.json").write_bytes(b"{}"), "meta.json cannot be read: KeyError"),
        (lambda d: (d / "tokenizer.json").write_bytes(b"{}"), "tokenizer.json is no tokenizer of"),
        (lambda d: (d / "val-00000.bin").unlink(), "val-00000.bin is missing"),
        (change_shard(name="../other/train-00000.bin.1"), "sub/train-00000.bin.1 is missing"),
        (change_shard(tokens=-1), "its size is not that in meta"),
        (put_an_id_beyond_the_vocabulary, "train-00000.bin has ids beyond the"),
    ],
)
def test_a_damaged_upload_is_refused(change, reason, token_upload, tmp_path):
    shutil.copytree(token_upload, tmp_path / "sub")
    change(tmp_path / "sub")
    with pytest.raises(DataError, match=reason):
        corpus_of(tmp_path / "sub")


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(token_upload, tmp_path_factory):
    """Runs on one and on two ranks, with masked documents and a checkpoint of each step."""
    values: dict[str, Any] = {**SMALL, "eval_tokens": 0}
    values |= {"mask_documents": True, "checkpoint_seconds": 0.001, "data": token_upload}
    outputs = {}
    for processes in (1, 2):
        out = tmp_path_factory.mktemp("trained") / "out"
        end = run(command_line(**values, out=out, processes=processes), cwd=out.parent)
        assert end.status == 0, end.output
        outputs[processes] = (out, end.output)
    return outputs


def train_losses(out: Path) -> list[float]:
    return [row["train_loss"] for row in metrics(out / "output")]


def test_any_number_of_ranks_sees_the_same_tokens(trained):
    one, _ = trained[1]
    two, _ = trained[2]
    assert train_losses(one) == pytest.approx(train_losses(two), abs=1e-5)


def test_a_run_on_shards_resumes_to_the_same_bits(trained, tmp_path):
    whole, _ = trained[2]
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    shutil.rmtree(half / "model")
    max((half / "checkpoints").glob("checkpoint-*")).unlink()
    ended = run(command_line(resume=half), cwd=tmp_path)
    assert "resumed from the checkpoint of step 9" in ended.output
    weights = (half / "model/model.safetensors").read_bytes()
    assert weights == (whole / "model/model.safetensors").read_bytes()


def test_bits_per_byte_count_the_predicted_bytes(token_upload, trained):
    out, printed = trained[1]
    row = metrics(out / "output")[-1]
    corpus = corpus_of(token_upload)
    count = (len(corpus.val) - 1) // 32 * 32
    predicted = corpus.tokenizer.decode(ids_of(corpus.val)[1 : count + 1])
    size = len(predicted.encode())
    expected = row["val_loss"] * count / size / torch.tensor(2.0).log().item()
    assert row["bits_per_byte"] == pytest.approx(expected, rel=1e-3)
    assert f"bits_per_byte={row['bits_per_byte']:.5f}" in printed


def test_what_does_not_fit_the_data_is_refused(token_upload, text_file):
    with pytest.raises(DataError, match=r"vocab_size=50: .* 346 different tokens"):
        corpus_of(token_upload, vocab_size=50)
    with pytest.raises(DataError, match="mask_documents needs tokens"):
        corpus_of(text_file, mask_documents=True)
    with pytest.raises(DataError, match=r"the tokens .* validation"):
        corpus_of(token_upload, validation=token_upload)


def test_hosts_need_the_same_tokens(token_upload, text_file, monkeypatch):
    other = corpus_of(text_file).sha256
    monkeypatch.setattr(Group, "broadcast", lambda _, values: dict.fromkeys(values, other))
    with pytest.raises(ConfigError, match=r"SHA-256 of the text .* FullyReplicated"):
        corpus_of(token_upload)


# -- the three commands ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def upload(documents, tmp_path_factory):
    """The upload of these documents as tokens; look, but change nothing."""
    settings = Settings(home=tmp_path_factory.mktemp("elsewhere"))
    return upload_data(documents, settings, tokenizer="bpe", vocab_size=400)


@pytest.fixture
def upload_copy(upload, tmp_path):
    """The same, in a store that a test may change."""
    shutil.copytree(stored(upload.uri).parent, tmp_path / "data")
    return replace(upload, uri=(tmp_path / "data" / stored(upload.uri).name).as_uri())


def test_an_upload_of_tokens_is_recognized(documents, upload, home):
    settings = Settings(home=home)
    first = upload_data(documents, settings, tokenizer="bpe", vocab_size=400)
    again = upload_data(documents, settings, tokenizer="bpe", vocab_size=400)
    assert first.uploaded
    assert not again.uploaded
    assert again.uri == first.uri
    other = upload_data(documents, settings, tokenizer=stored(upload.uri))
    assert other.uri != first.uri
    assert other.train_tokens == first.train_tokens
    assert other.val_tokens == first.val_tokens


def test_a_model_of_tokens_is_trained_and_sampled(documents, home, cli):
    assert cli("upload-data", documents, BPE).code == 0
    launched = launching.command(launching.launching(), home=home)
    assert launched.code == 0, launched.err
    job_id = launched.out.strip()
    assert "bits/byte:" in cli("status", job_id).out
    assert cli("fetch-and-sample", job_id, "--prompt", "🙂 The", "--seed", "1").out[:5] == "🙂 The"
    # Its tokenizer encodes other text.
    assert cli("upload-data", documents, "--tokenizer", job_id).code == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--data a.txt --validation TOKENS", "it holds tokens, with their own val"),
        ("--data a.txt --validation b.txt --set block_size=5000", "b.txt: .* has 4500 characters"),
        ("--data b.txt --set block_size=450", "b.txt: the validation text has 450 characters"),
        ("--data TOKENS --set block_size=32768", "tokens, .* block_size=32768 needs 32769"),
        ("--data a.txt --set mask_documents=true", "a.txt: mask_documents needs tokens"),
        ("--data TOKENS --set vocab_size=300", "different tokens, more than vocab_size"),
    ],
)
def test_a_launch_refuses_what_the_run_would(arguments, reason, home, upload, tmp_path, cli):
    (tmp_path / "a.txt").write_text(FOX * 1200)
    (tmp_path / "b.txt").write_text(FOX * 100)
    ran = cli(*f"launch --instance local {arguments}".replace("TOKENS", upload.uri).split())
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert re.search(reason, ran.error)
    assert launching.tree(home) == set()


def test_a_launch_refuses_too_many_characters(short_text_file, monkeypatch, cli):
    monkeypatch.setattr("sm_nanogpt.launcher.launching.texts.LARGEST_TEXT", 10_000)
    ran = cli("launch", "--instance", "local", "--data", short_text_file)
    assert ran.failed(2, "make tokens of them: upload-data --tokenizer")


def test_a_launch_refuses_tokens_without_a_file(upload_copy, cli):
    (stored(upload_copy.uri) / "val-00000.bin").unlink()
    ran = cli("launch", "--instance", "local", "--data", upload_copy.uri)
    assert ran.failed(2, "a file of this upload is missing")


def test_a_shard_that_was_replaced_is_not_sent(upload_copy, home, tmp_path):
    directory = stored(upload_copy.uri)
    shard = directory / "train-00000.bin"
    storage.write_bytes(str(shard), bytes(shard.stat().st_size))
    other = replace(upload_copy, uri=(tmp_path / "other").as_uri())
    files = [File(name, directory / name) for name in other.files]
    with pytest.raises(InputError, match="changed"):
        send(other, files, Settings(home=home), lambda n: None)
    assert not (tmp_path / "other.json").exists()


def test_an_upload_error_names_the_directory(documents, home, cli, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(tokens, "encode", Mock(side_effect=full))
    reason = "this machine's disk is full"
    assert cli("upload-data", documents, BPE).failed(1, f"{home / 'cache'}: {reason}")
