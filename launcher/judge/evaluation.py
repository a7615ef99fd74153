"""What was measured of a model on a text, as numbers and in words."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from launcher.files.documents import Damaged
from launcher.files.storage import read_document, write_json
from launcher.job import FULL_ID
from launcher.settings import Settings

logger = logging.getLogger(__name__)

LEAST = 10  # parts of a text that give an interval
BITS = 1 / math.log(2)


@dataclass(frozen=True)
class Passage:
    """A part of a text, and what a model loses on it."""

    place: str
    nats: float
    size: int  # bytes
    tokens: int
    excerpt: str = ""

    @property
    def bits_per_byte(self) -> float:
        return BITS * self.nats / max(1, self.size)


def total(parts: Sequence[Passage]) -> Passage:
    nats = math.fsum(part.nats for part in parts)
    return Passage("", nats, sum(p.size for p in parts), sum(p.tokens for p in parts))


def spread(parts: Sequence[Passage]) -> float | None:
    """Half of the 95 % interval of the bits per byte of all parts; None for fewer than LEAST.

    The error of a ratio of sums, linearized (Cochran 1977, "Sampling Techniques", 6.4).
    """
    n, bits = len(parts), total(parts).bits_per_byte
    if n < LEAST:
        return None
    errors = math.fsum((BITS * part.nats - bits * part.size) ** 2 for part in parts)
    error = math.sqrt(errors * n / (n - 1)) / max(1, sum(part.size for part in parts))
    return NormalDist().inv_cdf(0.975) * error


@dataclass(frozen=True)
class Canary:
    """A line with a secret, and its exposure in bits.

    The model finds one of 2**n random secrets as likely as a secret of n bits.
    """

    line: str
    exposure: float


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on a text.

    bits_per_byte is over all documents; its 95 % interval goes by `half` to both sides, from the
    spread of the parts, which are `unit`. perplexity is per token. xz, ngram and validation are
    bits per byte too: of a compressor on the text, of a 5-gram model of the training text on it,
    and of this model on the first 128 kB of its own validation text. overlap is the fraction of
    bytes in runs of 50 or more that the training text has too, and copied the bytes of the longest
    run that it shares with `samples`, both with white space as one space. documents has the worst
    first. None stands for what cannot be known, or what an older version did not measure.
    """

    model: str
    text: str
    size: int  # bytes
    tokens: int
    bits_per_byte: float
    half: float | None = None
    unit: str = ""
    perplexity: float | None = None
    xz: float | None = None
    ngram: float | None = None
    validation: float | None = None
    overlap: float | None = None
    copied: int | None = None
    samples: str = ""
    cuts: int | None = None  # by which no loss depends on what follows
    worst: list[Passage] = field(default_factory=list)
    canaries: list[Canary] = field(default_factory=list)
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)  # right and asked, by kind
    parts: list[Passage] = field(default_factory=list)
    documents: list[Passage] = field(default_factory=list)

    def facts(self, first: Evaluation | None = None) -> dict[str, str]:
        """The numbers in words; with the difference to another model on the same text."""
        facts = {
            "bits per byte": of_bits(self.bits_per_byte, self.half),
            "perplexity per token": shown(self.perplexity, ".2f"),
            "xz": of_bits(self.xz),
            "5-gram of the training text": of_bits(self.ngram),
            "own validation text": of_bits(self.validation),
            "overlap with the training text": shown(self.overlap, ".1%"),
            "longest run copied from it": shown(self.copied, "d", f" bytes in {self.samples}"),
            "causal": shown(self.cuts, ",d", " cuts", before="yes, by "),
        }
        if first is not None and first is not self:
            pairs = zip(self.parts, first.parts, strict=True)
            apart = [replace(a, nats=a.nats - b.nats) for a, b in pairs]
            facts["less the first"] = of_bits(total(apart).bits_per_byte, spread(apart))
        return facts


def shown(value: float | None, form: str, after: str = "", before: str = "") -> str:
    return "-" if value is None else f"{before}{value:{form}}{after}"


def of_bits(bits: float | None, half: float | None = None) -> str:
    """Bits per byte, and their interval: 2.214 (2.171 to 2.259)."""
    around = f" ({bits - half:.3f} to {bits + half:.3f})" if bits is not None and half else ""
    return shown(bits, ".3f", around)


def keep(made: Evaluation, name: str, settings: Settings) -> None:
    """Keep an evaluation of a job beside its model, for reports."""
    if FULL_ID.fullmatch(made.model):
        place = settings.models_dir / made.model / f"eval-{name}.json"
        write_json(str(place), replace(made, parts=[], documents=[]))


def kept(job_id: str, settings: Settings) -> list[Evaluation]:
    """The evaluations of a job, the oldest first. One that does not fit is left out, and logged."""
    files = (settings.models_dir / job_id).glob("eval-*.json")
    evaluations = []
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        try:
            evaluation = read_document(str(file), Evaluation)
        except Damaged as error:
            logger.warning(f"an evaluation is left out: {error}; judge the text again")
            continue
        if evaluation is not None:
            evaluations.append(evaluation)
    return evaluations
