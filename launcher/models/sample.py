"""Sample text from a model."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.errors import InputError, ServiceError, unknown_characters_error
from sm_nanogpt.launcher.models import engine
from sm_nanogpt.launcher.models.chat import Chat, Message
from sm_nanogpt.launcher.models.encoder import published_tokenizer
from sm_nanogpt.launcher.models.load import is_edited
from sm_nanogpt.launcher.values import is_utf8


def check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    num_samples: int = 1,
) -> None:
    """Raise InputError if an argument of stream_samples is out of range."""
    for name, value, is_valid, valid_values in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("num_samples", num_samples, 1 <= num_samples <= 10_000, "from 1 to 10,000"),
        ("temperature", temperature, 0 <= temperature < float("inf"), "a number, at least 0"),
        ("top_k", top_k, top_k >= 0, "at least 0 (0: all)"),
        ("top_p", top_p, 0 < top_p <= 1, "over 0 and at most 1"),
        ("seed", seed, 0 <= seed < 1 << 63, "from 0 to 2**63 - 1"),
    ):
        if not is_valid:
            raise InputError(f"must be {valid_values}", field=name, value=value)


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
    """Sample texts; yield, token by token, a list with the next piece of each sample.

    A piece has whole characters, so it is empty if a token ends inside of a character. The prompt
    is a text or ids (default: the start of a document, or a newline), and is not repeated. A sample
    ends with its document or turn, or after max_new_tokens. The same arguments give the same text.
    temperature 0 takes the most likely token; top_k 0 and top_p 1 allow all tokens. watch is called
    with the logits, float32 [num_samples, V], and the ids, int64 [num_samples], of each step,
    before its pieces are yielded.

    Raises:
        InputError: the prompt is empty or has characters that are not in the vocabulary, or a
            number is out of range.
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p, seed, num_samples)
    if prompt is None:
        prompt = [tokenizer.start]
    if isinstance(prompt, str):
        prompt = encode_prompt(tokenizer, prompt, model.config.block_size)
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
        use_cache=not is_edited(model),
    )
    return decode_steps(steps, tokenizer, num_samples)


def encode_prompt(tokenizer: Tokenizer, prompt: str, max_ids: int) -> list[int]:
    """Encode a prompt, and return its last max_ids ids.

    Raises InputError if it is empty, not UTF-8, or has characters that the vocabulary lacks.
    """
    if not prompt:
        raise InputError("the prompt is empty; leave it out to start with a new text")
    if not is_utf8(prompt):
        raise InputError("the prompt is not UTF-8 text")
    check_known(tokenizer, prompt, title="the prompt")
    longest_token = max(len(word) for word in tokenizer.words)
    end = prompt[-max_ids * longest_token :]  # max_ids tokens or more, unless the prompt is shorter
    library = published_tokenizer(tokenizer.document)
    ids: list[int] = library.encode(end, add_special_tokens=False).ids
    return ids[-max_ids:]


def check_known(tokenizer: Tokenizer, text: str, title: str) -> None:
    """Raise InputError if characters of a text have no ids. title: of the text, in the error."""
    unknown = unknown_characters(tokenizer, text)
    if unknown:
        raise unknown_characters_error(title, unknown)


def unknown_characters(tokenizer: Tokenizer, text: str) -> set[str]:
    """Return the characters of a text that have no ids; none if the vocabulary is one of tokens."""
    if tokenizer.unit != "characters":
        return set()
    return {*text} - {word.decode() for word in tokenizer.words}


def stream_answers(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message] | None = None,
    max_new_tokens: int = 500,
    **sampling: Any,
) -> Iterator[list[str]]:
    """Sample answers to a text or to messages; yield their pieces as stream_samples does.

    A model of conversations takes a text as a message; any other model continues the text. Raises
    InputError as stream_samples does, if the messages do not fit, or if the model has not learned
    from conversations.
    """
    if isinstance(prompt, str) and tokenizer.chats:
        prompt = [Message("user", prompt)]
    if prompt is None or isinstance(prompt, str):
        return stream_samples(model, tokenizer, prompt, max_new_tokens, **sampling)
    chat_prompt = Chat(model, tokenizer).fit(prompt, max_new_tokens)
    ids = chat_prompt.ids
    return stream_samples(model, tokenizer, ids, chat_prompt.max_new_tokens, **sampling)


def decode_steps(
    steps: Iterator[torch.Tensor], tokenizer: Tokenizer, num_samples: int
) -> Iterator[list[str]]:
    """Decode the ids of each step, int64 [num_samples]; yield the next piece of each sample.

    Raises ServiceError if an edited folder fails to compute a step.
    """
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_samples)]
    ended = set[int]()  # the indices of samples
    try:
        for step in steps:
            pieces = []
            for sample, id in enumerate(step.tolist()):
                if id in tokenizer.ends:
                    ended.add(sample)
                has_ended = sample in ended
                content = b"" if has_ended else tokenizer.word(id)
                pieces.append(decoders[sample].decode(content, final=has_ended))
            yield pieces
            if len(ended) == num_samples:
                return
        yield [decoder.decode(b"", final=True) for decoder in decoders]
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        failure = "the script that trained the model fails to sample"
        raise ServiceError(f"{failure}: {problem}") from error
