"""A trained model for other tools: a Hugging Face directory, or a GGUF file. Called by `export`.

GGUF is the format of llama.cpp and what builds on it:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entry_point import train
from launcher import storage
from launcher.encoder import splits_as_gpt2
from launcher.errors import InputError, extra
from launcher.model import FindScript, load_artefact

KINDS = ("hf", "gguf")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
COPIED = ("tokenizer.json", "tokenizer_config.json", "training.json")


def export(
    directory: Path,
    target: Path,
    kind: str = "hf",
    dtype: str = "float32",
    license: str = "unknown",
    find_script: FindScript = lambda sha256: None,
) -> Path:
    """Write the model of a directory to `target` for other tools; return what was written.

    kind `hf` makes target a directory for transformers, vLLM and the Hugging Face Hub; `gguf` makes
    it one file. dtype is a key of DTYPES. The target is written whole or not at all.

    Raises:
        InputError: as check_request, or the model has no such form.
        TrainingError: the model is damaged.
    """
    check_request(target, kind, dtype)
    load_artefact(directory, find_script)  # which checks everything
    config = json.loads((directory / "config.json").read_bytes())
    if config["model_type"] != "qwen3":
        raise InputError(f"the model's architecture is that of an edited script: {config['why']}")
    if kind == "gguf":
        check_words(directory)
    tensors, _ = train.read_safetensors(directory / "model.safetensors")
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    with storage.reported(str(target)), made(target) as temporary:
        if kind == "gguf":
            write_gguf(temporary, directory, config, tensors, dtype)
        else:
            write_hugging_face(temporary, directory, config, tensors, license)
    return target


def check_request(target: Path, kind: str, dtype: str) -> None:
    """Raise InputError if no model can be written like this; asks nothing of the model."""
    if kind not in KINDS:
        raise InputError(f"format {kind!r}: must be one of {', '.join(KINDS)}")
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    empty = kind == "hf" and target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not empty:
        raise InputError(f"{target} exists; name another place")
    if kind == "gguf":
        with extra("gguf"):
            import gguf  # noqa: F401


def check_words(directory: Path) -> None:
    """Raise InputError unless llama.cpp's `gpt-2` gives the ids of a model's tokenizer."""
    document = json.loads((directory / "tokenizer.json").read_bytes())
    model = document["model"]
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if (
        model["type"] != "BPE"
        or not splits_as_gpt2(document)
        or any(model.get(name) for name in others)
    ):
        raise InputError(
            "llama.cpp has no tokenizer like this model's; for GGUF, train on text that"
            " `upload-data --tokenizer bpe` encoded"
        )


@contextmanager
def made(target: Path) -> Iterator[Path]:
    """A place beside the target, which becomes the target if all goes well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}{storage.TEMPORARY}")
    remove(temporary)  # what an export that was killed left
    try:
        yield temporary
        temporary.replace(target)
    finally:
        remove(temporary)


def remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)


def write_hugging_face(
    place: Path, directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], license: str
) -> None:
    place.mkdir()
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    generation = {"do_sample": True, "temperature": 0.8, "eos_token_id": config["eos_token_id"]}
    documents = {
        "config.json": {**config, "torch_dtype": dtype},
        "generation_config.json": generation,
    }
    for name, document in documents.items():
        (place / name).write_text(json.dumps(document, indent=2) + "\n")
    for name in COPIED:
        shutil.copy(directory / name, place / name)
    train.write_safetensors(place / "model.safetensors", tensors, {"format": "pt"})
    (place / "README.md").write_text(card(directory, config, tensors, license), encoding="utf-8")
    train.write_sums(place)


def card(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], license: str) -> str:
    """A model card: https://huggingface.co/docs/hub/model-cards."""
    training = json.loads((directory / "training.json").read_bytes())
    metrics = training.get("metrics") or {}
    # Without norm_weights, those of the export are ones that nothing trained.
    trained = training["config"]["norm_weights"]
    parameters = sum(
        t.numel() for n, t in tensors.items() if trained or not n.endswith("norm.weight")
    )
    bits = metrics.get("bits_per_byte")  # of the last evaluation, as metrics["val_loss"] is
    of_bytes = json.loads((directory / "tokenizer.json").read_bytes())["model"]["type"] == "BPE"
    tokens = "subword tokens of bytes" if of_bytes else "single characters"
    facts = {
        "Parameters": f"{parameters:,}",
        "Layers, width, heads": "{num_hidden_layers}, {hidden_size}, {num_attention_heads}".format(
            **config
        ),
        "Context": f"{config['max_position_embeddings']} tokens",
        "Vocabulary": f"{config['vocab_size']:,} {tokens}",
        "Step": training.get("step"),
        "Validation loss": rounded(training.get("val_loss")),
        "Bits per byte": rounded(bits and bits * training["val_loss"] / metrics["val_loss"]),
        "Training text, SHA-256": training.get("corpus_sha256"),
        "Script, SHA-256": training.get("script_sha256"),
    }
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items() if fact is not None)
    return f"""---
license: {json.dumps(license)}
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3, sm-nanogpt]
---

# A small language model

Trained from scratch or fine-tuned with sm-nanogpt. It continues text of the kind that it was
trained on, and knows nothing else.

| | |
|---|---|
{table}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
model = AutoModelForCausalLM.from_pretrained("DIRECTORY")
ids = tokenizer("Once", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=100)[0]))
```
"""


def rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def write_gguf(
    place: Path, directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: str
) -> None:
    """Write llama.cpp's form of a Qwen3 model whose tokens are of bytes.

    The tokenizer splits words as GPT-2's does, which is llama.cpp's `gpt-2`.
    """
    import gguf

    tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
    writer = gguf.GGUFWriter(place, "qwen3")
    writer.add_name("sm-nanogpt")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    types = {
        "float32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
        "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
        "float16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    }
    file_type, tensor_type = types[dtype]
    writer.add_file_type(file_type)

    ids = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids |= special
    words = {id: word for word, id in ids.items()}
    count = config["vocab_size"]  # rows beyond the tokens are never used
    normal, control, unused = (
        gguf.TokenType.NORMAL,
        gguf.TokenType.CONTROL,
        gguf.TokenType.UNUSED,
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(id, f"[PAD{id}]") for id in range(count)])
    writer.add_token_types(
        [
            unused if id not in words else control if words[id] in special else normal
            for id in range(count)
        ]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_add_bos_token(False)
    if config["eos_token_id"] is not None:
        writer.add_eos_token_id(config["eos_token_id"])
        writer.add_bos_token_id(config["eos_token_id"])

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        # llama.cpp keeps the weights of norms in float32.
        kind = gguf.GGMLQuantizationType.F32 if tensor.dim() == 1 else tensor_type
        values = gguf.quants.quantize(tensor.float().numpy(), kind)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None
        writer.add_tensor(theirs, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
