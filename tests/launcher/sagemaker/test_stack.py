"""A deployed stack, as other commands find and use it."""

from __future__ import annotations

import json

import boto3
import pytest
from sagemaker_jobs import LAUNCH, OWN_ROLE

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.sagemaker.stack import last_seen_stack, with_stack
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.text.store import last_upload

NOBODY = "http://127.0.0.1:9"


def test_an_upload_goes_to_the_stacks_store(account, deployed, cli, short_text_file):
    ran = cli("upload-data", short_text_file)
    assert ran.out.startswith(deployed.store + "/data/")
    assert f"store: {deployed.store} (stack sm-nanogpt)" in ran.err
    assert account.described == 1
    assert last_upload(load_settings()) == ran.out.strip()


def test_an_upload_stays_here_without_a_stack(account, cli, short_text_file, monkeypatch):
    assert cli("upload-data", short_text_file).out.startswith("file:")
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    ran = cli("upload-data", short_text_file)
    assert ran.code == 0
    assert ran.out[:5] == "file:"
    assert "could not look for a stack" in ran.err


def test_naming_a_stack_uses_aws(home, cli, short_text_file):
    ran = cli("--stack", "three", "upload-data", short_text_file)
    assert "could not look for a stack (no region" in ran.err


@pytest.mark.parametrize("source", ["option", "file"])
def test_a_named_stack_that_is_missing_is_an_error(deployed, cli, home, short_text_file, source):
    (home / "config.toml").write_text('stack = "by-file"\n')
    options = ["--role", OWN_ROLE]
    if source == "option":
        options += ["--stack", "by-option"]
    for command in (("upload-data", short_text_file), (*LAUNCH, "--data", short_text_file)):
        ran = cli(options, command)
        assert ran.failed(1, f"no stack by-{source} in us-east-1")
        assert ran.out == ""


def test_the_stack_fills_what_the_settings_leave_open(account, deployed, monkeypatch):
    settings = with_stack(load_settings())
    assert settings.store == deployed.store
    assert settings.role == deployed.role
    assert account.described == 1
    settings = with_stack(load_settings(role=OWN_ROLE))
    assert settings.store == deployed.store
    assert settings.role == OWN_ROLE
    monkeypatch.setenv("SM_NANOGPT_STORE", "s3://mine/prefix")
    account.described = 0
    settings = load_settings(role=OWN_ROLE)
    assert with_stack(settings) == settings
    assert account.described == 0


def test_another_store_is_without_the_stacks_role(deployed, cli, short_text_file):
    ran = cli("--store", "s3://mine/prefix", LAUNCH, "--data", short_text_file)
    assert ran.failed(2, "no execution role")
    assert f"it can access only {deployed.store}" in ran.err


def test_a_dry_run_uses_the_remembered_stack_offline(deployed, cli, short_text_file, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    ran = cli(LAUNCH, "--data", short_text_file, "--dry-run")
    request = json.loads(ran.out)
    assert request["RoleArn"] == deployed.role
    assert request["OutputDataConfig"]["S3OutputPath"].startswith(deployed.store)
    assert "as last seen" in ran.err


def test_a_local_launch_without_text_makes_no_request(deployed, cli, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    assert cli("launch", "--instance", "local").failed(2, "nothing was uploaded")


def test_a_stack_is_remembered_by_profile(deployed, monkeypatch):
    assert last_seen_stack(load_settings(), "us-east-1") == deployed
    assert last_seen_stack(load_settings(profile="other"), "us-east-1") is None
    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "other")
        assert last_seen_stack(load_settings(), "us-east-1") is None
    boto3.client("cloudformation").delete_stack(StackName="sm-nanogpt")
    assert with_stack(load_settings()).store == ""
    assert last_seen_stack(load_settings(), "us-east-1") is None


def test_an_unreadable_memory_is_written_anew(deployed):
    settings = load_settings()
    (settings.home / "stacks.json").write_text('{"us-east-1//sm-nanogpt": {"a": 1}}')
    assert last_seen_stack(settings, "us-east-1") is None
    assert with_stack(settings).store == deployed.store
    assert last_seen_stack(settings, "us-east-1") == deployed


def test_a_launch_with_a_role_needs_no_readable_stack(caplog, account, emulator):
    settings = load_settings(role=OWN_ROLE)
    caplog.set_level("INFO", "sm_nanogpt")
    emulator.refuse["DescribeStacks"] = ("AccessDenied", "not you")
    assert with_stack(settings) == settings
    assert "AccessDenied" in caplog.messages[-1]
    with pytest.raises(ServiceError, match="AccessDenied"):
        with_stack(load_settings())


def test_a_stack_must_be_readable_where_it_is_needed(deployed, emulator):
    emulator.refuse["DescribeStacks"] = ("AccessDenied", "not you")
    with pytest.raises(ServiceError, match="AccessDenied"):
        with_stack(load_settings(role=OWN_ROLE))
