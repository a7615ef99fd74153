"""Runs that start from a model: one of ours, or of the Qwen3 family as transformers writes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from runs import SMALL, metrics, run, words

from entry_point.checkpoint import read_safetensors, write_safetensors
from entry_point.config import make_config
from entry_point.errors import ConfigError, DataError, FormatError, TrainingError
from entry_point.huggingface import load_pretrained, starting_values, to_hugging_face
from entry_point.model import GPT
from entry_point.optim import gradient_of
from launcher.models import engine
from launcher.text import tokens
from launcher.text.corpus import find_text

PANGRAMS = (
    "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n" * 40
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "pangrams.txt"
    path.write_text(PANGRAMS)
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


def test_greedy_text_of_a_published_model_equals_plain_loop(tmp_path, byte_pairs):
    publish(tmp_path, byte_pairs)
    model = loaded(tmp_path).eval()
    prompt = torch.arange(12).view(6, 2)  # enough of them for the engine's own attention
    ours = torch.stack(list(engine.generate(model, prompt, 40, temperature=0)))
    plain = torch.stack(list(engine.generate_plainly(model, prompt, 40, temperature=0)))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_published_model_is_trained_and_published_again(
    documents, byte_pairs, tmp_path, processes
):
    import transformers

    publish(tmp_path / "qwen", byte_pairs)
    (tmp_path / "data").mkdir()
    files = find_text(documents, tokens.is_text)
    tokens.encode(files, tokens.survey(files), byte_pairs, tmp_path / "data")
    values = {name: value for name, value in SMALL.items() if not name.startswith("n_")}
    ended = run(
        words(
            data=tmp_path / "data",
            init_from=tmp_path / "qwen",
            out=tmp_path / "out",
            processes=processes,
            **values,
        ),
        cwd=tmp_path,
    )
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
        ({"model_type": "llama"}, "model_type='llama'; this script computes only 'qwen3'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn'"),
        ({"quantization_config": {}}, "quantization_config={}"),
        ({"hidden_size": 0.5}, "n_embd=0.5: must be a whole number"),
        ({"num_key_value_heads": 3}, "n_head=4 cannot share n_kv_head=3 evenly"),
    ],
)
def test_an_unsupported_model_feature_is_refused_by_name(tmp_path, byte_pairs, values, refused):
    publish(tmp_path, byte_pairs)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(ConfigError) as error:
        make_config(starting_values(tmp_path, {}))
    assert refused in str(error.value)


def test_a_model_with_masked_documents_stays_so(tmp_path, byte_pairs):
    publish(tmp_path, byte_pairs)
    assert not starting_values(tmp_path, {})["mask_documents"]
    trained = {"config": {"mask_documents": True, "norm_weights": True}}
    (tmp_path / "training.json").write_text(json.dumps(trained))
    assert starting_values(tmp_path, {})["mask_documents"]
    assert starting_values(tmp_path, {"mask_documents": "false"})["mask_documents"] == "false"


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"config\.json: No such file"):
        starting_values(tmp_path, {})


def test_a_hyperparameter_unlike_the_models_is_refused(tmp_path, byte_pairs):
    publish(tmp_path, byte_pairs)
    with pytest.raises(ConfigError, match=r"n_layer=3: the initial model has 2"):
        starting_values(tmp_path, {"n-layer": "3"})
    values = starting_values(tmp_path, {"n_layer": "2", "learning_rate": "0.1"})
    assert (values["learning_rate"], values["block_size"]) == ("0.1", 64)


@pytest.mark.parametrize(
    "damage, error",
    [
        ("missing", "No such file"),
        ("damaged", "is damaged"),
        ("vast header", "its header has 16,777,217 bytes"),
        ("no map", "its weight_map is missing"),
        ("elsewhere", "'../model.safetensors' is no plain name"),
        ("whole numbers", r"model\.norm\.weight is of torch\.int32"),
        (
            "other",
            r"model\.norm\.weight is nothing in the initial model and \[64\] in this script",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, byte_pairs, damage, error):
    publish(tmp_path, byte_pairs)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    file = tmp_path / index["weight_map"]["model.norm.weight"]
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "vast header":
        length = (1 << 24) + 1
        file.write_bytes(length.to_bytes(8, "little") + b" " * length)
    elif damage == "no map":
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    elif damage == "elsewhere":
        index["weight_map"]["model.norm.weight"] = "../model.safetensors"
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        tensors, _ = read_safetensors(file)
        weight = tensors.pop("model.norm.weight")
        if damage == "whole numbers":
            tensors["model.norm.weight"] = weight.int()
        write_safetensors(file, tensors, {})
    with pytest.raises((FormatError, TrainingError), match=error):
        loaded(tmp_path)


# -- from a model of characters --------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """The directory of a run of characters."""
    base = tmp_path_factory.mktemp("trained")
    (base / "input.txt").write_text(text[:100_000])
    small = {**SMALL, "max_steps": 60, "eval_interval": 60}
    ended = run(words(data=base / "input.txt", out=base / "out", **small), cwd=base)
    assert ended.status == 0, ended.output
    return base / "out"


def tune(trained: Path, text: str, out: Path, **values: Any) -> Any:
    file = out.with_suffix(".txt")
    file.write_text(text)
    small = {name: value for name, value in SMALL.items() if not name.startswith("n_")}
    start = trained / "model"
    given = {**small, "block_size": 32, "max_steps": 6, **values}
    return run(words(data=file, init_from=start, out=out, **given), cwd=out.parent)


@pytest.mark.parametrize(("optimizer", "rate"), [("muon", 0.005), ("adamw", 0.001)])
def test_the_tuning_rate_of_muon_is_not_for_adamw(trained, optimizer, rate):
    values = starting_values(trained / "model", {"optimizer": optimizer})
    assert make_config(values).learning_rate == rate


def test_an_initial_model_of_words_is_refused(trained, text, tmp_path):
    shutil.copytree(trained, tmp_path / "words")
    file = tmp_path / "words/model/tokenizer.json"
    document = json.loads(file.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["word"] = vocabulary.pop("a")
    file.write_text(json.dumps(document))
    ended = tune(tmp_path / "words", text[:10_000], tmp_path / "out")
    assert (ended.status, ended.output.count("\n")) == (2, 1)
    assert ended.output.startswith("DataError: the initial model has words")


def test_step_0_is_the_model_as_it_was(trained, text, tmp_path):
    ended = tune(trained, text[:100_000], tmp_path / "out", log_interval=2, eval_interval=2)
    assert ended.status == 0, ended.output
    first = metrics(tmp_path / "out/output")[0]
    before = json.loads((trained / "model/training.json").read_text())
    assert first["step"] == 0
    assert first["val_loss"] == pytest.approx(before["val_loss"], abs=1e-6)
    assert first["val_loss"] == first["best_loss"]


def test_a_text_of_fewer_characters_keeps_their_ids(trained, tmp_path):
    ended = tune(trained, "to be or not to be, that is the question\n" * 99, tmp_path / "out")
    assert ended.status == 0, ended.output
    tokenizers = [
        json.loads((out / "model/tokenizer.json").read_text())
        for out in (trained, tmp_path / "out")
    ]
    assert tokenizers[0] == tokenizers[1]


def test_characters_that_the_model_lacks_are_listed(trained, tmp_path):
    ended = tune(trained, "héllo wörld\n" * 99, tmp_path / "out")
    assert ended.status == 2
    assert ended.last_line == (
        "DataError: the text has 2 characters that the initial model does not know: 'é', 'ö'"
    )


def test_tokens_of_another_tokenizer_are_refused(trained, documents, byte_pairs, tmp_path):
    (tmp_path / "data").mkdir()
    files = find_text(documents, tokens.is_text)
    tokens.encode(files, tokens.survey(files), byte_pairs, tmp_path / "data")
    ended = run(
        words(data=tmp_path / "data", init_from=trained / "model", out=tmp_path / "out"),
        cwd=tmp_path,
    )
    assert ended.status == 2
    assert ended.last_line == (
        "DataError: the tokens are not those of the initial model; encode the text with its"
        " tokenizer, by upload-data --tokenizer"
    )


def test_a_resumed_run_keeps_its_characters_and_its_bits(trained, tmp_path):
    """The text has fewer characters than the model, so their ids are not the text's own."""
    text = "to be or not to be, that is the question\n" * 99
    whole = tune(trained, text, tmp_path / "whole", max_steps=8)
    assert whole.status == 0, whole.output
    half = tune(trained, text, tmp_path / "half", max_steps=8, checkpoint_seconds=0.001)
    assert half.status == 0, half.output
    for name in ("model", "output"):
        shutil.rmtree(tmp_path / "half" / name)
    checkpoints = sorted((tmp_path / "half/checkpoints").glob("checkpoint-*"))
    checkpoints[-1].unlink()
    again = run(words(resume=tmp_path / "half"), cwd=tmp_path)
    assert again.status == 0, again.output
    assert "resumed from the checkpoint of step 7" in again.output
    files = [tmp_path / name / "model/model.safetensors" for name in ("whole", "half")]
    assert files[0].read_bytes() == files[1].read_bytes()


