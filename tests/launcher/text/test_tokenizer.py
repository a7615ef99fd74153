"""Tokenizers: learned, and those that others publish."""

from __future__ import annotations

import json
import random
import re
from array import array
from concurrent.futures import Future
from functools import partial
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
from token_texts import (
    BYTE_LEVEL,
    FOX,
    LLAMA_3,
    QWEN,
    STRANGE,
    encode_text,
    encoder_of,
    split,
)

from sm_nanogpt import InputError, Settings
from sm_nanogpt.entry_point.text import Tokenizer, character_tokenizer
from sm_nanogpt.launcher.models.encoder import Encoder, published_tokenizer
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.threads import in_thread
from sm_nanogpt.launcher.text.tokenizer import (
    find_tokenizer,
    fitting_size,
    learn_tokenizer,
    open_tokenizer,
)


def test_text_comes_back_from_its_tokens(tokenizer):
    every = "".join(map(chr, range(1, 0x250))) + STRANGE
    ids = published_tokenizer(tokenizer.document).encode(every, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == every
    assert tokenizer.end not in ids  # the text only spells it


def test_a_vocabulary_is_learned_from_all_documents(tmp_path):
    lines = [json.dumps({"text": text}) for text in ["a b"] * 2000 + [FOX * 20]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    learned = learn_tokenizer([detect_file(tmp_path / "a.jsonl")], 300)
    assert b"fox" in {word.strip() for word in learned.words}


def test_combining_marks_stay_with_their_letters(tmp_path):
    """In Hindi, each letter may have one."""
    draw = random.Random(5)
    syllables = ["की", "मि", "से", "हू"]
    words = {"".join(draw.choices(syllables, k=3)) for _ in range(20)}
    (tmp_path / "a.txt").write_text(" ".join(draw.choices(sorted(words), k=2000)))
    learned = learn_tokenizer([detect_file(tmp_path / "a.txt")], 512)
    tokens = {word.decode(errors="replace").strip() for word in learned.words}
    assert words <= tokens


def test_a_text_without_breaks_is_learned_in_short_pieces(tmp_path, monkeypatch):
    """As one word, it would take minutes: each merge goes through the whole word."""
    text = "".join(random.Random(7).choices("春江潮水连海平上明月共潮生", k=5_000))
    (tmp_path / "a.txt").write_text(text)
    lengths: list[int] = []

    def learn(task: partial[Any]) -> Future[Any]:
        library = task.func.__self__  # type: ignore[attr-defined]
        for piece, _ in library.pre_tokenizer.pre_tokenize_str(text):
            lengths.append(len(piece))  # bytes
        return in_thread(task)

    monkeypatch.setattr("sm_nanogpt.launcher.text.tokenizer.in_thread", learn)
    sizes: list[int] = []
    learned = learn_tokenizer([detect_file(tmp_path / "a.txt")], 512, sizes.append)
    assert max(lengths) == 3 * 256
    assert sum(lengths) == sum(sizes) == len(text.encode())
    (ids,) = Encoder(learned, "H").encode([text])
    assert learned.decode(array("H", ids)) == text


def test_ctrl_c_ends_learning_at_once(tmp_path, monkeypatch):
    """The library handles no signals, so it learns in a thread."""
    may_end = Event()
    has_ended = Event()

    def train(*_: object) -> None:
        may_end.wait(60)
        has_ended.set()

    library = Mock(train_from_iterator=train)
    monkeypatch.setattr("tokenizers.Tokenizer", Mock(return_value=library))
    (tmp_path / "a.txt").write_text(FOX)
    files = [detect_file(tmp_path / "a.txt")]
    with pytest.raises(KeyboardInterrupt):
        learn_tokenizer(files, 300, Mock(side_effect=KeyboardInterrupt))
    assert not has_ended.is_set()
    may_end.set()


@pytest.mark.parametrize(
    ("characters", "size"),
    [(3000, 512), (2 << 20, 4096), ((2 << 20) - 1, 2048), (10**10, 16384)],
)
def test_the_default_vocabulary_fits_the_text(characters, size):
    assert fitting_size(characters) == size


def test_a_vocabulary_that_stays_small_is_explained(tmp_path, cli):
    (tmp_path / "a.txt").write_text(FOX * 100)
    ran = cli("upload-data", tmp_path / "a.txt", "--tokenizer", "bpe")
    (learned,) = re.findall(r"(\d+) tokens, not 512: the text has no more to learn", ran.err)
    assert f"vocabulary {learned}\n" in ran.err


def test_a_typo_in_bpe_is_answered_by_it(home):
    with pytest.raises(InputError, match="no tokenizer 'BPE'; did you mean bpe"):
        find_tokenizer("BPE", Settings(home=home))


def test_the_library_reads_the_tokenizer_of_an_upload(token_upload, tokenizer):
    library = tokenizers.Tokenizer.from_file(str(token_upload / "tokenizer.json"))
    text = FOX + "漢字 🙂"
    assert library.encode(text).ids == published_tokenizer(tokenizer.document).encode(text).ids
    config = json.loads((token_upload / "tokenizer_config.json").read_text())
    assert library.token_to_id(config["eos_token"]) == tokenizer.end


NO_STEPS = {"type": "Sequence", "pretokenizers": []}
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["model"].pop("type"),  # as in GPT-2's own file
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
        (lambda d: d["model"].update(type="Unigram"), "of characters: it is of the type Unigram"),
        (lambda d: d.update(added_tokens=[]), "no token for the end of a text"),
        (lambda d: d.pop("model"), "or of characters: model is missing"),
        (lambda d: d.update(added_tokens=None), "added_tokens is null, and not a list"),
        (lambda d: d.pop("pre_tokenizer"), "json: has no pre_tokenizer"),
        (lambda d: d["pre_tokenizer"].update(pretokenizers=None), "pretokenizers is null, and not"),
        (lambda d: d["model"].update(vocab={"a": "b"}), "the id 'b' is no whole number"),
        (lambda d: d.update(normalizer=PRECOMPILED), "has a normalizer, Precompiled"),
        (lambda d: d.update(pre_tokenizer=split(r"(a+)+$")), "splits text in an unknown way"),
        (lambda d: d.update(pre_tokenizer=NO_STEPS), "has a pre_tokenizer without steps"),
        (lambda d: d["model"].update(unk_token="<unk>"), "has the unk_token '<unk>', which its"),
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
    letters = Tokenizer(character_tokenizer("abc"))
    with pytest.raises(InputError, match=r"has never seen: .*; replace them"):
        encode_text(text_file, letters, tmp_path)


def test_a_tokenizer_that_loses_text_is_refused(document):
    vocabulary = document["model"]["vocab"]
    vocabulary["unused"] = vocabulary.pop("z")
    document["model"]["merges"] = []
    with pytest.raises(InputError, match=r"'zy dog\.\\n' decodes to 'y dog\.\\n'"):
        encoder_of(document).encode([FOX])
