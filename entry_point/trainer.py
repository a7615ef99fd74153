"""The training loop: a step, evaluation, metrics, and the end of a run."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import huggingface
from .causality import leak_of
from .checkpoint import Checkpoints
from .config import Config, derive_seed
from .container import Container, Ranks
from .data import Batches, bytes_per_token, evaluate
from .device import choose_precision, share_cores
from .distributed import Group
from .errors import ConfigError, TrainingError, log
from .faults import Fault, read_fault
from .metrics import StepTimer, best_lines, metric_line
from .model import GPT
from .moments import MAX_PARAMETERS, Moments, earlier_moments, write_moments
from .optim import Optimizer, learning_rate_scale
from .passes import Passes
from .report import choices_line, data_lines, dtype_name, machine_line, memory_text, sample_lines
from .resume import restore, save_checkpoint
from .text import Corpus
from .waiting import Waiting

# What a rank asks for after a step; STOP is a checkpoint, and then the end.
NOTHING, CHECKPOINT, STOP = range(3)


class Trainer:
    """One run: the model, its optimizer, its data, and its progress."""

    def __init__(self, config: Config, container: Container, group: Group, corpus: Corpus) -> None:
        self.config = config
        self.container = container
        self.group = group
        self.corpus = corpus
        self.is_main = group.rank == 0
        self.checkpoints = Checkpoints(container.checkpoint_dir)
        self.bytes_per_token = bytes_per_token(corpus, config)
        masks_documents = config.mask_documents or corpus.is_chat
        self.end = corpus.tokenizer.end if masks_documents else None
        self.leak_is_tested = False
        self.stop_signal = 0  # the first signal that asked to stop
        self.step = 0  # steps that are done
        self.saved_step: int | None = None  # of the newest checkpoint
        self.evaluated_step: int | None = None  # of the newest evaluation
        self.best_step: int | None = None
        self.best_val_loss = math.inf
        self.best: dict[str, Tensor] = {}  # rank 0's copy of the weights of best_step, on the CPU
        self.metrics: list[dict[str, Any]] = []
        self.timer = StepTimer()

        device = group.device
        # Since the last metric line: the sum of this rank's losses, and its steps. In float64
        # (which MPS lacks) the sum is exact, so that an interrupted run logs the same numbers.
        sum_dtype = torch.float32 if device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), device=device, dtype=sum_dtype)
        self.steps_summed = 0

        dtype = choose_precision(config, device)
        settings = {"script_sha256": huggingface.SCRIPT_SHA256, **dataclasses.asdict(config)}
        group.check_same({**settings, "precision": dtype_name(dtype)})
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
        self.moments = Moments(config, self.passes.n_parameters)
        self.waiting = Waiting(torch.get_num_threads() if device.type == "cpu" else 1)

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Trains all generations and writes the artefact; False when a signal ended it before."""
        restore(self)
        self.choose_teacher()
        self.warm_up()
        self.begin_log()
        fault = self.read_fault()
        self.timer.restart()

        while self.step < self.config.total_steps:
            if self.generation > 0 and self.step % self.config.max_steps == 0:
                self.begin_generation()
            if self.is_main:
                self.moments.keep(self.step, self.model.state_dict())
            # Long steps have enough time.
            self.group.allow_seconds(5 * max(self.timer.last, self.timer.measured))
            if fault is not None and self.step == fault.step:
                fault.strike(lambda: bool(self.stop_signal))

            request = self.train_step_and_agree()
            if self.waiting.look() and self.is_main:
                log(f"other programs use the cores: {self.waiting}")

            evaluates = self.evaluates(self.step)
            if evaluates or self.step % self.config.log_interval == 0:
                self.log_metrics(evaluates)
            if request != NOTHING:
                with self.timer.pause():
                    save_checkpoint(self)
                    if self.is_main and request != STOP:
                        self.warn_of_leak()
            if request == STOP:
                if self.is_main:
                    log(f"stopped by a signal; the checkpoint of step {self.step} is written")
                return False

        if self.evaluated_step != self.step:  # it was stopped here, and now ends here
            self.log_metrics(evaluates=True)
            save_checkpoint(self)
        if self.is_main:
            self.finish()
        return True

    def read_fault(self) -> Fault | None:
        """The fault on purpose that is meant for this rank; a resumed run has none."""
        if self.step > 0:
            return None
        fault = read_fault(os.environ.get("NANOGPT_FAULT", ""))
        is_mine = fault is not None and fault.rank == self.group.rank
        return fault if is_mine else None

    def choose_teacher(self) -> None:
        """Sets the teacher of the next step, if it has one."""
        is_within_generation = self.step % self.config.max_steps != 0
        if self.generation == 0 and self.container.teacher is not None:
            self.passes.set_teacher(self.read_teacher(self.container.teacher))
        elif self.generation > 0 and self.teacher is not None and is_within_generation:
            self.passes.set_teacher(self.teacher)

    def warm_up(self) -> None:
        """Compiles and records what a step computes; timed as a step, but not in the speed."""
        with self.timer.step():
            self.passes.warm_up()
        self.timer.restart()

    def train_step_and_agree(self) -> int:
        """A step, during which the ranks agree on what comes after it: the largest request."""
        with self.timer.step():
            largest_request = self.group.async_all_reduce_max(self.request())  # while it computes
            self.train_step()
            return largest_request()

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
        if not self.is_main:
            return NOTHING
        is_due = self.checkpoints.due(self.evaluates(step), self.config.checkpoint_seconds)
        return CHECKPOINT if is_due else NOTHING

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

        new_model = GPT(self.config, len(self.corpus.tokenizer))
        new_model.init_weights(derive_seed(self.config.seed, "generation", self.generation))
        if self.is_main:
            best = self.best if self.best_step is not None else self.model.state_dict()
            self.moments.weights = self.moments_of_best()
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
        is_first_of_host = torch.tensor(float(ranks.local_rank == 0), device=self.group.device)
        n_hosts = int(self.group.sum_(is_first_of_host))
        if self.is_main:
            log(machine_line(self.group.device, ranks, n_hosts))
            log(choices_line(self.passes))
            for line in data_lines(self.corpus, self.passes.n_parameters):
                log(line)
            if self.moments.is_too_large:
                log(f"moments: none, as the model has over {MAX_PARAMETERS:,} parameters")

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
            seconds_left = None
            if seconds_per_step:
                seconds_left = seconds_per_step * (self.config.total_steps - self.step)
            line = metric_line(row, self.config.total_steps, seconds_left)
            log(line + memory_text(self.group.device))
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
        is_finite = self.scaler.get_scale() >= 1  # below, it was halved again and again
        self.check_finite(is_finite, "the gradients are")
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
        """Notes that this step's weights have the best validation loss; rank 0 copies them."""
        self.best_step, self.best_val_loss = self.step, val_loss
        if self.is_main:
            self.best = self.weights_on_cpu()

    def weights_on_cpu(self) -> dict[str, Tensor]:
        """A copy of the weights."""
        weights = self.model.state_dict()
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}

    def moments_of_best(self) -> dict[int, dict[str, Tensor]]:
        """The moments on the way to the best model."""
        if self.best_step is None:
            return {}
        return earlier_moments(self.moments.weights, self.best_step, self.config.max_steps)

    def check_loss(self, loss: float) -> None:
        self.check_finite(math.isfinite(loss), f"the loss is {loss},")

    def check_finite(self, is_finite: bool, subject: str) -> None:
        """Raises TrainingError, which names the checkpoint that is kept, unless it is finite."""
        if is_finite:
            return
        advice = "try a smaller learning_rate"
        if self.scaler.is_enabled():
            advice += " or precision=float32"
        raise TrainingError(
            f"{subject} not finite at step {self.step}; {self.newest_checkpoint()}; {advice}"
        )

    def newest_checkpoint(self) -> str:
        """What an error message says of it."""
        if self.saved_step is None:
            return "there is no checkpoint yet"
        return f"the checkpoint of step {self.saved_step} is kept"

    def log_sample(self, when: str, length: int) -> None:
        """Logs `length` tokens that the model makes."""
        self.model.eval()
        lines = sample_lines(self.model, self.corpus, when, length)
        self.model.train()
        log("\n".join(lines))

    def warn_of_leak(self) -> None:
        """Logs once, and before the end, that the model looks ahead, as an edit may make it.

        Before the first checkpoint, projections that begin at zero may hide it.
        """
        if self.leak_is_tested or self.step == self.config.total_steps:  # finish tests the best one
            return
        self.leak_is_tested = True
        tokenizer = self.corpus.tokenizer
        weights = self.weights_on_cpu()
        leak = ""
        with suppress(Exception):  # of a model that cannot be tested, as finish will say
            model = huggingface.with_weights(self.config, len(tokenizer), weights)
            leak = leak_of(model, tokenizer, self.corpus.is_chat)
        if leak:
            log(f"warning: at step {self.step}, {leak}")

    def finish(self) -> None:
        """Writes the artefact of the best validation loss, and logs a sample of it."""
        assert self.best_step is not None
        # torchrun sets one thread where nobody has; the other ranks wait while this one computes.
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
            share_cores(self.group.local_world_size)
        best = huggingface.with_weights(self.config, len(self.corpus.tokenizer), self.best)
        difference, leak = self.write_results(best)

        if self.config.sample_length:
            self.model.load_state_dict(best.state_dict())
            self.log_sample("after training", self.config.sample_length)
        for line in best_lines(self.metrics, self.best_step, self.config.generations):
            log(line)
        if difference:
            log(
                "note: the edited script computes another model than Qwen3, so transformers and"
                f" vLLM cannot load it, and sm-nanogpt can: {difference}"
            )
        if leak:
            log(f"warning: {leak}")
        log(f"model written to {self.container.model_dir}")

    def write_results(self, best: GPT) -> tuple[str, str]:
        """Writes the best model, with its moments, and the curve.

        Returns how the model differs from Qwen3, and how it looks ahead, each "" if it does not.
        """
        training = {
            "script_sha256": huggingface.SCRIPT_SHA256,
            "step": self.best_step,
            "val_loss": self.best_val_loss,
            "metrics": self.metrics[-1],
            "corpus_sha256": self.corpus.sha256,
            "world_size": self.group.world_size,
            "torch_version": torch.__version__,
        }

        model_dir = self.container.model_dir
        output_dir = self.container.output_dir
        with self.checkpoints.writing(model_dir):
            findings = huggingface.write_artefact(
                model_dir, best, self.corpus.tokenizer, training, self.corpus.is_chat
            )
            write_moments(model_dir, self.moments_of_best())
        with self.checkpoints.writing(output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.checkpoints.curve, output_dir / "metrics.jsonl")
        return findings
