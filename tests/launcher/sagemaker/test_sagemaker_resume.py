"""Resuming jobs on SageMaker, what launches leave in the store, and models fetched from there."""

from __future__ import annotations

import json
import shutil
from typing import Any
from unittest.mock import Mock

import launching
import pytest
from access import Refusal
from sagemaker_jobs import CHECKPOINT, LAUNCH, part

from sm_nanogpt import InputError, Request, launch
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.machines import find_image
from sm_nanogpt.launcher.sagemaker.request import source_archive
from sm_nanogpt.launcher.source import Source

TWO = "--instance ml.g5.12xlarge,ml.g6.12xlarge"
OLD_IMAGE = f"763104351884.dkr.ecr.us-east-1.amazonaws.com/{find_image('2.8').name(gpu=True)}"


@pytest.fixture
def stopped(s3, cli, launch):
    """Launches a job and stops it; it has a checkpoint."""

    def start(*arguments: str) -> str:
        job_id = str(launch(arguments))
        s3.put_object(Bucket=s3.bucket, Key=CHECKPOINT.format(job_id), Body=b"x")
        assert cli("stop", job_id).code == 0
        return job_id

    return start


@pytest.fixture
def resume(cli):
    """The request that a dry run of a resumed job shows."""

    def shown(job_id: str, *arguments: str) -> Any:
        return json.loads(cli("launch", "--resume", job_id, "--dry-run", arguments).good.out)

    return shown


def test_a_resumed_job_starts_from_the_earlier_jobs_checkpoint(cloud, s3, cli, stopped):
    earlier = stopped()
    other = ("--store", f"s3://{s3.bucket}/other")  # than that of the earlier job
    for store, prefix in (((), "some/prefix"), (other, "other")):
        ran = cli(store, LAUNCH, "--resume", earlier, "--set", "max_steps=6000").good
        resumed = ran.out.strip()
        key = CHECKPOINT.format(resumed).replace("some/prefix", prefix)
        assert s3.get_object(Bucket=s3.bucket, Key=key)["Body"].read() == b"x"
        before, after = (cloud.sagemaker.jobs[name].request for name in (earlier, resumed))
        assert after["InputDataConfig"] == before["InputDataConfig"]
        assert after["HyperParameters"]["max_steps"] == "6000"
        assert after["HyperParameters"]["n_embd"] == before["HyperParameters"]["n_embd"]
    assert cli("launch", "--resume", resumed).failed(1, f"`sm-nanogpt stop {resumed}`")


IMAGE = "AlgorithmSpecification.TrainingImage"


def test_a_resumed_job_keeps_the_options_that_still_fit(stopped, resume):
    earlier = stopped("--network-isolation", "--keep-alive", "600", "--image-uri", "mine:1")
    request = resume(earlier, "--no-network-isolation", "--pytorch-version", "2.8.0")
    assert part(request, "EnableNetworkIsolation") is None
    assert part(request, "ResourceConfig.KeepAlivePeriodInSeconds") == 600
    assert part(request, IMAGE) == OLD_IMAGE


def test_a_resumed_job_gets_later_changes_of_the_config_file(home, stopped, resume):
    earlier = stopped("--tag", "team=b")
    (home / "config.toml").write_text("""\
subnets = ["subnet-1"]
security_group_ids = ["sg-1"]
tags = {team = "a", cost = "7"}
""")
    request = resume(earlier)
    assert request["VpcConfig"]["Subnets"] == ["subnet-1"]
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    assert tags["team"] == "b"
    assert tags["cost"] == "7"


def test_resuming_refuses_options_that_the_job_cannot_have(cli, stopped, job):
    refused = cli("launch", "--resume", stopped(*TWO.split()), "--spot")
    assert refused.failed(2, "--spot: takes one type")
    with pytest.raises(InputError, match="spot: is for SageMaker"):
        launch(Request(resume=job.job_id, hyperparameters={"max_steps": 12}, spot=True))
    assert len(list((job.home / "jobs").iterdir())) == 1


