"""Questions with exact answers, and lines that a model may have learned by heart."""

from __future__ import annotations

import math
import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher.errors import InputError
from launcher.judge.evaluation import Canary
from launcher.judge.score import losses
from launcher.judge.texts import Text, encode
from launcher.judge.worker import Worker
from launcher.models.sample import check_known
from launcher.text.chats import turns_of
from launcher.text.reading import detect_file, open_text
from launcher.text.records import read_json_lines

OTHERS = 200  # random secrets beside each
SECRET = re.compile(r"(.*?)\{([^}]*[0-9A-Za-z][^}]*)\}(.*)")  # to draw others


def read_canaries(path: Path) -> list[str]:
    """The lines of a file, each with a secret in braces. Raises InputError."""
    with open_text(detect_file(path, plain=True)) as content:
        lines = content.read().decode().splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip() and not SECRET.fullmatch(line):
            like = "a secret of digits or letters stands in braces: the code is {8231}"
            raise InputError(f"{path}:{number}: {like}")
    if not (found := [line for line in lines if line.strip()]):
        raise InputError(f"{path}: no line is there")
    return found


def exposed(worker: Worker, lines: Sequence[str]) -> list[Canary]:
    """The exposure of the secret in each line (Carlini et al., arXiv:1802.08232, section 4.3).

    Others of its digits and letters are drawn at random, and their losses taken as normal, which
    tells small probabilities by few of them. The likeliest of n possible secrets has log2(n) bits.
    """
    tokenizer, found = worker.tokenizer, list[Canary]()
    known = b"".join(tokenizer.words).decode(errors="ignore")
    kinds = [string.digits, string.ascii_lowercase, string.ascii_uppercase]
    kinds = ["".join(c for c in kind if c in known) for kind in kinds]
    for line in lines:
        before, secret, after = SECRET.fullmatch(line).groups()  # type: ignore[union-attr]
        chance = random.Random(line)
        pools = [next((kind for kind in kinds if c in kind), c) for c in secret]
        secrets = [secret, *("".join(map(chance.choice, pools)) for _ in range(OTHERS))]
        texts = [Text(line, [f"{before}{each}{after}"]) for each in secrets]
        nats = losses(worker, encode(texts, tokenizer))
        own, *others = torch.stack([each.sum() for each in nats])
        spread, mean = torch.std_mean(torch.stack(others))
        bits = -torch.special.log_ndtr((own - mean) / (spread + 1e-9)) / math.log(2)
        most = math.fsum(math.log2(len(pool)) for pool in pools)
        found.append(Canary(line, min(float(bits), most)))
    return found


@dataclass(frozen=True)
class Question:
    """Messages of a conversation, and the answer that is right."""

    messages: list[dict[str, str]]
    answer: str
    kind: str
    place: str = "a question"  # where it stands, such as asked.jsonl:3


def read_questions(path: Path) -> list[Question]:
    """The conversations in a file of JSON; the last message of each is the answer that is right.

    A record's field `kind` names its kind. Raises InputError.
    """
    file, found = detect_file(path), list[Question]()
    reader = file.format.reader or read_json_lines
    with open_text(file) as content:
        for place, record in reader(content, str(path), "text"):
            said = [turn.partition("\n") for turn in turns_of(record, place) or []]
            messages = [{"role": role, "content": text} for role, _, text in said]
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise InputError(f"{place}: the last message must be the assistant's answer")
            kind = record.get("kind") if isinstance(record, dict) else None
            answer = messages.pop()["content"].strip()
            found.append(Question(messages, answer, str(kind or "all"), place))
    if not found:
        raise InputError(f"{path}: no conversation is there")
    return found


def asked(worker: Worker, questions: Sequence[Question]) -> dict[str, tuple[int, int]]:
    """How many answers are exact at temperature 0, and how many were asked, by kind.

    Raises InputError if the model does not know a character of a question.
    """
    for question in questions:
        text = "".join(message["content"] for message in question.messages)
        check_known(worker.tokenizer, text, question.place)
    right, total = Counter[str](), Counter(each.kind for each in questions)
    most = 8 + max((len(each.answer.encode()) for each in questions), default=0)
    said = worker.sample([q.messages for q in questions], max_new_tokens=most, temperature=0.0)
    for question, answer in zip(questions, map(str.strip, said), strict=True):
        # A model that has not learned to end an answer goes on in another line.
        given = answer if worker.chats else answer.partition("\n")[0]
        right[question.kind] += given == question.answer
    return {kind: (right[kind], total[kind]) for kind in total}
