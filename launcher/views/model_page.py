"""A model as one HTML page, which computes by itself and asks nothing of any network.

The page is model.html, whose script is engine.js, moments.js and model_page.js. A model is the
length of a header (uint32), the header (JSON), and the tensors. A saved page holds that as base64
of gzip, and so each earlier moment of its training, with an empty header; the page of `play` asks
the server for it. The codes of quantized weights take a byte each: gzip makes of them what they
hold.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Corpus, Tokenizer
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.storage import write_bytes
from sm_nanogpt.launcher.judge.anchors import as_tensor, longest_run
from sm_nanogpt.launcher.judge.evaluate import training_corpus
from sm_nanogpt.launcher.judge.rounding import Rounding, bits_per_byte, round_weights
from sm_nanogpt.launcher.judge.texts import TRAINING_BYTES
from sm_nanogpt.launcher.models.encoder import pattern_of
from sm_nanogpt.launcher.models.load import is_edited
from sm_nanogpt.launcher.models.moments import Moment, read_moments, spread
from sm_nanogpt.launcher.models.quantization import (
    BITS,
    GROUP,
    Quantized,
    quantize_model,
    with_quantized_weights,
)
from sm_nanogpt.launcher.models.sample import stream_samples
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.ids import content_of
from sm_nanogpt.launcher.values import megabytes
from sm_nanogpt.launcher.views.model_card import card_for

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("model.html")
ENGINE = Path(__file__).with_name("engine.js")
SLIDER = Path(__file__).with_name("moments.js")
SCRIPT = Path(__file__).with_name("model_page.js")
# White space as Unicode and Python's `regex` have it; JavaScript's \s has U+FEFF and lacks U+0085.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # groups of flags are new in JavaScript

SAMPLES, SAMPLE_TOKENS = 100, 500  # in which copies of the training text are looked for
COPIES_BYTES = 200  # what the card's line of copies adds to a page, and more
SLOW_PARAMETERS = 30_000_000  # with more, a browser writes slower than one reads
MOMENTS_BYTES = 20_000_000  # of a page to which moments are added unasked; mails take few more
UNMEASURED = "neither the cost of rounding nor copies are measured"  # without its text
GZIP = 31  # its header and its largest window, as zlib counts
ANY_CHARACTER = "[^]"  # in JavaScript


@dataclass(frozen=True)
class SavedPage:
    """What a saved page is: its bytes, how its weights are rounded, and the bytes of the longest
    run of its samples that its training text has, or None if that text is not here.

    `moments` says which steps of the training it shows, or why it shows none.
    """

    path: Path
    size: int
    rounding: Rounding
    copied: int | None
    moments: str


@dataclass(frozen=True)
class PageMoment:
    """The rounded weights of a step, and their loss in bits per byte, or None without a text."""

    step: int
    loss: float | None
    parameters: Mapping[str, Quantized | Tensor]


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
    """Write the model of a directory as save_page does, with all that is known of it here.

    name is what the user calls the model: a job, or a directory. job is the job that made it, or
    None if no job did; without its text, a warning says what is not measured.
    """
    return save_page(
        model,
        tokenizer,
        training_corpus(name, directory, settings, UNMEASURED),
        path,
        title=job.name or job.job_id if job else name,
        card=card_for(directory, job),
        bits=bits,
        limit=job.page_limit if job else None,
        moments=read_moments(directory, model),
        n_moments=n_moments,
    )


def save_page(
    model: GPT,
    tokenizer: Tokenizer,
    corpus: Corpus | None,
    path: Path,
    title: str,
    card: Mapping[str, str],
    bits: int | None = None,
    limit: int | None = None,
    moments: Sequence[Moment] = (),
    n_moments: int | None = None,
) -> SavedPage:
    """Write a model as one HTML page; `corpus` is the text that it has learned from.

    limit is what the page may have, in bytes: to stay below it, the weights may have fewer bits
    than they should, unless `bits` says how many. The page shows `n_moments` of the moments, of
    which the model is the last; by default as many as the limit, or else MOMENTS_BYTES, allows.

    Raises InputError if an edited folder computes the model, its tokenizer is of a kind that the
    page does not know, it cannot be so small, there are no moments to show, or the file cannot be
    written.
    """
    check_model(model)
    if n_moments is not None and n_moments > 1 and not moments:
        raise InputError(f"the run kept no moments; train one with moments={n_moments}")

    def write(
        rounding: Rounding, copies: str = "", page_moments: Sequence[PageMoment] = ()
    ) -> bytes:
        facts = {**card, "weights": str(rounding), "copies": copies}
        facts = {label: text for label, text in facts.items() if text}
        return page_of(model, rounding.parameters, tokenizer, title, facts, page_moments).encode()

    rounding = round_weights(model, corpus, bits)
    if limit is not None and bits is None:
        rounding = round_within(limit, rounding, model, corpus, write)
    copied, copies = None, ""
    if corpus is not None:
        rounded = with_quantized_weights(model, rounding.parameters)
        copied = longest_copy(rounded, tokenizer, corpus)
        copies = f"at most {copied} bytes in a row of {SAMPLES} samples stand in its text"
    content = write(rounding, copies)
    page_limit = MOMENTS_BYTES if limit is None else limit
    n_shown = page_limit // len(content) if n_moments is None else n_moments
    shown = spread(moments, n_shown)
    rounded_moments: dict[int, PageMoment] = {}  # by their step, as fewer may fit
    while len(shown) > 1:
        for moment in shown[:-1]:
            if moment.step not in rounded_moments:
                rounded_moments[moment.step] = round_moment(moment, corpus, rounding.bits)
        end = PageMoment(shown[-1].step, rounding.rounded_loss, rounding.parameters)
        earlier = [rounded_moments[moment.step] for moment in shown[:-1]]
        larger = write(rounding, copies, [*earlier, end])
        if n_moments is not None or len(larger) <= page_limit:
            content = larger
            break
        shown = spread(moments, len(shown) - 1)
    write_bytes(str(path), content)
    description = describe_moments(
        [moment.step for moment in shown], len(moments), page_limit if n_moments is None else None
    )
    return SavedPage(path, len(content), rounding, copied, description)


def round_moment(moment: Moment, corpus: Corpus | None, bits: int) -> PageMoment:
    """A moment in so many bits a weight."""
    parameters = quantize_model(moment.model, bits)
    loss = None
    if corpus is not None:
        loss = bits_per_byte(with_quantized_weights(moment.model, parameters), corpus)
    return PageMoment(moment.step, loss, parameters)


def describe_moments(steps: Sequence[int], n_kept: int, limit: int | None) -> str:
    """Which of the kept moments a page shows; not all, if its limit, in bytes, is too small."""
    if not n_kept:
        return "the run kept none"
    shown = "the end alone"
    if len(steps) > 1:
        shown = f"of steps {', '.join(map(str, steps))}"
    if len(steps) == n_kept:
        return shown
    if limit is not None:
        return f"{shown}, as all {n_kept} would make over {megabytes(limit)}"
    return f"{shown}; the run kept {n_kept}"


def round_within(
    limit: int,
    rounding: Rounding,
    model: GPT,
    corpus: Corpus | None,
    write: Callable[[Rounding], bytes],
) -> Rounding:
    """The weights as they are rounded, or in fewer bits, so that their page stays below a limit.

    `write` makes the page. Raises InputError if the fewest bits are too many.
    """
    size = len(write(rounding)) + COPIES_BYTES
    while size > limit:
        excess = f"with {rounding.bits} bits a weight the page has {megabytes(size)}"
        if rounding.bits == min(BITS):
            problem = f"{excess}, and its job was launched for {megabytes(limit)}"
            raise InputError(problem, "bits-over-limit")
        logger.info(f"{excess}, and its job was launched for {megabytes(limit)}: fewer bits")
        rounding = round_weights(model, corpus, rounding.bits - 1)
        size = len(write(rounding)) + COPIES_BYTES
    return rounding


def longest_copy(model: GPT, tokenizer: Tokenizer, corpus: Corpus) -> int:
    """The bytes of the longest run of a model's samples that its training text has too."""
    samples = [""] * SAMPLES
    for pieces in stream_samples(model, tokenizer, None, SAMPLE_TOKENS, SAMPLES):
        samples = [sample + piece for sample, piece in zip(samples, pieces, strict=True)]
    training = as_tensor(content_of(corpus.train, tokenizer.words, TRAINING_BYTES))
    return longest_run(training, [as_tensor(sample.encode()) for sample in samples])


