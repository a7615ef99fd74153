"""Generate text with a fetched model."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

import torch

from entry_point.model import GPT
from entry_point.text import Tokenizer
from launcher.errors import InputError, ServiceError, unknown_characters
from launcher.models import engine
from launcher.models.chat import Chat, Message
from launcher.models.encoder import published_tokenizer
from launcher.models.load import is_edited
from launcher.values import is_utf8


def stream_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | None = None,
    max_new_tokens: int = 500,
    num_samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1337,
    watch: engine.Watch | None = None,
) -> Iterator[list[str]]:
    """Yield the next piece of text of every sample, token by token.

    A piece holds whole characters, so it is empty where a token ends inside of one. The prompt, a
    text or ids (default: the start of a document, or a newline), is not repeated. A sample ends
    with its document or turn, or after max_new_tokens. The same arguments give the same text.
    temperature 0 takes the most likely token; top_k 0 and top_p 1 allow all. watch is called with
    the logits, float32 [num_samples, V], and the ids, int64 [num_samples], of each step, before its
    pieces are yielded.

    Raises:
        InputError: the prompt is empty or has characters that are not in the vocabulary, or a
            number is out of range.
    """
    for name, value, good, allowed in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("num_samples", num_samples, 1 <= num_samples <= 10_000, "from 1 to 10,000"),
        ("temperature", temperature, 0 <= temperature < float("inf"), "a number, at least 0"),
        ("top_k", top_k, top_k >= 0, "at least 0 (0: all)"),
        ("top_p", top_p, 0 < top_p <= 1, "over 0 and at most 1"),
        ("seed", seed, 0 <= seed < 1 << 63, "from 0 to 2**63 - 1"),
    ):
        if not good:
            raise InputError(f"must be {allowed}", field=name, value=value)
    if prompt is None:
        prompt = [tokenizer.start]
    if isinstance(prompt, str):
        prompt = encode(tokenizer, prompt, model.config.block_size)
    ids = torch.tensor([[*prompt]])
    steps = engine.generate(
        model,
        ids.expand(num_samples, -1),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        watch=watch,
        plainly=is_edited(model),
    )
    return pieces(steps, tokenizer, num_samples)


def encode(tokenizer: Tokenizer, prompt: str, size: int) -> list[int]:
    """The ids of a prompt; of one that is longer than a context of `size`, those of its end."""
    if not prompt:
        raise InputError("the prompt is empty; leave it out to start with a new text")
    if not is_utf8(prompt):
        raise InputError("the prompt is not UTF-8 text")
    check_known(tokenizer, prompt, "the prompt")
    end = prompt[-size * max(map(len, tokenizer.words)) :]  # at least `size` tokens
    library = published_tokenizer(tokenizer.document)
    ids: list[int] = library.encode(end, add_special_tokens=False).ids
    return ids[-size:]


def check_known(tokenizer: Tokenizer, text: str, named: str) -> None:
    """Raise InputError if a model of characters has no ids for some of a text's."""
    unknown = unknown_in(tokenizer, text)
    if unknown:
        raise unknown_characters(named, unknown)


def unknown_in(tokenizer: Tokenizer, text: str) -> set[str]:
    """The characters of a text that a model of characters has no ids for."""
    if tokenizer.unit != "characters":
        return set()
    return {*text} - {word.decode() for word in tokenizer.words}


def answered(
    model: GPT, tokenizer: Tokenizer, asked: str | Sequence[Message] | None, max_new_tokens: int
) -> tuple[str | list[int] | None, int]:
    """What a model continues to answer messages, or a prompt, and in how many tokens.

    To a model of conversations a prompt is a message; any other continues it. Raises InputError if
    the messages do not fit, or the model has not learned from conversations.
    """
    if asked is None or (isinstance(asked, str) and not tokenizer.chats):
        return asked, max_new_tokens
    messages = [Message("user", asked)] if isinstance(asked, str) else asked
    _, ids, most = Chat(model, tokenizer).fitting(messages, max_new_tokens)
    return ids, most


def pieces(steps: Iterator[torch.Tensor], tokenizer: Tokenizer, count: int) -> Iterator[list[str]]:
    """The text of each step's ids. Raises ServiceError if an edited script fails."""
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(count)]
    ended = [False] * count
    try:
        for step in steps:
            ids = step.tolist()
            ended = [was or id in tokenizer.ends for was, id in zip(ended, ids, strict=True)]
            yield [
                decoder.decode(b"" if end else tokenizer.word(id), final=end)
                for decoder, id, end in zip(decoders, ids, ended, strict=True)
            ]
            if all(ended):
                return
        yield [decoder.decode(b"", final=True) for decoder in decoders]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ServiceError(f"the script that trained the model fails to sample: {why}") from error
