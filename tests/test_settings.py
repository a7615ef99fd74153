"""Where things are kept: who has the last word, and what an odd setting gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import InputError
from launcher.settings import load_settings


def write_config(home: Path, text: str | bytes) -> None:
    home.mkdir(exist_ok=True)
    content = text.encode() if isinstance(text, str) else text
    (home / "config.toml").write_bytes(content)


def test_home_is_below_the_users_home_by_default(home, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_HOME")
    assert load_settings().home == home.parent / ".sm-nanogpt"


def test_an_empty_variable_counts_as_unset(home, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_HOME", "")
    monkeypatch.setenv("SM_NANOGPT_STORE", "")
    settings = load_settings()
    assert settings.home == home.parent / ".sm-nanogpt"
    assert settings.data_store == settings.local_store


@pytest.mark.parametrize("file", ["", "/dev/null", "missing"])
def test_a_missing_aws_configuration_means_no_use_of_aws(home, monkeypatch, file):
    monkeypatch.setenv("AWS_CONFIG_FILE", file)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", file)
    assert not load_settings().reaches_aws
    (home.parent / "aws").write_text("[default]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home.parent / "aws"))
    assert load_settings().reaches_aws


def test_a_relative_home_is_below_the_working_directory(home, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_HOME", "near")
    assert load_settings().home == home.parent / "near"


def test_the_store_is_below_home_by_default(home):
    assert load_settings().data_store == str(home / "store")


def test_the_file_overrides_the_default(home):
    write_config(home, 'store = "s3://file"')
    assert load_settings().data_store == "s3://file"


def test_the_environment_overrides_the_file(home, monkeypatch):
    write_config(home, 'store = "s3://file"')
    monkeypatch.setenv("SM_NANOGPT_STORE", "s3://environment")
    assert load_settings().data_store == "s3://environment"


def test_the_command_line_overrides_the_environment(home, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_STORE", "s3://environment")
    assert load_settings(store="s3://words").data_store == "s3://words"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("store = 3", "store"),
        ('stroe = "s3://bucket"', "stroe"),
        ("store = ", "not TOML"),
        (b'store = "\xff"', "not TOML"),
    ],
)
def test_an_unusable_setting_is_an_error_that_names_it(home, cli, text, named):
    write_config(home, text)
    ran = cli("jobs")
    assert ran.code == 2
    assert named in ran.error


def test_an_invalid_setting_error_names_its_source(home, cli, monkeypatch):
    write_config(home, "max_cost = -1")
    assert cli("jobs").error == f"{home}/config.toml: max_cost=-1: must be more than 0"
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "five")
    assert cli("jobs").error == "SM_NANOGPT_MAX_COST='five': must be a valid number"
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "5")
    monkeypatch.setenv("SM_NANOGPT_STACK", "good")
    assert cli("--stack", "9", "jobs").error.startswith("--stack='9': must be letters, digits and")
    write_config(home, 'stroe = "s3://bucket"')
    where = f"{home}/config.toml: stroe='s3://bucket'"
    assert cli("jobs").error == f"{where}: there is no such setting; did you mean store?"


def test_a_relative_store_is_allowed_only_on_the_command_line(home, cli, monkeypatch):
    """Set once, it would be another place wherever a command is given."""
    monkeypatch.setenv("SM_NANOGPT_STORE", "mystore")
    ran = cli("jobs")
    assert ran.code == 2
    why = "is relative to the current directory; start it with / or ~/"
    assert ran.error == f"SM_NANOGPT_STORE='mystore': {why}"
    assert load_settings(store="mystore").data_store == str(home.parent / "mystore")
    monkeypatch.setenv("SM_NANOGPT_STORE", "~/mystore")
    assert load_settings().data_store == "~/mystore"


NO_STORES = ["s3://", "s3:///prefix", "s3:bucket", "s3://Bad_Bucket!/x", "arn:aws:s3:::b"]
NO_STORES += ["s3://bucket//prefix", "s3://bucket/some//prefix"]  # SageMaker cannot read these


@pytest.mark.parametrize("word", [*NO_STORES, "file://relative", "file:x", "gs://bucket/x"])
@pytest.mark.parametrize("source", ["option", "variable", "file", "data"])
def test_an_invalid_location_is_refused_from_any_source(
    home, cli, text_file, monkeypatch, source, word
):
    words = ["upload-data", str(text_file)]
    if source == "option":
        words = ["--store", word, *words]
    elif source == "variable":
        monkeypatch.setenv("SM_NANOGPT_STORE", word)
    elif source == "file":
        write_config(home, f"store = '{word}'")
    else:
        words = ["launch", "--instance", "local", "--data", word]
    ran = cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert word in ran.error
    assert len(ran.error.replace(str(home), "~")) < 150
    assert {path.name for path in home.parent.iterdir()} <= {"home"}


def test_an_unknown_variable_error_names_the_nearest_setting(cli, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_MAXCOST", "5")
    ran = cli("jobs")
    assert ran.code == 2
    assert ran.error.startswith("SM_NANOGPT_MAXCOST: ")
    assert "SM_NANOGPT_MAX_COST?" in ran.error


@pytest.mark.parametrize("name", ["LAUNCHER"])
def test_the_projects_internal_variables_are_ignored(home, monkeypatch, name):
    monkeypatch.setenv(f"SM_NANOGPT_{name}", "something")
    assert load_settings().home == home


def test_a_home_that_cannot_be_created_names_the_variable(home):
    home.write_text("a file")
    with pytest.raises(InputError, match="SM_NANOGPT_HOME"):
        load_settings()


def test_a_home_of_an_unknown_user_names_the_variable(home, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_HOME", "~nobody-of-that-name/here")
    with pytest.raises(InputError, match="SM_NANOGPT_HOME"):
        load_settings()


def test_the_store_option_sends_an_upload_elsewhere(home, cli, text_file, tmp_path):
    ran = cli("--store", str(tmp_path / "elsewhere"), "upload-data", str(text_file))
    assert ran.code == 0
    assert ran.out.startswith((tmp_path / "elsewhere").as_uri())
    assert not (home / "store").exists()


def test_a_section_in_the_config_file_is_named(home):
    home.mkdir()
    (home / "config.toml").write_text('[aws]\nregion = "us-east-1"\n')
    with pytest.raises(InputError, match=r"config\.toml: aws=.*: there is no such setting"):
        load_settings()
