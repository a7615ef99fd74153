"""Load a model directory without trusting it, or export one from a checkpoint.

The training folder of a model, which its SHA-256 identifies, computes the model. If that folder is
not here, the packaged folder can compute a model of Qwen3's architecture: the run has checked that
its folder and the packaged folder give the same logits.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from sm_nanogpt.entry_point import huggingface
from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.config import Config, make_config
from sm_nanogpt.entry_point.conversations import CHAT_TEMPLATE, END_OF_TURN, TURN
from sm_nanogpt.entry_point.device import has_fast_bfloat16
from sm_nanogpt.entry_point.errors import ConfigError, DataError, FormatError, TrainingError
from sm_nanogpt.entry_point.files import file_sha256, read_file, read_json
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.moments import earlier_moments, pop_moments, write_moments
from sm_nanogpt.entry_point.qwen3 import qwen3_config
from sm_nanogpt.entry_point.text import Tokenizer, read_tokenizer
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files.documents import MAX_BYTES, Count, Damaged, Document, Scalar, parse
from sm_nanogpt.launcher.files.storage import path_of
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.source import Source, find_source
from sm_nanogpt.launcher.values import plain

logger = logging.getLogger(__name__)

MAX_CONTEXT_TOKENS = 4096  # of a published model; a longer context takes more memory


class TrainingDocument(Document):
    """The content of training.json."""

    script_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    model_sha256: str = ""  # of the files kernels.py and model.py
    config: dict[str, Scalar | None]


class CheckpointState(TrainingDocument):
    """The state of a checkpoint, as far as an export needs it."""

    step: Count
    tokenizer: dict[str, JsonValue]
    end_of_text: str | None
    chats: bool


def load_model(
    directory: str | Path, settings: Settings | None = None, entry_point: Path | None = None
) -> tuple[GPT, Tokenizer]:
    """Load a model on the CPU, with float32 weights, and its tokenizer.

    A large model computes its products in bfloat16 if the CPU is fast at that, unless it was
    trained with precision=float32. A model of sm-nanogpt is computed by the folder that trained it:
    entry_point, or else the folder that its launch kept. The packaged folder, which is faster,
    replaces that folder if they have the same kernels.py and model.py. It also does, with a log, if
    that folder is gone and the model has Qwen3's architecture.

    Raises ServiceError if the directory has no model of sm-nanogpt. Raises InputError if it has a
    model of another tool that is damaged or not of Qwen3's architecture, or if the model needs the
    folder that trained it, which is not here.
    """
    directory = path_of(plain(directory))
    is_published = (directory / "config.json").exists() and not was_written_by_run(directory)
    try:
        if is_published:
            model, tokenizer = published_model(directory)
        else:
            model, tokenizer = own_model(directory, settings, entry_point)
    except (TrainingError, KeyError, TypeError, ValueError, OSError) as error:
        problem = f"{directory} does not load"
        if is_published:
            raise InputError(f"{problem}: not a model of the Qwen3 family: {error}") from None
        raise ServiceError(f"{problem}: {error}") from None

    fast = has_fast_bfloat16(torch.device("cpu"))
    if not is_edited(model) and model.config.precision != "float32" and fast:
        model.compute_dtype = torch.bfloat16
    return model, tokenizer


def is_edited(model: GPT) -> bool:
    """Return True if an edited folder, and not the packaged one, computes the model."""
    return type(model) is not GPT


def is_packaged(directory: Path) -> bool:
    """Return True if the packaged folder computes the model in a directory by default.

    This runs no code of the folder that trained the model. False if the directory does not load.
    """
    if not was_written_by_run(directory):
        return True
    try:
        return read_artefact(directory).is_packaged
    except ARTEFACT_ERRORS:
        return False


def was_written_by_run(directory: Path) -> bool:
    """Return True if a run of sm-nanogpt wrote a model directory."""
    return any((directory / name).exists() for name in ("SHA256SUMS", "training.json"))


@dataclass(frozen=True)
class Artefact:
    """The documents of a model directory that a run wrote."""

    config: Mapping[str, Any]  # config.json
    training: TrainingDocument
    tokenizer: Tokenizer

    @property
    def is_qwen3(self) -> bool:
        """True if the packaged folder would write this config.json for the hyperparameters."""
        try:
            config = packaged_config(self.training.config)
        except (ValueError, ConfigError):
            return False
        expected = qwen3_config(config, len(self.tokenizer), self.tokenizer.end)
        return all(self.config.get(key) == value for key, value in expected.items())

    @property
    def is_packaged(self) -> bool:
        """True if the packaged folder computes the same model as the folder that trained it."""
        return self.training.model_sha256 == huggingface.MODEL_SHA256 and self.is_qwen3


# The errors of reading a damaged Artefact.
ARTEFACT_ERRORS = (Damaged, DataError, OSError, ValueError)


def read_artefact(directory: Path) -> Artefact:
    """Read the documents of a model directory. Raises one of ARTEFACT_ERRORS."""
    training = parse(read_json(directory / "training.json"), TrainingDocument, "training.json")
    tokenizer = read_tokenizer(directory)
    chats = "chat_template" in read_json(directory / "tokenizer_config.json")
    tokenizer = Tokenizer(tokenizer.document, tokenizer.end_of_text, chats)
    return Artefact(read_json(directory / "config.json"), training, tokenizer)


def packaged_config(hyperparameters: Mapping[str, Any]) -> Config:
    """Make the packaged folder's Config, without hyperparameters that only an edited one has."""
    return make_config(Source.packaged().known_hyperparameters(hyperparameters))


