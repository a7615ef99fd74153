"""The checks of doctor: each tells what is well, what may be wrong, and what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import boto3
import launching
import pytest

from launcher import InputError, JobDescription, ServiceError, Settings, doctor, wait
from launcher.doctor import AWS, FAILURE, HERE, OK, WARNING, Doubt, Patient
from launcher.machines import DEFAULT_VERSION, find_image
from launcher.sagemaker.stack import Stack

ROLE = "arn:aws:iam::123456789012:role/training"
STACK = Stack("sm-nanogpt", "CREATE_COMPLETE", "", ROLE, None, "")


@pytest.fixture
def stacks(monkeypatch):
    """The stack that is found, if there is one in here."""
    found: list[Stack] = []
    monkeypatch.setattr(doctor, "find_stack", lambda settings, session: next(iter(found), None))
    return found


def on_a_day(day: date, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "date", SimpleNamespace(today=lambda: day))


@pytest.fixture
def examined(cloud, stacks, cli, monkeypatch):
    """What doctor finds, by check; without the training, which takes long."""
    on_a_day(date(2026, 11, 23), monkeypatch)

    def run(*words: str) -> dict[str, tuple[str, str]]:
        ran = cli("doctor", "--no-train", "--json", *words)
        found = json.loads(ran.out)
        assert (ran.code == 1) == any(f["result"] == FAILURE for f in found), ran.err
        return {f["check"]: (f["result"], f["text"]) for f in found}

    return run


@pytest.fixture
def patient(cloud, stacks, home):
    """Somebody whose session and region are known already."""
    home.mkdir()
    session = boto3.Session(region_name="us-east-1")
    return Patient(Settings(), "ml.g5.12xlarge", session=session, region="us-east-1")


def test_doctor_reports_a_healthy_machine_as_healthy(examined, cli, s3, text_file):
    assert cli("upload-data", str(text_file)).code == 0
    before = s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"]
    found = examined()
    assert set(found) == {check.name for check in HERE + AWS}
    doubtful = {name for name, (result, _) in found.items() if result != OK}
    assert doubtful <= {"local training"}, found  # which was left out
    assert found["credentials"][1] == "arn:aws:sts::123456789012:user/moto"
    assert found["role"][1] == ROLE
    assert found["quota"][1] == "'ml.g5.12xlarge for training job usage' is 4"
    assert "7.09 USD an hour" in found["price"][1]
    assert s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"] == before


def test_each_finding_is_a_line_and_failures_exit_1(cloud, stacks, cli, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    ran = cli("doctor", "--no-train")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert len(lines) == len(HERE + AWS) - 1  # without the training, which nobody asked for
    assert all(line.split()[0] in (OK, WARNING, FAILURE) for line in lines)
    assert any(line.startswith("failure  role:           no execution role") for line in lines)
    assert "failed: role" in ran.error


def test_without_aws_only_the_machine_is_checked(home, cli):
    ran = cli("doctor", "--instance", "local", "--no-train").good
    assert [line.split()[1] for line in ran.out.splitlines()] == ["python:", "packages:", "disk:"]
    nowhere = cli("doctor", "--no-train")
    assert (nowhere.code, "no region" in nowhere.out) == (1, True)
    assert "warning  not checked:    credentials, stack, role, store, " in nowhere.out
    assert nowhere.out.count("not checked") == 1
    assert "--instance local` checks only this machine" in nowhere.err


FULL = Mock(return_value=SimpleNamespace(free=10**8))
BROKEN = Mock(side_effect=ZeroDivisionError("oh no"))


@pytest.mark.parametrize(
    ("patched", "by", "line"),
    [
        ("shutil.disk_usage", FULL, "failure  disk:           0.1 GB free for {home}"),
        ("platform.python_version", BROKEN, "failure  python:         ZeroDivisionError: oh no"),
    ],
)
def test_a_check_that_fails_or_raises_stops_no_other(home, cli, monkeypatch, patched, by, line):
    monkeypatch.setattr(patched, by)
    ran = cli("doctor", "--instance", "local", "--no-train")
    assert ran.code == 1
    assert len(ran.out.splitlines()) == len(HERE) - 1  # without the training
    assert [each for each in ran.out.splitlines() if each.startswith(line.format(home=home))]


def test_a_missing_profile_is_a_finding(home, cli):
    ran = cli("--profile", "nope", "doctor", "--no-train")
    assert ran.code == 1
    assert re.search(r"^failure  profile: .*\(nope\)", ran.out, re.MULTILINE)


def test_an_invalid_instance_is_refused(home, cli):
    assert cli("doctor", "--instance", "g5.12xlarge").failed(2, "ml.g5.12xlarge")


@pytest.fixture
def cold(monkeypatch):
    """Lets jobs start by the interpreter itself, and not as forks of a process that has torch."""
    monkeypatch.setattr("launcher.local.backend.subprocess", subprocess)


def test_the_trial_run_uses_no_file_of_the_user(home, cold, tmp_path):
    """It leaves the home empty, and imports nothing from the working directory."""
    home.mkdir()
    for name in ("torch.py", "launcher/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('shadowed')\n")
    assert Path.cwd() == tmp_path
    assert "a tiny model trained here" in doctor.check_training(Patient(Settings(), "local"))
    assert not list(home.iterdir())


def test_a_slow_trial_run_is_stopped_first(home, tmp_path, monkeypatch):
    waited_for: list[str] = []

    def noted(job_id: str, settings: Settings, **limit: Any) -> JobDescription:
        description = wait(job_id, settings, **limit)
        waited_for.append(description.status)
        return description

    monkeypatch.setattr(doctor, "wait", noted)
    monkeypatch.setattr(doctor, "TRAINING_SECONDS", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServiceError, match=r"did not train within 0\.1 s"):
        doctor.check_training(Patient(Settings(), "local"))
    assert waited_for == ["Stopped"]
    assert not list(tmp_path.glob("sm-nanogpt-doctor-*"))


def test_a_failed_trial_run_says_why(home, cold, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServiceError, match=r"could not be started: .*`sm-nanogpt launch"):
        doctor.check_training(Patient(Settings(), "local"))


def test_a_package_that_is_too_old_or_missing_fails(monkeypatch):
    needed = ["boto3>=999", "no-such-package", "torch>=1", "pytest>=999; extra == 'test'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needed)
    with pytest.raises(InputError, match=r"boto3 \S+ is not >=999, no-such-package is not inst"):
        doctor.check_packages(Patient(Settings(), "local"))


def test_version_3_of_the_sdk_is_welcome(tmp_path, monkeypatch):
    information = tmp_path / "sagemaker-3.26.0.dist-info"
    information.mkdir()
    described = "Metadata-Version: 2.1\nName: sagemaker\nVersion: 3.26.0\n"
    (information / "METADATA").write_text(described)
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.check_packages(Patient(Settings(), "local"))
    assert re.search(r"sagemaker 3\.26\.0.*; requests are made without version 2", found)


def test_missing_credentials_skip_dependent_checks(examined, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    found = examined()
    assert found["credentials"][0] == FAILURE
    assert "no AWS credentials" in found["credentials"][1]
    assert found["store"] == (WARNING, "not checked: it needs credentials and stack")
    assert found["image"][0] == OK


def test_the_stack_provides_store_and_role(examined, stacks, s3, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_STORE")
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    without = examined()
    assert "infra deploy" in without["stack"][1]
    assert (without["role"][0], without["store"][0]) == (FAILURE, FAILURE)
    stacks.append(replace(STACK, store=f"s3://{s3.bucket}/nanogpt"))
    found = examined()
    assert found["stack"] == (OK, "sm-nanogpt is CREATE_COMPLETE")
    assert found["role"] == (OK, ROLE)
    assert found["store"] == (OK, f"s3://{s3.bucket}/nanogpt is writable")
    stacks[0] = replace(stacks[0], status="ROLLBACK_COMPLETE")
    result, said = examined()["stack"]
    assert (result, "ROLLBACK_COMPLETE" in said, "infra show" in said) == (WARNING, True, True)


def test_the_role_of_a_sagemaker_notebook_is_found(patient, tmp_path, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    (tmp_path / "metadata.json").write_text(json.dumps({"ExecutionRoleArn": ROLE}))
    monkeypatch.setattr("launcher.sagemaker.stack.NOTEBOOK_METADATA", tmp_path / "metadata.json")
    assert doctor.check_role(replace(patient, settings=Settings())) == ROLE


@pytest.mark.parametrize(
    ("check", "setting", "instance", "error", "fact"),
    [
        (doctor.check_role, {"role": f"{ROLE}-2"}, "", ServiceError, "NoSuchEntity"),
        (doctor.check_store, {"store": "s3://none-of-that-name/x"}, "", ServiceError, "no such"),
        (doctor.check_store, {"store": "/tmp/store"}, "", InputError, "set --store"),
        (doctor.check_data, {}, "", Doubt, "upload-data"),
        (doctor.check_instance_type, {}, "ml.g6f.xlarge", Doubt, "did you mean ml.g6"),
        (doctor.check_image, {}, "ml.p3.2xlarge", InputError, "V100 .* --pytorch-version 2.8.0"),
    ],
)
def test_what_cannot_be_used_is_found(patient, check, setting, instance, error, fact):
    settings = Settings(**setting)
    changed = replace(patient, settings=settings, instance=instance or patient.instance)
    with pytest.raises(error, match=fact):
        check(changed)


def test_a_check_without_permission_is_skipped(cloud, patient):
    cloud.refuse["GetRole"] = ("AccessDenied", "no")
    with pytest.raises(Doubt, match="not checked: not allowed"):
        doctor.check_role(patient)


def test_an_unpatched_default_image_names_a_remedy(patient, monkeypatch):
    last = find_image(DEFAULT_VERSION).patched_until
    on_a_day(last, monkeypatch)
    for instance in ("ml.g5.12xlarge", "ml.p5.48xlarge"):
        found = doctor.check_image(replace(patient, instance=instance))
        assert found.endswith(f", patched until {last}")
    on_a_day(last + timedelta(days=1), monkeypatch)
    with pytest.raises(Doubt, match=rf"on {last}; --pytorch-version \S+ is patched until"):
        doctor.check_image(patient)


def test_a_terminated_trial_run_leaves_nothing(home, tmp_path):
    place = tmp_path / "temporary"
    place.mkdir()
    words = ("doctor", "--instance", "local")
    with launching.started(*words, home=home, env={"TMPDIR": str(place)}) as process:
        launching.until(lambda: launching.processes_below(place))
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "interrupted\n")
    assert not launching.processes_below(place)
    assert not list(place.glob("sm-nanogpt-doctor-*"))


def test_doctor_names_the_text_that_a_launch_would_take(patient, cli, text_file, monkeypatch):
    patient.store = patient.settings.store
    assert cli("upload-data", str(text_file)).out.startswith(patient.store)
    monkeypatch.delenv("SM_NANOGPT_STORE")
    near = cli("upload-data", str(text_file)).out.strip()
    assert doctor.check_data(patient) == near


def test_a_quota_of_zero_fails_and_an_unknown_one_warns(patient, money):
    money.quotas["ml.g5.12xlarge"] = (0, 0, 0)
    with pytest.raises(InputError, match=r"request an increase.*launch --instance ml.m5.xlarge"):
        doctor.check_quota(patient)
    money.refuse["ListServiceQuotas"] = ("AccessDeniedException", "no")
    with pytest.raises(Doubt, match="not allowed"):
        doctor.check_quota(patient)
