"""Whose job a name means, by two callers of one account; parts of ids, and `latest`."""

from __future__ import annotations

import functools
import io
import json
import math
import shutil
import sys
from unittest.mock import Mock

import launching
import pytest
from access import ACCOUNT
from jobs import copy_job, running, write_job
from sagemaker_jobs import CHECKPOINT

import sm_nanogpt as sm
from sm_nanogpt import ServiceError, Settings
from sm_nanogpt.launcher.files.storage import write_json
from sm_nanogpt.launcher.finding import find, full_id, similar_to
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.sagemaker.caller import (
    LAST_LAUNCHED,
    NAME_TAG,
    Caller,
    LaunchedJob,
    last_launches,
    owner_of,
    remember_launch,
    with_last,
)
from sm_nanogpt.launcher.settings import load_settings

STS, IAM = f"arn:aws:sts::{ACCOUNT}:", f"arn:aws:iam::{ACCOUNT}:"


def test_an_owner_is_a_person_or_else_a_role():
    cases = [
        (f"{IAM}root", "root"),
        (f"{IAM}user/ada", "user/ada"),
        (f"{IAM}user/research/ml/ada", "user/ada"),
        (f"{IAM}user/love,ada", "user/love:ada"),  # a tag cannot hold a comma
        (f"{STS}federated-user/ada", "federated-user/ada"),
        (f"{STS}assumed-role/dev/ada", "dev/ada"),
        (f"{STS}assumed-role/AWSReservedSSO_ml_0123/ada@x.org", "AWSReservedSSO_ml_0123/ada@x.org"),
        (f"{STS}assumed-role/AWSReservedSSO_ml_0123/00471", "AWSReservedSSO_ml_0123/00471"),
        (f"{STS}assumed-role/box/i-0123456789abcdef0", "box/i-0123456789abcdef0"),
        (f"{STS}assumed-role/dev/botocore-session-1712345678", "dev"),
        (f"{STS}assumed-role/dev/aws-go-sdk-1712345678901234567", "dev"),
        (f"{STS}assumed-role/dev/AWSCLI-Session-1712345678", "dev"),
        (f"{STS}assumed-role/dev/1712345678901", "dev"),
        (f"{STS}assumed-role/task/0123456789abcdef0123456789abcdef", "task"),
        ("arn:aws-cn:iam::1:user/ada", "user/ada"),
    ]
    for arn, owner in cases:
        assert owner_of(arn) == owner


# -- two callers -----------------------------------------------------------------------------------


@functools.cache
def key_of(url: str, name: str) -> dict[str, str]:
    """The access key of a new IAM user who may do everything."""
    from emulator import client  # which imports moto's server

    iam, everything = client("iam", url), {"Effect": "Allow", "Action": "*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [everything]})
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=policy)
    return dict(iam.create_access_key(UserName=name)["AccessKey"])


@pytest.fixture
def become(cloud, monkeypatch):
    """From now on, an IAM user of this name types."""

    def change(name: str) -> None:
        key = key_of(cloud.url, name)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])

    return change


@pytest.fixture
def two(cloud, become, launch, monkeypatch):
    """A job of ada, and one that grace launched after it; both run until they are stopped."""
    monkeypatch.setattr("sagemaker_service.LOOKS", math.inf)
    become("ada")
    adas = launch("--name", "baseline")
    become("grace")
    return adas, launch("--name", "baseline")  # a name is hers alone


def listed(cli, *arguments):
    return [job["job_id"] for job in json.loads(cli("jobs", "--json", arguments).out)]


def test_each_caller_lists_own_jobs_and_on_request_all(cli, become, two):
    adas, graces = two
    for caller, own in (("ada", adas), ("grace", graces)):
        become(caller)
        assert listed(cli) == [own]
        assert listed(cli, "--everyone") == [graces, adas]
    first, second = cli("jobs", "--everyone").table
    assert first["JOB-ID"] == graces
    assert first["NAME"] == "baseline"
    assert first["OWNER"] == "user/grace"
    assert second["JOB-ID"] == adas
    assert second["NAME"] == "baseline"
    assert second["OWNER"] == "user/ada"


