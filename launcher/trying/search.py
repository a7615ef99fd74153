"""A search: its text, a part of which no run sees; its base; the verdicts on changed folders."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Protocol

import torch

from entry_point.checkpoint import LARGEST_HEADER, read_header
from entry_point.errors import TrainingError
from entry_point.files import open_file
from entry_point.text import Corpus, Tokenizer, read_json
from launcher.errors import InputError, LauncherError, ServiceError
from launcher.files import storage
from launcher.forecast.pilots import drawn, write_ids
from launcher.job import Request
from launcher.judge.anchors import overlap
from launcher.judge.evaluate import as_tensor, check_causal, check_memory
from launcher.judge.score import losses
from launcher.judge.texts import Text, encode, pieces
from launcher.judge.worker import Worker
from launcher.launching import launch
from launcher.launching.forecasting import corpus_of
from launcher.local.confine import packages, version
from launcher.local.runs import Run, run_all
from launcher.machines import cores
from launcher.settings import Settings
from launcher.source import Source, keep
from launcher.text.corpus import digest_of
from launcher.text.formats import File
from launcher.trying import rule
from launcher.trying.ledger import Entry, Ledger, OverCeiling

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
MOST_TOKENS = 1 << 28  # of the text that runs read
JUDGED = 1 << 16  # tokens of the validation text that are kept for the judge, at most
BASE_SEEDS = 8
MOST_SIZE, MOST_TIME = 1.1, 1.5  # times those of the folder that the search began with
SLOW = 4.0  # times its time by the clock, after which a run is ended

Told = Callable[[str], None]


class Refused(Exception):
    """The rules do not allow this folder."""


@dataclass(frozen=True)
class Made:
    """A run that ended: where its model is, and how many seconds it computed; or its problem."""

    source: Source
    seed: int
    model: Path
    seconds: float
    problem: str = ""


class Maker(Protocol):
    """What makes runs, each of a folder and a seed. After the pairs in looks it pays to stop."""

    @property
    def looks(self) -> Sequence[int]: ...

    def made(self, runs: Sequence[tuple[Source, int]]) -> Iterator[Made]:
        """Each run, when it has ended. Its model is there until the next one is asked for."""
        ...


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

    @property
    def maker(self) -> Maker:
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

    # -- runs and their losses --------------------------------------------------------------------

    def measure(self, runs: Sequence[tuple[Source, int]], tried: Source | None = None) -> None:
        """Make the runs that the ledger does not have, judge them, and add them.

        The first model of the folder that is tried, and each by which it may be kept, are also
        tested for looking ahead and for learning while they are judged. Raises Refused if a run of
        that folder fails or takes more than it may, ServiceError if another fails.
        """
        left, checked = [r for r in runs if not self.ledger.run_of(r[0].sha256, r[1])], False
        for made in self.maker.made(left):
            own = tried is not None and made.source.sha256 == tried.sha256
            check = own and (not checked or made.seed > rule.LOOKS[-1])
            try:
                if made.problem:
                    raise Refused(made.problem)
                facts = {
                    "folder": made.source.sha256,
                    "seed": made.seed,
                    "seconds": round(made.seconds, 2),
                    **sizes_of(made.model),
                }
                self.check_sizes(facts)
                facts["loss"] = self.loss_of(made.model, made.source, check)
            except Refused as refusal:
                if own:
                    raise
                raise ServiceError(f"the base does not train: {refusal}") from None
            checked |= own
            self.ledger.add("run", **facts)

    def loss_of(self, model: Path, source: Source, check: bool) -> float:
        """The nats per token that a model loses on the judge's text. Raises Refused if it fails."""
        kept = self.settings.home / "sources" / source.sha256

        @contextmanager
        def judged() -> Iterator[Worker]:
            """A process with nothing of another one, not even a directory to write into."""
            with (
                tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
                Worker(model, self.settings, kept, Path(scratch)) as worker,
            ):
                worker.tokenizer = self.tokenizer  # not that of the run
                if worker.size < len(self.tokenizer):
                    known = f"it has {worker.size} logits for {len(self.tokenizer)} tokens"
                    raise Refused(known)
                yield worker

        try:
            with judged() as worker:
                [nats] = losses(worker, self.judged)
            if check:  # after it was judged, by a process that cannot know what it has answered
                with judged() as worker:
                    check_memory(worker, self.judged, nats)
                    check_causal(worker, self.judged[0].ids)
        except (LauncherError, TrainingError) as error:
            raise Refused(str(error)) from None
        return float(nats.mean())

    def check_sizes(self, found: Entry) -> None:
        """Raise Refused for more tokens, parameters, or bytes than the search began with."""
        for name, most in (("tokens", 1.0), ("parameters", MOST_SIZE), ("bytes", MOST_SIZE)):
            first = next((e[name] for e in self.ledger.of("run") if name in found), 0)
            if first and found.get(name, 0) > most * first:
                times = f"{found[name] / first:.2f}x the {name} that the search began with"
                raise Refused(f"{times}; at most {most:g}x")

    def loss(self, source: Source, seed: int) -> float:
        found = self.ledger.run_of(source.sha256, seed)
        assert found is not None
        return float(found["loss"])

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
        both = [(each, seed) for seed in seeds for each in (source, base)]
        self.measure(both, tried=source)
        losses = [self.loss(each, seed) for each, seed in both]
        found = [own - its for own, its in zip(losses[::2], losses[1::2], strict=True)]
        line = f"{fmean(found):+.4f} ±{rule.half(found):.4f}"
        self.told(f"{told} {seeds[0]} to {seeds[-1]}: {line}")
        if len({*losses[::2]}) < len(seeds):
            raise Refused(
                "its runs do not depend on their seed, so no luck can be told from a gain"
            )
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
        losses = [self.loss(first, seed) for seed in seeds]
        pairs = rule.pairs_for(self.start["see"], rule.PAIRED * stdev(losses))
        return self.ledger.add("base", loss=fmean(losses), sd=stdev(losses), pairs=pairs)

    # -- a try ------------------------------------------------------------------------------------

    def attempt(self, source: Source, note: str) -> Entry:
        """Judge a folder against the base, and add the verdict to the ledger.

        On this machine one try waits for another.
        """
        with (self.directory / "running").open("w") as lock:
            if self.start["instance"] == "local":
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.ledger.read()
            return self.judge(source, note)

    def judge(self, source: Source, note: str) -> Entry:
        most = self.base()["pairs"]
        base, before = self.ledger.base, self.ledger.cost_of(source.sha256)
        with storage.reported(str(self.settings.home)):
            keep(source, self.settings)
        facts: dict[str, Any] = {"folder": source.sha256, "base": base, "note": note}
        try:
            self.check(source, base)
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

    def check(self, source: Source, base: str) -> None:
        """Raise Refused for what two small steps on this machine show. They cost nothing."""
        if source.sha256 == base:
            raise Refused("the folder is the base: nothing is changed")
        for entry in self.ledger.of("try"):
            if (entry["folder"], entry["base"]) == (source.sha256, base) and "mean" in entry:
                raise Refused(f"it was tried before: try {entry['number']}")
        contents = [as_tensor(content) for content in source.files.values() if content]
        if overlap(as_tensor(self.judged[0].content), contents) > 0:
            raise Refused("a file of the folder holds a part of the judge's text")
        small = {"max_steps": 2, "batch_size": 1, "eval_tokens": 4096, "device": "cpu"}
        values = {**self.start["words"], **small}
        run = Run(source, values, self.text, cores(), limit=10 * self.limit, alone=True)
        for _, ended in run_all([run], 1):
            if problem := ended.problem:
                raise Refused(problem)
            self.check_sizes(sizes_of(ended.out / "model") | {"tokens": 0})
            self.loss_of(ended.out / "model", source, check=True)

    def compared(self, source: Source, base: Source, most: int) -> Entry:
        """The verdict by pairs: on seeds that all tries share, and then on fresh ones."""

        def shared(n: int) -> list[float]:
            return self.pairs(source, base, range(1, n + 1), "seeds")

        def fresh(n: int) -> list[float]:
            seeds = self.ledger.fresh_seeds(source.sha256, base.sha256, n)
            return self.pairs(source, base, seeds, "better; fresh seeds")

        looks = [n for n in self.maker.looks if n <= most]
        verdict, found, is_fresh = rule.decide(shared, fresh, looks, self.start["see"])
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
        seeds = self.ledger.fresh_seeds(now.sha256, first.sha256, n)
        found = self.pairs(now, first, seeds, "fresh seeds")
        return self.ledger.add("gain", folder=now.sha256, **self.facts(now, first, found))