def test_a_job_of_a_cpu_is_not_resumed_silently_on_gpus(s3, cli, stopped):
    job_id = stopped("--instance", "ml.m5.xlarge", "--preset", "quick")
    assert cli(LAUNCH, "--resume", job_id).failed(2, "`--set device=auto`")
    for device in ("auto", "cpu"):
        ran = cli(LAUNCH, "--resume", job_id, "--set", f"device={device}").good
    again = ran.out.strip()  # on a GPU instance, where the CPU was asked for
    s3.put_object(Bucket=s3.bucket, Key=CHECKPOINT.format(again), Body=b"x")
    assert cli("stop", again).code == 0
    assert cli("launch", "--resume", again).code == 0


def test_resuming_a_completed_job_requires_more_steps(cloud, s3, cli, launch):
    """It would be billed for its start and its upload, and make the same model."""
    job_id = launch("--set", "max_steps=10")
    s3.put_object(Bucket=s3.bucket, Key=CHECKPOINT.format(job_id), Body=b"x")
    assert cli("wait", job_id).code == 0
    assert cli("launch", "--resume", job_id).failed(2, "--set max_steps=N")
    assert list(cloud.sagemaker.jobs) == [job_id]


def test_a_damaged_record_in_the_store_is_named(s3, cli, stopped):
    earlier = stopped()
    key = f"some/prefix/jobs/{earlier}/job.json"
    for content in (b"{", b'{"instance": "ml.g5.12xlarge", "more": 1}'):
        s3.put_object(Bucket=s3.bucket, Key=key, Body=content)
        ran = cli("launch", "--resume", earlier)
        assert ran.code == 1
        assert ran.error.startswith(f"s3://{s3.bucket}/{key} is damaged")


def test_a_resumed_job_runs_the_script_of_its_launch_by_default(s3, home, cli, stopped, tmp_path):
    def archive(job_id: str) -> dict[str, str]:
        return dict(Bucket=s3.bucket, Key=f"some/prefix/jobs/{job_id}/source/sourcedir.tar.gz")

    mine = launching.edited(tmp_path / "mine", ("of initial weights", "of mine"))
    first = stopped("--entry-point", str(mine))
    shutil.rmtree(mine)
    ran = cli("launch", "--resume", first).good
    archives = [s3.get_object(**archive(name))["Body"].read() for name in (first, ran.out.strip())]
    assert archives[0] == archives[1]
    shutil.rmtree(home / "sources")  # as on another machine
    assert cli("launch", "--resume", first).failed(2, "--entry-point DIR")
    other = launching.edited(tmp_path / "other", ("of initial weights", "of another"))
    s3.delete_object(**archive(first))
    assert cli("launch", "--resume", first, "--entry-point", other).code == 0


def test_code_from_the_store_does_not_run_on_this_machine(s3, cli, stopped, tmp_path):
    mine = launching.edited(tmp_path / "mine")
    first = stopped("--entry-point", str(mine))
    evil = f"open({str(tmp_path / 'executed')!r}, 'w')\n".encode()
    key = f"some/prefix/jobs/{first}/source/sourcedir.tar.gz"
    archive = source_archive(Source(tmp_path, {"train.py": evil}), "torchrun")
    s3.put_object(Bucket=s3.bucket, Key=key, Body=archive)
    (tmp_path / "fetched.py").write_bytes(evil)  # a path from the store is not taken either
    fields = {"data": "s3://bucket/text", "entry_point": str(tmp_path / "fetched.py")}
    record = json.dumps({"instance": "ml.g5.12xlarge", **fields})
    s3.put_object(Bucket=s3.bucket, Key=f"some/prefix/jobs/{first}/job.json", Body=record.encode())
    assert cli("launch", "--resume", first).code == 2
    assert cli("launch", "--resume", first, "--dry-run").code == 2
    assert not (tmp_path / "executed").exists()


def test_machines_and_ceilings_are_not_read_from_the_store(s3, cli, stopped, resume, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "10")
    earlier = stopped("--image-uri", "mine:1", "--environment", "A=1")
    record = f"s3://{s3.bucket}/some/prefix/jobs/{earlier}/job.json"
    content = json.loads(storage.read_bytes(record) or b"")
    assert content["image_uri"] == "mine:1"
    evil: dict[str, Any] = {"image_uri": "evil:1", "environment": {"LD_PRELOAD": "evil"}}
    evil |= {"instance": "ml.p5.48xlarge", "instance_count": 8}
    storage.write_json(record, {**content, **evil, "max_cost": 1e6, "max_run": 7200})
    parts: dict[str, Any] = {IMAGE: "mine:1", "Environment": {"A": "1"}}
    parts |= {"ResourceConfig.InstanceType": "ml.g5.12xlarge", "ResourceConfig.InstanceCount": 1}
    request = resume(earlier)
    assert {path: part(request, path) for path in parts} == parts
    ran = cli("launch", "--resume", earlier)
    assert ran.code == 2
    assert ran.error.partition(",")[0] == "this may cost 15.56 USD"


