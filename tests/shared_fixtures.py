"""Fixtures that the tests share, and what each process that runs tests sets first."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.loaders
import botocore.session
import hypothesis
import launching
import pytest
import torch
import warm
from talks import write_chats

ROOT = Path(__file__).parent.parent
# What takes two to five seconds to import, in each process of the tests that needs it.
LARGE = {"sagemaker", "torch._dynamo", "transformers"}

making_finished: list[Path] = []  # its home, meanwhile

# As many tests run side by side as there are cores.
torch.set_num_threads(1)

# An example that takes long on a busy machine is no failure.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# Each session parses the models of services anew, and tests make thousands of sessions. Here these
# share them, as the clients of one do; moto has its own, since clients change theirs a little.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)
botocore.loaders.create_loader = botocore.session.create_loader


class LargeImports:
    """Skips the test that imports one of LARGE."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name in LARGE:
            pytest.skip(f"it imports {name}")


@pytest.fixture(scope="session", autouse=True)
def quick(pytestconfig):
    """With --quick, skips a test when it starts a process, directly or through a fixture, or when
    it imports what takes seconds: torch's compiler, transformers, SageMaker's SDK.

    The one job of `finished` is made, since so many tests look at it.
    """
    start, end = subprocess.Popen.__init__, subprocess.Popen.__del__

    def skip(*_: Any) -> None:
        pytest.skip("it starts a process")

    def skip_or_start(process: Any, *arguments: Any, **options: Any) -> None:
        if not making_finished:
            skip()
        start(process, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("--quick"):
            patch.setattr("os.fork", skip)
            patch.setattr("os.forkpty", skip)
            patch.setattr("subprocess.Popen.__init__", skip_or_start)
            patch.setattr(
                "subprocess.Popen.__del__", lambda self: hasattr(self, "returncode") and end(self)
            )
            patch.setattr("sys.meta_path", [LargeImports, *sys.meta_path])
        yield


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, whatever handler an earlier test or library has left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def torch_for_the_next_test():
    """A test may leave more threads. The compiler counts how often it compiled a function, and
    refuses the ninth time."""
    yield
    torch.set_num_threads(1)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def text():
    """Real English of several hundred thousand characters, which every CPython carries.

    Its last lines hold what a plain text seldom has: tabs, accents and emoji.
    """
    from pydoc_data.topics import topics

    strange = "naïve café\t– “quoted” …\n\tЖук 漢字 🙂🚀👩‍🚀\n"
    return "\n".join(topics[name] for name in sorted(topics)) + "\n" + strange * 20


@pytest.fixture(scope="session")
def text_file(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="session")
def short_text_file(text, tmp_path_factory):
    """A twentieth of it, for tests in whose rule the length of a text has no part."""
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text(text[: len(text) // 20], encoding="utf-8", newline="")
    return path


@pytest.fixture
def environment(tmp_path, short_text_file, monkeypatch):
    """Variables for a shell: an empty home, and no settings from outside."""
    for name in list(os.environ):
        if name.startswith(("SM_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MAX_STEPS", "20")
    monkeypatch.setenv("TEXT", str(short_text_file))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the cores are those of other tests too
    (tmp_path / "home").mkdir()
    return dict(os.environ)


# ------------------------------------------------------------------------------------------------
# The launcher


@pytest.fixture
def home(tmp_path, monkeypatch, pytestconfig):
    """An empty home for the launcher, in this process too; jobs that are left are killed."""
    path = tmp_path / "home"
    for name in list(os.environ):
        if name.startswith(("SM_NANOGPT_", "AWS_")):
            monkeypatch.delenv(name)
    for name, value in launching.environment(path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sm_nanogpt.launcher.local.backend.subprocess", warm.replacing(warm.Process)
    )
    yield path
    if (path / "jobs").exists() and not pytestconfig.getoption("--quick"):
        launching.kill_below(path)


@pytest.fixture
def cli(home, capsys):
    """sm-nanogpt in this process: quick, for what needs no process of its own."""
    from sm_nanogpt.launcher.cli import run

    def call(*arguments: launching.Argument) -> launching.Ran:
        capsys.readouterr()
        code = run(launching.arguments_of(arguments))
        return launching.Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory, text_file):
    """A job of one process that ended well. It is shared: look, but change nothing."""

    def build(directory: Path) -> tuple[Path, str]:
        home = directory / "home"
        making_finished.append(home)
        ran = launching.command(launching.launching(data=text_file), home=home)
        making_finished.clear()
        assert ran.code == 0, ran.err
        (directory / "launched.json").write_text(json.dumps([ran.code, ran.out, ran.err]))
        return home, ran.out.strip()

    home, job_id = launching.once(tmp_path_factory, "finished", build)
    return launching.Finished(Path(home), job_id)


@pytest.fixture
def job(finished, home):
    """A copy of the finished job in this test's own home."""
    copy = launching.Finished(home, finished.job_id)
    shutil.copytree(finished.directory, copy.directory)
    return copy


@pytest.fixture(scope="session")
def tuned(tmp_path_factory, text_file):
    """A job that has learned from conversations, and its data set; look, but change nothing."""

    def build(directory: Path) -> list[str | Path]:
        home, messages = directory / "home", ""

        def command(*arguments: launching.Argument) -> str:
            ran = launching.command(arguments, home=home)
            assert ran.code == 0, ran.err
            nonlocal messages
            messages = ran.err
            return ran.out.strip()

        command("upload-data", text_file, "--tokenizer", "bpe", "--vocab-size", "300")
        base = command(launching.launching(block_size=128))
        data = command("upload-data", write_chats(directory / "chats.jsonl"), "--tokenizer", base)
        assert f"sm-nanogpt launch --instance local --init-from {base}" in messages
        steps = launching.sets(max_steps=60, eval_interval=30, batch_size=12, device="cpu")
        job_id = command("launch", "--instance", "local", "--init-from", base, steps)
        assert f"next: sm-nanogpt chat {job_id}\n" in messages
        return [home, base, job_id, data.removeprefix("file://")]

    home, base, job_id, data = launching.once(tmp_path_factory, "tuned", build)
    base_job = launching.Finished(Path(home), base)
    return base_job, launching.Finished(Path(home), job_id), Path(data)


@pytest.fixture(scope="session")
def directory(tuned):
    _, job, _ = tuned
    return job.directory / "hosts/algo-1/model"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout, made of a copy: building leaves files beside its sources, and
    takes those that it finds there."""

    def build(directory: Path) -> tuple[Path]:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, directory)
        for name in ("launcher", "entry_point", "infra", "sm_nanogpt"):
            shutil.copytree(ROOT / name, directory / name)
        launching.pip(sys.executable, "wheel", "--no-deps", "-w", directory / "dist", directory)
        (built,) = (directory / "dist").glob("*.whl")
        return (built,)

    (path,) = launching.once(tmp_path_factory, "wheel", build)
    return Path(path)


# ------------------------------------------------------------------------------------------------
# AWS on loopback


@pytest.fixture(scope="session")
def emulator(pytestconfig):
    """AWS on loopback; shared, so that what a test puts there has names of its own."""
    if pytestconfig.getoption("--quick"):
        pytest.skip("it starts a server")
    from emulator import ROLE_ACTIONS, make_role, serving
    from sagemaker_service import SageMaker, scripted

    with serving(SageMaker(scripted)) as emulator:
        make_role(emulator.url, "training", *ROLE_ACTIONS)
        yield emulator


@pytest.fixture
def s3(emulator, home, monkeypatch, request):
    """A client of its S3, with a bucket of this test's own under `s3.bucket`."""
    import boto3
    from s3fs import S3FileSystem
    from sagemaker_service import SageMaker, scripted

    for name, value in {
        "AWS_ENDPOINT_URL": emulator.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.caller.known_callers", {})
    emulator.reset(SageMaker(scripted))
    client = boto3.client("s3")
    client.bucket = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    client.create_bucket(Bucket=client.bucket)
    monkeypatch.setenv("SM_NANOGPT_STORE", f"s3://{client.bucket}/some/prefix")
    S3FileSystem.clear_instance_cache()
    yield client
    for job in emulator.sagemaker.jobs.values():
        job.stop()
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def money(s3, emulator, monkeypatch):
    """AWS's price list and quotas beside that S3, on a day that no midnight ends."""
    from money_service import TODAY

    monkeypatch.setattr(
        "sm_nanogpt.launcher.sagemaker.cost.date", SimpleNamespace(today=lambda: TODAY)
    )
    return emulator.money


@pytest.fixture
def cloud(emulator, s3, monkeypatch):
    """SageMaker beside that S3, whose jobs only seem to run, and a person who may use both."""
    monkeypatch.setenv("SM_NANOGPT_ROLE", "arn:aws:iam::123456789012:role/training")
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "inf")  # the tests have no terminal
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.backend.SageMakerBackend.poll_seconds", 0.1)
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.backend.QUIET_SECONDS", 1.0)
    # Half a second for each launch; test_estimator.py compares the SDK's requests with ours.
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    return emulator


@pytest.fixture
def submit(cloud, cli, short_text_file):
    """Launches a job on SageMaker, whose script fails for a reason or writes a log."""

    def launch(*arguments: launching.Argument, **script: Any) -> launching.Ran:
        cloud.sagemaker.next_script = script
        ran = cli("launch", "--instance", "ml.g5.12xlarge", "--data", short_text_file, arguments)
        assert ran.code == 0, ran.err
        return ran

    return launch


@pytest.fixture
def launch(submit):
    """Launches such a job, and returns its id."""
    return lambda *arguments, **script: submit(arguments, **script).out.strip()
