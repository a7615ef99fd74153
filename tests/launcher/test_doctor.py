"""The checks of doctor: each tells what is well, what may be wrong, and what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import launching
import pytest

from sm_nanogpt import JobDescription, ServiceError, Settings
from sm_nanogpt.launcher import doctor
from sm_nanogpt.launcher.doctor import FAILURE, OK, WARNING, Context
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.sagemaker import stack
from sm_nanogpt.launcher.sagemaker.stack import Stack
from sm_nanogpt.launcher.tracking import TrackedJob

ROLE = "arn:aws:iam::123456789012:role/training"
GPU = ("--instance", "ml.g5.12xlarge")
STACK = Stack("sm-nanogpt", "CREATE_COMPLETE", "", ROLE, None, "")


@pytest.fixture
def stacks(monkeypatch):
    """The stack that is found, if there is one in here."""
    listed: list[Stack] = []
    for module in (doctor, stack):
        monkeypatch.setattr(
            module, "find_stack", lambda settings, session: next(iter(listed), None)
        )
    return listed


@pytest.fixture
def examined(cloud, stacks, cli):
    """What doctor finds, by check; without the training, which takes long."""

    def run(*arguments: str) -> dict[str, tuple[str, str]]:
        ran = cli("doctor", "--no-train", "--json", arguments or GPU)
        checks = json.loads(ran.out)
        assert (ran.code == 1) == any(f["result"] == FAILURE for f in checks), ran.err
        return {f["check"]: (f["result"], f["text"]) for f in checks}

    return run


def test_doctor_reports_a_healthy_account_as_healthy(examined, s3):
    checks = examined()
    assert {result for result, _ in checks.values()} == {OK}, checks
    assert checks["credentials"][1] == "arn:aws:iam::123456789012:root, in us-east-1"
    assert checks["role"][1] == ROLE
    assert checks["quota"][1] == "'ml.g5.12xlarge for training job usage' is 4"
    assert "7.09 USD an hour" in checks["price"][1]
    assert s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"] == 0


def test_each_finding_is_a_line_and_failures_exit_1(cloud, stacks, cli, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    ran = cli("doctor", "--no-train")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert all(line.split()[0] in (OK, WARNING, FAILURE) for line in lines)
    assert any(line.startswith("failure  role:           no execution role") for line in lines)
    assert "failed: role" in ran.error


def test_without_an_instance_doctor_names_usable_gpus(cloud, stacks, cli, money):
    printed = cli("doctor", "--no-train").good.out
    assert "quota:          4 x ml.g5.12xlarge, 4 x ml.g5.xlarge, 2 x ml.p3.8xlarge\n" in printed
    assert "price" not in printed
    money.quotas = {"ml.m5.xlarge": (15, 0, 0), "ml.g5.xlarge": (0, 4, 0)}
    assert re.search("warning  quota: .* --instance ml.m5.xlarge", cli("doctor", "--no-train").out)


def test_without_aws_only_the_machine_is_checked(home, cli):
    ran = cli("doctor", "--no-train").good
    assert ran.out == ""
    assert "AWS was not checked" in ran.err
    nowhere = cli("doctor", "--no-train", GPU)
    assert nowhere.code == 1
    assert "no region" in nowhere.out
    assert nowhere.out.count("is not checked") == nowhere.out.count("\n") == 1


@pytest.mark.parametrize(
    ("layers", "result", "fact"),
    [
        ({"bubblewrap", "libseccomp"}, OK, "bubblewrap"),
        ({"Landlock"}, WARNING, "the network"),
        (set(), WARNING, "all files"),
    ],
)
def test_what_confines_a_folder_is_checked(layers, result, fact, home, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.local.confine.layers", lambda: layers)
    monkeypatch.setattr(doctor, "layers", lambda: layers)
    monkeypatch.setattr(doctor, "check_training", lambda context: "trained")
    [_, finding] = doctor.run_checks(Settings(home=home), "local", train=True)
    assert finding.check == "sandbox"
    assert finding.result == result
    assert fact in finding.text


def test_a_bucket_of_another_region_is_a_failure(examined, s3, monkeypatch):
    europe, bucket = boto3.client("s3", region_name="eu-west-1"), f"{s3.bucket}-eu"
    where = {"LocationConstraint": "eu-west-1"}
    europe.create_bucket(Bucket=bucket, CreateBucketConfiguration=where)
    monkeypatch.setenv("SM_NANOGPT_STORE", f"s3://{bucket}/nanogpt")
    result, text = examined()["store"]
    assert result == FAILURE
    assert "set --region eu-west-1" in text
    assert europe.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_missing_profile_is_a_finding(home, cli):
    ran = cli("--profile", "nope", "doctor", "--no-train")
    assert ran.code == 1
    assert re.search(r"^failure  credentials: .*\(nope\)", ran.out, re.MULTILINE)


def test_a_check_of_nothing_is_refused(home, cli):
    assert cli("doctor", "--no-train", "--instance", "local").failed(2, "checks nothing")


def test_an_invalid_instance_is_refused(home, cli):
    assert cli("doctor", "--instance", "g5.12xlarge").failed(2, "ml.g5.12xlarge")


@pytest.fixture
def cold(monkeypatch):
    """Lets jobs start by the interpreter itself, and not as forks of a process that has torch."""
    monkeypatch.setattr("sm_nanogpt.launcher.local.backend.subprocess", subprocess)


def test_the_trial_run_uses_no_file_of_the_user(home, cold, tmp_path):
    """It leaves the home empty, and imports nothing from the working directory."""
    home.mkdir()
    for name in ("torch.py", "sm_nanogpt/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('shadowed')\n")
    assert Path.cwd() == tmp_path
    assert "a tiny model trained here" in str(doctor.check_training(Context(Settings(), "local")))
    assert not list(home.iterdir())


def test_a_slow_trial_run_is_stopped_first(home, tmp_path, monkeypatch):
    waited_for: list[str] = []
    wait_for_end = TrackedJob.wait_for_end

    def noted(job: TrackedJob, **limit: Any) -> JobDescription:
        description = wait_for_end(job, **limit)
        waited_for.append(description.status)
        return description

    monkeypatch.setattr(TrackedJob, "wait_for_end", noted)
    monkeypatch.setattr(doctor, "TRAINING_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setenv("NANOGPT_FAULT", "0:0:hang")  # until it is asked to stop
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServiceError, match=r"is still \w+ after 0\.1 s"):
        doctor.check_training(Context(Settings(), "local"))
    assert waited_for == ["Stopped"]
    assert not list(tmp_path.glob("sm-nanogpt-doctor-*"))


def test_a_failed_trial_run_says_why(home, cold, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "could not be started" in str(doctor.check_training(Context(Settings(), "local")))


def test_missing_credentials_skip_dependent_checks(examined, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    checks = examined()
    assert checks["credentials"][0] == FAILURE
    assert "no AWS credentials" in checks["credentials"][1]
    assert list(checks) == ["credentials"]


def test_the_stack_provides_store_and_role(examined, stacks, s3, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_STORE")
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    without = examined()
    assert "infra deploy" in without["stack"][1]
    assert without["role"][0] == FAILURE
    assert without["store"][0] == FAILURE
    stacks.append(replace(STACK, store=f"s3://{s3.bucket}/nanogpt"))
    checks = examined()
    assert checks["stack"] == (OK, "sm-nanogpt is CREATE_COMPLETE")
    assert checks["role"] == (OK, ROLE)
    assert checks["store"] == (OK, f"s3://{s3.bucket}/nanogpt is writable")
    assert not storage.list_files(f"s3://{s3.bucket}/nanogpt/data")
    stacks[0] = replace(stacks[0], status="ROLLBACK_COMPLETE")
    result, message = examined()["stack"]
    assert result == WARNING
    assert "ROLLBACK_COMPLETE" in message
    assert "infra show" in message


def test_the_role_of_a_sagemaker_notebook_is_found(cloud, tmp_path, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    (tmp_path / "metadata.json").write_text(json.dumps({"ExecutionRoleArn": ROLE}))
    monkeypatch.setattr(
        "sm_nanogpt.launcher.sagemaker.stack.NOTEBOOK_METADATA", tmp_path / "metadata.json"
    )
    assert doctor.check_role(Context(Settings())) == ROLE


@pytest.mark.parametrize(
    ("store", "fact"),
    [("s3://none-of-that-name/x", "there is no such bucket"), ("/tmp/store", "set --store")],
)
def test_a_store_that_cannot_be_used_fails(examined, monkeypatch, store, fact):
    monkeypatch.setenv("SM_NANOGPT_STORE", store)
    result, message = examined()["store"]
    assert result == FAILURE, message
    assert fact in message, message


def test_a_terminated_trial_run_leaves_nothing(home, tmp_path):
    directory = tmp_path / "temporary"
    directory.mkdir()
    arguments = ("doctor", "--instance", "local")
    with launching.started(arguments, home=home, env={"TMPDIR": str(directory)}) as process:
        launching.until(lambda: launching.processes_below(directory))
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "interrupted\n"
    launching.until(lambda: not launching.processes_below(directory))  # the job ends before they do
    assert not list(directory.glob("sm-nanogpt-doctor-*"))


def test_a_quota_of_zero_fails_and_an_unknown_one_warns(examined, money):
    money.quotas["ml.g5.12xlarge"] = (0, 0, 0)
    result, message = examined()["quota"]
    assert result == FAILURE
    assert "request an increase" in message
    assert "launch --instance ml.m5.xlarge" in message
    money.refuse["ListServiceQuotas"] = ("AccessDeniedException", "no")
    result, message = examined()["quota"]
    assert result == WARNING
    assert "not allowed" in message
