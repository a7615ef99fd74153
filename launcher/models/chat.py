"""Conversations as ChatML, and the answers of a model.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}

becomes `<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nHi.<|im_end|>\\n`, as
`apply_chat_template` of transformers writes it. What is in brackets is one token each. A run learns
what the assistant says, with the token that ends it; the ids of all else are stored as ~id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from entry_point.conversations import END_OF_TURN, TURN
from entry_point.model import GPT
from entry_point.text import Tokenizer
from launcher.errors import InputError
from launcher.models.encoder import SPEAKS, Encoder
from launcher.values import is_utf8

ROOM = 4  # an answer has at least 1 / ROOM of the context, unless its limit is lower


@dataclass(frozen=True)
class Message:
    role: str  # system, user or assistant
    content: str


ROLES = ("system", "user", "assistant")


def read_messages(messages: Sequence[Mapping[str, str]]) -> list[Message]:
    """The messages of a conversation, each with a role and its content. Raises InputError."""
    if not messages:
        raise InputError("the conversation has no message")
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, Mapping) else {}
        if fields.get("role") not in ROLES or not isinstance(fields.get("content"), str):
            needs = f"needs `role` ({', '.join(ROLES)}) and `content`, a text"
            raise InputError(f"message {number} of the conversation {needs}")
    return [Message(message["role"], message["content"]) for message in messages]


class ChatEncoder:
    """Encodes turns as int32 ids. Ids that the loss leaves out are stored as ~id.

    Raises InputError if the tokenizer has no tokens for turns.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        special = self.tokenizer.special
        try:
            self.begin, self.end = special[TURN], special[END_OF_TURN]
        except KeyError as error:
            problem = f"the tokenizer has no token {error}, which conversations need"
            raise InputError(problem, "no-turns") from None
        (line_break,) = encoder.encode(["\n"])
        self.line_break = array("i", line_break)

    def encode(self, turns: Sequence[str]) -> Iterator[bytes]:
        """Yield the ids of each turn, which is the role, a line break, and the content."""
        for turn, content in zip(turns, self.encoder.encode(turns), strict=True):
            content_ids = array("i", content)
            is_learned = turn.startswith(SPEAKS)
            n_masked = self.count_prefix(content_ids) if is_learned else len(content_ids)

            ids = array("i", [~self.begin])
            ids.extend(~id for id in content_ids[:n_masked])
            ids.extend(content_ids[n_masked:])
            ids.append(self.end if is_learned else ~self.end)
            ids.extend(~id for id in self.line_break)
            yield ids.tobytes()

    def count_prefix(self, ids: Sequence[int]) -> int:
        """The number of ids that hold any byte of SPEAKS, with which the turn begins.

        A token that begins in it and ends in the answer is not learned either.
        """
        n_bytes, n_ids = 0, 0
        while n_bytes < len(SPEAKS):
            n_bytes += len(self.tokenizer.word(ids[n_ids]))
            n_ids += 1
        return n_ids


class TooLong(InputError):
    """A message does not fit into the context."""


class Chat:
    """A model that answers. Raises InputError if it has not learned from conversations."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        if not tokenizer.chats:
            raise InputError("the model has not learned from conversations", "teach-to-chat")
        self.context_size = model.config.block_size
        encoder = Encoder(tokenizer, "i")
        self.encoder = ChatEncoder(encoder)
        (speaks,) = encoder.encode([SPEAKS])
        self.answer_start = [self.encoder.begin, *array("i", speaks)]

    def fitting(
        self, messages: Sequence[Message], max_new_tokens: int
    ) -> tuple[int, list[int], int]:
        """What the model sees of a conversation, and how long it may answer.

        The oldest messages after the system's are left out until the rest leaves room for an
        answer. The answer ends where the context does: beyond it, the question would slide out.

        Returns how many messages are left out, the ids of the rest, and the tokens of an answer.
        Raises TooLong if the system's and the last message alone do not fit, and InputError if a
        message is not UTF-8 text.
        """
        turns = self.encode_messages(messages)
        has_instruction = bool(messages) and messages[0].role == "system"
        instruction = turns[:1] if has_instruction else []
        n_instruction = sum(len(turn) for turn in instruction)
        answer_room = min(max_new_tokens, self.context_size // ROOM)
        room = self.context_size - answer_room - len(self.answer_start) - n_instruction
        if room < 0 and has_instruction:
            raise TooLong(f"the instruction {self.too_long}")
        first = first_turn_that_fits(messages, turns, len(instruction), room)
        if first is None:
            part = f", of which the instruction takes {n_instruction}" if has_instruction else ""
            raise TooLong(f"the message {self.too_long}{part}")

        ids: list[int] = []
        for turn in [*instruction, *turns[first:]]:
            ids.extend(id if id >= 0 else ~id for id in turn)
        ids += self.answer_start
        n_answer = min(max_new_tokens, max(1, self.context_size - len(ids)))
        return first - len(instruction), ids, n_answer

    @property
    def too_long(self) -> str:
        return f"is too long for a context of {self.context_size} tokens"

    def encode_messages(self, messages: Sequence[Message]) -> list[array[int]]:
        """The ids of each message, those that the loss leaves out as ~id. Raises InputError."""
        texts = [f"{message.role}\n{message.content}" for message in messages]
        if not all(map(is_utf8, texts)):
            raise InputError("the message is not UTF-8 text")
        return [array("i", turn) for turn in self.encoder.encode(texts)]


def first_turn_that_fits(
    messages: Sequence[Message], turns: Sequence[array[int]], start: int, room: int
) -> int | None:
    """The first turn from which all up to the last fit into `room` tokens; None if none does.

    Turns before `start` do not count. A conversation is cut before a message of the user.
    """
    n_turns = len(turns)
    if n_turns == start:
        return start if room >= 0 else None
    n_tokens = sum(len(turn) for turn in turns[start:])
    for first in range(start, n_turns):
        may_begin = first == start or messages[first].role == "user"
        if may_begin and n_tokens <= room:
            return first
        n_tokens -= len(turns[first])
    return None
