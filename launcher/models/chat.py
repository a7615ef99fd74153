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
from itertools import accumulate, chain

from entry_point.conversations import END_OF_TURN, TURN
from entry_point.model import GPT
from entry_point.text import Tokenizer
from launcher.errors import InputError
from launcher.models.encoder import SPEAKS, Encoder
from launcher.values import is_utf8

ROOM = 4  # an answer has at least 1 / ROOM of the context, if it may be so long


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
            what = f"the tokenizer has no token {error}, which conversations need"
            raise InputError(what, "no-turns") from None
        (line_break,) = encoder.encode(["\n"])
        self.line_break = array("i", line_break)

    def encode(self, turns: Sequence[str]) -> Iterator[bytes]:
        for turn, content in zip(turns, self.encoder.encode(turns), strict=True):
            said, learned = array("i", content), turn.startswith(SPEAKS)
            first, left = (0, len(SPEAKS)) if learned else (len(said), 0)
            while left > 0:  # a token that begins before the answer is not part of it
                left -= len(self.tokenizer.word(said[first]))
                first += 1
            ids = array("i", [~self.begin])
            ids.extend(~id for id in said[:first])
            ids.extend(said[first:])
            ids.append(self.end if learned else ~self.end)
            ids.extend(~id for id in self.line_break)
            yield ids.tobytes()


class TooLong(InputError):
    """A message does not fit into the context."""


class Chat:
    """A model that answers. Raises InputError if it has not learned from conversations."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        if not tokenizer.chats:
            raise InputError("the model has not learned from conversations", "teach-to-chat")
        self.size = model.config.block_size
        encoder = Encoder(tokenizer, "i")
        self.encoder = ChatEncoder(encoder)
        (speaks,) = encoder.encode([SPEAKS])
        self.speaks = [self.encoder.begin, *array("i", speaks)]  # after which it answers

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
        texts = [f"{message.role}\n{message.content}" for message in messages]
        if not all(map(is_utf8, texts)):
            raise InputError("the message is not UTF-8 text")
        turns = [array("i", turn) for turn in self.encoder.encode(texts)]
        sizes = [*accumulate(map(len, reversed(turns)))][::-1]  # from each turn to the end
        first = int(bool(messages) and messages[0].role == "system")
        head = sum(map(len, turns[:first]))
        room = self.size - min(max_new_tokens, self.size // ROOM) - len(self.speaks) - head
        begins = [n for n in range(first, len(turns)) if n == first or messages[n].role == "user"]
        begin = next((n for n in begins if sizes[n] <= room), len(turns))
        if room < 0 or begin == len(turns) > first:
            what = "instruction" if room < 0 and first else "message"
            after = f", of which the instruction takes {head}" * (what == "message" and first)
            raise TooLong(f"the {what} is too long for a context of {self.size} tokens{after}")
        seen = chain(*turns[:first], *turns[begin:])
        ids = [*(id if id >= 0 else ~id for id in seen), *self.speaks]
        return begin - first, ids, min(max_new_tokens, max(1, self.size - len(ids)))
