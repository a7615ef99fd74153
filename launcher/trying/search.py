"""A search for a better training folder: its texts, its base, and its verdicts on folders."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.files import read_json
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.files.progress import repeated, time_logged
from sm_nanogpt.launcher.groups.ledger import OverCeiling
from sm_nanogpt.launcher.local.runs import SILENT, Run, run_all
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.text.corpus import digest_of
from sm_nanogpt.launcher.text.reading import files_in
from sm_nanogpt.launcher.trying import rule
from sm_nanogpt.launcher.trying.budget import JUDGE_TIME_FIELD, Budget, sizes_of
from sm_nanogpt.launcher.trying.code import check_code
from sm_nanogpt.launcher.trying.comparison import SHARED_SEEDS, Comparison
from sm_nanogpt.launcher.trying.history import SearchLedger, search_names
from sm_nanogpt.launcher.trying.planned import planned_tokens
from sm_nanogpt.launcher.trying.progress import RunProgress
from sm_nanogpt.launcher.trying.refusal import Refused
from sm_nanogpt.launcher.trying.runs import RunMaker, SeededRun, TriedRun, run_maker_class
from sm_nanogpt.launcher.trying.scoring import Judge

logger = logging.getLogger(__name__)

SEARCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
BASE_SEEDS = 8  # number of runs that measure the base
CHECK_TIME_FACTOR = 10  # the time limit of a check of a folder, over that of a run
LOCK_FILE = "running"  # the file that a command locks while it uses a search
OTHER_WAS_KEPT = "another folder was kept meanwhile; change that one so, and try it again"
LUCKY_ORDER = "its losses hardly follow the seeds: a lucky order of its batches may gain as much"
SMALL_RUN = {
    "max_steps": 2,
    "warmup_steps": 0,  # may not be more than the steps
    "batch_size": 1,
    "eval_tokens": 4096,
    "device": "cpu",
}


class Search:
    """The search of this machine that has a name. It logs each step.

    Raises InputError if there is no such search, and ServiceError if its ledger or a text was
    changed.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.directory = directory_of(name, settings)
        self.ledger = SearchLedger(self.directory)
        if not self.ledger.entries:
            raise no_search_error(name, settings)
        self.start = self.ledger.start
        self.budget = Budget(self.ledger)
        self.text_directory = self.directory / "text"
        meta = read_json(self.text_directory / "meta.json")
        tokenizer = Tokenizer(
            read_json(self.text_directory / "tokenizer.json"), meta["end_of_text"]
        )
        self.judge = Judge(self.read_judged_text(), tokenizer, settings)

    def read_judged_text(self) -> bytes:
        path = self.directory / "judge.txt"
        content = storage.read_bytes(str(path), self.settings, 1 << 30) or b""
        if hashlib.sha256(content).hexdigest() != self.start["judge"]:
            raise ServiceError(f"{path} was changed after the search began")
        return content

    @property
    def makes_jobs(self) -> bool:
        """True if each call of `train` makes a job."""
        return run_maker_class(self.start["instance"]).makes_jobs

    @cached_property
    def run_maker(self) -> RunMaker:
        return run_maker_class(self.start["instance"])(self)

    def source(self, sha256: str) -> Source:
        """Read the training folder with this SHA-256, as it was tried."""
        source = Source.read(self.settings.home / "sources" / sha256)
        if source.sha256 != sha256:
            raise ServiceError(f"{source.directory} was changed after it was tried")
        return source

    @property
    def first_folder(self) -> Source:
        """The folder that the search began with."""
        return self.source(self.start["folder"])

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters of each run, without its seed. A run keeps only its model."""
        return {**self.start["hyperparameters"], **SILENT}

    def verify(self) -> None:
        """Raise ServiceError if a folder that was tried, or the text of the runs, was changed."""
        folders = {self.start["folder"]}
        folders.update(entry["folder"] for entry in self.ledger.of("try"))
        for sha256 in folders:
            self.source(sha256)
        if digest_of(files_in(self.text_directory)) != self.start["runs_read"]:
            raise ServiceError(f"{self.text_directory} was changed after the search began")

    @property
    def is_running(self) -> bool:
        """True if a command makes runs on this machine now."""
        return locks.is_locked(self.directory / LOCK_FILE)

    def settle(self) -> None:
        """Settle the reservations of jobs that have ended."""
        self.ledger.settle_all(self.run_maker.cost_of)

    # -- the base ---------------------------------------------------------------------------------

    def measure_base(self) -> Entry:
        """Measure the mean and the deviation of the first folder's loss; its runs are made once."""
        entries = self.ledger.of("base")
        if entries:
            return entries[0]
        first = self.first_folder
        seeds = self.ledger.seeds(SHARED_SEEDS, BASE_SEEDS)
        self.measure([SeededRun(first, seed) for seed in seeds], title="base")
        losses = self.ledger.losses_of(first.sha256, seeds)
        deviation = stdev(losses)
        pairs = rule.n_pairs_for(self.start["smallest_gain"], deviation)
        return self.ledger.add("base", loss=fmean(losses), sd=deviation, pairs=pairs)

    # -- runs and their losses --------------------------------------------------------------------

    def measure(
        self, runs: Sequence[SeededRun], title: str, comparison: Comparison | None = None
    ) -> None:
        """Make the runs that the ledger lacks, judge them, and add them to it.

        title: what the log calls the runs. comparison: the one that needs them; None for runs of
        the base alone. Raises Refused if a run of the candidate fails or uses more than it may, and
        ServiceError if a run of the base does.
        """
        losses = self.ledger.losses
        missing = [run for run in runs if run.key not in losses]
        for finished in self.train(missing, title):
            if comparison is not None and comparison.is_candidate(finished.run):
                bound = comparison.leak_check_bound(finished.run.seed)
                entry = self.judge_run(finished, bound)
            else:
                entry = self.judge_base_run(finished)
            self.ledger.add("run", **entry)

    def train(self, runs: Sequence[SeededRun], title: str) -> Iterator[TriedRun]:
        """Make runs, yield each, and log the time that passes and the time left."""
        progress = RunProgress(len(runs), self.run_maker.at_once, self.makes_jobs)
        if runs and not self.makes_jobs:  # a job is logged elsewhere, with its cost
            progress.begin(title)
        with nullcontext() if self.makes_jobs else repeated(progress.note_time):
            for finished in self.run_maker.train(runs):
                progress.note_made()
                yield finished
                progress.note_end()

    def judge_base_run(self, finished: TriedRun) -> Entry:
        try:
            return self.judge_run(finished, leak_check_bound=-math.inf)
        except Refused as refusal:
            raise ServiceError(f"the base does not train: {refusal}") from None

    def judge_run(self, finished: TriedRun, leak_check_bound: float) -> Entry:
        """Compute the loss of a run's model; return the entry of the run. Raises Refused."""
        if finished.problem:
            raise Refused(finished.problem)
        sizes = sizes_of(finished.model)
        self.budget.check_sizes(sizes)
        source = finished.run.source
        max_seconds = self.budget.max_seconds(JUDGE_TIME_FIELD)
        score = self.judge.score(finished.model, source, leak_check_bound, max_seconds)
        return {
            "folder": source.sha256,
            "seed": finished.run.seed,
            "seconds": round(finished.seconds, 2),
            "judge_seconds": round(score.seconds, 2),
            **sizes,
            "loss": score.loss,
        }

    # -- a try ------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, shared: bool) -> Iterator[None]:
        """Lock this search, and wait for commands that hold it.

        shared: other commands with shared=True may hold the search at the same time. Nobody can
        remove a search that is held.
        """
        path = self.directory / LOCK_FILE
        with storage.errors_about(str(path)):
            file = path.open("w")
        with file:
            if not locks.lock(file, wait=False, shared=shared):
                logger.info("another command uses this search; this one waits for it")
                locks.lock(file, shared=shared)
            self.ledger.read()
            yield

    def attempt(self, candidate: Source, note: str) -> Entry:
        """Judge a folder against the base, and add the verdict to the ledger."""
        with self.locked(shared=self.makes_jobs):
            return self.decide(candidate, note)

    def decide(self, candidate: Source, note: str) -> Entry:
        """Judge a folder, and return the entry of the verdict."""
        self.check_new(candidate)
        if self.ledger.is_often_killed(candidate.sha256):
            logger.info("its runs were killed again and again, so they begin anew")
            self.ledger.add("anew", folder=candidate.sha256)
        base = self.ledger.base
        cost_before = self.ledger.cost_of(candidate.sha256)
        with storage.errors_about(str(self.settings.home)):
            keep_source(candidate, self.settings)
        fields = self.verdict_on(candidate, self.source(base))
        cost = self.ledger.cost_of(candidate.sha256) - cost_before
        with self.ledger.locked():
            if fields["verdict"] == "kept" and self.ledger.base != base:
                fields |= {"verdict": "no better", "why": OTHER_WAS_KEPT}
            return self.ledger.write(
                "try",
                number=len(self.ledger.of("try")) + 1,
                folder=candidate.sha256,
                base=base,
                note=note,
                usd=round(cost, 4),
                **fields,
            )

    def check_new(self, candidate: Source) -> None:
        """Raise InputError if a folder was tried before, or is the first folder."""
        if candidate.sha256 == self.start["folder"]:
            raise InputError("the folder is the one that the search began with")
        for entry in self.ledger.of("try"):
            if entry["folder"] != candidate.sha256:
                continue
            if "final" in entry:
                problem = f"the folder was refused before, by try {entry['number']}"
                raise InputError(f"{problem}: {entry['why']}")
            still_counts = entry["verdict"] == "kept" or entry["base"] == self.ledger.base
            if "mean" in entry and still_counts:
                raise InputError(f"the folder was tried before: try {entry['number']}")

    def verdict_on(self, candidate: Source, base: Source) -> Entry:
        """Judge a folder; return fields of its entry: the verdict, and its reason or numbers."""
        try:
            max_pairs = self.measure_base()["pairs"]
            with time_logged("checking the folder"):
                self.check(candidate)
            return self.compare(candidate, base, max_pairs)
        except Refused as refusal:
            fields: Entry = {"verdict": "refused", "why": str(refusal)}
            if refusal.is_final:
                fields["final"] = True
            return fields
        except OverCeiling as error:
            return {"verdict": "ceiling", "why": str(error)}

    def check(self, candidate: Source) -> None:
        """Raise Refused if the code of a folder, or two small steps here, show a problem."""
        logger.info("checking the folder: its code, and two small steps")
        check_code(candidate, self.first_folder, self.judge.content)
        limit = CHECK_TIME_FACTOR * self.budget.max_seconds()
        tokens = planned_tokens(candidate, self.hyperparameters, self.text_directory, limit)
        self.budget.check_sizes({"tokens": tokens})
        small_run = Run(
            candidate,
            {**self.hyperparameters, **SMALL_RUN},
            self.text_directory,
            cores(),
            max_seconds=limit,
            is_isolated=True,
        )
        for _, ended in run_all([small_run], 1):
            if ended.problem:
                raise Refused(ended.problem)
            model = ended.directory / "model"
            self.budget.check_sizes(sizes_of(model))
            self.judge.score(model, candidate, leak_check_bound=math.inf)

    def compare(self, candidate: Source, base: Source, max_pairs: int) -> Entry:
        """Judge by pairs of runs: with seeds that all tries share, and then with fresh seeds.

        max_pairs: the limit of pairs with shared seeds, and of pairs with fresh seeds. Returns the
        fields of the entry of the verdict.
        """
        shared = Comparison(self, candidate, base)
        fresh = Comparison(
            self, candidate, base, purpose=f"{candidate.sha256} against {base.sha256}"
        )
        looks = [n for n in rule.LOOKS if n <= max_pairs]
        if self.makes_jobs:  # each look would be a job
            looks = looks[-1:]
        else:
            logger.info(shared.describe_course(looks))
        smallest_gain = self.start["smallest_gain"]
        decision = rule.decide(shared.differences, fresh.differences, looks, smallest_gain)
        fields = {
            **fresh.summary(decision.differences),
            "fresh": decision.are_fresh,
            "verdict": decision.verdict,
        }
        gain = -fmean(decision.differences)
        if decision.verdict == "kept" and fresh.may_be_luck(gain):
            fields |= {"verdict": "no better", "why": LUCKY_ORDER}
        return fields

    def gain(self, n_pairs: int) -> Entry:
        """Measure what all kept folders gain together, and add that to the ledger.

        n_pairs: pairs of runs with fresh seeds, one of rule.LOOKS. Raises InputError if nothing was
        kept yet.
        """
        with self.locked(shared=self.makes_jobs):
            first = self.first_folder
            last = self.source(self.ledger.base)
            if first.sha256 == last.sha256:
                raise InputError("nothing was kept yet")
            # These are other seeds than those by which the folders were kept.
            comparison = Comparison(self, last, first, purpose=f"gain of {last.sha256}")
            summary = comparison.summary(comparison.differences(n_pairs))
            return self.ledger.add("gain", folder=last.sha256, **summary)


def directory_of(name: str, settings: Settings) -> Path:
    if not SEARCH_NAME.fullmatch(name):
        problem = "must be at most 40 letters, digits, dots, dashes and underscores"
        raise InputError(f"the name {name!r} {problem}")
    return settings.home / "tries" / name


def no_search_error(name: str, settings: Settings) -> InputError:
    names = search_names(settings)
    others = f"there are {', '.join(names)}" if names else "there are none yet"
    return InputError(f"no search is named {name!r}; {others}", code="no-search")
