"""A model is computed by the script that trained it: edits of train.py as users make them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import torch
from launching import Finished, Ran
from models import tokenizer_of

from entry_point import train
from entry_point.checkpoint import Checkpoints
from entry_point.config import Config
from entry_point.data import Tokenizer, character_tokenizer
from entry_point.errors import ConfigError
from entry_point.huggingface import folder_sha256, qwen3_logits, starting_values, write_artefact
from entry_point.model import GPT
from entry_point.optim import Optimizer
from launcher import InputError, fetch_model, load_model, sample
from launcher.source import Source

SCRIPT = Path(train.__file__)
HEAD = "logits = F.linear(x, head.weight.to(x.dtype)).float()"
FIELD = "    dropout: float = hyperparameter("
EDITS: dict[str, list[tuple[str, str]]] = {
    "activation": [("self.activation(gate) * up", "F.relu(gate) ** 2 * up")],
    "bias": [
        ("n_out * n_fused, bias=False)", "n_out * n_fused, bias=True)"),
        (
            "F.linear(x, self.weight.to(x.dtype))\n",
            "F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))\n",
        ),
        (HEAD, "logits = head(x).float()"),
    ],
    "no QK-norm": [("        qk = norm(qk)\n", "")],
    "learned positions": [
        ("rotate(qk, cos, sin)", "qk"),
        (
            "        self.blocks = ",
            "        self.positions = nn.Embedding(config.block_size, config.n_embd)\n"
            "        self.blocks = ",
        ),
        (
            "x = self.embed(idx).to(self.compute_dtype)",
            "x = self.embed(idx) + self.positions.weight[: idx.size(1)]\n"
            "        x = x.to(self.compute_dtype)",
        ),
    ],
    "buffer": [
        (
            "        self.blocks = ",
            '        self.register_buffer("hot", torch.ones(()))\n        self.blocks = ',
        ),
        (
            HEAD,
            "if self.training:\n            self.hot *= 1.02\n"
            f"        {HEAD}\n        logits = logits * self.hot",
        ),
    ],
    "norms with weights, and a mask": [
        (
            "        self.blocks = ",
            "        self.final_norm = nn.LayerNorm(config.n_embd)\n"
            "        mask = torch.full((config.block_size,), float('-inf'))\n"
            '        self.register_buffer("mask", mask)\n'
            "        self.blocks = ",
        ),
        (
            "        x = norm(x, self.norm)\n",
            "        x = self.final_norm(x.float()).to(x.dtype)\n",
        ),
    ],
    "hyperparameter": [
        (FIELD, f'    softcap: float = hyperparameter(2.0, "of logits")\n{FIELD}'),
        (
            HEAD,
            f"{HEAD}\n        c = self.config.softcap\n        logits = c * (logits / c).tanh()",
        ),
    ],
}


def launched(script: Path, home: Path, cli: Callable[..., Ran], text_file: Path) -> Finished:
    ran = cli(*launching.launching("--entry-point", str(script), data=text_file))
    assert ran.code == 0, ran.err
    return Finished(home, ran.out.strip())


def module_of(folder: Path) -> SimpleNamespace:
    """What the files of a training folder define, together."""
    source = Source.read(folder)
    names = ("errors", "config", "data", "model", "huggingface")
    found = {k: v for name in names for k, v in vars(source.module(name)).items()}
    return SimpleNamespace(**{k: v for k, v in found.items() if not k.startswith("__")})


def as_trained(job: Finished, script: Path) -> Any:
    """The model that the run kept, with its weights by the names that it trained them under."""
    module = module_of(script)
    training = json.loads((job.directory / "hosts/algo-1/model/training.json").read_text())
    checkpoints = Checkpoints(job.directory / "hosts/algo-1/checkpoints")
    loaded = checkpoints.load_latest()
    assert loaded is not None and loaded[1]["best_step"] == training["step"]
    best = {k[5:]: tensor for k, tensor in loaded[0].items() if k.startswith("best.")}
    config = module.make_config(training["config"])
    return module.with_weights(config, len(vocabulary_of(job)), best)


def vocabulary_of(job: Finished) -> str:
    path = job.directory / "hosts/algo-1/model/tokenizer.json"
    ids = json.loads(path.read_text())["model"]["vocab"]
    return "".join(sorted(ids, key=ids.__getitem__))


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_sampled_as_it_was_trained(edit, home, cli, text_file, tmp_path):
    script = launching.edited(tmp_path / "mine", *EDITS[edit])
    job = launched(script, home, cli, text_file)
    shutil.rmtree(script)  # the job keeps a copy
    vocabulary, prompt, n = vocabulary_of(job), "The ", 60
    model = as_trained(job, job.directory / "code")
    ids = torch.tensor([[vocabulary.index(character) for character in prompt]])
    with torch.inference_mode():
        for _ in range(n):
            following = model(ids[:, -32:])[:, -1].argmax(dim=-1, keepdim=True)
            ids = torch.cat((ids, following), dim=1)
    words = ("--prompt", prompt, "--max-new-tokens", str(n), "--temperature", "0")
    ran = cli("fetch-and-sample", job.job_id, *words)
    assert ran.code == 0, ran.err
    assert ran.out == "".join(vocabulary[i] for i in ids[0].tolist()) + "\n"
    assert "sampling with the edited or older script that trained" in ran.err


@pytest.fixture(scope="module")
def edited_job(tmp_path_factory, text_file):
    """A job of the script with another activation. It is shared: look, but change nothing."""

    def build(directory: Path) -> tuple[Path, str]:
        home = directory / "home"
        script = launching.edited(directory / "mine", *EDITS["activation"])
        words = launching.launching("--entry-point", str(script), data=text_file)
        ran = launching.command(*words, home=home)
        assert ran.code == 0, ran.err
        return home, ran.out.strip()

    home, job_id = launching.once(tmp_path_factory, "edited", build)
    return Finished(Path(home), job_id)


@pytest.fixture
def edited(edited_job, home):
    """A copy of that job in this test's own home."""
    shutil.copytree(edited_job.directory, home / "jobs" / edited_job.job_id)
    shutil.copytree(edited_job.home / "sources", home / "sources")
    return Finished(home, edited_job.job_id)


