"""A model is computed by the script that trained it: edits of train.py as users make them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import runs
import torch
from edits import EDITS, module_of
from launching import Finished
from models import alone, characters, lively, optimizer_of, tokenizer_of

from sm_nanogpt import InputError, Job, load_model
from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.errors import ConfigError
from sm_nanogpt.entry_point.huggingface import starting_values, write_artefact
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.qwen3 import qwen3_logits
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching import sizing
from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.store import Upload

ACTIVATION = "activation = staticmethod(F.silu)"
VOCABULARY = "abcdefghijk"
IDS = torch.tensor([[1, 2, 3]])
NEXT_IDS = torch.tensor([[2, 3, 4]])


@pytest.fixture(scope="session")
def finished_edited(tmp_path_factory, text_file):
    """A job of a script with all edits, which only the job has afterwards. It is shared."""

    def build(directory: Path) -> tuple[Path, str]:
        home = directory / "home"
        script = launching.edited(directory / "mine", *chain.from_iterable(EDITS.values()))
        command = launching.launching("--entry-point", str(script), data=text_file)
        ran = launching.command(command, home=home).good
        shutil.rmtree(script)
        return home, ran.out.strip()

    home, job_id = launching.once(tmp_path_factory, "finished-edited", build)
    job = Finished(Path(home), job_id)
    module_of(job.directory / "code")  # cached by hash: load them from what no test deletes
    return job


@pytest.fixture
def edited(finished_edited, home):
    """A copy of that job in this test's own home."""
    shutil.copytree(finished_edited.home, home)
    return Finished(home, finished_edited.job_id)


