"""A trained model for other tools: what is written, and that they read the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from launching import Finished, Ran, tree

from launcher import load_model, sample
from launcher.sampling import encode


@pytest.fixture
def of_tokens(home: Path, text_file: Path, cli: Callable[..., Ran]) -> str:
    """A job on subword tokens."""
    assert cli("upload-data", str(text_file), "--tokenizer", "bpe", "--vocab-size", "300").code == 0
    ran = cli(*launching.launching())
    assert ran.code == 0, ran.err
    return ran.out.strip()


def directory_of(job_id: str, cli: Callable[..., Ran]) -> Path:
    ran = cli("sample", job_id, "--max-new-tokens", "1")
    return Path(ran.err.partition("model: ")[2].splitlines()[0])


def test_transformers_reads_an_export(job: Finished, cli: Callable[..., Ran]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ran = cli("export", job.job_id, "--to", "out")
    assert (ran.code, ran.out) == (0, "out\n"), ran.err
    ours, tokenizer = load_model(directory_of(job.job_id, cli))
    theirs = AutoModelForCausalLM.from_pretrained("out")
    ids = AutoTokenizer.from_pretrained("out")("the house", return_tensors="pt").input_ids
    assert ids.tolist() == [encode(tokenizer, "the house")]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits[:, -1], ours(ids)[:, -1], atol=1e-5)


def test_an_export_may_be_in_bfloat16(job: Finished, cli: Callable[..., Ran]) -> None:
    from transformers import AutoModelForCausalLM

    assert cli("export", job.job_id, "--to", "out", "--dtype", "bf16").code == 0
    assert json.loads(Path("out/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained("out").dtype == torch.bfloat16


def test_the_card_names_license_data_and_loss(job: Finished, cli: Callable[..., Ran]) -> None:
    assert cli("export", job.job_id, "--to", "out", "--license", "mit").code == 0
    card = Path("out/README.md").read_text()
    training = json.loads(Path("out/training.json").read_text())
    assert card.startswith("---\nlicense: mit\n")
    assert f"| Validation loss | {training['val_loss']:.4f} |" in card
    assert f"| {training['corpus_sha256']} |" in card


def test_an_export_replaces_nothing(job: Finished, cli: Callable[..., Ran]) -> None:
    Path("out").mkdir()
    Path("out/mine").touch()
    ran = cli("export", job.job_id, "--to", "out")
    assert (ran.code, ran.error) == (2, "out exists; name another place")
    assert tree(Path("out")) == {"mine"}


def test_a_failed_export_leaves_nothing(
    job: Finished, cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("launcher.export.train.write_safetensors", full)
    assert cli("export", job.job_id, "--to", "sub/out").code == 1
    assert list(Path("sub").iterdir()) == []


def test_characters_have_no_gguf(job: Finished, cli: Callable[..., Ran]) -> None:
    ran = cli("export", job.job_id, "--to", "out.gguf", "--format", "gguf")
    assert ran.code == 2
    assert "upload-data --tokenizer bpe" in ran.error
    assert not Path("out.gguf").exists()


def test_gguf_holds_the_model_and_its_tokens(of_tokens: str, cli: Callable[..., Ran]) -> None:
    from gguf import GGUFReader

    ran = cli("export", of_tokens, "--to", "out.gguf", "--format", "gguf")
    assert (ran.code, ran.out) == (0, "out.gguf\n"), ran.err
    model, tokenizer = load_model(directory_of(of_tokens, cli))
    read = GGUFReader("out.gguf")
    fields = {name: field.contents() for name, field in read.fields.items()}
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.context_length"] == model.config.block_size
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == len(tokenizer) == 300
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]] == (
        tokenizer.end_of_text
    )
    weights = torch.tensor(tensors["token_embd.weight"].data.copy())
    assert weights.shape == (300, model.config.n_embd)
    assert {"blk.0.attn_q_norm.weight", "output_norm.weight", "output.weight"} <= tensors.keys()


def test_gguf_in_16_bits_keeps_norms_in_float32(of_tokens: str, cli: Callable[..., Ran]) -> None:
    from gguf import GGMLQuantizationType, GGUFReader

    words = ("--format", "gguf", "--dtype", "bf16")
    assert cli("export", of_tokens, "--to", "out.gguf", *words).code == 0
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader("out.gguf").tensors}
    assert kinds["output_norm.weight"] == GGMLQuantizationType.F32
    assert kinds["blk.0.ffn_up.weight"] == GGMLQuantizationType.BF16


def test_transformers_continues_as_ours_does(of_tokens: str, cli: Callable[..., Ran]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert cli("export", of_tokens, "--to", "out").code == 0
    tokenizer = AutoTokenizer.from_pretrained("out")
    ids = tokenizer("The ", return_tensors="pt").input_ids
    model: Any = AutoModelForCausalLM.from_pretrained("out")
    out = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(out) == sample(
        of_tokens, prompt="The ", max_new_tokens=20, temperature=0
    )[0].removeprefix("The ")
