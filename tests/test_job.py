"""What to run: validated data, and one source of truth for what is allowed."""

from __future__ import annotations

import re
from dataclasses import asdict

import click
import launching
import pytest
from launching import launching as launch_words

from entry_point.config import make_config
from entry_point.errors import ConfigError
from launcher import InputError, Request
from launcher.cli.options import pairs
from launcher.files.documents import read_toml
from launcher.local.runner import command_line
from launcher.sagemaker.request import sendable_hyperparameters
from launcher.source import Source


def refusal(**values: object) -> str:
    """Why a job cannot be."""
    with pytest.raises(InputError) as caught:
        Request(**values).config(1)
    return str(caught.value)


# -- hyperparameters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [{"n_layr": 2}, {"n_layer": "two"}, {"n_embd": 30, "n_head": 4}, {"dropout": 1.5}]
)
def test_a_job_refuses_values_in_the_scripts_words(values):
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert refusal(hyperparameters=values) == str(caught.value)


def test_given_hyperparameters_override_the_preset():
    job = Request(preset="baby", hyperparameters={"n_layer": "2"})
    config = job.config(1)
    assert (config.n_layer, config.n_embd) == (2, 384)


def test_explicit_hyperparameters_omit_the_empty_ones():
    job = Request(hyperparameters={"n-layer": 2, "dropout": ""})
    assert job.explicit_hyperparameters() == {"n_layer": 2}


def test_every_hyperparameter_is_sent():
    sent = sendable_hyperparameters(Request(preset="baby", hyperparameters={"n_layer": 2}))
    assert sent == asdict(make_config({"n_layer": 2}, "baby"))


def test_a_default_that_cannot_be_sent_is_left_to_the_script(tmp_path):
    place = "    device: str = hyper"
    motto = '    motto: str = hyperparameter("a b", "", group="report")\n'
    script = launching.edited(tmp_path / "mine", (place, motto + place))
    job = Request(entry_point=script)
    assert job.all_hyperparameters()["motto"] == "a b"
    assert "motto" not in sendable_hyperparameters(job)


@pytest.mark.parametrize("motto", ["a b", "$(id)", "a;b", "`id`", "a\nb", "'", "a" * 2501])
def test_a_value_that_a_shell_could_execute_is_refused(tmp_path, motto):
    place = "    device: str = hyper"
    field = '    motto: str = hyperparameter("ab", "", group="report")\n'
    script = launching.edited(tmp_path / "mine", (place, field + place))
    job = Request(entry_point=script, hyperparameters={"motto": motto})
    with pytest.raises(InputError, match="motto="):
        sendable_hyperparameters(job)


def test_more_hyperparameters_than_aws_takes_are_refused(tmp_path):
    place = "    device: str = hyper"
    more = "".join(f'    x{i}: int = hyperparameter(1, "", group="report")\n' for i in range(80))
    script = launching.edited(tmp_path / "mine", (place, more + place))
    with pytest.raises(InputError, match="AWS allows 80"):
        sendable_hyperparameters(Request(entry_point=script))


def test_the_nearest_preset_is_named():
    assert "did you mean baby?" in refusal(preset="babby")


def test_argv_is_sorted_and_formatted_like_the_toolkits():
    words = command_line({"n_layer": 2, "learning_rate": 1e-5, "tie_embeddings": True})
    assert words == ["--learning_rate", "1e-05", "--n_layer", "2", "--tie_embeddings", "True"]


def test_assignments_split_at_the_first_equals_sign():
    assert pairs(None, click.Option(["--set"]), ("a=b=c", "d=")) == {"a": "b=c", "d": ""}


@pytest.mark.parametrize(
    "words", [("n_layer",), ("=3",), ("n_layer=1", "n_layer=2"), ("n_layer=1", "n-layer=1")]
)
def test_an_invalid_or_repeated_assignment_is_refused(words):
    with pytest.raises(InputError, match="--set"):
        pairs(None, click.Option(["--set"]), words)