def own_model(
    directory: Path, settings: Settings | None = None, entry_point: Path | None = None
) -> tuple[GPT, Tokenizer]:
    """Load the model and the tokenizer that a run wrote, by the folder that load_model says.

    Raises FormatError if the directory is not of a run, or if it is damaged.
    """
    try:
        check_sums(directory)
        artefact = read_artefact(directory)
    except ARTEFACT_ERRORS as error:
        raise FormatError(f"not a model directory of this script: {error}") from None

    training = artefact.training
    tokenizer = artefact.tokenizer
    source = Source.packaged()
    if not artefact.is_packaged or entry_point is not None:
        try:
            source = find_source(training.script_sha256, settings or load_settings(), entry_point)
        except InputError:
            if entry_point is not None or not artefact.is_qwen3:
                raise
            missing = f"the folder that trained it (SHA-256 {training.script_sha256[:12]}...)"
            substitute = "the packaged one, which gave the same logits when the model was written"
            problem = f"{directory}: {missing} is not on this machine; using {substitute}"
            logger.warning(problem, extra={"code": "name-folder"})
    with as_format_errors(source):
        return load_with(source, directory, training.config, len(tokenizer)), tokenizer


def load_with(
    source: Source, directory: Path, hyperparameters: Mapping[str, Any], vocab_size: int
) -> GPT:
    """Make a model by the code of a training folder, with the weights that a directory holds."""
    if source.is_packaged:
        config = packaged_config(hyperparameters)
        device = "meta"  # takes no memory until load_pretrained has compared shapes
    else:
        config = source.module("config").make_config(hyperparameters)
        device = "cpu"  # an edit may not support the meta device
    with torch.device(device):
        model: GPT = source.module("model").GPT(config, vocab_size)
    source.module("huggingface").load_pretrained(model, directory)
    return model.eval()


def published_model(directory: Path) -> tuple[GPT, Tokenizer]:
    """Load a model of Qwen3's architecture that another tool wrote, and its tokenizer.

    The directory may be from anyone. Its documents may raise errors such as KeyError, which
    load_model catches.
    """
    # The values of fine-tuning, which are among them, do not matter to a model that only answers.
    hyperparameters = huggingface.starting_values(directory, requested={})
    positions = read_json(directory / "config.json")["max_position_embeddings"]
    hyperparameters["block_size"] = min(int(positions), MAX_CONTEXT_TOKENS)
    tokenizer = tokenizer_of_published(directory)
    model = load_with(Source.packaged(), directory, hyperparameters, len(tokenizer))
    return model, tokenizer


