"""Load a model directory without trusting it, or export one from a checkpoint.

Called by `launcher.artefacts`, to check downloads, and by `launcher.sampling`. The script that
trained a model, identified by its SHA-256, computes it. Without that script, the packaged model
computes a model that is Qwen3's, since its run compared the logits. Only local scripts that were
launched or named here are executed, never code or a path from S3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from entry_point import train
from entry_point.train import GPT, CheckpointError, Config, ConfigError, FormatError
from launcher.documents import Count, Damaged, Document, Scalar, open_file, parse, read_file
from launcher.errors import InputError
from launcher.job import load_script

ACTIVATION = train.activation_name()
LARGEST_TOKENIZER = 1 << 25  # bytes
LARGEST_HEADER = 1 << 20  # bytes; a model of 1,000 layers has half of that
T = TypeVar("T")
# Maps the SHA-256 of a script to the local file that may be it.
FindScript = Callable[[str], Path | None]
logger = logging.getLogger(__name__)


class TokenizerConfig(Document):
    """tokenizer_config.json."""

    eos_token: str | None = None


class Training(Document):
    """training.json."""

    script_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    config: dict[str, Scalar | None]


class Saved(Training):
    """The state of a checkpoint."""

    step: Count
    tokenizer: dict[str, JsonValue]
    end_of_text: str | None


def script_module(sha256: str, find_script: FindScript) -> ModuleType:
    """Import the script with this SHA-256: the packaged one or the one that is found.

    Raises:
        InputError: neither has it.
    """
    if sha256 == train.script_sha256():
        return train
    script = find_script(sha256)
    source = script.read_bytes() if script is not None and script.is_file() else b""
    if hashlib.sha256(source).hexdigest() != sha256:
        but = f"and {script} is another one" if source else "which is not here"
        raise InputError(
            f"the model belongs to the script that trained it (SHA-256 {sha256[:12]}...), {but};"
            " name it with --entry-point FILE"
        )
    assert script is not None
    return load_script(script, source)


def known_config(values: Mapping[str, Any]) -> Config:
    """The packaged script's Config; drops hyperparameters that an edited script added."""
    known = {f.name for f in dataclasses.fields(Config)}
    return train.make_config({name: value for name, value in values.items() if name in known})


def load_artefact(
    directory: Path, find_script: FindScript = lambda sha256: None, own_script: bool = False
) -> tuple[GPT, train.Tokenizer]:
    """Load the model (CPU, float32, eval mode) and the tokenizer of a model directory.

    The script that trained the model computes it. Without that script, the packaged model computes
    a model that is Qwen3's, and logs this, unless own_script is set.

    Raises:
        FormatError: write_artefact did not write this directory, or it is damaged.
        InputError: the model needs the script that trained it, and that is not here.
    """
    try:
        check_sums(directory)
        train.read_safetensors_header(directory / "model.safetensors", LARGEST_HEADER)
        found = read(directory, "config", dict[str, JsonValue])
        content = read_file(directory / "tokenizer.json", LARGEST_TOKENIZER)
        end = read(directory, "tokenizer_config", TokenizerConfig).eos_token
        tokenizer = train.Tokenizer(parse(content, dict[str, Any], "tokenizer.json"), end)
        training = read(directory, "training", Training)
        sha256 = training.script_sha256
        tensors, _ = train.read_safetensors(directory / "model.safetensors")
        script: ModuleType = train
        try:
            script = script_module(sha256, find_script)
        except InputError:
            same = (found.get("model_type"), found.get("hidden_act")) == ("qwen3", ACTIVATION)
            if own_script or not same:
                raise
            log_absent_script(sha256)
        if script is train:
            config = known_config(training.config)
            expected = train.hugging_face_config(config, len(tokenizer), tokenizer.end)
    except OSError as error:
        name = Path(error.filename or directory).name
        raise FormatError(f"{name}: {error.strerror}") from None
    except (Damaged, ValueError, ConfigError, train.DataError) as error:
        raise FormatError(
            f"{directory.name}: not a model directory of this script ({error})"
        ) from None
    if script is train:
        for key, value in expected.items():
            if found.get(key) != value:
                raise FormatError(
                    f"config.json and training.json disagree: {key} is {found.get(key)!r},"
                    f" not {value!r}"
                )
    with errors_of(script):
        if script is not train:
            config = script.make_config(training.config)
        edited = found["model_type"] != "qwen3"
        return fill(script, config, tensors, edited, len(tokenizer)), tokenizer


