"""Text as subword tokens: from documents to shards, through a run, and back to text."""

from __future__ import annotations

import copy
import errno
import gzip
import itertools
import json
import logging
import os
import random
import re
import shutil
import subprocess
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import SMALL, metrics, run, words

from entry_point.command_line import Options
from entry_point.config import Config
from entry_point.container import Ranks, read_container
from entry_point.data import Batches
from entry_point.distributed import Group
from entry_point.errors import ConfigError, DataError
from entry_point.text import Corpus, Tokenizer, character_tokenizer, load_corpus
from launcher.files import storage
from launcher.files.s3 import S3Location
from launcher.files.storage import local_path
from launcher.models.encoder import Encoder, published_tokenizer
from launcher.models.sample import encode, pieces
from launcher.settings import Settings, load_settings
from launcher.text import channels, tokens
from launcher.text.channels import Channel
from launcher.text.corpus import send
from launcher.text.documents import read_pieces, survey_documents
from launcher.text.files import FileOptions, find_files
from launcher.text.reading import File, detect_file
from launcher.text.sources import Source
from launcher.text.tokenizer import END_OF_TEXT, fitting_size, learn_tokenizer, open_tokenizer
from launcher.text.unpacking import zstd
from sm_nanogpt import InputError, upload_data

STRANGE = "naïve\tcafé\r\n“Жук” 漢字 🙂👩‍🚀 \x00\x7f\u2028 <|endoftext|> end\n"
FOX = "The quick brown fox jumps over the lazy dog.\n"
NUMBERS = " ".join(map(str, range(9000))).encode()


BPE = ("--tokenizer", "bpe", "--vocab-size", "400")


def encode_text(path: Path, tokenizer: Tokenizer, directory: Path) -> Path:
    files = find_files([Source(path)], FileOptions(records=True))
    tokens.encode(files, survey_documents(files), tokenizer, directory, lambda n: None)
    return directory