def tokenizer_of_published(directory: Path) -> Tokenizer:
    """The tokenizer of a published model, which knows if it is for conversations, and all ids that
    end an answer."""
    tokenizer = read_tokenizer(directory)
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    template_file = directory / "chat_template.jinja"
    if template_file.exists():
        template = read_file(template_file, MAX_BYTES).decode()
    is_for_chats = bool(template) and {TURN, END_OF_TURN} <= tokenizer.special.keys()
    if is_for_chats and template != CHAT_TEMPLATE:
        logger.info("chat template: ChatML as here, not the model's own; answers may be worse")
    tokenizer = Tokenizer(tokenizer.document, tokenizer.end_of_text, is_for_chats)
    tokenizer.ends.update(generation_ends(directory))
    return tokenizer


def generation_ends(directory: Path) -> list[int]:
    """The ids that end an answer, by generation_config.json; [] if it names none."""
    file = directory / "generation_config.json"
    ids = read_json(file).get("eos_token_id") if file.exists() else None
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def check_sums(directory: Path) -> None:
    """Raise FormatError unless each file has its checksum in SHA256SUMS."""
    lines = read_file(directory / "SHA256SUMS", MAX_BYTES).decode("ascii").splitlines()
    for name in huggingface.MODEL_FILES:
        if f"{file_sha256(directory / name)}  {name}" not in lines:
            raise FormatError(f"{name} is damaged: its SHA-256 is not that of SHA256SUMS")


@contextlib.contextmanager
def as_format_errors(source: Source) -> Iterator[None]:
    """Raise FormatError in place of what the code of a training folder raises, but for OSError."""
    try:
        yield
    except (FormatError, OSError):
        raise
    except Exception as error:
        message = str(error)
        if not isinstance(error, (source.module("errors").TrainingError, Damaged)):
            message = f"{type(error).__name__}: {message}"
        raise FormatError(message) from None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run: its tensors, by name, and all else that a resumed run needs."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the newest intact checkpoint of a directory. Raises TrainingError if there is none."""
    # load_latest prints the checkpoints that it skips.
    with as_format_errors(Source.packaged()), contextlib.redirect_stdout(sys.stderr):
        loaded = Checkpoints(directory).load_latest()
    if loaded is None:
        raise TrainingError(f"no checkpoint in {directory}")
    tensors, state = loaded
    return Checkpoint(tensors, state)


def export_checkpoint(
    checkpoint: Checkpoint,
    model_dir: Path,
    settings: Settings,
    entry_point: Path | None = None,
) -> int:
    """Write a checkpoint as a model directory, with its moments; return its step.

    The training folder that made the checkpoint writes the model: entry_point, or else the folder
    that its launch kept. Raises FormatError if the folder cannot read the checkpoint, and
    InputError if the folder is not here.
    """
    with as_format_errors(Source.packaged()):
        state = parse(checkpoint.state, CheckpointState, name="its state")
    fields = ("script_sha256", "corpus_sha256", "step")  # of the state, for training.json
    training = {name: checkpoint.state.get(name) for name in fields}
    source = find_source(state.script_sha256, settings, entry_point)
    with as_format_errors(source):
        huggingface_module = source.module("huggingface")
        weights = huggingface_module.model_tensors(checkpoint.tensors)
        config = source.module("config").make_config(state.config)
        tokenizer = huggingface_module.Tokenizer(state.tokenizer, state.end_of_text)
        model = huggingface_module.with_weights(config, len(tokenizer), weights)
        huggingface_module.write_artefact(model_dir, model, tokenizer, training, state.chats)
    weights_by_step = pop_moments(dict(checkpoint.tensors))
    write_moments(model_dir, earlier_moments(weights_by_step, state.step, config.max_steps))
    return state.step
