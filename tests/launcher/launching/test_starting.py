"""Runs that start from a model: one of ours, or of the Qwen3 family as transformers writes it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from runs import SMALL, command_line, environment, metrics, run

from sm_nanogpt import InputError
from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config, make_config
from sm_nanogpt.entry_point.container import Ranks, read_container
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.errors import ConfigError, DataError, FormatError, TrainingError
from sm_nanogpt.entry_point.huggingface import load_pretrained, starting_values
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.optim import gradient_of
from sm_nanogpt.entry_point.qwen3 import qwen3_weights
from sm_nanogpt.entry_point.safetensors_file import read_safetensors, write_safetensors
from sm_nanogpt.entry_point.text import Tokenizer, load_corpus
from sm_nanogpt.launcher.files.models import INDEX, model_files
from sm_nanogpt.launcher.text import tokens
from sm_nanogpt.launcher.text.documents import survey_documents
from sm_nanogpt.launcher.text.files import FileOptions, find_files
from sm_nanogpt.launcher.text.sources import TextSource
from sm_nanogpt.launcher.text.tokenizer import learn_tokenizer


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "pangrams.txt"
    pangrams = "The quick brown fox jumps over the lazy dog.\nPack my box with five liquor jugs.\n"
    path.write_text(pangrams * 40)
    return path


@pytest.fixture(scope="module")
def byte_pairs(documents):
    return learn_tokenizer(find_files([TextSource(documents)], FileOptions(records=True)), 300)


def publish(directory: Path, byte_pairs: Tokenizer, tied: bool = False) -> Any:
    """Write a small random model of the Qwen3 family, and return it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(  # type: ignore[call-arg]  # it takes rope_theta
        vocab_size=320,  # more than the tokenizer has, as in published models
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=64,
        rope_theta=1e6,
        tie_word_embeddings=tied,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory, max_shard_size="100KB")
    (directory / "tokenizer.json").write_text(json.dumps(byte_pairs.document))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": byte_pairs.end_of_text,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return model


@pytest.fixture(scope="module")
def published(byte_pairs, tmp_path_factory):
    """Such a model. It is shared: look, but change nothing."""
    directory = tmp_path_factory.mktemp("published")
    publish(directory, byte_pairs)
    return directory


@pytest.fixture
def qwen(published, tmp_path):
    return shutil.copytree(published, tmp_path / "qwen")


def loaded(directory: Path) -> GPT:
    model = GPT(make_config(starting_values(directory, {})), 300)
    load_pretrained(model, directory)
    return model


def encode(documents: Path, byte_pairs: Tokenizer, out: Path) -> None:
    out.mkdir()
    files = find_files([TextSource(documents)], FileOptions(records=True))
    tokens.encode(files, survey_documents(files), byte_pairs, out, lambda n: None)


