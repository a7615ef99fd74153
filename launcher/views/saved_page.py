"""Save the page of a model as a file, with as many bits and moments as the page may have."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm_nanogpt.entry_point.conversations import Packed
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Corpus, Tokenizer
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.progress import time_logged
from sm_nanogpt.launcher.files.storage import write_bytes
from sm_nanogpt.launcher.judge.anchors import longest_copy
from sm_nanogpt.launcher.judge.rounding import Rounding, measure_losses, round_weights
from sm_nanogpt.launcher.judge.texts import training_corpus, training_of
from sm_nanogpt.launcher.models.moments import Moment, evenly_spaced, read_moments
from sm_nanogpt.launcher.models.quantization import (
    BIT_WIDTHS,
    quantize_model,
    with_quantized_weights,
)
from sm_nanogpt.launcher.models.sample import stream_samples
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.values import in_units
from sm_nanogpt.launcher.views.model_card import card_for
from sm_nanogpt.launcher.views.model_page import (
    PageMoment,
    check_model,
    page_of,
    tokenizer_of,
)

logger = logging.getLogger(__name__)

N_SAMPLES = 100  # in which copies of the training text are looked for
SAMPLE_TOKENS = 500  # of each
N_QUESTIONS = 20  # of conversations, which the samples answer
MAX_COPIES_LINE_BYTES = 200  # what the card's line of copies adds to a page, at most
DEFAULT_LIMIT = 20_000_000  # bytes of a page with moments; mails may hardly be larger
UNMEASURED = "neither the cost of rounding nor copies are measured"  # if the text is not here


@dataclass(frozen=True)
class SavedPage:
    """What a saved page has.

    size is in bytes. copied is the number of bytes of the longest run of its samples that its
    training text contains; None if that text is not here. moments says which steps of the training
    the page shows, or why it shows none.
    """

    path: Path
    size: int
    rounding: Rounding
    copied: int | None
    moments: str


def save_model_page(
    name: str,
    directory: Path,
    model: GPT,
    tokenizer: Tokenizer,
    path: Path,
    settings: Settings,
    job: JobDescription | None,
    bits: int | None,
    n_moments: int | None,
) -> SavedPage:
    """Write the page of the model in a directory, with what is known of it on this machine.

    name is what the user calls the model: the id of a job, or a directory. job is the job that made
    it; None if no job did. bits and n_moments are as in PageDraft and save_page. Raises InputError
    if more than one moment is asked for and the run kept none.
    """
    moments = read_moments(directory, model)
    if n_moments is not None and n_moments > 1 and not moments:
        raise InputError(f"the run kept no moments; train one with moments={n_moments}")
    title = name
    limit = None
    if job is not None:
        title = job.name or job.job_id
        limit = job.page_limit
    corpus = training_corpus(name, directory, settings, UNMEASURED)
    card = card_for(directory, job)
    with time_logged("making the page"):
        draft = PageDraft(model, tokenizer, corpus, title=title, card=card, bits=bits)
        return save_page(draft, path, limit, moments, n_moments)


def save_page(
    draft: PageDraft,
    path: Path,
    limit: int | None = None,
    moments: Sequence[Moment] = (),
    n_moments: int | None = None,
) -> SavedPage:
    """Write a model as one HTML page.

    limit: the bytes that the page may have. To stay below it, the weights get fewer bits than they
    should, unless the draft says how many. The page shows n_moments of the moments, of which the
    last is the model; by default, as many as the limit, or else DEFAULT_LIMIT, allows. Raises
    InputError if the page cannot be so small, or if the file cannot be written.
    """
    if limit is not None and draft.bits is None:
        draft.take_fewer_bits(limit)
    draft.measure_copies()

    moments_limit = None
    if n_moments is None:
        moments_limit = DEFAULT_LIMIT if limit is None else limit
        content, shown_moments = draft.with_moments_below(moments_limit, moments)
    else:
        shown_moments = evenly_spaced(moments, n_moments)
        content = draft.content(shown_moments)
    write_bytes(str(path), content)
    description = describe_moments(shown_moments, len(moments), moments_limit)
    return SavedPage(path, len(content), draft.rounding, draft.copied, description)


@dataclass
class PageDraft:
    """The page of a model, while its bits and moments are chosen.

    Raises InputError if an edited folder computes the model, or if the page does not know the kind
    of its tokenizer.
    """

    model: GPT
    tokenizer: Tokenizer
    corpus: Corpus | None  # the text from which it has learned; None: it is not here
    title: str
    card: Mapping[str, str]
    bits: int | None = None  # of a weight; None: the fewest that cost little
    copied: int | None = None  # as in SavedPage
    rounded_moments: dict[int, PageMoment] = field(default_factory=dict)  # by step

    def __post_init__(self) -> None:
        check_model(self.model)
        tokenizer_of(self.tokenizer)
        self.rounding = round_weights(self.model, self.corpus, self.bits)

    def content(self, moments: Sequence[Moment] = ()) -> bytes:
        """The page with these moments, of which the last is the model. One moment has no slider."""
        facts = {**self.card, "weights": str(self.rounding)}
        if self.copied is not None:
            facts["copies"] = describe_copies(self.copied)
        rounded = self.round_moments(moments) if len(moments) > 1 else []
        parameters = self.rounding.parameters
        page = page_of(self.model, parameters, self.tokenizer, self.title, facts, rounded)
        return page.encode()

    def take_fewer_bits(self, limit: int) -> None:
        """Round the weights to fewer bits until the page stays below a limit, in bytes.

        Raises InputError if the fewest bits are too many.
        """
        size = len(self.content()) + MAX_COPIES_LINE_BYTES
        while size > limit:
            excess = f"with {self.rounding.bits} bits a weight the page has {in_units(size)}"
            problem = f"{excess}, and its job was launched for {in_units(limit)}"
            if self.rounding.bits == min(BIT_WIDTHS):
                raise InputError(problem, "bits-over-limit")
            logger.info(f"{problem}: fewer bits")
            self.rounding = round_weights(self.model, self.corpus, self.rounding.bits - 1)
            size = len(self.content()) + MAX_COPIES_LINE_BYTES

    def measure_copies(self) -> None:
        """Measure how much samples copy from the training text, if that is here."""
        if self.corpus is not None:
            rounded = with_quantized_weights(self.model, self.rounding.parameters)
            self.copied = count_copied_bytes(rounded, self.tokenizer, self.corpus)

    def with_moments_below(
        self, limit: int, moments: Sequence[Moment]
    ) -> tuple[bytes, Sequence[Moment]]:
        """The page with as many moments as a limit, in bytes, allows, and these moments."""
        content = self.content()
        shown = evenly_spaced(moments, limit // len(content))
        while len(shown) > 1:
            larger = self.content(shown)
            if len(larger) <= limit:
                return larger, shown
            shown = evenly_spaced(moments, len(shown) - 1)
        return content, shown

    def round_moments(self, moments: Sequence[Moment]) -> list[PageMoment]:
        """The moments, rounded to the bits of the model, which is the last one. Those that were
        rounded before are kept, as the bits do not change any more."""
        *earlier_moments, last = moments
        rounded_moments = []
        for moment in earlier_moments:
            if moment.step not in self.rounded_moments:
                rounded = round_moment(moment, self.corpus, self.rounding.bits)
                self.rounded_moments[moment.step] = rounded
            rounded_moments.append(self.rounded_moments[moment.step])
        rounding = self.rounding
        model = PageMoment(last.step, rounding.rounded_loss, rounding.parameters, last.generation)
        return [*rounded_moments, model]


def round_moment(moment: Moment, corpus: Corpus | None, bits: int) -> PageMoment:
    """A moment, rounded to so many bits for each weight, with its loss."""
    parameters = quantize_model(moment.model, bits)
    loss = None
    if corpus is not None:
        rounded = with_quantized_weights(moment.model, parameters)
        loss = measure_losses(rounded, corpus).bits_per_byte
    return PageMoment(moment.step, loss, parameters, moment.generation)


def describe_copies(n_bytes: int) -> str:
    """Describe the longest passage of the training text in the samples."""
    return f"{n_bytes} bytes, the longest passage of the training text in {N_SAMPLES} samples"


def describe_moments(moments: Sequence[Moment], n_kept: int, limit: int | None) -> str:
    """Describe which of the n_kept moments of a run a page shows.

    limit: the bytes that the page may have; None if the user chose the number of moments.
    """
    if not n_kept:
        return "the run kept none"
    shown = "the end alone"
    if len(moments) > 1:
        shown = f"of steps {', '.join(str(moment.step) for moment in moments)}"
        generation = moments[-1].generation
        if generation is not None:
            shown += f" of generation {generation}"
    if len(moments) == n_kept:
        return shown
    if limit is not None:
        return f"{shown}, as all {n_kept} would make over {in_units(limit)}"
    return f"{shown}; the run kept {n_kept}"


def count_copied_bytes(model: GPT, tokenizer: Tokenizer, corpus: Corpus) -> int:
    """The bytes of the longest run of a model's samples that its training text contains.

    A model of conversations has learned to write answers alone. So its samples are answers to
    questions of its training text.
    """
    prompts: Sequence[Sequence[int] | None] = [None]
    if isinstance(corpus.train, Packed):
        prompts = questions_of(corpus.train)
    n_samples = max(1, N_SAMPLES // len(prompts))
    samples = []
    for prompt in prompts:
        texts = [""] * n_samples
        for pieces in stream_samples(model, tokenizer, prompt, SAMPLE_TOKENS, n_samples):
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        samples += texts
    return longest_copy(training_of(corpus).content, samples)


def questions_of(conversations: Packed) -> list[list[int]]:
    """The ids of the first question of N_QUESTIONS rows of conversations, spread evenly."""
    n_rows = len(conversations.rows)
    rows = [index * n_rows // N_QUESTIONS for index in range(N_QUESTIONS)]
    return [conversations.question(row) for row in rows]