def test_a_model_that_is_not_qwen3_says_so(edited):
    import transformers

    directory = edited.directory / "hosts/algo-1/model"
    assert "its logits differ from Qwen3's" in (edited.directory / "logs/job.log").read_text()
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "sm-nanogpt-edited"
    assert "its logits differ from Qwen3's" in config["why"]
    with pytest.raises(ValueError, match="sm-nanogpt-edited"):
        transformers.AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_can_be_started_from(edit, tmp_path):
    module = module_of(launching.edited(tmp_path / "mine", *EDITS[edit]))
    more = {"softcap": 3.0} if edit == "hyperparameter" else {}
    model = module.GPT(module.make_config({"n_layer": 1, "n_embd": 32, **more}), 11)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    training = {"script_sha256": module.SCRIPT_SHA256}
    assert module.write_artefact(tmp_path, model.eval(), tokenizer_of("abcdefghijk"), training)
    config = module.make_config(module.starting_values(tmp_path, {}))
    started = module.GPT(config, 11).eval()
    module.load_pretrained(started, tmp_path)
    ids = torch.arange(11)[None]
    assert torch.equal(started(ids), model(ids))
    with pytest.raises(ConfigError, match=module.SCRIPT_SHA256[:12]):
        starting_values(tmp_path, {})


def test_a_run_starts_from_an_edited_model_by_its_script(edited, cli, text_file):
    words: tuple[str, ...] = ("launch", "--instance", "local", "--init-from", edited.job_id)
    words += ("--data", str(text_file), *launching.sets(max_steps=2, device="cpu", batch_size=4))
    ran = cli(*words)
    assert ran.code == 2
    assert "name it with --entry-point DIR" in ran.error
    ran = cli(*words, "--entry-point", str(edited.directory / "code"))
    assert ran.code == 0, ran.err
    assert "step=0/2 val_loss=" in ran.err


def test_an_artefact_names_the_script_that_made_it(edited):
    directory = edited.directory / "hosts/algo-1/model"
    training = json.loads((directory / "training.json").read_text())
    command = ["sh", "-c", "LC_ALL=C; export LC_ALL; sha256sum *.py | sha256sum"]
    sums = subprocess.check_output(command, cwd=edited.directory / "code", text=True)
    assert training["script_sha256"] == sums.split()[0]


def test_without_its_script_an_edited_model_is_refused(edited, cli):
    shutil.rmtree(edited.home / "sources")
    ran = cli("fetch-and-sample", edited.job_id)
    assert ran.code == 2
    assert ran.error.endswith("which is not on this machine; name it with --entry-point DIR")
    assert ran.out == ""
    assert not (edited.home / "models" / edited.job_id).exists()


def test_another_script_is_refused(edited, cli, tmp_path):
    other = launching.edited(tmp_path / "other", *EDITS["no QK-norm"])
    ran = cli("fetch-and-sample", edited.job_id, "--entry-point", str(other))
    assert ran.code == 2
    assert f"and {other} is another;" in ran.error


def test_the_named_script_is_taken(edited, cli, tmp_path):
    mine = tmp_path / "mine"
    (edited.directory / "code").rename(mine)
    ran = cli("fetch-and-sample", edited.job_id, "--entry-point", str(mine))
    assert ran.code == 0, ran.err
    (text,) = sample(edited.job_id, entry_point=mine)
    assert ran.out == text + "\n"