@lru_cache  # once, though a model is checked and then loaded
def log_absent_script(sha256: str) -> None:
    logger.warning(
        f"the script that trained this model (SHA-256 {sha256[:12]}...) is not on this machine;"
        " using the packaged script, which gave the same logits when the model was written"
        " (--entry-point FILE names another)"
    )


def read(directory: Path, name: str, kind: type[T]) -> T:
    return parse(read_file(directory / f"{name}.json"), kind, f"{name}.json")


def check_sums(directory: Path) -> None:
    """Raise FormatError unless each file has the checksum in SHA256SUMS."""
    lines = read_file(directory / "SHA256SUMS").decode("ascii").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in train.MODEL_FILES:
        with open_file(directory / name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sums.get(name):
                raise FormatError(f"{name} is damaged: its SHA-256 is not that of SHA256SUMS")


@contextlib.contextmanager
def errors_of(script: ModuleType) -> Iterator[None]:
    """Turn any exception of an edited script, except OSError, into FormatError."""
    try:
        yield
    except (FormatError, OSError):
        raise
    except Exception as error:
        ours = isinstance(error, (script.TrainingError, Damaged))
        words = "" if ours else f"{type(error).__name__}: "
        raise FormatError(f"{words}{error}") from None


@torch.no_grad()
def fill(
    script: ModuleType,
    config: Any,
    tensors: Mapping[str, Tensor],
    edited: bool,
    vocabulary_size: int,
) -> GPT:
    """Create the script's model with the tensors of a file.

    Raises:
        FormatError: their names, types or shapes do not fit, or a value is not finite.
    """

    def exported(model: GPT) -> dict[str, Tensor]:
        weights = model.state_dict()
        return weights if edited else script.to_hugging_face(weights, config)

    # Check the sizes before allocating memory. (An edited script may not support the meta device;
    # its configuration is the one that it trained.)
    with torch.device("meta") if script is train else contextlib.nullcontext():
        shapes = exported(script.GPT(config, vocabulary_size))
    for name in sorted(shapes.keys() | tensors.keys()):
        expected, found = (
            f"{str(t[name].dtype).removeprefix('torch.')} {list(t[name].shape)}"
            if name in t
            else "nothing"
            for t in (shapes, tensors)
        )
        if expected != found:
            raise FormatError(f"model.safetensors: {name} should be {expected} and is {found}")
    model: GPT = script.GPT(config, vocabulary_size)
    for name, tensor in exported(model).items():  # views of the model's weights, and norms of ones
        ones = not edited and name.endswith("norm.weight") and not config.norm_weights
        if ones and not bool((tensors[name] == 1).all()):
            raise FormatError(f"model.safetensors is of another kind: {name} is not all ones")
        # The mask of an edited model may hold infinities.
        if bool(tensors[name].isnan().any() if edited else not tensors[name].isfinite().all()):
            raise FormatError(f"model.safetensors: {name} holds numbers that are not finite")
        tensor.copy_(tensors[name])
    return model.eval()


def export_checkpoint(
    checkpoint_dir: Path, model_dir: Path, find_script: FindScript = lambda sha256: None
) -> int:
    """Export the newest intact checkpoint as a model directory; return its step.

    The script that trained the model exports it.

    Raises:
        CheckpointError: there is no checkpoint.
        FormatError: the script cannot read it.
        InputError: the script is not here.
    """
    with errors_of(train), contextlib.redirect_stdout(sys.stderr):  # it prints which it skips
        loaded = train.Checkpoints(checkpoint_dir).load_latest()
    if loaded is None:
        raise CheckpointError(f"no checkpoint in {checkpoint_dir}")
    tensors, state = loaded
    with errors_of(train):
        saved = parse(state, Saved, "its state")
    training = {name: state.get(name) for name in ("script_sha256", "corpus_sha256", "step")}
    script = script_module(saved.script_sha256, find_script)
    with errors_of(script):
        weights = script.model_tensors(tensors)
        config = script.make_config(saved.config)
        tokenizer = script.Tokenizer(saved.tokenizer, saved.end_of_text)
        model = script.with_weights(config, len(tokenizer), weights)
        script.write_artefact(model_dir, model, tokenizer, training)
    return saved.step
