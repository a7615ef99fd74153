"""Fixtures that the tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launching
import money_service
import pytest
import sagemaker_service
import torch

# As many tests run side by side as there are cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text() -> str:
    """Real English of several hundred thousand characters, which every CPython carries.

    Its last lines hold what a plain text seldom has: tabs, accents and emoji.
    """
    from pydoc_data.topics import topics

    strange = "naïve café\t– “quoted” …\n\tЖук 漢字 🙂🚀👩‍🚀\n"
    return "\n".join(topics[name] for name in sorted(topics)) + "\n" + strange * 20


@pytest.fixture(scope="session")
def text_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return path


# ------------------------------------------------------------------------------------------------
# The launcher


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home for the launcher, in this process too; jobs that are left are killed."""
    path = tmp_path / "home"
    for name in list(os.environ):
        if name.startswith(("SM_NANOGPT_", "AWS_")):
            monkeypatch.delenv(name)
    for name, value in launching.environment(path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield path
    launching.kill_below(path)


@pytest.fixture
def cli(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., launching.Ran]:
    """sm-nanogpt in this process: quick, for what needs no process of its own."""
    from launcher.cli import run

    def call(*words: str) -> launching.Ran:
        capsys.readouterr()
        code = run(list(words))
        return launching.Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> launching.Finished:
    """A job of one process that ended well. It is shared: look, but change nothing."""

    def build(directory: Path) -> launching.Finished:
        home = directory / "home"
        ran = launching.command(*launching.launching(data=text_file), home=home)
        assert ran.code == 0, ran.err
        return launching.Finished(home, ran.out.strip())

    return launching.once(tmp_path_factory, "finished", build)


@pytest.fixture
def job(finished: launching.Finished, home: Path) -> launching.Finished:
    """A copy of the finished job in this test's own home."""
    copy = launching.Finished(home, finished.job_id)
    shutil.copytree(finished.directory, copy.directory)
    return copy


# ------------------------------------------------------------------------------------------------
# AWS on loopback


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 on loopback."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(
    s3_server: str, home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """A client of that S3, with a bucket of this test's own under `s3.bucket`."""
    import boto3
    from s3fs import S3FileSystem

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.bucket = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    client.create_bucket(Bucket=client.bucket)
    monkeypatch.setenv("SM_NANOGPT_STORE", f"s3://{client.bucket}/some/prefix")
    S3FileSystem.clear_instance_cache()
    yield client
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def money(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[money_service.MoneyService]:
    """AWS's price list and quotas on loopback."""
    with money_service.serving() as (service, url):
        for name in ("PRICING", "SERVICE_QUOTAS"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", url)
        yield service


@pytest.fixture
def cloud(
    s3: Any, money: money_service.MoneyService, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sagemaker_service.Service]:
    """SageMaker on loopback beside S3 and the prices, and a person who may use them."""
    with sagemaker_service.serving() as (service, url):
        for name in ("SAGEMAKER", "CLOUDWATCH_LOGS", "STS"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", url)
        monkeypatch.setenv("SM_NANOGPT_ROLE", "arn:aws:iam::123456789012:role/training")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        monkeypatch.setattr("launcher.backends.sagemaker.POLL_SECONDS", 0.1)
        monkeypatch.setattr("launcher.backends.sagemaker.QUIET_SECONDS", 1.0)
        yield service