class Here:
    """Makes the runs on this machine: one on each core, or on each GPU."""

    looks = rule.LOOKS

    def __init__(self, search: Search) -> None:
        self.search = search
        on_cpu = search.start["device"] == "cpu"
        self.gpus = 0 if on_cpu else torch.cuda.device_count()

    def made(self, runs: Sequence[tuple[Source, int]]) -> Iterator[Made]:
        search = self.search
        given = [
            Run(
                source,
                {**search.start["words"], "seed": seed},
                search.text,
                gpu=index % self.gpus if self.gpus else None,
                limit=search.limit,
                alone=True,
            )
            for index, (source, seed) in enumerate(runs)
        ]
        for index, ended in run_all(given, self.gpus or cores()):
            seconds = ended.seconds if self.gpus else ended.cpu_seconds
            yield Made(*runs[index], ended.out / "model", seconds, ended.problem)


def sizes_of(model: Path) -> dict[str, int]:
    """The parameters of a model, the bytes of its directory, and the tokens on which it was
    trained, as it says."""
    try:
        config = read_json(model / "training.json")["config"]
        tokens = int(config["max_steps"] * config["batch_size"] * config["block_size"])
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
        raise InputError(problem, field="group", value=name)
    return settings.home / "tries" / name


def begin(
    name: str,
    request: Request,
    settings: Settings,
    see: float,
    ceiling: float | None,
    told: Told,
) -> Search:
    """Begin a search: keep a part of the text for the judge, and train the base.

    request names text, training folder, preset or size, and instance. see is the gain, in nats,
    that the search looks for; ceiling is in USD. Raises InputError if it cannot begin.
    """
    place = place_of(name, settings)
    if any(place.resolve().is_relative_to(each.resolve()) for each in packages()):
        raise InputError(f"runs may read {place}; set SM_NANOGPT_HOME to another directory")
    if place.exists():
        problem = f"there is such a search; take another name, or delete {place}"
        raise InputError(problem, field="group", value=name)
    draft = launch.fill(request, settings)
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
        "see": see,
        "ceiling": ceiling,
    }
    with storage.reported(str(place)):
        keep(job.source, settings)
        place.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
        try:
            begun["judge"] = write_texts(made, corpus_of({"data": text}, settings), told)
            begun["runs_read"] = digest_of(files_of(made / "text"))
            guide = (Path(__file__).parent / "AGENTS.md").read_text(encoding="utf-8")
            (made / "AGENTS.md").write_text(guide.replace("NAME", name), encoding="utf-8")
            Ledger(made).add("start", **begun)
            made.rename(place)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    if not version():
        logger.warning("this system cannot keep a folder from other files (Landlock, Linux 5.13)")
    return Search(name, settings, told)


def write_texts(place: Path, corpus: Corpus, told: Told) -> str:
    """Write what runs read, and what the judge reads: the end of the validation text. Returns the
    SHA-256 of the latter."""
    train, val, words = drawn(corpus.train, MOST_TOKENS), corpus.val, corpus.tokenizer.words
    n = min(JUDGED, len(val) // 2)
    judged = b"".join(pieces(val[len(val) - n : len(val)], words, 1 << 30))
    judged = judged.decode(errors="ignore").encode()  # without a part of a character
    write_ids(place / "text", corpus.tokenizer, train, drawn(val[0 : len(val) - n], MOST_TOKENS))
    (place / "judge.txt").write_bytes(judged)
    told(f"judge: {n:,} {corpus.tokenizer.unit} kept here; no run gets them")
    if len(train) < len(corpus.train):
        told(f"runs read {len(train):,} of {len(corpus.train):,} {corpus.tokenizer.unit}")
    return hashlib.sha256(judged).hexdigest()
