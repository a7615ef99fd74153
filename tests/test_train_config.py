"""Hyperparameters: how they are read, and what is said of those that cannot be."""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
import subprocess
import sys

import pytest
from runs import SCRIPT, environment

from entry_point import train
from entry_point.checkpoint import Checkpoints
from entry_point.config import OPTIONS, PRESETS, Config, Options, make_config
from entry_point.errors import ConfigError, nearest_name
from entry_point.train import parse_argv

FIELDS = dataclasses.fields(Config)


def config_of(*argv: str) -> Config:
    return parse_argv(argv)[0]


# -- what the toolkit writes -----------------------------------------------------------------------


@pytest.mark.parametrize("said, meant", [("True", True), ("False", False), ("true", True)])
def test_a_flag_takes_its_value_from_the_next_word(said, meant):
    assert config_of("--tie_embeddings", said).tie_embeddings is meant


def test_a_bare_flag_means_true():
    assert config_of("--tie_embeddings", "--n_layer", "3") == Config(tie_embeddings=True, n_layer=3)
    assert config_of("--n_layer", "3", "--tie_embeddings") == Config(tie_embeddings=True, n_layer=3)


def test_an_empty_value_means_the_default():
    empty = [word for f in FIELDS for word in (f"--{f.name}", "")]
    assert config_of(*empty) == Config()


def test_an_empty_option_means_the_default():
    empty = [word for f in OPTIONS for word in (f"--{f.name}", "")]
    assert parse_argv(empty) == (Config(), Options())


def test_scientific_notation_is_a_number():
    assert config_of("--learning_rate", "1e-05").learning_rate == 1e-5


def test_a_whole_number_in_scientific_notation_is_an_int():
    steps = config_of("--max_steps", "1e5").max_steps
    assert (steps, type(steps)) == (100_000, int)


@pytest.mark.parametrize("argv", [("--n-layer", "3"), ("--n_layer", "3"), ("--n-layer=3",)])
def test_names_take_a_dash_or_an_underscore(argv):
    assert config_of(*argv).n_layer == 3


def test_a_negative_number_is_a_value_and_not_a_name():
    with pytest.raises(
        ConfigError, match=r"learning_rate=-1\.0: must be a number from 0 to 1e\+37"
    ):
        config_of("--learning_rate", "-1")


def test_typed_values_are_taken_as_they_are():
    values = {"n-layer": 3, "dropout": 0, "tie_embeddings": True, "device": None}
    assert make_config(values) == Config(n_layer=3, dropout=0, tie_embeddings=True)


def test_every_value_survives_its_way_through_argv():
    others = dict(learning_rate=1e-5, tie_embeddings=True, seed=2**40)
    config = Config(**{**PRESETS["baby"], **others})
    argv = [w for k, v in dataclasses.asdict(config).items() for w in (f"--{k}", str(v))]
    assert config_of(*argv) == config


# -- errors name the name, the value, what is allowed, and the nearest that is ---------------------