def page_of(
    model: GPT,
    parameters: Mapping[str, Quantized | Tensor],
    tokenizer: Tokenizer,
    title: str,
    card: Mapping[str, str],
    moments: Sequence[PageMoment] = (),
) -> str:
    """The page of a model with these parameters; `card` has what the page says of the model, by
    label, and the last of the moments, if there are some, is the model.

    Raises InputError if JavaScript cannot split text as the tokenizer does.
    """
    header = {
        **facts_of(model, tokenizer, title, card),
        **shape_of(model, parameters),
        "tokenizer": tokenizer_of(tokenizer),
        "slow": count_parameters(model) > SLOW_PARAMETERS,
        "moments": [{"step": moment.step, "loss": moment.loss} for moment in moments],
    }
    blocks = [packed_block("model", pack(header, parameters))]
    for moment in moments[:-1]:
        blocks.append(packed_block("moment", pack({}, moment.parameters)))
    return page_with(blocks)


def packed_block(kind: str, content: bytes) -> str:
    """A block of the page with this content, compressed, and its hash."""
    packed = compress(content)
    attribute = f'data-sha256="{hashlib.sha256(packed).hexdigest()}"'
    return block_of(kind, attribute, base64.b64encode(packed).decode())


def served_page(n_models: int) -> str:
    """The page of `play`, which asks the server for its models by their numbers."""
    addresses = [f"page/model/{number}" for number in range(n_models)]
    blocks = [block_of("model", f'data-address="{address}"') for address in addresses]
    return page_with(blocks, "connect-src 'self'")


