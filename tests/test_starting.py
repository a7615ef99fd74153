"""Runs that start from a model: one of ours, or of the Qwen3 family as transformers writes it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from runs import SMALL, Ended, metrics, run, words

from entry_point.checkpoint import read_safetensors, write_safetensors
from entry_point.config import make_config
from entry_point.errors import ConfigError, DataError, FormatError, TrainingError
from entry_point.huggingface import load_pretrained, starting_values, to_hugging_face
from entry_point.model import GPT
from entry_point.optim import gradient_of
from launcher.launching.start import files_of
from launcher.text import tokens
from launcher.text.corpus import find_text


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "pangrams.txt"
    pangrams = "The quick brown fox jumps over the lazy dog.\nPack my box with five liquor jugs.\n"
    path.write_text(pangrams * 40)
    return path


@pytest.fixture(scope="module")
def byte_pairs(documents):
    return tokens.learn_words(find_text(documents, tokens.is_text), 300)


def publish(directory: Path, byte_pairs: tokens.Words, **values: Any) -> Any:
    """Write a small random model of the Qwen3 family, and return it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{
            "vocab_size": 320,  # more than the tokenizer has, as in published models
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 48,
            "max_position_embeddings": 64,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            **values,
        }
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory, max_shard_size="100KB")
    (directory / "tokenizer.json").write_text(byte_pairs.content)
    (directory / "tokenizer_config.json").write_text(json.dumps(byte_pairs.config))
    return model


def loaded(directory: Path) -> GPT:
    model = GPT(make_config(starting_values(directory, {})), 300)
    load_pretrained(model, directory)
    return model


def encode(documents: Path, byte_pairs: tokens.Words, out: Path) -> None:
    out.mkdir()
    files = find_text(documents, tokens.is_text)
    tokens.encode(files, tokens.survey(files), byte_pairs, out)


