"""Train a GPT on text or on tokens, on one process or on many hosts of many GPUs.

This folder needs only torch and the standard library. Copy it anywhere and run this file:

    python train.py --data input.txt                                      # all GPUs of this machine
    python train.py --data input.txt --device cpu --processes 2           # two processes on the CPU
    torchrun --nproc_per_node 4 train.py --data input.txt --preset baby   # one host with four GPUs
    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 4 --master_addr HOST --master_port 29500 \\
        train.py --data input.txt        # on the first of two hosts; the other has --node_rank 1

In a SageMaker container it needs no arguments except hyperparameters. It reads the text from the
`training` channel (and the `validation` channel, if there is one), resumes from
/opt/ml/checkpoints, and leaves a Hugging Face model directory in /opt/ml/model.
`python train.py --help` lists the rest.

To change                                                   open

    a hyperparameter, and its help                          config.py
    a preset                                                presets.py
    the hyperparameters of a size (`launch --size`)         sizes.py
    a layer, the activation, what the model is              model.py
    how attention, norms and the loss are computed          kernels.py
    the learning rate schedule, the optimizers              optim.py
    what a batch is, evaluation                             data.py
    how text is read                                        text.py
    the loop, and what a step does                          trainer.py, passes.py
    the metrics of the log, and what else it says           metrics.py, report.py
    what is learned of conversations                        conversations.py
    what a checkpoint holds, and how a run continues        resume.py
    when a checkpoint is due, and which are kept            checkpoint.py
    which steps' weights show how it learned                moments.py
    the model directory for transformers                    huggingface.py, qwen3.py
    how it is found out that a model looks ahead            causality.py

and, seldom, the command line (command_line.py), SageMaker's hosts and paths (container.py), devices
and precision (device.py), cores (cores.py), how threads wait for each other (waiting.py), how
processes start (processes.py), communicate (distributed.py) and are watched (watchdog.py), CUDA
graphs (cuda_graphs.py), messages (errors.py), faults on purpose (faults.py), files and how they are
replaced (files.py), and the format of tensors (safetensors_file.py).
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(__file__).resolve().parent
if not __package__:  # run as a script: its folder, whatever its name, is the package
    if not (FOLDER / "config.py").is_file():
        sys.stderr.write("error: train.py needs the files beside it; copy the whole folder\n")
        sys.exit(2)
    package = types.ModuleType("entry_point")
    package.__path__ = [str(FOLDER)]
    sys.modules["entry_point"] = package
    __package__ = "entry_point"

from .startup import limit_spinning, open_standard_streams

if __name__ == "__main__":  # torch reads two of these variables when it is imported
    limit_spinning()
    # A rank whose peer is gone prints C++ stack traces as warnings, before the reason and after it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The Pythons that this one starts, such as ranks on GPUs, import nothing of the current
    # directory, where a user may have a random.py.
    os.environ["PYTHONSAFEPATH"] = "1"
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # it is not needed
    import torch.distributed as dist

from . import huggingface
from .checkpoint import Checkpoints
from .command_line import Options, option_table, read_options
from .config import Config, make_config
from .container import Container, Ranks, read_container, read_ranks
from .device import (
    choose_device,
    keep_freed_memory,
    local_processes,
    rank_device,
    share_cores,
    share_cores_to_compile,
    tokens_per_pass,
)
from .distributed import Group
from .errors import (
    ConfigError,
    DataError,
    TrainingError,
    failure_report,
    first_line,
    is_out_of_memory,
    log,
    report_failure,
)
from .processes import StopSignals, end_with_parent, start_ranks
from .text import load_corpus
from .trainer import Trainer


def parse_argv(argv: Sequence[str]) -> tuple[Config, Options]:
    """Hyperparameters and options; a resumed run takes missing ones from its checkpoint.

    Raises ConfigError if a word is wrong, or --resume names no run.
    """
    values, options = read_options(argv)
    saved: dict[str, Any] = {}
    if options.resume:
        saved = Checkpoints(Path(options.resume) / "checkpoints").latest_state()
        options = options.resumed(saved)
    elif options.init_from:
        values = huggingface.starting_values(Path(options.init_from), values)
    return make_config(values, options.preset, saved.get("config")), options


def train(config: Config, options: Options, container: Container, ranks: Ranks) -> int:
    """Runs one rank from start to end; returns its exit status."""
    device = rank_device(config, container, ranks)
    config.check_world_size(ranks.world_size)

    by_hand = not container.inside
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if by_hand and restarted and not (options.out or options.resume):
        raise ConfigError("torchrun restarted this run: only with --out DIRECTORY can it continue")
    is_new = by_hand and not restarted and not options.resume

    group = Group(ranks, device, container, config.hang_seconds)
    if not os.environ.get("OMP_NUM_THREADS"):  # some builds of torch take 1 under mpirun
        share_cores(ranks.local_world_size)
    share_cores_to_compile(ranks.local_world_size)
    corpus = load_corpus(container, config, group)
    if device.type == "cpu":
        keep_freed_memory()  # for the steps; the memory for reading the text was already returned
    trainer = Trainer(config, container, group, corpus)
    if trainer.is_main:
        trainer.checkpoints.claim(is_new)

    signals = StopSignals()

    def on_signal(signum: int, frame: Any) -> None:
        if signals.repeats(signum) and signum == signal.SIGINT:
            os._exit(128 + signum)  # a second Ctrl-C does not wait for the step to end
        trainer.stop_signal = signals.first

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    trainer.introduce(ranks)
    is_finished = trainer.run()
    group.close()
    if is_finished:
        return 0
    return 128 + (trainer.stop_signal or signal.SIGTERM)  # another rank may have got the signal


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently
        print(f"{__doc__}\n{option_table()}", flush=True)
        return 0
    # The log's encoding may lack characters of a sample.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.showwarning = show_warning
    if "SM_NANOGPT_LAUNCHER" in os.environ:  # a process of the launcher has started this one
        end_with_parent()
    config, options = parse_argv(argv)
    container = read_container(os.environ, options)
    ranks = read_ranks(os.environ, len(container.hosts))
    if ranks is None:
        n_local = local_processes(config, container, options)
        world_size = n_local * len(container.hosts)
        config.check_world_size(world_size)
        if world_size > 1:
            device_type = choose_device(config, container, n_local)
            return start_ranks(run_rank, container, n_local, device_type)
        ranks = Ranks(0, 1, 0, 1, os.environ.get("SM_NANOGPT_LAUNCHER", "hand"))
    elif options.processes not in (0, ranks.local_world_size):
        raise TrainingError(
            f"processes={options.processes}, but {ranks.launcher} started {ranks.local_world_size}"
        )

    try:
        return train(config, options, container, ranks)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            device = rank_device(config, container, ranks)
            n_passes = config.passes(ranks.world_size, tokens_per_pass(config, device))
            raise out_of_memory(n_passes, error) from None
        raise


def out_of_memory(n_passes: int, error: Exception) -> TrainingError:
    """What a run that makes so many passes a step may do about torch's error."""
    return TrainingError(
        f"set a larger gradient_accumulation_steps (now {n_passes}), recompute=True, or a smaller"
        f" batch_size, block_size or n_embd; torch says: {first_line(error)}"
    )


