"""What a text is worth without a model: compressors, overlap, and n-grams."""

from __future__ import annotations

import itertools
import lzma
import math
import random
import re
import textwrap
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_texts import plain

from sm_nanogpt.launcher.judge import anchors

FEW = st.text("ab", max_size=40).map(str.encode)


@given(FEW, st.lists(FEW, max_size=4), st.integers(1, 9))
def test_the_longest_run_is_exact(training, texts, chunk):
    expected = 0
    for text in texts:
        for begin, end in itertools.combinations(range(len(text) + 1), 2):
            if text[begin:end] in training:
                expected = max(expected, end - begin)

    with patch.object(anchors, "CHUNK_BYTES", chunk):
        longest = anchors.longest_copy(plain(training), [text.decode() for text in texts])
    assert longest == expected


@given(FEW, st.lists(FEW.filter(bool), min_size=1, max_size=4), st.integers(1, 9))
def test_overlap_is_exact(training, texts, chunk):
    n_covered = 0
    for text in texts:
        covered = set[int]()
        for begin in range(len(text) - 4):
            if text[begin : begin + 5] in training:
                covered.update(range(begin, begin + 5))
        n_covered += len(covered)

    with patch.object(anchors, "CHUNK_BYTES", chunk), patch.object(anchors, "RUN_BYTES", 5):
        overlap = anchors.shared_fraction(plain(training), list(map(plain, texts)))
    assert overlap == n_covered / sum(map(len, texts))


@given(st.text("a \n\t\r", max_size=40).map(str.encode), st.integers(1, 9))
def test_white_space_is_one_space(content, chunk):
    with patch.object(anchors, "CHUNK_BYTES", chunk):
        text, is_first = anchors.with_one_space(plain(content))
    assert bytes(text.tolist()) == re.sub(rb"[ \t\n\r]+", b" ", content)
    assert int(is_first.sum()) == len(text)


def test_overlap_and_runs_see_through_line_breaks(text):
    content = text.encode()[:100_000]
    lines = textwrap.fill(content[40_000:50_000].decode(), width=40)
    copied = lines.replace("\n", "  \r\n").encode()
    new = bytes(random.Random(1).choices(b"etaoinshrdlu", k=len(copied)))

    training = plain(content)
    assert anchors.shared_fraction(training, [plain(copied)]) == pytest.approx(1, abs=0.01)
    assert anchors.shared_fraction(training, [plain(copied + new)]) == pytest.approx(0.5, abs=0.01)
    assert anchors.longest_copy(training, [copied.decode()]) > 5000


def test_overlap_reads_the_training_text_once():
    with patch.object(anchors, "contains_hashes", wraps=anchors.contains_hashes) as read:
        anchors.shared_fraction(plain("a" * 100), [plain("b" * n) for n in range(1, 99)])
    assert read.call_count == 1


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_planted_overlap_is_measured(share, text):
    training = text.encode()[:200_000]
    chance = random.Random(1)
    passages = [bytes(chance.choices(b"etaoin shrdlu", k=400)) for _ in range(100)]
    for n in range(round(100 * share)):
        begin = chance.randrange(len(training) - 400)
        passages[n] = training[begin : begin + 400]
    chance.shuffle(passages)

    overlap = anchors.shared_fraction(plain(training), [plain(b"".join(passages))])
    tolerance = 0.005 if share else 0.0005
    assert overlap == pytest.approx(share, abs=tolerance)


def plain_ngram(training: bytes, content: bytes) -> float:
    """Bits per byte of an n-gram model with Witten-Bell smoothing, without a trick."""
    training = b"\n" * 4 + training
    content = b"\n" * 4 + content

    followers: dict[bytes, Counter[int]] = {}
    for end in range(4, len(training)):
        for n in range(1, 6):
            context = training[end - n + 1 : end]
            followers.setdefault(context, Counter())[training[end]] += 1

    bits = 0.0
    for end in range(4, len(content)):
        p = 1 / 256
        for n in range(1, 6):
            context = content[end - n + 1 : end]
            if context in followers:
                counts = followers[context]
                p = (counts[content[end]] + len(counts) * p) / (counts.total() + len(counts))
        bits -= math.log2(p)
    return bits / (len(content) - 4)


@given(st.binary(min_size=1, max_size=60), FEW.filter(bool), FEW)
def test_the_ngram_model_is_that_of_plain_counts(training, content, suffix):
    bits = anchors.ngram_bits_per_byte(plain(training + suffix), plain(content))
    assert bits == pytest.approx(plain_ngram(training + suffix, content), abs=1e-9)


def test_the_ngram_model_learns_of_all_parts_of_a_long_text():
    """Blocks at equal distances, for LEARNED_BYTES in all."""
    blocks = [bytes([97 + n]) * 1000 for n in range(4)]
    with patch.object(anchors, "BLOCK_BYTES", 1000), patch.object(anchors, "LEARNED_BYTES", 2000):
        bits = anchors.ngram_bits_per_byte(plain(b"".join(blocks)), plain(b"ac"))
    assert bits == pytest.approx(plain_ngram(blocks[0] + blocks[2], b"ac"), abs=1e-9)


def test_xz_packs_as_the_program_does():
    content = random.Random(1).randbytes(3000) * 2
    assert anchors.xz_bits_per_byte(content) == pytest.approx(
        8 * len(lzma.compress(content)) / 6000, abs=0.1
    )
    assert anchors.xz_bits_per_byte(content) < 4.1
