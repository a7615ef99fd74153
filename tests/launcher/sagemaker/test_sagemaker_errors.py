"""Errors of AWS and what to do about them: credentials, lost answers, outages and unknown jobs."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
from access import ACCOUNT, Refusal
from botocore import exceptions
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.httpsession import URLLib3Session
from botocore.utils import generate_login_cache_key
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from sagemaker_jobs import LAUNCH

from sm_nanogpt import InputError, Request, ServiceError, Settings, prepare
from sm_nanogpt.launcher.aws import Unreachable, service_error, service_errors
from sm_nanogpt.launcher.cli.remedies import sentence
from sm_nanogpt.launcher.sagemaker.backend import SageMakerBackend
from sm_nanogpt.launcher.sagemaker.caller import last_launches
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.tracking import TrackedJob


def answer(code: str, message: str = "no") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "GetObject")


def test_each_error_of_aws_names_its_remedy():
    cases = [
        (answer("RequestTimeTooSkewed"), "the clock"),
        (answer("InvalidSignatureException", "Signature expired: 1 is now earlier"), "the clock"),
        (answer("SignatureDoesNotMatch", "Signature not yet current: 2"), "the clock"),
        (answer("InvalidSignatureException", "The signature we calculated"), "AWS_PROFILE or"),
        (answer("ExpiredTokenException"), "have expired"),
        (answer("ThrottlingException"), "wait a minute"),
        (answer("AccessDeniedException"), "not allowed"),
        (answer("CapacityError"), "--instance TYPE,TYPE"),
        (answer("ValidationException", "Something else"), "Something else (ValidationException)"),
        (exceptions.UnauthorizedSSOTokenError(), "expired"),
        (exceptions.LoginRefreshRequired(), "expired"),
        (exceptions.LoginError(), "renew them with `aws login`"),
        (exceptions.LoginInsufficientPermissions(), "signin:CreateOAuth2Token"),
        (exceptions.NoCredentialsError(), "`aws login`"),
        # "sso" in the name of a host does not mean that the credentials have expired.
        (EndpointConnectionError(endpoint_url="https://lessons.s3.amazonaws.com/"), "the network"),
    ]
    for error, remedy in cases:
        assert remedy in sentence(service_error("GetObject", error))


def test_a_bug_is_not_blamed_on_the_network():
    answered: dict[str, Any] = {}
    with pytest.raises(KeyError), service_errors("DescribeTrainingJob"):
        answered["ResourceConfig"]


@pytest.mark.parametrize(
    ("key", "arguments", "fact"),
    [
        ("EXPIRED", (), "have expired"),
        ("WRONG", (), "AWS_PROFILE or the keys"),
        ("testing", ("--instance", "ml.g6.48xlarge"), "training job usage' is 0"),
    ],
)
def test_a_launch_refused_by_aws_says_what_to_do(
    cloud, cli, short_text_file, monkeypatch, key, arguments, fact
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    ran = cli(LAUNCH, arguments, "--data", short_text_file)
    assert ran.code == 1
    assert ran.out == ""
    assert fact in ran.error
    assert not cloud.sagemaker.jobs


@pytest.fixture
def login(cloud, home, monkeypatch):
    """A machine with `aws login` whose token is gone; where it is kept."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = home.parent / ".aws/config"
    config.parent.mkdir()
    session = f"arn:aws:iam::{ACCOUNT}:user/me"
    config.write_text(f"[default]\nlogin_session = {session}\n")
    token = config.parent / f"login/cache/{generate_login_cache_key(session)}.json"
    token.parent.mkdir(parents=True)
    return token


@pytest.mark.parametrize(
    ("crypto", "fact"), [(None, "awscrt is missing"), (object(), "renew them with `aws login`")]
)
def test_an_unusable_login_says_what_to_do(login, cli, short_text_file, monkeypatch, crypto, fact):
    for module in ("botocore", "aiobotocore"):  # of boto3 and of s3fs
        monkeypatch.setattr(f"{module}.credentials.EC", crypto)
    for arguments in (("jobs",), ("upload-data", str(short_text_file))):
        assert cli(arguments).failed(1, fact)