# -- by launch -------------------------------------------------------------------------------------


def test_three_commands_tune_and_sample_a_published_model(
    documents, byte_pairs, home, cli, tmp_path
):
    publish(tmp_path / "qwen", byte_pairs)
    qwen = str(tmp_path / "qwen")
    assert cli("upload-data", str(documents), "--tokenizer", qwen).code == 0
    values = {name: value for name, value in launching.TINY.items() if not name.startswith("n_")}
    ran = cli("launch", "--instance", "local", "--init-from", qwen, *launching.sets(**values))
    assert ran.code == 0, ran.err
    sampled = cli("fetch-and-sample", "latest", "--temperature", "2", "--max-new-tokens", "300")
    assert sampled.code == 0, sampled.err
    shown = cli("status", "latest", "--json")
    assert json.loads(shown.out)["hyperparameters"]["n_kv_head"] == 2


def test_a_launch_refuses_a_text_that_the_model_cannot_encode(job, documents, cli, tmp_path):
    start = ("launch", "--instance", "local", "--init-from", job.job_id)
    (tmp_path / "strange.txt").write_text("¡Olé! " * 999)
    ran = cli(*start, "--data", str(tmp_path / "strange.txt"))
    assert ran.code == 2
    assert f"it has characters that {job.job_id} does not know: '¡'" in ran.error
    uploaded = cli("upload-data", str(documents), "--tokenizer", "bpe", "--vocab-size", "300")
    ran = cli(*start, "--data", uploaded.out.strip())
    assert ran.code == 2
    assert f"its tokens are not those of {job.job_id}; encode the text with" in ran.error


