"""A third backend is a class in one file, and a row of the table: all commands work with it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm_nanogpt.launcher import backends
from sm_nanogpt.launcher.aws import Unreachable
from sm_nanogpt.launcher.backends import Backend
from sm_nanogpt.launcher.curve import Row
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.job import COMMON_FIELDS, Request, TrainingJob
from sm_nanogpt.launcher.settings import Settings


class ElsewhereBackend(Backend):
    """Keeps jobs on a directory that stands for a host, which somebody else runs.

    HOME/elsewhere/JOB-ID has job.json, status, and what the job has left: job.log, model.tar.gz.
    """

    title = "the host elsewhere"
    location = "elsewhere"
    is_remote = False
    bills = False
    sends_request = False
    stops_at_ctrl_c = False
    saves_when_stopped = False
    shares_cores = False
    logs_more_than_script = False
    poll_seconds = 0.01

    def directory(self, job_id: str) -> Path:
        return self.settings.home / "elsewhere" / job_id

    @classmethod
    def why_not_configured(cls, settings: Settings) -> str:
        return ""

    @classmethod
    def takes_field(cls, name: str) -> bool:
        return name in COMMON_FIELDS

    @classmethod
    def check_fields(cls, request: Request) -> None:
        for name, value in request.explicit_fields().items():
            if not cls.takes_field(name):
                raise InputError("means nothing elsewhere", field=name, value=value)

    @classmethod
    def count_ranks(cls, request: Request) -> int:
        return 1

    @classmethod
    def has_gpus(cls, instance: str) -> bool:
        return False

    @classmethod
    def disk_of(cls, instance: str) -> Any:
        return "home"

    def launch_settings(self) -> Settings:
        return self.settings

    def check(self, job: TrainingJob) -> None:
        job.config()

    def price(self, job: TrainingJob, earlier: object) -> TrainingJob:
        return job

    def request(self, job_id: str, job: TrainingJob, placement: None) -> dict[str, Any]:
        return {}

    def submit(
        self, job_id: str, job: TrainingJob, placement: None, request: Mapping[str, Any]
    ) -> None:
        directory = self.directory(job_id)
        directory.mkdir(parents=True)
        record = {
            "job": job.model_dump(mode="json", include=COMMON_FIELDS),
            "hyperparameters": job.all_hyperparameters(),
            "created": time.time(),
        }
        (directory / "job.json").write_text(json.dumps(record))
        (directory / "job.log").write_text("it trains elsewhere\n")
        (directory / "status").write_text("InProgress")

    def describe(self, job_id: str) -> JobDescription | None:
        directory = self.directory(job_id)
        if not (directory / "job.json").exists():
            return None
        record = json.loads((directory / "job.json").read_text())
        job, status = TrainingJob(**record["job"]), (directory / "status").read_text()
        model = directory / "model.tar.gz"
        return JobDescription(
            job_id,
            status,
            status,
            job.instance,
            job.instance_count,
            record["created"],
            job.data,
            hyperparameters=record["hyperparameters"],
            name=job.name,
            summary=job.summary,
            model_uri=storage.to_uri(model) if model.exists() else None,
        )

    def job(self, job_id: str) -> TrainingJob:
        return TrainingJob(**json.loads((self.directory(job_id) / "job.json").read_text())["job"])

    def list(self, everyone: bool = False, name: str | None = None) -> Iterator[JobDescription]:
        for path in sorted((self.settings.home / "elsewhere").glob("*"), reverse=True):
            job = self.describe(path.name)
            if job is not None and name in (None, job.name):
                yield job

    @classmethod
    def check_no_later(cls, job: JobDescription, settings: Settings, acts: bool) -> None:
        pass

    def stop(self, job_id: str) -> None:
        (self.directory(job_id) / "status").write_text("Stopped")

    def directories(self, job_id: str) -> Sequence[str]:
        return [storage.to_uri(self.directory(job_id))]

    def forget(self, job_id: str) -> None:
        pass

    def curve(self, job_id: str) -> tuple[Sequence[Row], str]:
        return [], "elsewhere"

    def logs(
        self, job_id: str, follow: bool, raw: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        yield from (self.directory(job_id) / "job.log").read_text().splitlines()


@pytest.fixture
def elsewhere(home, monkeypatch):
    """The third backend, in the table of all; its class finds the jobs of this test's home."""
    table = {"elsewhere": f"{__name__}.ElsewhereBackend", **backends.BACKENDS}
    monkeypatch.setattr(backends, "BACKENDS", table)
    return ElsewhereBackend(Settings(home=home))


