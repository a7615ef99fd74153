"""The runs of a search as jobs on SageMaker, which never cost more than its ceiling.

All runs of a stage are one job, since each start costs minutes. What a job may cost is reserved
in the ledger before anything is sent, and settled by what AWS billed. A job whose command was
killed is found again by its reservation.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entry_point.text import read_json
from launcher import machines, tracking
from launcher.aws import PATIENCE_SECONDS, OverQuota, QuotaWait
from launcher.errors import InputError, LauncherError, ServiceError
from launcher.files import locks, storage
from launcher.files.documents import Document
from launcher.files.scratch import scratch
from launcher.job import DEFAULT_RUN, SEARCH_VARIABLE, JobDescription, Request, UnreadableJob
from launcher.launching import draft, launch
from launcher.local.runs import SILENT
from launcher.models import fetch
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.cost import AROUND_SECONDS, usd
from launcher.settings import Settings
from launcher.source import Source
from launcher.text import corpus
from launcher.text.channels import Channel
from launcher.text.formats import File
from launcher.trying import driver
from launcher.trying.here import MOST_SIZE, Made
from launcher.trying.ledger import Entry

if TYPE_CHECKING:
    from launcher.trying.search import Search

UNKNOWN_SECONDS = 3600  # after which a job that AWS does not know will never be there
# Seconds of a job's time limit besides its runs: for what may go slower, and before and after them.
MARGIN, AROUND = 300, 120
NEWEST = 100  # jobs among which one is looked for that holds the quota
UPLOADED = 30e6  # bytes of models in a second
LARGEST = 1 << 36  # bytes of a model
DRIVER = Path(driver.__file__)

RunOf = tuple[Source, int]  # a folder and a seed


class Facts(Document):
    """What the driver wrote about a run: its seconds, and why it left no model."""

    seconds: float
    problem: str


UNMADE = Facts(seconds=0.0, problem="the job ended before it was made")


class OnSageMaker:
    """Makes the runs of a stage as one job on SageMaker."""

    def __init__(self, search: Search) -> None:
        self.search, self.ledger, self.settings = search, search.ledger, search.settings
        self.backend = SageMakerBackend(self.settings)
        self.place = f"{self.backend.caller().account} {self.backend.region}"

    def made(self, runs: Sequence[RunOf]) -> Iterator[Made]:
        """Each run: those of the base first, which others need too, and those that failed last.

        Raises OverCeiling if the job may cost more than is left, and ServiceError if it fails.
        """
        if not runs:
            return
        entry = self.known(runs) or self.send(runs)
        description = tracking.wait(entry["job"], self.settings)
        self.ledger.settle(self.cost_of)
        if description.model_uri is None:
            why = description.failure_reason or "it left no models"
            raise ServiceError(f"job {entry['job']} is {description.status}: {why}")
        uri = description.model_uri
        with scratch(self.search.directory, ".job-") as directory:
            (archive,) = storage.fetch(uri, directory / "tar", settings=self.settings)
            fetch.extract(archive, directory / "runs", uri)
            found, base = [], self.ledger.base
            for run in runs:
                place = directory / "runs" / f"run-{entry['runs'].index(key_of(run))}"
                facts = storage.read_document(str(place / "facts.json"), Facts) or UNMADE
                found.append((facts, run, place))
            found.sort(key=lambda each: (bool(each[0].problem), each[1][0].sha256 != base))
            for facts, (source, seed), place in found:
                if not (problem := facts.problem):
                    try:
                        fetch.extract(place / "model.tar.gz", place / "unpacked", "its model")
                    except ServiceError as error:
                        problem = str(error)
                if problem:  # it can be made anew
                    key = {"folder": source.sha256, "seed": seed}
                    self.ledger.add("failed", job=entry["job"], **key, why=problem)
                if facts is not UNMADE:
                    yield Made(source, seed, place / "unpacked" / "model", facts.seconds, problem)
                shutil.rmtree(place, ignore_errors=True)
            if any(facts is UNMADE for facts, *_ in found):
                raise ServiceError(f"job {entry['job']} ended before all runs were made; try again")

    # -- money ------------------------------------------------------------------------------------

    def cost_of(self, entry: Entry) -> float | None:
        """What the job of a reservation has cost; None while that is not known."""
        if entry["place"] != self.place:  # nobody there can be asked
            return None
        sending = self.is_sending()  # before AWS is asked, or it could wake in between
        description = self.describe(entry["job"])
        if description is None:
            if self.is_sent(entry["job"]):
                return float(entry["usd"])  # it was deleted, and with it what it cost
            last = max(e["at"] for e in self.ledger.entries if e.get("job") == entry["job"])
            old = time.time() - last > UNKNOWN_SECONDS
            return 0.0 if old and not sending else None
        if description.is_running:
            return None
        return tracking.with_costs([description], self.settings)[0].cost

    @contextmanager
    def sending(self) -> Iterator[None]:
        """From the reservation of a job until AWS has answered."""
        with (self.search.directory / "sending").open("w") as file:
            locks.lock(file, shared=True)
            yield

    def is_sending(self) -> bool:
        """Whether a command, which may have slept for hours, is about to send a job."""
        with (self.search.directory / "sending").open("w") as file:
            return not locks.lock(file, wait=False)

    # -- a job ------------------------------------------------------------------------------------

    def known(self, runs: Sequence[RunOf]) -> Entry | None:
        """The reservation of a job that has made these runs, or will: its command was killed."""
        failed = [(e["job"], [e["folder"], e["seed"]]) for e in self.ledger.of("failed")]
        for entry in reversed(self.ledger.of("reserved")):
            keys = [key for key in entry["runs"] if (entry["job"], key) not in failed]
            if entry["place"] == self.place and all(key_of(run) in keys for run in runs):
                description = self.describe(entry["job"])
                if description and (description.is_running or description.model_uri):
                    self.search.told(f"job {entry['job']} was sent before for these runs")
                    return entry
        return None

    def send(self, runs: Sequence[RunOf]) -> Entry:
        """Reserve what a job may cost, and start it."""
        self.ledger.settle(self.cost_of)
        search, job_id = self.search, launch.new_job_id()
        # In each GPU's share, the runs of the base come first, and a seed's two runs are in one.
        runs = sorted(runs, key=lambda run: run[0].sha256 != self.ledger.base)
        if self.measured:
            plan = self.planned(job_id, runs, self.seconds_for(len(runs)), self.settings)
        else:
            plan = self.first_plan(job_id, runs)
        cost, keys = cost_of_plan(plan), [key_of(run) for run in runs]
        with self.sending():
            entry = self.ledger.reserve(job_id, cost, place=self.place, runs=keys)
            search.told(f"job {job_id}: {len(runs)} runs, at most {usd(cost)}")
            try:
                plan.upload()  # which may take long
                self.ledger.add("sending", job=job_id)
                self.submit_within_quota(job_id, plan)
            except LauncherError as error:
                unclear = error.code == "job-may-exist"  # for an hour from now
                kind, facts = ("sending", {}) if unclear else ("settled", {"usd": 0.0})
                self.ledger.add(kind, job=job_id, **facts)
                raise
            self.ledger.add("sent", job=job_id)
        return entry

    def first_plan(self, job_id: str, runs: Sequence[RunOf]) -> launch.Plan:
        """A job of runs of which none was measured: an hour, or what the ceilings allow."""
        seconds, limit = DEFAULT_RUN, self.ledger.free
        if self.settings.max_cost is not None:  # of each job, from the settings
            limit = min(limit, self.settings.max_cost)
        unlimited = self.settings.model_copy(update={"max_cost": None})
        plan = self.planned(job_id, runs, seconds, unlimited)
        cost = cost_of_plan(plan)
        if cost <= limit:
            return plan
        affordable = math.floor(limit / cost * (seconds + AROUND_SECONDS)) - AROUND_SECONDS
        if affordable > AROUND + MARGIN:
            self.search.told(f"the ceiling allows {affordable} s")
            seconds = affordable
        return self.planned(job_id, runs, seconds, self.settings)

    def submit_within_quota(self, job_id: str, plan: launch.Plan) -> None:
        """Submit a job; if a quota refuses it, wait as long as jobs run that may make room."""
        quota_wait = QuotaWait()
        while True:
            try:
                plan.backend.submit(job_id, plan.job, plan.placement, plan.request)
                return
            except OverQuota as quota:
                if quota_wait.note_refusal(quota, self.others_run(plan.job.instance)):
                    self.search.told(f"job {job_id} waits: {quota}")
            quota_wait.sleep()

    def others_run(self, instance: str) -> bool:
        """True if a job of the caller on this instance type runs, or ended minutes ago: SageMaker
        may count a job for a while after its end."""
        for job in islice(self.backend.list(), NEWEST):
            if isinstance(job, UnreadableJob) or job.instance != instance:
                continue
            if job.is_running or time.time() < (job.ended or 0.0) + PATIENCE_SECONDS:
                return True
        return False

    def planned(
        self, job_id: str, runs: Sequence[RunOf], seconds: int, settings: Settings
    ) -> launch.Plan:
        """The job of these runs, with a time limit. Nothing is sent. Raises CeilingTooLow if it may
        cost more than a job may by the settings."""
        words = dict(self.search.start["words"])
        text = self.text(draft.cloud_settings(self.backend))
        request = Request(
            name=f"try-{self.search.name}-{job_id[-6:]}",
            instance=self.search.start["instance"],
            data=text.uri,
            preset=words.pop("preset", None),
            hyperparameters=words,
            max_run=seconds,
            environment={SEARCH_VARIABLE: self.search.name},
            network_isolation=True,
        )
        request._source = self.folder(runs, seconds)
        return launch.prepare(request, settings, job_id, {"data": text})

    @property
    def measured(self) -> Entry | None:
        """The first run, of which seconds and bytes are known."""
        return next(iter(self.ledger.of("run")), None)

    def is_sent(self, job_id: str) -> bool:
        return any(entry["job"] == job_id for entry in self.ledger.of("sent"))

    def describe(self, job_id: str) -> JobDescription | None:
        """What AWS says of a job. The ledger has then that AWS knew it."""
        description = self.backend.describe(job_id)
        if description is not None and not self.is_sent(job_id):
            self.ledger.add("sent", job=job_id)
        return description

    def seconds_for(self, n: int) -> int:
        """The time limit of a job of n runs: twice what they take, by those that were measured."""
        usual = self.search.seconds(self.search.start["folder"])
        at_once = machines.gpus_of(self.search.start["instance"]) or 1
        return math.ceil(MARGIN + 2 * usual * math.ceil(n / at_once) + self.after(n))

    def after(self, n: int) -> float:
        """Seconds that the models of n runs take to be packed and uploaded."""
        return n * self.measured["bytes"] / UPLOADED if self.measured else 0.0

    def folder(self, runs: Sequence[RunOf], seconds: int) -> Source:
        """The training folder of a job: that of the search's beginning, with the driver in place of
        its train.py, beside the folders of the runs, of which nothing is imported here."""
        first = self.search.source(self.search.start["folder"])
        plan = {
            "runs": [[name_of(source), seed] for source, seed in runs],
            "values": {**SILENT, **self.search.start["words"]},
            "seconds": seconds - AROUND - self.after(len(runs)),
            "limit": min(seconds, self.search.limit),
            "room": int(MOST_SIZE * self.measured["bytes"]) if self.measured else LARGEST,
        }
        files = {**first.files, "train.py": DRIVER.read_bytes()}
        files["plan.json"] = json.dumps(plan).encode()
        for source, _ in runs:
            files |= {f"{name_of(source)}/{name}": each for name, each in source.files.items()}
        return Source(first.directory, files)

    def text(self, settings: Settings) -> Channel:
        """The text that the runs read, to be uploaded once."""
        search, place = self.search, self.search.text
        files = [File(path.name, path) for path in sorted(place.iterdir())]
        meta = read_json(place / "meta.json")
        upload = corpus.upload_of(
            f"try-{search.name}",
            files,
            settings,
            vocabulary_size=len(search.tokenizer),
            train_tokens=meta["train"]["shards"][0]["tokens"],
            val_tokens=meta["val"]["shards"][0]["tokens"],
        )
        return Channel(search.start["text"], upload.uri, upload, files)


def cost_of_plan(plan: launch.Plan) -> float:
    """The USD that a job may cost. Raises InputError if its price is unknown."""
    if plan.job.worst_cost is None:
        raise InputError(f"the price of {plan.job.instance} is unknown, so no ceiling can hold")
    return plan.job.worst_cost


def key_of(run: RunOf) -> list[Any]:
    """A run as the ledger has it."""
    return [run[0].sha256, run[1]]


def name_of(source: Source) -> str:
    """The directory of a folder in a job."""
    return f"folder-{source.sha256[:12]}"