def test_the_last_job_stands_once_at_its_time():
    """Each job is here the second of its launch and the end of its id; the last one is 5b."""

    def ids(jobs: str) -> list[str]:
        return [f"sm-nanogpt-20261126-00000{job[0]}-{job[1]}" for job in jobs.split()]

    [last] = ids("5b")
    cases = [
        ("", "5b"),
        ("6c 5a", "6c 5b 5a"),
        ("5c 5b 5a", "5c 5b 5a"),
        ("4d", "5b 4d"),
        ("4d 5b", "5b 4d"),  # the clocks of callers differ, and Search sorts by AWS's
        ("6c 6d", "6c 6d 5b"),
    ]
    for pages, merged in cases:
        answers = [{"TrainingJobName": job_id} for job_id in ids(pages)]
        jobs = with_last(answers, last, iter([{"TrainingJobName": last}]))
        assert [job["TrainingJobName"] for job in jobs] == ids(merged)


def test_a_name_of_nobody_leads_to_the_jobs_of_all(cloud, cli, become, two):
    become("hopper")
    ran = cli("fetch-and-sample", "baseline")
    assert ran.failed(1, "there is no job 'baseline'", "jobs --everyone", "whole ids")


def test_only_a_whole_id_means_a_colleagues_job(cloud, cli, become, two):
    adas, graces = two
    become("ada")
    assert cli("stop", graces[-6:]).failed(1, f"there is no job {graces[-6:]!r}")
    assert f"latest is job {adas} (baseline)\n" in cli("stop", "latest").good.err
    assert f"baseline is job {adas}\n" in cli("delete", "baseline", "--yes").good.err
    assert not cloud.sagemaker.jobs[graces].stopping.is_set()

    assert json.loads(cli("status", graces, "--json").out)["owner"] == "user/grace"
    assert cli("stop", graces, "--yes").good
    assert cloud.sagemaker.jobs[graces].stopping.is_set()


