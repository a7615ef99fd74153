"""The training loop: a step, evaluation, metrics, checkpoints, and the end of a run."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import huggingface
from .causality import leak_of
from .checkpoint import Checkpoints
from .config import Config, check_resumable, derive_seed
from .container import Container, Ranks
from .conversations import END_OF_TURN, Packed
from .data import Batches, bytes_per_token, evaluate
from .device import choose_precision, machine_line, memory_line, share_cores
from .distributed import Group
from .errors import ConfigError, TrainingError, counted, log
from .faults import read_fault
from .metrics import StepTimer, best_lines, duration, metric_line
from .model import GPT, sample
from .optim import Optimizer, learning_rate_scale
from .passes import Passes
from .text import Corpus

# What a rank asks for after a step; STOP is a checkpoint, and then the end.
NOTHING, CHECKPOINT, STOP = range(3)

TAUGHT_TIME = 1.25  # a step with a teacher takes so many times as long
WARM_STEPS = 3  # after which the seconds of a step say how long a run takes
LONG_RUN = 60.0  # seconds: a run that takes longer says so


class Trainer:
    """One run: the model, its optimizer, its data, and its progress."""

    def __init__(self, config: Config, container: Container, group: Group, corpus: Corpus) -> None:
        self.config, self.container, self.group, self.corpus = config, container, group, corpus
        self.is_main = group.rank == 0
        self.checkpoints = Checkpoints(container.checkpoint_dir)
        self.bytes_per_token = bytes_per_token(corpus, config)
        masks = config.mask_documents or corpus.is_chat
        self.end = corpus.tokenizer.end if masks else None
        self.leak_tested = False
        self.stop_signal = 0  # the first signal that asked to stop
        self.step = 0  # steps that are done
        self.kept_step: int | None = None  # of the newest checkpoint
        self.best_step: int | None = None
        self.best_val_loss = math.inf
        self.evaluated_step: int | None = None
        self.best: dict[str, Tensor] = {}  # rank 0's copy of the weights of best_step, on the CPU
        self.metrics: list[dict[str, Any]] = []
        self.timer = StepTimer()
        device = group.device
        # Since the last metric line: the sum of this rank's losses, and its steps. In float64
        # (which MPS lacks) the sum is exact, so that an interrupted run logs the same numbers.
        exact = torch.float32 if device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), device=device, dtype=exact)
        self.steps_summed = 0

        dtype = choose_precision(config, device)
        settings = {"script_sha256": huggingface.SCRIPT_SHA256, **dataclasses.asdict(config)}
        group.check_same({**settings, "precision": str(dtype).removeprefix("torch.")})
        if config.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        self.model = GPT(config, len(corpus.tokenizer), dtype).to(device)
        self.model.init_weights(config.seed)
        self.teacher: GPT | None = None  # of later generations
        if config.generations > 1:
            self.teacher = GPT(config, len(corpus.tokenizer), dtype).to(device)
            self.teacher.init_weights(config.seed)
            self.teacher.requires_grad_(False).eval()
        self.optimizer = Optimizer(self.model, config, group)
        # Gradients that are small would be 0 in float16, so the loss is scaled up. A step in which
        # they are then infinite is left out and the scale halved; after 2000 good ones it is
        # doubled. Other types need no scale.
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        batches = Batches(corpus.train, config, device)
        self.passes = Passes(self.model, self.optimizer, self.scaler, batches, group, self.end)

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Trains all generations and writes the artefact; False when a signal ended it before."""
        self.restore()
        self.choose_teacher()
        self.warm_up()
        self.begin_log()
        self.timer.restart()
        fault = read_fault(os.environ.get("NANOGPT_FAULT", "") if self.step == 0 else "")
        # A first step or two may be slow, so the time is measured after a few more.
        measured_steps = {self.step + WARM_STEPS, self.config.max_steps + WARM_STEPS}

        while self.step < self.config.total_steps:
            if self.generation and self.step % self.config.max_steps == 0:
                self.begin_generation()
            # Long steps have enough time.
            self.group.allow_seconds(5 * max(self.timer.last, self.timer.measured))
            if fault and (fault.rank, fault.step) == (self.group.rank, self.step):
                fault.strike(lambda: bool(self.stop_signal))
            request = self.train_step_and_agree()
            if self.step in measured_steps:
                self.log_duration()
            if self.evaluates(self.step) or self.step % self.config.log_interval == 0:
                self.log_metrics(self.evaluates(self.step))
            if request != NOTHING:
                with self.timer.pause():
                    self.save_checkpoint()
                    if self.is_main and request != STOP:
                        self.warn_of_leak()
            if request == STOP:
                if self.is_main:
                    log(f"stopped by a signal; the checkpoint of step {self.step} is written")
                return False

        if self.evaluated_step != self.step:  # it was stopped here, and now ends here
            self.log_metrics(evaluates=True)
            self.save_checkpoint()
        if self.is_main:
            self.finish()
        return True

    def choose_teacher(self) -> None:
        """Set the teacher of the next step, if it has one."""
        is_within_generation = self.step % self.config.max_steps != 0
        if self.generation == 0 and self.container.teacher is not None:
            self.passes.set_teacher(self.read_teacher(self.container.teacher))
        elif self.generation > 0 and self.teacher is not None and is_within_generation:
            self.passes.set_teacher(self.teacher)

    def warm_up(self) -> None:
        """Compile and record what a step computes; it is timed as a step, but not in the speed."""
        with self.timer.step():
            self.passes.warm_up()
        self.timer.restart()

    def train_step_and_agree(self) -> int:
        """A step, during which the ranks agree on what comes after it: the largest request."""
        with self.timer.step():
            agreed = self.group.async_all_reduce_max(self.request())  # while the step computes
            self.train_step()
            return agreed()

    def evaluates(self, step: int) -> bool:
        return step % self.config.max_steps == 0 or step % self.config.eval_interval == 0

    @property
    def generation(self) -> int:
        """The number of generations that are done."""
        return self.step // self.config.max_steps

    def request(self) -> int:
        """What this rank asks for after the next step."""
        step = self.step + 1
        if step == self.config.total_steps:
            return CHECKPOINT
        if self.stop_signal:
            return STOP
        due = self.checkpoints.due(self.evaluates(step), self.config.checkpoint_seconds)
        return CHECKPOINT if self.is_main and due else NOTHING

    def train_step(self) -> None:
        """Updates the weights by one batch."""
        self.loss_sum += self.passes.forward_backward(self.step)
        scale = learning_rate_scale(self.step, self.config)
        self.scaler.step(self.optimizer, scale)  # type: ignore[arg-type]
        self.scaler.update()
        self.passes.zero_grad()
        self.step += 1
        self.steps_summed += 1

    def begin_generation(self) -> None:
        """New weights, and the best model so far as their teacher."""
        assert self.teacher is not None
        self.group.allow_seconds(math.inf)  # compiling and recording take long

        best = self.best if self.best_step is not None else self.model.state_dict()
        new_model = GPT(self.config, len(self.corpus.tokenizer))
        new_model.init_weights(derive_seed(self.config.seed, "generation", self.generation))
        if self.is_main:
            self.teacher.load_state_dict(best)
            if self.container.init_from is not None:
                huggingface.load_pretrained(new_model, self.container.init_from)
        self.model.load_state_dict(new_model.state_dict())
        for tensor in (*self.teacher.state_dict().values(), *self.model.state_dict().values()):
            self.group.broadcast_(tensor)
        self.optimizer.reset()

        if self.is_main:
            number = f"generation {self.generation + 1} of {self.config.generations}"
            log(f"{number}: it starts anew, and also learns from the best model so far")
        if self.passes.teacher is not self.teacher:
            self.passes.set_teacher(self.teacher)
            self.warm_up()

    def read_teacher(self, directory: Path) -> GPT:
        """The model in a directory, which may be of another size."""
        values = huggingface.starting_values(directory, {})
        huggingface.check_teacher(values, self.config.block_size)
        teacher = GPT(Config(**values), len(self.corpus.tokenizer), self.model.compute_dtype)
        huggingface.load_pretrained(teacher, directory)
        if self.group.ranks_unlike_first(teacher.to(self.group.device).parameters()):
            raise ConfigError("the hosts have different teachers")
        if self.is_main:
            log(f"learning also from the model in {directory}")
        return teacher.requires_grad_(False).eval()

    def begin_log(self) -> None:
        """The rows of steps before this one, a sample, and the loss of the initial model."""
        if self.is_main:  # drop the rows after the checkpoint's step, since those steps come again
            self.checkpoints.begin_curve(self.metrics)
        if self.is_main and self.config.sample_length and self.step == 0:
            self.log_sample("before training", self.config.sample_length // 3)
        if self.container.init_from is not None and self.step == 0:
            self.log_metrics(evaluates=True)

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
            f"chosen: {precision}, {'compiled' if self.passes.compiled else 'eager'},"
            f" {counted(self.passes.n_passes, 'pass')} a step"
        )
        log(
            f"{self.passes.n_parameters:,} parameters; {len(corpus.train):,}"
            f" {corpus.tokenizer.unit} to train on, {len(corpus.val):,} to validate on,"
            f" vocabulary {len(corpus.tokenizer):,}"
        )
        for name, part in (("train", corpus.train), ("val", corpus.val)):
            if isinstance(part, Packed):
                log(f"{name}: {part.summary()}")

    def log_duration(self) -> None:
        """Logs the time, and on a GPU the memory, of a run that has long to go."""
        self.group.synchronize()
        seconds_per_step = self.timer.measure()
        left = self.seconds_left(seconds_per_step)
        if self.is_main and left > LONG_RUN:
            log(
                f"note: {seconds_per_step:.3g} s a step: about {duration(left)} to"
                f" step {self.config.total_steps:,}{memory_line(self.group.device)}"
            )

    def seconds_left(self, seconds_per_step: float) -> float:
        """Until all steps are done; those of later generations take TAUGHT_TIME times as long."""
        config, left = self.config, self.config.total_steps - self.step
        taught = 0 if self.passes.teacher else (config.generations - 1) * config.max_steps
        return (left + (TAUGHT_TIME - 1) * taught) * seconds_per_step

    def log_metrics(self, evaluates: bool) -> None:
        """The metric line of the steps since the last; takes the weights if they are the best."""
        self.group.synchronize()
        seconds_per_step = self.timer.measure()
        row: dict[str, Any] = {"step": self.step}
        row |= self.train_metrics()
        if evaluates:
            row |= self.validation_metrics()
        row["learning_rate"] = self.config.learning_rate * self.last_scale()
        row["time"] = round(time.time(), 3)
        if seconds_per_step:
            tokens = self.config.batch_size * self.config.block_size
            row["tokens_per_second"] = tokens / seconds_per_step

        self.metrics.append(row)
        if self.is_main:
            seconds_left = self.seconds_left(seconds_per_step) if seconds_per_step else None
            log(metric_line(row, self.config.total_steps, seconds_left))
            self.checkpoints.extend_curve(row)
        if evaluates and row["val_loss"] < self.best_val_loss:
            self.keep_best(row["val_loss"])
        self.loss_sum.zero_()
        self.steps_summed = 0
        self.timer.restart()

    def train_metrics(self) -> dict[str, float]:
        """The mean loss of the steps since the last metric line. Raises TrainingError."""
        metrics = {}
        if self.steps_summed:
            loss = float(self.group.sum_(self.loss_sum)) / self.group.world_size
            metrics["train_loss"] = loss / self.steps_summed
            self.check_loss(metrics["train_loss"])
        # Below 1, the scale was halved again and again.
        self.check_finite(self.scaler.get_scale() >= 1, "the gradients are")
        return metrics

    def validation_metrics(self) -> dict[str, float]:
        """The loss on the validation text, also in bits per byte. Raises TrainingError."""
        loss = evaluate(self.model, self.corpus.val, self.config, self.group, self.end)
        self.check_loss(loss)
        self.evaluated_step = self.step
        return {
            "val_loss": loss,
            "best_loss": min(self.best_val_loss, loss),
            "bits_per_byte": loss / math.log(2) / self.bytes_per_token,
        }

    def last_scale(self) -> float:
        """The learning rate of the last step as a fraction of its peak; 0 before the first."""
        if self.step == 0:
            return 0.0
        return learning_rate_scale(self.step - 1, self.config)

    def keep_best(self, val_loss: float) -> None:
        """Note that this step's weights have the best validation loss; rank 0 copies them."""
        self.best_step, self.best_val_loss = self.step, val_loss
        if self.is_main:
            self.best = self.weights_on_cpu()

    def weights_on_cpu(self) -> dict[str, Tensor]:
        """A copy of the weights."""
        weights = self.model.state_dict()
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}

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
        tokenizer, val = self.corpus.tokenizer, self.corpus.val
        self.model.eval()
        question = val.question() if isinstance(val, Packed) else []
        ids = sample(self.model, question or [tokenizer.start], length)
        if isinstance(val, Packed) and tokenizer.special[END_OF_TURN] in ids:
            ids = ids[: ids.index(tokenizer.special[END_OF_TURN])]
        text = tokenizer.decode([*question, *ids])
        self.model.train()
        # The bars distinguish a sample from lines of the log.
        log("\n".join([f"--- sample {when} ---", *(f"| {line}" for line in text.split("\n"))]))

    # -- state ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name; the live tensors.

        Those of the model are its parameters, and the buffers that an edited one may have. What
        another rank has is on the meta device.
        """
        parts = {
            "model": self.model.state_dict(),
            "teacher": {} if self.teacher is None else self.teacher.state_dict(),
            "optimizer": self.optimizer.state(),
        }
        return {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}

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
            "teacher": str(self.container.teacher or ""),
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
        self.group.synchronize()
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
        tensors = self.tensors()
        if self.is_main:
            tensors |= {f"best.{name}": t for name, t in self.best.items()}
            self.checkpoints.save(tensors, self.state(loss_sum), self.gather(tensors))
        else:
            for _ in self.gather(tensors):
                pass
        self.kept_step = self.step
        if not gc.isenabled():
            gc.collect()

    def warn_of_leak(self) -> None:
        """Logs once, and before the end, that the model looks ahead, as an edit may make it.

        Before the first checkpoint, projections that begin at zero may hide it.
        """
        if self.leak_tested or self.step == self.config.total_steps:  # finish tests the best model
            return
        self.leak_tested, tokenizer = True, self.corpus.tokenizer
        weights = self.weights_on_cpu()
        with suppress(Exception):  # of a model that cannot be tested, as finish will say
            model = huggingface.with_weights(self.config, len(tokenizer), weights)
            if leak := leak_of(model, tokenizer, self.corpus.is_chat):
                log(f"warning: at step {self.step}, {leak}")

    def gather(self, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Each of self.tensors() from the rank that has it; all ranks go through them together."""
        for name, tensor in tensors.items():
            owner = self.optimizer.owners.get(name.removeprefix("optimizer."))
            yield tensor if owner is None else self.group.broadcast_(tensor, owner)

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
            live = {name: tensors[name] if t.is_meta else t for name, t in live.items()}
        elif self.is_main and self.container.init_from is not None:
            huggingface.load_pretrained(self.model, self.container.init_from)
            log(f"started from the weights in {self.container.init_from}")
        state = self.group.broadcast(state)
        for tensor in live.values():
            self.group.broadcast_(tensor)
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
            why, leak = huggingface.write_artefact(
                model_dir, best, self.corpus.tokenizer, training, self.corpus.is_chat
            )
        with self.checkpoints.writing(output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.checkpoints.curve, output_dir / "metrics.jsonl")
        if self.config.sample_length:
            self.log_sample("after training", self.config.sample_length)
        for line in best_lines(self.metrics, self.best_step, self.config.generations):
            log(line)
        if why:
            log(
                "note: the edited script computes another model than Qwen3, so transformers and"
                f" vLLM cannot load it, and sm-nanogpt can: {why}"
            )
        if leak:
            log(f"warning: {leak}")
        log(f"model written to {model_dir}")
