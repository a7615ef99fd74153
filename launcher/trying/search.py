"""A search: its text, a part of which no run sees; its base; the verdicts on changed folders."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.files import read_json
from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.groups.ledger import OverCeiling
from sm_nanogpt.launcher.local.runs import SILENT, Run, run_all
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.text.corpus import digest_of
from sm_nanogpt.launcher.text.reading import files_in
from sm_nanogpt.launcher.trying import rule
from sm_nanogpt.launcher.trying.budget import CLEARLY_SLOW, JUDGE_TIME, MAX_TIME, Budget, sizes_of
from sm_nanogpt.launcher.trying.code import check_code
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.planned import planned_tokens
from sm_nanogpt.launcher.trying.progress import RunProgress
from sm_nanogpt.launcher.trying.refusal import Refused
from sm_nanogpt.launcher.trying.runs import RunMaker, SeededRun, TriedRun, trainer_class
from sm_nanogpt.launcher.trying.scoring import Judge

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
BASE_SEEDS = 8
HELD = "running"  # the file that a command locks while it uses a search
SHARED = "pairs of all tries"  # what seeds are drawn for
SMALL_RUN = {
    "max_steps": 2,
    "warmup_steps": 0,  # which may not be more than the steps
    "batch_size": 1,
    "eval_tokens": 4096,
    "device": "cpu",
}

Report = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """A folder that is tried, and the base beside it, on shared or on fresh seeds."""

    source: Source
    base: Source
    are_fresh: bool

    @property
    def kind(self) -> str:
        return "fresh" if self.are_fresh else "shared"

    def is_candidate(self, run: SeededRun) -> bool:
        """True if a run is of the folder that is tried, not of the base."""
        return run.source.sha256 == self.source.sha256

    def leak_check_bound(self, run: SeededRun, ledger: SearchLedger) -> float:
        """The loss below which a model of the folder is checked for looking ahead. Fresh seeds
        decide, so all of theirs are checked; on shared seeds, only models that beat the base."""
        if self.are_fresh:
            return math.inf
        return ledger.losses.get((self.base.sha256, run.seed), math.inf)


class Search:
    """A search of this machine, by its name. report gets a line for each step.

    Raises InputError if there is none, and ServiceError if its ledger or text was changed.
    """

    def __init__(self, name: str, settings: Settings, report: Report) -> None:
        self.name, self.settings, self.report = name, settings, report
        self.directory = directory_of(name, settings)
        self.ledger = SearchLedger(self.directory)
        if not self.ledger.entries:
            raise no_search(name, settings)
        self.start = self.ledger.start
        self.budget = Budget(self.ledger)
        self.text = self.directory / "text"
        meta = read_json(self.text / "meta.json")
        tokenizer = Tokenizer(read_json(self.text / "tokenizer.json"), meta["end_of_text"])
        self.judge = Judge(self.read_judged_text(), tokenizer, settings)

    def read_judged_text(self) -> bytes:
        path = self.directory / "judge.txt"
        content = storage.read_bytes(str(path), self.settings, 1 << 30) or b""
        if hashlib.sha256(content).hexdigest() != self.start["judge"]:
            raise ServiceError(f"{path} was changed after the search began")
        return content

    @property
    def makes_jobs(self) -> bool:
        return trainer_class(self.start["instance"]).makes_jobs

    @cached_property
    def trainer(self) -> RunMaker:
        return trainer_class(self.start["instance"])(self)

    def source(self, sha256: str) -> Source:
        """A folder as it was tried."""
        source = Source.read(self.settings.home / "sources" / sha256)
        if source.sha256 != sha256:
            raise ServiceError(f"{source.directory} was changed after it was tried")
        return source

    @property
    def first(self) -> Source:
        """The folder that the search began with."""
        return self.source(self.start["folder"])

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Those of each run but its seed: it keeps nothing but its model."""
        return {**self.start["hyperparameters"], **SILENT}

    def verify(self) -> None:
        """Raise ServiceError if a folder that was tried, or the text of the runs, was changed."""
        for sha256 in {entry["folder"] for entry in [self.start, *self.ledger.of("try")]}:
            self.source(sha256)
        if digest_of(files_in(self.text)) != self.start["runs_read"]:
            raise ServiceError(f"{self.text} was changed after the search began")

    @property
    def is_running(self) -> bool:
        """True if a command makes runs on this machine now."""
        return locks.is_locked(self.directory / HELD)

    def settle(self) -> None:
        """Replace what is reserved for jobs that have ended by what they cost."""
        self.ledger.settle_all(self.trainer.cost_of)

    # -- the base ---------------------------------------------------------------------------------

    def base(self) -> Entry:
        """What the first folder loses, and by how much that varies; its runs are made once."""
        entries = self.ledger.of("base")
        if entries:
            return entries[0]
        first = self.first
        seeds = self.ledger.seeds(SHARED, BASE_SEEDS)
        self.measure([SeededRun(first, seed) for seed in seeds], "base")
        losses = [self.ledger.losses[first.sha256, seed] for seed in seeds]
        pairs = rule.pairs_for(self.start["smallest_gain"], stdev(losses))
        return self.ledger.add("base", loss=fmean(losses), sd=stdev(losses), pairs=pairs)

    # -- runs and their losses --------------------------------------------------------------------

    def measure(
        self, runs: Sequence[SeededRun], purpose: str, comparison: Comparison | None = None
    ) -> None:
        """Make the runs that the ledger does not have, judge them, and add them.

        purpose is what a line of progress calls them. Raises Refused if a run of the folder that is
        tried fails or takes more than it may, and ServiceError if a run of the base does.
        """
        losses = self.ledger.losses
        missing = [run for run in runs if run.key not in losses]
        for finished in self.train(missing, purpose):
            if comparison is not None and comparison.is_candidate(finished.run):
                bound = comparison.leak_check_bound(finished.run, self.ledger)
                facts = self.judge_run(finished, bound)
            else:
                facts = self.judge_base_run(finished)
            self.ledger.add("run", **facts)

    def train(self, runs: Sequence[SeededRun], purpose: str) -> Iterator[TriedRun]:
        """Make runs, and report how far they are."""
        progress = RunProgress(len(runs), self.trainer.at_once, self.report)
        if runs and not self.makes_jobs:  # a job is reported with what it may cost
            progress.begin(purpose)
        for finished in self.trainer.train(runs):
            yield finished
            progress.note_end()

    def judge_base_run(self, finished: TriedRun) -> Entry:
        try:
            return self.judge_run(finished, leak_check_bound=-math.inf)
        except Refused as refusal:
            raise ServiceError(f"the base does not train: {refusal}") from None

    def judge_run(self, finished: TriedRun, leak_check_bound: float) -> Entry:
        """Compute the loss of a run's model. Returns what the ledger gets of the run. Raises
        Refused."""
        if finished.problem:
            raise Refused(finished.problem)
        sizes = sizes_of(finished.model)
        self.budget.check_sizes(sizes)
        source = finished.run.source
        score = self.judge.score(finished.model, source, leak_check_bound, self.budget.judge_limit)
        return {
            "folder": source.sha256,
            "seed": finished.run.seed,
            "seconds": round(finished.seconds, 2),
            "judge_seconds": round(score.seconds, 2),
            **sizes,
            "loss": score.loss,
        }

    def differences(self, comparison: Comparison, seeds: Sequence[int]) -> list[float]:
        """The loss of a folder less that of the base for each seed, after the runs for it."""
        source, base = comparison.source, comparison.base
        runs = [SeededRun(folder, seed) for seed in seeds for folder in (base, source)]
        pairs = f"{len(seeds)} pairs of {comparison.kind} seeds"
        self.measure(runs, pairs, comparison)
        losses = self.ledger.losses
        differences = [losses[source.sha256, seed] - losses[base.sha256, seed] for seed in seeds]
        gain = f"{fmean(differences):+.4f} ±{rule.margin(differences):.4f}"
        self.report(f"{pairs}: {gain}")
        self.check_losses(comparison, seeds)
        max_ratio = MAX_TIME if comparison.are_fresh else CLEARLY_SLOW
        self.budget.check_time(source.sha256, base.sha256, seeds, max_ratio)
        return differences

    def check_losses(self, comparison: Comparison, seeds: Sequence[int]) -> None:
        """Raise Refused if the runs of a folder are one run, or those of another folder."""
        losses = self.ledger.losses
        candidate = comparison.source.sha256
        losses_of_candidate = [losses[candidate, seed] for seed in seeds]
        if len(set(losses_of_candidate)) < len(seeds):
            raise Refused("different seeds give the same loss")
        for folder in {folder for folder, _ in losses} - {candidate}:
            if [losses.get((folder, seed)) for seed in seeds] == losses_of_candidate:
                name = f"folder {folder[:8]}, tried before"
                if folder == comparison.base.sha256:
                    name = "the base"
                raise Refused(f"its runs are those of {name}: the change changes nothing")

    # -- a try ------------------------------------------------------------------------------------

    @contextmanager
    def held(self, shared: bool) -> Iterator[None]:
        """Lock this search; waits for other commands. shared: others may hold it shared at the same
        time, but none may remove it."""
        path = self.directory / HELD
        with storage.errors_about(str(path)), path.open("w") as file:
            if not locks.lock(file, wait=False, shared=shared):
                self.report("another command uses this search; this one waits for it")
                locks.lock(file, shared=shared)
            self.ledger.read()
            yield

    def attempt(self, source: Source, note: str) -> Entry:
        """Judge a folder against the base, and add the verdict to the ledger."""
        with self.held(shared=self.makes_jobs):
            return self.decide(source, note)

    def decide(self, source: Source, note: str) -> Entry:
        """The verdict on a folder, as the ledger has it."""
        self.check_new(source)
        if self.ledger.is_often_killed(source.sha256):
            self.report("its runs were killed again and again, so they begin anew")
            self.ledger.add("anew", folder=source.sha256)
        base, cost_before = self.ledger.base, self.ledger.cost_of(source.sha256)
        with storage.errors_about(str(self.settings.home)):
            keep_source(source, self.settings)
        verdict = self.verdict_on(source, self.source(base))
        cost = round(self.ledger.cost_of(source.sha256) - cost_before, 4)
        facts = {"folder": source.sha256, "base": base, "note": note, "usd": cost, **verdict}
        with self.ledger.locked():
            if facts["verdict"] == "kept" and self.ledger.base != base:
                facts["verdict"] = "no better"
                facts["why"] = (
                    "another folder was kept meanwhile; change that one so, and try it again"
                )
            return self.ledger.write("try", number=1 + len(self.ledger.of("try")), **facts)

    def check_new(self, source: Source) -> None:
        """Raise InputError for a folder that was tried before, or is the first: it is no try."""
        if source.sha256 == self.start["folder"]:
            raise InputError("the folder is the one that the search began with")
        for entry in self.ledger.of("try"):
            if entry["folder"] == source.sha256 and "final" in entry:
                problem = f"the folder was refused before, by try {entry['number']}"
                raise InputError(f"{problem}: {entry['why']}")
            counts = entry["verdict"] == "kept" or entry["base"] == self.ledger.base
            if entry["folder"] == source.sha256 and "mean" in entry and counts:
                raise InputError(f"the folder was tried before: try {entry['number']}")

    def verdict_on(self, source: Source, base: Source) -> Entry:
        """The verdict on a folder, with its reason or its numbers."""
        try:
            max_pairs = self.base()["pairs"]
            self.check(source)
            return self.compare(source, base, max_pairs)
        except Refused as refusal:
            verdict = {"verdict": "refused", "why": str(refusal)}
            return {**verdict, "final": True} if refusal.is_final else verdict
        except OverCeiling as error:
            return {"verdict": "ceiling", "why": str(error)}

    def check(self, source: Source) -> None:
        """Raise Refused for what two small steps on this machine show. They cost nothing."""
        self.report("checking the folder: its code, and two small steps")
        check_code(source, self.first, self.judge.content)
        limit = 10 * self.budget.limit
        tokens = planned_tokens(source, self.hyperparameters, self.text, limit)
        self.budget.check_sizes({"tokens": tokens})
        small_run = Run(
            source,
            {**self.hyperparameters, **SMALL_RUN},
            self.text,
            cores(),
            limit=limit,
            is_isolated=True,
        )
        for _, ended in run_all([small_run], 1):
            if ended.problem:
                raise Refused(ended.problem)
            model = ended.directory / "model"
            self.budget.check_sizes(sizes_of(model))
            self.judge.score(model, source, leak_check_bound=math.inf)

    def compare(self, source: Source, base: Source, max_pairs: int) -> Entry:
        """The verdict by pairs: on seeds that all tries share, and then on fresh ones."""
        on_shared = Comparison(source, base, are_fresh=False)
        on_fresh = Comparison(source, base, are_fresh=True)

        def on_shared_seeds(n: int) -> list[float]:
            return self.differences(on_shared, self.ledger.seeds(SHARED, n))

        def on_fresh_seeds(n: int) -> list[float]:
            self.report(f"it looks better; {n} pairs of fresh seeds decide")
            seeds = self.ledger.seeds(f"{source.sha256} against {base.sha256}", n)
            return self.differences(on_fresh, seeds)

        looks = [n for n in rule.LOOKS if n <= max_pairs]
        if self.makes_jobs:  # each look would be one
            looks = looks[-1:]
        else:
            self.report(self.expected_course(source, base, looks))
        smallest_gain = self.start["smallest_gain"]
        decision = rule.decide(on_shared_seeds, on_fresh_seeds, looks, smallest_gain)
        facts = {
            **self.numbers(source, base, decision.differences),
            "fresh": decision.are_fresh,
            "verdict": decision.verdict,
        }
        gain = -fmean(decision.differences)
        losses, base_losses = self.paired_losses(source, base)
        if decision.verdict == "kept" and rule.may_be_luck(gain, losses, base_losses):
            facts["verdict"] = "no better"
            facts["why"] = (
                "its losses hardly follow the seeds: a lucky order of its batches may gain as much"
            )
        return facts

    def expected_course(self, source: Source, base: Source, looks: Sequence[int]) -> str:
        """How many pairs a try takes, and how long, by the runs of the base."""
        losses = self.ledger.losses
        n_seeds_of = dict.fromkeys((source.sha256, base.sha256), 0)
        for entry in self.ledger.of("seeds"):
            if entry["use"] == SHARED:
                for folder in n_seeds_of:
                    n_seeds_of[folder] += sum((folder, seed) in losses for seed in entry["seeds"])

        def missing_runs(n_pairs: int) -> int:
            return sum(max(0, n_pairs - n_made) for n_made in n_seeds_of.values())

        seconds = self.budget.mean_seconds(base.sha256) / self.trainer.at_once
        seconds += self.budget.mean_seconds(base.sha256, JUDGE_TIME)
        least = duration(seconds * missing_runs(looks[0]))
        most = duration(seconds * (missing_runs(looks[-1]) + 2 * looks[-1]))
        n_pairs = f"{looks[0]} to {looks[-1]}" if len(looks) > 1 else f"{looks[0]}"
        fresh_pairs = f"if it looks better up to {looks[-1]} of fresh ones"
        return f"{n_pairs} pairs of shared seeds, and {fresh_pairs}: about {least} to {most}"

    def paired_losses(self, source: Source, base: Source) -> tuple[list[float], list[float]]:
        """The losses of a folder and of the base, for all seeds that both were trained with."""
        losses = self.ledger.losses
        seeds = [run["seed"] for run in self.ledger.runs_of(source.sha256)]
        common = [seed for seed in seeds if (base.sha256, seed) in losses]
        return (
            [losses[source.sha256, seed] for seed in common],
            [losses[base.sha256, seed] for seed in common],
        )

    def numbers(self, source: Source, base: Source, differences: Sequence[float]) -> Entry:
        """The difference with its 95 % interval, and the time beside the base's."""
        mean = fmean(differences)
        margin = rule.margin(differences)
        times = self.budget.mean_seconds(source.sha256) / self.budget.mean_seconds(base.sha256)
        return {
            "pairs": len(differences),
            "mean": round(mean, 5),
            "low": round(mean - margin, 5),
            "high": round(mean + margin, 5),
            "times": round(times, 5),
        }

    def gain(self, n: int) -> Entry:
        """What all kept folders gain together, on fresh seeds."""
        first = self.first
        last = self.source(self.ledger.base)
        if first.sha256 == last.sha256:
            raise InputError("nothing was kept yet")
        seeds = self.ledger.seeds(f"gain of {last.sha256}", n)  # not those by which it was kept
        differences = self.differences(Comparison(last, first, are_fresh=True), seeds)
        return self.ledger.add("gain", folder=last.sha256, **self.numbers(last, first, differences))


def directory_of(name: str, settings: Settings) -> Path:
    if not NAME.fullmatch(name):
        problem = "must be at most 40 letters, digits, dots, dashes and underscores"
        raise InputError(f"the name {name!r} {problem}")
    return settings.home / "tries" / name


def no_search(name: str, settings: Settings) -> InputError:
    names = sorted(path.parent.name for path in settings.home.glob("tries/*/ledger.jsonl"))
    others = f"there are {', '.join(names)}" if names else "there are none yet"
    return InputError(f"no search is named {name!r}; {others}", "no-search")