def without_shape(values: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters without those that the initial model prescribes."""
    return {name: value for name, value in values.items() if not name.startswith("n_")}


@pytest.mark.parametrize("tied", [False, True])
def test_a_published_model_matches_transformers(tmp_path, byte_pairs, tied):
    theirs = publish(tmp_path, byte_pairs, tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = loaded(tmp_path)
    ids = torch.randint(320, (3, 40), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, labels=ids)
    torch.testing.assert_close(ours(ids), expected.logits, atol=1e-4, rtol=1e-4)

    expected.loss.backward()
    ours(ids[:, :-1], ids[:, 1:]).backward()
    gradients = {name: gradient_of(parameter) for name, parameter in ours.named_parameters()}
    names = qwen3_weights(gradients, ours.config)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(names[name], parameter.grad, atol=1e-5, rtol=1e-3)


def test_a_published_model_of_bfloat16_starts_alike(published, tmp_path):
    import transformers

    half = transformers.AutoModelForCausalLM.from_pretrained(published).bfloat16()
    half.save_pretrained(tmp_path)
    rounded = {
        name: tensor.bfloat16().float() for name, tensor in loaded(published).state_dict().items()
    }
    for name, tensor in loaded(tmp_path).state_dict().items():
        assert torch.equal(tensor, rounded[name]), name


def test_a_tuning_has_defaults_of_its_own(published):
    config = make_config(starting_values(published, {}))
    rates = config.learning_rate, config.embedding_learning_rate, config.head_learning_rate
    assert (*rates, config.max_steps) == (0.005, 0.005, 0.002, 500)
    assert starting_values(published, {"max_steps": "7"})["max_steps"] == "7"


def test_a_tuned_published_model_loads_elsewhere(documents, byte_pairs, published, tmp_path):
    import transformers

    encode(documents, byte_pairs, tmp_path / "data")
    where = {"data": tmp_path / "data", "init_from": published, "out": tmp_path / "out"}
    ended = run(command_line(**where, processes=2, **without_shape(SMALL)), cwd=tmp_path)
    assert ended.status == 0, ended.output
    first, *_, last = metrics(tmp_path / "out/output")
    assert first["step"] == 0
    assert last["val_loss"] < first["val_loss"] - 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    before, config = (
        json.loads((directory / "config.json").read_text())
        for directory in (published, tmp_path / "out/model")
    )
    for name in ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"):
        assert config[name] == before[name]
    ids = torch.arange(30)[None]
    ours = loaded(tmp_path / "out/model")
    torch.testing.assert_close(ours(ids), model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "values, refused",
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type='yarn'"),
        ({"quantization_config": {}}, "quantization_config={}"),
        ({"hidden_size": 0.5}, "n_embd=0.5"),
        ({"max_position_embeddings": math.inf}, "max_position_embeddings=inf"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings='many'"),
        ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window=-1"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"rope_parameters": "none"}, "config.json: 'none' are no values of rotary positions"),
    ],
)
def test_unsupported_model_features_are_named(published, tmp_path, values, refused):
    config = json.loads((published / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(ConfigError, match=re.escape(refused)):
        make_config(starting_values(tmp_path, {}))


def test_a_model_with_masked_documents_stays_so(qwen):
    assert not starting_values(qwen, {})["mask_documents"]
    trained = {"config": {"mask_documents": True, "norm_weights": True}}
    (qwen / "training.json").write_text(json.dumps(trained))
    assert starting_values(qwen, {})["mask_documents"]
    assert starting_values(qwen, {"mask_documents": "false"})["mask_documents"] == "false"


def test_an_initial_model_has_a_config_json(tmp_path):
    with pytest.raises(DataError, match=r"config\.json: no such file"):
        starting_values(tmp_path, {})


def test_the_model_prescribes_hyperparameters(published):
    with pytest.raises(ConfigError, match="n_layer=3: the initial model has 2"):
        starting_values(published, {"n-layer": "3"})
    values = starting_values(published, {"n_layer": "2", "learning_rate": "0.1"})
    assert values["learning_rate"] == "0.1"
    assert values["block_size"] == 64


NORM = "model.norm.weight"


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors, _ = read_safetensors(file)
    change(tensors)
    write_safetensors(file, tensors, {})


def change_values(file: Path, value: float) -> None:
    """Give the last norm this value, and its type."""
    change_tensors(file, lambda tensors: tensors.update({NORM: torch.full((64,), value)}))


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda file, index: file.unlink(), "no such file"),
        (lambda file, index: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (lambda file, index: index.write_text("{}"), "weight_map"),
        (
            lambda file, index: index.write_text(index.read_text().replace("model-", "../")),
            "qwen/0.*",
        ),
        (lambda file, index: change_tensors(file, lambda t: t.pop(NORM)), f"{NORM} is nothing"),
        (lambda file, index: change_values(file, math.nan), f"{NORM} has values that"),
        (lambda file, index: change_values(file, 7), f"{NORM} is of type int64"),
    ],
    ids=[
        "missing",
        "cut",
        "no map",
        "elsewhere",
        "other name",
        "not numbers",
        "whole numbers",
    ],
)
def test_weights_that_do_not_fit_are_refused(qwen, damage, error):
    index = qwen / "model.safetensors.index.json"
    damage(qwen / json.loads(index.read_text())["weight_map"][NORM], index)
    with pytest.raises((FormatError, TrainingError), match=error):
        loaded(qwen)


@pytest.fixture
def start(finished):
    return finished.directory / "hosts/algo-1/model"


def tune(start: Path, text: str, out: Path, **values: Any) -> None:
    file = out.with_suffix(".txt")
    file.write_text(text)
    options = {**without_shape(SMALL), "block_size": 32, **values}
    ended = run(command_line(data=file, init_from=start, out=out, **options), cwd=out.parent)
    assert ended.status == 0, ended.output


def test_the_tuning_rate_of_muon_is_not_for_adamw(start):
    values = starting_values(start, {"optimizer": "adamw"})
    assert make_config(values).learning_rate == 0.001


def test_data_unlike_the_initial_model_is_refused(
    start, documents, byte_pairs, published, tmp_path
):
    strange = tmp_path / "strange.txt"
    strange.write_text("hōllo wūrld\n" * 99)
    encode(documents, byte_pairs, tmp_path / "tokens")
    for model, data, reason in (
        (start, strange, ": 'ō', 'ū'"),
        (start, tmp_path / "tokens", "upload-data --tokenizer"),
        (published, strange, "upload-data --tokenizer"),
    ):
        container = read_container({}, Options(data=str(data), init_from=str(model)))
        group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container)
        with pytest.raises(DataError, match=reason):
            load_corpus(container, Config(block_size=8), group)
        with pytest.raises(DataError, match=reason):
            load_corpus(replace(container, init_from=None, teacher=model), Config(), group)


def test_step_0_is_the_model_as_it_was(start, text, tmp_path):
    values = {"eval_tokens": 1024, "precision": "float32", "max_steps": 1}
    tune(start, text, tmp_path / "out", **values)
    first = metrics(tmp_path / "out/output")[0]
    training = json.loads((start / "training.json").read_text())
    assert first["step"] == 0
    assert first["val_loss"] == pytest.approx(training["val_loss"], abs=1e-6)
    assert first["val_loss"] == first["best_loss"]
    assert "tokens_per_second" not in first  # no step is done


def test_a_resumed_run_keeps_characters_and_bits(start, tmp_path):
    """The text has fewer characters than the model, so their ids are not the text's own."""
    text = "to be or not to be, that is the question\n" * 99
    whole, half = tmp_path / "whole", tmp_path / "half"
    tune(start, text, whole, max_steps=8, checkpoint_seconds=0.001)
    shutil.copytree(whole, half, ignore=shutil.ignore_patterns("model", "output"))
    sorted((half / "checkpoints").glob("checkpoint-*"))[-1].unlink()
    ended = run(command_line(resume=half), cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert "resumed from the checkpoint of step 7" in ended.output
    for name in ("model.safetensors", "tokenizer.json"):
        assert (whole / "model" / name).read_bytes() == (half / "model" / name).read_bytes()
    tokenizer = (start / "tokenizer.json").read_bytes()
    assert (whole / "model/tokenizer.json").read_bytes() == tokenizer


def test_a_model_learns_from_a_larger_one_and_resumes(published, documents, byte_pairs, tmp_path):
    """The teacher has a padded vocabulary, and grouped-query attention."""
    encode(documents, byte_pairs, tmp_path / "tokens")
    options = {
        **SMALL,
        "max_steps": 4,
        "generations": 2,
        "log_interval": 1,
        "checkpoint_seconds": 0.001,
    }
    logs = list[str]()
    for name, teachers in (("alone", {}), ("whole", {"teacher": published})):
        arguments = command_line(
            data=tmp_path / "tokens", out=tmp_path / name, **teachers, **options
        )
        ended = run(arguments, cwd=tmp_path)
        assert ended.status == 0, ended.output
        logs.append(ended.output)
    assert ["learning also from" in log for log in logs] == [False, True]
    alone, taught = (metrics(tmp_path / name / "output")[0] for name in ("alone", "whole"))
    assert alone["train_loss"] != taught["train_loss"]
    arguments = command_line(
        data=tmp_path / "tokens", out=tmp_path / "cut", teacher=published, **options
    )
    assert run(arguments, cwd=tmp_path, env=environment(NANOGPT_FAULT="0:3:kill")).status < 0
    ended = run(command_line(resume=tmp_path / "cut"), cwd=tmp_path)
    assert "resumed from the checkpoint of step 3" in ended.output
    assert "learning also from" in ended.output
    whole, cut = (tmp_path / n / "model/model.safetensors" for n in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def cache(model: Path, snapshot: Path) -> None:
    """Lays a model out as Hugging Face's cache does: private files, and links to them."""
    snapshot.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.chmod(0o600)
        (snapshot / path.name).symlink_to(path.rename(model / f"{number:x}"))


def test_three_commands_tune_a_published_model(documents, qwen, home, cli):
    cache(qwen, published := home.parent / "snapshot")
    (published / "notes.txt").symlink_to(documents)
    assert cli("upload-data", documents, "--tokenizer", published).code == 0
    options = launching.sets(**without_shape(launching.TINY))
    ran = cli("launch", "--instance", "local", "--init-from", published, options).good
    assert cli("fetch-and-sample", "latest", "--temperature", "2", "--max-new-tokens", "300").good
    status = json.loads(cli("status", "latest", "--json").out)
    assert status["hyperparameters"]["n_kv_head"] == 2
    channel = home / "jobs" / ran.out.strip() / "hosts/algo-1/input/data/model"
    assert {path.readlink() for path in channel.iterdir()} == {*published.iterdir()}  # no copies


def test_launch_refuses_text_unlike_the_model(job, documents, published, cli, tmp_path):
    strange, marked = tmp_path / "strange.txt", tmp_path / "marked.txt"
    strange.write_text("¡Olé! " * 999)
    marked.write_text("cafe\u0301 " * 999)
    encoded = cli("upload-data", documents, "--tokenizer", published).out.strip()
    for model, data, reason in (
        (job.job_id, strange, "has never seen: '¡'"),
        (job.job_id, marked, "has never seen: U+0301"),
        (job.job_id, encoded, f"its tokens are not those of {job.job_id}; "),
        (published, documents, f"{published} takes tokens; "),
    ):
        arguments = ("--init-from", str(model), "--data", str(data))
        assert cli("launch", "--instance", "local", arguments).failed(2, reason)


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("ckpt.pt", "ckpt.pt: a file; give the directory of a model"),
        ("Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"),
        ("pickled", "model.safetensors: no such file"),
    ],
)
def test_what_is_no_model_directory_says_how_to_get_one(model, advice, cli, tmp_path):
    (tmp_path / "ckpt.pt").touch()
    (tmp_path / "pickled").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "pickled" / name).write_text("{}")
    ran = cli("launch", "--instance", "local", "--init-from", model)
    assert ran.failed(2, advice)


