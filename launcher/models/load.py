"""Load a model directory without trusting it, or export one from a checkpoint.

The training folder of a model, identified by its SHA-256, computes it. Without that folder, the
packaged model computes a model that is Qwen3's, since its run compared the logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from entry_point import huggingface
from entry_point.checkpoint import Checkpoints
from entry_point.config import Config, make_config
from entry_point.conversations import CHAT_TEMPLATE, END_OF_TURN, TURN
from entry_point.device import has_fast_bfloat16
from entry_point.errors import ConfigError, DataError, FormatError, TrainingError
from entry_point.files import file_sha256, read_file
from entry_point.model import GPT
from entry_point.text import Tokenizer, read_json, read_tokenizer
from launcher.errors import InputError, ServiceError
from launcher.files.documents import MAX_BYTES, Count, Damaged, Document, Scalar, parse
from launcher.files.storage import path_of
from launcher.settings import Settings, load_settings
from launcher.source import Source, find_source
from launcher.values import plain

logger = logging.getLogger(__name__)


class Training(Document):
    """training.json."""

    script_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    model_sha256: str = ""  # of kernels.py and model.py alone
    config: dict[str, Scalar | None]


class Saved(Training):
    """The state of a checkpoint."""

    step: Count
    tokenizer: dict[str, JsonValue]
    end_of_text: str | None
    chats: bool


def load_model(
    directory: str | Path, settings: Settings | None = None, entry_point: Path | None = None
) -> tuple[GPT, Tokenizer]:
    """Load a model (CPU, float32 weights) and its tokenizer.

    A large model computes its products in bfloat16 if the CPU is fast at that, unless it was
    trained with precision=float32. The folder that trained a model of ours computes it:
    entry_point, if given, else the one that its launch kept. The packaged model, which is faster,
    computes it if both have the same kernels.py and model.py; also if that folder is gone and the
    model is Qwen3's, which is logged.

    Raises ServiceError if the directory holds no model of sm-nanogpt; InputError if it holds one of
    another tool that is not of Qwen3's architecture or has other values than a model's, or if the
    model needs the folder that trained it, which is not here.
    """
    directory = path_of(plain(directory))
    published = (directory / "config.json").exists() and not is_ours(directory)
    try:
        if published:
            model, tokenizer = published_model(directory)
        else:
            model, tokenizer = own_model(directory, settings, entry_point)
    except (TrainingError, KeyError, TypeError, ValueError, OSError) as error:
        kind = "not a model of the Qwen3 family: " * published
        failure = InputError if published else ServiceError
        raise failure(f"{directory} does not load: {kind}{error}") from None
    fast = has_fast_bfloat16(torch.device("cpu"))
    if not is_edited(model) and model.config.precision != "float32" and fast:
        model.compute_dtype = torch.bfloat16
    return model, tokenizer


def is_edited(model: GPT) -> bool:
    """Whether an edited script computes the model, not the packaged one."""
    return type(model) is not GPT


def is_packaged(directory: Path) -> bool:
    """Whether the packaged script computes a model, unless another folder is named for it.

    It runs nothing of a folder that trained the model. False for a directory that does not load.
    """
    if not is_ours(directory):
        return True
    try:
        config = read_json(directory / "config.json")
        training = parse(read_json(directory / "training.json"), Training, "training.json")
        tokenizer = read_tokenizer(directory)
    except (Damaged, DataError, OSError, ValueError):
        return False
    is_same = training.model_sha256 == huggingface.MODEL_SHA256
    return is_same and is_shaped_as(config, training.config, tokenizer)


def is_ours(directory: Path) -> bool:
    """Whether a run of ours wrote a model directory, and no other tool."""
    return any((directory / name).exists() for name in ("SHA256SUMS", "training.json"))


def is_shaped_as(found: Mapping[str, Any], values: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the packaged config.py makes this config.json of a run's hyperparameters."""
    try:
        config = known_config(values)
    except (ValueError, ConfigError):
        return False
    expected = huggingface.hugging_face_config(config, len(tokenizer), tokenizer.end)
    return all(found.get(key) == value for key, value in expected.items())


def known_config(values: Mapping[str, Any]) -> Config:
    """The packaged script's Config; drops hyperparameters that an edited script added."""
    known = {f.name for f in dataclasses.fields(Config)}
    return make_config({name: value for name, value in values.items() if name in known})