# -- somebody else's -------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """stdin is a terminal, at which somebody types these answers."""

    def types(*answers: str) -> None:
        stdin = io.StringIO("".join(f"{answer}\n" for answer in answers))
        monkeypatch.setattr(stdin, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", stdin)

    return types


def test_a_colleagues_job_is_not_stopped_unasked(cloud, cli, become, two, terminal):
    adas, graces = two
    become("ada")
    assert cli("stop", graces).failed(2, f"job {graces} belongs to user/grace", "--yes")
    assert cli("stop", adas).good

    terminal("n")
    ran = cli("stop", graces)
    assert ran.code == 1
    assert f"job {graces} belongs to user/grace\n" in ran.err
    assert not cloud.sagemaker.jobs[graces].stopping.is_set()
    terminal("y")
    assert cli("stop", graces).good
    assert cloud.sagemaker.jobs[graces].stopping.is_set()


def test_a_job_that_search_does_not_know_yet_is_nobodys(cloud, cli, home, two):
    cloud.sagemaker.search_lag = 500
    assert cli("stop", two[1]).good  # grace launched it from here
    (home / LAST_LAUNCHED).unlink()
    assert cli("stop", two[0]).failed(2, "does not name yet", "--yes")


def test_a_deletion_says_whose_job_it_is(cloud, cli, become, two):
    become("ada")
    for job_id in two:
        cli("stop", job_id, "--yes")
        cli("wait", job_id)
    ran = cli("delete", two)
    assert ran.failed(2, "--yes")
    assert f"{two[0]}, Stopped:\n" in ran.err
    assert f"{two[1]}, Stopped, of user/grace:\n" in ran.err
    assert set(two) <= cloud.sagemaker.jobs.keys()
    assert cli("delete", two, "--yes").good


def test_a_running_job_of_a_colleague_says_whose_it_is(cloud, cli, become, two):
    become("ada")
    [upload] = json.loads(cli("data", "--json").out)
    own = "InProgress; stop it first"
    of_grace = "InProgress, and belongs to user/grace; stop it first"
    for command in (("delete", "--yes"), ("launch", "--resume")):
        assert cli(*command, two[0]).failed(1, f"job {two[0]} is {own}")
        assert cli(*command, two[1]).failed(1, f"job {two[1]} is {of_grace}")
    assert cli("stop", two[0]).good
    ran = cli("delete", upload["name"], "--yes")
    assert ran.failed(1, f"job {two[1]} of user/grace is reading {upload['name']}; stop it")


@pytest.fixture
def sweep(cloud, cli, become, short_text_file):
    """The id of a sweep of grace, of two jobs that run."""
    become("grace")
    first = cli(
        "launch", "--instance", "ml.g5.12xlarge", "--data", short_text_file
    ).good.out.strip()
    request = json.dumps(cloud.sagemaker.jobs[first].request)
    for number in (1, 2):
        cloud.sagemaker.CreateTrainingJob(json.loads(request.replace(first, f"{first}-{number}")))
    return first


def test_a_colleagues_sweep_is_not_stopped_unasked(cloud, cli, become, sweep):
    become("ada")
    members = [cloud.sagemaker.jobs[f"{sweep}-{number}"] for number in (1, 2)]
    assert cli("stop", "--group", sweep).failed(2, "belongs to user/grace", "--yes")
    assert not any(job.stopping.is_set() for job in members)
    assert cli("stop", "--group", sweep, "--yes").good
    assert all(job.stopping.is_set() for job in members)
    ran = cli("delete", "--group", sweep)
    assert ran.failed(2, "--yes")
    assert ran.err.count("Stopped, of user/grace:\n") == 2
    assert cli("delete", "--group", sweep, "--yes").good
    assert not {job.name for job in members} & cloud.sagemaker.jobs.keys()


def test_an_upload_that_colleagues_use_says_so(cloud, cli, become, two):
    for job_id in two:
        cloud.sagemaker.jobs[job_id].stop()
        cli("wait", job_id)
    [upload] = json.loads(cli("data", "--json").out)
    assert upload["owners"] == ["user/ada", "user/grace"]
    ran = cli("delete", upload["name"])
    assert ran.failed(2, "--yes")
    assert "used by 2 jobs of user/ada and user/grace:\n" in ran.err


def test_a_running_job_of_a_search_names_its_log(cloud, cli, short_text_file):
    search = ("--environment", "NANOGPT_SEARCH=plays")
    launch = ("launch", "--instance", "ml.g5.12xlarge", "--data", short_text_file)
    job_id = cli(launch, search).good.out.strip()
    assert f"`sm-nanogpt logs {job_id}` shows the runs" in cli("status", job_id).good.err


def test_an_upload_to_s3_records_who_sent_it(cloud, cli, become, short_text_file):
    become("ada")
    uri = cli("upload-data", short_text_file).good.out.strip()
    become("grace")
    assert cli("upload-data", short_text_file).good.out.strip() == uri
    [upload] = json.loads(cli("data", "--json").out)
    assert upload["manifest"]["owner"] == "user/ada"
    ran = cli("delete", upload["name"])
    assert ran.failed(2, "--yes")
    assert "uploaded by user/ada, used by 0 jobs:\n" in ran.err


def test_an_upload_needs_no_answer_to_whose_it_is(cloud, cli, short_text_file, monkeypatch):
    silent = Mock(side_effect=ServiceError("GetCallerIdentity: no answer"))
    with monkeypatch.context() as patched:
        patched.setattr("sm_nanogpt.launcher.sagemaker.caller.caller_of", silent)
        ran = cli("upload-data", short_text_file).good
    assert "who uploaded is not recorded: GetCallerIdentity: no answer" in ran.err
    ran = cli("delete", ran.out.strip().rpartition("/")[2])
    assert "uploaded by nobody that is known, used by 0 jobs:\n" in ran.err


def test_python_takes_a_colleagues_job_only_if_confirmed(cloud, become, two):
    become("ada")
    job = sm.job(two[1])
    with pytest.raises(sm.NotYours) as caught:
        job.stop()
    assert caught.value.owner == "user/grace"
    job.stop(confirmed=True)
    job.wait()
    with pytest.raises(sm.NotYours):
        job.delete()
    job.delete(confirmed=True)
    assert two[1] not in cloud.sagemaker.jobs


def test_a_job_in_another_region_is_not_forgotten(cloud, cli, launch):
    """Jobs of both regions are those of one service here, so its owner hides the other one."""
    job_id = launch()
    caller, later = Caller(ACCOUNT, "root"), "sm-nanogpt-20991231-000000-abcdef"
    request = json.dumps(cloud.sagemaker.jobs[job_id].request).replace(job_id, later)
    request = request.replace(f'"{caller.owner}"', '"nobody"')
    cloud.sagemaker.CreateTrainingJob(json.loads(request))
    remember_launch(LaunchedJob(caller, "eu-west-1", later), load_settings())
    ran = cli("status", "latest").good
    assert f"job:         {job_id}\n" in ran.out
    assert f"{later} was launched after {job_id}, in eu-west-1" in ran.err
    for arguments in (
        ("stop", "latest"),
        ("delete", "latest", "--yes"),
        ("launch", "--resume", "latest"),
    ):
        assert cli(arguments).failed(2, later, "--region eu-west-1")
    cloud.sagemaker.search_lag = 500
    assert listed(cli) == [job_id]  # by the note of this region
    del cloud.sagemaker.jobs[later]  # from another machine
    assert full_id("latest", load_settings(), acts=True) == job_id


def test_latest_reads_one_page(cloud, cli, launch):
    ids = [launch() for _ in range(2)]
    request = json.dumps(cloud.sagemaker.jobs[ids[0]].request)
    for n in range(8):
        another = f"sm-nanogpt-20200101-00000{n}-abcdef"
        cloud.sagemaker.CreateTrainingJob(json.loads(request.replace(ids[0], another)))
        cloud.sagemaker.jobs[another].created = 1e9 + n
    for arguments, answer in (
        (("jobs", "--json", "--limit", "3"), 1),
        (("status", "latest"), 1),
        (("jobs", "--json"), 4),
    ):
        cloud.calls.clear()
        assert cli(arguments).good
        assert [operation for operation, _ in cloud.calls].count("Search") == answer


def test_an_odd_job_hides_no_other(cloud, cli, launch):
    strange, other = launch(), launch()
    cloud.sagemaker.jobs[strange].request["HyperParameters"]["n_layer"] = "four"  # no JSON
    ran = cli("jobs", "--json").good
    assert [job["job_id"] for job in json.loads(ran.out)] == [other]
    assert f"job {strange} is left out: " in ran.err
    assert cli("status", strange).failed(1, strange, "JSONDecodeError")


# -- names -----------------------------------------------------------------------------------------


def test_a_name_is_unique_among_the_callers_jobs(cloud, s3, cli, launch, short_text_file, tmp_path):
    job_id = launch("--name", "small.v2")
    cloud.sagemaker.search_lag = 500  # Search does not know it yet
    n_keys = s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"]
    other = tmp_path / "other.txt"
    other.write_text("Another text.\n" * 1000)
    again = ("--data", str(other), "--name", "small.v2")
    for instance in ("ml.g5.12xlarge", "local"):
        assert cli("launch", "--instance", instance, again).failed(2, job_id, "small.v2")
    assert s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"] == n_keys
    assert cli("stop", "small.v2").good
    assert "name:        small.v2\nsettings:    baby\n" in cli("status", job_id).out
    assert cli("delete", "small.v2", "--yes").good
    assert launch("--name", "small.v2")


def test_a_name_works_wherever_an_id_does(job, cli, short_text_file, tmp_path):
    copy = copy_job(job, "sm-nanogpt-20200101-000000-abcdef", name="v1.0")
    (tmp_path / "v1.0").mkdir()  # a directory that is no model does not hide the job
    assert cli("upload-data", short_text_file, "--tokenizer", "v1.0").good
    for arguments in ("status {}", "logs {}", "metrics {}", "report {} -o r.html", "sample {}"):
        assert cli(arguments.format("v1.0").split()).good, arguments
    assert cli("launch", "--resume", "v1.0", "--set", "max_steps=20").good
    assert f"resumes {copy}" in cli("status", "latest").out
    assert cli("delete", copy, "--yes").good
    assert not (job.home / "jobs" / copy).exists()


def test_a_resumed_job_takes_over_the_name(job, cli):
    copy = copy_job(job, "sm-nanogpt-20200101-000000-abcdef", name="first")
    resumed = cli("launch", "--resume", "first", "--set", "max_steps=20").good.out.strip()
    assert f"job:         {resumed}\n" in cli("status", "first").out
    assert f"/models/{resumed}/" in cli("fetch-and-sample", "first", "--max-new-tokens", "3").err
    further = cli("launch", "--resume", "first", "--name", "first", "--set", "max_steps=22").good
    assert f"resumes {resumed}" in cli("status", further.out.strip()).out
    taken = cli("launch", "--instance", "local", "--name", "first")
    newest = further.out.strip()
    assert taken.failed(2, newest, "another name", f"delete {newest}`")
    assert cli("launch", "--resume", copy, "--name", "other", "--set", "max_steps=12").good
    assert f"resumes {copy}" in cli("status", "other").out


def test_a_name_means_the_newest_job_that_has_the_part(job, cli):
    copy_job(job, "sm-nanogpt-20200101-000000-abcdef", name="first")
    older = copy_job(job, "sm-nanogpt-20200102-000000-abcdef", name="first")
    newer = failed(job, "sm-nanogpt-20200103-000000-abcdef", name="first")
    assert f"job:         {newer}\n" in cli("status", "first").out
    ran = cli("fetch-and-sample", "first", "--max-new-tokens", "3").good
    assert f"{newer} is Failed and has no model; the newest other job is {older}" in ran.err
    assert f"/models/{older}/" in ran.err


def test_a_stop_by_name_names_the_other_jobs_that_run(home, cli, monkeypatch):
    stop = Mock(side_effect=ServiceError("not now"))
    monkeypatch.setattr("sm_nanogpt.launcher.tracking.TrackedJob.stop", stop)
    older, newer = (f"sm-nanogpt-2020010{day}-000000-abcdef" for day in (1, 2))
    job = TrainingJob(instance="local", data="file:///text", name="twice")
    with running(home / "jobs" / older, job), running(home / "jobs" / newer, job):
        ran = cli("stop", "twice")
        shown = cli("status", "twice")
    assert f"another job of the name twice is running: {older}\n" in ran.err
    assert f"twice is job {newer}\n" in ran.err
    assert "another job" not in shown.err


def test_the_name_of_somebody_elses_job_is_not_taken_over(s3, cli, become, two):
    adas, graces = two  # both are named baseline
    for owner, job_id in (("ada", adas), ("grace", graces)):
        become(owner)
        s3.put_object(Bucket=s3.bucket, Key=CHECKPOINT.format(job_id), Body=b"x")
        assert cli("stop", job_id).good
    for job_id, name in ((adas, None), (graces, "baseline")):
        request = json.loads(cli("launch", "--resume", job_id, "--dry-run").good.out)
        tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
        assert tags.get(NAME_TAG) == name


# -- parts of ids ----------------------------------------------------------------------------------


def test_a_part_of_an_id_is_unique_and_not_short(job, home, cli):
    moment = job.job_id[20:26]
    for part in (job.job_id[:14], job.job_id[-6:], job.job_id[-4:], moment, "latest"):
        assert full_id(part, Settings(home=home)) == job.job_id
    for part in (job.job_id[-3:], job.job_id[-1]):
        assert cli("delete", part, "--yes").failed(1, repr(part))
    other = copy_job(job, f"{job.job_id[:-6]}ffffff")
    assert cli("stop", moment).failed(2, "matches 2 jobs: ", job.job_id, other)
    for middle in (job.job_id[12:18], job.job_id[21:25]):  # neither start, end nor time
        assert cli("status", middle).failed(1, "there is no job")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("sm-nanogpt-20261130-055203-b8e313", "sm-nanogpt-20261130-055203-b8e312"),
        ("b8e313", "b8e312"),
        ("latst", "latest"),
        ("basline", "baseline"),
    ],
)
def test_a_typo_in_a_job_is_answered_by_what_is_like_it(home, typed, meant):
    for job_id, name in (
        ("sm-nanogpt-20261130-055203-b8e312", None),
        ("sm-nanogpt-20261130-055209-8f40ca", "baseline"),
    ):
        directory = home / "jobs" / job_id
        text = (home / "input.txt").as_uri()
        write_job(directory, job=TrainingJob(instance="local", data=text, name=name))
    with pytest.raises(ServiceError) as caught:
        find(typed, launching.settings_of(home))
    assert caught.value.problem.endswith(f"; did you mean {meant}?")