@pytest.mark.parametrize("by_s3fs", [False, True])
def test_an_expired_login_is_renewed(cloud, login, cli, short_text_file, monkeypatch, by_s3fs):
    """By boto3 and by s3fs, which need awscrt of versions that know how."""
    keys = {"accessKeyId": "testing", "secretAccessKey": "testing", "sessionToken": "testing"}
    expired = {**keys, "accountId": ACCOUNT, "expiresAt": "2026-01-01T00:00:00Z"}
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )
    token = {"dpopKey": key.decode(), "clientId": "cli", "refreshToken": "r"}
    login.write_text(json.dumps({"accessToken": expired, **token}))
    answer = {"accessToken": keys, "tokenType": "t", "expiresIn": 900, "refreshToken": "r"}
    monkeypatch.setitem(cloud.credentials, "/v1/token", lambda: answer)
    if by_s3fs:
        assert cli("upload-data", short_text_file).good
    else:
        assert cli("jobs").good
    assert json.loads(login.read_text())["accessToken"]["expiresAt"] > "2026-11"


def test_a_dry_run_ignores_an_expired_login(login, rehearse):
    assert "login" not in rehearse().good.err


def error_of(code: str) -> bytes:
    return json.dumps({"__type": code, "message": "not now"}).encode()


DENIED = (400, error_of("AccessDeniedException"))