def test_a_stopped_job_gives_the_model_of_its_own_script(edited, cli):
    state = edited.directory / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "status": "Stopped"}))
    directory = fetch_model(edited.job_id)
    assert directory.name == "step-00000010"
    settings = launching.settings_of(edited.home)
    kept = settings.kept_source(module_of(edited.directory / "code").SCRIPT_SHA256)
    model, _ = load_model(directory, settings)
    assert type(model) is module_of(kept).GPT
    ran = cli("fetch-and-sample", edited.job_id)
    assert ran.code == 0, ran.err
    shutil.rmtree(kept)
    shutil.rmtree(edited.home / "models")
    assert cli("fetch-and-sample", edited.job_id).code == 2


def test_the_package_loads_a_qwen3_model_without_its_folder(home, cli, text_file, tmp_path, caplog):
    edit = ("QUERIES_AT_ONCE = 256", "QUERIES_AT_ONCE = 128")  # of model.py
    job = launched(launching.edited(tmp_path / "mine", edit), home, cli, text_file)
    shutil.rmtree(home / "sources")
    model, _ = load_model(fetch_model(job.job_id))
    assert isinstance(model, GPT)
    assert "is not on this machine; using the packaged script" in caplog.text


def test_an_edit_of_the_schedule_keeps_the_fast_sampler(home, cli, text_file, tmp_path, caplog):
    edit = ("warm * (config.final", "0.9 * warm * (config.final")
    job = launched(launching.edited(tmp_path / "mine", edit), home, cli, text_file)
    model, _ = load_model(fetch_model(job.job_id))
    assert isinstance(model, GPT)
    assert "training folder" not in caplog.text and "packaged" not in caplog.text


def test_a_width_edited_in_config_is_sampled_by_its_folder(home, cli, text_file, tmp_path):
    """model.py reads it from the Config, so a model.py that was left alone is not enough."""
    edit = ("self.n_hidden or 8 * round(self.n_embd / 3)", "self.n_hidden or 4 * self.n_embd")
    job = launched(launching.edited(tmp_path / "mine", edit), home, cli, text_file)
    ran = cli("fetch-and-sample", job.job_id)
    assert ran.code == 0, ran.err