def test_a_word_that_is_like_no_job_has_no_suggestion():
    ids = ["sm-nanogpt-20261130-055203-b8e312"]
    other_ids = ["sm-nanogpt-20261130-055203-79bf20", "sm-nanogpt-20261129-101500-b8e312"]
    for word in ("shakespeare", "ffffff", "b8ffff", *other_ids):
        assert similar_to(word, ids, ["baseline"]) == ""
    assert similar_to("latst", [], []) == ""


# -- which one is latest ---------------------------------------------------------------------------


def failed(job, job_id, **values):
    copy_job(job, job_id, **values)
    state = {"status": "Failed", "secondary": "Failed", "reason": "DataError: no text"}
    write_json(str(job.home / "jobs" / job_id / "state.json"), state)
    return job_id


def test_for_a_model_latest_is_the_newest_that_has_one(job, cli, short_text_file, caplog):
    newer = failed(job, "sm-nanogpt-20990101-000000-abcdef")
    assert f"job:         {newer}\n" in cli("status", "latest").out
    message = f"{newer} is Failed and has no model; the newest other job is {job.job_id}"
    ran = cli("fetch-and-sample", "latest", "--max-new-tokens", "3").good
    assert message in ran.err
    assert f"/models/{job.job_id}/" in ran.err
    caplog.set_level("INFO", "sm_nanogpt")
    request = sm.Request(instance="local", data=str(short_text_file), init_from="latest")
    assert sm.prepare(request).job.summary.endswith(f"from {job.job_id}")
    assert message in "\n".join(caplog.messages)


