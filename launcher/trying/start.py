"""Begin a search: keep a part of the text for the judge, and give the rest to the runs."""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path

from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.files.scratch import scratch
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching import launch
from sm_nanogpt.launcher.launching.draft import fill
from sm_nanogpt.launcher.launching.texts import lengths_of, unit_of
from sm_nanogpt.launcher.local.confine import is_readable
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import keep_source
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.corpus import digest_of
from sm_nanogpt.launcher.text.ids import content_of, draw_ids, write_ids
from sm_nanogpt.launcher.text.reading import files_in
from sm_nanogpt.launcher.text.run_corpus import corpus_of
from sm_nanogpt.launcher.text.store import VALIDATION_FRACTION
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.rule import MIN_GAIN
from sm_nanogpt.launcher.trying.runs import run_maker_class
from sm_nanogpt.launcher.trying.search import LOCK_FILE, Search, directory_of
from sm_nanogpt.launcher.values import counted

logger = logging.getLogger(__name__)

MAX_TOKENS = 1 << 28  # tokens of the text that runs read
MAX_JUDGE_TOKENS = 1 << 16  # tokens of the validation text that are kept for the judge
MIN_JUDGE_TOKENS = 1000
GUIDE_FILE = Path(__file__).parent / "AGENTS.md"
# What people call the fields of a start entry in which two searches may differ. The name of the
# text is not one of them, as a text may have several names.
FIELD_NAMES = {
    "judge": "text",
    "runs_read": "text",
    "hyperparameters": "preset or size",
    "device": "device",
    "instance": "instance",
    "folder": "training folder",
    "smallest_gain": "smallest gain",
    "ceiling": "ceiling",
}


def begin_search(
    name: str,
    request: Request,
    settings: Settings,
    smallest_gain: float,
    ceiling: float | None,
) -> Search:
    """Begin a search: write the texts of the judge and of the runs, and the first entry.

    If a search was begun alike, and has not measured its base, that one is returned. request has
    the text, the training folder, the preset or size, and the instance. smallest_gain is the gain
    that the search looks for, in nats. ceiling is in USD, or None on this machine. Raises
    InputError if the search cannot begin.
    """
    check_smallest_gain(smallest_gain)
    target = directory_of(name, settings)
    check_directory(target)
    check_unused(name, target)
    run_maker_class(request.instance_name)  # raises InputError if a search has no runs there
    draft = fill(with_one_generation(request), settings)
    job = draft.job
    config = job.config()
    text = draft.texts["data"]
    if request.data is None:
        logger.info(f"text: {text.short_name} (the last upload)")
    if not draft.backend.is_remote:
        check_unreadable(text)
    n_tokens = check_text(text, min_judge_tokens=max(MIN_JUDGE_TOKENS, config.block_size + 1))
    launch.check(draft)
    if len(job.instances) > 1:
        problem = "a search takes one type, or its times would not compare"
        raise InputError(problem, field="instance", value=job.instance)

    hyperparameters = {"preset": job.preset} if job.preset else job.all_hyperparameters()
    hyperparameters.pop("seed", None)
    facts = {
        "text": text.shown,
        "hyperparameters": hyperparameters,
        "device": getattr(config, "device", "auto"),
        "instance": job.instance,
        "folder": job.source.sha256,
        "smallest_gain": smallest_gain,
        "ceiling": ceiling,
    }
    with storage.errors_about(str(target)):
        keep_source(job.source, settings)
        with scratch(target.parent, ".new-") as temporary:
            directory = temporary / "search"
            digests = write_search(directory, name, corpus_of({"data": text}, settings), n_tokens)
            start = {**facts, **digests}
            if target.exists():
                remove_different(name, start, settings)
                unfinished = unfinished_search(name, settings)
                if unfinished is not None:
                    return unfinished
            SearchLedger(directory).add("start", **start)
            directory.rename(target)
    return Search(name, settings)


def with_one_generation(request: Request) -> Request:
    """The request with generations=1, unless it sets the size or the number of generations.

    A launch chooses the size and the generations together. With two generations, each run would
    take more than twice as long.
    """
    if not request.has_open_size:
        return request
    hyperparameters = {"generations": 1, **request.hyperparameters}
    return request.model_copy(update={"hyperparameters": hyperparameters})


def check_text(text: Channel, min_judge_tokens: int) -> int:
    """The training tokens of a text.

    Raises InputError for a text that a search cannot take: it leaves the judge fewer than
    min_judge_tokens characters or tokens, is of conversations, or its length is unknown.
    """
    upload = text.upload
    if upload is None or upload.chats:
        problem = "its length is not known" if upload is None else "conversations are not judged"
        problem += "; a search takes text that was uploaded from here"
    elif n_judge_tokens(lengths_of(upload, Config(), "")["validation"]) < min_judge_tokens:
        n_needed = round(2 * min_judge_tokens / VALIDATION_FRACTION)
        needs = f"whose judge keeps a twentieth and needs {min_judge_tokens:,} {unit_of(upload)}"
        problem = f"too short for a search, {needs}; use a text of {n_needed:,} or more"
    else:
        return upload.train_tokens
    raise InputError(f"{text.shown}: {problem}")


