"""A search: its text, a part of which no run sees; its base; the verdicts on changed folders."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from entry_point.checkpoint import LARGEST_HEADER, read_header
from entry_point.cores import cores
from entry_point.errors import TrainingError
from entry_point.files import open_file
from entry_point.text import Corpus, Tokenizer, read_json
from launcher.curve import total_steps
from launcher.errors import InputError, LauncherError, ServiceError
from launcher.files import locks, storage
from launcher.files.scratch import scratch
from launcher.job import Request
from launcher.judge.anchors import as_tensor, overlap
from launcher.judge.evaluate import check_causal, check_memory
from launcher.judge.score import losses
from launcher.judge.texts import Text, encode
from launcher.judge.worker import Worker
from launcher.launching import launch
from launcher.launching.draft import fill
from launcher.local.confine import packages
from launcher.local.runs import Run, run_all
from launcher.settings import Settings
from launcher.source import Source, keep
from launcher.text.channels import corpus_of
from launcher.text.corpus import digest_of
from launcher.text.formats import File
from launcher.text.ids import content_of, drawn, write_ids
from launcher.trying import rule
from launcher.trying.here import MOST_SIZE, SLOW, Here
from launcher.trying.ledger import Entry, Ledger, OverCeiling

if TYPE_CHECKING:
    from launcher.trying.cloud import OnSageMaker

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
BASE_SEEDS = 8
MOST_TIME = 1.3  # times that of the folder that the search began with
SILENCE = 30  # seconds until a line of progress
MOST_TOKENS = 1 << 28  # of the text that runs read
JUDGED = 1 << 16  # tokens of the validation text that are kept for the judge, at most
FEWEST = 1000  # of them

Told = Callable[[str], None]


class Refused(ServiceError):
    """The rules do not allow this folder."""


class Search:
    """A search of this machine, by its name. told gets a line for each thing that is known.

    Raises InputError if there is none, and ServiceError if its ledger or text was changed.
    """

    def __init__(self, name: str, settings: Settings, told: Told) -> None:
        self.name, self.settings, self.told = name, settings, told
        self.directory = place_of(name, settings)
        self.ledger = Ledger(self.directory)
        if not self.ledger.entries:
            found = sorted(path.parent.name for path in settings.home.glob("tries/*/ledger.jsonl"))
            known = f"there are {', '.join(found)}" if found else "there are none yet"
            raise InputError(f"no search is named {name!r}; {known}", "no-search")
        self.start = self.ledger.entries[0]
        self.text = self.directory / "text"
        content = storage.read_bytes(str(self.directory / "judge.txt"), settings, 1 << 30) or b""
        if hashlib.sha256(content).hexdigest() != self.start["judge"]:
            raise ServiceError(f"{self.directory / 'judge.txt'} was changed after the search began")
        end = read_json(self.text / "meta.json")["end_of_text"]
        self.tokenizer = Tokenizer(read_json(self.text / "tokenizer.json"), end)
        self.judged = encode([Text("judge", [content.decode()])], self.tokenizer)

    @cached_property
    def maker(self) -> Here | OnSageMaker:
        if self.start["instance"] == "local":
            return Here(self)
        from launcher.trying.cloud import OnSageMaker

        return OnSageMaker(self)

    def source(self, sha256: str) -> Source:
        """A folder as it was tried."""
        found = Source.read(self.settings.home / "sources" / sha256)
        if found.sha256 != sha256:
            raise ServiceError(f"{found.directory} was changed after it was tried")
        return found

    def verify(self) -> None:
        """Raise ServiceError if a folder that was tried, or the text of the runs, was changed."""
        for each in {entry["folder"] for entry in [self.start, *self.ledger.of("try")]}:
            self.source(each)
        if digest_of(files_of(self.text)) != self.start["runs_read"]:
            raise ServiceError(f"{self.text} was changed after the search began")

    def settle(self) -> None:
        """Replace what is reserved for jobs that have ended by what they cost."""
        if not isinstance(self.maker, Here):
            self.ledger.settle(self.maker.cost_of)

    # -- runs and their losses --------------------------------------------------------------------

    def measure(self, runs: Sequence[tuple[Source, int]], tried: Source | None = None) -> None:
        """Make the runs that the ledger does not have, judge them, and add them.

        Each model by which the folder that is tried may be kept, which are those of fresh seeds, is
        also tested for looking ahead and for learning while it is judged. Raises Refused if a run
        of that folder fails or takes more than it may, ServiceError if another fails.
        """
        known = self.ledger.losses
        left = [(source, seed) for source, seed in runs if (source.sha256, seed) not in known]
        said = time.monotonic()
        for n, made in enumerate(self.maker.made(left)):
            own = tried is not None and made.source.sha256 == tried.sha256
            check = own and made.seed > rule.LOOKS[-1]
            if time.monotonic() > said + SILENCE:
                said = time.monotonic()
                self.told(f"{n} of {len(left)} runs")
            try:
                if made.problem:
                    raise Refused(made.problem)
                facts: Entry = {"folder": made.source.sha256, "seed": made.seed}
                facts |= {"seconds": round(made.seconds, 2), **sizes_of(made.model)}
                self.check_sizes(facts)
                facts["loss"] = self.loss_of(made.model, made.source, check)
            except Refused as refusal:
                if own:
                    raise
                raise ServiceError(f"the base does not train: {refusal}") from None
            self.ledger.add("run", **facts)

    def loss_of(self, model: Path, source: Source, check: bool) -> float:
        """The nats per token that a model loses on the judge's text. Raises Refused if it fails."""
        kept = self.settings.home / "sources" / source.sha256
        given = (model, self.settings, kept, self.tokenizer)  # not that of the run
        try:
            with Worker(*given, alone=True) as worker:
                [nats] = losses(worker, self.judged)
            if check:  # after it was judged, by a process that cannot know what it has answered
                with Worker(*given, alone=True) as worker:
                    check_memory(worker, self.judged, nats)
                    check_causal(worker, self.judged[0].ids)
        except (LauncherError, TrainingError) as error:
            raise Refused(str(error)) from None
        return float(nats.mean())

    def check_sizes(self, found: Entry) -> None:
        """Raise Refused for more tokens, parameters, or bytes than the search began with."""
        for name, most in (("tokens", 1.0), ("parameters", MOST_SIZE), ("bytes", MOST_SIZE)):
            first = next((e[name] for e in self.ledger.of("run") if name in e), 0)
            if first and found.get(name, 0) > most * first:
                times = f"{found[name] / first:.2f}x the {name} that the search began with"
                raise Refused(f"{times}; at most {most:g}x")

    def seconds(self, folder: str) -> float:
        """What a run of a folder takes: the median; 0 before the first."""
        found = [entry["seconds"] for entry in self.ledger.of("run") if entry["folder"] == folder]
        return float(median(found)) if found else 0.0

    @property
    def limit(self) -> float:
        """The seconds by the clock that a run may take; those of the first ones are not limited."""
        usual = self.seconds(self.start["folder"])
        return 60 + SLOW * usual if usual else math.inf

    def pairs(self, source: Source, base: Source, seeds: Sequence[int], told: str) -> list[float]:
        """The loss of a folder less that of the base for each seed, after the runs for it."""
        self.measure([(each, seed) for seed in seeds for each in (source, base)], tried=source)
        known = self.ledger.losses
        own, its = ([known[each.sha256, seed] for seed in seeds] for each in (source, base))
        found = [a - b for a, b in zip(own, its, strict=True)]
        line = f"{fmean(found):+.4f} ±{rule.half(found):.4f}"
        self.told(f"{told} {seeds[0]} to {seeds[-1]}: {line}")
        if len({*own}) < len(seeds):
            raise Refused("different seeds give the same loss")
        for other in {folder for folder, _ in known} - {source.sha256}:
            if [known.get((other, seed)) for seed in seeds] == own:
                whose = "the base" if other == base.sha256 else f"folder {other[:8]}, tried before"
                raise Refused(f"its runs are those of {whose}: the change changes nothing")
        if (times := self.seconds(source.sha256) / self.seconds(self.start["folder"])) > MOST_TIME:
            raise Refused(f"takes {times:.2f}x the time of the search's first folder")
        return found

    # -- the base ---------------------------------------------------------------------------------

    def base(self) -> Entry:
        """What the first folder loses, and by how much that varies; its runs are made once."""
        for known in self.ledger.of("base"):
            return known
        first = self.source(self.start["folder"])
        seeds = range(1, BASE_SEEDS + 1)
        self.measure([(first, seed) for seed in seeds])
        losses = [self.ledger.losses[first.sha256, seed] for seed in seeds]
        pairs = rule.pairs_for(self.start["smallest_gain"], stdev(losses))
        return self.ledger.add("base", loss=fmean(losses), sd=stdev(losses), pairs=pairs)

    def remove_unused(self) -> None:
        """Remove a search whose beginning was refused, so that its name is free; not if a run was
        made, or if any command has reserved money for a job."""
        with scratch(self.directory.parent, ".new-") as directory, self.ledger.locked():
            if self.ledger.is_unused:
                self.directory.rename(directory / "search")

    # -- a try ------------------------------------------------------------------------------------

    def attempt(self, source: Source, note: str) -> Entry:
        """Judge a folder against the base, and add the verdict to the ledger."""
        with (self.directory / "running").open("w") as file:
            if self.start["instance"] == "local":
                if not locks.lock(file, wait=False):
                    self.told("another try runs; this one waits for it")
                    locks.lock(file)
                self.ledger.read()
            return self.judge(source, note)

    def check_new(self, source: Source) -> None:
        """Raise InputError for a folder that is known: it is no try."""
        if source.sha256 == self.start["folder"]:
            raise InputError("the folder is the one that the search began with")
        for entry in self.ledger.of("try"):
            counts = entry["verdict"] == "kept" or entry["base"] == self.ledger.base
            if entry["folder"] == source.sha256 and "mean" in entry and counts:
                raise InputError(f"the folder was tried before: try {entry['number']}")

    def judge(self, source: Source, note: str) -> Entry:
        self.check_new(source)
        base, before = self.ledger.base, self.ledger.cost_of(source.sha256)
        with storage.reported(str(self.settings.home)):
            keep(source, self.settings)
        facts: dict[str, Any] = {"folder": source.sha256, "base": base, "note": note}
        try:
            most = self.base()["pairs"]
            self.check(source)
            facts |= self.compared(source, self.source(base), most)
        except Refused as refusal:
            facts |= {"verdict": "refused", "why": str(refusal)}
        except OverCeiling as over:
            facts |= {"verdict": "ceiling", "why": str(over)}
        facts["usd"] = round(self.ledger.cost_of(source.sha256) - before, 4)
        with self.ledger.locked():
            if facts["verdict"] == "kept" and self.ledger.base != base:
                why = "another folder was kept meanwhile; change that one so, and try it again"
                facts |= {"verdict": "no better", "why": why}
            return self.ledger.write("try", number=1 + len(self.ledger.of("try")), **facts)

    def check(self, source: Source) -> None:
        """Raise Refused for what two small steps on this machine show. They cost nothing."""
        known = {*b"".join(self.source(self.start["folder"]).files.values()).splitlines()}
        lines = b"".join(source.files.values()).splitlines()
        added = b"\n".join(line for line in lines if line not in known)
        if added and overlap(as_tensor(self.judged[0].content), [as_tensor(added)]) > 0:
            raise Refused("a file of the folder holds a part of the judge's text")
        self.check_sizes({"tokens": self.planned(source)})
        small = {"max_steps": 2, "batch_size": 1, "eval_tokens": 4096, "device": "cpu"}
        values = {**self.start["words"], **small}
        run = Run(source, values, self.text, cores(), limit=10 * self.limit, alone=True)
        for _, ended in run_all([run], 1):
            if problem := ended.problem:
                raise Refused(problem)
            self.check_sizes(sizes_of(ended.out / "model"))
            self.loss_of(ended.out / "model", source, check=True)

    def planned(self, source: Source) -> int:
        """The tokens on which a folder would train, as its config.py says. Raises Refused."""
        script = PLANNED.format(words=self.start["words"]).encode()
        asked = Source(source.directory, {**source.files, "train.py": script})
        run = Run(asked, {}, self.text, limit=10 * self.limit, alone=True)
        said = problem = ""
        for _, ended in run_all([run], 1):
            said, problem = (ended.out / "log").read_text(errors="replace"), ended.problem
        try:
            return int(said.strip().rpartition("\n")[2])
        except ValueError:
            problem = problem or "config.py does not say on how many tokens it trains"
            raise Refused(problem) from None

    def compared(self, source: Source, base: Source, most: int) -> Entry:
        """The verdict by pairs: on seeds that all tries share, and then on fresh ones."""

        def shared(n: int) -> list[float]:
            return self.pairs(source, base, range(1, n + 1), "seeds")

        def fresh(n: int) -> list[float]:
            self.told(f"it looks better; {n} pairs of fresh seeds decide")
            seeds = self.ledger.fresh_seeds(source.sha256, base.sha256, n)
            return self.pairs(source, base, seeds, "fresh seeds")

        looks = [n for n in rule.LOOKS if n <= most]
        if self.start["instance"] != "local":  # each look would be a job, whose start costs minutes
            looks = looks[-1:]
        verdict, found, is_fresh = rule.decide(shared, fresh, looks, self.start["smallest_gain"])
        return {**self.facts(source, base, found), "fresh": is_fresh, "verdict": verdict}

    def facts(self, source: Source, base: Source, found: Sequence[float]) -> Entry:
        mean, half = fmean(found), rule.half(found)
        times = self.seconds(source.sha256) / self.seconds(base.sha256)
        numbers = {"mean": mean, "low": mean - half, "high": mean + half, "times": times}
        return {"pairs": len(found), **{name: round(n, 5) for name, n in numbers.items()}}

    def gain(self, n: int) -> Entry:
        """What all kept folders gain together, on fresh seeds."""
        first, now = (self.source(each) for each in (self.start["folder"], self.ledger.base))
        if first.sha256 == now.sha256:
            raise InputError("nothing was kept yet")
        seeds = self.ledger.fresh_seeds(now.sha256, "gain", n)  # not those by which it was kept
        found = self.pairs(now, first, seeds, "fresh seeds")
        return self.ledger.add("gain", folder=now.sha256, **self.facts(now, first, found))