@functools.cache
def log_once(line: str) -> None:
    log(line)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """In place of warnings.showwarning: logs each message once, in one line.

    Python's own would name an exception class, and SageMaker would take it for the failure.
    """
    log_once("note: " + " ".join(str(message).split()))


def run_rank(env: Mapping[str, str], argv: Sequence[str]) -> NoReturn:
    """The whole life of a process that start_ranks starts."""
    os.environ.update(env)
    run(argv)


def run(argv: Sequence[str]) -> NoReturn:
    """Runs `main` and ends the process with its status, or with the report of an error.

    It exits with os._exit: at interpreter shutdown, gloo's threads sometimes abort a run that has
    succeeded.
    """
    gc.disable()  # a rank that stops to look for garbage delays all; save_checkpoint collects it
    gc.freeze()  # and need not look at what the imports made, which takes a tenth of a second
    try:
        status = main(argv)
    except KeyboardInterrupt:  # before the training began
        status = 128 + signal.SIGINT
    except BaseException as error:
        if dist.is_initialized() and isinstance(error, RuntimeError):
            # It may be an echo of another rank's failure, as torch's own errors are RuntimeErrors.
            # The rank that failed reports first, and its launcher then ends this one.
            time.sleep(5)
        report_failure(failure_report(error))
        status = 2 if isinstance(error, (ConfigError, DataError)) else 1
    os._exit(status)  # log and report_failure have flushed what they wrote


if __name__ == "__main__":
    open_standard_streams()
    run(sys.argv[1:])
