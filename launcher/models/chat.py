"""Conversations as ChatML, and the answers of a model.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}

becomes `<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nHi.<|im_end|>\\n`, as
`apply_chat_template` of transformers writes it. Each text in brackets is one token. A run learns
the answers of the assistant, each with the token that ends it. All other ids are stored as ~id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sm_nanogpt.entry_point.conversations import END_OF_TURN, TURN
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.models.encoder import ASSISTANT_PREFIX, Encoder
from sm_nanogpt.launcher.values import is_utf8

ID_TYPE_CODE = "i"  # of array: int32, as ids that the loss leaves out are stored as ~id, below 0
# A question leaves 1 / ANSWER_SHARE of the context for its answer, or less if an answer has a lower
# limit.
ANSWER_SHARE = 4


@dataclass(frozen=True)
class Message:
    role: str  # system, user or assistant
    content: str


ROLES = ("system", "user", "assistant")


def read_messages(messages: Sequence[Mapping[str, str]]) -> list[Message]:
    """Return the messages of a conversation.

    Raises InputError if there is no message, or one has no role of ROLES or no content.
    """
    if not messages:
        raise InputError("the conversation has no message")
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, Mapping) else {}
        if fields.get("role") not in ROLES or not isinstance(fields.get("content"), str):
            needs = f"needs `role` ({', '.join(ROLES)}) and `content`, a text"
            raise InputError(f"message {number} of the conversation {needs}")
    return [Message(message["role"], message["content"]) for message in messages]


class ChatEncoder:
    """Encodes turns as ids of ID_TYPE_CODE. Ids that the loss leaves out are stored as ~id.

    Raises InputError if the tokenizer has no tokens for turns.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.tokenizer = encoder.tokenizer
        try:
            self.begin_id = self.tokenizer.special[TURN]
            self.end_id = self.tokenizer.special[END_OF_TURN]
        except KeyError as error:
            problem = f"the tokenizer has no token {error}, which conversations need"
            raise InputError(problem, code="no-turns") from None
        (line_break,) = encoder.encode(["\n"])
        self.line_break_ids = array(ID_TYPE_CODE, line_break)

    def encode(self, turns: Sequence[str]) -> Iterator[bytes]:
        """Yield the ids of each turn, as bytes. A turn is a role, a line break, and a content."""
        for turn, id_bytes in zip(turns, self.encoder.encode(turns), strict=True):
            turn_ids = array(ID_TYPE_CODE, id_bytes)
            n_masked = len(turn_ids)
            end_id = ~self.end_id
            if turn.startswith(ASSISTANT_PREFIX):
                n_masked = self.count_prefix(turn_ids)
                end_id = self.end_id

            ids = array(ID_TYPE_CODE, [~self.begin_id])
            ids.extend(~id for id in turn_ids[:n_masked])
            ids.extend(turn_ids[n_masked:])
            ids.append(end_id)
            ids.extend(~id for id in self.line_break_ids)
            yield ids.tobytes()

    def count_prefix(self, ids: Sequence[int]) -> int:
        """Count the first ids of an assistant's turn that hold a byte of ASSISTANT_PREFIX.

        A token that begins in the prefix and ends in the answer is not learned either.
        """
        n_bytes = 0
        n_ids = 0
        while n_bytes < len(ASSISTANT_PREFIX):
            n_bytes += len(self.tokenizer.word(ids[n_ids]))
            n_ids += 1
        return n_ids


class TooLong(InputError):
    """A message does not fit into the context."""


@dataclass(frozen=True)
class ChatPrompt:
    """The ids of a conversation that a model continues, and the limit of its answer."""

    ids: list[int]
    max_new_tokens: int  # of the answer
    n_dropped: int  # the number of messages that are left out


class Chat:
    """A model that answers messages. Raises InputError if it has not learned from conversations."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        if not tokenizer.chats:
            raise InputError("the model has not learned from conversations", code="teach-to-chat")
        self.context_size = model.config.block_size
        encoder = Encoder(tokenizer, ID_TYPE_CODE)
        self.encoder = ChatEncoder(encoder)
        (prefix,) = encoder.encode([ASSISTANT_PREFIX])
        self.answer_start = [self.encoder.begin_id, *array(ID_TYPE_CODE, prefix)]

    def fit(self, messages: Sequence[Message], max_new_tokens: int) -> ChatPrompt:
        """Fit a conversation into the context, with room for an answer.

        The oldest messages, after that of the system, are left out. The answer ends at the end of
        the context: beyond it, the question would slide out. Raises TooLong if the message of the
        system and the last message alone do not fit, and InputError if a message is not UTF-8 text.
        """
        turns = self.encode_messages(messages)
        n_instructions = 0  # 1 if the first message is the system's
        instruction_tokens = 0
        if messages and messages[0].role == "system":
            n_instructions = 1
            instruction_tokens = len(turns[0])

        answer_room = min(max_new_tokens, self.context_size // ANSWER_SHARE)
        room = self.context_size - answer_room - len(self.answer_start) - instruction_tokens
        too_long = f"is too long for a context of {self.context_size} tokens"
        if room < 0 and n_instructions:
            raise TooLong(f"the instruction {too_long}")
        first = first_turn_that_fits(messages, turns, n_instructions, room)
        if first is None:
            if n_instructions:
                too_long += f", of which the instruction takes {instruction_tokens}"
            raise TooLong(f"the message {too_long}")

        ids: list[int] = []
        for turn in turns[:n_instructions] + turns[first:]:
            ids += turn
        ids += self.answer_start
        free = max(1, self.context_size - len(ids))
        return ChatPrompt(ids, min(max_new_tokens, free), first - n_instructions)

    def encode_messages(self, messages: Sequence[Message]) -> list[list[int]]:
        """Return the ids of each message. Raises InputError if one is not UTF-8 text."""
        turns = [f"{message.role}\n{message.content}" for message in messages]
        if not all(map(is_utf8, turns)):
            raise InputError("the message is not UTF-8 text")
        ids_of_messages = []
        for id_bytes in self.encoder.encode(turns):
            ids = array(ID_TYPE_CODE, id_bytes)
            ids_of_messages.append([id if id >= 0 else ~id for id in ids])
        return ids_of_messages


def first_turn_that_fits(
    messages: Sequence[Message], turns: Sequence[Sequence[int]], start: int, room: int
) -> int | None:
    """Return the index of the first turn such that it and all later turns fit into `room` tokens.

    It is `start`, or the index of a turn of the user. None if not even the last such turn fits.
    room is negative if the context is too short for the beginning of an answer.
    """
    n_turns = len(turns)
    if n_turns == start:  # there are no turns to fit
        return start if room >= 0 else None
    n_tokens = sum(len(turn) for turn in turns[start:])
    for first in range(start, n_turns):
        may_begin = first == start or messages[first].role == "user"
        if may_begin and n_tokens <= room:
            return first
        n_tokens -= len(turns[first])
    return None