# A train.py that only prints on how many tokens its folder would train.
PLANNED = """
import sys, types
package = types.ModuleType("entry_point")
package.__path__ = [sys.path[0]]
sys.modules["entry_point"] = package
from entry_point.config import make_config
words = {words}
config = make_config(words, words.pop("preset", None))
steps = config.max_steps * getattr(config, "generations", 1)
print(steps * config.batch_size * config.block_size)
"""


def sizes_of(model: Path) -> dict[str, int]:
    """The parameters of a model, the bytes of its directory, and the tokens on which it was
    trained, as it says."""
    try:
        config = read_json(model / "training.json")["config"]
        tokens = int(total_steps(config) * config["batch_size"] * config["block_size"])
        with open_file(model / "model.safetensors") as file:
            tensors, _ = read_header(file, LARGEST_HEADER)
        parameters = sum(math.prod(each["shape"]) for each in tensors.values())
        size = sum(path.lstat().st_size for path in model.rglob("*") if path.is_file())
    except Exception as error:  # it may say anything
        raise Refused(f"its model cannot be read: {type(error).__name__}: {error}") from None
    return {"parameters": parameters, "tokens": tokens, "bytes": size}


def files_of(text: Path) -> list[File]:
    return [File(path.name, path) for path in sorted(text.iterdir())]