def n_judge_tokens(n_val: int) -> int:
    """How much of a validation text is kept for the judge, in its characters or tokens."""
    return min(MAX_JUDGE_TOKENS, n_val // 2)


def check_unreadable(text: Channel) -> None:
    """Raise InputError if runs on this machine could read a file of the text."""
    for file in text.sources:
        if is_readable(Path(file.shown)):
            problem = "runs may read it there, and with it the judge's part"
            raise InputError(f"{file.shown}: {problem}; a search takes a text from elsewhere")


def check_smallest_gain(gain: float) -> None:
    """Raise InputError for a gain, in nats, that no search keeps."""
    if not MIN_GAIN <= gain < math.inf:
        problem = f"must be at least {MIN_GAIN:g} nats: no change is kept that gains less"
        raise InputError(problem, field="smallest_gain", value=gain)


def check_directory(directory: Path) -> None:
    """Raise InputError if runs could read the directory of a search."""
    if is_readable(directory):
        raise InputError(f"runs may read {directory}; set SM_NANOGPT_HOME to another directory")


def check_unused(name: str, directory: Path) -> None:
    """Raise InputError if a search has measured its base, or a command uses it."""
    if locks.is_locked(directory / LOCK_FILE):
        raise InputError(f"another command uses search {name}; wait for it, or take another name")
    if SearchLedger(directory).of("base"):
        raise InputError(f"there is a search {name}; take another name, or delete {directory}")


def unfinished_search(name: str, settings: Settings) -> Search | None:
    """The search of this name if its base was begun and not measured; else None."""
    directory = directory_of(name, settings)
    ledger = SearchLedger(directory)
    if not ledger.entries or ledger.of("base") or locks.is_locked(directory / LOCK_FILE):
        return None
    search = Search(name, settings)
    runs = counted(len(search.ledger.runs), "run")
    text = search.start["text"]
    logger.info(f"search {name} of {text} was begun before: it goes on with {runs} of its base")
    return search


def remove_different(name: str, start: Entry, settings: Settings) -> None:
    """Remove a search without a base that was begun with other fields than `start`, and log that.

    Raises InputError if it is in use.
    """
    directory = directory_of(name, settings)
    ledger = SearchLedger(directory)
    differences = set()
    if ledger.entries:
        for field, field_name in FIELD_NAMES.items():
            if ledger.start.get(field) != start[field]:
                differences.add(field_name)
        if not differences:
            return
    if not remove_unfinished(directory):
        problem = f"search {name}, which began otherwise, is in use or has a job"
        raise InputError(f"{problem}; take another name", code="go-on-with-search", search=name)
    if differences:
        runs = counted(len(ledger.runs), "run")
        others = " and ".join(sorted(differences))
        logger.info(f"search {name} began with another {others}: {runs} of its base were removed")


def remove_unfinished(directory: Path) -> bool:
    """Remove a search that a command began and did not finish, so that its name is free.

    Removes nothing, and returns False, if the search is in use: a command has locked it, its base
    was measured, a job was sent, or money is reserved for one.
    """
    with storage.errors_about(str(directory)), (directory / LOCK_FILE).open("w") as file:
        if not locks.lock(file, wait=False):
            return False
        ledger = SearchLedger(directory)
        with scratch(directory.parent, ".new-") as temporary, ledger.locked():
            if ledger.is_in_use:
                return False
            directory.rename(temporary / "search")
    return True


def write_search(directory: Path, name: str, corpus: Corpus, n_tokens: int) -> dict[str, str]:
    """Make the directory of a search, with its texts and the guide, and without its ledger.

    n_tokens: of the training text, of which the corpus may have only the beginning. Returns the
    digests of the judge's text and of the text that runs read, as fields of the start entry.
    """
    directory.mkdir(mode=0o700)  # only the judge may read it
    judge = write_texts(directory, corpus)
    n_tokens = max(n_tokens, len(corpus.train))
    if n_tokens > MAX_TOKENS:
        logger.info(f"runs read {MAX_TOKENS:,} of {n_tokens:,} {corpus.tokenizer.unit}")
    guide = GUIDE_FILE.read_text(encoding="utf-8").replace("NAME", name)
    (directory / "AGENTS.md").write_text(guide, encoding="utf-8")
    return {"judge": judge, "runs_read": digest_of(files_in(directory / "text"))}


def write_texts(directory: Path, corpus: Corpus) -> str:
    """Write the text of the runs, and the judge's text: the end of the validation text.

    Returns the SHA-256 of the judge's text.
    """
    tokenizer = corpus.tokenizer
    n_all = len(corpus.val)
    n_judge = n_judge_tokens(n_all)
    n_val = n_all - n_judge
    train = draw_ids(corpus.train, MAX_TOKENS)
    val = draw_ids(corpus.val[0:n_val], MAX_TOKENS)
    write_ids(directory / "text", tokenizer, train, val)
    content = content_of(corpus.val[n_val:n_all], tokenizer.words)
    judged = content.decode(errors="ignore").encode()  # drops a part of a character at an end
    (directory / "judge.txt").write_bytes(judged)
    logger.info(f"judge: {n_judge:,} {tokenizer.unit} kept here; no run gets them")
    return hashlib.sha256(judged).hexdigest()