def test_an_unreadable_newest_job_is_not_passed_over(job, cli):
    newer = copy_job(job, "sm-nanogpt-20990101-000000-abcdef")
    (job.home / "jobs" / newer / "job.json").write_text("{")
    assert cli("delete", "latest", "--yes").failed(1, newer, "is damaged")
    assert f"job {newer} is left out: " in cli("status", "latest").good.err
    shutil.rmtree(job.directory)
    assert cli("status", "latest").failed(1, newer, "is damaged")


# -- without AWS -----------------------------------------------------------------------------------


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """A configuration of AWS, and a network on which nothing of AWS listens."""
    (tmp_path / "config").write_text("[default]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.caller.known_callers", {})


def test_after_a_deletion_others_may_be_on_sagemaker(two, cli, monkeypatch):
    adas, graces = two
    assert cli("stop", graces).good and cli("delete", graces, "--yes").good
    assert {each.job_id for each in last_launches(load_settings())} == {adas, graces}
    assert cli("status", "latest").failed(1, "you have no jobs yet", "upload-data FILE")


def test_local_jobs_need_no_aws_to_be_read(job, cli, unreachable, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.aws.aws_session", None)  # nothing asks
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.account.aws_session", None)
    for name in ("latest", job.job_id[-6:]):
        ran = cli("fetch-and-sample", name, "--max-new-tokens", "3").good
        assert ("SageMaker was not asked" in ran.err) == (name == "latest")
    directory = ran.err.splitlines()[-1].removeprefix("model: ")
    shutil.copytree(directory, "mymodel")
    assert cli("fetch-and-sample", "mymodel", "--max-new-tokens", "3").good


def test_a_job_is_changed_only_if_no_other_can_be_meant(job, cli, unreachable):
    ran = cli("stop", "latest")  # no job of this home is on SageMaker
    assert ran.failed(1, f"{job.job_id} has already ended")
    assert f"of the jobs of this machine, latest is {job.job_id}; " in ran.err
    caller = Caller(ACCOUNT, "user/ada")
    remember_launch(
        LaunchedJob(caller, "us-east-1", "sm-nanogpt-20200101-000000-abcdef"), load_settings()
    )
    assert f"latest is {job.job_id}; " in cli("status", "latest").good.err
    for arguments in (("stop", "latest"), ("delete", job.job_id[-6:], "--yes")):
        assert cli(arguments).failed(1, "cannot resolve", "to a full job id")
    remember_launch(
        LaunchedJob(caller, "us-east-1", "sm-nanogpt-20990101-000000-abcdef"), load_settings()
    )
    assert cli("status", "latest").failed(1, "cannot resolve")


def test_a_mistake_is_told_before_a_job_is_looked_for(job, cli, home, unreachable, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.finding.full_id", None)
    for arguments in (
        "logs latest --tail x",
        "logs latest --raw --tial",
        "play latest --cors localhost",
        "fetch-and-sample latest --prompt=",
        "launch --resume latest --init-from latest --set n_layer",
    ):
        assert cli(arguments.split()).code == 2, arguments
    for command in ("status", "play", "delete --group latest", "launch --resume"):
        assert cli(command.split(), "latest", "--help").good
