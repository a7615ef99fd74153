"""Talks: the messages of people or programs to each other, as messengers export them.

A talk is divided into conversations, in which the model learns the messages of one of the people.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.models.encoder import ASSISTANT_PREFIX

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 3600.0  # after it, a new conversation begins
MAX_CHARACTERS_BEFORE_CUT = 1000  # after them, the next answer ends a conversation
MAX_NAMES_SHOWN = 20


@dataclass(frozen=True)
class TalkMessage:
    """A message of an author. seconds are counted from any moment, the same for a whole talk."""

    author: str
    text: str
    seconds: float = 0.0


@dataclass
class Talk:
    """The messages of one exported chat, in their order."""

    messages: list[TalkMessage] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # by kind, such as "photo"
    answers: str = ""  # the author whom the model is to learn, if the export says it
    people_file: str = ""  # relative path of the file with the names for the ids of authors

    def add(self, author: str, text: str, seconds: float = 0.0) -> None:
        """Add a message. Raises TypeError if its author or its text is no string."""
        if not (isinstance(author, str) and isinstance(text, str)):
            raise TypeError(f"a message of {author!r} is no text")
        text = text.strip()
        if text:
            self.messages.append(TalkMessage(author, text, seconds))
        else:
            self.left_out["message without text"] += 1

    def name_people(self, names: Mapping[str, str]) -> None:
        """Replace the ids of authors by names, also where a text mentions one, as @U024BE7LH."""

        def named(mention: re.Match[str]) -> str:
            return f"@{names.get(mention[1], mention[1])}"

        for index, message in enumerate(self.messages):
            author = names.get(message.author, message.author)
            text = re.sub(r"@(\w+)", named, message.text)
            self.messages[index] = TalkMessage(author, text, message.seconds)


@dataclass
class Talks:
    """Counts of all talks of an upload: the messages of each author, and what is left out."""

    authors: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    me: str = ""  # the author whose messages the model learns
    first_position: str = ""  # of the first talk between people
    n_talks: int = 0  # the number of talks between people

    def check(self) -> None:
        """Warn of what is left out.

        Raises InputError if it is not known whose messages the model learns, or if that person
        wrote none.
        """
        if self.authors and not self.me:
            people = list_counts(self.authors)
            problem = f"{self.first_position}: is a chat of {people}"
            if self.n_talks > 1:
                problem = f"{self.first_position} and {self.n_talks - 1:,} more: chats of {people}"
            raise InputError(problem, code="give-me")
        if self.authors and self.me not in self.authors:
            problem = f"wrote no message; these did: {list_counts(self.authors)}"
            raise InputError(problem, field="me", value=self.me)
        if self.left_out:
            logger.warning(f"left out of chats: {list_counts(self.left_out)}")

    def check_name(self, me: str) -> None:
        """Raise InputError if `me` was given, and no talk is between people."""
        if me and not self.authors:
            raise InputError("is for chats between people, and here is none", field="me", value=me)

    def turns_of(self, talk: Talk, position: str, me: str) -> Iterator[list[str]]:
        """Yield the turns of each conversation of a talk. The model learns the turns of `me`.

        If `me` is '', this only counts the authors of the talk, and yields nothing.
        """
        self.left_out += talk.left_out  # without the kinds of which it has none
        if not talk.messages:
            return
        authors = Counter(message.author for message in talk.messages)
        if talk.answers:
            learned_author = talk.answers
            conversations = [talk.messages]
        else:
            learned_author = me
            self.add_people(authors, position, me)
            if not me:
                return
            conversations = list(cut_at_pauses(talk.messages, me))
        for messages in conversations:
            turns = make_turns(messages, learned_author, is_group=len(authors) > 2)
            if turns:
                yield turns
            else:
                self.left_out[f"message without an answer of {learned_author}"] += len(messages)

    def add_people(self, authors: Counter[str], position: str, me: str) -> None:
        """Count a talk between people: the number of messages of each author."""
        self.authors += authors
        self.me = me
        self.first_position = self.first_position or position
        self.n_talks += 1


def cut_at_pauses(messages: Sequence[TalkMessage], me: str) -> Iterator[list[TalkMessage]]:
    """Yield the conversations of a talk. A pause ends one; if it is long, the next answer does."""
    conversation: list[TalkMessage] = []
    n_characters = 0
    for message in messages:
        if conversation:
            last = conversation[-1]
            is_answered = last.author == me and message.author != me
            is_long = n_characters > MAX_CHARACTERS_BEFORE_CUT and is_answered
            if is_long or abs(message.seconds - last.seconds) > PAUSE_SECONDS:
                yield conversation
                conversation = []
                n_characters = 0
        conversation.append(message)
        n_characters += len(message.text)
    if conversation:
        yield conversation


def make_turns(messages: Sequence[TalkMessage], me: str, is_group: bool) -> list[str]:
    """The turns of a conversation up to its last answer, as chats.py has them; [] if it has no
    answer.

    Messages of `me` in a row are one turn, and so are messages of others. In a group, each message
    of another person begins with the name.
    """
    turns: list[str] = []
    for is_mine, run in groupby(messages, lambda message: message.author == me):
        texts = []
        for message in run:
            prefix = f"{message.author}: " if is_group and not is_mine else ""
            texts.append(f"{prefix}{message.text}")
        text = "\n".join(texts)
        turns.append(f"{ASSISTANT_PREFIX}{text}" if is_mine else f"user\n{text}")
    while turns and not turns[-1].startswith(ASSISTANT_PREFIX):
        turns.pop()
    return turns


def list_counts(counts: Counter[str]) -> str:
    """Such as `Ann (120), Bob (99)`."""
    parts = [f"{name} ({count:,})" for name, count in counts.most_common(MAX_NAMES_SHOWN)]
    if len(counts) > MAX_NAMES_SHOWN:
        parts.append(f"and {len(counts) - MAX_NAMES_SHOWN:,} more")
    return ", ".join(parts)
