"""Choose the size of a new model by the bytes of its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching import sizing
from sm_nanogpt.launcher.models.quantization import GROUP, HEAD_BITS
from sm_nanogpt.launcher.text.channels import Texts
from sm_nanogpt.launcher.values import in_units

PAGE_SIZES = [n / 20 for n in range(5, 321)]  # a finer step would not change the width
PLANNED_BITS = 6  # of a weight; with 5, small models lose up to 0.01 bits per byte
SCALE_BITS = 16  # of a group of weights
NORM_BITS = 32  # of a weight of a norm
# Compressed bytes before base64, measured on texts with 65 and 2,000 different characters, and with
# up to 8,192 tokens.
BYTES_PER_CHARACTER = 3
BYTES_PER_TOKEN = 10
EMPTY_PAGE = 56_000  # more than the bytes of a page without its model


@dataclass(frozen=True)
class Fit:
    """The largest size whose page fits a limit, and the bytes of that page.

    is_by_text: a larger size would fit, and is not chosen for a text of this length.
    """

    size: float
    page_bytes: int
    is_by_text: bool = False

    def __str__(self) -> str:
        page = f"size {self.size:g}, whose page has about {in_units(self.page_bytes)}"
        return f"{page}; no larger one is chosen for so short a text" if self.is_by_text else page


def fit_sizes(request: Request, texts: Texts, page_limits: Sequence[int]) -> list[Fit]:
    """For each limit, in bytes, the largest size whose page fits it and whose text is long enough.

    Raises InputError if no size fits, or if a page cannot compute the model.
    """
    if not request.source.is_packaged:
        problem = "an edited folder computes this model, which a page cannot"
        raise InputError(problem, field="fit", value=in_units(page_limits[0]))
    length = sizing.text_length(request, texts)
    pages = {}
    for size in PAGE_SIZES:
        config = sizing.with_size(request, size, length).config(world_size=1)
        pages[size] = page_bytes(config, texts)
    fits = []
    for page_limit in page_limits:
        fitting = [size for size in PAGE_SIZES if pages[size] <= page_limit]
        if not fitting:
            problem = f"the page of the smallest size has {in_units(pages[PAGE_SIZES[0]])}"
            raise InputError(problem, field="fit", value=in_units(page_limit))
        size = sizing.largest_readable(fitting, request, length)
        fits.append(Fit(size, pages[size], is_by_text=size < fitting[-1]))
    return fits


def page_bytes(config: Any, texts: Texts) -> int:
    """Estimate the bytes of the page of a model with PLANNED_BITS. A page hardly ever has more."""
    n_rows, row_bytes = vocabulary_rows(texts)
    embedding = (config.vocab_size or n_rows) * config.n_embd
    n_embeddings = 1 if config.tie_embeddings else 2
    n_weights = config.matrix_parameters + n_embeddings * embedding
    n_norms = (4 * config.n_layer + 1) * config.n_embd if config.norm_weights else 0
    bits = (PLANNED_BITS + SCALE_BITS / GROUP) * n_weights
    bits += HEAD_BITS * embedding + NORM_BITS * n_norms
    model_bytes = bits / 8 + row_bytes * n_rows
    return EMPTY_PAGE + round(model_bytes * 4 / 3)  # base64 writes four bytes for three


def vocabulary_rows(texts: Texts) -> tuple[int, int]:
    """The number of different characters or tokens of texts, and the bytes of each in a page."""
    upload = texts["data"].upload
    assert upload is not None  # text_length has checked it
    if upload.train_tokens:
        return upload.vocabulary_size, BYTES_PER_TOKEN
    characters = set[str]()
    for channel in texts.values():
        if channel.upload is not None:
            characters.update(channel.upload.vocabulary)
    return max(len(characters), upload.vocabulary_size), BYTES_PER_CHARACTER
