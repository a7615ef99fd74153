"""What to run: validated data, and one source of truth for what is allowed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import launching
import pytest
from launching import launching as launch_words

from sm_nanogpt import InputError, Request
from sm_nanogpt.entry_point.config import make_config
from sm_nanogpt.entry_point.errors import ConfigError
from sm_nanogpt.entry_point.huggingface import folder_sha256
from sm_nanogpt.launcher.cli.options import parse_assignments
from sm_nanogpt.launcher.local.runner import command_line
from sm_nanogpt.launcher.sagemaker.request import sendable_hyperparameters
from sm_nanogpt.launcher.source import Source


def refusal(**values: object) -> str:
    """Why a job cannot be."""
    with pytest.raises(InputError) as caught:
        Request(**{"instance": "local", **values}).config()
    return str(caught.value)


def with_fields(folder: Path, **defaults: object) -> Path:
    """A copy of the training folder with more hyperparameters."""
    line = "    device: str = hyper"
    fields = [
        f'    {name}: {type(value).__name__} = hyperparameter({value!r}, "", group="data")\n'
        for name, value in defaults.items()
    ]
    return launching.edited(folder, (line, "".join(fields) + line))


def test_a_job_refuses_values_in_the_scripts_words():
    cases: list[dict[str, Any]] = [
        {"n_layr": 2},
        {"n_layer": "two"},
        {"n_embd": 30, "n_head": 4},
        {"dropout": 1.5},
    ]
    for values in cases:
        with pytest.raises(ConfigError) as caught:
            make_config(values)
        assert refusal(hyperparameters=values) == str(caught.value)


def test_a_typo_in_a_preset_is_answered_by_what_is_like_it():
    assert refusal(preset="atuo").endswith("small, gpt2; did you mean auto?")
    assert refusal(preset="laptp").endswith("; did you mean laptop?")
    assert refusal(preset="enormous").endswith("small, gpt2")


def test_a_list_of_values_is_that_of_a_sweep():
    cases = {"max_steps": "5,8", "optimizer": "muon,adamw", "learning_rate": "0.01,0.02"}
    for name, values in cases.items():
        with pytest.raises(InputError) as caught:
            Request(instance="local", hyperparameters={name: values}).config()
        assert caught.value.code == "list-of-values"
        assert caught.value.sweep == f"{name}={values}"
    with pytest.raises(InputError) as caught:
        Request(instance="local", preset="quick,cpu").config()
    assert caught.value.sweep == "preset=quick,cpu"


@pytest.mark.parametrize(
    ("name", "value", "decimal"),
    [
        ("learning_rate", "0,1", "learning_rate=0.1"),
        ("weight_decay", "0,05", "weight_decay=0.05"),
        ("dropout", "-0,5", "dropout=-0.5"),
    ],
)
def test_a_decimal_comma_is_no_list_of_values(name, value, decimal):
    with pytest.raises(InputError) as caught:
        Request(instance="local", hyperparameters={name: value}).config()
    assert caught.value.code == "decimal-comma"
    assert caught.value.decimal == decimal


def test_a_name_is_a_word_of_its_own():
    for name in ("latest", "sm-nanogpt-mine", "a b", "-a", "../a", "é", "a" * 64, ".a"):
        assert refusal(name=name).startswith(f"name={name}: must be at most 63 letters")


def test_a_job_that_resumes_none_says_where_it_runs():
    cases = [{}, {"max_cost": 1}, {"processes_per_instance": 2}]
    for fields in cases:
        with pytest.raises(InputError, match=r"instance: must be given: local.* ml\."):
            Request(**fields)
        assert Request(resume="a-job", **fields).instance is None


def test_empty_hyperparameters_are_omitted():
    job = Request(instance="local", hyperparameters={"n-layer": 2, "dropout": ""})
    assert job.explicit_hyperparameters() == {"n_layer": 2}


def test_every_hyperparameter_is_sent():
    hyperparameters = sendable_hyperparameters(
        Request(instance="local", preset="baby", hyperparameters={"n_layer": "2"})
    )
    assert hyperparameters == asdict(make_config({"n_layer": 2}, "baby"))


def test_unsendable_defaults_are_left_to_the_script(tmp_path):
    job = Request(instance="local", entry_point=with_fields(tmp_path / "mine", motto="a b"))
    assert job.all_hyperparameters()["motto"] == "a b"
    assert "motto" not in sendable_hyperparameters(job)


def test_values_that_a_shell_executes_are_refused(tmp_path):
    script = with_fields(tmp_path / "mine", motto="ab")
    for motto in ("a b", "$(id)", "a;b", "`id`", "a\nb", "'", "a" * 2501):
        job = Request(instance="local", entry_point=script, hyperparameters={"motto": motto})
        with pytest.raises(InputError, match="motto="):
            sendable_hyperparameters(job)


def test_argv_is_formatted_like_the_toolkits():
    argv = command_line({"n_layer": 2, "learning_rate": 1e-5, "tie_embeddings": True})
    assert argv == ["--learning_rate", "1e-05", "--n_layer", "2", "--tie_embeddings", "True"]


def test_assignments_split_at_the_first_equals_sign():
    assert parse_assignments(None, click.Option(["--tag"]), ("a=b=c", "d=")) == {
        "a": "b=c",
        "d": "",
    }


def test_an_invalid_or_repeated_assignment_is_refused():
    cases = [
        ("n_layer",),
        ("n_layer=",),
        ("=3",),
        ("n_layer=1", "n_layer=2"),
        ("n_layer=1", "n-layer=1"),
    ]
    for arguments in cases:
        with pytest.raises(InputError, match="--set"):
            parse_assignments(None, click.Option(["--set"]), arguments)


def test_a_new_field_is_for_sagemaker_by_default():
    class Later(Request):
        field_of_tomorrow: int = 0

    with pytest.raises(InputError, match=r"field_of_tomorrow: is for SageMaker"):
        Later(instance="local", field_of_tomorrow=1)
    assert Later(instance="ml.g5.xlarge", field_of_tomorrow=1).field_of_tomorrow == 1
    assert not Later(instance="local", spot=False, network_isolation=False).spot  # off is allowed


def test_an_invalid_field_names_its_value_and_limit():
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"instances": 2}, "instances=2", "no such field"),
        ({"instance_count": 0}, "instance_count=0", "at least 1"),
        ({"instance_count": 101}, "instance_count=101", "at most 100"),
        ({"instance_count": "two"}, "instance_count=two", "integer"),
        ({"max_cost": 0}, "max_cost=0", "more than 0"),
        ({"max_run": 1}, "max_run=1", "at least 60"),
        ({"keep_alive": 3601}, "keep_alive=3601", "at most 3600"),
        ({"launcher": "mpirun"}, "launcher=mpirun", "'pytorchddp' or 'torchrun'"),
        ({"hyperparameters": {"n_layer": [1]}}, "n_layer=[1]", "a finite number, a text"),
        ({"hyperparameters": 3}, "hyperparameters=3", "dictionary"),
        ({"preset": "babby"}, "preset=babby", "baby, small, gpt2"),
        ({"preset": "fast"}, "preset=fast", "one of auto, "),
    ]
    for values, value, limit in cases:
        name, _, reason = refusal(**values).partition(": ")
        assert name == value
        assert limit in reason
        assert "\n" not in reason


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train.py", "x = 1\nx =", "train.py:2: SyntaxError: invalid syntax"),
        ("config.py", "x = 1", "config.py has no"),
        ("config.py", "import json\n\njson.loads('')", "config.py:3: JSONDecodeError"),
        ("model.py", "raise SystemExit(3)", "model.py:1: SystemExit: 3"),
        ("more.py", "\0", "null bytes"),
        ("setup.py", "", "setup.py"),
    ],
)
def test_an_edited_folder_that_cannot_run_is_refused(tmp_path, name, content, reason):
    folder = launching.edited(tmp_path / "mine")
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(reason)):
        Source.read(folder).check_complete()


@pytest.mark.parametrize(
    "name, function", [("config", "make_config"), ("metrics", "metric_definitions")]
)
def test_an_edited_function_that_raises_names_its_line(tmp_path, name, function, capsys):
    file = launching.edited(tmp_path / "mine") / f"{name}.py"
    edit = f"\ndef {function}(*given):\n    print('looked at')\n    return 1 / 0\n"
    file.write_text(file.read_text() + edit)
    line = file.read_text().count("\n")
    request = Request(instance="local", entry_point=file.parent)
    with pytest.raises(InputError, match=rf"mine/{name}\.py:{line}: ZeroDivisionError: "):
        request.config() if name == "config" else request.metric_definitions()
    assert capsys.readouterr().out == ""  # which is for data


@pytest.mark.parametrize("name", ["missing", "one.py", "lone/train.py"])
def test_an_entry_point_must_be_a_training_folder(tmp_path, name):
    (tmp_path / "lone").mkdir()
    for file in ("one.py", "lone/train.py"):
        (tmp_path / file).write_text("x = 1")
    assert name.partition("/")[0] in refusal(entry_point=tmp_path / name)


def test_only_visible_python_files_belong_to_a_folder(tmp_path):
    folder = launching.edited(tmp_path / "mine")
    (folder / "notes.ipynb").touch()
    (folder / "data").mkdir()
    (folder / ".#model.py").symlink_to("an-editor's-lock")
    (folder / "._model.py").write_bytes(b"\0macOS")
    source, packaged = Source.read(folder / "train.py"), Source.packaged()
    assert source.files == packaged.files
    assert source.sha256 == folder_sha256(folder) == packaged.sha256


def test_a_folder_that_moved_is_imported_from_its_new_place(tmp_path):
    folder = launching.edited(tmp_path / "mine", ("PRESETS: dict", "MOVES = 1\nPRESETS: dict"))
    Source.read(folder).module("presets")
    moved = folder.rename(tmp_path / "moved")
    Source.read(moved).module("huggingface")


def test_an_edited_copy_adds_fields_and_presets(tmp_path):
    copy = with_fields(tmp_path / "mine", extra=3)
    presets, preset = copy / "presets.py", '    "cpu": dict('
    source = presets.read_text().replace(preset, f'    "mine": dict(extra=5),\n{preset}')
    presets.write_text(source)
    assert Request(instance="local", entry_point=copy, preset="mine").config().extra == 5
    assert "extra" in refusal(hyperparameters={"extra": 4})


def test_an_edited_copy_runs_once_and_prints_nothing(tmp_path, capsys):
    log = tmp_path / "log"
    noted = f"open({str(log)!r}, 'a').write('x')\nprint('loading')\n"
    copy = launching.edited(tmp_path / "mine", ("PRESETS: dict", f"{noted}PRESETS: dict"))
    job = Request(instance="local", entry_point=copy, preset="cpu")
    job.config()
    job.model_copy(update={"preset": None}).explicit_hyperparameters()
    assert log.read_text() == "x"
    presets = copy / "presets.py"
    presets.write_text(presets.read_text(encoding="utf-8").replace("'x'", "'y'"), encoding="utf-8")
    job.config()
    assert log.read_text() == "xy"
    assert capsys.readouterr().out == ""
    assert not (copy / "__pycache__").exists()  # what runs is what was read, not a file of the disk


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--set", "n_layr=2"], "did you mean n_layer?"),
        (["--config", "unknown.toml"], "did you mean n_layer?"),
        (["--config", "table.toml"], "[model]"),
        (["--config", "latin.toml"], "not TOML"),
        (["--config", "."], ".: not a regular file"),
        (["--set", "batch_size=7", "--processes-per-instance", "2"], "batch_size=6 or 8"),
        (["--instance-count", "2"], "--instance-count 2: this machine is one host"),
        (["--set", "block_size=60000"], "block_size=60000"),
        (["--instance", "loca", "--processes-per-instance", "2"], "did you mean local"),
        (["--validation", "missing.txt"], "missing.txt"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_invalid_options_send_and_start_nothing(
    home, cli, short_text_file, tmp_path, arguments, fact
):
    for name, content in {
        "unknown": b"n_layr = 2",
        "table": b"[model]\nn_layer = 1",
        "latin": b"n_layer = '\xe9'",
    }.items():
        (tmp_path / f"{name}.toml").write_bytes(content)
    ran = cli("launch", "--instance", "local", "--data", short_text_file, arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert fact in ran.error
    assert not home.exists() or launching.tree(home) == set()


def test_the_command_line_overrides_the_config_file(home, cli, short_text_file, tmp_path):
    (tmp_path / "config.toml").write_text("n-layer = 3\nmax_steps = 1\ntie_embeddings = true\n")
    ran = cli(launch_words("--config", "config.toml", "--detach", data=short_text_file))
    described = json.loads(cli("status", ran.out.strip(), "--json").out)
    expected = {"n_layer": 1, "max_steps": 10, "tie_embeddings": True}
    assert expected.items() <= described["hyperparameters"].items()