def test_a_model_of_characters_is_tuned_on_text_that_it_encoded(job, text, cli, tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": text[5000:9000]}) + "\n")
    assert cli("upload-data", "other.jsonl", "--tokenizer", job.job_id).code == 0
    values = {name: value for name, value in launching.TINY.items() if not name.startswith("n_")}
    how = launching.sets(**{**values, "max_steps": 2})
    ran = cli("launch", "--instance", "local", "--init-from", job.job_id, *how)
    assert ran.code == 0, ran.err


def test_a_text_is_refused_by_a_model_of_tokens(documents, byte_pairs, cli, tmp_path):
    publish(tmp_path / "qwen", byte_pairs)
    words = ("--init-from", str(tmp_path / "qwen"), "--data", str(documents))
    ran = cli("launch", "--instance", "local", *words)
    assert ran.code == 2
    assert f"it is text, and {tmp_path / 'qwen'} takes tokens; encode the text with" in ran.error


@pytest.mark.parametrize(
    "words, error",
    [
        (("--init-from", "./nothing"), "./nothing: no such directory"),
        (("--init-from", "{job}", "--resume", "{job}"), "--init-from starts a new run"),
        (("--init-from", "{job}", "--set", "n_layer=3"), "n_layer=3: the initial model has"),
        (("--init-from", "{job}", "--set", "n_layr=3"), "there is no such hyperparameter"),
    ],
)
def test_an_impossible_start_is_refused_in_one_line(job, cli, words, error):
    local = () if "--resume" in words else ("--instance", "local")
    ran = cli("launch", *local, *(word.format(job=job.job_id) for word in words))
    assert ran.code == 2
    assert error in ran.error


def test_a_resumed_job_keeps_the_model_that_it_started_from(job, cli):
    words = ("--instance", "local", "--init-from", job.job_id, *launching.sets(max_steps=4))
    ran = cli(
        "launch",
        *words,
        "--data",
        json.loads((job.directory / "job.json").read_text())["job"]["data"],
    )
    assert ran.code == 0, ran.err
    ran = cli("launch", "--resume", ran.out.strip(), "--set", "max_steps=6")
    assert ran.code == 0, ran.err
    assert "resumed from the checkpoint of step 4" in ran.err


@pytest.mark.usefixtures("cloud")
def test_a_job_on_sagemaker_reads_the_model_from_a_channel(s3, job, text_file, cli):
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
    assert (ran.code, ran.error) == (2, f"s3://{s3.bucket}/models: no config.json is there")


@pytest.mark.parametrize("word", ["latest", "end"])
def test_a_tokenizer_is_named_by_a_short_job_id(word, job, text_file, cli):
    short = word if word == "latest" else job.job_id[-6:]
    assert cli("upload-data", str(text_file), "--tokenizer", short).code == 0
