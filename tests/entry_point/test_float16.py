"""A training in 16 bits, and the scale of its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from trainings import run_ranks, trainer_of

from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.device import choose_precision
from sm_nanogpt.entry_point.errors import ConfigError, TrainingError
from sm_nanogpt.entry_point.resume import live_tensors


@pytest.mark.parametrize(
    "capability, dtype",
    [((8, 6), "bfloat16"), ((7, 0), "float16"), ((6, 1), "float32")],
)
def test_each_gpu_computes_in_its_fastest_16_bit_type(monkeypatch, capability, dtype):
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    gpu = torch.device("cuda", 0)
    assert choose_precision(Config(), gpu) == getattr(torch, dtype)
    for precision in ("bfloat16", "float16", "float32"):  # which the person knows best
        assert choose_precision(Config(precision=precision), gpu) == getattr(torch, precision)


@pytest.mark.parametrize("capability, rocm", [((7, 5), None), ((9, 4), "6.4")])
def test_tf32_is_refused_where_it_would_do_nothing(monkeypatch, capability, rocm):
    """On GPUs older than Ampere, and on AMD's, whose numbers are as high."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", rocm)
    with pytest.raises(ConfigError, match="precision=tf32 needs NVIDIA"):
        choose_precision(Config(precision="tf32"), torch.device("cuda", 0))


def test_infinite_gradients_change_only_the_scale(tmp_path):
    trainer = trainer_of(tmp_path, precision="float16", max_steps=3)
    first = {name: tensor.clone() for name, tensor in live_tensors(trainer).items()}
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**100})
    assert trainer.run()
    assert trainer.scaler.get_scale() == 2.0**97
    for name, tensor in live_tensors(trainer).items():
        assert torch.equal(tensor, first[name]), name


def test_gradients_infinite_at_any_scale_end_the_run(tmp_path):
    trainer = trainer_of(tmp_path, precision="float16", max_steps=100)
    trainer.model.embed.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=r"gradients are not .* or precision=float32"):
        trainer.run()


def test_ranks_resume_a_curve_of_11_mb_and_their_scale(tmp_path, text_file):
    probe = (
        "how = dict(n_layer=1, n_embd=16, block_size=8, precision='float16')\n"
        "first, resumed = (trainer_of(**how) for _ in range(2))\n"
        "state = {**first.scaler.state_dict(), 'scale': 128.0, '_growth_tracker': 7}\n"
        "first.scaler.load_state_dict(state)\n"
        "first.metrics = [{'step': step, 'text': 100 * '1'} for step in range(90_000)]\n"
        "train.save_checkpoint(first)\n"
        "train.restore(resumed)\n"
        "print(resumed.scaler.state_dict() == state, len(resumed.metrics))\n"
    )
    ends = run_ranks(tmp_path, text_file, 2, probe)
    assert [end.last_line for end in ends] == ["True 90000", "True 0"]


def test_gradients_in_float16_are_clipped_as_in_float32(tmp_path):
    states = {}
    for precision in ("float32", "float16"):
        trainer = trainer_of(tmp_path / precision, precision=precision, max_steps=1, grad_clip=0.01)
        assert trainer.run()
        states[precision] = trainer.optimizer.state()
    for name, exact in states["float32"].items():
        error = states["float16"][name] - exact
        assert float(error.norm()) <= 0.02 * float(exact.norm()), name


def test_a_run_may_be_resumed_in_another_precision(tmp_path):
    """As on another GPU."""
    for max_steps, precision in enumerate(("float16", "bfloat16", "float16", "float32"), start=5):
        assert trainer_of(tmp_path, precision=precision, max_steps=max_steps).run()
