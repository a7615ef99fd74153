"""The ledger of a search, HOME/tries/NAME/ledger.jsonl. The kinds of its entries:

start      what the search is: text, hyperparameters, folder, ceiling
seeds      seeds that were drawn, and their use
begun      runs that were begun together on this machine
anew       a folder whose earlier runs do not count, since its commands were often killed
run        the loss and the seconds of a run, by folder and seed
base       the mean loss of the first folder, and its standard deviation
reserved   what a job may cost, and its runs
settled    what a job cost
sending    a job is about to be sent
sent       AWS has a job
failed     a run of a job that left no model, and why
try        a verdict on a folder
gain       what all kept folders gain together
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.groups.ledger import GroupLedger
from sm_nanogpt.launcher.settings import Settings

LARGEST_SEED = 1 << 31
# Commands that make runs of a folder may be killed MAX_KILLS times, or once for each RUNS_PER_KILL
# runs of it. A folder that changes nothing could wait for a kill whenever it is unlucky: of 4,000
# such tries, simulated, at most 0.9 % are kept. With one kill for four runs, 13 % would be.
MAX_KILLS, RUNS_PER_KILL = 3, 16


def search_names(settings: Settings) -> list[str]:
    """The names of the searches of this machine, sorted."""
    return sorted(path.parent.name for path in settings.home.glob("tries/*/ledger.jsonl"))


class SearchLedger(GroupLedger):
    """The ledger of the search in a directory. Raises ServiceError if an entry was changed.

    A training folder is named by its SHA-256.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "ledger.jsonl")

    def take_in(self, entry: Entry) -> None:
        super().take_in(entry)
        if entry.get("kind") == "start" and entry.get("ceiling") is not None:
            self.ceiling = entry["ceiling"]

    @property
    def start(self) -> Entry:
        """The entry that says what the search is."""
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
        """The losses of all runs that count, in nats per token, by folder and seed."""
        losses = {}
        for run in self.runs:
            losses[run["folder"], run["seed"]] = float(run["loss"])
        return losses

    def losses_of(self, folder: str, seeds: Iterable[int]) -> list[float]:
        """The losses of the runs of a folder with these seeds, in their order."""
        losses = self.losses
        return [losses[folder, seed] for seed in seeds]

    @property
    def is_in_use(self) -> bool:
        """True if the base was measured, a job was sent, or money is reserved for one."""
        kinds = {entry["kind"] for entry in self.entries}
        return bool(kinds & {"base", "try", "sent"} or self.open_reservations)

    @property
    def runs(self) -> list[Entry]:
        """The runs that count.

        After a folder was refused, or its commands were often killed, its earlier runs do not
        count. Otherwise it could be tried until each of its runs was lucky once, if they depend on
        more than their seed.
        """
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
        """The folder whose runs were begun on this machine since the last verdict, or ''.

        It is the base only if no run of another folder was begun.
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

    def count_kills(self, folder: str) -> int:
        """Count the commands that were killed while runs of a folder were begun and not judged.

        Kills before the folder began anew do not count.
        """
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
        """True if commands were killed so often that a folder's runs may be lucky by it.

        A run could wait to be killed unless it was lucky, since a killed run is made again.
        """
        n_runs = len(self.runs_of(folder))
        return self.count_kills(folder) > max(MAX_KILLS, n_runs / RUNS_PER_KILL)

    # -- seeds ------------------------------------------------------------------------------------

    def seeds(self, purpose: str, n_seeds: int) -> list[int]:
        """The first n_seeds seeds of a purpose. Those that the ledger lacks are drawn, and added.

        So no folder can be made for its seeds. And a command that was killed because its runs lost
        too much gets the same seeds the next time.
        """
        with self.locked():
            seeds = self.drawn_seeds(purpose)
            if len(seeds) < n_seeds:
                all_seeds = set[int]()
                for entry in self.of("seeds"):
                    all_seeds.update(entry["seeds"])
                new_seeds = draw_seeds(n_seeds - len(seeds), all_seeds)
                self.write("seeds", use=purpose, seeds=new_seeds)
                seeds += new_seeds
        return seeds[:n_seeds]

    def drawn_seeds(self, purpose: str) -> list[int]:
        """The seeds that were drawn for a purpose so far."""
        seeds = list[int]()
        for entry in self.of("seeds"):
            if entry["use"] == purpose:
                seeds += entry["seeds"]
        return seeds

    # -- money ------------------------------------------------------------------------------------

    def cost_of(self, folder: str) -> float:
        """What the jobs with a run of this folder cost, in USD. Only settled jobs count."""
        jobs = set()
        for entry in self.of("reserved"):
            if folder in dict(entry["runs"]):  # pairs of folder and seed
                jobs.add(entry["job"])
        return math.fsum(entry["usd"] for entry in self.of("settled") if entry["job"] in jobs)

    def settle_all(self, cost_of: Callable[[Entry], float | None]) -> None:
        """Settle each open reservation whose cost is known.

        cost_of: returns what the job of a reservation cost, in USD, or None.
        """
        for job_id, entry in self.open_reservations.items():
            cost = cost_of(entry)
            if cost is not None:
                self.settle(job_id, cost)


def begins_anew(entry: Entry) -> bool:
    """True for an entry after which earlier runs of its folder do not count."""
    if entry["kind"] == "try":
        return bool(entry["verdict"] == "refused")
    return entry["kind"] == "anew"


def draw_seeds(n_seeds: int, used: set[int]) -> list[int]:
    """Draw n_seeds different seeds that nobody can foresee, none of which is in `used`."""
    seeds = list[int]()
    while len(seeds) < n_seeds:
        seed = 1 + secrets.randbelow(LARGEST_SEED - 1)
        if seed not in used and seed not in seeds:
            seeds.append(seed)
    return seeds
