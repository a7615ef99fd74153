"""Where things are kept: who has the last word, and what an odd setting gets."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from sm_nanogpt import InputError
from sm_nanogpt.launcher.settings import Settings, load_settings


def write_config(home: Path, text: str | bytes) -> None:
    home.mkdir(exist_ok=True)
    content = text.encode() if isinstance(text, str) else text
    (home / "config.toml").write_bytes(content)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("", ".sm-nanogpt"), ("some/where", "some/where"), ("~/far", "far")],
)
def test_home_is_below_the_users_home_or_as_named(home, monkeypatch, variable, expected):
    """A relative one is below the working directory, which is the user's home here."""
    monkeypatch.setenv("SM_NANOGPT_HOME", variable)
    assert load_settings().home == home.parent / expected


@pytest.fixture
def nobody(home, monkeypatch):
    """A user without a home directory, as a container's user of any number is."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError("uid not found")))


def test_without_a_home_directory_one_has_to_be_named(nobody, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_HOME")
    with pytest.raises(InputError, match="set SM_NANOGPT_HOME"):
        load_settings()


def test_a_home_that_is_named_needs_no_home_directory(nobody, home):
    settings = load_settings()
    assert settings.home == home
    assert not settings.reaches_aws


def test_a_program_may_name_a_home_without_any_other(nobody, home, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_HOME")
    assert Settings(home=home).home == home


def test_an_empty_home_is_that_of_the_system(home, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_HOME")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("pwd.getpwuid", Mock(return_value=Mock(pw_dir=str(home))))
    assert load_settings().home == home / ".sm-nanogpt"


@pytest.mark.parametrize("file", ["/dev/null", "missing"])
def test_a_missing_aws_configuration_means_no_use_of_aws(home, monkeypatch, file):
    monkeypatch.setenv("AWS_CONFIG_FILE", file)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", file)
    assert not load_settings().reaches_aws
    (home.parent / "aws").write_text("[default]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home.parent / "aws"))
    assert load_settings().reaches_aws


def test_words_override_variables_and_these_the_file(home, monkeypatch):
    assert load_settings().data_store == str(home / "store")
    write_config(home, 'store = "s3://file"')
    assert load_settings().data_store == "s3://file"
    monkeypatch.setenv("SM_NANOGPT_STORE", "")  # as if unset
    assert load_settings().data_store == "s3://file"
    monkeypatch.setenv("SM_NANOGPT_STORE", "s3://environment")
    assert load_settings().data_store == "s3://environment"
    assert load_settings(store="s3://words").data_store == "s3://words"


@pytest.mark.parametrize(
    ("text", "variable", "start", "end"),
    [
        ("store = 3", "", "store=3 (SM_NANOGPT_STORE, or in {file}): ", ""),
        ('stroe = "s3://bucket"', "", "stroe='s3://bucket' (", "did you mean store?"),
        ('[aws]\nregion = "us-east-1"', "", "aws=", "?"),
        (b'store = "\xff"', "", "{file}: not TOML", ""),
        (
            "max_cost = -1",
            "MAX_COST=five",
            "max_cost='five' (",
            "a valid number",
        ),
        ("", "MAXCOST=5", "SM_NANOGPT_MAXCOST: ", "SM_NANOGPT_MAX_COST?"),
        ("", "SUBNETS=subnet-1", "SM_NANOGPT_SUBNETS: must be JSON", ""),
    ],
)
def test_an_unusable_setting_error_names_its_source(
    home, cli, monkeypatch, text, variable, start, end
):
    write_config(home, text)
    if variable:
        monkeypatch.setenv(*f"SM_NANOGPT_{variable}".split("="))
    ran = cli("jobs")
    assert ran.code == 2
    assert ran.error.startswith(start.format(file=home / "config.toml"))
    assert ran.error.endswith(end)


@pytest.mark.parametrize(("name", "value"), [("store", "rel"), ("stroe", "s3://bucket")])
def test_settings_of_a_program_are_checked_like_a_request(home, name, value):
    with pytest.raises(InputError) as caught:
        Settings(**{name: value})
    assert caught.value.field == name
    assert caught.value.value == value


def test_only_the_command_line_takes_a_relative_store(home, cli, monkeypatch):
    """Set once, it would be another place wherever a command is given."""
    monkeypatch.setenv("SM_NANOGPT_STORE", "mystore")
    ran = cli("jobs")
    assert ran.code == 2
    assert ran.error.startswith("store='mystore' (SM_NANOGPT_STORE, ")
    assert load_settings(store="mystore").data_store == str(home.parent / "mystore")
    monkeypatch.setenv("SM_NANOGPT_STORE", "~/mystore")
    assert load_settings().data_store == "~/mystore"


NO_STORES = ["s3://", "s3:///prefix", "s3:bucket", "s3://Bad_Bucket!/x", "arn:aws:s3:::b"]
NO_STORES += ["s3://bucket//prefix", "s3://bucket/some//prefix"]  # SageMaker cannot read these


def test_a_location_that_can_hold_no_text_is_refused(home):
    for location in [*NO_STORES, "file://relative", "file:x", "gs://bucket/x"]:
        with pytest.raises(InputError, match=re.escape(location)) as caught:
            Settings(store=location)
        assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    "arguments",
    ["--store s3:bucket upload-data TEXT", "launch --instance local --data s3:bucket"],
)
def test_an_invalid_location_stores_nothing(home, cli, short_text_file, arguments):
    location = "s3:bucket"
    ran = cli(arguments.replace("TEXT", str(short_text_file)).split())
    assert ran.code == 2
    assert ran.out == ""
    assert location in ran.error
    assert len(ran.error.replace(str(home), "~")) < 150
    assert {path.name for path in home.parent.iterdir()} <= {"home"}


@pytest.mark.parametrize(
    ("setting", "variable", "used"), [("mine", "theirs", "mine"), ("", "theirs", "theirs")]
)
def test_a_setting_of_ours_comes_before_a_variable_of_aws(monkeypatch, setting, variable, used):
    monkeypatch.setenv("AWS_PROFILE", variable)
    monkeypatch.setenv("AWS_REGION", variable)
    settings = load_settings(profile=setting, region=setting)
    assert settings.aws_profile == used
    assert settings.aws_region == used


def test_the_projects_internal_variables_are_ignored(home, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_LAUNCHER", "something")
    assert load_settings().home == home


def test_a_copy_for_a_dry_run_may_not_call_aws(home):
    settings = Settings(home=home)
    assert settings.with_offline(True).offline
    assert not settings.offline


def test_a_home_that_cannot_be_names_the_variable(home, monkeypatch):
    home.write_text("a file")
    monkeypatch.setenv("SM_NANOGPT_HOME", str(home))
    with pytest.raises(InputError, match="SM_NANOGPT_HOME"):
        load_settings()


def test_the_store_option_sends_an_upload_elsewhere(home, cli, short_text_file, tmp_path):
    ran = cli("--store", tmp_path / "elsewhere", "upload-data", short_text_file)
    assert ran.code == 0
    assert ran.out.startswith((tmp_path / "elsewhere").as_uri())
    assert not (home / "store").exists()
