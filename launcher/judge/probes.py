"""Questions with exact answers, and lines that a model may have learned by heart."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.judge.evaluation import Canary
from sm_nanogpt.launcher.judge.score import losses_of_documents
from sm_nanogpt.launcher.judge.texts import Text, encode_texts
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.models.sample import check_known
from sm_nanogpt.launcher.text.chats import turns_of
from sm_nanogpt.launcher.text.formats import JSON_LINES
from sm_nanogpt.launcher.text.reading import detect_file, open_text

N_OTHER_SECRETS = 200  # random secrets that each secret is compared with
CANARY = re.compile(r"(.*?)\{([^}]*[0-9A-Za-z][^}]*)\}(.*)")  # beginning, secret, and end
EXTRA_ANSWER_TOKENS = 8  # an answer may have so many tokens more than the right one has bytes


def read_canaries(path: Path) -> list[str]:
    """Read the lines of a file, each with a secret in braces.

    Raises InputError if a line has no secret, or there is no line.
    """
    with open_text(detect_file(path, as_plain=True)) as content:
        lines = content.read().decode().splitlines()
    canaries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not CANARY.fullmatch(line):
            rule = "a secret of digits or letters stands in braces: the code is {8231}"
            raise InputError(f"{path}:{number}: {rule}")
        canaries.append(line)
    if not canaries:
        raise InputError(f"{path}: no line is there")
    return canaries


def measure_exposure(worker: Worker, canaries: Sequence[str]) -> list[Canary]:
    """The exposure of the secret in each line (Carlini et al., arXiv:1802.08232, section 4.3)."""
    vocabulary = b"".join(worker.tokenizer.words).decode(errors="ignore")
    return [Canary(line, exposure_of(worker, line, vocabulary)) for line in canaries]


def exposure_of(worker: Worker, line: str, vocabulary: str) -> float:
    """The exposure of the secret in a line, in bits.

    Other secrets are drawn at random: each digit or letter is replaced by another that is in
    `vocabulary`. Their losses count as normally distributed, so that a few of them are enough to
    estimate a small probability. The exposure is at most log2 of the number of possible secrets.
    """
    beginning, secret, end = CANARY.fullmatch(line).groups()  # type: ignore[union-attr]
    random = Random(line)
    pools = [alternatives(character, vocabulary) for character in secret]
    secrets = [secret]
    for _ in range(N_OTHER_SECRETS):
        secrets.append("".join(map(random.choice, pools)))
    texts = [Text(line, [f"{beginning}{drawn}{end}"]) for drawn in secrets]
    nats = losses_of_documents(worker, encode_texts(texts, worker.tokenizer))

    loss, *other_losses = torch.stack([document.sum() for document in nats])
    deviation, mean = torch.std_mean(torch.stack(other_losses))
    z = (loss - mean) / (deviation + 1e-9)
    bits = -torch.special.log_ndtr(z) / math.log(2)
    max_bits = math.fsum(math.log2(len(pool)) for pool in pools)
    return min(float(bits), max_bits)


def alternatives(character: str, vocabulary: str) -> str:
    """The characters that may replace one: the digits, or the letters of its case, in `vocabulary`.

    For any other character, that character alone.
    """
    for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        characters = "".join(c for c in kind if c in vocabulary)
        if character in characters:
            return characters
    return character


@dataclass(frozen=True)
class Question:
    """The messages of a conversation, and the right answer to the last one."""

    messages: list[dict[str, str]]
    answer: str
    kind: str
    place: str  # where the conversation is, such as questions.jsonl:3


def read_questions(path: Path) -> list[Question]:
    """Read the conversations in a JSON file. The last message of each is the right answer.

    A record may name its kind in the field `kind`. Raises InputError.
    """
    file = detect_file(path)
    read_records = file.format.reader or JSON_LINES.reader
    assert read_records is not None
    questions = []
    with open_text(file) as content:
        for place, record in read_records(content, file):
            messages = []
            for turn in turns_of(record, place) or []:
                role, _, text = turn.partition("\n")
                messages.append({"role": role, "content": text})
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise InputError(f"{place}: the last message must be the assistant's answer")
            answer = messages.pop()["content"].strip()
            kind = record.get("kind") if isinstance(record, dict) else None
            questions.append(Question(messages, answer, str(kind or "all"), place))
    if not questions:
        raise InputError(f"{path}: no conversation is there")
    return questions


def count_right_answers(
    worker: Worker, questions: Sequence[Question]
) -> dict[str, tuple[int, int]]:
    """Let the model answer questions; return how many of how many are right, by kind.

    An answer is right if it is exactly the question's answer. The model answers at temperature 0.
    Raises InputError if it does not know a character of a question.
    """
    for question in questions:
        text = "".join(message["content"] for message in question.messages)
        check_known(worker.tokenizer, text, question.place)
    max_bytes = max((len(question.answer.encode()) for question in questions), default=0)
    max_tokens = max_bytes + EXTRA_ANSWER_TOKENS
    prompts = [question.messages for question in questions]
    samples = worker.sample(prompts, max_new_tokens=max_tokens, temperature=0.0)

    right = Counter[str]()
    total = Counter[str]()
    for question, sample in zip(questions, samples, strict=True):
        answer = sample.strip()
        if not worker.chats:  # a base model does not end an answer, but begins another line
            answer, _, _ = answer.partition("\n")
        total[question.kind] += 1
        if answer == question.answer:
            right[question.kind] += 1
    return {kind: (right[kind], total[kind]) for kind in total}
