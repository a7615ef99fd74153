"""What was measured of a model on a text, as numbers, as text for people, and as a file."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sm_nanogpt.launcher.files.documents import Damaged
from sm_nanogpt.launcher.files.storage import read_document, write_json
from sm_nanogpt.launcher.job import FULL_ID
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

N_STRETCHES = 10  # of a text, by which its interval is computed; each has at least one part
T_QUANTILE = 2.262  # 97.5 % of Student's t distribution with N_STRETCHES - 1 degrees are below it
BITS_PER_NAT = 1 / math.log(2)  # of a nat


@dataclass(frozen=True)
class Passage:
    """A part of a text, and the loss of a model on it."""

    place: str  # where the part is, such as `notes.txt, line 3`
    nats: float
    size: int  # bytes
    tokens: int
    excerpt: str = ""

    @property
    def bits_per_byte(self) -> float:
        return BITS_PER_NAT * self.nats / max(1, self.size)


def total(parts: Sequence[Passage]) -> Passage:
    """All parts as one passage."""
    return Passage(
        place="",
        nats=math.fsum(part.nats for part in parts),
        size=sum(part.size for part in parts),
        tokens=sum(part.tokens for part in parts),
    )


def margin_of_bits(parts: Sequence[Passage]) -> float | None:
    """Half of the 95 % interval of the bits per byte of all parts; None for few parts.

    The parts are in the order of the text. Neighbors are alike, so an interval from single parts
    would be too narrow. It is computed from N_STRETCHES stretches of neighbors (batch means: Law
    2015, "Simulation Modeling and Analysis", 9.5.3). Bits per byte are a ratio of two sums, whose
    error is linearized (Cochran 1977, "Sampling Techniques", 6.4).
    """
    n = len(parts)
    if n < N_STRETCHES:
        return None
    whole = total(parts)
    squares = 0.0
    for number in range(N_STRETCHES):
        begin = n * number // N_STRETCHES
        end = n * (number + 1) // N_STRETCHES
        stretch = total(parts[begin:end])
        squares += (BITS_PER_NAT * stretch.nats - whole.bits_per_byte * stretch.size) ** 2
    error = math.sqrt(squares * N_STRETCHES / (N_STRETCHES - 1)) / max(1, whole.size)
    return T_QUANTILE * error


@dataclass(frozen=True)
class Canary:
    """A line with a secret, and the exposure of the secret in bits.

    With an exposure of n bits, one of 2**n random secrets is as likely to the model as this one.
    """

    line: str
    exposure: float


@dataclass(frozen=True)
class Anchor:
    """A number that is shown beside the bits per byte of a model."""

    heading: str
    spec: str = ".3f"  # the format of a value
    suffix: str = ""  # follows a value; it may contain {samples}


# The anchors by the field of Evaluation that holds their value, in the order in which they are
# shown. `measures` measures them. If an anchor is removed here, its field stays in Evaluation, so
# that older evaluations can be read.
ANCHORS = {
    "xz": Anchor("xz"),
    "ngram": Anchor("5-gram of the training text"),
    "validation": Anchor("own validation text"),
    "overlap": Anchor("overlap with the training text", spec=".1%"),
    "copied": Anchor("longest run copied from it", spec="d", suffix=" bytes in {samples}"),
}
# The anchors that need the training text, for a warning where that is not here.
UNMEASURED = "no 5-gram, own validation text, overlap, or copied run"


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on a text.

    bits_per_byte is over all documents. Its 95 % interval extends by `half` to either side, but not
    below 0, and comes from the spread of the parts of the text. `unit` says what a part is.
    perplexity is per token.

    The anchors xz, ngram, and validation are in bits per byte: of a compressor on the text, of a
    5-gram model of the training text on it, and of this model on the first 128 kB of its own
    validation text. overlap is the fraction of the text's bytes in runs of 50 or more that the
    training text contains. copied is the number of bytes of the longest run that `samples` have
    from the training text. For overlap and copied, a run of white space counts as one space.

    The model has never seen n_unknown characters of the text, which count as their bytes.
    unknown_bits of the bits per byte come from them. In documents, the one with the highest loss
    comes first.

    None stands for a value that cannot be known, or that an older version did not measure.
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
    n_unknown: int = 0
    unknown_bits: float = 0.0
    cuts: int | None = None  # positions at which the model was seen not to look ahead
    worst: list[Passage] = field(default_factory=list)
    canaries: list[Canary] = field(default_factory=list)
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)  # by kind: right ones, all
    parts: list[Passage] = field(default_factory=list)
    documents: list[Passage] = field(default_factory=list)

    def facts(self, first: Evaluation | None = None) -> dict[str, str]:
        """The numbers as text, by their headings.

        first: the evaluation of another model on the same text, to compare with.
        """
        facts = {
            "bits per byte": with_interval(self.bits_per_byte, self.half, lowest=0.0),
            "perplexity per token": formatted(self.perplexity, ".2f"),
        }
        for name, anchor in ANCHORS.items():
            suffix = anchor.suffix.format(samples=self.samples)
            facts[anchor.heading] = formatted(getattr(self, name), anchor.spec, suffix)
        facts["causal"] = "-" if self.cuts is None else f"yes, by {self.cuts:,} cuts"
        if self.n_unknown:
            cost = f"which cost {self.unknown_bits:.3f} of the bits"
            facts["unknown characters"] = f"{self.n_unknown:,}, {cost}"
        if first is not None and first is not self:
            facts["less the first"] = self.difference_from(first)
        return facts

    def difference_from(self, first: Evaluation) -> str:
        """The bits per byte minus another model's on the same text, with an interval."""
        differences = []
        for part, other in zip(self.parts, first.parts, strict=True):
            differences.append(replace(part, nats=part.nats - other.nats))
        return with_interval(total(differences).bits_per_byte, margin_of_bits(differences))


def formatted(value: float | None, spec: str, suffix: str = "") -> str:
    """A number in a format such as .2f; `-` for None."""
    if value is None:
        return "-"
    return f"{value:{spec}}{suffix}"


def with_interval(bits: float, half_width: float | None, lowest: float = -math.inf) -> str:
    """Bits per byte with their interval, if that is known: 2.214 (2.171 to 2.259).

    No bits can be below the lowest ones, so the interval ends there.
    """
    if not half_width:
        return f"{bits:.3f}"
    low = max(lowest, bits - half_width)
    return f"{bits:.3f} ({low:.3f} to {bits + half_width:.3f})"


def save_evaluation(evaluation: Evaluation, name: str, settings: Settings) -> None:
    """Write the evaluation of a job's model beside the model, for reports. Others are not kept."""
    if FULL_ID.fullmatch(evaluation.model):
        path = settings.models_dir / evaluation.model / f"eval-{name}.json"
        write_json(str(path), replace(evaluation, parts=[], documents=[]))


def saved_evaluations(job_id: str, settings: Settings) -> list[Evaluation]:
    """The evaluations of a job, the oldest first. A damaged one is left out, and logged."""
    paths = (settings.models_dir / job_id).glob("eval-*.json")
    evaluations = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            evaluation = read_document(str(path), Evaluation)
        except Damaged as error:
            logger.warning(f"an evaluation is left out: {error}; judge the text again")
            continue
        if evaluation is not None:
            evaluations.append(evaluation)
    return evaluations