def own_model(
    directory: Path, settings: Settings | None = None, entry_point: Path | None = None
) -> tuple[GPT, Tokenizer]:
    """The model and the tokenizer that a run wrote, as load_model.

    Raises FormatError if write_artefact did not write this directory, or it is damaged.
    """
    try:
        check_sums(directory)
        config = read_json(directory / "config.json")
        chats = "chat_template" in read_json(directory / "tokenizer_config.json")
        tokenizer = read_tokenizer(directory)
        tokenizer = Tokenizer(tokenizer.document, tokenizer.end_of_text, chats)
        training = parse(read_json(directory / "training.json"), Training, "training.json")
    except (Damaged, DataError, OSError, ValueError) as error:
        raise FormatError(f"not a model directory of this script: {error}") from None
    source, qwen3 = Source.packaged(), is_shaped_as(config, training.config, tokenizer)
    if not qwen3 or training.model_sha256 != huggingface.MODEL_SHA256 or entry_point is not None:
        try:
            source = find_source(training.script_sha256, settings or load_settings(), entry_point)
        except InputError:
            if entry_point is not None or not qwen3:
                raise
            folder = f"the folder that trained it (SHA-256 {training.script_sha256[:12]}...)"
            what = "the packaged one, which gave the same logits when the model was written"
            missing = f"{directory}: {folder} is not on this machine; using {what}"
            logger.warning(missing, extra={"code": "name-folder"})
    with errors_of(source):
        make = known_config if source.is_packaged else source.module("config").make_config
        # An edit may not support the meta device, on which load_pretrained compares shapes first.
        with torch.device("meta" if source.is_packaged else "cpu"):
            model: GPT = source.module("model").GPT(make(training.config), len(tokenizer))
        source.module("huggingface").load_pretrained(model, directory)
    return model.eval(), tokenizer


LONGEST_CONTEXT = 4096  # of a published model here, whose memory would grow with more


def published_model(directory: Path) -> tuple[GPT, Tokenizer]:
    """A model of Qwen3's architecture that another tool wrote. Errors as of load_model."""
    values = huggingface.starting_values(directory, {})
    longest = read_json(directory / "config.json")["max_position_embeddings"]
    config = known_config({**values, "block_size": min(int(longest), LONGEST_CONTEXT)})
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    if (own := directory / "chat_template.jinja").exists():
        template = read_file(own, MAX_BYTES).decode()
    tokenizer = read_tokenizer(directory)
    chats = bool(template) and {TURN, END_OF_TURN} <= tokenizer.special.keys()
    if chats and template != CHAT_TEMPLATE:
        logger.info("chat template: ChatML as here, not the model's own; answers may be worse")
    tokenizer = Tokenizer(tokenizer.document, tokenizer.end_of_text, chats)
    if (generation := directory / "generation_config.json").exists():
        ends = read_json(generation).get("eos_token_id") or []
        tokenizer.ends |= {*ends} if isinstance(ends, list) else {ends}
    with torch.device("meta"):
        model = GPT(config, len(tokenizer))
    huggingface.load_pretrained(model, directory)
    return model.eval(), tokenizer


def check_sums(directory: Path) -> None:
    """Raise FormatError unless each file has the checksum in SHA256SUMS."""
    lines = read_file(directory / "SHA256SUMS", MAX_BYTES).decode("ascii").splitlines()
    for name in huggingface.MODEL_FILES:
        if f"{file_sha256(directory / name)}  {name}" not in lines:
            raise FormatError(f"{name} is damaged: its SHA-256 is not that of SHA256SUMS")


@contextlib.contextmanager
def errors_of(source: Source) -> Iterator[None]:
    """Turn any exception of an edited folder, except OSError, into FormatError."""
    try:
        yield
    except (FormatError, OSError):
        raise
    except Exception as error:
        ours = isinstance(error, (source.module("errors").TrainingError, Damaged))
        kind = "" if ours else f"{type(error).__name__}: "
        raise FormatError(f"{kind}{error}") from None


def read_checkpoint(directory: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """The tensors and the state of the newest intact checkpoint. Raises TrainingError for none."""
    # load_latest prints which checkpoints it skips.
    with errors_of(Source.packaged()), contextlib.redirect_stdout(sys.stderr):
        loaded = Checkpoints(directory).load_latest()
    if loaded is None:
        raise TrainingError(f"no checkpoint in {directory}")
    return loaded


def export_checkpoint(
    checkpoint: tuple[Mapping[str, Tensor], Mapping[str, Any]],
    model_dir: Path,
    settings: Settings | None = None,
    entry_point: Path | None = None,
) -> int:
    """Export a checkpoint as a model directory, by the folder that trained it; return its step.

    Raises FormatError if the folder cannot read it, InputError if the folder is not here.
    """
    tensors, state = checkpoint
    with errors_of(Source.packaged()):
        saved = parse(state, Saved, "its state")
    training = {name: state.get(name) for name in ("script_sha256", "corpus_sha256", "step")}
    source = find_source(saved.script_sha256, settings or load_settings(), entry_point)
    with errors_of(source):
        export = source.module("huggingface")
        weights = export.model_tensors(tensors)
        config = source.module("config").make_config(saved.config)
        tokenizer = export.Tokenizer(saved.tokenizer, saved.end_of_text)
        model = export.with_weights(config, len(tokenizer), weights)
        export.write_artefact(model_dir, model, tokenizer, training, saved.chats)
    return saved.step
