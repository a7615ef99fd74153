"""Conversations as ChatML, and the answers of a model.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}

becomes `<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nHi.<|im_end|>\\n`, as
`apply_chat_template` of transformers writes it. What is in brackets is one token each. A run learns
what the assistant says, with the token that ends it; the ids of all else are stored as ~id.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from entry_point.conversations import END_OF_TURN, TURN
from entry_point.data import Tokenizer
from entry_point.model import GPT
from launcher.errors import InputError
from launcher.models.encoder import Encoder
from launcher.models.sample import stream_samples

SPEAKS = "assistant\n"  # before what the assistant says
ROOM = 4  # an answer has at least 1 / ROOM of the context, if it may be so long


@dataclass(frozen=True)
class Message:
    role: str  # system, user or assistant
    content: str


class ChatEncoder:
    """Turns into ids, int32, of which those that are not learned are stored as ~id.

    Raises:
        InputError: the tokenizer has no tokens for turns.
    """

    def __init__(self, tokenizer: Tokenizer, encoder: Encoder) -> None:
        self.tokenizer, self.encoder = tokenizer, encoder
        try:
            self.begin, self.end = tokenizer.special[TURN], tokenizer.special[END_OF_TURN]
        except KeyError as error:
            raise InputError(
                f"the tokenizer has no token {error}, which conversations need; use"
                " --tokenizer bpe, a model that was trained on such tokens, or one of Qwen's"
            ) from None
        (line_break,) = encoder.encode(["\n"])
        self.line_break = array("i", line_break)

    def encode(self, turns: Sequence[str]) -> Iterator[bytes]:
        """The ids of each turn."""
        for turn, content in zip(turns, self.encoder.encode(turns), strict=True):
            said, learned = array("i", content), turn.startswith(SPEAKS)
            first, left = 0, len(SPEAKS) if learned else 0
            while left > 0:  # a token that begins before the answer is not part of it
                left -= len(self.tokenizer.word(said[first]))
                first += 1
            if not learned:
                first = len(said)
            end = self.end if learned else ~self.end
            head = (~id for id in said[:first])
            tail = (~id for id in self.line_break)
            yield array("i", [~self.begin, *head, *said[first:], end, *tail]).tobytes()


class Chat:
    """A model that answers. Raises InputError if it has not learned from conversations."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        if not tokenizer.chats:
            raise InputError(
                "the model has not learned from conversations; `upload-data CHATS.jsonl --tokenizer"
                " JOB-ID` and `launch --init-from JOB-ID` teach it"
            )
        self.model, self.tokenizer = model, tokenizer
        encoder = Encoder(json.dumps(tokenizer.document), tokenizer.words, "i")
        self.encoder = ChatEncoder(tokenizer, encoder)
        (self.speaks,) = encoder.encode([SPEAKS])

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids after which the assistant answers."""
        return self.fitting(messages, 0, 1 << 62)[1]

    def fitting(
        self, messages: Sequence[Message], max_new_tokens: int, size: int | None = None
    ) -> tuple[int, list[int]]:
        """How many of the oldest messages, after the system's, must be left out so that the rest
        leaves room for an answer in a context of `size` tokens, and the ids of the rest.

        Raises:
            InputError: the system's and the last one alone are too long; or are not UTF-8 text.
        """
        size = size or self.model.config.block_size
        room = size - min(max_new_tokens, size // ROOM)
        try:
            turns = [*self.encoder.encode([f"{m.role}\n{m.content}" for m in messages])]
        except UnicodeEncodeError:
            raise InputError("the message is not UTF-8 text") from None
        begin = [self.encoder.begin, *array("i", self.speaks)]
        first = int(bool(messages) and messages[0].role == "system")
        left = len(begin) + sum(len(turn) // 4 for turn in turns)
        for n in range(first, max(len(messages), first + 1)):
            if left <= room and (n == first or messages[n].role == "user"):
                kept = array("i", b"".join([*turns[:first], *turns[n:]]))
                return n - first, [id if id >= 0 else ~id for id in kept] + begin
            left -= sum(len(turn) // 4 for turn in turns[n : n + 1])
        what = "message, with what instructs the model," if first else "message"
        raise InputError(f"the {what} is too long for a context of {size} tokens")

    def room(self, ids: Sequence[int]) -> int:
        """The longest answer to ids: beyond it, the question would slide out of the context."""
        return max(1, self.model.config.block_size - len(ids))

    def answer(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
    ) -> Iterator[str]:
        """Yield the answer to fitting ids in pieces; all else is as in stream_samples.

        It ends where the context does.
        """
        most = min(max_new_tokens, self.room(ids))
        columns = stream_samples(
            self.model, self.tokenizer, ids, most, 1, temperature, top_k, top_p, seed
        )
        return (piece for (piece,) in columns)