def test_a_character_model_tunes_and_resumes(job, text, cli, tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": text[5000:9000]}) + "\n")
    for name in ("latest", job.job_id[-6:], job.job_id):
        assert cli("upload-data", "other.jsonl", "--tokenizer", name).code == 0
    options = launching.sets(**{**without_shape(launching.TINY), "max_steps": 2})
    ran = cli("launch", "--instance", "local", "--init-from", job.job_id, options).good
    resumed = cli("launch", "--resume", ran.out.strip(), "--set", "max_steps=4").good
    assert "resumed from the checkpoint of step 2" in resumed.err
    records = [job.home / "jobs" / each.out.strip() / "job.json" for each in (ran, resumed)]
    first, second = (json.loads(record.read_text())["job"] for record in records)
    assert first["init_from"] == second["init_from"] != ""


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("--init-from", "./nothing"), "./nothing: no such directory"),
        (("--teacher", "{job}", "--resume", "{job}"), "is for a new run"),
        (("--init-from", "{job}", "--set", "n_layer=3"), "n_layer=3: the initial model has"),
    ],
)
def test_an_impossible_start_is_refused(job, cli, arguments, error):
    local = () if "--resume" in arguments else ("--instance", "local")
    assert cli("launch", local, (word.format(job=job.job_id) for word in arguments)).failed(
        2, error
    )