def test_hidden_files_do_not_belong_to_the_folder(tmp_path):
    folder = launching.edited(tmp_path / "mine")
    before = Source.read(folder).sha256, folder_sha256(folder)
    (folder / ".#model.py").symlink_to("an-editor's-lock")
    (folder / "._model.py").write_bytes(b"\0macOS")
    assert (Source.read(folder).sha256, folder_sha256(folder)) == before
    assert before[0] == before[1]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (  # after one id alone
            (
                "        x = norm(x, self.norm)\n",
                "        x = norm(x, self.norm)\n"
                "        x = x * (1 - 2 * (idx == 9).int()).cumprod(1)[..., None]\n",
            ),
            "its logits differ from Qwen3's by",
        ),
        (
            ("    activation = staticmethod(F.silu)", "    activation = nn.GELU()"),
            "it cannot be compared: AttributeError: module 'torch.nn.functional' has no attribute"
            " 'GELU'",
        ),
        (
            ("staticmethod(F.silu)", "staticmethod(lambda x: F.relu(x) ** 2)"),
            "it cannot be compared: AttributeError: module 'torch.nn.functional' has no attribute"
            " '<lambda>'",
        ),
        (
            ("    activation = staticmethod(F.silu)", "    other = staticmethod(F.silu)"),
            "it cannot be compared: AttributeError: type object 'MLP' has no attribute",
        ),
    ],
)
def test_a_model_that_is_not_qwen3_is_exported_as_edited(edit, why, tmp_path):
    module = module_of(launching.edited(tmp_path / "mine", edit))
    model = module.GPT(module.Config(), 11).eval()
    model.init_weights(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert module.write_artefact(
        tmp_path / "model", model, module.Tokenizer(module.character_tokenizer("abcdefghijk")), {}
    ).startswith(why)
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["model_type"] == "sm-nanogpt-edited"


def exported(tmp_path: Path) -> str:
    words = "".join(map(chr, range(1000, 6000)))
    model = GPT(Config(), len(words)).eval()
    model.init_weights(1)
    tokenizer = Tokenizer(character_tokenizer(words))
    return write_artefact(tmp_path / "model", model, tokenizer, {})


def test_the_check_of_an_export_takes_two_windows(tmp_path, monkeypatch):
    computed = Mock(side_effect=qwen3_logits)
    monkeypatch.setattr("entry_point.huggingface.qwen3_logits", computed)
    assert exported(tmp_path) == ""
    assert [len(call.args[0]) for call in computed.mock_calls] == [64, 64]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_too_little_memory_is_no_difference_from_qwen3(tmp_path, monkeypatch, error):
    monkeypatch.setattr("entry_point.huggingface.qwen3_logits", Mock(side_effect=error))
    with pytest.raises(type(error)):
        exported(tmp_path)
    assert not (tmp_path / "model/config.json").exists()


def test_the_best_weights_of_another_script_are_not_kept(job, cli, tmp_path):
    script = launching.edited(tmp_path / "mine", *EDITS["activation"])
    words = ("--entry-point", str(script), "--set", "max_steps=11")
    ran = cli("launch", "--instance", "local", "--resume", job.job_id, *words)
    assert ran.code == 0, ran.err
    assert "note: another script wrote it" in ran.err
    assert "at step 11\n" in ran.err


def test_a_resumed_script_with_other_weights_is_refused(job, cli, tmp_path):
    script = launching.edited(tmp_path / "mine", *EDITS["bias"])
    words = ("--entry-point", str(script), "--set", "max_steps=11")
    ran = cli("launch", "--instance", "local", "--resume", job.job_id, *words)
    assert ran.code == 1
    assert "attention.out.bias is nothing in the checkpoint and [32] in this script" in ran.error


def test_a_frozen_parameter_is_left_as_it_is():
    model = GPT(Config(), 5)
    model.init_weights(1)
    model.embed.weight.requires_grad_(False)
    dict(model.named_parameters())["blocks.0.mlp.down.weight"].requires_grad_(False)
    optimizer = Optimizer(model, model.config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).backward()
    optimizer.step(1.0)
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert {"embed.weight", "blocks.0.mlp.down.weight"} <= same
    assert "head.weight" not in same


def test_a_bias_that_an_edit_adds_begins_at_zero(tmp_path):
    script = launching.edited(tmp_path / "mine", *EDITS["bias"])
    module = module_of(script)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        layer = module.Linear(3, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(layer.bias, torch.zeros(2))


def test_a_parameter_without_a_gradient_is_named(home, cli, text_file, tmp_path):
    script = launching.edited(tmp_path / "mine", EDITS["bias"][0])
    for processes in ("1", "2"):
        words = ("--entry-point", str(script), "--processes-per-instance", processes)
        ran = cli(*launching.launching(*words, data=text_file))
        assert ran.code == 1
        assert "TrainingError: blocks.0.attention.qkv.bias" in ran.error
        assert "no gradient arrives; does forward use it?" in ran.error


def test_an_activation_known_to_qwen3_stays_loadable(tmp_path):
    import transformers

    script = launching.edited(
        tmp_path / "mine",
        ("activation = staticmethod(F.silu)", "activation = staticmethod(F.gelu)"),
    )
    module = module_of(script)
    model = module.GPT(module.Config(), 11).eval()
    model.init_weights(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert (
        module.write_artefact(
            tmp_path / "model",
            model,
            module.Tokenizer(module.character_tokenizer("abcdefghijk")),
            {},
        )
        == ""
    )
    assert json.loads((tmp_path / "model/config.json").read_text())["hidden_act"] == "gelu"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(11)[None]
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-4, rtol=1e-4)


def test_a_model_with_another_activation_needs_its_script(home, cli, text_file, tmp_path):
    edit = ("activation = staticmethod(F.silu)", "activation = staticmethod(F.gelu)")
    job = launched(launching.edited(tmp_path / "mine", edit), home, cli, text_file)
    ran = cli("launch", "--instance", "local", "--init-from", job.job_id)
    assert ran.code == 2
    assert "(if an edited script trained the model, name it with --entry-point DIR)" in ran.error
    shutil.rmtree(home / "sources")
    ran = cli("fetch-and-sample", job.job_id)
    assert (ran.code, ran.out) == (2, "")
    assert "name it with --entry-point DIR" in ran.error


def test_an_archive_cannot_choose_a_script(edited):
    directory = fetch_model(edited.job_id)
    shutil.rmtree(edited.home / "sources")
    with pytest.raises(InputError, match="is not on this machine"):
        load_model(directory)


def test_a_copy_of_the_script_is_handed_out(cli, tmp_path):
    ran = cli("copy-script", str(tmp_path / "mine"))
    assert (ran.code, ran.out) == (0, f"{tmp_path / 'mine'}\n")
    assert Source.read(tmp_path / "mine").is_packaged


def test_a_file_that_exists_is_not_replaced_by_the_script(cli, tmp_path):
    (tmp_path / "mine").write_text("mine")
    ran = cli("copy-script", str(tmp_path / "mine"))
    assert (ran.code, ran.error) == (2, f"{tmp_path / 'mine'} exists; name another directory")
    assert (tmp_path / "mine").read_text() == "mine"