@pytest.fixture
def write(tmp_path):
    """Writes a small model of an edited folder, as a run does; none of its parts is idle."""

    def write(*edits: tuple[str, str], **values: Any) -> SimpleNamespace:
        folder = launching.edited(tmp_path / "mine", *edits)
        directory = tmp_path / "model"
        module = module_of(folder)
        config = module.make_config({"n_layer": 1, "n_embd": 32, "block_size": 16, **values})
        model = module.GPT(config, len(VOCABULARY)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        training = {"script_sha256": module.SCRIPT_SHA256}
        why, leak = module.write_artefact(directory, model, tokenizer_of(VOCABULARY), training)
        return SimpleNamespace(
            folder=folder, module=module, model=model, directory=directory, why=why, leak=leak
        )

    return write


def greedy(model: Any, vocabulary: str, prompt: str, n: int) -> str:
    """A sample at temperature 0, computed without a cache."""
    ids = torch.tensor([[vocabulary.index(character) for character in prompt]])
    with torch.inference_mode():
        for _ in range(n):
            logits = model(ids[:, -model.config.block_size :])[:, -1]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return "".join(vocabulary[i] for i in ids[0].tolist()) + "\n"


# -- a job -----------------------------------------------------------------------------------------


def test_an_edited_model_is_sampled_as_it_was_trained(edited, cli):
    """With its weights as the run trained them, which its checkpoint holds."""
    module = module_of(edited.directory / "code")
    host = edited.directory / "hosts/algo-1"
    training = json.loads((host / "model/training.json").read_text())
    loaded = Checkpoints(host / "checkpoints").load_latest()
    assert loaded is not None
    tensors, state = loaded
    assert state["best_step"] == training["step"]
    best = {k[5:]: tensor for k, tensor in tensors.items() if k.startswith("best.")}
    tokenizer = module.Tokenizer(state["tokenizer"])
    model = module.with_weights(module.make_config(training["config"]), len(tokenizer), best)
    arguments = ("--prompt", "The ", "--max-new-tokens", "60", "--temperature", "0")
    ran = cli("fetch-and-sample", edited.job_id, arguments).good
    assert ran.out == greedy(model, characters(tokenizer), "The ", 60)
    assert "sampling with the edited" in ran.err
    (directory,) = re.findall(r"^model: (.+)$", ran.err, re.MULTILINE)
    moved = Path(directory).rename(edited.home.parent / "my model")
    assert cli("sample", moved, arguments).good.out == ran.out


def test_an_edited_model_names_its_script_and_why(finished_edited):
    import transformers

    job = finished_edited.directory
    directory = job / "hosts/algo-1/model"
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "sm-nanogpt-edited"
    why = re.fullmatch("not Qwen3: (.+); the script of .*", config["why"])
    assert why is not None
    assert why[1] in (job / "logs/job.log").read_text()
    with pytest.raises(ValueError, match="sm-nanogpt-edited"):
        transformers.AutoModelForCausalLM.from_pretrained(directory)
    training = json.loads((directory / "training.json").read_text())
    command = ["sh", "-c", "LC_ALL=C; export LC_ALL; sha256sum *.py | sha256sum"]
    sums = subprocess.check_output(command, cwd=job / "code", text=True)
    assert training["script_sha256"] == sums.split()[0]


def test_tuning_an_edited_model_needs_its_script(edited, cli, text_file):
    steps = {"max_steps": 2, "batch_size": 4, "eval_tokens": 1024, "sample_length": 0}
    command = ["launch", "--instance", "local", "--data", str(text_file)]
    command += ["--init-from", edited.job_id, *launching.sets(device="cpu", **steps)]
    assert cli(command).failed(2, "--entry-point DIR")
    tuned = cli(command, "--entry-point", edited.directory / "code").good
    assert "step=0/2 val_loss=" in tuned.err


def test_an_edited_model_needs_its_own_script(edited, cli, tmp_path):
    other = launching.edited(tmp_path / "other", *EDITS["no QK-norm"])
    mine = tmp_path / "own"
    (edited.directory / "code").rename(mine)
    shutil.rmtree(edited.home / "sources")
    command = ("fetch-and-sample", edited.job_id)
    assert cli(command, "--entry-point", other).failed(2, f"{other} is another")
    assert cli(command).failed(2, "--entry-point DIR")
    with pytest.raises(InputError, match="not on this machine"):
        load_model(edited.directory / "hosts/algo-1/model")
    ran = cli(command, "--entry-point", mine).good
    assert f"model: {Job(edited.job_id).model(mine)}\n" in ran.err


def test_a_stopped_job_is_exported_by_its_script(edited, cli):
    state = edited.directory / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "status": "Stopped"}))
    directory = Job(edited.job_id).model()
    assert directory.name == "step-00000010"
    settings = launching.settings_of(edited.home)
    source = settings.home / "sources" / module_of(edited.directory / "code").SCRIPT_SHA256
    model, _ = load_model(directory, settings)
    assert type(model) is module_of(source).GPT
    assert cli("fetch-and-sample", edited.job_id).good
    shutil.rmtree(source)
    shutil.rmtree(edited.home / "models")
    assert cli("fetch-and-sample", edited.job_id).code == 2


# -- a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit != "no QK-norm"])
def test_each_edit_is_sampled_and_started_from(edit, write, cli, tmp_path):
    values = {"softcap": 3.0} if edit == "hyperparameter" else {}
    artefact = write(*EDITS[edit], **values)
    assert artefact.why
    arguments = ("--prompt", "abc", "--max-new-tokens", "60", "--temperature", "0")
    ran = cli(
        "fetch-and-sample",
        artefact.directory,
        "--entry-point",
        artefact.folder,
        arguments,
    )
    assert ran.out == greedy(artefact.model, VOCABULARY, "abc", 60), ran.err
    config = artefact.module.make_config(artefact.module.starting_values(artefact.directory, {}))
    started = artefact.module.GPT(config, len(VOCABULARY)).eval()
    artefact.module.load_pretrained(started, artefact.directory)
    ids = torch.arange(11)[None]
    assert torch.equal(started(ids), artefact.model(ids))
    with pytest.raises(ConfigError, match=artefact.module.SCRIPT_SHA256[:12]):
        starting_values(artefact.directory, {})


