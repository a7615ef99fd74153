"""The fast encoder, which has the ids of the library."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_texts import BYTE_LEVEL, GPT_2, LLAMA_3, encoder_of, split

KINDS = "ab '\na'sdmtlvre\u0301\u093f   \n\t\r\x0b\x0c1a123a½²Ⅷ٣ é漢字🙂 \n_-!? 1\n\x1c\x85"


@pytest.fixture(scope="module", params=[None, GPT_2, LLAMA_3])
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


def test_every_character_has_the_librarys_ids(fast, pytestconfig):
    """Every third of them, so that no kind is left out; every ninth with --quick."""
    apart = 9 if pytestconfig.getoption("--quick") else 3
    codes = (code for code in range(1, 0x20000, apart) if not 0xD800 <= code < 0xE000)
    lines = [f"a{c}b {c}{c}1\n{c}" for c in map(chr, codes)]
    # Few long pieces take a fifth of the time. A piece's end matters to spaces alone.
    pieces = ["".join(lines[i : i + 64]) for i in range(0, len(lines), 64)]
    pieces += [line for line in lines if line[-1].isspace()]
    assert fast.fast.encode_ordinary_batch(pieces) == fast.encode_by_library(pieces)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["model"]["merges"].reverse(),
        lambda d: d["model"]["merges"].pop(),  # its token stays
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