def test_weights_that_no_run_takes_are_refused_by_launch(qwen, cli):
    index = json.loads((qwen / "model.safetensors.index.json").read_text())
    change_values(qwen / index["weight_map"][NORM], math.nan)
    ran = cli("launch", "--instance", "local", "--teacher", qwen)
    assert ran.failed(2, "--teacher", f"{NORM} has values that are infinite or not numbers")


def test_a_teacher_with_a_short_context_is_refused(job, short_text_file, cli):
    arguments = (
        "launch",
        "--instance",
        "local",
        "--teacher",
        job.job_id,
        "--data",
        str(short_text_file),
    )
    ran = cli(arguments, "--set", "block_size=33")
    assert ran.failed(2, "at most 32, the teacher's context; set block_size=32")


@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize(("option", "name"), [("--init-from", "model"), ("--teacher", "teacher")])
def test_sagemaker_gets_the_model_as_a_channel(s3, job, short_text_file, cli, option, name):
    arguments = ("--instance", "ml.g5.xlarge", option, job.job_id, "--data", str(short_text_file))
    ran = cli("launch", arguments, "--set", "block_size=32", "--dry-run").good
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in json.loads(ran.out)["InputDataConfig"]
    }
    assert f"/models/{job.job_id}-" in channels[name]
    assert channels[name].endswith("/")
    [summary] = [t["Value"] for t in json.loads(ran.out)["Tags"] if t["Key"].endswith("-summary")]
    assert job.job_id in summary.split()