class Outage:
    """A network that loses requests of an operation, or has an answer of its own to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begin(0)
        send = URLLib3Session.send

        def lose(session: Any, request: Any) -> Any:
            if self.operation in request.headers.get("X-Amz-Target", b""):
                self.before -= 1
                if self.before < 0 and self.lost < self.length:
                    self.lost += 1
                    if self.answer is None:
                        raise EndpointConnectionError(endpoint_url="https://api.sagemaker")
                    status, body = self.answer
                    raw = io.BytesIO(body)
                    raw.stream = lambda: iter([body])  # type: ignore[attr-defined]
                    return AWSResponse(request.url, status, {}, raw)
            return send(session, request)

        monkeypatch.setattr(URLLib3Session, "send", lose)

    def begin(
        self,
        length: int,
        operation: bytes = b"Training",
        n_calls: int = 0,
        answer: tuple[int, bytes] | None = None,
    ) -> None:
        """Loses `length` requests for an operation, after some that still get through."""
        self.operation, self.before, self.length, self.lost = operation, n_calls, length, 0
        self.answer = answer


@pytest.fixture
def outage(cloud, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("sm_nanogpt.launcher.aws.OUTAGE_RETRY_SECONDS", 0.1)
    return Outage(monkeypatch)


@pytest.mark.parametrize(
    ("lost", "temporary"),
    [
        (None, True),
        ((400, error_of("ThrottlingException")), True),
        ((500, error_of("InternalFailure")), True),
        (DENIED, False),
    ],
)
def test_an_outage_is_distinguished_from_a_refusal(outage, lost, temporary):
    outage.begin(1000, answer=lost)
    with pytest.raises(ServiceError) as caught:
        SageMakerBackend(load_settings()).describe("a-job")
    assert isinstance(caught.value, Unreachable) == temporary


@pytest.mark.parametrize(
    ("arguments", "operation"),
    [
        ("wait {}", b"DescribeTrainingJob"),
        ("logs {} --follow --raw", b"DescribeLogStreams"),
        ("logs {} --follow --raw", b"GetLogEvents"),
    ],
)
def test_following_survives_an_outage_and_misses_no_line(cli, launch, outage, arguments, operation):
    lines = [(0.05 * i, "algo-1", f"line {i}") for i in range(10)]
    job_id = launch(log=lines)
    outage.begin(3, operation, n_calls=1)
    ran = cli(arguments.format(job_id).split()).good
    assert outage.lost == 3
    assert ran.err.count("; retrying") == 1
    if arguments.startswith("logs"):
        assert ran.out.splitlines() == [f"{host}: {line}" for _, host, line in lines]


@pytest.mark.parametrize(("lost", "fact"), [(None, "Could not connect"), (DENIED, "not allowed")])
def test_a_refusal_or_a_long_outage_ends_only_the_following(
    cloud, cli, launch, outage, monkeypatch, lost, fact
):
    monkeypatch.setattr("sm_nanogpt.launcher.aws.PATIENCE_SECONDS", 0.3)
    job_id = launch()
    for arguments in (("wait", job_id), ("logs", job_id, "--follow")):
        outage.begin(1000, b"DescribeTrainingJob", n_calls=1, answer=lost)
        again = f"`sm-nanogpt logs {job_id} --follow`"
        assert cli(arguments).failed(1, fact, "continues and is billed", again)
        assert (outage.lost == 1) == (lost is not None)  # what AWS refuses is not asked again
    assert "StopTrainingJob" not in [operation for operation, _ in cloud.calls]


@pytest.mark.parametrize(("lost", "fact"), [(None, "the network"), (DENIED, "not allowed")])
def test_a_first_request_that_fails_is_not_repeated(cli, outage, lost, fact):
    for arguments in ("status", "logs", "stop", "wait", "logs --follow"):
        outage.begin(1000, answer=lost)
        ran = cli(arguments.split(), "some-job")
        assert ran.failed(1, fact)
        assert ran.err.count("\n") == 1
        assert outage.lost == 1


def clock_of(now: list[float]) -> SimpleNamespace:
    """The module `time` for one module, as the service of other tests lives in this process too."""
    return SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )


def test_the_timeout_of_wait_holds_during_an_outage(launch, outage, monkeypatch):
    job_id, now = launch(), [0.0]
    for module in ("sm_nanogpt.launcher.tracking", "sm_nanogpt.launcher.aws"):
        monkeypatch.setattr(f"{module}.time", clock_of(now))
    outage.begin(1000, n_calls=1)
    with pytest.raises(ServiceError, match="Could not connect"):
        TrackedJob(job_id).wait_for_end(timeout=0.5)
    assert now[0] == pytest.approx(0.5)


def test_the_last_lines_arrive_if_a_job_ends_in_an_outage(monkeypatch):
    backend, now = SageMakerBackend(Settings()), [0.0]
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.backend.time", clock_of(now))
    polls = iter(range(1000))

    def poll(job_id: str, tokens: dict[str, str]) -> tuple[dict[str, Any], list[Any]]:
        count = next(polls)
        if count == 1:
            now[0] += 100  # the outage
        raw = {"TrainingJobStatus": "Completed" if count else "InProgress"}
        late = [(0, "algo-1", "the end")] if count == 2 else []
        return {**raw, "ResourceConfig": {"InstanceCount": 1}}, late

    monkeypatch.setattr(backend, "poll", poll)
    assert list(backend.events("job", True)) == [(0, "algo-1", "the end")]


def test_a_launch_is_retried_when_the_first_answer_is_lost(cloud, launch, monkeypatch):
    create = cloud.sagemaker.CreateTrainingJob
    requests: list[str] = []

    def lose_the_first_answer(body: dict[str, Any]) -> Any:
        requests.append(body["TrainingJobName"])
        answered = create(body)
        if len(requests) == 1:
            raise Refusal("InternalFailure", "no answer", 503)
        return answered

    monkeypatch.setattr(cloud.sagemaker, "CreateTrainingJob", lose_the_first_answer)
    job_id = launch()
    assert requests == [job_id] * 2
    assert list(cloud.sagemaker.jobs) == [job_id]


@pytest.mark.parametrize("answer", [None, (503, error_of("InternalFailure"))])
def test_a_launch_without_an_answer_names_the_job(cli, short_text_file, outage, answer):
    outage.begin(1000, b"CreateTrainingJob", answer=answer)
    ran = cli(LAUNCH, "--data", short_text_file)
    assert ran.code == 1
    assert ran.out == ""
    (noted,) = last_launches(load_settings())
    assert f"`sm-nanogpt status {noted.job_id}`" in ran.error


def test_an_interrupted_launch_names_the_job_that_may_run(cloud, cli, short_text_file, monkeypatch):
    send = URLLib3Session.send

    def send_and_interrupt(session: Any, request: Any) -> Any:
        answered = send(session, request)
        if b"CreateTrainingJob" in request.headers.get("X-Amz-Target", b""):
            raise KeyboardInterrupt
        return answered

    monkeypatch.setattr(URLLib3Session, "send", send_and_interrupt)
    ran = cli(LAUNCH, "--data", short_text_file)
    assert ran.code == 1
    assert ran.out == ""
    (job_id,) = cloud.sagemaker.jobs
    message = ran.err.splitlines()[-1]
    assert message.startswith("interrupted: ")
    for command in ("status", "stop"):
        assert f"`sm-nanogpt {command} {job_id}`" in message
    assert "it costs at most 8" in message
    assert [each.job_id for each in last_launches(load_settings())] == [job_id]


def test_ctrl_c_after_a_launch_says_what_runs_and_its_cost(
    cloud, cli, short_text_file, monkeypatch
):
    link = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.backend.SageMakerBackend.console_link", link)
    ran = cli(LAUNCH, "--data", short_text_file)
    (job_id,) = cloud.sagemaker.jobs
    assert ran.code == 1
    assert ran.out.strip() == job_id
    last = ran.err.splitlines()[-1]
    assert f"`sm-nanogpt stop {job_id}`" in last
    assert "it costs at most 8" in last


def test_an_unknown_job_in_a_region_is_an_error(cloud, cli):
    fact = "there is no job 'nope' on this machine or in us-east-1"
    assert cli("status", "nope").failed(1, fact)


def test_without_a_region_local_jobs_are_listed(home, cli, job, monkeypatch):
    (home / "aws-config").write_text("[default]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "aws-config"))
    ran = cli("jobs")
    assert ran.code == 2  # as where a region is misspelt
    assert job.job_id in ran.out
    assert ran.error.startswith("jobs on SageMaker are not listed: no region ")
    for arguments, fact in (
        (("status", "nope"), "no region is set; set --region"),
        (("launch", "--instance", "ml.g5.xlarge"), "no region is set; set --region"),
    ):
        assert cli(arguments).failed(2, fact)
    dry = ("launch", "--instance", "ml.g5.xlarge", "--dry-run")
    assert cli(dry).failed(2, "does not ask AWS", "--region", "--store")
    with pytest.raises(InputError, match=r"^no region is set$"):
        prepare(Request(instance="ml.g5.xlarge", data="s3://bucket/text"))


@pytest.mark.parametrize(
    ("option", "command"),
    [("--store", (*LAUNCH, "--data")), ("--data", LAUNCH)],
    ids=["store", "data"],
)
def test_a_bucket_of_another_region_is_refused_before_an_upload(
    cloud, s3, cli, short_text_file, monkeypatch, option, command
):
    europe, bucket = boto3.client("s3", region_name="eu-west-1"), f"{s3.bucket}-eu"
    region = {"LocationConstraint": "eu-west-1"}
    europe.create_bucket(Bucket=bucket, CreateBucketConfiguration=region)
    europe.put_object(Bucket=bucket, Key="text/input.txt", Body=short_text_file.read_bytes())
    uri = f"s3://{bucket}/text"
    arguments = ("--store", uri, *command, str(short_text_file))
    if option == "--data":
        arguments = (*LAUNCH, option, uri)
    both = ("us-east-1", "set --region eu-west-1", f"or {option} to a bucket in us-east-1")
    assert cli(arguments).failed(2, uri, *both)
    for client, name, n in ((europe, bucket, 1), (s3, s3.bucket, 0)):
        assert client.list_objects_v2(Bucket=name)["KeyCount"] == n
    if option == "--store":
        monkeypatch.setattr("sagemaker_service.REGION", "eu-west-1")
        assert cli("--region", "eu-west-1", arguments).code == 0