def without_shape(values: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters without those that the initial model prescribes."""
    return {name: value for name, value in values.items() if not name.startswith("n_")}


@pytest.mark.parametrize("tied", [False, True])
def test_a_published_model_matches_transformers(tmp_path, byte_pairs, tied):
    theirs = publish(tmp_path, byte_pairs, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = loaded(tmp_path)
    ids = torch.randint(320, (3, 40), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, labels=ids)
    torch.testing.assert_close(ours(ids), expected.logits, atol=1e-4, rtol=1e-4)

    expected.loss.backward()
    ours(ids[:, :-1], ids[:, 1:]).backward()
    gradients = {name: gradient_of(parameter) for name, parameter in ours.named_parameters()}
    names = to_hugging_face(gradients, ours.config)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(names[name], parameter.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_tuned_published_model_loads_elsewhere(documents, byte_pairs, tmp_path, processes):
    import transformers

    publish(tmp_path / "qwen", byte_pairs)
    encode(documents, byte_pairs, tmp_path / "data")
    where = {"data": tmp_path / "data", "init_from": tmp_path / "qwen", "out": tmp_path / "out"}
    ended = run(words(**where, processes=processes, **without_shape(SMALL)), cwd=tmp_path)
    assert ended.status == 0, ended.output
    first, *_, last = metrics(tmp_path / "out/output")
    assert first["step"] == 0
    assert last["val_loss"] < first["val_loss"] - 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    config = json.loads((tmp_path / "out/model/config.json").read_text())
    before = json.loads((tmp_path / "qwen/config.json").read_text())
    same = ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
    assert [config[name] for name in same] == [before[name] for name in same]
    ours = loaded(tmp_path / "out/model")
    ids = torch.arange(30)[None]
    torch.testing.assert_close(ours(ids), model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "values, refused",
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn'"),
        ({"quantization_config": {}}, "quantization_config={}"),
        ({"hidden_size": 0.5}, "n_embd=0.5"),
        ({"num_key_value_heads": 3}, "n_kv_head=3"),
    ],
)
def test_unsupported_model_features_are_named(tmp_path, byte_pairs, values, refused):
    publish(tmp_path, byte_pairs)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(ConfigError, match=re.escape(refused)):
        make_config(starting_values(tmp_path, {}))


def test_a_model_with_masked_documents_stays_so(tmp_path, byte_pairs):
    publish(tmp_path, byte_pairs)
    assert not starting_values(tmp_path, {})["mask_documents"]
    trained = {"config": {"mask_documents": True, "norm_weights": True}}
    (tmp_path / "training.json").write_text(json.dumps(trained))
    assert starting_values(tmp_path, {})["mask_documents"]
    assert starting_values(tmp_path, {"mask_documents": "false"})["mask_documents"] == "false"


def test_an_initial_model_has_a_config_json(tmp_path):
    with pytest.raises(DataError, match=r"config\.json: No such file"):
        starting_values(tmp_path, {})


def test_the_model_prescribes_hyperparameters(tmp_path, byte_pairs):
    publish(tmp_path, byte_pairs)
    with pytest.raises(ConfigError, match="n_layer=3: the initial model has 2"):
        starting_values(tmp_path, {"n-layer": "3"})
    values = starting_values(tmp_path, {"n_layer": "2", "learning_rate": "0.1"})
    assert (values["learning_rate"], values["block_size"]) == ("0.1", 64)


NORM = "model.norm.weight"


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors, _ = read_safetensors(file)
    change(tensors)
    write_safetensors(file, tensors, {})


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda file, index: file.unlink(), "No such file"),
        (lambda file, index: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (lambda file, index: file.write_bytes(b"\1\0\0\1" + bytes(1 << 25)), "16,777,217 bytes"),
        (lambda file, index: index.write_text("{}"), "weight_map"),
        (lambda file, index: index.write_text(index.read_text().replace("model-", "../")), "'../"),
        (
            lambda file, index: change_tensors(file, lambda t: t.update({NORM: t[NORM].int()})),
            f"{NORM} is of torch.int32",
        ),
        (lambda file, index: change_tensors(file, lambda t: t.pop(NORM)), f"{NORM} is nothing"),
    ],
    ids=["missing", "cut", "vast header", "no map", "elsewhere", "whole numbers", "other name"],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, byte_pairs, damage, error):
    publish(tmp_path, byte_pairs)
    index = tmp_path / "model.safetensors.index.json"
    damage(tmp_path / json.loads(index.read_text())["weight_map"][NORM], index)
    with pytest.raises((FormatError, TrainingError), match=error):
        loaded(tmp_path)


# -- from a model of characters --------------------------------------------------------------------


@pytest.fixture
def start(finished):
    return finished.directory / "hosts/algo-1/model"


def tune(start: Path, text: str, out: Path, **values: Any) -> Ended:
    file = out.with_suffix(".txt")
    file.write_text(text)
    given = {**without_shape(SMALL), "block_size": 32, "max_steps": 6, **values}
    return run(words(data=file, init_from=start, out=out, **given), cwd=out.parent)


@pytest.mark.parametrize(("optimizer", "rate"), [("muon", 0.005), ("adamw", 0.001)])
def test_the_tuning_rate_of_muon_is_not_for_adamw(start, optimizer, rate):
    values = starting_values(start, {"optimizer": optimizer})
    assert make_config(values).learning_rate == rate


def test_an_initial_model_of_words_is_refused(start, text, tmp_path):
    shutil.copytree(start, tmp_path / "words")
    file = tmp_path / "words/tokenizer.json"
    document = json.loads(file.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["word"] = vocabulary.pop("a")
    file.write_text(json.dumps(document))
    ended = tune(tmp_path / "words", text[:10_000], tmp_path / "out")
    assert (ended.status, ended.output.count("\n")) == (2, 1)
    assert ended.output.startswith("DataError: the initial model has words")


def test_step_0_is_the_model_as_it_was(start, text, tmp_path):
    ended = tune(start, text, tmp_path / "out", eval_windows=32, precision="float32")
    assert ended.status == 0, ended.output
    first = metrics(tmp_path / "out/output")[0]
    before = json.loads((start / "training.json").read_text())
    assert first["step"] == 0
    assert first["val_loss"] == pytest.approx(before["val_loss"], abs=1e-6)
    assert first["val_loss"] == first["best_loss"]


def test_data_unlike_the_initial_model_is_refused(start, documents, byte_pairs, tmp_path):
    (tmp_path / "strange.txt").write_text("hōllo wūrld\n" * 99)
    encode(documents, byte_pairs, tmp_path / "tokens")
    for data, named in (("strange.txt", ": 'ō', 'ū'"), ("tokens", "upload-data --tokenizer")):
        where = {"data": tmp_path / data, "init_from": start, "out": tmp_path / "out"}
        ended = run(words(**where), cwd=tmp_path)
        assert ended.status == 2
        assert ended.last_line.startswith("DataError: ")
        assert named in ended.last_line


def test_a_resumed_run_keeps_characters_and_bits(start, tmp_path):
    """The text has fewer characters than the model, so their ids are not the text's own."""
    text = "to be or not to be, that is the question\n" * 99
    for name in ("whole", "half"):
        ended = tune(start, text, tmp_path / name, max_steps=8, checkpoint_seconds=0.001)
        assert ended.status == 0, ended.output
    for name in ("model", "output"):
        shutil.rmtree(tmp_path / "half" / name)
    checkpoints = sorted((tmp_path / "half/checkpoints").glob("checkpoint-*"))
    checkpoints[-1].unlink()
    ended = run(words(resume=tmp_path / "half"), cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert "resumed from the checkpoint of step 7" in ended.output
    whole, half = (tmp_path / name / "model" for name in ("whole", "half"))
    assert (whole / "model.safetensors").read_bytes() == (half / "model.safetensors").read_bytes()
    for model in (whole, half):
        assert (model / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()


# -- by launch -------------------------------------------------------------------------------------


def test_three_commands_tune_a_published_model(documents, byte_pairs, home, cli, tmp_path):
    publish(tmp_path / "qwen", byte_pairs)
    qwen = str(tmp_path / "qwen")
    assert cli("upload-data", str(documents), "--tokenizer", qwen).code == 0
    how = launching.sets(**without_shape(launching.TINY))
    ran = cli("launch", "--instance", "local", "--init-from", qwen, *how)
    assert ran.code == 0, ran.err
    sampled = cli("fetch-and-sample", "latest", "--temperature", "2", "--max-new-tokens", "300")
    assert sampled.code == 0, sampled.err
    shown = cli("status", "latest", "--json")
    assert json.loads(shown.out)["hyperparameters"]["n_kv_head"] == 2


def test_launch_refuses_text_unlike_the_model(job, documents, byte_pairs, cli, tmp_path):
    qwen, strange = str(tmp_path / "qwen"), tmp_path / "strange.txt"
    publish(tmp_path / "qwen", byte_pairs)
    strange.write_text("¡Olé! " * 999)
    encoded = cli("upload-data", str(documents), "--tokenizer", qwen).out.strip()
    for model, data, said in (
        (job.job_id, str(strange), f"{job.job_id} does not know: '¡'"),
        (job.job_id, encoded, f"its tokens are not those of {job.job_id}; "),
        (qwen, str(documents), f"{qwen} takes tokens; "),
    ):
        ran = cli("launch", "--instance", "local", "--init-from", model, "--data", data)
        assert ran.code == 2
        assert said in ran.error


def test_a_character_model_encodes_a_tuning_text(job, text, cli, tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": text[5000:9000]}) + "\n")
    for name in ("latest", job.job_id[-6:], job.job_id):
        assert cli("upload-data", "other.jsonl", "--tokenizer", name).code == 0
    how = launching.sets(**{**without_shape(launching.TINY), "max_steps": 2})
    ran = cli("launch", "--instance", "local", "--init-from", job.job_id, *how)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    "words, error",
    [
        (("--init-from", "./nothing"), "./nothing: no such directory"),
        (("--init-from", "{job}", "--resume", "{job}"), "--init-from starts a new run"),
        (("--init-from", "{job}", "--set", "n_layer=3"), "n_layer=3: the initial model has"),
        (("--init-from", "{job}", "--set", "n_layr=3"), "there is no such hyperparameter"),
    ],
)
def test_an_impossible_start_is_refused(job, cli, words, error):
    local = () if "--resume" in words else ("--instance", "local")
    ran = cli("launch", *local, *(word.format(job=job.job_id) for word in words))
    assert ran.code == 2
    assert error in ran.error


def test_a_resumed_job_keeps_its_initial_model(job, cli):
    words = ("--instance", "local", "--init-from", job.job_id, *launching.sets(max_steps=4))
    data = json.loads((job.directory / "job.json").read_text())["job"]["data"]
    ran = cli("launch", *words, "--data", data)
    assert ran.code == 0, ran.err
    ran = cli("launch", "--resume", ran.out.strip(), "--set", "max_steps=6")
    assert ran.code == 0, ran.err
    assert "resumed from the checkpoint of step 4" in ran.err


@pytest.mark.usefixtures("cloud")
def test_sagemaker_gets_the_model_as_a_channel(s3, job, text_file, cli):
    words = ("--instance", "ml.g5.xlarge", "--init-from", job.job_id, "--data", str(text_file))
    ran = cli("launch", *words, "--dry-run")
    assert ran.code == 0, ran.err
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in json.loads(ran.out)["InputDataConfig"]
    }
    assert f"/models/{job.job_id}-" in channels["model"]
    assert channels["model"].endswith("/")


@pytest.mark.usefixtures("cloud")
def test_a_model_on_s3_is_read_where_it_is(s3, byte_pairs, text_file, cli, tmp_path):
    publish(tmp_path / "qwen", byte_pairs)
    padded = json.loads(byte_pairs.content) | {"comment": "x" * (1 << 22)}  # as large as real ones
    (tmp_path / "qwen/tokenizer.json").write_text(json.dumps(padded))
    for path in (tmp_path / "qwen").iterdir():
        s3.upload_file(str(path), s3.bucket, f"models/qwen/{path.name}")
    uri = f"s3://{s3.bucket}/models/qwen"
    words = ("launch", "--instance", "ml.g5.xlarge", "--dry-run", "--init-from", uri)
    ran = cli(*words, "--data", f"s3://{s3.bucket}/tokens")
    assert ran.code == 0, ran.err
    request = json.loads(ran.out)
    assert request["HyperParameters"]["n_kv_head"] == "2"
    assert request["InputDataConfig"][1]["DataSource"]["S3DataSource"]["S3Uri"] == f"{uri}/"
    ran = cli(*words[:-1], f"s3://{s3.bucket}/models", "--data", str(text_file))
    assert ran.code == 2
    assert f"s3://{s3.bucket}/models: no config.json" in ran.error


def test_only_files_that_a_run_reads_are_sent(tmp_path):
    read = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in (*read, "README.md", "pytorch_model.bin", "SHA256SUMS"):
        (tmp_path / name).touch()
    (tmp_path / "more.safetensors").mkdir()
    assert [path.name for path in files_of(tmp_path)] == read