@pytest.fixture
def job_id(elsewhere, cli, short_text_file):
    arguments = ("--name", "afar", "--set", "max_steps=10", "--data", str(short_text_file))
    return cli("launch", "--instance", "elsewhere", *arguments).good.out.strip()


def test_a_third_backend_needs_its_file_and_a_row_alone(job_id, elsewhere, cli):
    """Launch, list, show and follow a job, and stop it."""
    [listed] = json.loads(cli("jobs", "--json").good.out)
    assert listed["job_id"] == job_id
    assert listed["instance"] == "elsewhere"
    shown = json.loads(cli("status", "afar", "--json").good.out)
    assert shown["job_id"] == job_id
    assert shown["status"] == "InProgress"
    assert cli("logs", "afar").good.out == "it trains elsewhere\n"
    assert "stopping" in cli("stop", "afar").good.err
    assert elsewhere.describe(job_id).status == "Stopped"
    assert cli("delete", job_id, "--yes").good
    assert elsewhere.describe(job_id) is None


def test_a_model_of_a_third_backend_is_fetched(job_id, elsewhere, cli, job):
    archive = elsewhere.directory(job_id) / "model.tar.gz"
    shutil.copy(job.directory / "output" / "model.tar.gz", archive)
    (archive.parent / "status").write_text("Completed")
    arguments = ("--max-new-tokens", "5", "--seed", "1")
    assert cli("fetch-and-sample", job_id, *arguments).good.out


def test_a_sweep_runs_on_a_third_backend(elsewhere, cli, short_text_file, monkeypatch):
    """The loop of groups asks the table alone."""
    describe = ElsewhereBackend.describe

    def ended(backend: ElsewhereBackend, job_id: str) -> JobDescription | None:
        job = describe(backend, job_id)
        return job and replace(job, status="Completed", metrics={"best_loss": 2.0})

    monkeypatch.setattr(ElsewhereBackend, "describe", ended)
    arguments = ("--data", str(short_text_file), "--set", "max_steps=10", "--seeds", "2")
    ran = cli("launch", "--instance", "elsewhere", *arguments)
    assert "1     2.0000" in ran.good.err
    assert len(json.loads(cli("jobs", "--group", ran.out.strip(), "--json").good.out)) == 2


def test_a_field_that_a_third_backend_lacks_is_refused(elsewhere, cli, short_text_file):
    arguments = ("--instance", "elsewhere", "--data", str(short_text_file), "--spot")
    assert cli("launch", *arguments).failed(2, "means nothing elsewhere")


def test_a_search_is_refused_where_it_has_no_runs(elsewhere, cli, home, short_text_file):
    arguments = ("--instance", "elsewhere", "--text", str(short_text_file), "--preset", "quick")
    assert cli("try", "start", "plays", *arguments).failed(2, "no runs on the host elsewhere")
    assert not (home / "tries" / "plays").exists()


def test_an_outage_speaks_of_bills_where_there_are_some(job_id, cli, monkeypatch):
    describe = ElsewhereBackend.describe
    states = iter([describe])

    def lost(backend: ElsewhereBackend, job_id: str) -> JobDescription | None:
        for state in states:
            return state(backend, job_id)
        raise Unreachable("no answer")

    monkeypatch.setattr(ElsewhereBackend, "is_remote", True)
    monkeypatch.setattr(ElsewhereBackend, "describe", lost)
    monkeypatch.setattr("sm_nanogpt.launcher.aws.PATIENCE_SECONDS", 0.0)
    ran = cli("wait", job_id)
    assert ran.failed(1, "no answer; a running job continues")
    assert "billed" not in ran.err
