"""Make the HTML page of a model, which computes by itself and needs no network.

The page is model.html, with the scripts engine.js, moments.js, and model_page.js. A model is stored
as the length of a header (uint32), the header (JSON), and the tensors. A saved page has that as
base64 of gzip. It has each earlier moment of the training in the same form, with an empty header.
The page of `play` asks the server for model and moments. A code of a quantized weight takes a whole
byte: gzip removes the unused bits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.models.encoder import pattern_of
from sm_nanogpt.launcher.models.load import is_edited
from sm_nanogpt.launcher.models.moments import Moment
from sm_nanogpt.launcher.models.quantization import GROUP, Quantized

if TYPE_CHECKING:  # play.py imports this module
    from sm_nanogpt.launcher.views.play import ServedModel

TEMPLATE = Path(__file__).with_name("model.html")
# The scripts of the page, by the comment in the template that each replaces.
SCRIPTS = {
    "/*engine*/": Path(__file__).with_name("engine.js"),
    "/*moments*/": Path(__file__).with_name("moments.js"),
    "/*page*/": Path(__file__).with_name("model_page.js"),
}
# White space as Unicode and Python's `regex` have it; JavaScript's \s has U+FEFF and lacks U+0085.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # older JavaScript has no groups with flags
# The same without flags. Without regard to case, the long s of old prints is also an s.
CONTRACTIONS_BY_CASE = "'(?:[sS\u017ftTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"

SLOW_PARAMETERS = 30_000_000  # with more, a browser writes more slowly than people read
GZIP_WBITS = 31  # of zlib: the header of gzip, and the largest window
ANY_CHARACTER = "[^]"  # in JavaScript


@dataclass(frozen=True)
class PageMoment:
    """The rounded weights of a moment of the training.

    loss is in bits per byte; None if there is no text to measure it. step and generation are as in
    Moment.
    """

    step: int
    loss: float | None
    parameters: Mapping[str, Quantized | Tensor]
    generation: int | None = None


def page_of(
    model: GPT,
    parameters: Mapping[str, Quantized | Tensor],
    tokenizer: Tokenizer,
    title: str,
    card: Mapping[str, str],
    moments: Sequence[PageMoment] = (),
) -> str:
    """Make the saved page of a model with these parameters.

    card has what the page says of the model, by label. The last of the moments, if there are any,
    is the model itself. Raises InputError if JavaScript cannot split text as the tokenizer does.
    """
    header = {
        **facts_of(model, tokenizer, title, card),
        **layout_of(model, parameters),
        "tokenizer": tokenizer_of(tokenizer),
        "slow": count_parameters(model) > SLOW_PARAMETERS,
        "moments": [facts_of_moment(moment, moment.loss) for moment in moments],
    }
    blocks = [packed_block("model", pack(header, parameters))]
    for moment in moments[:-1]:
        blocks.append(packed_block("moment", pack({}, moment.parameters)))
    return page_with(blocks)


def packed_block(kind: str, content: bytes) -> str:
    """A block of the page with a content, which is compressed, and its hash."""
    packed = compress(content)
    attribute = f'data-sha256="{hashlib.sha256(packed).hexdigest()}"'
    return block_of(kind, attribute, base64.b64encode(packed).decode())


def served_page(n_models: int) -> str:
    """Make the page of `play`, which asks the server for n_models models by their numbers."""
    addresses = [f"page/model/{number}" for number in range(n_models)]
    blocks = [block_of("model", f'data-address="{address}"') for address in addresses]
    return page_with(blocks, "connect-src 'self'")


def pack_for_page(served: ServedModel) -> bytes:
    """Pack a model with its exact weights, for the page of `play`, which computes it.

    The header lists the moments of the training, which the page asks the server for. The last one
    is the model. If the browser cannot compute the model, or only slowly, no weights are packed:
    the page then asks the server's API for text, by the name of the model.
    """
    model = served.model
    tokenizer = served.tokenizer
    facts = facts_of(model, tokenizer, served.title, served.card)
    try:
        check_model(model)
        if count_parameters(model) > SLOW_PARAMETERS:
            raise InputError(f"it has over {SLOW_PARAMETERS:,} parameters")
        encoding = tokenizer_of(tokenizer)
    except InputError as error:
        header = {
            **facts,
            "tokenizer": {"unit": tokenizer.unit},
            "served": {"name": served.name, "reason": str(error)},
        }
        return pack(header, {})

    weights = weights_of(model)
    header = {
        **facts,
        **layout_of(model, weights),
        "tokenizer": encoding,
        "moments": [facts_of_moment(moment, None) for moment in served.moments],
    }
    return pack(header, weights)


def served_moment(model: GPT) -> bytes:
    """Pack the exact weights of a moment, for the page of `play`."""
    return pack({}, weights_of(model))


def weights_of(model: GPT) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_model(model: GPT) -> None:
    """Raise InputError if an edited folder computes the model."""
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


def facts_of_moment(moment: Moment | PageMoment, loss: float | None) -> dict[str, Any]:
    """What the page says of a moment."""
    return {"generation": moment.generation, "step": moment.step, "loss": loss}


def layout_of(model: GPT, parameters: Mapping[str, Quantized | Tensor]) -> dict[str, Any]:
    """What engine.js needs to read the packed parameters, and to compute with them."""
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
    """A block of the page. kind is `model`, or `moment` for a moment of the model before it."""
    return f'<script type="text/plain" class="{kind}" {attribute}>{content}</script>'


def page_with(blocks: Sequence[str], *policies: str) -> str:
    """Make the page with these blocks. Its security policy forbids all requests, but for those that
    `policies` allow."""
    page = TEMPLATE.read_text(encoding="utf-8")
    for comment, script in SCRIPTS.items():
        page = page.replace(comment, script.read_text(encoding="utf-8"))
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
    """The shape of a model, in the fields that engine.js reads."""
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
    """The tokenizer, in the fields that engine.js reads. Bytes are written as Latin-1 characters.

    `merges` has three ids for each merge: those of both parts, and that of the whole. Raises
    InputError if a page cannot split text as the tokenizer does.
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
    """Translate one of the encoder's PATTERNS for JavaScript, with the flag u."""
    pattern = pattern.replace(CONTRACTIONS, CONTRACTIONS_BY_CASE)
    pattern = pattern.replace(r"[^\s", f"[^{SPACE}").replace(r"\S", f"[^{SPACE}]")
    return pattern.replace(r"\s", f"[{SPACE}]")


def pack(header: Mapping[str, Any], parameters: Mapping[str, Quantized | Tensor]) -> bytes:
    """Pack a header and the tensors of a model, as engine.js reads them."""
    description = json.dumps(header, ensure_ascii=False).encode()
    parts = [struct.pack("<I", len(description)), description]
    for parameter in parameters.values():
        if isinstance(parameter, Quantized):
            parts += [parameter.scales.numpy().tobytes(), parameter.codes.numpy().tobytes()]
        else:
            parts.append(parameter.numpy().tobytes())
    return b"".join(parts)


def compress(content: bytes) -> bytes:
    # The codes of weights are frequent or rare, and form no repeated sequences. Z_FILTERED hardly
    # searches for these: the file is 6 % smaller.
    gzip = zlib.compressobj(9, zlib.DEFLATED, GZIP_WBITS, 9, zlib.Z_FILTERED)
    return gzip.compress(content) + gzip.flush()