def stories(count: int) -> list[str]:
    draw = random.Random(7)
    return [
        f"{number}: " + " ".join(draw.sample(FOX.split() * 3, 20)) + "\n" + STRANGE
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A collection of 300 documents, a line each."""
    path = tmp_path_factory.mktemp("documents") / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in stories(300)))
    return path


@pytest.fixture(scope="module")
def tokenizer(documents):
    return learn_tokenizer(find_files([Source(documents)], FileOptions(records=True)), 400)


@pytest.fixture(scope="module")
def made(documents, tokenizer, tmp_path_factory):
    """The upload of these documents."""
    return encode_text(documents, tokenizer, tmp_path_factory.mktemp("made"))


@pytest.fixture
def document(tokenizer):
    """A tokenizer.json, to be changed."""
    return copy.deepcopy(tokenizer.document)


def corpus_of(directory: Path, validation: Path | None = None, **values: Any) -> Corpus:
    options = Options(data=str(directory), validation=str(validation or ""))
    container = read_container({}, options)
    group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container)
    return load_corpus(container, Config(**{"block_size": 8, **values}), group)


def ids_of(part: Any) -> list[int]:
    return (part[0 : len(part)].long() & 0xFFFF).tolist()


def documents_of(corpus: Corpus, part: Any) -> list[str]:
    found: list[str] = []
    ids: list[int] = []
    for id in ids_of(part):
        if id == corpus.tokenizer.end:
            found.append(corpus.tokenizer.decode(ids))
            ids = []
        else:
            ids.append(id)
    assert not ids
    return found


# -- documents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", ["", ".gz", ".zst"])
def test_a_compressed_file_has_the_same_documents(compressed, tmp_path):
    content = "".join(json.dumps({"text": text}) + "\n" for text in stories(5)).encode()
    squeeze: Any = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[compressed]
    path = tmp_path / f"a.jsonl{compressed}"
    path.write_bytes(squeeze(content[:200]) + squeeze(content[200:]))  # as pzstd and cat make
    found = survey_documents([detect_file(path)])
    assert found.documents == 5
    assert found.characters == sum(map(len, stories(5)))


def test_blank_lines_and_empty_texts_are_no_documents(tmp_path, caplog):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "a"}\n\n{"text": ""}\n{"text": "b"}\r\n \n')
    for name, content in (("empty.txt", ""), ("deep/c.txt", FOX), ("notes.md", FOX)):
        (tmp_path / name).write_text(content)
    found = survey_documents(find_files([Source(tmp_path)], FileOptions(records=True)))
    assert (found.documents, found.empty) == (4, 2)
    assert caplog.messages == ["2 of 6 documents left out: no text"]


def test_the_suffix_decides_what_is_json_lines(tmp_path):
    (tmp_path / "notes.jsonl.txt").write_text(FOX)
    files = find_files([Source(tmp_path)], FileOptions(records=True))
    assert survey_documents(files).documents == 1


def test_a_long_text_is_read_in_pieces_of_lines(tmp_path):
    (tmp_path / "a.txt").write_text(FOX * 20_000)
    found = list(read_pieces(File("a.txt", tmp_path / "a.txt")))
    assert ("".join(found), len(found) > 2) == (FOX * 20_000, True)
    assert all(piece.endswith("\n") for piece in found)


GZIPPED = gzip.compress(NUMBERS, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text" "b"}\n', "a.jsonl:2: not JSON at column 9 ("),
        ("a.jsonl", b'{"text": "a"\n', "a.jsonl:1: not JSON at column 13"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not JSON that can be read: it nests"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: half of a surrogate pair"),
        (
            "a.jsonl",
            b'{"text": "caf\xe9"}\n',
            "a.jsonl:1: is not UTF-8 text (column 14: ",
        ),
        ("a.txt", FOX.encode() + b"caf\xe9", "a.txt: is not UTF-8 text"),
        ("a.txt.gz", GZIPPED[:60], "a.txt.gz: damaged"),
        ("a.txt.gz", GZIPPED[:40] + b"x" * 40, "a.txt.gz: damaged"),
        ("a.txt.gz", gzip.compress(FOX.encode() + b"\0\1"), "a.txt.gz: is a binary file"),
        ("a.txt.zst", zstd.compress(NUMBERS)[:-9], "a.txt.zst: damaged"),
        ("a.jsonl.zst", zstd.compress(b"x" * (1 << 27)), "a.jsonl.zst:1: not JSON"),
    ],
)
def test_a_file_that_is_not_text_is_named(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as raised:
        survey_documents([detect_file(tmp_path / name)])
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


# -- tokenizers ------------------------------------------------------------------------------------


def test_text_comes_back_from_its_tokens(tokenizer):
    every = "".join(map(chr, range(1, 0x250))) + STRANGE
    ids = published_tokenizer(tokenizer.document).encode(every, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == every
    assert tokenizer.end not in ids  # the text only spells it


def test_a_vocabulary_is_learned_from_all_documents(tmp_path):
    lines = [json.dumps({"text": "a b"}) for _ in range(2000)] + [json.dumps({"text": FOX * 20})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    learned = learn_tokenizer([detect_file(tmp_path / "a.jsonl")], 300)
    assert b"fox" in {word.strip() for word in learned.words}


# Hindi, Arabic with vowel marks, and Thai: words in which each letter may have a mark.
MARKED = {"hindi": "की मि से हू", "arabic": "كَ تِ بُ مّ", "thai": "กี ที่ นู้ ปั"}


@pytest.mark.parametrize("script", MARKED)
def test_combining_marks_stay_with_their_letters(script, tmp_path):
    draw, syllables = random.Random(5), MARKED[script].split()
    words = ["".join(draw.choices(syllables, k=3)) for _ in range(20)]
    (tmp_path / "a.txt").write_text(" ".join(draw.choices(words, k=2000)))
    learned = learn_tokenizer([detect_file(tmp_path / "a.txt")], 512)
    assert {word.decode(errors="replace").strip() for word in learned.words} >= set(words)


@pytest.mark.parametrize("letters", ["春江潮水连海平上明月共生", "ACGT", " ", "!", "\n"])
def test_a_text_without_breaks_is_learned_in_seconds(letters, tmp_path):
    text = "".join(random.Random(7).choices(letters, k=300_000))
    (tmp_path / "a.txt").write_text(text)
    started, read = time.monotonic(), list[int]()
    learned = learn_tokenizer([detect_file(tmp_path / "a.txt")], 512, read.append)
    assert time.monotonic() - started < 20  # it takes half a second; as one word, minutes
    assert sum(read) == len(text.encode())
    (ids,) = Encoder(learned, "H").encode([text])
    assert learned.decode(array("H", ids)) == text


def test_a_signal_ends_learning_at_once(tmp_path, home):
    (tmp_path / "a.txt").write_text("".join(random.Random(7).choices("ACGT", k=6_000_000)))
    command = (*launching.PROGRAM, "upload-data", "a.txt", *BPE[:3], "65536")
    with subprocess.Popen(
        command, cwd=tmp_path, env=launching.environment(home), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        assert "learning 65,536 tokens" in process.stderr.readline()
        time.sleep(1)  # it takes half a minute
        process.terminate()
        assert process.wait(15) == 1
        assert process.stderr.read() == "interrupted\n"


@pytest.mark.parametrize(
    ("characters", "size"),
    [(3000, 512), (1_115_394, 2048), (2 << 20, 4096), (8_388_607, 8192), (10**10, 16384)],
)
def test_the_default_vocabulary_fits_the_text(characters, size):
    assert fitting_size(characters) == size


def test_a_vocabulary_that_stays_small_is_explained(tmp_path, cli):
    (tmp_path / "a.txt").write_text(FOX * 100)
    ran = cli("upload-data", str(tmp_path / "a.txt"), "--tokenizer", "bpe")
    (learned,) = re.findall(r"(\d+) tokens, not 512: the text has no more to learn", ran.err)
    assert f"vocabulary {learned}\n" in ran.err


def test_the_tokenizer_of_an_upload_is_taken_by_its_directory(documents, tmp_path, cli):
    first = cli("upload-data", str(documents), *BPE).good.out.strip()
    (tmp_path / "more.txt").write_text(FOX * 100)
    words = ("--tokenizer", first.removeprefix("file://"))
    assert cli("upload-data", str(tmp_path / "more.txt"), *words).code == 0


def test_transformers_reads_the_same_tokenizer(made, tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(made)
    text = FOX + "漢字 🙂"
    assert theirs(text)["input_ids"] == published_tokenizer(tokenizer.document).encode(text).ids
    assert theirs.eos_token_id == tokenizer.end


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
NO_STEPS = {"type": "Sequence", "pretokenizers": []}
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def split(pattern: str) -> dict[str, Any]:
    by = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [by, {**BYTE_LEVEL, "use_regex": False}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["model"].pop("type"),  # as in GPT-2's own file
        lambda d: d.update(post_processor={"type": "ByteLevel", "add_prefix_space": True}),
        lambda d: d.update(pre_tokenizer=split(GPT_2)),
        lambda d: d.update(pre_tokenizer=BYTE_LEVEL),
        lambda d: (d.update(pre_tokenizer=split(LLAMA_3)), d["model"].update(ignore_merges=True)),
        lambda d: d.update(pre_tokenizer=split(QWEN), normalizer={"type": "NFC"}),
    ],
)
def test_published_tokenizers_of_bytes_are_taken(change, document, tmp_path):
    change(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    opened = open_tokenizer(tmp_path)
    ids = published_tokenizer(opened.document).encode(STRANGE).ids
    assert opened.decode(ids) == STRANGE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda d: d["model"].update(type="Unigram"),
            "or of characters: KeyError('Unigram')",
        ),
        (lambda d: d.update(added_tokens=[]), "no token for the end of a text"),
        (lambda d: d.pop("model"), "not a tokenizer of BPE over bytes: 'model'"),
        (lambda d: d["model"].update(vocab=None), "of characters: TypeError"),
        (lambda d: d["model"].update(vocab={"a": "b"}), "the id 'b' is no whole number"),
        (lambda d: d.update(added_tokens=[{"id": 0, "special": False, "content": 1}]), "Attribute"),
        (lambda d: d.update(normalizer=PRECOMPILED), "has a normalizer, Precompiled"),
        (lambda d: d.update(pre_tokenizer=split(r"(a+)+$")), "splits text in an unknown way"),
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "splits text in an unknown way"),
        (lambda d: d.update(pre_tokenizer=None), "has no pre_tokenizer"),
        (lambda d: d.update(pre_tokenizer=NO_STEPS), "has a pre_tokenizer without steps"),
        (lambda d: d["model"].update(unk_token="<unk>"), "has the unk_token '<unk>', which its"),
        (lambda d: d["model"]["vocab"].update(far=2**31), "the id 2147483648 is no whole number"),
        (lambda d: d["model"]["vocab"].update(far=-1), "the id -1 is no whole number"),
        (lambda d: d["model"]["vocab"].update(far=0.5), "the id 0.5 is no whole number"),
        (lambda d: d["model"]["vocab"].update(far=3), "two words have the same id"),
        (lambda d: d["added_tokens"][0].update(id=2**31), "the id 2147483648 is no whole number"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(change, reason, document, tmp_path):
    change(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=re.escape(reason)):
        open_tokenizer(tmp_path)


def test_a_tokenizer_that_lacks_characters_is_refused(tmp_path, text_file):
    words = Tokenizer(character_tokenizer("abc"))
    with pytest.raises(InputError, match=r"has never seen: .*; replace them"):
        encode_text(text_file, words, tmp_path)


def test_a_tokenizer_that_loses_text_is_refused(document):
    vocabulary = document["model"]["vocab"]
    vocabulary["unused"] = vocabulary.pop("z")
    document["model"]["merges"] = []
    with pytest.raises(InputError, match=r"'zy dog\.\\n' decodes to 'y dog\.\\n'"):
        encoder_of(document).encode([FOX])


# -- shards ----------------------------------------------------------------------------------------


def test_a_tenth_of_the_documents_validates(made):
    corpus = corpus_of(made)
    trained, validated = (documents_of(corpus, part) for part in (corpus.train, corpus.val))
    assert sorted(trained + validated) == sorted(stories(300))
    assert trained != stories(300)[: len(trained)]  # they are shuffled
    assert 25 <= len(validated) <= 35


def test_a_vocabulary_beyond_uint16_has_ids_of_uint32(made, documents, document, tmp_path):
    end, vocabulary = document["added_tokens"][0], document["model"]["vocab"]
    before, last = end["id"], 1 << 16
    vocabulary |= {f"{number}a": number for number in range(len(vocabulary) + 1, last)}
    vocabulary.pop(end["content"], None)
    end["id"] = last
    words = Tokenizer(document, END_OF_TEXT)
    large = corpus_of(encode_text(documents, words, tmp_path))
    assert json.loads((tmp_path / "meta.json").read_text())["dtype"] == "uint32"
    ids = large.train[0 : len(large.train)].tolist()
    assert last in ids
    assert [before if id == last else id for id in ids] == ids_of(corpus_of(made).train)


@pytest.mark.parametrize(
    ("lengths", "validates"),
    [([9, 9, 9000, 9, 9], [9, 9, 9, 9]), ([700, 500, 600], [500]), ([1, 9000], [1])],
)
def test_the_longest_document_is_trained_on(lengths, validates):
    ends = array("Q", itertools.accumulate(lengths))
    parts = tokens.split(ends, range(len(lengths)))
    assert [lengths[index] for index in parts["val"]] == validates
    assert sorted(parts["train"] + parts["val"]) == list(range(len(lengths)))


@pytest.mark.parametrize("field", ["text", "messages"])
def test_copies_are_all_in_one_part(field, tmp_path, cli):
    def line(text: str) -> str:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": FOX}]
        return json.dumps({field: text if field == "text" else turns}) + "\n"

    lines = [line(f"{number}: {FOX}") for number in range(60)]
    (tmp_path / "twice.jsonl").write_text("".join(lines + lines))
    ran = cli("upload-data", str(tmp_path / "twice.jsonl"), "--tokenizer", "bpe")
    kind = "documents" if field == "text" else "conversations"
    assert f"60 of 120 {kind} are copies; each is in the same part as its original" in ran.err
    parts = []
    for part in ("train", "val"):
        content = (stored(ran.out.strip()) / f"{part}-00000.bin").read_bytes()
        ids = list(array("H" if field == "text" else "i", content))
        ends = [at for at, id in enumerate(ids) if id == ids[-1]]
        parts.append([tuple(ids[a + 1 : b]) for a, b in itertools.pairwise([-1, *ends])])
    trained, validated = parts
    assert (len(trained) + len(validated), len(set(trained + validated))) == (120, 60)
    assert 8 <= len(validated) <= 14
    assert not set(trained) & set(validated)


def test_documents_that_are_all_equal_are_refused(tmp_path, cli):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": FOX}) + "\n") * 30)
    ran = cli("upload-data", str(tmp_path / "a.jsonl"), "--tokenizer", "bpe")
    assert ran.failed(2, "all 30 documents are equal; give one of them")


def test_a_large_validation_part_is_a_warning(tmp_path, cli):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(FOX * 20 + name)
    ran = cli("upload-data", str(tmp_path), "--tokenizer", "bpe", "--vocab-size", "300")
    assert "warning: 33% of the tokens are for validation" in ran.err
    assert "3 documents, 2,703 characters, " in ran.err


def test_the_last_tenth_of_a_single_text_validates(tmp_path, tokenizer, text_file, text):
    corpus = corpus_of(encode_text(text_file, tokenizer, tmp_path))
    cut = int(0.9 * len(text))
    assert documents_of(corpus, corpus.train) == [text[:cut]]
    assert documents_of(corpus, corpus.val) == [text[cut:]]


def test_shards_hold_what_one_file_would(documents, made, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SHARD_BYTES", 5000)
    whole, cut = corpus_of(made), corpus_of(encode_text(documents, tokenizer, tmp_path))
    assert len(list(tmp_path.glob("train-*.bin"))) > 3
    assert ids_of(cut.val) == ids_of(whole.val)
    ids = ids_of(whole.train)
    assert ids_of(cut.train) == ids
    for corpus in (whole, cut):
        batches = Batches(corpus.train, Config(block_size=64, batch_size=8), torch.device("cpu"))
        starts = batches.window_starts(3).tolist()
        assert batches.rows(3, 0, 1)[0].tolist() == [ids[start : start + 64] for start in starts]


def test_eval_fetches_only_the_first_shard_of_a_part(documents, home, s3, monkeypatch, caplog):
    """Files are fetched once, and the store stays as it is."""
    monkeypatch.setattr(tokens, "SHARD_BYTES", 5000)
    caplog.set_level(logging.INFO, "launcher")
    uri = upload_data(documents, tokenizer="bpe", vocab_size=300).uri
    settings, fetched = load_settings(), list[str]()
    fetch_file = S3Location.fetch_file

    def fetch(self: S3Location, name: str, *arguments: Any) -> None:
        fetched.append(name)
        fetch_file(self, name, *arguments)

    monkeypatch.setattr(S3Location, "fetch_file", fetch)
    data = {"data": Channel("plays", uri, None, [])}
    caplog.clear()
    begin = channels.corpus_of(data, settings, begins_only=True)
    assert [name for name in fetched if name.endswith(".bin")] == [
        "train-00000.bin",
        "val-00000.bin",
    ]
    assert re.fullmatch(r"plays: copying \d+\.\d MB", caplog.messages[0])
    whole = channels.corpus_of(data, settings)
    assert len(begin.train) < len(whole.train)
    assert ids_of(begin.train) == ids_of(whole.train)[: len(begin.train)]


def shards(part: str, *more: Any, **values: Any) -> Callable[[Path], None]:
    """A change of what meta.json says of the first shard of a part, or more shards."""

    def change(directory: Path) -> None:
        meta = json.loads((directory / "meta.json").read_text())
        meta[part]["shards"][0].update(values)
        meta[part]["shards"] += more
        (directory / "meta.json").write_text(json.dumps(meta))

    return change


def put_an_id_beyond_the_vocabulary(directory: Path) -> None:
    content = (directory / "train-00000.bin").read_bytes()
    (directory / "train-00000.bin").write_bytes(content[:-2] + b"\xff\xff")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: (d / "train-00000.bin").write_bytes(b"12"), "its size is not that in meta"),
        (lambda d: (d / "meta.json").write_bytes(b"{}"), "meta.json cannot be read: KeyError"),
        (lambda d: (d / "tokenizer.json").write_bytes(b"{}"), "tokenizer.json is no tokenizer of"),
        (lambda d: (d / "val-00000.bin").unlink(), "val-00000.bin is missing"),
        (shards("train", name="../other/train-00000.bin.1"), "sub/train-00000.bin.1 is missing"),
        (shards("train", name=7), "meta.json cannot be read: TypeError"),
        (shards("train", tokens=-1), "its size is not that in meta"),
        (put_an_id_beyond_the_vocabulary, "train-00000.bin has ids beyond the"),
    ],
)
def test_a_damaged_upload_is_refused(change, reason, made, tmp_path):
    shutil.copytree(made, tmp_path / "sub")
    change(tmp_path / "sub")
    with pytest.raises(DataError, match=reason):
        corpus_of(tmp_path / "sub")


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """Runs on one and on two ranks, with masked documents and a checkpoint of each step."""
    values: dict[str, Any] = {**SMALL, "eval_tokens": 0}
    values |= {"mask_documents": True, "checkpoint_seconds": 0.001, "data": made}
    found = {}
    for processes in (1, 2):
        out = tmp_path_factory.mktemp("trained") / "out"
        end = run(words(**values, out=out, processes=processes), cwd=out.parent)
        assert end.status == 0, end.output
        found[processes] = (out, end.output)
    return found


def test_any_number_of_ranks_sees_the_same_tokens(trained):
    one, two = (
        [row["train_loss"] for row in metrics(out / "output")] for out, _ in trained.values()
    )
    assert one == pytest.approx(two, abs=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_on_shards_resumes_to_the_same_bits(trained, tmp_path, processes):
    whole, half = trained[processes][0], tmp_path / "half"
    shutil.copytree(whole, half)
    shutil.rmtree(half / "model")
    max((half / "checkpoints").glob("checkpoint-*")).unlink()
    ended = run(words(resume=half), cwd=tmp_path)
    assert "resumed from the checkpoint of step 9" in ended.output
    files = [out / "model/model.safetensors" for out in (whole, half)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_bits_per_byte_count_the_predicted_bytes(made, trained):
    out, said = trained[1]
    row = metrics(out / "output")[-1]
    corpus = corpus_of(made)
    count = (len(corpus.val) - 1) // 32 * 32
    predicted = corpus.tokenizer.decode(ids_of(corpus.val)[1 : count + 1])
    size = len(predicted.encode())
    expected = row["val_loss"] * count / size / torch.tensor(2.0).log().item()
    assert row["bits_per_byte"] == pytest.approx(expected, rel=1e-3)
    assert f"bits_per_byte={row['bits_per_byte']:.5f}" in said


def test_what_does_not_fit_the_data_is_refused(made, text_file):
    with pytest.raises(DataError, match=r"vocab_size=50: .* 346 different tokens"):
        corpus_of(made, vocab_size=50)
    with pytest.raises(DataError, match="mask_documents needs tokens"):
        corpus_of(text_file, mask_documents=True)
    with pytest.raises(DataError, match=r"the tokens .* validation"):
        corpus_of(made, validation=made)


def test_hosts_need_the_same_tokens(made, text_file, monkeypatch):
    other = corpus_of(text_file).sha256
    monkeypatch.setattr(Group, "broadcast", lambda _, values: dict.fromkeys(values, other))
    with pytest.raises(ConfigError, match=r"SHA-256 of the text .* FullyReplicated"):
        corpus_of(made)


# -- the three commands ----------------------------------------------------------------------------


@pytest.fixture
def uploaded(documents, home):
    """The upload of these documents as tokens."""
    return upload_data(documents, Settings(home=home), tokenizer="bpe", vocab_size=400)


def stored(uri: str) -> Path:
    directory = local_path(uri)
    assert directory is not None
    return directory


def test_an_upload_of_tokens_is_recognized(documents, home, uploaded):
    settings = Settings(home=home)
    again = upload_data(documents, settings, tokenizer="bpe", vocab_size=400)
    assert (uploaded.uploaded, again.uploaded, again.uri) == (True, False, uploaded.uri)
    other = upload_data(documents, settings, tokenizer=stored(uploaded.uri))
    assert other.uri != uploaded.uri
    sizes = [(each.train_tokens, each.val_tokens) for each in (uploaded, other)]
    assert sizes[0] == sizes[1]


def test_a_model_of_tokens_is_trained_and_sampled(documents, home, cli):
    assert cli("upload-data", str(documents), *BPE).code == 0
    launched = launching.command(*launching.launching(), home=home)
    assert launched.code == 0, launched.err
    job_id = launched.out.strip()
    assert "bits/byte:" in cli("status", job_id).out
    assert cli("fetch-and-sample", job_id, "--prompt", "🙂 The", "--seed", "1").out[:5] == "🙂 The"
    # Its tokenizer encodes other text.
    assert cli("upload-data", str(documents), "--tokenizer", job_id).code == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--data TOKENS --validation a.txt", "it holds tokens, with their own val"),
        ("--data a.txt --validation TOKENS", "it holds tokens, with their own val"),
        ("--data a.txt --validation b.txt --set block_size=5000", "b.txt: .* has 4500 characters"),
        ("--data b.txt --set block_size=450", "b.txt: the validation text has 450 characters"),
        ("--data TOKENS --set block_size=32768", "tokens, .* block_size=32768 needs 32769"),
        ("--data a.txt --set mask_documents=true", "a.txt: mask_documents needs tokens"),
        ("--data a.txt --set vocab_size=7", "different characters, more than vocab_size"),
        ("--data TOKENS --set vocab_size=300", "different tokens, more than vocab_size"),
    ],
)
def test_a_launch_refuses_what_the_run_would(words, reason, home, uploaded, tmp_path, cli):
    (tmp_path / "a.txt").write_text(FOX * 1200)
    (tmp_path / "b.txt").write_text(FOX * 100)
    before = launching.tree(home)
    ran = cli("launch", "--instance", "local", *words.replace("TOKENS", uploaded.uri).split())
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert re.search(reason, ran.error)
    assert launching.tree(home) == before


def test_a_launch_refuses_too_many_characters(text_file, monkeypatch, cli):
    monkeypatch.setattr("launcher.launching.texts.LARGEST_TEXT", 10_000)
    ran = cli("launch", "--instance", "local", "--data", str(text_file))
    assert ran.failed(2, "make tokens of them: upload-data --tokenizer")


def test_a_launch_refuses_tokens_without_a_file(uploaded, cli):
    (stored(uploaded.uri) / "val-00000.bin").unlink()
    assert cli("launch", "--instance", "local", "--data", uploaded.uri).failed(
        2, "a file of this upload is missing"
    )


def test_a_shard_that_was_replaced_is_not_sent(uploaded, home, tmp_path):
    directory = stored(uploaded.uri)
    shard = directory / "train-00000.bin"
    storage.write_bytes(str(shard), bytes(shard.stat().st_size))
    other = replace(uploaded, uri=f"{(tmp_path / 'other').as_uri()}")
    with pytest.raises(InputError, match="changed"):
        files = [File(name, directory / name) for name in uploaded.files]
        send(other, files, Settings(home=home), lambda n: None)
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    ("failing", "code", "reason"),
    [
        ("launcher.text.tokens.encode", errno.ENOSPC, "this machine's disk is full"),
        ("tempfile.mkdtemp", errno.EROFS, "Read-only file system"),
    ],
)
def test_an_upload_error_names_the_directory(
    documents, home, cli, monkeypatch, failing, code, reason
):
    monkeypatch.setattr(failing, Mock(side_effect=OSError(code, os.strerror(code))))
    assert cli("upload-data", str(documents), *BPE).failed(1, f"{home / 'cache'}: {reason}")


# -- sampling --------------------------------------------------------------------------------------


def test_a_character_of_several_tokens_is_shown_whole(tokenizer):
    ids = [tokenizer.words.index(bytes([byte])) for byte in "漢🙂".encode()]
    shown = [piece for (piece,) in pieces(map(torch.tensor, ([id] for id in ids)), tokenizer, 1)]
    assert shown == ["", "", "漢", "", "", "", "🙂", ""]


def test_a_prompt_that_is_not_utf8_is_refused(tokenizer):
    with pytest.raises(InputError, match="the prompt is not UTF-8 text"):
        encode(tokenizer, "caf\udce9", 8)


def test_a_sample_ends_with_its_document(tokenizer):
    assert tokenizer.end is not None
    a, b = encode(tokenizer, "a", 8) + encode(tokenizer, "b", 8)
    steps = ([a, b], [b, tokenizer.end], [tokenizer.end, a], [a, a])
    shown = list(pieces(map(torch.tensor, steps), tokenizer, 2))
    assert shown == [["a", "b"], ["b", ""], ["", ""]]


# -- the encoder -----------------------------------------------------------------------------------

KINDS = "ab '\na'sdmtlvre\u0301\u093f   \n\t\r\x0b\x0c1a123a½²Ⅷ٣ é漢字🙂 \n_-!? 1\n\x1c\x85"


def encoder_of(document: Any) -> Encoder:
    return Encoder(Tokenizer(document, END_OF_TEXT), "H")


@pytest.fixture(scope="module", params=[None, GPT_2, LLAMA_3, QWEN])
def fast(request, tokenizer):
    document = dict(tokenizer.document)
    if request.param:
        document["pre_tokenizer"] = split(request.param)
    encoder = encoder_of(document)
    assert encoder.fast
    return encoder


@given(st.lists(st.text(st.sampled_from(KINDS)) | st.text(), max_size=5))
def test_the_fast_encoding_has_the_librarys_ids(fast, pieces):
    assert fast.fast.encode_ordinary_batch(pieces) == fast.encode_by_library(pieces)


def test_every_character_has_the_librarys_ids(fast):
    codes = (code for code in range(1, 0x20000) if not 0xD800 <= code < 0xE000)
    lines = [f"a{c}b {c}{c}1\n{c}" for c in map(chr, codes)]
    # Few long pieces take a fifth of the time. A piece's end matters to spaces alone.
    pieces = ["".join(lines[i : i + 64]) for i in range(0, len(lines), 64)]
    pieces += [line for line in lines if line[-1].isspace()]
    assert fast.fast.encode_ordinary_batch(pieces) == fast.encode_by_library(pieces)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["model"]["merges"].reverse(),
        lambda d: d.update(pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True}),
        lambda d: d["added_tokens"].append({**d["added_tokens"][0], "id": 399, "special": False}),
    ],
)
def test_another_tokenizer_is_left_to_the_library(document, change):
    change(document)
    assert not encoder_of(document).fast


def test_composed_characters_have_the_librarys_ids(document):
    encoder = encoder_of({**document, "normalizer": {"type": "NFC"}})
    (ids,) = encoder.encode_by_library(["e\u0301 a"])
    assert encoder.encode(["e\u0301 a"]) == [array("H", ids).tobytes()]
