"""Make the runs of a search as jobs on SageMaker, which never cost more than the search's ceiling.

All runs of a stage are one job, since each start of a job takes minutes. The ledger reserves what a
job may cost before anything is sent, and later replaces that by what AWS billed. If the command of
a job was killed, the next command finds the job by its reservation.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_nanogpt.entry_point.files import read_json
from sm_nanogpt.launcher.aws import OverQuota
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError, LauncherError, ServiceError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.files.documents import Document
from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.files.scratch import scratch
from sm_nanogpt.launcher.groups.money import cost_so_far
from sm_nanogpt.launcher.groups.run import GroupRun
from sm_nanogpt.launcher.instances import count_gpus
from sm_nanogpt.launcher.job import DEFAULT_RUN_SECONDS, SEARCH_VARIABLE, Request
from sm_nanogpt.launcher.launching import launch
from sm_nanogpt.launcher.launching.launch import Plan
from sm_nanogpt.launcher.local import confine, syscalls
from sm_nanogpt.launcher.models import fetch
from sm_nanogpt.launcher.sagemaker.backend import SageMakerBackend
from sm_nanogpt.launcher.sagemaker.cost import OVERHEAD_SECONDS, longest_run, usd
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text import corpus
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.reading import files_in
from sm_nanogpt.launcher.trying import driver
from sm_nanogpt.launcher.trying.budget import MAX_SIZE_RATIO
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.runs import SeededRun, TriedRun

if TYPE_CHECKING:
    from sm_nanogpt.launcher.trying.search import Search

logger = logging.getLogger(__name__)

MAX_UNKNOWN_SECONDS = 3600  # a job that AWS does not know for so long was never sent
# Seconds that a job's time limit has besides those of its runs.
SLACK_SECONDS = 300  # for runs that are slower than expected
SETUP_SECONDS = 120  # before and after the runs
TIME_FACTOR = 2  # the time limit of a job over the expected time of its runs
UPLOAD_BYTES_PER_SECOND = 30e6
ONLY_JOB = 1  # the number of the one job of a stage, as GroupRun counts jobs
MAX_MODEL_BYTES = 1 << 36  # bytes of a model that may be packed, before one was measured
DRIVER = Path(driver.__file__)
# The filter of system calls. The driver loads it without the launcher.
FILTER_FILES = {"syscalls.py": Path(syscalls.__file__), "pyseccomp.py": syscalls.binding()}


class DriverFacts(Document):
    """What the driver writes about a run: its seconds, and why it left no model, or ''."""

    seconds: float
    problem: str


@dataclass(frozen=True)
class JobRun:
    """A run of a job that has ended, and the directory with the model and the facts of the run.

    facts is None if the job ended before the run was made.
    """

    run: SeededRun
    directory: Path
    facts: DriverFacts | None

    @property
    def has_failed(self) -> bool:
        return self.facts is None or bool(self.facts.problem)

    def finish(self) -> TriedRun:
        """Unpack the model of the run. A damaged archive is the `problem` of the result."""
        if self.facts is None:
            return TriedRun(self.run, self.directory, 0.0, "the job ended before it was made")
        unpacked = self.directory / "unpacked"
        problem = self.facts.problem
        if not problem:
            try:
                fetch.extract(self.directory / "model.tar.gz", unpacked, "its model")
            except ServiceError as error:
                problem = str(error)
        return TriedRun(self.run, unpacked / "model", self.facts.seconds, problem)


class SageMakerRuns(GroupRun):
    """Makes the runs of a stage of a search as one job on SageMaker.

    Other commands may make runs of the search at the same time, by the same ledger.
    """

    makes_jobs = True
    at_once = 1  # runs are judged one by one when the job has ended
    ledger: SearchLedger

    def __init__(self, search: Search) -> None:
        backend = SageMakerBackend(search.settings)
        super().__init__(search.name, search.ledger, backend, search.settings, parallel=1)
        self.search = search
        self.instance = search.start["instance"]
        self.account = f"{backend.account.caller().account} {backend.account.region}"
        self.stage: Sequence[SeededRun] = []

    def train(self, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        """Make these runs, and yield each.

        Runs of the base come first, since all others are compared with them. Runs that failed come
        last. Raises OverCeiling if the job may cost more than is left, and ServiceError if the job
        fails.
        """
        if not runs:
            return
        self.begin_stage(runs)
        description = self.end_stage()
        entry = self.ledger.reservation_of(description.job_id)
        if description.model_uri is None:
            reason = description.failure_reason or "it left no models"
            raise ServiceError(f"job {entry['job']} is {description.status}: {reason}")
        with scratch(self.search.directory, ".job-") as directory:
            job_runs = self.read_runs(entry, runs, description.model_uri, directory)
            for job_run in sorted(job_runs, key=self.sort_key):
                tried = job_run.finish()
                if tried.problem:  # a later command makes this run again
                    self.note_failure(entry["job"], tried)
                if job_run.facts is not None:
                    yield tried
                shutil.rmtree(job_run.directory, ignore_errors=True)
            if any(job_run.facts is None for job_run in job_runs):
                raise ServiceError(f"job {entry['job']} ended before all runs were made; try again")

    def read_runs(
        self, entry: Entry, runs: Sequence[SeededRun], uri: str, directory: Path
    ) -> list[JobRun]:
        """Fetch the archive of a job's models from a URI, and read what these runs left in it."""
        [archive] = storage.fetch(uri, directory / "tar", settings=self.settings)
        fetch.extract(archive, directory / "runs", uri)
        job_runs = []
        for run in runs:
            index = entry["runs"].index(list(run.key))
            run_directory = directory / "runs" / f"run-{index}"
            facts = storage.read_document(str(run_directory / "facts.json"), DriverFacts)
            job_runs.append(JobRun(run, run_directory, facts))
        return job_runs

    def sort_key(self, job_run: JobRun) -> tuple[bool, bool]:
        """The key to sort runs by: runs of the base come first, and runs that failed last."""
        is_of_base = job_run.run.source.sha256 == self.ledger.base
        return job_run.has_failed, not is_of_base

    def note_failure(self, job_id: str, tried: TriedRun) -> None:
        folder, seed = tried.run.key
        self.ledger.add("failed", job=job_id, folder=folder, seed=seed, why=tried.problem)

    # -- money ------------------------------------------------------------------------------------

    def cost_of(self, entry: Entry) -> float | None:
        if entry["place"] != self.account:  # the job is in an account that is not asked now
            return None
        job_id = entry["job"]
        is_sending = self.is_sending()  # read before AWS is asked: a sender may end in between
        description = self.describe(job_id)
        if description is not None:
            return None if description.is_running else cost_so_far(description, self.settings)
        if self.ledger.was_sent(job_id):
            return float(entry["usd"])  # the job was deleted, and what it cost is unknown
        if is_sending or self.seconds_since(job_id) <= MAX_UNKNOWN_SECONDS:
            return None
        return 0.0

    def seconds_since(self, job_id: str) -> float:
        """The seconds since the last entry about a job."""
        times = [entry["at"] for entry in self.ledger.entries if entry.get("job") == job_id]
        return time.time() - max(times)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Hold the lock of a sender, from the reservation of a job until AWS has answered."""
        with (self.search.directory / "sending").open("w") as file:
            locks.lock(file, shared=True)
            yield

    def is_sending(self) -> bool:
        """True if a command, which may have slept for hours, is about to send a job."""
        with (self.search.directory / "sending").open("w") as file:
            return not locks.lock(file, wait=False)

    # -- a job ------------------------------------------------------------------------------------

    def find_sent_job(self, runs: Sequence[SeededRun]) -> str:
        """The id of a job that a killed command sent for these runs; '' if there is none.

        The job runs, or has ended and left models.
        """
        keys = {run.key for run in runs}
        for entry in reversed(self.ledger.of("reserved")):
            if entry["place"] != self.account or not keys <= self.keys_without_failed(entry):
                continue
            job_id: str = entry["job"]
            description = self.describe(job_id)
            if description and (description.is_running or description.model_uri):
                logger.info(f"job {job_id} was sent before for these runs")
                return job_id
        return ""

    def keys_without_failed(self, entry: Entry) -> set[tuple[str, int]]:
        """The runs of a job that did not fail, as pairs of folder and seed."""
        keys = {(folder, seed) for folder, seed in entry["runs"]}
        for failure in self.ledger.of("failed"):
            if failure["job"] == entry["job"]:
                keys.discard((failure["folder"], failure["seed"]))
        return keys

    def begin_stage(self, runs: Sequence[SeededRun]) -> None:
        """Find the job that was sent for these runs before, or plan a new one."""
        sent_job_id = self.find_sent_job(runs)
        if sent_job_id:
            self.running[ONLY_JOB] = sent_job_id
            return
        self.ledger.settle_all(self.cost_of)
        job_id = launch.new_job_id()
        # The driver deals runs to GPUs in this order: each GPU makes runs of the base first, and
        # both runs of a seed.
        base = self.ledger.base
        self.stage = sorted(runs, key=lambda run: run.source.sha256 != base)
        if self.first_run is None:
            self.waiting[ONLY_JOB] = self.plan_first_job(job_id, self.stage)
        else:
            seconds = self.seconds_for(len(runs))
            self.waiting[ONLY_JOB] = self.plan_job(job_id, self.stage, seconds, self.settings)

    def end_stage(self) -> JobDescription:
        """Wait for the job; return its state at its end.

        Raises OverCeiling, and ServiceError if the job was deleted.
        """
        for event in self.events():
            if isinstance(event.obstacle, OverQuota):
                logger.info(f"job {event.job_id} waits: {event.obstacle}")
            elif event.obstacle is not None:
                raise event.obstacle
            elif event.description is not None:
                return event.description
        raise ServiceError(f"the job of search {self.name} was deleted; try again")

    def start(self, number: int, plan: Plan) -> None:
        with self.sending():
            super().start(number, plan)

    def reserve(self, number: int, plan: Plan) -> None:
        cost = cost_of_plan(plan)
        keys = [list(run.key) for run in self.stage]
        self.ledger.reserve(plan.job_id, cost, place=self.account, runs=keys)
        logger.info(f"job {plan.job_id}: {len(keys)} runs, at most {usd(cost)}")

    def send(self, plan: Plan) -> None:
        plan.upload()  # may take long
        self.ledger.add("sending", job=plan.job_id)
        try:  # not plan.submit, which keeps the folder: this one trains no model
            plan.backend.submit(plan.job_id, plan.job, plan.placement, plan.request)
        except LauncherError as error:
            if error.code == "job-may-exist":  # it may still appear, for an hour from now
                self.ledger.add("sending", job=plan.job_id)
            raise

    def settle(self, job: JobDescription) -> None:
        self.ledger.settle_all(self.cost_of)

    def plan_first_job(self, job_id: str, runs: Sequence[SeededRun]) -> Plan:
        """Plan the first job of a search, whose runs may take any time.

        Its time limit is an hour, or less if the ceilings allow less.
        """
        limit = self.ledger.free
        if self.settings.max_cost is not None:  # the ceiling of each job
            limit = min(limit, self.settings.max_cost)
        unlimited = self.settings.model_copy(update={"max_cost": None})
        plan = self.plan_job(job_id, runs, DEFAULT_RUN_SECONDS, unlimited)
        cost = cost_of_plan(plan)
        if cost <= limit:
            return plan

        per_hour = cost * 3600 / (DEFAULT_RUN_SECONDS + OVERHEAD_SECONDS)
        affordable_seconds = longest_run(limit, per_hour, keep_alive=0)
        if affordable_seconds <= SETUP_SECONDS + SLACK_SECONDS:  # this call, or `reserve`, refuses
            return self.plan_job(job_id, runs, DEFAULT_RUN_SECONDS, self.settings)
        logger.info(f"the ceiling allows {affordable_seconds} s")
        return self.plan_job(job_id, runs, affordable_seconds, self.settings)

    def plan_job(
        self, job_id: str, runs: Sequence[SeededRun], seconds: int, settings: Settings
    ) -> Plan:
        """Plan the job of these runs, with a time limit of `seconds`. Nothing is sent.

        Raises CeilingTooLow if the job may cost more than the settings allow.
        """
        hyperparameters = dict(self.search.start["hyperparameters"])
        text = self.text_channel(self.backend.launch_settings())
        request = Request(
            name=f"try-{self.search.name}-{job_id[-6:]}",
            instance=self.instance,
            data=text.uri,
            preset=hyperparameters.pop("preset", None),
            hyperparameters=hyperparameters,
            max_run=seconds,
            environment={SEARCH_VARIABLE: self.search.name},
            network_isolation=True,
        )
        request._source = self.job_folder(runs, seconds)
        return launch.prepare(request, settings, job_id, {"data": text})

    @property
    def first_run(self) -> Entry | None:
        """The entry of the search's first run, with its seconds and bytes; None without runs."""
        return next(iter(self.ledger.of("run")), None)

    def describe(self, job_id: str) -> JobDescription | None:
        """Ask AWS about a job. If AWS knows it, the ledger notes that."""
        description = self.backend.describe(job_id)
        if description is not None:
            self.ledger.note_sent(job_id)
        return description

    def seconds_for(self, n_runs: int) -> int:
        """The time limit of a job of n_runs, in seconds.

        It is TIME_FACTOR times what they take by the runs of the first folder, with SLACK_SECONDS
        and the upload.
        """
        run_seconds = self.search.budget.first_seconds()
        n_rounds = math.ceil(n_runs / (count_gpus(self.instance) or 1))
        limit = TIME_FACTOR * run_seconds * n_rounds
        return math.ceil(limit + SLACK_SECONDS + self.upload_seconds(n_runs))

    def upload_seconds(self, n_runs: int) -> float:
        """The seconds in which the models of n_runs are packed and uploaded; 0 if unknown."""
        if self.first_run is None:
            return 0.0
        return float(n_runs * self.first_run["bytes"] / UPLOAD_BYTES_PER_SECOND)

    def job_folder(self, runs: Sequence[SeededRun], seconds: int) -> Source:
        """The training folder of a job that makes these runs, within `seconds`.

        It is the first folder of the search, with the driver as its train.py. The folders of the
        runs lie below it, and nothing of them is imported here.
        """
        first = self.search.first_folder
        largest_model = MAX_MODEL_BYTES
        if self.first_run is not None:
            largest_model = int(MAX_SIZE_RATIO * self.first_run["bytes"])
        document = {
            "runs": [[folder_name(run.source), run.seed] for run in runs],
            "values": self.search.hyperparameters,
            "seconds": seconds - SETUP_SECONDS - self.upload_seconds(len(runs)),
            "limit": min(seconds, self.search.budget.max_seconds()),
            "largest_model": largest_model,
            "variables": ["PATH", "LD_LIBRARY_PATH", *confine.variable_names()],
        }
        files = dict(first.files)
        files["train.py"] = DRIVER.read_bytes()
        files["plan.json"] = json.dumps(document).encode()
        for name, path in FILTER_FILES.items():
            files[name] = path.read_bytes()
        for run in runs:
            for name, content in run.source.files.items():
                files[f"{folder_name(run.source)}/{name}"] = content
        return Source(first.directory, files)

    def text_channel(self, settings: Settings) -> Channel:
        """The channel of the text that the runs read, which is uploaded once."""
        search = self.search
        files = files_in(search.text_directory)
        meta = read_json(search.text_directory / "meta.json")
        upload = corpus.upload_of(
            f"try-{search.name}",
            files,
            settings,
            vocabulary_size=len(search.judge.tokenizer),
            train_tokens=meta["train"]["shards"][0]["tokens"],
            val_tokens=meta["val"]["shards"][0]["tokens"],
        )
        return Channel(search.start["text"], upload.uri, upload, files)


def cost_of_plan(plan: Plan) -> float:
    """What a job may cost, in USD. Raises InputError if its price is unknown."""
    if plan.job.worst_cost is None:
        raise InputError(f"the price of {plan.job.instance} is unknown, so no ceiling can hold")
    return plan.job.worst_cost


def folder_name(source: Source) -> str:
    """The name of the directory that a run's training folder has in a job."""
    return f"folder-{source.sha256[:12]}"