def served_model(
    model: GPT, tokenizer: Tokenizer, name: str, title: str, card: Mapping[str, str]
) -> bytes:
    """A model as the page of `play` reads it: with its exact weights, for the browser to compute.

    One that the browser cannot compute, or only slowly, has none: the page asks the server's API
    for its text, by its name.
    """
    facts = facts_of(model, tokenizer, title, card)
    try:
        check_model(model)
        if count_parameters(model) > SLOW_PARAMETERS:
            raise InputError(f"it has over {SLOW_PARAMETERS:,} parameters")
        encoding = tokenizer_of(tokenizer)
    except InputError as error:
        served = {"name": name, "reason": str(error)}
        return pack({**facts, "tokenizer": {"unit": tokenizer.unit}, "served": served}, {})
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return pack({**facts, **shape_of(model, weights), "tokenizer": encoding}, weights)


def check_model(model: GPT) -> None:
    """Raises InputError if an edited folder computes the model."""
    if is_edited(model):
        raise InputError("an edited folder computes this model, which a page cannot")


def count_parameters(model: GPT) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def facts_of(
    model: GPT, tokenizer: Tokenizer, title: str, card: Mapping[str, str]
) -> dict[str, Any]:
    """What the page says of a model."""
    return {
        "title": title,
        "card": dict(card),
        "n_parameters": count_parameters(model),
        "chats": tokenizer.chats,
    }


def shape_of(model: GPT, parameters: Mapping[str, Quantized | Tensor]) -> dict[str, Any]:
    """What engine.js needs to read and to compute the parameters."""
    return {
        "config": config_of(model),
        "group": GROUP,
        "tensors": [
            {
                "name": name,
                "size": tensor.shape.numel(),
                "quantized": isinstance(tensor, Quantized),
            }
            for name, tensor in parameters.items()
        ],
    }


