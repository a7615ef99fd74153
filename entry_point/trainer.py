"""The training loop: a step, evaluation, metrics, checkpoints, and the end of a run."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from . import huggingface
from .checkpoint import Checkpoints
from .config import Config, check_resumable, derive_seed
from .container import Container
from .conversations import END_OF_TURN, Packed
from .cuda_graphs import PassGraph, record_passes
from .data import Batches, bytes_per_token, evaluate
from .device import (
    can_use_graph,
    choose_precision,
    compiling_pays,
    machine_line,
    memory_line,
    share_cores,
)
from .distributed import Group, Ranks
from .errors import TrainingError, counted, first_line, log
from .faults import fail, read_fault
from .metrics import duration, metric_line
from .model import GPT, sample
from .optim import Optimizer, first_steps, learning_rate_scale, window_length
from .text import Corpus

# What a rank wants after a step; STOP is a checkpoint, and then the end.
NOTHING, CHECKPOINT, STOP = range(3)

LONG_RUN = 60.0  # seconds: a run that takes longer says so


class Trainer:
    """One run: the model, its optimizer, its data, and its progress."""

    def __init__(self, config: Config, container: Container, group: Group, corpus: Corpus) -> None:
        self.config, self.container, self.group, self.corpus = config, container, group, corpus
        self.is_main = group.rank == 0
        self.batches = Batches(corpus.train, config, group.device)
        self.checkpoints = Checkpoints(container.checkpoint_dir)
        self.bytes_per_token = bytes_per_token(corpus, config)
        masks = config.mask_documents or corpus.is_chat
        self.end = corpus.tokenizer.end if masks else None
        self.stop_signal = 0  # the first signal that asked to stop
        self.step = 0  # steps that are done
        self.kept_step: int | None = None  # of the newest checkpoint
        self.best_step: int | None = None
        self.best_val_loss = math.inf
        self.evaluated_step: int | None = None
        self.best: dict[str, Tensor] = {}  # rank 0's copy of the weights of best_step, on the CPU
        self.metrics: list[dict[str, Any]] = []
        device = group.device
        # Since the last metric line: the sum of this rank's losses, and its steps. In float64
        # (which MPS lacks) the sum is exact, so that an interrupted run logs the same numbers.
        exact = torch.float32 if device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), device=device, dtype=exact)
        self.steps_summed = 0

        dtype = choose_precision(config, device)
        how = {"script_sha256": huggingface.SCRIPT_SHA256, **dataclasses.asdict(config)}
        group.check_same({**how, "precision": str(dtype).removeprefix("torch.")})
        if config.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        self.model = GPT(config, len(corpus.tokenizer), dtype).to(device)
        self.model.init_weights(config.seed)
        self.cached_angles = functools.cache(self.model.angles)  # by length of windows
        self.optimizer = Optimizer(self.model, config)
        self.n_parameters = sum(p.numel() for p in self.model.parameters())
        pays = compiling_pays(config, device, self.n_parameters, group.world_size)
        self.compiled = config.compile == "on" or (config.compile == "auto" and pays)
        # Evaluations use the uncompiled model: compiling it for them takes longer than they do.
        # One graph for all lengths of windows would break at each attention.
        net: Any = torch.compile(self.model, dynamic=False) if self.compiled else self.model
        self.ddp: nn.Module = net
        if group.world_size > 1:
            self.ddp = DistributedDataParallel(
                net,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
            )
        # Gradients that are small would be 0 in float16, so the loss is scaled up. A step in which
        # they are then infinite is left out and the scale halved; after 2000 good ones it is
        # doubled. Other types need no scale.
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.passes = config.passes(group.world_size)
        self.records = can_use_graph(config, device, group.world_size, dtype)
        self.graphs: dict[int, PassGraph] = {}  # by length of windows

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Trains to max_steps and writes the artefact; False when a signal ended it before."""
        config, group = self.config, self.group
        self.restore()
        began = time.monotonic()
        # Else there is no bucket to lay out, and nothing to compile or record.
        if self.ddp is not self.model or self.records:
            self.warm_up()
        step_seconds = time.monotonic() - began
        if self.is_main:  # drop the rows after the checkpoint's step, since those steps come again
            self.checkpoints.begin_curve(self.metrics)
        if self.is_main and config.sample_length and self.step == 0:
            self.log_sample("before training", config.sample_length // 3)
        if self.container.init_from is not None and self.step == 0:
            self.log_metrics(evaluates=True)  # of the model as it was
        fault = read_fault(os.environ.get("NANOGPT_FAULT", "") if self.step == 0 else "")
        steps_timed, started = 0, time.perf_counter()
        first_step, first_started = self.step, started
        while self.step < config.max_steps:
            group.allow_seconds(5 * step_seconds)  # so that long steps have enough time
            began = time.monotonic()
            if fault[:2] == (group.rank, self.step):
                fail(fault[2], lambda: bool(self.stop_signal))
            last = self.step + 1 == config.max_steps
            evaluates = last or (self.step + 1) % config.eval_interval == 0
            due = self.is_main and self.checkpoints.due(evaluates, config.checkpoint_seconds)
            wanted = STOP if self.stop_signal else CHECKPOINT if due else NOTHING
            agreement = group.async_all_reduce_max(wanted)
            self.train_step()
            steps_timed += 1
            wanted = agreement()
            step_seconds = time.monotonic() - began
            if self.is_main and self.step == first_step + 3:
                group.synchronize()
                self.log_duration((time.perf_counter() - first_started) / 3)
            logs = evaluates or self.step % config.log_interval == 0
            if logs or wanted:
                group.synchronize()
                group.allow_seconds(math.inf)  # evaluations and checkpoints may take any time
            if logs:
                self.log_metrics(evaluates, (time.perf_counter() - started) / steps_timed)
                steps_timed, started = 0, time.perf_counter()
            if wanted or last:
                before = time.perf_counter()
                self.save_checkpoint()
                started += time.perf_counter() - before
            if wanted == STOP and not last:
                if self.is_main:
                    log(f"stopped by a signal; the checkpoint of step {self.step} is written")
                return False
        if self.evaluated_step != self.step:  # it was stopped here, and now ends here
            self.log_metrics(evaluates=True)
            self.save_checkpoint()
        if self.is_main:
            self.finish()
        return True

    def train_step(self) -> None:
        """Updates the weights by one batch."""
        self.loss_sum += self.forward_backward(self.step)
        scale = learning_rate_scale(self.step, self.config)
        self.scaler.step(self.optimizer, scale)  # type: ignore[arg-type]
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.graphs)
        self.step += 1
        self.steps_summed += 1

    def forward_backward(self, step: int) -> Tensor:
        """Gradients of the step's batch, averaged over the ranks; returns this rank's mean loss."""
        config, group = self.config, self.group
        total = torch.zeros((), device=group.device)
        for index, (x, y, weight) in enumerate(self.batch(step)):
            if config.dropout:
                torch.manual_seed(derive_seed(config.seed, "dropout", step, index, group.rank))
            # Only the last pass has to average gradients over the ranks.
            skip_all_reduce = group.world_size > 1 and index < self.passes - 1
            with self.ddp.no_sync() if skip_all_reduce else nullcontext():  # type: ignore[operator]
                total += self.graphs.get(x.size(1), self.run_pass)(x, y, weight)
        return total

    def run_pass(self, x: Tensor, y: Tensor, weight: float | Tensor) -> Tensor:
        """Adds a pass's gradients, and returns its share of the loss."""
        angles = self.cached_angles(x.size(1))
        loss = self.ddp(x, y, angles=angles, end=self.end, chats=self.corpus.is_chat) / self.passes
        loss = loss * weight
        self.group.heartbeat()  # what follows waits for the others, in DDP
        self.scaler.scale(loss).backward()
        return loss.detach()

    def batch(self, step: int) -> list[tuple[Tensor, Tensor, float]]:
        """A step's passes: inputs and targets [rows, length], and its share of the loss."""
        group, shares = self.group, [1.0] * self.passes
        length = window_length(step, self.config)
        x, y = self.batches.rows(step, group.rank, group.world_size)
        # As the inputs of a graph: the compiler makes another model for other strides.
        x, y = x.reshape(-1, length).contiguous(), y.reshape(-1, length).contiguous()
        if isinstance(self.corpus.train, Packed):
            starts = self.batches.window_starts(step)
            shares = self.corpus.train.loss_shares(
                starts, group.rank, group.world_size, self.passes
            )
        return list(zip(x.chunk(self.passes), y.chunk(self.passes), shares, strict=True))

    def warm_up(self) -> None:
        """Two steps of each length of windows, whose gradients and buffers are thrown away.

        DDP lays its buckets out anew after its first step, and the order in which gradients are
        added up follows the layout; after this, a resumed run adds in the same order as one that
        was never interrupted (on CPUs: on GPUs some kernels add in no fixed order). Compilation
        happens here too, outside the measured time.
        """
        steps = first_steps(self.config)
        before = [buffer.clone() for buffer in self.model.buffers()]  # of an edit
        if self.compiled:
            self.try_compiler(steps)
        for step in sorted(2 * steps):
            self.forward_backward(step)
            self.optimizer.check_gradients()  # DDP itself reports nothing before its next step
            self.optimizer.zero_grad()
        if self.records:
            passes = [self.batch(step)[0] for step in steps]
            self.graphs = record_passes(self.run_pass, passes, self.model)
            self.optimizer.zero_grad(set_to_none=not self.graphs)
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.detach().copy_(value)

    def try_compiler(self, steps: Sequence[int]) -> None:
        """Compiles for the windows of these steps; with compile=auto, trains eagerly if that fails.

        It does so outside of DDP, in which the others would wait for a rank that fails.
        """
        ddp = self.ddp if isinstance(self.ddp, DistributedDataParallel) else None
        with self.group.without_heartbeats(), ddp.no_sync() if ddp else nullcontext():
            try:
                for step in steps:
                    self.forward_backward(step)
            except Exception as error:  # one that is not the compiler's comes again without it
                if self.config.compile == "on":
                    raise
                torch.compiler.set_stance("force_eager")
                log(f"note: rank {self.group.rank} does not compile: {first_line(error)}")
        self.optimizer.zero_grad()

    # -- the log ----------------------------------------------------------------------------------

    def introduce(self, ranks: Ranks) -> None:
        """Logs where this run computes, its choices, and the sizes of its model and data."""
        device, corpus = self.group.device, self.corpus
        first_of_host = torch.tensor(float(ranks.local_rank == 0), device=device)
        hosts = int(self.group.sum_(first_of_host))
        if not self.is_main:
            return
        tf32 = self.config.precision == "tf32"
        precision = "tf32" if tf32 else str(self.model.compute_dtype).removeprefix("torch.")
        log(machine_line(device, ranks, hosts))
        log(
            f"chosen: {precision}, {'compiled' if self.compiled else 'eager'},"
            f" {counted(self.passes, 'pass')} a step"
        )
        log(
            f"{self.n_parameters:,} parameters; {len(corpus.train):,} {corpus.tokenizer.unit} to"
            f" train on, {len(corpus.val):,} to validate on, vocabulary {len(corpus.tokenizer):,}"
        )
        for name, part in (("train", corpus.train), ("val", corpus.val)):
            if isinstance(part, Packed):
                log(f"{name}: {part.summary()}")

    def log_duration(self, seconds_per_step: float) -> None:
        """Logs the time and the memory of a run that has long to go."""
        left = (self.config.max_steps - self.step) * seconds_per_step
        if left > LONG_RUN:
            memory = memory_line(self.group.device, self.group.local_world_size)
            log(
                f"note: {seconds_per_step:.3g} s a step: about {duration(left)} to"
                f" step {self.config.max_steps:,}; {memory}"
            )

    def log_metrics(self, evaluates: bool, seconds_per_step: float = 0.0) -> None:
        """The metric line of the steps since the last; takes the weights if they are the best."""
        config, group = self.config, self.group
        row: dict[str, Any] = {"step": self.step}
        if self.steps_summed:
            losses = float(group.sum_(self.loss_sum)) / group.world_size
            row["train_loss"] = losses / self.steps_summed
            self.check_loss(row["train_loss"])
        # Below 1, the scale was halved again and again.
        self.check_finite(self.scaler.get_scale() >= 1, "the gradients are")
        if evaluates:
            row["val_loss"] = evaluate(self.model, self.corpus.val, config, group, self.end)
            self.check_loss(row["val_loss"])
            row["best_loss"] = min(self.best_val_loss, row["val_loss"])
            row["bits_per_byte"] = row["val_loss"] / math.log(2) / self.bytes_per_token
            self.evaluated_step = self.step
        scale = learning_rate_scale(self.step - 1, config) if self.step else 0.0
        row["learning_rate"] = config.learning_rate * scale
        row["time"] = round(time.time(), 3)
        if seconds_per_step:
            row["tokens_per_second"] = config.batch_size * config.block_size / seconds_per_step
        self.metrics.append(row)
        if self.is_main:
            left = (config.max_steps - self.step) * seconds_per_step
            log(metric_line(row, config.max_steps, left if seconds_per_step else None))
            self.checkpoints.extend_curve(row)
        if evaluates and row["val_loss"] < self.best_val_loss:
            self.best_step, self.best_val_loss = self.step, row["val_loss"]
            if self.is_main:
                self.best = {
                    name: weights.to("cpu", copy=True)
                    for name, weights in self.model.state_dict().items()
                }
        self.loss_sum.zero_()
        self.steps_summed = 0

    def check_loss(self, loss: float) -> None:
        self.check_finite(math.isfinite(loss), f"the loss is {loss},")

    def check_finite(self, finite: bool, what: str) -> None:
        """Raises TrainingError, which names the checkpoint that is kept, unless it is."""
        if finite:
            return
        wider = " or precision=float32" * self.scaler.is_enabled()
        raise TrainingError(
            f"{what} not finite at step {self.step}; {self.kept()}; try a smaller"
            f" learning_rate{wider}"
        )

    def kept(self) -> str:
        if self.kept_step is None:
            return "there is no checkpoint yet"
        return f"the checkpoint of step {self.kept_step} is kept"

    def log_sample(self, when: str, length: int) -> None:
        """Logs `length` tokens from the start of a document, or of a line, or an answer."""
        tokenizer = self.corpus.tokenizer
        self.model.eval()
        val = self.corpus.val
        question = val.question() if isinstance(val, Packed) else []
        ids = sample(self.model, question or [tokenizer.start], length)
        if isinstance(val, Packed) and tokenizer.special[END_OF_TURN] in ids:
            ids = ids[: ids.index(tokenizer.special[END_OF_TURN])]
        text = tokenizer.decode([*question, *ids])
        self.model.train()
        # The bars distinguish a sample from lines of the log.
        log("\n".join([f"--- sample {when} ---", *(f"| {line}" for line in text.split("\n"))]))

    def memorized(self) -> bool:
        """Whether val_loss was best in the first half, and rose as train_loss went on falling."""
        # A run that is resumed where it is to end has a second row of its last step.
        best = next(row for row in self.metrics if row["step"] == self.best_step)
        last, early = self.metrics[-1], 2 * best["step"] <= self.step
        rose = last["val_loss"] > 1.05 * self.best_val_loss
        return early and rose and last.get("train_loss", math.inf) < best.get("train_loss", 0.0)

    # -- state ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name; the live tensors.

        Those of the model are its parameters, and the buffers that an edited one may have.
        """
        model = self.model.state_dict()
        return {
            **{f"model.{name}": t for name, t in model.items()},
            **{f"optimizer.{name}": t for name, t in self.optimizer.state().items()},
        }

    def state(self, loss_sum: float = 0.0) -> dict[str, Any]:
        """Everything else that a checkpoint holds; loss_sum is that of all world_size ranks."""
        on_cpu = self.group.device.type == "cpu"
        return {
            "step": self.step,
            "best_step": self.best_step,
            "best_val_loss": self.best_val_loss if self.best_step is not None else None,
            "evaluated_step": self.evaluated_step,
            "config": dataclasses.asdict(self.config),
            "script_sha256": huggingface.SCRIPT_SHA256,
            "tokenizer": self.corpus.tokenizer.document,
            "end_of_text": self.corpus.tokenizer.end_of_text,
            "chats": self.corpus.is_chat,
            "corpus_sha256": self.corpus.sha256,
            "data": str(self.container.training),
            "validation": str(self.container.validation or ""),
            "init_from": str(self.container.init_from or ""),
            "metrics": self.metrics,
            "loss_sum": loss_sum,
            "world_size": self.group.world_size,
            "processes": self.group.local_world_size if on_cpu else 0,
            "steps_summed": self.steps_summed,
            "scaler": self.scaler.state_dict(),
        }

    def save_checkpoint(self) -> None:
        """Every rank calls it at the same step, and rank 0 writes.

        Raises TrainingError, and writes nothing, if the loss or the weights are not finite, or the
        ranks have other weights.
        """
        loss_sum = float(self.group.sum_(self.loss_sum.clone()))
        self.check_loss(loss_sum)
        finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
        self.check_finite(finite, "the weights are")
        if unlike := self.group.ranks_unlike_first(self.model.parameters()):
            raise TrainingError(
                f"at step {self.step} the weights of {', '.join(f'rank {r}' for r in unlike)} are"
                f" not those of rank 0; {self.kept()}; unlike hosts may round differently, so use"
                " hosts of one kind"
            )
        if self.is_main:
            best = {f"best.{name}": t for name, t in self.best.items()}
            self.checkpoints.save({**self.tensors(), **best}, self.state(loss_sum))
        self.kept_step = self.step

    def restore(self) -> None:
        """Loads rank 0's newest checkpoint, or else a model to start from, on every rank."""
        live, state = self.tensors(), None
        if self.is_main and (loaded := self.checkpoints.load_latest()) is not None:
            tensors, state = loaded
            check_resumable(state, self.state())
            self.metrics = state.pop("metrics")
            del state["tokenizer"]  # other ranks need neither, and both may be large
            best = [name for name in tensors if name.startswith("best.")]
            self.best = {name.removeprefix("best."): tensors.pop(name) for name in best}
            huggingface.load_tensors(live, tensors)
        elif self.is_main and self.container.init_from is not None:
            huggingface.load_pretrained(self.model, self.container.init_from)
            log(f"started from the weights in {self.container.init_from}")
        state = self.group.broadcast(state)
        self.group.broadcast_(list(live.values()))
        if state is None:
            return
        self.kept_step = self.step = state["step"]
        self.steps_summed = state["steps_summed"]
        if state["scaler"]:  # empty in other types
            self.scaler.load_state_dict(state["scaler"])
        ranks, ranks_before = self.group.world_size, state["world_size"]
        same_script = state["script_sha256"] == huggingface.SCRIPT_SHA256
        if same_script and state["best_step"] is not None:
            self.best_step, self.best_val_loss = state["best_step"], state["best_val_loss"]
            self.evaluated_step = state["evaluated_step"]
        if not self.is_main:
            return
        self.loss_sum += state["loss_sum"] * (ranks / ranks_before)
        log(f"resumed from the checkpoint of step {self.step}")
        if not same_script:  # its best weights would be exported as this model's
            log("note: another script wrote it; tracking the best weights anew")
        if ranks != ranks_before:
            before = counted(ranks_before, "process")
            log(f"note: the checkpoint is of {before}; with {ranks} the last bits may differ")

    def finish(self) -> None:
        """Writes the artefact of the best validation loss, and logs a sample of it."""
        assert self.best_step is not None
        # torchrun sets one thread where nobody has; the other ranks wait while this one computes.
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
            share_cores(self.group.local_world_size)
        best = huggingface.with_weights(self.config, len(self.corpus.tokenizer), self.best)
        self.model.load_state_dict(best.state_dict())
        training = {
            "script_sha256": huggingface.SCRIPT_SHA256,
            "step": self.best_step,
            "val_loss": self.best_val_loss,
            "metrics": self.metrics[-1],
            "corpus_sha256": self.corpus.sha256,
            "world_size": self.group.world_size,
            "torch_version": torch.__version__,
        }
        model_dir, output_dir = self.container.model_dir, self.container.output_dir
        with self.checkpoints.writing(model_dir):
            why = huggingface.write_artefact(
                model_dir, best, self.corpus.tokenizer, training, self.corpus.is_chat
            )
        with self.checkpoints.writing(output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.checkpoints.curve, output_dir / "metrics.jsonl")
        if self.config.sample_length:
            self.log_sample("after training", self.config.sample_length)
        log(f"best val_loss {self.best_val_loss:.5f} at step {self.best_step}")
        if self.memorized():
            log(
                f"note: the run memorized its text: val_loss rose to"
                f" {self.metrics[-1]['val_loss']:.5f}, so the model is that of step"
                f" {self.best_step}; use more text, or set max_steps={self.best_step}"
            )
        elif self.best_step < self.step:
            log(
                f"note: the model is that of step {self.best_step}; no later evaluation had a lower"
                " val_loss"
            )
        if why:
            log(
                "note: the edited script computes another model than Qwen3, so transformers and"
                f" vLLM cannot load it, and sm-nanogpt can: {why}"
            )
        log(f"model written to {model_dir}")
