"""How a run is saved as a checkpoint, and how it continues from one; all ranks do so together."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import huggingface
from .config import check_resumable
from .errors import TrainingError, counted, log
from .moments import pop_moments

if TYPE_CHECKING:
    from .trainer import Trainer


def live_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that training changes, by name: the tensors themselves, and no copies.

    Those of the model are its parameters, and the buffers that an edited one may have. What
    another rank has is on the meta device.
    """
    parts = {
        "model": trainer.model.state_dict(),
        "teacher": {} if trainer.teacher is None else trainer.teacher.state_dict(),
        "optimizer": trainer.optimizer.state(),
    }
    tensors = {}
    for part, named_tensors in parts.items():
        for name, tensor in named_tensors.items():
            tensors[f"{part}.{name}"] = tensor
    return tensors


def state_of(trainer: Trainer, loss_sum: float) -> dict[str, Any]:
    """Everything else that a checkpoint holds; loss_sum is that of all world_size ranks."""
    group, corpus, container = trainer.group, trainer.corpus, trainer.container
    on_cpu = group.device.type == "cpu"
    has_best = trainer.best_step is not None
    return {
        "step": trainer.step,
        "best_step": trainer.best_step,
        "best_val_loss": trainer.best_val_loss if has_best else None,
        "evaluated_step": trainer.evaluated_step,
        "config": dataclasses.asdict(trainer.config),
        "script_sha256": huggingface.SCRIPT_SHA256,
        "tokenizer": corpus.tokenizer.document,
        "end_of_text": corpus.tokenizer.end_of_text,
        "chats": corpus.is_chat,
        "corpus_sha256": corpus.sha256,
        "data": str(container.training),
        "validation": str(container.validation or ""),
        "init_from": str(container.init_from or ""),
        "teacher": str(container.teacher or ""),
        "metrics": trainer.metrics,
        "loss_sum": loss_sum,
        "world_size": group.world_size,
        "processes": group.local_world_size if on_cpu else 0,
        "steps_summed": trainer.steps_summed,
        "scaler": trainer.scaler.state_dict(),
    }


# -- saving ----------------------------------------------------------------------------------------


def save_checkpoint(trainer: Trainer) -> None:
    """Every rank calls it at the same step, and rank 0 writes.

    Raises TrainingError, and writes nothing, if the loss or the weights are not finite, or the
    ranks have other weights.
    """
    trainer.group.synchronize()
    loss_sum = float(trainer.group.sum_(trainer.loss_sum.clone()))
    check_weights(trainer, loss_sum)

    tensors = live_tensors(trainer)
    if trainer.is_main:
        for name, tensor in trainer.best.items():
            tensors[f"best.{name}"] = tensor
        tensors |= trainer.moments.tensors()
        contents = gather(trainer, tensors)
        trainer.checkpoints.save(tensors, state_of(trainer, loss_sum), contents)
    else:
        for _ in gather(trainer, tensors):
            pass
    trainer.saved_step = trainer.step
    if not gc.isenabled():
        gc.collect()


def check_weights(trainer: Trainer, loss_sum: float) -> None:
    """Raises TrainingError unless loss and weights are finite, and these are those of rank 0."""
    trainer.check_loss(loss_sum)
    weights = list(trainer.model.parameters())
    are_finite = all(bool(weight.isfinite().all()) for weight in weights)
    trainer.check_finite(are_finite, "the weights are")
    unlike_ranks = trainer.group.ranks_unlike_first(weights)
    if unlike_ranks:
        names = ", ".join(f"rank {rank}" for rank in unlike_ranks)
        raise TrainingError(
            f"at step {trainer.step} the weights of {names} are not those of rank 0;"
            f" {trainer.newest_checkpoint()}; unlike hosts may round differently, so use hosts of"
            " one kind"
        )


def gather(trainer: Trainer, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Each of the live_tensors from the rank that has it; all ranks go through them together."""
    for name, tensor in tensors.items():
        owner = trainer.optimizer.owners.get(name.removeprefix("optimizer."))
        yield tensor if owner is None else trainer.group.broadcast_(tensor, owner)


# -- resuming --------------------------------------------------------------------------------------


def restore(trainer: Trainer) -> None:
    """Loads rank 0's newest checkpoint, or else a model to start from, on every rank."""
    init_from = trainer.container.init_from
    live = live_tensors(trainer)
    state = None
    if trainer.is_main:
        loaded = trainer.checkpoints.load_latest()
        if loaded is not None:
            saved, state = loaded
            live = load_checkpoint(trainer, live, saved, state)
        elif init_from is not None:
            huggingface.load_pretrained(trainer.model, init_from)
            log(f"started from the weights in {init_from}")
    state = trainer.group.broadcast(state)
    for tensor in live.values():
        trainer.group.broadcast_(tensor)
    if state is not None:
        continue_from(trainer, state)


def load_checkpoint(
    trainer: Trainer, live: dict[str, Tensor], saved: dict[str, Tensor], state: dict[str, Any]
) -> dict[str, Tensor]:
    """On rank 0: copies the saved tensors into the live ones, and takes what is for it alone.

    Returns the live tensors; in place of those that only another rank has, the saved ones, to be
    sent. Raises ConfigError if this run cannot continue that one.
    """
    config = dataclasses.asdict(trainer.config)
    check_resumable(state, {"config": config, "corpus_sha256": trainer.corpus.sha256})
    trainer.metrics = state.pop("metrics")
    del state["tokenizer"]  # other ranks need neither, and both may be large
    for name in [name for name in saved if name.startswith("best.")]:
        trainer.best[name.removeprefix("best.")] = saved.pop(name)
    trainer.moments.weights = pop_moments(saved)
    huggingface.load_tensors(live, saved)
    return {name: saved[name] if tensor.is_meta else tensor for name, tensor in live.items()}


def continue_from(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Continues from the state of a checkpoint, and says what is not as it was."""
    trainer.step = trainer.saved_step = state["step"]
    trainer.steps_summed = state["steps_summed"]
    if state["scaler"]:  # empty in other types
        trainer.scaler.load_state_dict(state["scaler"])
    is_same_script = state["script_sha256"] == huggingface.SCRIPT_SHA256
    if is_same_script and state["best_step"] is not None:
        trainer.best_step = state["best_step"]
        trainer.best_val_loss = state["best_val_loss"]
        trainer.evaluated_step = state["evaluated_step"]
    if not trainer.is_main:
        return

    world_size, saved_world_size = trainer.group.world_size, state["world_size"]
    trainer.loss_sum += state["loss_sum"] * (world_size / saved_world_size)
    log(f"resumed from the checkpoint of step {trainer.step}")
    if not is_same_script:  # its best weights would be exported as this model's
        log("note: another script wrote it; tracking the best weights anew")
    if world_size != saved_world_size:
        processes = counted(saved_world_size, "process")
        log(f"note: the checkpoint is of {processes}; with {world_size} the last bits may differ")