def block_of(kind: str, attribute: str, content: str = "") -> str:
    """A block of the page for a `model`, or for a `moment` of the training of the one before."""
    return f'<script type="text/plain" class="{kind}" {attribute}>{content}</script>'


def page_with(blocks: Sequence[str], *policies: str) -> str:
    """The page with these blocks of models; it may do what the policies allow besides."""
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("/*engine*/", ENGINE.read_text(encoding="utf-8"))
    page = page.replace("/*moments*/", SLIDER.read_text(encoding="utf-8"))
    page = page.replace("/*page*/", SCRIPT.read_text(encoding="utf-8"))
    (inline,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    policy = [
        "default-src 'none'",
        f"script-src '{hash_of(inline)}'",
        f"style-src '{hash_of(style)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *policies,
    ]
    head, separator, body = page.partition(inline)
    head = head.replace("{policy}", "; ".join(policy)).replace("{models}", "\n".join(blocks))
    return head + separator + body


def hash_of(content: str) -> str:
    """The hash by which a Content-Security-Policy allows an inline script or style."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def config_of(model: GPT) -> dict[str, float]:
    """The shape of a model, as engine.js reads it."""
    config = model.config
    return {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_kv_head": config.kv_heads,
        "head_dim": config.head_width,
        "n_embd": config.n_embd,
        "hidden_dim": config.hidden_dim,
        "block_size": config.block_size,
        "vocab_size": model.embed.num_embeddings,
        "rope_theta": config.rope_theta,
    }


def tokenizer_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What encodes and decodes text in engine.js. Bytes are characters of Latin-1.

    `merges` holds three ids for each merge: of both parts, and of the whole.
    """
    document = tokenizer.document
    is_bpe = tokenizer.unit == "tokens"
    pattern = pattern_of(document) if is_bpe else None
    if is_bpe and (pattern is None or document["model"].get("ignore_merges")):
        raise InputError("a page cannot split text as the tokenizer of this model does")
    merges: list[int] = []
    if is_bpe:
        vocab = document["model"]["vocab"]
        for pair in document["model"]["merges"]:
            first, second = pair.split(" ") if isinstance(pair, str) else pair
            merges += [vocab[first], vocab[second], vocab[first + second]]
    return {
        "unit": tokenizer.unit,
        "words": [word.decode("latin-1") for word in tokenizer.words],
        "merges": merges,
        "pattern": ANY_CHARACTER if pattern is None else javascript_pattern(pattern),
        "normalizes": document["normalizer"] is not None,
        "special": tokenizer.special,
        "start": tokenizer.start,
        "ends": [id for id in tokenizer.ends if id is not None],
    }


def javascript_pattern(pattern: str) -> str:
    """One of the encoder's PATTERNS as an expression of JavaScript with the flag u."""
    pattern = pattern.replace(CONTRACTIONS, "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])")
    pattern = pattern.replace(r"[^\s", f"[^{SPACE}").replace(r"\S", f"[^{SPACE}]")
    return pattern.replace(r"\s", f"[{SPACE}]")


def pack(header: Mapping[str, Any], parameters: Mapping[str, Quantized | Tensor]) -> bytes:
    """The header and the tensors."""
    description = json.dumps(header, ensure_ascii=False).encode()
    parts = [struct.pack("<I", len(description)), description]
    for parameter in parameters.values():
        if isinstance(parameter, Quantized):
            parts += [parameter.scales.numpy().tobytes(), parameter.codes.numpy().tobytes()]
        else:
            parts.append(parameter.numpy().tobytes())
    return b"".join(parts)


def compress(content: bytes) -> bytes:
    # Codes repeat, but not in sequences: without a search for those, the file is 6 % smaller.
    gzip = zlib.compressobj(9, zlib.DEFLATED, GZIP, 9, zlib.Z_FILTERED)
    return gzip.compress(content) + gzip.flush()