OF_KERNELS = ("QUERIES_AT_ONCE = 256", "QUERIES_AT_ONCE = 128")
OF_SCHEDULE = ("return warm_up * ", "return 0.9 * warm_up * ")
# model.py reads it from the Config, so a model.py that was left alone is not enough.
OF_WIDTH = ("8 * round(self.n_embd / 3)", "4 * self.n_embd")


@pytest.mark.parametrize(
    ("edit", "packaged"), [(OF_KERNELS, False), (OF_SCHEDULE, True), (OF_WIDTH, False)]
)
def test_the_package_computes_the_same_model_alone(edit, packaged, write, home):
    """As it is faster, and only then, if the folder is there."""
    artefact = write(edit)
    keep_source(Source.read(artefact.folder), launching.settings_of(home))
    assert isinstance(load_model(artefact.directory)[0], GPT) is packaged


@pytest.mark.parametrize(("edit", "of_model"), [(OF_KERNELS, True), (OF_SCHEDULE, False)])
@pytest.mark.usefixtures("home")
def test_the_package_computes_qwen3_without_the_folder(edit, of_model, write, caplog):
    assert isinstance(load_model(write(edit).directory)[0], GPT)
    assert ("using the packaged one" in caplog.text) is of_model


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
        ((ACTIVATION, "activation = staticmethod(lambda x: F.relu(x) ** 2)"), "'<lambda>'"),
        ((ACTIVATION, "other = staticmethod(F.silu)"), "has no attribute 'activation'"),
    ],
)
def test_models_unlike_qwen3_are_marked_edited(edit, why, write):
    artefact = write(edit)
    assert why in artefact.why
    config = json.loads((artefact.directory / "config.json").read_text())
    assert config["model_type"] == "sm-nanogpt-edited"


OTHER_ACTIVATION = (ACTIVATION, "activation = staticmethod(F.gelu)")


def test_an_activation_known_to_qwen3_stays_loadable(write):
    import transformers

    artefact = write(OTHER_ACTIVATION)
    assert artefact.why == ""
    assert json.loads((artefact.directory / "config.json").read_text())["hidden_act"] == "gelu"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(artefact.directory)
    ids = torch.arange(11)[None]
    with torch.inference_mode():
        expected = theirs(ids).logits
        torch.testing.assert_close(expected, artefact.model(ids), atol=1e-4, rtol=1e-4)


def test_another_activation_needs_its_script(write, cli):
    directory = write(OTHER_ACTIVATION).directory
    assert cli("fetch-and-sample", directory).failed(2, "--entry-point DIR")


def exported(tmp_path: Path) -> str:
    characters = "".join(map(chr, range(1000, 6000)))
    config = Config(n_layer=1, n_head=2, n_embd=16, block_size=64)
    model = GPT(config, len(characters)).eval()
    model.init_weights(1)
    return write_artefact(tmp_path / "model", model, tokenizer_of(characters), {})[0]


def test_an_export_is_checked_by_ids_of_the_whole_vocabulary(tmp_path, monkeypatch):
    computed = Mock(side_effect=qwen3_logits)
    monkeypatch.setattr("sm_nanogpt.entry_point.qwen3.qwen3_logits", computed)
    assert exported(tmp_path) == ""
    (ids,) = (call.args[0] for call in computed.mock_calls)
    assert len(ids) == 64
    assert int(ids.max()) == 63 * (5000 // 64)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory_is_not_called_edited(tmp_path, monkeypatch, error):
    monkeypatch.setattr("sm_nanogpt.entry_point.qwen3.qwen3_logits", Mock(side_effect=error))
    with pytest.raises(type(error)):
        exported(tmp_path)
    assert not (tmp_path / "model/config.json").exists()


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "status", "message"),
    [
        ("activation", 0, "note: another script wrote it"),
        ("more weights", 1, "attention.out.bias is nothing in the checkpoint"),
    ],
)
def test_another_script_resumes_weights_of_one_shape(
    edit, status, message, finished, text_file, tmp_path
):
    """Its best weights are its own, so those before are dropped."""
    shutil.copytree(finished.directory / "hosts/algo-1", tmp_path / "run")
    command = runs.edited_folder(tmp_path / "mine", *EDITS[edit])
    resume = runs.command_line(resume=tmp_path / "run", data=text_file, max_steps=11)
    end = runs.run(resume, cwd=tmp_path, command=command)
    assert end.status == status
    assert message in end.output
    assert ("at step 11\n" in end.output) is (status == 0)


