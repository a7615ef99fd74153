"""Texts that tokenizers are known to split differently, and their ids by the library."""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Sequence
from functools import cache

from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.models.encoder import GPT2_PATTERN, QWEN35_PATTERN, published_tokenizer
from sm_nanogpt.launcher.text.tokenizer import END_OF_TEXT

STRINGS = [
    "",
    "Once upon a time",
    "  two  spaces,   three",
    "a line\nand another\r\n\r\n  indented\n",
    "tabs\t\tand no-break\xa0spaces\u2003and\u3000wide ones",
    "next line\x85and a byte order mark\ufeffinside",
    "\ufeffat the beginning",
    "I'm, YOU'LL, they've; don'T 'S",
    "I’m, YOU’LL, they’ve; don’T ’S",
    "1234567 3.14 2026-11-29 ①½ 1e-9 0x7F 1,000,000",
    "٣٤٥ १२३ ๔๕ 〇一二 Ⅷ ² ¾ 𝟘𝟙",
    "naïve café, cafe\u0301, A\u030a, \u1e9b\u0323, \u212b, ﬁ",
    "हिन्दी में कि़ताब ไทย ภาษา العَرَبِيَّة עִבְרִית தமிழ் ខ្មែរ",
    "漢字とかな、한국어와 한글 漢字とカナ｡",
    "🙂🚀👩‍🚀👨‍👩‍👧‍👦👍🏽🇪🇺1️⃣☕️🏴\U000e0067\U000e0062\U000e007f",
    "def f(x):\n    return {x: [1, 2]}  # !?...",
    "https://example.org/a?b=c&d=%20#e, me@example.org, C:\\dir\\file",
    "nul\x00inside\x00\x00, bell\x07, escape\x1b[31m, delete\x7f",
    "<|endoftext|>",
    "a<|endoftext|>b <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|<|im_end|>|> <s></s> [INST] <unk> <pad> <|fim_prefix|>",
    "trailing space ",
    "-" * 500,
    " " * 500,
    "\n" * 500,
    "\r\n" * 250,
    "9" * 500,
    "漢" * 500,
    "🙂" * 500,
    "e\u0301" * 500,
    "a" * 2000,
    "aB" * 1000,
    "word " * 500,
]
SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e\u2028\u2029\u202f\u205f\u3000\ufeff"
SPACES += "".join(map(chr, range(0x2000, 0x2010)))
# Contractions and other endings. An expression that ignores case takes the long s for an S.
ENDINGS = ("s", "t", "re", "ve", "m", "ll", "d", "\u017f", "\u017ft", "x", "l", "r")
COMMON = "aZ's1 \n.-"  # beside which the characters of each category stand


@cache
def hard_strings() -> tuple[str, ...]:
    """Over 1,500 texts of all categories of Unicode, of contractions, line ends, and spaces."""
    generator = random.Random(7)
    strings = list(STRINGS)
    categories = characters_by_category()
    for characters in categories.values():
        for _ in range(20):
            alphabet = generator.sample(characters, min(6, len(characters))) + list(COMMON)
            length = generator.randint(1, 30)
            strings.append("".join(generator.choices(alphabet, k=length)))
    everything = list(itertools.chain.from_iterable(categories.values()))
    strings += ["".join(generator.sample(everything, 30)) for _ in range(100)]
    for length in (1, 2, 3):
        strings += map("".join, itertools.product("\r\n a1", repeat=length))
    for space in SPACES:
        around = ("{}", "{}{}", "a{}b", "a{}{}b", "a{} b", "a {}b", "a\n{}b", "1{}\n", "{}.{}!")
        strings += [form.format(space, space) for form in around]
    for ending in ENDINGS:
        for written in (ending, ending.upper(), ending.capitalize()):
            for before, after in itertools.product(("a", "1", " ", ""), ("", "y", " b")):
                strings.append(f"{before}'{written}{after}")
    return tuple(strings)


def characters_by_category() -> dict[str, list[str]]:
    """The characters of each category of Unicode that all its versions since 3.2 agree on, so that
    Python and a browser of another year do; surrogates are in no text."""
    categories: dict[str, list[str]] = {}
    for code in range(0x110000):
        character = chr(code)
        category = unicodedata.category(character)
        is_stable = category == unicodedata.ucd_3_2_0.category(character)
        if is_stable and category not in ("Cs", "Cn"):
            categories.setdefault(category, []).append(character)
    return categories


EXPRESSIONS = {"GPT-2": GPT2_PATTERN, "Qwen3.5": QWEN35_PATTERN}


def split_by(tokenizer: Tokenizer, pattern: str, normalizer: str | None = None) -> Tokenizer:
    """The tokenizer with another expression that splits a text."""
    by_pattern = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    by_bytes = tokenizer.document["pre_tokenizer"]["pretokenizers"][-1]
    document = {
        **tokenizer.document,
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [by_pattern, by_bytes]},
    }
    return Tokenizer(document, END_OF_TEXT)


def library_ids(tokenizer: Tokenizer, strings: Sequence[str]) -> list[list[int]]:
    """The ids of texts by the library that train.py's text was encoded with."""
    library = published_tokenizer(tokenizer.document)
    encodings = library.encode_batch(strings, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def unlike_library(strings: Sequence[str], ids: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The texts whose ids are not those of the library."""
    expected_ids = library_ids(tokenizer, strings)
    differing = []
    for string, page_ids, expected in zip(strings, ids, expected_ids, strict=True):
        if page_ids != expected:
            differing.append(string)
    return differing


def library_pieces(tokenizer: Tokenizer, strings: Sequence[str]) -> list[list[str]]:
    """The pieces of each text whose bytes the library merges."""
    splitter = published_tokenizer(tokenizer.document).pre_tokenizer
    pieces = []
    for text in strings:
        spans = [span for _, span in splitter.pre_tokenize_str(text)]
        pieces.append([text[start:end] for start, end in spans])
    return pieces