def test_hyperparameters_are_read_from_toml(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("n_layer = 2\ntie_embeddings = true\ndropout = 0.1\n")
    expected = {"n_layer": 2, "tie_embeddings": True, "dropout": 0.1}
    assert read_toml(file) == expected


# -- the rest of a job ----------------------------------------------------------------------------


def test_a_new_field_is_for_sagemaker_by_default():
    class Later(Request):
        field_of_tomorrow: int = 0

    with pytest.raises(InputError, match=r"--field-of-tomorrow is for SageMaker"):
        Later(instance="local", field_of_tomorrow=1)
    assert Later(instance="ml.g5.xlarge", field_of_tomorrow=1).field_of_tomorrow == 1


def test_a_local_job_may_turn_sagemaker_options_off():
    job = Request(instance="local", spot=False, network_isolation=False)
    assert not job.spot


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"instances": 2}, "instances"),
        ({"instance_count": 0}, "instance_count=0"),
        ({"processes_per_instance": -1}, "processes_per_instance=-1"),
        ({"hyperparameters": {"n_layer": [1]}}, "n_layer=[1]"),
        ({"hyperparameters": 3}, "hyperparameters=3"),
    ],
)
def test_an_invalid_field_is_named_with_its_value(values, named):
    assert named in refusal(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"instance_count": 0}, "instance_count=0: must be at least 1"),
        ({"instance_count": 101}, "instance_count=101: must be at most 100"),
        ({"max_cost": 0}, "max_cost=0: must be more than 0"),
        ({"instance_count": "two"}, "instance_count='two': must be a valid integer"),
        ({"launcher": "mpirun"}, "launcher='mpirun': must be 'pytorchddp' or 'torchrun'"),
    ],
)
def test_an_invalid_field_error_is_short(values, said):
    assert refusal(**values) == said


@pytest.mark.parametrize(("name", "meant"), [("g5.xlarge", "ml.g5.xlarge"), ("loca", "local")])
def test_an_invalid_instance_is_refused_first(home, cli, name, meant):
    ran = cli("launch", "--instance", name, "--processes-per-instance", "2")
    assert ran.code == 2
    said = f"--instance {name}: must be local or a SageMaker type; did you mean {meant}"
    assert ran.error.startswith(said)


def test_an_indivisible_batch_error_names_the_nearest_sizes():
    job = Request(hyperparameters={"batch_size": 9})
    with pytest.raises(InputError, match="batch_size=8 or 12"):
        job.config(4)


# -- one's own entry point ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train.py", "x = 1\nx =", "train.py:2: SyntaxError: invalid syntax"),
        ("config.py", "x = 1", "not an edited copy of this version's folder (config.py has no"),
        (
            "config.py",
            "import math\nmath.gleu",
            "config.py:2: AttributeError: module 'math' has",
        ),
        ("config.py", "import json\n\njson.loads('')", "config.py:3: JSONDecodeError"),
        ("model.py", "raise SystemExit(3)", "model.py:1: SystemExit: 3"),
        ("model.py", "import no_such_module", "model.py:1: ModuleNotFoundError"),
        ("more.py", "\0", "source code string cannot contain null bytes"),
        ("setup.py", "", "setup.py"),
        ("more.py", "#" * (1 << 20), "larger than 1 MB"),
    ],
)
def test_an_edited_folder_that_cannot_run_is_refused(tmp_path, name, content, reason):
    folder = launching.edited(tmp_path / "mine")
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(reason)):
        Source.read(folder).check()


@pytest.mark.parametrize("name", ["missing", "one.py", "lone/train.py", "words.txt"])
def test_an_entry_point_must_be_a_training_folder(tmp_path, name):
    (tmp_path / "lone").mkdir()
    for file in ("one.py", "lone/train.py", "words.txt"):
        (tmp_path / file).write_text("x = 1")
    assert name.partition("/")[0] in refusal(entry_point=tmp_path / name)


def test_only_python_files_belong_to_a_folder(tmp_path):
    folder = launching.edited(tmp_path / "mine")
    (folder / "notes.ipynb").touch()
    (folder / "data").mkdir()
    assert Source.read(folder / "train.py").files == Source.packaged().files


