"""A trained model for other tools: what is written, and that they read the same model."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import launching
import pytest
import torch
from launching import Finished, Ran, tree
from test_docs import blocks

from launcher import InputError, load_model, sample, stream_samples
from launcher.export import DTYPES, check_words, export
from launcher.sampling import encode


@pytest.fixture(scope="session")
def finished_on_tokens(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Finished:
    """A job on subword tokens, whose context takes the longest text here. It is shared."""

    def build(directory: Path) -> tuple[Path, str]:
        home = directory / "home"
        upload = ("upload-data", str(text_file), "--tokenizer", "bpe", "--vocab-size", "300")
        for words in (upload, launching.launching(block_size=160, max_steps=30)):
            ran = launching.command(*words, home=home)
            assert ran.code == 0, ran.err
        return home, ran.out.strip()

    home, job_id = launching.once(tmp_path_factory, "finished-on-tokens", build)
    return Finished(Path(home), job_id)


@pytest.fixture
def of_tokens(finished_on_tokens: Finished, home: Path) -> str:
    """A copy of that job in this test's own home."""
    job_id = finished_on_tokens.job_id
    shutil.copytree(finished_on_tokens.directory, home / "jobs" / job_id)
    return job_id


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
    assert card.startswith('---\nlicense: "mit"\n')
    assert f"| Validation loss | {training['val_loss']:.4f} |" in card
    assert f"| {training['corpus_sha256']} |" in card
    log = (job.directory / "logs/job.log").read_text()
    assert f"| Parameters | {re.search(r'([0-9,]+) parameters;', log)[1]} |" in card  # type: ignore[index]


def test_a_license_is_one_value_of_the_card(job: Finished, cli: Callable[..., Ran]) -> None:
    assert cli("export", job.job_id, "--to", "out", "--license", "a: b\nc: d").code == 0
    assert '\nlicense: "a: b\\nc: d"\n' in Path("out/README.md").read_text()


def test_an_export_replaces_nothing(job: Finished, cli: Callable[..., Ran]) -> None:
    Path("out").mkdir()
    Path("out/mine").touch()
    ran = cli("export", job.job_id, "--to", "out")
    assert (ran.code, ran.error) == (2, "out exists; name another place")
    assert tree(Path("out")) == {"mine"}
    assert not (job.home / "models").exists()  # it is refused before a download


def test_a_directory_without_a_model_is_one_line(cli: Callable[..., Ran], tmp_path: Path) -> None:
    ran = cli("export", str(tmp_path), "--to", "out")
    assert (ran.code, ran.error) == (1, f"{tmp_path}: SHA256SUMS: No such file or directory")


def test_gguf_does_not_take_an_empty_directory(cli: Callable[..., Ran]) -> None:
    Path("out").mkdir()
    assert "exists" in cli("export", "some-job", "--to", "out", "--format", "gguf").error


@pytest.mark.parametrize(("kind", "dtype"), [("hf", "int8"), ("onnx", "float32")])
def test_an_unknown_form_is_refused_first(tmp_path: Path, kind: str, dtype: str) -> None:
    with pytest.raises(InputError, match=r"'(int8|onnx)': must be one of"):
        export(tmp_path / "nothing", tmp_path / "sub/out", kind, dtype)
    assert tree(tmp_path) == set()


def test_a_failed_export_leaves_nothing(
    job: Finished, cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("launcher.export.train.write_safetensors", full)
    assert cli("export", job.job_id, "--to", "sub/out").code == 1
    assert list(Path("sub").iterdir()) == []


def test_what_a_killed_export_left_is_replaced(job: Finished, cli: Callable[..., Ran]) -> None:
    Path(".out.tmp").mkdir()
    Path(".out.tmp/config.json").touch()
    assert cli("export", job.job_id, "--to", "out").code == 0
    assert not Path(".out.tmp").exists()


def test_characters_have_no_gguf(job: Finished, cli: Callable[..., Ran]) -> None:
    ran = cli("export", job.job_id, "--to", "sub/out.gguf", "--format", "gguf")
    assert ran.code == 2
    assert "upload-data --tokenizer bpe" in ran.error
    assert not Path("sub").exists()


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("pre_tokenizer", {"add_prefix_space": True}),
        ("pre_tokenizer", {"use_regex": False}),
        ("model", {"ignore_merges": True}),
        ("normalizer", {"type": "NFC"}),
    ],
)
def test_gguf_takes_no_tokenizer_that_differs(
    of_tokens: str, cli: Callable[..., Ran], tmp_path: Path, part: str, change: dict[str, Any]
) -> None:
    document = json.loads((directory_of(of_tokens, cli) / "tokenizer.json").read_text())
    document[part] = {**(document[part] or {}), **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"llama\.cpp has no tokenizer"):
        check_words(tmp_path)


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