@pytest.mark.parametrize("code", ["ValidationException", "ResourceInUse"])
def test_a_refused_launch_names_no_job_and_leaves_no_files(cloud, s3, cli, stopped, code):
    earlier = stopped()
    files_before = storage.list_files(f"s3://{s3.bucket}")
    cloud.refuse["CreateTrainingJob"] = (code, "no such luck")
    ran = cli("launch", "--resume", earlier)
    assert ran.code == 1
    assert ran.out == ""
    assert ran.error.endswith(f"no such luck ({code})")
    files_left = storage.list_files(f"s3://{s3.bucket}").keys() - files_before.keys()
    assert bool(files_left) == (code == "ResourceInUse")  # they belong to the job of that name
    assert cli("stop", "latest").error.startswith(f"job {earlier} has already ended")


def test_a_launch_refused_after_a_retry_leaves_no_files(
    cloud, s3, cli, short_text_file, monkeypatch
):
    answers = [Refusal("ThrottlingException", "no"), Refusal("ResourceLimitExceeded", "no quota")]
    create = Mock(side_effect=answers)
    monkeypatch.setattr(cloud.sagemaker, "CreateTrainingJob", create)
    ran = cli(LAUNCH, "--data", short_text_file)
    assert ran.out == ""
    assert create.call_count == 2
    assert ran.failed(1, "no quota")
    files_left = storage.list_files(f"s3://{s3.bucket}/some/prefix")
    assert not [name for name in files_left if not name.startswith("data/")]


def test_a_resumed_job_without_checkpoints_leaves_no_files(s3, cli, stopped, monkeypatch):
    earlier = stopped()
    files_before = storage.list_files(f"s3://{s3.bucket}")
    monkeypatch.setattr(storage, "copy", lambda *_: 0)
    assert cli("launch", "--resume", earlier).failed(1, f"job {earlier} has no checkpoints")
    assert storage.list_files(f"s3://{s3.bucket}") == files_before


def test_a_model_is_fetched_at_the_end_and_again_if_changed(cloud, s3, cli, launch, finished):
    job_id = launch()
    archive = finished.directory / "output" / "model.tar.gz"
    key = f"some/prefix/jobs/{job_id}/output/model.tar.gz"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=archive.read_bytes())
    assert cli("fetch-and-sample", job_id).failed(1, "still InProgress")
    assert cli("wait", job_id).code == 0
    cloud.calls.clear()
    assert cli("fetch-and-sample", job_id, "--max-new-tokens", "20").good
    assert [operation for operation, _ in cloud.calls] == ["DescribeTrainingJob"]
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"another")
    assert cli("fetch-and-sample", job_id).failed(1, "damaged")


def test_a_fetched_model_is_used_without_aws(cloud, s3, cli, launch, finished, monkeypatch):
    job_id = launch()
    archive = finished.directory / "output" / "model.tar.gz"
    key = f"some/prefix/jobs/{job_id}/output/model.tar.gz"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=archive.read_bytes())
    assert cli("wait", job_id).code == 0
    assert cli("fetch-and-sample", job_id, "--max-new-tokens", "1").good

    def note() -> str:
        ran = cli("fetch-and-sample", job_id, "--max-new-tokens", "5").good
        (line,) = [line for line in ran.err.splitlines() if "copy of its model" in line]
        return line

    troubles = {
        "AWS_ENDPOINT_URL": ("http://127.0.0.1:9", "Could not connect to the endpoint URL"),
        "AWS_ACCESS_KEY_ID": ("", "Unable to locate credentials"),
        "AWS_DEFAULT_REGION": ("", "no region"),
        "AWS_PROFILE": ("nobody", "nobody"),
    }
    for name, (value, message) in troubles.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert message in note()
    expired = Mock(side_effect=Refusal("ExpiredTokenException", "is expired"))
    monkeypatch.setattr(cloud.sagemaker, "DescribeTrainingJob", expired)
    assert "is expired" in note()
    assert cli("status", job_id).failed(1, "expired")