def place_of(name: str, settings: Settings) -> Path:
    if not NAME.fullmatch(name):
        problem = "must be at most 40 letters, digits, dots, dashes and underscores"
        raise InputError(f"the name {name!r} {problem}")
    return settings.home / "tries" / name


# -- how a search begins ---------------------------------------------------------------------------


def begin(
    name: str,
    request: Request,
    settings: Settings,
    smallest_gain: float,
    ceiling: float | None,
    told: Told,
) -> Search:
    """Begin a search: keep a part of the text for the judge, and train the base.

    request names text, training folder, preset or size, and instance. smallest_gain, in nats,
    is what the search looks for; ceiling is in USD. Raises InputError if it cannot begin.
    """
    place = place_of(name, settings)
    if any(place.resolve().is_relative_to(each.resolve()) for each in packages()):
        raise InputError(f"runs may read {place}; set SM_NANOGPT_HOME to another directory")
    if place.exists():
        raise InputError(f"there is a search {name}; take another name, or delete {place}")
    draft = fill(request, settings)
    launch.check(draft)
    job, text = draft.job, draft.texts["data"]
    if len(job.instances) > 1:
        problem = "a search takes one type, or its times would not compare"
        raise InputError(problem, field="instance", value=job.instance)
    if text.upload is None or text.upload.chats:
        odd = "conversations are not judged" if text.upload else "its length is not known"
        raise InputError(f"{text.named}: {odd}; a search takes text that was uploaded from here")
    words = {"preset": job.preset} if job.preset else job.all_hyperparameters()
    words.pop("seed", None)
    begun = {
        "text": text.named,
        "words": words,
        "device": getattr(job.config(1), "device", "auto"),
        "instance": job.instance,
        "folder": job.source.sha256,
        "smallest_gain": smallest_gain,
        "ceiling": ceiling,
    }
    with storage.reported(str(place)):
        keep(job.source, settings)
        with scratch(place.parent, ".new-") as directory:
            (made := directory / "search").mkdir(mode=0o700)  # of the judge alone
            least = max(FEWEST, job.config(1).block_size + 1)
            begun["judge"] = write_texts(made, corpus_of({"data": text}, settings), least, told)
            begun["runs_read"] = digest_of(files_of(made / "text"))
            guide = (Path(__file__).parent / "AGENTS.md").read_text(encoding="utf-8")
            (made / "AGENTS.md").write_text(guide.replace("NAME", name), encoding="utf-8")
            Ledger(made).add("start", **begun)
            made.rename(place)
    return Search(name, settings, told)


def write_texts(place: Path, corpus: Corpus, least: int, told: Told) -> str:
    """Write what runs read, and what the judge reads, the end of the validation text; returns the
    SHA-256 of the latter."""
    train, val, words = drawn(corpus.train, MOST_TOKENS), corpus.val, corpus.tokenizer.words
    n = min(JUDGED, len(val) // 2)
    if n < least:
        few = f"{n:,} {corpus.tokenizer.unit} would be left to judge by, and a search needs"
        raise InputError(f"{few} {least:,}: use more text, or a smaller context")
    content = content_of(val[len(val) - n : len(val)], words)
    judged = content.decode(errors="ignore").encode()  # without a part of a character
    write_ids(place / "text", corpus.tokenizer, train, drawn(val[0 : len(val) - n], MOST_TOKENS))
    (place / "judge.txt").write_bytes(judged)
    told(f"judge: {n:,} {corpus.tokenizer.unit} kept here; no run gets them")
    if len(train) < len(corpus.train):
        told(f"runs read {len(train):,} of {len(corpus.train):,} {corpus.tokenizer.unit}")
    return hashlib.sha256(judged).hexdigest()