@pytest.mark.usefixtures("cloud")
def test_a_model_on_s3_is_read_where_it_is(s3, byte_pairs, qwen, short_text_file, cli):
    padded = byte_pairs.document | {"comment": "x" * (1 << 22)}  # as large as real ones
    (qwen / "tokenizer.json").write_text(json.dumps(padded))
    for path in qwen.iterdir():
        s3.upload_file(str(path), s3.bucket, f"models/qwen/{path.name}")
    uri = f"s3://{s3.bucket}/models/qwen"
    arguments = ("launch", "--instance", "ml.g5.xlarge", "--dry-run", "--init-from", uri)
    ran = cli(arguments, "--data", f"s3://{s3.bucket}/tokens").good
    request = json.loads(ran.out)
    assert request["HyperParameters"]["n_kv_head"] == "2"
    assert request["InputDataConfig"][1]["DataSource"]["S3DataSource"]["S3Uri"] == f"{uri}/"
    ran = cli(arguments[:-1], f"s3://{s3.bucket}/models", "--data", short_text_file)
    assert ran.failed(2, f"s3://{s3.bucket}/models: no config.json")


DOCUMENTS = ["config.json", "tokenizer.json", "tokenizer_config.json"]
SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"


def test_only_what_a_run_reads_is_taken(qwen):
    index = json.loads((qwen / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    (qwen / ".git").mkdir()
    for name in ("README.md", "pytorch_model.bin", "other.safetensors", ".git/config"):
        (qwen / name).write_bytes(SECRET)
    assert [path.name for path in model_files(qwen)] == sorted([*DOCUMENTS, *shards, INDEX])
    (qwen / INDEX).unlink()
    with pytest.raises(InputError, match=r"model\.safetensors: no such file"):
        model_files(qwen)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_to_another_file_is_not_followed(qwen, tmp_path, name):
    (qwen / INDEX).unlink()
    shutil.copy(next(qwen.glob("*.safetensors")), qwen / "model.safetensors")
    assert model_files(qwen)
    (tmp_path / "secret").write_bytes(b'{"accessToken": "secret"}')
    (qwen / name).unlink(missing_ok=True)
    (qwen / name).symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=f"{name}: a link to {tmp_path / 'secret'}"):
        model_files(qwen)


@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize("instance", ["local", "ml.g5.xlarge"])
def test_a_model_with_a_link_to_a_key_is_not_sent(s3, home, qwen, short_text_file, cli, instance):
    (home.parent / "key").write_bytes(SECRET)
    shard = max(qwen.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to(home.parent / "key")
    arguments = ("--instance", instance, "--init-from", str(qwen), "--data", str(short_text_file))
    assert cli("launch", arguments).failed(2, f"{shard}: a link to")
    assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)
