"""The checks of doctor: each tells what is well, what may be wrong, and what to do."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import launching
import pytest
from botocore.stub import Stubber

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


@pytest.fixture
def account(cloud, stacks):
    """An account with a bucket and a role that SageMaker may act as."""
    return cloud


def on_a_day(day: date, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "date", SimpleNamespace(today=lambda: day))


@pytest.fixture
def examined(account, cli, monkeypatch):
    """What doctor finds, by check; without the training, which takes long."""
    on_a_day(date(2026, 11, 23), monkeypatch)

    def run(*words: str) -> dict[str, tuple[str, str]]:
        ran = cli("doctor", "--no-train", "--json", *words)
        found = json.loads(ran.out)
        assert (ran.code == 1) == any(f["result"] == FAILURE for f in found), ran.err
        return {f["check"]: (f["result"], f["text"]) for f in found}

    return run


@pytest.fixture
def patient(account, home):
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


def test_each_finding_is_one_line_and_a_failure_sets_exit_code(account, cli, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    ran = cli("doctor", "--no-train")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert len(lines) == len(HERE + AWS) - 1  # without the training, which nobody asked for
    assert all(line.split()[0] in (OK, WARNING, FAILURE) for line in lines)
    assert any(line.startswith("failure  role:           no execution role") for line in lines)
    assert "failed: role" in ran.error


def test_without_aws_only_the_machine_is_checked(home, cli):
    ran = cli("doctor", "--instance", "local", "--no-train")
    assert ran.code == 0, ran.err
    assert [line.split()[1] for line in ran.out.splitlines()] == ["python:", "packages:", "disk:"]
    nowhere = cli("doctor", "--no-train")
    assert nowhere.code == 1
    assert "no region" in nowhere.out
    assert "warning  not checked:    credentials, stack, role, store, " in nowhere.out
    assert nowhere.out.count("not checked") == 1
    assert "--instance local` checks only this machine" in nowhere.err


def test_a_full_disk_is_a_failure(home, cli, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**8))
    ran = cli("doctor", "--instance", "local")
    assert ran.code == 1
    assert f"failure  disk:           0.1 GB free for {home}: delete files" in ran.out


def test_a_missing_profile_is_a_finding(home, cli):
    ran = cli("--profile", "nope", "doctor", "--no-train")
    assert ran.code == 1
    assert "failure  profile:        The config profile (nope) could not be found" in ran.out


def test_an_invalid_instance_is_refused(home, cli):
    assert cli("doctor", "--instance", "g5.12xlarge").code == 2


def test_the_trial_run_leaves_the_home_empty(home):
    home.mkdir()
    assert "a tiny model trained here" in doctor.check_training(Patient(Settings(), "local"))
    assert not list(home.iterdir())


def test_the_trial_run_imports_nothing_from_the_users_directory(home, tmp_path):
    for name in ("torch.py", "launcher/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('shadowed')\n")
    assert Path.cwd() == tmp_path
    assert "a tiny model trained here" in doctor.check_training(Patient(Settings(), "local"))


def test_a_slow_trial_run_is_stopped_before_its_home_is_deleted(home, tmp_path, monkeypatch):
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


def test_a_failed_trial_run_says_why(home, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServiceError, match=r"could not be started: .*; `sm-nanogpt launch"):
        doctor.check_training(Patient(Settings(), "local"))


def test_a_package_that_is_too_old_or_missing_fails(monkeypatch):
    needed = ["boto3>=999", "no-such-package", "torch>=1", "pytest>=999; extra == 'test'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needed)
    with pytest.raises(InputError, match=r"boto3 \S+ is not >=999, no-such-package is not inst"):
        doctor.check_packages(Patient(Settings(), "local"))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution in front of those of this environment, without its files."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, version: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(described)

    return put


def test_version_3_of_the_sdk_is_welcome(install):
    install("sagemaker", "3.26.0")
    expected = r"sagemaker 3\.26\.0.*; requests are made without version 2"
    assert re.search(expected, doctor.check_packages(Patient(Settings(), "local")))


def test_missing_credentials_skip_the_checks_that_need_them(examined, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    found = examined()
    assert found["credentials"][0] == FAILURE
    assert "no AWS credentials" in found["credentials"][1]
    assert found["store"] == (WARNING, "not checked: it needs credentials and stack")
    assert found["image"][0] == OK


def test_the_stack_provides_an_unconfigured_store_and_role(examined, stacks, s3, monkeypatch):
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


def test_a_failed_stack_is_a_warning(patient, stacks):
    stacks.append(replace(STACK, status="ROLLBACK_COMPLETE"))
    with pytest.raises(Doubt, match=r"ROLLBACK_COMPLETE.*infra show"):
        doctor.check_stack(patient)


def test_the_role_of_a_sagemaker_notebook_is_found(examined, tmp_path, monkeypatch):
    role = os.environ["SM_NANOGPT_ROLE"]
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    (tmp_path / "metadata.json").write_text(json.dumps({"ExecutionRoleArn": role}))
    monkeypatch.setattr("launcher.sagemaker.backend.NOTEBOOK_METADATA", tmp_path / "metadata.json")
    assert examined()["role"] == (OK, role)


def test_a_missing_role_fails(patient):
    patient.settings = Settings(role=f"{ROLE}-2")
    with pytest.raises(ServiceError, match="NoSuchEntity"):
        doctor.check_role(patient)


def test_a_check_without_permission_is_skipped(patient):
    with Stubber(patient.client("iam")) as iam:
        iam.add_client_error("get_role", "AccessDenied", "no", 403)
        with pytest.raises(Doubt, match="not checked: not allowed"):
            doctor.check_role(patient)


def test_a_check_that_raises_does_not_stop_the_others(home, cli, monkeypatch):
    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError("oh no")

    monkeypatch.setattr("platform.python_version", breaks)
    ran = cli("doctor", "--instance", "local", "--no-train")
    assert ran.code == 1
    assert ran.out.splitlines()[0] == "failure  python:         ZeroDivisionError: oh no"
    assert len(ran.out.splitlines()) == len(HERE) - 1  # without the training


def test_an_unknown_instance_type_is_a_warning(examined):
    result, said = examined("--instance", "ml.g6f.xlarge")["instance"]
    assert result == WARNING
    assert "did you mean ml.g6" in said


def test_an_unpatched_default_image_warning_names_a_remedy(patient, monkeypatch):
    last = find_image(DEFAULT_VERSION).patched_until
    on_a_day(last, monkeypatch)
    assert doctor.check_image(patient).endswith(f", patched until {last}")
    on_a_day(last + timedelta(days=1), monkeypatch)
    with pytest.raises(Doubt, match=rf"on {last}; use --pytorch-version \S+, patched"):
        doctor.check_image(patient)


def test_an_instance_the_default_image_cannot_run_on_fails(patient):
    with pytest.raises(InputError, match=r"V100 of ml\.p3\.2xlarge; use --pytorch-version 2\.8\.0"):
        doctor.check_image(replace(patient, instance="ml.p3.2xlarge"))
    assert "patched until" in doctor.check_image(replace(patient, instance="ml.p5.48xlarge"))


@pytest.mark.parametrize(
    ("store", "said"),
    [("s3://there-is-no-such-bucket/x", "NoSuchBucket|no such bucket"), ("/tmp/store", "cannot")],
)
def test_a_store_that_cannot_be_written_fails(patient, store, said):
    patient.settings = Settings(store=store)
    with pytest.raises((InputError, ServiceError), match=said):
        doctor.check_store(patient)


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


def test_no_text_yet_is_a_warning(examined):
    result, said = examined()["data"]
    assert result == WARNING
    assert "upload-data" in said


def test_doctor_names_the_text_that_a_launch_would_take(patient, cli, text_file, monkeypatch):
    patient.store = patient.settings.store
    assert cli("upload-data", str(text_file)).out.startswith(patient.store)
    monkeypatch.delenv("SM_NANOGPT_STORE")
    near = cli("upload-data", str(text_file)).out.strip()
    assert doctor.check_data(patient) == near


def test_a_quota_of_zero_fails(examined, money):
    money.quotas["ml.g5.12xlarge"] = (0, 0, 0)
    result, said = examined()["quota"]
    assert result == FAILURE
    assert "request an increase" in said
    assert "launch --instance ml.m5.xlarge" in said


def test_a_quota_that_cannot_be_read_is_a_warning(examined, money):
    money.refuse["ListServiceQuotas"] = ("AccessDeniedException", "no")
    assert examined()["quota"][0] == WARNING
