"""Write a trained model as a GGUF file, which llama.cpp reads: to_gguf.py JOB-ID|DIR FILE

It needs `pip install gguf`, and a model of subword tokens from `upload-data --tokenizer bpe`.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf

import sm_nanogpt as sm
from sm_nanogpt.entry_point.safetensors_file import read_safetensors
from sm_nanogpt.launcher.models.encoder import GPT2_PATTERN, QWEN35_PATTERN, pattern_of

TYPES = {
    "float32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "float16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
}
# What llama.cpp calls the expressions by which it splits text as we do, in tokenizer.ggml.pre.
PATTERNS = {GPT2_PATTERN: "gpt-2", QWEN35_PATTERN: "qwen35"}


def check(directory: Path) -> None:
    """Exit unless llama.cpp's `qwen3` computes this model, and its tokenizer gives the same ids."""
    document = json.loads((directory / "tokenizer.json").read_bytes())
    model = document["model"]
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if (
        model["type"] != "BPE"
        or document["normalizer"] is not None
        or pattern_of(document) not in PATTERNS
        or not all(token["special"] for token in document["added_tokens"])
        or any(model.get(name) for name in others)
    ):
        raise SystemExit(
            "error: llama.cpp has no tokenizer like this model's; train on text that `upload-data"
            " --tokenizer bpe` encoded"
        )
    if json.loads((directory / "config.json").read_bytes())["model_type"] != "qwen3":
        raise SystemExit("error: the model's architecture is that of an edited script")


def write(directory: Path, file: Path, dtype: str) -> None:
    config = json.loads((directory / "config.json").read_bytes())
    tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
    file_type, tensor_type = TYPES[dtype]
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_name("sm-nanogpt")
    writer.add_file_type(file_type)
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

    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    token_of_id = {}
    for token, id in {**tokenizer["model"]["vocab"], **special}.items():
        token_of_id[id] = token
    tokens = []
    types = []
    for id in range(config["vocab_size"]):
        token = token_of_id.get(id)
        tokens.append(f"[PAD{id}]" if token is None else token)
        if token is None:  # beyond the vocabulary, and never used
            types.append(gguf.TokenType.UNUSED)
        elif token in special:
            types.append(gguf.TokenType.CONTROL)
        else:
            types.append(gguf.TokenType.NORMAL)
    merges = []
    for pair in tokenizer["model"]["merges"]:
        merges.append(pair if isinstance(pair, str) else " ".join(pair))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PATTERNS[str(pattern_of(tokenizer))])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    settings = json.loads((directory / "tokenizer_config.json").read_bytes())
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])
        writer.add_eot_token_id(special["<|im_end|>"])
    if config["eos_token_id"] is not None:
        writer.add_eos_token_id(config["eos_token_id"])
        writer.add_bos_token_id(config["eos_token_id"])

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    tensors, _ = read_safetensors(directory / "model.safetensors")
    for name, tensor in tensors.items():
        # llama.cpp keeps the weights of norms in float32.
        kind = gguf.GGMLQuantizationType.F32 if tensor.dim() == 1 else tensor_type
        values = gguf.quants.quantize(tensor.numpy(), kind)
        theirs = names.get_name(name, (".weight",))
        assert theirs is not None
        writer.add_tensor(theirs, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a model as a GGUF file for llama.cpp.")
    parser.add_argument("model", metavar="JOB-ID|DIR")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=TYPES, default="float32")
    args = parser.parse_args(arguments)
    directory = Path(args.model)
    if not directory.is_dir():
        directory = sm.job(args.model).model()
    check(directory)
    write(directory, args.file, args.dtype)


if __name__ == "__main__":
    main()
