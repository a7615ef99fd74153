"""Presets: hyperparameters by name, for a kind of machine and text. Imports no torch."""

from __future__ import annotations

from typing import Any

# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    # The size of nanoGPT's configuration for a CPU: about a minute on two cores.
    "cpu": dict(n_layer=4, n_head=2, n_embd=128, block_size=64, batch_size=12, max_steps=2000,
                device="cpu"),
    # Learns what nanoGPT's configuration for a CPU does, in a twentieth of its minute: in so few
    # steps two wide layers learn more than four.
    "quick": dict(n_layer=2, n_head=2, n_embd=176, n_hidden=480, block_size=64, batch_size=12,
                  max_steps=180, learning_rate=0.05, momentum=0.85, short_windows=0.3,
                  eval_interval=90, device="cpu"),
    # The best model that two CPU cores make of a megabyte of text in three minutes.
    "laptop": dict(n_layer=4, n_head=3, n_embd=192, block_size=1024, batch_size=2, max_steps=1900,
                   weight_decay=0.1, short_windows=0.9, eval_interval=500, eval_tokens=1 << 17,
                   device="cpu"),
    # As large as nanoGPT's train_shakespeare_char, the model of most tutorials; for a GPU. Its
    # values are for a megabyte of text, which it memorizes without weight decay.
    "baby": dict(n_layer=6, n_head=3, n_embd=384, block_size=256, batch_size=64, max_steps=1000,
                 learning_rate=0.03, weight_decay=0.6, dropout=0.2, log_interval=10,
                 eval_tokens=1 << 17),
    # For subword tokens, 300 million of them and more, and about an hour on one A10G.
    "small": dict(n_layer=8, n_head=4, n_embd=512, block_size=512, tie_embeddings=True,
                  batch_size=128, max_steps=5000, weight_decay=0.1, log_interval=10,
                  eval_tokens=1 << 18),
    # The size of GPT-2; half a million tokens a step, 2.5 billion in all.
    "gpt2": dict(n_layer=12, n_head=6, n_embd=768, block_size=1024, tie_embeddings=True,
                 batch_size=480, max_steps=5000, momentum=0.95, weight_decay=0.1, log_interval=10,
                 eval_tokens=1 << 19),
}
# fmt: on
