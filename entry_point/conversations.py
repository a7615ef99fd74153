"""Conversations: only what the assistant says is learned, and each sees itself alone.

Tokens that the model should not learn are stored as ~id, a negative number; as targets they become
IGNORED, which the loss skips. Each conversation is followed by ~end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import counted

IGNORED = -100  # as cross_entropy and transformers have it
# ChatML, as Qwen3 has it without tools; launcher/models/chat.py encodes conversations so.
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Span(NamedTuple):
    """A conversation: where its ids begin, how many there are, and where they go in the rows."""

    begin: int
    length: int
    target: int


def length_to_last_answer(ids: Tensor) -> int:
    """The number of ids up to the end of the last answer before the last of them; 0 for none."""
    learned = ids >= 0
    ends = learned[:-1] & ~learned[1:]
    return max(ends.nonzero().flatten().tolist(), default=-1) + 1


class Packed:
    """Conversations in rows of block_size + 1 ids, which hold as many whole ones as fit in turn.

    What is left of a row is filled with `end`, not learned. A conversation that is longer than a
    row ends with the last answer that fits; without one, it is left out. rows is int32 [n, T + 1],
    learned, int64 [n], counts the targets of each row that are learned. n_ids counts the ids of the
    conversations, each with its end.
    """

    def __init__(self, ids: Tensor, end: int, block_size: int) -> None:
        self.n_cut = 0  # conversations that are longer than a row
        self.n_dropped = 0  # of these, those that are left out
        width = block_size + 1
        spans: list[Span] = []
        row, column = 0, 0  # where the next conversation goes, if it fits
        begin = 0
        for stop in (ids == ~end).nonzero().flatten().tolist():
            length = stop - begin
            if length > width:
                length = length_to_last_answer(ids[begin : begin + width + 1])
                self.n_cut += 1
                if length == 0:
                    self.n_dropped += 1
            if length > 0:
                if column + length > width:
                    row, column = row + 1, 0
                spans.append(Span(begin, length, row * width + column))
                column += length + 1
            begin = stop + 1

        self.n_conversations = len(spans)
        self.n_ids = sum(span.length + 1 for span in spans)
        n_rows = row + 1 if spans else 0
        self.rows = torch.full((n_rows, width), ~end, dtype=torch.int32)
        flat = self.rows.view(-1)
        for span in spans:
            conversation = ids[span.begin : span.begin + span.length]
            flat[span.target : span.target + span.length] = conversation
        self.learned = (self.rows[:, 1:] >= 0).sum(dim=1)

    def loss_weights(
        self, starts: Tensor, rank: int, world_size: int, n_passes: int
    ) -> list[float]:
        """The weight of the mean loss of each pass of this rank, for the batch at `starts`.

        The mean over passes and ranks is then that over the learned targets of the batch.
        """
        n_learned = self.learned[starts // self.rows.size(1)]  # of each row of the batch
        of_passes = n_learned.chunk(world_size)[rank].tensor_split(n_passes)
        n_passes_of_all = world_size * n_passes
        total = float(n_learned.sum())
        return [float(counts.sum()) * n_passes_of_all / total for counts in of_passes]

    def question(self, row: int = 0) -> list[int]:
        """The ids of the first conversation of a row, up to its first answer."""
        question = []
        for id in self.rows[row].tolist():
            if id >= 0:
                break
            question.append(~id)
        return question

    def summary(self) -> str:
        text = (
            f"{counted(self.n_conversations, 'conversation')}, packed into"
            f" {counted(len(self.rows), 'row')};"
            f" {int(self.learned.sum()):,} of their tokens are answers, which alone are learned"
        )
        if self.n_cut:
            text += (
                f"; {self.n_cut:,} are longer than block_size: each ends with its last answer that"
                f" fits, and {self.n_dropped:,} without one are left out"
            )
        return text

    def __len__(self) -> int:
        return self.rows.numel()

    def __getitem__(self, positions: slice) -> Tensor:
        return self.rows.view(-1)[positions]
