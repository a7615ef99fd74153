"""A trained model in other tools, as docs/export.md shows: they read the same model."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import launching
import pytest
import to_gguf
import torch
from gguf import GGMLQuantizationType, GGUFReader
from launching import Finished
from pages import blocks

from sm_nanogpt import Job, load_model

PAGE = Path(__file__).parents[2] / "docs/export.md"


@pytest.fixture(scope="session")
def finished_on_tokens(tmp_path_factory, text_file):
    """A job on subword tokens, whose context takes the longest text here. It is shared."""

    def build(directory: Path) -> tuple[Path, str]:
        home = directory / "home"
        tokenizer = ("--tokenizer", "bpe", "--vocab-size", "300")
        upload = launching.command("upload-data", text_file, tokenizer, home=home)
        assert upload.code == 0, upload.err
        launch = launching.command(launching.launching(block_size=160, max_steps=30), home=home)
        assert launch.code == 0, launch.err
        return home, launch.out.strip()

    home, job_id = launching.once(tmp_path_factory, "finished-on-tokens", build)
    return Finished(Path(home), job_id)


@pytest.fixture
def of_tokens(finished_on_tokens, home):
    """A copy of that job in this test's own home."""
    job_id = finished_on_tokens.job_id
    shutil.copytree(finished_on_tokens.directory, home / "jobs" / job_id)
    return job_id


def test_transformers_continues_as_ours_does(of_tokens):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = Job(of_tokens).model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("The ", return_tensors="pt").input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    out = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    ours = Job(of_tokens).sample("The ", 20, temperature=0)
    assert tokenizer.decode(out) == ours.removeprefix("The ")


def test_the_docs_write_a_model_in_16_bits(job):
    from transformers import AutoModelForCausalLM

    (code,) = [block for block in blocks(PAGE, "python") if "transformers" in block]
    exec(code.replace("JOB-ID", job.job_id), {})
    assert AutoModelForCausalLM.from_pretrained("my-model").dtype == torch.bfloat16


def test_gguf_needs_subword_tokens(job):
    with pytest.raises(SystemExit, match="upload-data --tokenizer bpe"):
        to_gguf.main([job.job_id, "out.gguf"])
    assert not Path("out.gguf").exists()


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
        ("model", {"ignore_merges": True}),
        ("normalizer", {"type": "NFC"}),
    ],
)
def test_gguf_takes_no_tokenizer_that_differs(of_tokens, tmp_path, part, change):
    document = json.loads((Job(of_tokens).model() / "tokenizer.json").read_text())
    document[part] = {**(document[part] or {}), **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SystemExit, match=r"llama\.cpp has no tokenizer"):
        to_gguf.check(tmp_path)


def test_gguf_holds_the_model_and_its_tokens(of_tokens):
    to_gguf.main([of_tokens, "out.gguf"])
    model, tokenizer = load_model(Job(of_tokens).model())
    read = GGUFReader("out.gguf")
    fields = {name: field.contents() for name, field in read.fields.items()}
    tensors = {tensor.name: torch.tensor(tensor.data.copy()) for tensor in read.tensors}
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.context_length"] == model.config.block_size
    assert fields["tokenizer.ggml.pre"] == "qwen35"
    assert len(fields["tokenizer.ggml.tokens"]) == len(tokenizer)
    end = fields["tokenizer.ggml.eos_token_id"]
    assert fields["tokenizer.ggml.tokens"][end] == tokenizer.end_of_text
    assert torch.equal(tensors["token_embd.weight"], model.embed.weight)
    assert {"blk.0.attn_q_norm.weight", "output_norm.weight", "output.weight"} <= tensors.keys()


def test_gguf_names_the_pattern_of_an_earlier_model(of_tokens, tmp_path):
    directory = shutil.copytree(Job(of_tokens).model(), tmp_path / "model")
    document = json.loads((directory / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    to_gguf.main([str(directory), "out.gguf"])
    assert GGUFReader("out.gguf").fields["tokenizer.ggml.pre"].contents() == "gpt-2"


def test_gguf_in_16_bits_keeps_norms_in_float32(of_tokens):
    to_gguf.main([of_tokens, "out.gguf", "--dtype", "bf16"])
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader("out.gguf").tensors}
    assert kinds["output_norm.weight"] == GGMLQuantizationType.F32
    assert kinds["blk.0.ffn_up.weight"] == GGMLQuantizationType.BF16


def test_the_endpoint_of_the_docs_is_valid(monkeypatch):
    """Its requests fit SageMaker's model, which botocore has, and name each other."""
    from sagemaker_service import look

    requests: dict[str, Any] = {}

    def answer(model: Any, params: Any, **_: Any) -> Any:
        body = json.loads(params["body"])
        requests[model.name] = body
        problems: list[str] = []
        if model.name != "InvokeEndpoint":
            look(model.input_shape, body, "", problems)
        assert not problems
        text = io.BytesIO(b'{"choices": [{"text": " upon"}]}')
        return SimpleNamespace(status_code=200), {"EndpointStatus": "InService", "Body": text}

    session = boto3.Session("testing", "testing", region_name="us-east-1")
    session.events.register("before-call", answer)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", session)
    exec("\n".join(block for block in blocks(PAGE, "python") if "transformers" not in block), {})

    endpoint = requests["CreateEndpoint"]
    config = requests["CreateEndpointConfig"]
    (variant,) = config["ProductionVariants"]
    assert endpoint["EndpointConfigName"] == config["EndpointConfigName"]
    assert variant["ModelName"] == requests["CreateModel"]["ModelName"]
    assert requests["InvokeEndpoint"]["prompt"] == "Once"
    for name in ("Model", "EndpointConfig", "Endpoint"):
        assert f"Create{name}" in requests
        assert f"Delete{name}" in requests
