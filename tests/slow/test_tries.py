"""Edits of a search that take seconds each: honest ones, and more work than a run may do."""

from __future__ import annotations

import pytest
import searches
from edits import EDITS
from searches import check_folder, tiny_folder

from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.trying.budget import MAX_TIME_RATIO
from sm_nanogpt.launcher.trying.comparison import Comparison
from sm_nanogpt.launcher.trying.runs import SeededRun

shared_search, tiny_search = searches.shared_search, searches.tiny_search  # fixtures

PRESET = "max_steps=60, learning_rate=0.05"
LOSS = "return F.cross_entropy(logits.flatten(0, 1), targets.flatten()"
MLP = "class MLP(nn.Module):\n"
EMBED = "x = self.embed(idx).to(self.compute_dtype)"
SHIFTED = """\
x = self.embed(idx)
        x = (0.5 * (x + F.pad(x, (0, 0, 1, 0))[:, :-1])).to(self.compute_dtype)"""
STEP = "            self.train_step()\n"
BATCH = "block_size=32, batch_size=4"
COSINE = "    height = 0.5 - 0.5 * math.cos(math.pi * height)\n    return warm_up * "
BANNER = f"# {'=' * 60}\n# my own MLP\n# {'=' * 60}\n\n\n"
# Folders of honest edits, a few in each, of different parts: none may be a reason to refuse it.
FOLDERS: dict[str, list[tuple[str, str]]] = {
    "another architecture, tied embeddings, clipped gradients, a warm-up": [
        *EDITS["activation"],
        *EDITS["no QK-norm"],
        *EDITS["learned positions"],
        ("std = n_in**-0.5", "std = 0.5 * n_in**-0.5"),
        (PRESET, f"tie_embeddings=True, n_hidden=48, {PRESET}"),
        (PRESET, f"grad_clip=1.0, warmup_steps=5, {PRESET}"),
    ],
    "a new hyperparameter, AdamW, four heads, a cosine schedule, dashes": [
        *EDITS["hyperparameter"],
        ("activation = staticmethod(F.silu)", "activation = staticmethod(F.gelu)"),
        (PRESET, "rope_theta=500.0, max_steps=60, learning_rate=0.003, optimizer='adamw'"),
        ("n_head=2, n_embd=32, block", "n_head=4, n_embd=32, block"),
        ("    return warm_up * ", COSINE),
        (MLP, f"# {'-' * 80}\n\n\n{MLP}"),
    ],
    "token shift, label smoothing, short contexts, small batches, a banner": [
        (EMBED, SHIFTED),
        (LOSS, f"{LOSS}, label_smoothing=0.05 * self.training"),
        (BATCH, "block_size=16, batch_size=2"),
        (PRESET, "dropout=0.1, weight_decay=0.1, max_steps=240, learning_rate=0.05"),
        ("short_windows=0.3", "short_windows=0.0"),
        ("momentum=0.85", "momentum=0.95"),
        (MLP, f"{BANNER}{MLP}"),
    ],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_honest_edits_passes_the_checks(name, tiny_search, tmp_path):
    check_folder(tiny_folder(tmp_path / "honest", *FOLDERS[name]), tiny_search)


def test_more_steps_by_a_loop_take_more_time(tiny_search, shared_search, tmp_path):
    """Which shows, whatever a run says of its steps; the tiny one has to make 30 times as many."""
    loop = f"            for _ in range(30):\n    {STEP}            self.step -= 29\n"
    cheat = Source.read(tiny_folder(tmp_path / "cheat", (STEP, loop)))
    keep_source(cheat, tiny_search.settings)
    comparison = Comparison(tiny_search, cheat, Source.read(shared_search.base))
    tiny_search.measure([SeededRun(cheat, 1)], "cheat", comparison)
    runs = tiny_search.ledger.of("run")
    assert runs[-1]["tokens"] == runs[0]["tokens"]
    base_seconds = tiny_search.budget.mean_seconds(comparison.base.sha256)
    assert tiny_search.budget.mean_seconds(cheat.sha256) > MAX_TIME_RATIO * base_seconds
