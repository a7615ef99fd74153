"""Hyperparameters: how they are read, and what is said of those that cannot be."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import shutil
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
from runs import SCRIPT, command_line, environment

from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.command_line import OPTIONS, Options
from sm_nanogpt.entry_point.config import OPTIMIZERS, Config, make_config, read_value
from sm_nanogpt.entry_point.errors import ConfigError, TrainingError, nearest_name
from sm_nanogpt.entry_point.presets import PRESETS
from sm_nanogpt.entry_point.train import main, parse_argv

FIELDS = dataclasses.fields(Config)


def config_of(*argv: str) -> Config:
    return parse_argv(argv)[0]


# -- what the toolkit writes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, values",
    [
        ("--tie_embeddings False", {"tie_embeddings": False}),
        ("--tie_embeddings --n_layer 3", {"tie_embeddings": True, "n_layer": 3}),
        ("--n_layer 3 --tie_embeddings", {"tie_embeddings": True, "n_layer": 3}),
        ("--learning_rate 1e-05", {"learning_rate": 1e-5}),
        ("--max_steps 1e5", {"max_steps": 100_000}),
        ("--max_steps 5.0", {"max_steps": 5}),
        ("--n-layer=3", {"n_layer": 3}),
    ],
)
def test_words_are_read_as_typed_values(arguments, values):
    assert config_of(*arguments.split()) == Config(**values)


def test_an_empty_value_means_the_default():
    arguments = []
    for field in [*FIELDS, *OPTIONS]:
        arguments += [f"--{field.name}", ""]
    assert parse_argv(arguments) == (Config(), Options())


def test_typed_values_are_taken_as_they_are():
    values = {"n-layer": 3, "dropout": 0, "tie_embeddings": True, "device": None}
    assert make_config(values) == Config(n_layer=3, dropout=0, tie_embeddings=True)


def test_every_value_survives_its_way_through_argv():
    others = dict(learning_rate=1e-5, tie_embeddings=True, seed=2**40)
    config = Config(**{**PRESETS["baby"], **others})
    assert config_of(*command_line(**dataclasses.asdict(config))) == config


# -- errors name the name, the value, what is allowed, and the nearest that is ---------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--n_layers 8", r"^--n_layers: .* n_layer\?$"),
        ("--n_layer", "^--n_layer: .* missing$"),
        ("--n_layer --n_head 2", "^--n_layer: .* missing$"),
        ("-n_layer 2", r"^-n_layer: .* n_layer\?$"),
        ("input.txt", r"^input\.txt: .* --data input\.txt$"),
        ("--learning_rate -1e-05", r"learning_rate='-1e-05': .* 0 to 1e\+37$"),
        ("--processes 0", "processes='0': .* at least 1$"),
        ("--preset nosuch", "preset='nosuch': .* cpu, quick, laptop, baby, small, gpt2$"),
        ("--resume run --init-from model", "--resume .* leave out --init-from"),
        ("--resume run --out there", "--resume .* leave out .*--out"),
    ],
)
def test_words_that_cannot_be_read_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse_argv(arguments.split())


@pytest.mark.parametrize(
    "name, allowed, values",
    [
        ("n_layer", "1 to 1024", ["four", "4.5", True, [1], 0, 10**19]),
        ("log_interval", "a whole number, at least 1", ["inf"]),
        ("dropout", "0 to 0.95", ["much", 0.96, -0.1]),
        ("learning_rate", "0 to 1e+37", [float("nan"), float("inf")]),
        ("tie_embeddings", "True or False", ["maybe"]),
        ("optimizer", f"one of {', '.join(OPTIMIZERS)}", ["sgd"]),
    ],
)
def test_an_impossible_value_is_refused(name, allowed, values):
    for value in values:
        message = re.escape(f"{name}={value!r}: must be ")
        with pytest.raises(ConfigError, match=f"^{message}.*{re.escape(allowed)}$"):
            make_config({name: value})


def test_both_ends_of_a_range_are_allowed():
    for field in FIELDS:
        for end in (field.metadata["minimum"], field.metadata["maximum"]):
            if math.isfinite(end):
                assert read_value(field, end) == end


def test_the_smallest_run_is_allowed():
    one = ("n_layer", "n_head", "batch_size", "max_steps", "log_interval", "eval_interval")
    make_config({**dict.fromkeys(one, 1), "n_embd": 2, "block_size": 2})


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lr": "1"}, r"^lr='1': .* learning_rate\?$"),
        ({"xyzzy": "1"}, "^xyzzy='1': there is no such hyperparameter$"),
        ({"optimizer": "moun"}, r"; did you mean muon\?$"),
        ({"n_embd": 12, "n_head": 4}, "n_embd=12 .*even.*n_embd=8 or 16$"),
        ({"batch_size": 12, "gradient_accumulation_steps": 5}, "batch_size=10 or 15$"),
        ({"warmup_steps": 20, "max_steps": 10}, "warmup_steps=20 .*max_steps=10"),
        ({"block_size": 60, "short_windows": 0.5}, "block_size=60 .*block_size=56 or 64$"),
    ],
)
def test_values_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        make_config(values)


@pytest.mark.parametrize(
    "batch_size, passes, world_size, nearest",
    [(12, 2, 4, "8 or 16"), (3, 1, 4, "4")],
)
def test_an_indivisible_batch_names_the_nearest(batch_size, passes, world_size, nearest):
    config = Config(batch_size=batch_size, gradient_accumulation_steps=passes)
    with pytest.raises(ConfigError, match=f"batch_size={batch_size} .*batch_size={nearest}$"):
        config.check_world_size(world_size)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("lamda_", "lambda_"),
        ("eval_windows", "short_windows or eval_tokens"),
        ("sw", "short_windows"),
    ],
)
def test_a_slip_names_one_hyperparameter_else_up_to_three(name, meant):
    names = ["lambda_", "n__layer", "eval_tokens", "short_windows"]
    assert nearest_name(name, names) == f"; did you mean {meant}?"


# -- presets and the dataclass itself --------------------------------------------------------------


def test_every_preset_is_valid_and_cpu_the_default():
    assert all(make_config({}, preset) for preset in PRESETS)
    assert make_config({"device": "cpu"}) == make_config({}, "cpu")


def test_a_preset_evaluates_twice_or_more():
    """One validation loss is a dot in a report, and not a curve."""
    for preset in PRESETS:
        config = make_config({}, preset)
        assert config.max_steps >= 2 * config.eval_interval, preset


def test_values_override_the_preset_which_overrides_the_base():
    config = make_config({"n_layer": "2"}, "baby", {"n_embd": 12, "seed": 5})
    assert config.n_layer == 2
    assert config.n_embd == 384
    assert config.seed == 5


def test_the_default_learning_rate_depends_on_the_optimizer():
    adamw: dict[str, Any] = {"optimizer": "adamw"}
    assert Config().learning_rate == 0.02
    assert Config(learning_rate=0.5).learning_rate == 0.5
    assert make_config({}, "baby").learning_rate == 0.03
    # A preset's is not meant for it.
    for config in (Config(**adamw), make_config(adamw, "baby"), make_config({}, "baby", adamw)):
        assert config.learning_rate == 0.001
    assert make_config({**adamw, "learning_rate": "0.002"}, "baby").learning_rate == 0.002


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().n_layer = 5  # type: ignore[misc]


# -- resuming --------------------------------------------------------------------------------------


def save(checkpoints: Checkpoints, step: int, **config: Any) -> None:
    """Writes a checkpoint of a run that had this configuration."""
    state: dict[str, Any] = {"step": step, "best_step": None, "data": "/a.txt", "processes": 0}
    state |= {"validation": "", "init_from": "", "config": dataclasses.asdict(Config()) | config}
    checkpoints.save({}, state)


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def test_resuming_takes_missing_values_from_the_checkpoint(tmp_path, checkpoints):
    save(checkpoints, 5, n_layer=7, max_steps=50)
    config, options = parse_argv(["--resume", str(tmp_path), "--max_steps", "80"])
    assert config.n_layer == 7
    assert config.max_steps == 80
    assert options.data == "/a.txt"


def test_resuming_needs_an_intact_checkpoint(tmp_path, checkpoints):
    resume = ["--resume", str(tmp_path)]

    def assert_refused(message: str, error: type[TrainingError] = ConfigError) -> None:
        with pytest.raises(error, match=message):
            parse_argv(resume)

    assert_refused(f"--resume: there is no checkpoint in {tmp_path}")
    save(checkpoints, 5, dropout=0.5)
    save(checkpoints, 9, dropout=0.4)
    newest = checkpoints.path(9)
    newest.write_bytes(newest.read_bytes().replace(b'dropout\\": 0.4', b'dropout\\": 0.1'))
    assert parse_argv(resume)[0].dropout == 0.5
    checkpoints.path(5).write_bytes(b"cut")
    assert_refused(f"every checkpoint in {tmp_path}.* damaged", TrainingError)
    save(checkpoints, 10, mine=3)
    assert_refused(r"other hyperparameters \(mine\)")


# -- the file as a whole ---------------------------------------------------------------------------


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, **options, capture_output=True, text=True, timeout=60)


def test_importing_does_nothing(tmp_path):
    probe = (
        "import os, runpy, signal, torch\n"
        "def state():\n"
        "    rng = torch.get_rng_state().tolist()\n"
        "    return rng, signal.getsignal(signal.SIGTERM), dict(os.environ)\n"
        "before = state()\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='train')\n"
        "assert state() == before\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    env = environment(PYTHONDONTWRITEBYTECODE="1", SM_HOSTS="broken", RANK="7", WORLD_SIZE="9")
    env.pop("GOMP_SPINCOUNT", None)  # as importing it in this process would have left it
    ended = run_python("-c", probe, cwd=tmp_path, env=env)
    assert ended.returncode == 0
    assert ended.stdout == ""
    assert ended.stderr == ""
    assert not list(tmp_path.iterdir())


def test_the_folder_imports_only_torch_and_the_standard_library():
    for file in SCRIPT.parent.glob("*.py"):
        modules = []
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.append(str(node.module))
        packages = {module.partition(".")[0] for module in modules}
        assert packages - sys.stdlib_module_names <= {"torch"}, file.name


def test_help_explains_commands_and_hyperparameters(monkeypatch, capsys):
    monkeypatch.setattr("sm_nanogpt.entry_point.train.signal", Mock())
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "torchrun --nproc_per_node 4 train.py --data input.txt" in out
    for field in FIELDS:
        (line,) = re.findall(rf"^  --{field.name} .*", out, re.MULTILINE)
        text, zero, _ = field.metadata["help"].partition(" (0: ")
        assert text in line
        if zero and not field.default:
            assert "(default: 0, which means " in line
        else:
            assert f"(default: {field.default!r})" in line


def test_train_py_alone_asks_for_its_folder(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    ended = run_python(str(tmp_path / "train.py"), "--help")
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "copy the whole folder" in line
