"""The life of a job on SageMaker, against a service on loopback: launch, states, lists and logs."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from typing import Any
from unittest.mock import Mock

import pytest
from access import ACCOUNT
from launching import until
from sagemaker_jobs import LAUNCH

from sm_nanogpt import jobs
from sm_nanogpt.launcher.files.storage import local_path
from sm_nanogpt.launcher.sagemaker.account import Account
from sm_nanogpt.launcher.sagemaker.backend import SageMakerBackend
from sm_nanogpt.launcher.sagemaker.description import is_our_job
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text.channels import find_channel

ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"


def test_a_launch_names_the_job_and_stores_its_source(cloud, s3, submit):
    ran = submit()
    (job_id,) = cloud.sagemaker.jobs
    assert ran.out == f"{job_id}\n"
    assert f"#/jobs/{job_id}" in ran.err
    assert f"sm-nanogpt fetch-and-sample {job_id}" in ran.err
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=s3.bucket)["Contents"]]
    assert all(key.startswith("some/prefix/") for key in keys)
    key = f"some/prefix/jobs/{job_id}/source/sourcedir.tar.gz"
    archive = s3.get_object(Bucket=s3.bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {n: file.read() for n in tar.getnames() if (file := tar.extractfile(n))}
    assert {n for n in files if "/" in n} == {"mpi4py/__init__.py", "mpi4py/__main__.py"}
    assert {n: files[n] for n in files if "/" not in n} == Source.packaged().files


def test_the_suggested_launch_has_a_ceiling_and_works(cloud, cli, short_text_file):
    line = cli("upload-data", short_text_file).err.splitlines()[-1]
    arguments = line.removeprefix("next: sm-nanogpt ").split()
    assert "--max-cost" in arguments
    assert cli(arguments).good.out.strip() in cloud.sagemaker.jobs


def test_a_launch_without_an_instance_spends_nothing(cloud, cli, short_text_file):
    assert cli("launch", "--data", short_text_file).failed(2, "--instance: ", "ml.g5.12xlarge")
    assert cli("launch", "--sweep", "n_layer=1,2").failed(2, "--instance: ", "ml.g5.12xlarge")
    assert not cloud.sagemaker.jobs


def test_suggested_commands_repeat_the_region(cloud, cli, short_text_file, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    ran = cli("--region", "us-east-1", "upload-data", short_text_file)
    assert "next: sm-nanogpt --region us-east-1 launch" in ran.err
    error = cli("--region", "us-east-1", "status", "nope").error
    assert "`sm-nanogpt --region us-east-1 " in error
    assert not re.search("`sm-nanogpt (?!--region us-east-1 )", error)


def test_a_launch_in_a_notebook_takes_its_role(cloud, submit, tmp_path, monkeypatch):
    file = tmp_path / "resource-metadata.json"
    file.write_text('{"ResourceName": "mine"}')
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.stack.NOTEBOOK_METADATA", file)
    described = {"NotebookInstanceName": "mine", "RoleArn": ROLE}
    cloud.sagemaker.DescribeNotebookInstance = lambda body: described
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    ran = submit()
    assert f"role: {ROLE} (" in ran.err
    assert cloud.sagemaker.jobs[ran.out.strip()].request["RoleArn"] == ROLE


def test_the_default_bucket_is_the_store(s3, submit, cli, short_text_file, monkeypatch, request):
    monkeypatch.delenv("SM_NANOGPT_STORE")
    bucket = f"sagemaker-us-east-1-{ACCOUNT}"
    assert cli(LAUNCH, "--data", short_text_file).failed(2, "no default bucket")
    assert bucket not in [b["Name"] for b in s3.list_buckets()["Buckets"]]
    s3.create_bucket(Bucket=bucket)
    request.addfinalizer(lambda: removed(s3, bucket))  # the buckets are those of all tests
    assert f"store: s3://{bucket}/sm-nanogpt (" in submit().err


def removed(s3: Any, bucket: str) -> None:
    for file in s3.list_objects_v2(Bucket=bucket).get("Contents", []):
        s3.delete_object(Bucket=bucket, Key=file["Key"])
    s3.delete_bucket(Bucket=bucket)


def test_the_default_bucket_must_belong_to_this_account(cloud):
    """Anybody may make a bucket of that name, and would then have the text and the script."""
    account, owners = Account(load_settings()), []

    def note(params: dict[str, Any], **_: Any) -> None:
        owners.append(params["headers"].get("x-amz-expected-bucket-owner"))

    account.client("s3").meta.events.register("before-call.s3.HeadBucket", note)
    account.default_bucket()
    assert owners == [ACCOUNT]


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [((), ("--tokenizer", "bpe", "--vocab-size", "300")), (("--dry-run",), ())],
)
def test_a_launch_sends_a_newer_local_upload_to_s3(
    cloud, s3, cli, short_text_file, tmp_path, monkeypatch, arguments, tokens
):
    store = f"s3://{s3.bucket}/some/prefix"
    assert cli("upload-data", short_text_file).out.startswith(store)
    newer = tmp_path / "newer.txt"
    newer.write_text("Some other text.\n" * 1000)
    monkeypatch.delenv("SM_NANOGPT_STORE")
    local = local_path(cli("upload-data", newer, tokens).out.strip())
    assert local is not None
    ran = cli("--store", store, LAUNCH, arguments).good
    uri = f"{store}/data/{local.name}"
    assert f"data: {uri} (the last upload, {local.as_uri()})" in ran.err
    request = json.loads(ran.out) if arguments else cloud.sagemaker.jobs[ran.out.strip()].request
    assert request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == f"{uri}/"
    listing = s3.list_objects_v2(Bucket=s3.bucket, Prefix=f"some/prefix/data/{local.name}/")
    names = {each["Key"].rsplit("/", 1)[-1] for each in listing.get("Contents", [])}
    assert names == (set() if arguments else {path.name for path in local.iterdir()})


def test_a_text_is_sent_without_objects_of_similar_names(cloud, s3, cli, short_text_file):
    text, uri = short_text_file.read_bytes(), f"s3://{s3.bucket}/corpus"
    s3.put_object(Bucket=s3.bucket, Key="corpus.txt", Body=text)
    s3.put_object(Bucket=s3.bucket, Key="other.txt", Body=text)
    arguments = (*LAUNCH, "--data", f"{uri}.txt", "--validation", f"s3://{s3.bucket}/other.txt")
    assert cli(arguments).good
    s3.put_object(Bucket=s3.bucket, Key="corpus/input.txt", Body=text)
    for key in ("other.txt/old.txt", "corpus.txt.bak"):
        s3.put_object(Bucket=s3.bucket, Key=key, Body=text)
        assert cli(arguments).failed(2, f"s3://{s3.bucket}/{key}")
    assert cli(LAUNCH, "--data", f"{uri}/").good
    assert len(cloud.sagemaker.jobs) == 2
    on_this_machine = load_settings().model_copy(update={"store": ""})
    assert find_channel(f"{uri}.txt", on_this_machine).uri == f"{uri}.txt"


def test_a_deleted_local_upload_is_not_replaced(cloud, s3, home, cli, short_text_file, monkeypatch):
    cli("upload-data", short_text_file)  # the older one, on S3
    monkeypatch.delenv("SM_NANOGPT_STORE")
    cli("upload-data", short_text_file)
    shutil.rmtree(home / "store")
    assert cli("--store", f"s3://{s3.bucket}/some/prefix", LAUNCH).failed(2, "--data")
    assert not cloud.sagemaker.jobs


def test_a_launch_takes_no_upload_of_others(cloud, cli, short_text_file, tmp_path, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SM_NANOGPT_HOME", str(tmp_path / "elsewhere"))
        cli("upload-data", short_text_file)
    for arguments in (LAUNCH, (*LAUNCH, "--dry-run")):
        assert cli(arguments).failed(2, "nothing was uploaded to", "from here", "--data")
    ours = cli("upload-data", short_text_file).out.strip()
    assert f"data: {ours} (" in cli(LAUNCH, "--dry-run").err  # without asking S3


def test_status_tells_the_states_times_and_numbers(cli, launch, monkeypatch):
    # It trains until it was looked at often.
    monkeypatch.setattr("sagemaker_service.LOOKS", 20)
    job_id = launch("--spot")
    assert "state:       InProgress (" in cli("status", job_id).out
    empty = cli("logs", job_id)
    assert empty.code == 0
    assert empty.out == ""
    assert re.fullmatch(r"[^\n]* InProgress \(\w+\); --raw [^\n]*\n", empty.err)
    assert cli("wait", job_id).code == 0
    output = cli("status", job_id).out
    for fact in ("state:       Completed", "30 s, 70% saved by spot", "1.5000", "1000/1000"):
        assert fact in output
    assert json.loads(cli("status", job_id, "--json").out)["billable_seconds"] == 30


def test_stop_waits_and_names_the_checkpoint(cloud, s3, cli, launch):
    job_id = launch()
    key = f"some/prefix/checkpoints/{job_id}/checkpoint-00000010.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
    cloud.refuse["StopTrainingJob"] = ("ThrottlingException", "Rate exceeded")
    assert cli("stop", job_id).error.startswith("StopTrainingJob: Rate exceeded")
    del cloud.refuse["StopTrainingJob"]
    ran = cli("stop", job_id).good
    assert f"--resume {job_id}" in ran.err
    assert "checkpoint of step 10" in ran.err
    assert cli("stop", job_id).failed(1, "already ended: Stopped")


def test_a_job_that_ends_before_it_is_stopped_is_no_error(cloud, launch):
    job_id = launch()
    cloud.sagemaker.jobs[job_id].stop()
    until(lambda: cloud.sagemaker.jobs[job_id].status == "Stopped")
    SageMakerBackend(load_settings()).stop(job_id)


def test_jobs_lists_all_our_jobs_on_sagemaker_and_here(cloud, cli, job, launch):
    ids = [launch(), *(f"sm-nanogpt-20991231-00000{n}-abcdef" for n in range(3))]
    service = cloud.sagemaker
    request = json.dumps(service.jobs[ids[0]].request)
    for job_id in ids[1:]:
        service.CreateTrainingJob(json.loads(request.replace(ids[0], job_id)))
    service.jobs[ids[0]].created = 1e9  # the list is in the order of the ids
    service.CreateTrainingJob({**json.loads(request), "TrainingJobName": "another", "Tags": []})
    listed = [job["job_id"] for job in json.loads(cli("jobs", "--json").out)]
    assert listed == [*reversed(ids), job.job_id]
    assert all(job_id in cli("jobs").out for job_id in listed)


def test_without_aws_local_jobs_are_listed(cloud, cli, job, monkeypatch):
    cloud.refuse["Search"] = ("ExpiredTokenException", "no")
    ran = cli("jobs")
    assert ran.failed(1, "Search: ", "the AWS credentials have expired")
    assert job.job_id in ran.out
    with pytest.warns(UserWarning, match="Search: .*ExpiredTokenException"):
        assert [str(each) for each in jobs()] == [job.job_id]
    monkeypatch.setenv("AWS_PROFILE", "nope")
    ran = cli("jobs")
    assert job.job_id in ran.out
    assert "nope" in ran.err
    assert cli("status", job.job_id).code == 0


def test_latest_is_the_job_launched_last_though_search_lags(cloud, cli, launch, short_text_file):
    first = launch()
    cloud.sagemaker.jobs[first].created -= 1000
    cloud.sagemaker.search_lag = 500
    last = launch()
    cloud.refuse["CreateTrainingJob"] = ("ResourceLimitExceeded", "no quota")
    again = ("launch", "--instance", "ml.g5.12xlarge", "--data", str(short_text_file))
    assert cli(again).failed(1, "no quota")  # it does not replace the job before it
    assert [str(each) for each in jobs()] == [last, first]
    assert cli("stop", "latest").code == 0
    assert cloud.sagemaker.jobs[last].ended
    assert cli("delete", "latest", "--yes").code == 0
    assert json.loads(cli("status", "latest", "--json").out)["job_id"] == first


@pytest.mark.parametrize(
    ("output", "checkpoints", "is_ours"),
    [
        ("s3://bucket/jobs", "s3://bucket/checkpoints/id/", True),
        ("file:///home/me/jobs", "file:///home/me/checkpoints/id", False),
        ("s3://bucket/other", "s3://bucket/checkpoints/id", False),
        ("s3://bucket/jobs", "s3://bucket/checkpoints/id-2", False),
    ],
)
def test_the_layout_of_its_files_makes_a_job_ours(output, checkpoints, is_ours):
    raw = {
        "TrainingJobName": "id",
        "OutputDataConfig": {"S3OutputPath": output},
        "CheckpointConfig": {"S3Uri": checkpoints},
    }
    assert is_our_job(raw) == is_ours


def test_a_job_launched_by_another_tool_is_left_alone(cloud, cli, launch):
    request = {**cloud.sagemaker.jobs[launch()].request, "TrainingJobName": "prod-xgb"}
    cloud.sagemaker.CreateTrainingJob(request)
    for command in ("stop", "status", "logs", "fetch-and-sample"):
        assert cli(command, "prod-xgb").failed(1, "sm-nanogpt did not launch")
    assert "StopTrainingJob" not in [operation for operation, _ in cloud.calls]


def test_ctrl_c_leaves_a_job_on_sagemaker_running(cloud, submit, monkeypatch):
    monkeypatch.setattr(
        "sm_nanogpt.launcher.tracking.TrackedJob.logs", Mock(side_effect=KeyboardInterrupt)
    )
    assert "the job keeps running; it costs at most" in submit("--follow").err
    assert "StopTrainingJob" not in [operation for operation, _ in cloud.calls]