# -- llama.cpp ------------------------------------------------------------------------------------

PROMPTS = (
    "The house",
    "  it's\r\n\r\n\t12345 <|endoftext|>",
    "naïve café … Жук",
    "漢字 🙂🚀👩‍🚀\n",
)


@pytest.fixture
def llama(of_tokens: str, cli: Callable[..., Ran]) -> Callable[[str], Any]:
    """Exports that job as a type of weights, and reads it with llama.cpp."""
    how = "building llama.cpp takes ten minutes: pip install llama-cpp-python==0.3.36"
    llama_cpp = pytest.importorskip("llama_cpp", reason=how)

    def read(dtype: str) -> Any:
        words = ("--to", "out.gguf", "--format", "gguf", "--dtype", dtype)
        ran = cli("export", of_tokens, *words)
        assert ran.code == 0, ran.err
        cache = dict(type_k=0, type_v=0)  # in float32; float16 is its default
        return llama_cpp.Llama("out.gguf", n_ctx=160, logits_all=True, verbose=False, **cache)

    return read


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("float16", 0.02), ("bf16", 0.1)])
def test_llama_cpp_computes_what_we_do(
    llama: Callable[[str], Any], of_tokens: str, cli: Callable[..., Ran], dtype: str, error: float
) -> None:
    theirs = llama(dtype)
    ours, tokenizer = load_model(directory_of(of_tokens, cli))
    for prompt in PROMPTS:
        ids = encode(tokenizer, prompt)
        assert theirs.tokenize(prompt.encode(), add_bos=True) == ids
        theirs.reset()
        theirs.eval(ids)
        with torch.no_grad():
            expected = ours(torch.tensor([ids]))[0]
        found = torch.tensor(theirs.scores[: len(ids)])
        assert torch.allclose(found, expected, rtol=0, atol=error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_cpp_continues_as_ours_does(
    llama: Callable[[str], Any], of_tokens: str, cli: Callable[..., Ran], dtype: str
) -> None:
    theirs = llama(dtype)
    ours, tokenizer = load_model(directory_of(of_tokens, cli))
    for weight in ours.parameters():
        if weight.dim() > 1:  # rounded as in the file
            weight.data = weight.data.to(DTYPES[dtype]).float()
    for prompt in PROMPTS:
        # Ids, since llama-cpp-python takes the end of a text for a token where it is typed.
        told = theirs.create_completion(encode(tokenizer, prompt), max_tokens=100, temperature=0)
        columns = stream_samples(ours, tokenizer, prompt, 100, temperature=0)
        assert told["choices"][0]["text"] == "".join(piece for (piece,) in columns)


# -- servers --------------------------------------------------------------------------------------


def test_the_endpoint_of_the_docs_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests fit SageMaker's model, which botocore has, and name each other."""
    from sagemaker_service import look

    asked: dict[str, Any] = {}

    def answer(model: Any, params: Any, **_: Any) -> Any:
        problems: list[str] = []
        asked[model.name] = body = json.loads(params["body"])
        if model.name != "InvokeEndpoint":
            look(model.input_shape, body, "", problems)
        assert not problems
        text = io.BytesIO(b'{"choices": [{"text": " upon"}]}')
        return SimpleNamespace(status_code=200), {"EndpointStatus": "InService", "Body": text}

    session = boto3.Session("testing", "testing", region_name="us-east-1")
    session.events.register("before-call", answer)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", session)
    page = Path(__file__).parent.parent / "docs/export.md"
    exec("\n".join(block for block in blocks(page, "python") if "transformers" not in block), {})

    endpoint, config = asked["CreateEndpoint"], asked["CreateEndpointConfig"]
    (variant,) = config["ProductionVariants"]
    assert endpoint["EndpointConfigName"] == config["EndpointConfigName"]
    assert variant["ModelName"] == asked["CreateModel"]["ModelName"]
    assert asked["InvokeEndpoint"]["prompt"] == "Once"
    made = {name.removeprefix("Create") for name in asked if name.startswith("Create")}
    assert {name.removeprefix("Delete") for name in asked if name.startswith("Delete")} == made