def test_a_parameter_without_a_gradient_is_named(text_file, tmp_path):
    """Processes that share their gradients would wait for it."""
    command = runs.edited_folder(tmp_path / "mine", EDITS["more weights"][0])
    arguments = runs.command_line(**launching.TINY, data=text_file, processes=2)
    end = runs.run(arguments, cwd=tmp_path, command=command)
    assert end.status == 1
    assert re.match(r"TrainingError: blocks\.0\.attention\.qkv\.bias, .*no gradient", end.last_line)


ROW = '    "adamw": OptimizerChoice('
BUILDER = '    "adamw": adamw_alone,'
THIRD_OPTIMIZER = [
    (ROW, f'    "of an edit": OptimizerChoice("mine", 0.3, averages=2),\n{ROW}'),
    (BUILDER, f'{BUILDER}\n    "of an edit": adamw_alone,'),
]


@pytest.fixture
def third_optimizer(tmp_path):
    """A folder with an optimizer that is added at two places."""
    return launching.edited(tmp_path / "mine", *THIRD_OPTIMIZER)


@pytest.mark.parametrize("values", [{"preset": "baby"}, {"size": 1}], ids=str)
def test_a_third_optimizer_has_its_own_learning_rate(third_optimizer, values):
    chosen = {"optimizer": "of an edit"}
    request = Request(
        instance="local", entry_point=third_optimizer, hyperparameters=chosen, **values
    )
    upload = Upload("file:///data", 0, "", (), characters=10**6)
    texts = {"data": Channel("text", upload.uri, upload)}
    assert sizing.sized(request, texts).config().learning_rate == 0.3


def test_a_third_optimizer_tunes_and_trains(third_optimizer, tmp_path):
    write_artefact(tmp_path / "model", lively(), tokenizer_of(VOCABULARY), {"config": {}})
    module = Source.read(third_optimizer).module
    huggingface = module("huggingface")
    values = huggingface.starting_values(tmp_path / "model", {"optimizer": "of an edit"})
    config = module("config").make_config(values)
    assert config.learning_rate == 0.3
    model = module("model").GPT(config, len(VOCABULARY))
    model.init_weights(1)
    model(IDS, NEXT_IDS).backward()
    weights_before = model.embed.weight.detach().clone()
    module("optim").Optimizer(model, config, alone()).step(1.0)
    assert not torch.equal(model.embed.weight, weights_before)


def test_a_frozen_parameter_is_left_as_it_is():
    model = GPT(Config(), 5)
    model.init_weights(1)
    model.embed.weight.requires_grad_(False)
    dict(model.named_parameters())["blocks.0.mlp.down.weight"].requires_grad_(False)
    optimizer = optimizer_of(model)
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(IDS, NEXT_IDS).backward()
    optimizer.step(1.0)
    same = {name for name, p in model.named_parameters() if torch.equal(p, weights_before[name])}
    assert {"embed.weight", "blocks.0.mlp.down.weight"} <= same
    assert "head.weight" not in same


def test_a_bias_that_an_edit_adds_begins_at_zero(tmp_path):
    module = module_of(launching.edited(tmp_path / "mine", *EDITS["more weights"]))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        layer = module.Linear(3, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(layer.bias, torch.zeros(2))


def test_copy_script_copies_and_replaces_nothing(cli, tmp_path):
    mine, other = tmp_path / "my own", tmp_path / "other"
    ran = cli("copy-script", mine)
    assert ran.code == 0
    assert ran.out == f"{mine}\n"
    assert shlex.split(ran.err.splitlines()[-1])[-1] == str(mine)  # the next command
    assert Source.read(mine).is_packaged
    other.write_text("mine")
    assert cli("copy-script", other).failed(2, f"{other}: file exists")
    assert other.read_text() == "mine"
