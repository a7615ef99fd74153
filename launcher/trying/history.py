"""What a search knows: its ledger, HOME/tries/NAME/ledger.jsonl.

start      what the search is: text, hyperparameters, folder, ceiling
seeds      seeds that were drawn, and what for
begun      runs that were begun together on this machine
anew       earlier runs of a folder do not count, since commands that made them were often killed
run        the loss and the seconds of one folder and seed
base       what the first folder loses, and by how much that varies
reserved   what a job may cost, and its runs; settled: what it cost
sending    it is about to be sent; sent: AWS has it
failed     a run of a job that left no model, and why
try        a verdict
gain       what all kept tries gain together
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.groups.ledger import GroupLedger

LARGEST_SEED = 1 << 31
# How often commands may be killed while they make runs of a folder: so many times, or once for so
# many runs. Of 4,000 simulated tries of a folder that changes nothing and waits for a kill where it
# is unlucky, 0.9 % are kept at most. If one kill for four runs was allowed, it would be 13 %.
MAX_KILLS, RUNS_PER_KILL = 3, 16


class SearchLedger(GroupLedger):
    """The ledger of the search in a directory. Raises ServiceError if an entry was changed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "ledger.jsonl")

    def take_in(self, entry: Entry) -> None:
        super().take_in(entry)
        if entry.get("kind") == "start" and entry.get("ceiling") is not None:
            self.ceiling = entry["ceiling"]

    @property
    def start(self) -> Entry:
        """What the search is."""
        return self.of("start")[0]

    @property
    def base(self) -> str:
        """The SHA-256 of the folder that was kept last, or that the search began with."""
        base: str = self.start["folder"]
        for entry in self.of("try"):
            if entry["verdict"] == "kept":
                base = entry["folder"]
        return base

    @property
    def losses(self) -> dict[tuple[str, int], float]:
        """Those of all runs, in nats per token, by folder and seed."""
        losses = {}
        for run in self.runs:
            losses[run["folder"], run["seed"]] = float(run["loss"])
        return losses

    def losses_of(self, folder: str, seeds: Iterable[int]) -> list[float]:
        """Those of the runs of a folder with these seeds."""
        losses = self.losses
        return [losses[folder, seed] for seed in seeds]

    @property
    def is_in_use(self) -> bool:
        """True if the base was measured, a job was sent, or money is reserved."""
        kinds = {entry["kind"] for entry in self.entries}
        return bool(kinds & {"base", "try", "sent"} or self.open_reservations)

    @property
    def runs(self) -> list[Entry]:
        """The runs that count. A folder that was refused, or often killed, begins anew: else it
        could be tried until each of its runs, which may depend on more than the seed, was lucky
        once."""
        runs = list[Entry]()
        for entry in self.entries:
            if entry["kind"] == "run":
                runs.append(entry)
            elif begins_anew(entry):
                runs = [run for run in runs if run["folder"] != entry["folder"]]
        return runs

    def runs_of(self, folder: str) -> list[Entry]:
        return [run for run in self.runs if run["folder"] == folder]

    def seeds_of(self, folder: str) -> list[int]:
        """The seeds of the runs of a folder."""
        return [run["seed"] for run in self.runs_of(folder)]

    @property
    def begun_folder(self) -> str:
        """The folder of which runs were begun on this machine since the last verdict, or ''.

        It is the base if runs of no other folder were.
        """
        base = self.base
        begun = ""
        for entry in self.entries:
            if entry["kind"] in ("base", "try", "gain"):
                begun = ""
            elif entry["kind"] == "begun":
                for folder, _ in entry["runs"]:
                    if not begun or folder != base:
                        begun = folder
        return begun

    def kills_of(self, folder: str) -> int:
        """How often commands were killed before runs of a folder that they had begun were judged,
        since it began anew."""
        n_kills = 0
        unjudged = set[int]()  # seeds of the runs that were begun last
        for entry in self.entries:
            if entry["kind"] == "begun":
                if unjudged:
                    n_kills += 1
                unjudged = {seed for sha256, seed in entry["runs"] if sha256 == folder}
            elif entry["kind"] == "run" and entry["folder"] == folder:
                unjudged.discard(entry["seed"])
            elif begins_anew(entry) and entry["folder"] == folder:
                n_kills = 0
                unjudged = set()
        if unjudged:
            n_kills += 1
        return n_kills

    def is_often_killed(self, folder: str) -> bool:
        """True if a folder's runs could be lucky by kills: one that waits to be killed, unless it
        was lucky, is made again."""
        n_runs = len(self.runs_of(folder))
        return self.kills_of(folder) > max(MAX_KILLS, n_runs / RUNS_PER_KILL)

    # -- seeds ------------------------------------------------------------------------------------

    def seeds(self, use: str, n: int) -> list[int]:
        """The first n seeds of a use. Those that the ledger lacks are drawn now, and added to it.

        So no folder can be made for its seeds. And whoever kills a command because its runs lost
        too much gets the same seeds again.
        """
        with self.locked():
            seeds = self.drawn_seeds(use)
            if len(seeds) < n:
                all_seeds = set[int]()
                for entry in self.of("seeds"):
                    all_seeds.update(entry["seeds"])
                new_seeds = draw_seeds(n - len(seeds), all_seeds)
                self.write("seeds", use=use, seeds=new_seeds)
                seeds += new_seeds
        return seeds[:n]

    def drawn_seeds(self, use: str) -> list[int]:
        """The seeds of a use that were drawn so far."""
        seeds = list[int]()
        for entry in self.of("seeds"):
            if entry["use"] == use:
                seeds += entry["seeds"]
        return seeds

    # -- money ------------------------------------------------------------------------------------

    def cost_of(self, folder: str) -> float:
        """USD of the jobs that ended and that had a run of this folder."""
        jobs = set()
        for entry in self.of("reserved"):
            if folder in dict(entry["runs"]):  # by folder and seed
                jobs.add(entry["job"])
        return math.fsum(entry["usd"] for entry in self.of("settled") if entry["job"] in jobs)

    def settle_all(self, cost_of: Callable[[Entry], float | None]) -> None:
        """Replace reservations by what was billed; None: it is not known yet."""
        for job_id, entry in self.open_reservations.items():
            cost = cost_of(entry)
            if cost is not None:
                self.settle(job_id, cost)


def begins_anew(entry: Entry) -> bool:
    """True for an entry after which no earlier run of its folder counts."""
    if entry["kind"] == "try":
        return bool(entry["verdict"] == "refused")
    return entry["kind"] == "anew"


def draw_seeds(n: int, used: set[int]) -> list[int]:
    """n different seeds that nobody can foresee, none of which is used already."""
    seeds = list[int]()
    while len(seeds) < n:
        seed = 1 + secrets.randbelow(LARGEST_SEED - 1)
        if seed not in used and seed not in seeds:
            seeds.append(seed)
    return seeds
