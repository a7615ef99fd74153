"""A model is computed by the script that trained it: edits of train.py as users make them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import torch
from launching import Finished
from models import characters, tokenizer_of

from entry_point.checkpoint import Checkpoints
from entry_point.config import Config
from entry_point.errors import ConfigError
from entry_point.huggingface import qwen3_logits, starting_values, write_artefact
from entry_point.model import GPT
from entry_point.optim import Optimizer
from launcher import InputError, fetch_model, load_model, sample
from launcher.source import Source

HEAD = "logits = F.linear(x, head.weight.to(x.dtype)).float()"
ACTIVATION = "activation = staticmethod(F.silu)"
BLOCKS = "        self.blocks = "
FIELD = "    dropout: float = hyperparameter("
EDITS: dict[str, list[tuple[str, str]]] = {
    "activation": [("self.activation(gate) * up", "F.relu(gate) ** 2 * up")],
    "no QK-norm": [("        qk = norm(qk)\n", "")],
    "learned positions": [  # which change as the context slides
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
    "more weights": [
        ("n_out * n_fused, bias=False)", "n_out * n_fused, bias=True)"),
        (
            "F.linear(x, self.weight.to(x.dtype))\n",
            "F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))\n",
        ),
        (HEAD, "logits = head(x).float()"),
        (BLOCKS, f"        self.final_norm = nn.LayerNorm(config.n_embd)\n{BLOCKS}"),
        ("x = norm(x, self.norm)", "x = self.final_norm(x.float()).to(x.dtype)"),
    ],
    "buffers": [
        (
            BLOCKS,
            '        self.register_buffer("hot", torch.ones(()))\n'
            f'        self.register_buffer("mask", torch.full((9,), -torch.inf))\n{BLOCKS}',
        ),
        (
            HEAD,
            "if self.training:\n            self.hot *= 1.02\n"
            f"        {HEAD}\n        logits = logits * self.hot",
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


@pytest.fixture
def launched(home, cli, text_file):
    """Runs a job of a script with edits; only the job has the script afterwards."""

    def run(*edits: tuple[str, str]) -> Finished:
        script = launching.edited(home.parent / "mine", *edits)
        ran = cli(*launching.launching("--entry-point", str(script), data=text_file))
        assert ran.code == 0, ran.err
        shutil.rmtree(script)
        return Finished(home, ran.out.strip())

    return run


def module_of(folder: Path) -> SimpleNamespace:
    """What the files of a training folder define, together."""
    source = Source.read(folder)
    names = ("errors", "config", "data", "model", "huggingface")
    found = {k: v for name in names for k, v in vars(source.module(name)).items()}
    return SimpleNamespace(**{k: v for k, v in found.items() if not k.startswith("__")})


def model_of(module: SimpleNamespace, **values: Any) -> Any:
    """A model of 11 characters of a folder, none of whose parts is idle."""
    model = module.GPT(module.make_config(values), 11).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def as_trained(job: Finished) -> tuple[Any, str]:
    """The model that the run kept, with its weights as it trained them, and its vocabulary."""
    module, place = module_of(job.directory / "code"), job.directory / "hosts/algo-1"
    training = json.loads((place / "model/training.json").read_text())
    loaded = Checkpoints(place / "checkpoints").load_latest()
    assert loaded is not None
    tensors, state = loaded
    assert state["best_step"] == training["step"]
    best = {k[5:]: tensor for k, tensor in tensors.items() if k.startswith("best.")}
    tokenizer = module.Tokenizer(state["tokenizer"])
    model = module.with_weights(module.make_config(training["config"]), len(tokenizer), best)
    return model, characters(tokenizer)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_sampled_as_it_was_trained(edit, launched, cli):
    job = launched(*EDITS[edit])
    model, vocabulary = as_trained(job)
    prompt, n = "The ", 60
    ids = torch.tensor([[vocabulary.index(character) for character in prompt]])
    with torch.inference_mode():
        for _ in range(n):
            following = model(ids[:, -32:])[:, -1].argmax(dim=-1, keepdim=True)
            ids = torch.cat((ids, following), dim=1)
    words = ("--prompt", prompt, "--max-new-tokens", str(n), "--temperature", "0")
    ran = cli("fetch-and-sample", job.job_id, *words)
    assert ran.code == 0, ran.err
    assert ran.out == "".join(vocabulary[i] for i in ids[0].tolist()) + "\n"
    assert "sampling with the edited" in ran.err


@pytest.fixture
def edited(launched):
    return launched(*EDITS["activation"])


def test_an_edited_model_names_its_script_and_why(edited):
    import transformers

    directory = edited.directory / "hosts/algo-1/model"
    assert "its logits differ from Qwen3's" in (edited.directory / "logs/job.log").read_text()
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "sm-nanogpt-edited"
    assert "its logits differ from Qwen3's" in config["why"]
    with pytest.raises(ValueError, match="sm-nanogpt-edited"):
        transformers.AutoModelForCausalLM.from_pretrained(directory)
    training = json.loads((directory / "training.json").read_text())
    command = ["sh", "-c", "LC_ALL=C; export LC_ALL; sha256sum *.py | sha256sum"]
    sums = subprocess.check_output(command, cwd=edited.directory / "code", text=True)
    assert training["script_sha256"] == sums.split()[0]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_can_be_started_from(edit, tmp_path):
    module = module_of(launching.edited(tmp_path / "mine", *EDITS[edit]))
    more = {"softcap": 3.0} if edit == "hyperparameter" else {}
    model = model_of(module, n_layer=1, n_embd=32, **more)
    training = {"script_sha256": module.SCRIPT_SHA256}
    assert module.write_artefact(tmp_path, model, tokenizer_of("abcdefghijk"), training)
    config = module.make_config(module.starting_values(tmp_path, {}))
    started = module.GPT(config, 11).eval()
    module.load_pretrained(started, tmp_path)
    ids = torch.arange(11)[None]
    assert torch.equal(started(ids), model(ids))
    with pytest.raises(ConfigError, match=module.SCRIPT_SHA256[:12]):
        starting_values(tmp_path, {})


def test_tuning_an_edited_model_needs_its_script(edited, cli, text_file):
    words: tuple[str, ...] = ("launch", "--instance", "local", "--init-from", edited.job_id)
    words += ("--data", str(text_file), *launching.sets(max_steps=2, device="cpu", batch_size=4))
    ran = cli(*words)
    assert ran.code == 2
    assert "--entry-point DIR" in ran.error
    ran = cli(*words, "--entry-point", str(edited.directory / "code"))
    assert ran.code == 0, ran.err
    assert "step=0/2 val_loss=" in ran.err


def test_an_edited_model_needs_its_own_script(edited, cli, tmp_path):
    other, mine = launching.edited(tmp_path / "other", *EDITS["no QK-norm"]), tmp_path / "own"
    (edited.directory / "code").rename(mine)
    ran = cli("fetch-and-sample", edited.job_id, "--entry-point", str(other))
    assert ran.code == 2
    assert f"{other} is another" in ran.error
    shutil.rmtree(edited.home / "sources")
    ran = cli("fetch-and-sample", edited.job_id)
    assert (ran.code, ran.out) == (2, "")
    assert "--entry-point DIR" in ran.error
    assert not (edited.home / "models" / edited.job_id).exists()
    with pytest.raises(InputError, match="--entry-point DIR"):
        load_model(edited.directory / "hosts/algo-1/model")
    ran = cli("fetch-and-sample", edited.job_id, "--entry-point", str(mine))
    assert ran.code == 0, ran.err
    (text,) = sample(edited.job_id, entry_point=mine)
    assert ran.out == text + "\n"


def test_a_stopped_job_is_exported_by_its_script(edited, cli):
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


@pytest.mark.parametrize(
    ("edit", "of_model"),
    [
        (("QUERIES_AT_ONCE = 256", "QUERIES_AT_ONCE = 128"), True),  # of model.py
        (("warm * (config.final", "0.9 * warm * (config.final"), False),  # of the schedule
    ],
)
def test_the_package_computes_qwen3_without_the_folder(edit, of_model, launched, home, caplog):
    """And with it, since it is faster, if the folder has the same model.py."""
    directory = fetch_model(launched(edit).job_id)
    assert isinstance(load_model(directory)[0], GPT) is not of_model
    shutil.rmtree(home / "sources")
    assert isinstance(load_model(directory)[0], GPT)
    assert ("using the packaged script" in caplog.text) is of_model


def test_an_edited_width_is_sampled_by_its_folder(launched, cli):
    """model.py reads it from the Config, so a model.py that was left alone is not enough."""
    job = launched(("8 * round(self.n_embd / 3)", "4 * self.n_embd"))
    ran = cli("fetch-and-sample", job.job_id)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (  # after one id alone
            (
                "        x = norm(x, self.norm)\n",
                "        x = norm(x, self.norm)\n"
                "        x = x * (1 - 2 * (idx == 9).int()).cumprod(1)[..., None]\n",
            ),
            "its logits differ",
        ),
        ((f"    {ACTIVATION}", "    activation = nn.GELU()"), "has no attribute 'GELU'"),
        ((ACTIVATION, "activation = staticmethod(lambda x: F.relu(x) ** 2)"), "'<lambda>'"),
        ((ACTIVATION, "other = staticmethod(F.silu)"), "'MLP' has no attribute"),
    ],
)
def test_models_unlike_qwen3_are_marked_edited(edit, why, tmp_path):
    module = module_of(launching.edited(tmp_path / "mine", edit))
    tokenizer = tokenizer_of("abcdefghijk")
    assert why in module.write_artefact(tmp_path / "model", model_of(module), tokenizer, {})
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["model_type"] == "sm-nanogpt-edited"


def exported(tmp_path: Path) -> str:
    words = "".join(map(chr, range(1000, 6000)))
    model = GPT(Config(), len(words)).eval()
    model.init_weights(1)
    return write_artefact(tmp_path / "model", model, tokenizer_of(words), {})


def test_the_check_of_an_export_takes_two_windows(tmp_path, monkeypatch):
    computed = Mock(side_effect=qwen3_logits)
    monkeypatch.setattr("entry_point.huggingface.qwen3_logits", computed)
    assert exported(tmp_path) == ""
    assert [len(call.args[0]) for call in computed.mock_calls] == [64, 64]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory_is_not_called_edited(tmp_path, monkeypatch, error):
    monkeypatch.setattr("entry_point.huggingface.qwen3_logits", Mock(side_effect=error))
    with pytest.raises(type(error)):
        exported(tmp_path)
    assert not (tmp_path / "model/config.json").exists()


def test_another_scripts_best_weights_are_dropped(job, cli, tmp_path):
    script = launching.edited(tmp_path / "mine", *EDITS["activation"])
    words = ("--entry-point", str(script), "--set", "max_steps=11")
    ran = cli("launch", "--instance", "local", "--resume", job.job_id, *words)
    assert ran.code == 0, ran.err
    assert "note: another script wrote it" in ran.err
    assert "at step 11\n" in ran.err


def test_resume_refuses_a_script_of_other_weights(job, cli, tmp_path):
    script = launching.edited(tmp_path / "mine", *EDITS["more weights"])
    words = ("--entry-point", str(script), "--set", "max_steps=11")
    ran = cli("launch", "--instance", "local", "--resume", job.job_id, *words)
    assert ran.code == 1
    assert "attention.out.bias is nothing in the checkpoint" in ran.error


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
    script = launching.edited(tmp_path / "mine", *EDITS["more weights"])
    module = module_of(script)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        layer = module.Linear(3, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(layer.bias, torch.zeros(2))


def test_a_parameter_without_a_gradient_is_named(cli, text_file, tmp_path):
    script = launching.edited(tmp_path / "mine", EDITS["more weights"][0])
    for processes in ("1", "2"):
        words = ("--entry-point", str(script), "--processes-per-instance", processes)
        ran = cli(*launching.launching(*words, data=text_file))
        assert ran.code == 1
        assert "TrainingError: blocks.0.attention.qkv.bias" in ran.error
        assert "no gradient" in ran.error


def test_an_activation_known_to_qwen3_stays_loadable(tmp_path):
    import transformers

    edit = (ACTIVATION, "activation = staticmethod(F.gelu)")
    module = module_of(launching.edited(tmp_path / "mine", edit))
    model = model_of(module)
    assert module.write_artefact(tmp_path / "model", model, tokenizer_of("abcdefghijk"), {}) == ""
    assert json.loads((tmp_path / "model/config.json").read_text())["hidden_act"] == "gelu"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(11)[None]
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-4, rtol=1e-4)


def test_another_activation_needs_its_script(launched, home, cli):
    job = launched((ACTIVATION, "activation = staticmethod(F.gelu)"))
    ran = cli("launch", "--instance", "local", "--init-from", job.job_id)
    assert ran.code == 2
    assert "--entry-point DIR" in ran.error
    shutil.rmtree(home / "sources")
    ran = cli("fetch-and-sample", job.job_id)
    assert (ran.code, ran.out) == (2, "")
    assert "--entry-point DIR" in ran.error


def test_copy_script_copies_and_replaces_nothing(cli, tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    ran = cli("copy-script", str(mine))
    assert (ran.code, ran.out) == (0, f"{mine}\n")
    assert Source.read(mine).is_packaged
    other.write_text("mine")
    ran = cli("copy-script", str(other))
    assert ran.code == 2
    assert f"{other} exists" in ran.error
    assert other.read_text() == "mine"