def test_an_edited_copy_adds_hyperparameters_and_presets(tmp_path):
    seed = "    seed: int = hyperparameter("
    extra = '    extra: int = hyperparameter(3, "mine", group="data")\n'
    preset = '    "cpu": dict('
    copy = launching.edited(
        tmp_path / "mine",
        (seed, extra + seed),
        (preset, '    "mine": dict(extra=5),\n' + preset),
    )
    assert Request(entry_point=copy, preset="mine").config(1).extra == 5
    assert "extra" in refusal(hyperparameters={"extra": 4})


def test_output_of_an_imported_copy_stays_off_stdout(tmp_path, capsys):
    copy = launching.edited(tmp_path / "mine", ("PRESETS: dict", "print('loading')\nPRESETS: dict"))
    Request(entry_point=copy).config(1)
    assert capsys.readouterr().out == ""


def test_an_unchanged_copy_is_executed_once(tmp_path):
    log = tmp_path / "log"
    logging = f"open({str(log)!r}, 'a').write('x')\n"
    copy = launching.edited(tmp_path / "mine", ("PRESETS: dict", f"{logging}PRESETS: dict"))
    job = Request(entry_point=copy, preset="cpu")
    job.config(1)
    job.model_copy(update={"preset": None}).explicit_hyperparameters()
    assert log.read_text() == "x"
    config = copy / "config.py"
    config.write_text(config.read_text(encoding="utf-8").replace("'x'", "'y'"), encoding="utf-8")
    job.config(1)
    assert log.read_text() == "xy"
    assert not (copy / "__pycache__").exists()  # what runs is what was read, not a file of the disk


# -- what launch says to it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--set", "n_layr=2"], "did you mean n_layer?"),
        (["--set", "n_layer=two"], "n_layer='two'"),
        (["--set", "n_layer"], "must be name=value"),
        (["--set", "optimizer=moun"], "did you mean muon?"),
        (["--set", "n_embd=30", "--set", "n_head=4"], "n_embd=24 or 32"),
        (["--set", "warmup_steps=3000"], "warmup_steps=3000"),
        (["--preset", "babby"], "did you mean baby?"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--config", "unknown.toml"], "did you mean n_layer?"),
        (["--config", "list.toml"], "n_layer=[1]"),
        (["--config", "table.toml"], "[model]"),
        (["--config", "type.toml"], "n_layer=1.5"),
        (["--config", "broken.toml"], "not TOML"),
        (["--config", "latin.toml"], "not TOML"),
        (["--config", "."], "Is a directory"),
        (["--set", "batch_size=7", "--processes-per-instance", "2"], "batch_size=6 or 8"),
        (["--instance-count", "2"], "--processes-per-instance 2"),
        (["--set", "block_size=60000"], "block_size=60000"),
        (["--instance-count", "0"], "instance_count=0: must be at least 1"),
        (["--instance-count", "two"], "two"),
        (["--processes-per-instance", "0"], "processes_per_instance=0"),
        (["--entry-point", "missing.py"], "missing.py"),
        (["--instance", "ml.g5.xlarge"], "--region"),
        (["--validation", "missing.txt"], "missing.txt"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_invalid_options_send_and_start_nothing(home, cli, text_file, tmp_path, words, named):
    for name, content in {
        "unknown": b"n_layr = 2",
        "list": b"n_layer = [1]",
        "table": b"[model]\nn_layer = 1",
        "type": b"n_layer = 1.5",
        "broken": b"n_layer =",
        "latin": b"n_layer = '\xe9'",
    }.items():
        (tmp_path / f"{name}.toml").write_bytes(content)
    ran = cli("launch", "--instance", "local", "--data", str(text_file), *words)
    assert ran.code == 2
    assert named in ran.error
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert not home.exists() or launching.tree(home) == set()


def test_the_command_line_overrides_the_config_file(home, cli, text_file, tmp_path):
    (tmp_path / "config.toml").write_text("n-layer = 3\nmax_steps = 1\n")
    words = launch_words("--config", "config.toml", "--detach", data=text_file)
    ran = cli(*words)
    described = cli("status", ran.out.strip(), "--json")
    assert '"n_layer": 1' in described.out
    assert '"max_steps": 10' in described.out
