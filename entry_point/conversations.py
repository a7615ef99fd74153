"""Conversations: only what the assistant says is learned, and each sees itself alone.

Tokens that the model should not learn are stored as ~id, a negative number; as targets they become
IGNORED, which the loss skips. Each conversation is followed by ~end.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100  # as cross_entropy and transformers have it
# ChatML, as Qwen3 has it without tools; launcher/models/chat.py encodes conversations so.
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Packed:
    """Conversations in rows of block_size + 1 ids, which hold as many whole ones as fit in turn.

    What is left of a row is filled with `end`, not learned. A conversation that is longer than a
    row ends with the last answer that fits; without one, it is left out. rows is int32 [n, T + 1],
    learned, int64 [n], counts the targets of each row that are learned.
    """

    def __init__(self, ids: Tensor, end: int, block_size: int) -> None:
        self.cut = self.dropped = 0
        kept: list[tuple[int, int, int]] = []  # where it begins, its length, its place in the rows
        begin, row, place = 0, 0, 0
        learned, width = ids >= 0, block_size + 1
        for stop in (ids == ~end).nonzero().flatten().tolist():
            length = stop - begin
            if length > width:
                last = learned[begin : begin + width] & ~learned[begin + 1 : begin + width + 1]
                length = max(last.nonzero().flatten().tolist(), default=-1) + 1
                self.cut, self.dropped = self.cut + 1, self.dropped + (not length)
            if length:
                if place + length > width:
                    row, place = row + 1, 0
                kept.append((begin, length, row * width + place))
                place += length + 1
            begin = stop + 1
        self.count = len(kept)
        self.rows = torch.full((row + 1 if kept else 0, width), ~end, dtype=torch.int32)
        for begin, length, place in kept:
            self.rows.view(-1)[place : place + length] = ids[begin : begin + length]
        self.learned = (self.rows[:, 1:] >= 0).sum(dim=1)

    def loss_shares(self, starts: Tensor, rank: int, world_size: int, passes: int) -> list[float]:
        """The factor of the mean loss of each pass of this rank, for the batch at `starts`.

        The mean over passes and ranks is then that over the learned targets of the batch.
        """
        counts = self.learned[starts // self.rows.size(1)]
        own = counts.chunk(world_size)[rank].tensor_split(passes)
        return [float(n.sum()) * world_size * passes / float(counts.sum()) for n in own]

    def question(self) -> list[int]:
        """The ids of the first conversation up to its first answer."""
        ids: list[int] = self.rows[0].tolist()
        return [~id for id in ids[: next(n for n, id in enumerate(ids) if id >= 0)]]

    def summary(self) -> str:
        words = f"{self.count:,} conversations in {len(self.rows):,} rows"
        words += f", {int(self.learned.sum()):,} tokens of answers"
        if self.cut:
            words += f"; {self.cut:,} are longer than block_size and end with the last answer that"
            words += f" fits, {self.dropped:,} of them have none and are left out"
        return words

    def __len__(self) -> int:
        return self.rows.numel()

    def __getitem__(self, places: slice) -> Tensor:
        return self.rows.view(-1)[places]