@pytest.mark.parametrize(
    "name, value, nearest",
    [
        ("n_layers", "8", "n_layer"),
        ("learning-rat", "0.1", "learning_rate"),
        ("batchsize", "12", "batch_size"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_name(name, value, nearest):
    with pytest.raises(ConfigError, match=f"{name}='{value}': .*did you mean {nearest}"):
        make_config({name: value})
    with pytest.raises(ConfigError, match=f"^--{name}: .*did you mean {nearest}"):
        config_of(f"--{name}", value)


def test_a_name_may_end_in_an_underscore():
    assert nearest_name("lamda_", ["lambda_", "n__layer"]) == ", did you mean lambda_?"


def test_initials_suggest_the_name_they_stand_for():
    with pytest.raises(ConfigError, match=r"lr='1': .*, did you mean learning_rate\?$"):
        make_config({"lr": "1"})


def test_a_name_unlike_any_other_lists_the_known_ones():
    with pytest.raises(
        ConfigError,
        match=r"xyzzy='1': there is no such hyperparameter, known are n_layer, n_head, ",
    ):
        make_config({"xyzzy": "1"})


def test_a_value_without_a_name_is_an_error():
    advice = r"^input\.txt: there is no such option; name a text with --data input\.txt$"
    with pytest.raises(ConfigError, match=advice):
        config_of("input.txt")


def test_a_resumed_run_starts_from_no_other_model():
    with pytest.raises(ConfigError, match="leave out --init-from"):
        parse_argv(["--resume", "run", "--init-from", "model"])


def test_a_name_without_a_value_is_an_error():
    for argv in (("--n_layer",), ("--n_layer", "--n_head", "2")):
        with pytest.raises(ConfigError, match=r"^--n_layer: its value is missing$"):
            config_of(*argv)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("n_layer", "four", "a whole number from 1 to 1024"),
        ("n_layer", "4.5", "a whole number from 1 to 1024"),
        ("log_interval", "inf", "a whole number, at least 1"),
        ("dropout", "much", r"a number from 0 to 0\.95"),
        ("tie_embeddings", "maybe", "True or False"),
        ("device", "gpu", "one of auto, cuda, mps, cpu"),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error(name, value, allowed):
    with pytest.raises(ConfigError, match=f"{name}='{value}': must be {allowed}"):
        make_config({name: value})


@pytest.mark.parametrize("value", [True, 1.5, [1], {"a": 1}])
def test_a_typed_value_of_the_wrong_kind_is_an_error(value):
    with pytest.raises(ConfigError, match=r"n_layer=.*: must be a whole number from 1 to 1024"):
        make_config({"n_layer": value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("n_layer", 0),
        ("dropout", 0.96),
        ("dropout", -0.1),
        ("beta2", 1.0),
        ("validation_fraction", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        # What torch's C++ would refuse in words of its own, or what would never end.
        ("learning_rate", 1e308),
        ("grad_clip", 1e308),
        ("weight_decay", 1e308),
        ("n_layer", 10**19),
        ("n_hidden", 10**30),
        ("batch_size", 10**30),
        ("max_steps", 10**30),
    ],
)
def test_a_value_out_of_range_is_an_error(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: must be ")):
        Config(**{name: value})


def test_a_misspelled_choice_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"optimizer='muom': .*did you mean muon\?"):
        make_config({"optimizer": "muom"})


def test_an_indivisible_width_error_names_the_nearest_widths():
    with pytest.raises(ConfigError, match=r"n_embd=100 .*n_head=6 .*n_embd=96 or 108"):
        Config(n_embd=100, n_head=6)


def test_an_odd_head_width_error_names_the_nearest_widths():
    with pytest.raises(ConfigError, match=r"n_embd=12 .*even.*n_embd=8 or 16"):
        Config(n_embd=12, n_head=4)


@pytest.mark.parametrize(
    "batch_size, passes, world_size, nearest",
    [(12, 1, 8, "8 or 16"), (12, 2, 4, "8 or 16"), (3, 1, 4, "4")],
)
def test_an_indivisible_batch_error_names_the_nearest_sizes(
    batch_size, passes, world_size, nearest
):
    config = Config(batch_size=batch_size, gradient_accumulation_steps=passes)
    with pytest.raises(ConfigError, match=f"batch_size={batch_size} .*batch_size={nearest}$"):
        config.check_world_size(world_size)


def test_passes_must_divide_the_batch_without_processes():
    with pytest.raises(ConfigError, match="batch_size=10 or 15"):
        Config(batch_size=12, gradient_accumulation_steps=5)


def test_the_warm_up_must_fit_into_the_run():
    with pytest.raises(ConfigError, match="warmup_steps=20 is more than max_steps=10"):
        Config(warmup_steps=20, max_steps=10)


def test_a_block_size_not_divisible_by_8_is_an_error():
    with pytest.raises(ConfigError, match=r"block_size=60 .* fit: block_size=56 or 64"):
        Config(block_size=60, short_windows=0.5)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_processes_must_be_a_positive_whole_number(value):
    with pytest.raises(ConfigError, match=f"processes='{value}': must be a whole number"):
        parse_argv(["--processes", value])


# -- presets, help, the dataclass itself -----------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid(preset):
    make_config({}, preset)


def test_the_defaults_are_those_of_the_cpu_preset():
    assert make_config({"device": "cpu"}) == make_config({}, "cpu")


def test_values_override_the_preset_which_overrides_the_base():
    config = make_config({"n_layer": "2"}, "baby", {"n_embd": 12, "seed": 5})
    assert (config.n_layer, config.n_embd, config.seed) == (2, 384, 5)


def test_a_presets_learning_rate_does_not_apply_to_adamw():
    assert make_config({}, "baby").learning_rate == 0.03
    assert make_config({"optimizer": "adamw"}, "baby").learning_rate == 0.001
    assert make_config({}, "baby", {"optimizer": "adamw"}).learning_rate == 0.001
    both = {"optimizer": "adamw", "learning_rate": "0.002"}
    assert make_config(both, "baby").learning_rate == 0.002


def test_an_unknown_preset_error_lists_the_presets_once():
    with pytest.raises(ConfigError, match=r"must be one of cpu, quick, laptop, baby, small, gpt2$"):
        config_of("--preset", "nosuch")


@pytest.mark.parametrize(
    "name, value, choices",
    [
        ("precision", "fp16", "auto, bfloat16, float16, tf32, float32"),
        ("device", "gpu", "auto, cuda, mps, cpu"),  # of which it does not mean cpu
    ],
)
def test_an_unknown_choice_error_lists_the_choices_once(name, value, choices):
    with pytest.raises(ConfigError, match=f"{name}='{value}': must be one of {choices}$"):
        make_config({name: value})


def test_a_misspelled_preset_error_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"preset='babe': .*cpu, quick, laptop, baby.*did you mean baby\?"
    ):
        config_of("--preset", "babe")


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_every_hyperparameter_is_explained_by_help(f):
    assert f.metadata["help"]
    line = next(line for line in train.usage().splitlines() if line.startswith(f"  --{f.name} "))
    assert f.metadata["help"].partition(" (0: ")[0] in line
    assert "default: 0, which means" in line or f"(default: {f.default!r})" in line


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().n_layer = 5  # type: ignore[misc]


EMPTY = {"validation": "", "init_from": "", "processes": 0}


def test_resuming_takes_missing_values_from_the_checkpoint(tmp_path):
    saved = dataclasses.asdict(Config(n_layer=7, max_steps=50))
    state = {"step": 5, "best_step": None, "config": saved, "data": "/a.txt", **EMPTY}
    Checkpoints(tmp_path / "checkpoints").save({}, state)
    config, options = parse_argv(["--resume", str(tmp_path), "--max_steps", "80"])
    assert (config.n_layer, config.max_steps, options.data) == (7, 80, "/a.txt")


def test_resuming_takes_nothing_from_a_damaged_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (5, 9):
        saved = dataclasses.asdict(Config(dropout=0.5, max_steps=50))
        state = {"step": step, "best_step": None, "config": saved, "data": "", **EMPTY}
        checkpoints.save({}, state)
    newest = checkpoints.path(9)
    newest.write_bytes(newest.read_bytes().replace(b'dropout\\": 0.5', b'dropout\\": 0.1'))
    config, _ = parse_argv(["--resume", str(tmp_path)])
    assert config.dropout == 0.5
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
        checkpoints.path(5).unlink()
        parse_argv(["--resume", str(tmp_path)])


def test_resuming_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"--resume .*: there is no checkpoint to resume from"):
        parse_argv(["--resume", str(tmp_path)])


def test_resuming_from_only_damaged_checkpoints_is_an_error(tmp_path):
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (directory / "checkpoint-00000005.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"--resume .*: every checkpoint in .* is damaged"):
        parse_argv(["--resume", str(tmp_path)])


def test_a_resumed_run_refuses_another_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"--out there: --resume continues in its own directory"):
        parse_argv(["--resume", str(tmp_path), "--out", "there"])


# -- the file as a whole ---------------------------------------------------------------------------


def test_importing_does_nothing(tmp_path):
    probe = (
        "import importlib.util, os, sys, torch, signal\n"
        "before = torch.get_rng_state(), signal.getsignal(signal.SIGTERM), dict(os.environ)\n"
        f"spec = importlib.util.spec_from_file_location('train', {str(SCRIPT)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['train'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert torch.equal(before[0], torch.get_rng_state())\n"
        "assert before[1] == signal.getsignal(signal.SIGTERM)\n"
        "assert before[2] == dict(os.environ)\n"
    )
    env = environment(PYTHONDONTWRITEBYTECODE="1", SM_HOSTS="broken", RANK="7", WORLD_SIZE="9")
    env.pop("GOMP_SPINCOUNT", None)  # as importing it in this process would have left it
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, env=env, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", sorted(SCRIPT.parent.glob("*.py")), ids=lambda file: file.name)
def test_the_folder_imports_only_torch_and_the_standard_library(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names <= {"torch", "entry_point"}
    assert ("entry_point" in imported) == (file.name == "train.py")


def test_help_lists_the_commands_of_the_docstring():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "torchrun --nproc_per_node 4 train.py --data input.txt" in done.stdout
    assert not done.stderr


def test_train_py_alone_asks_for_its_folder(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    words = [sys.executable, str(tmp_path / "train.py"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "copy the whole folder" in done.stderr


def test_the_files_stay_short():
    lines = {file.name: len(file.read_text().splitlines()) for file in SCRIPT.parent.glob("*.py")}
    assert not [name for name, n in lines.items() if n > 500]
