"""How a search begins: a part of the text is kept for the judge, and the rest is for runs."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.files.scratch import scratch
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching import launch
from sm_nanogpt.launcher.launching.draft import fill
from sm_nanogpt.launcher.local.confine import is_readable
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import keep_source
from sm_nanogpt.launcher.text.channels import corpus_of
from sm_nanogpt.launcher.text.corpus import digest_of
from sm_nanogpt.launcher.text.ids import content_of, draw_ids, write_ids
from sm_nanogpt.launcher.text.reading import files_in
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.rule import MIN_GAIN
from sm_nanogpt.launcher.trying.runs import trainer_class
from sm_nanogpt.launcher.trying.search import HELD, Report, Search, directory_of

MAX_TOKENS = 1 << 28  # of the text that runs read
MAX_JUDGED = 1 << 16  # tokens of the validation text that are kept for the judge
MIN_JUDGED = 1000
GUIDE = Path(__file__).parent / "AGENTS.md"


def begin_search(
    name: str,
    request: Request,
    settings: Settings,
    smallest_gain: float,
    ceiling: float | None,
    report: Report,
) -> Search:
    """Begin a search: keep a part of the text for the judge, and write the first entry.

    request names text, training folder, preset or size, and instance. smallest_gain, in nats,
    is what the search looks for; ceiling is in USD. Raises InputError if it cannot begin.
    """
    check_smallest_gain(smallest_gain)
    target = directory_of(name, settings)
    check_directory(name, target)
    trainer_class(request.instance or "")
    if request.has_open_size:  # of two generations, a search would take more than twice as long
        one_generation = {"generations": 1, **request.hyperparameters}
        request = request.model_copy(update={"hyperparameters": one_generation})
    draft = fill(request, settings)
    launch.check(draft)
    job, text = draft.job, draft.texts["data"]
    if len(job.instances) > 1:
        problem = "a search takes one type, or its times would not compare"
        raise InputError(problem, field="instance", value=job.instance)
    if text.upload is None or text.upload.chats:
        problem = "conversations are not judged" if text.upload else "its length is not known"
        raise InputError(
            f"{text.shown}: {problem}; a search takes text that was uploaded from here"
        )
    if not draft.backend.is_remote:
        for file in text.sources:
            if is_readable(Path(file.shown)):
                problem = "runs may read it there, and with it the judge's part"
                raise InputError(f"{file.shown}: {problem}; a search takes a text from elsewhere")
    hyperparameters = {"preset": job.preset} if job.preset else job.all_hyperparameters()
    hyperparameters.pop("seed", None)
    start = {
        "text": text.shown,
        "hyperparameters": hyperparameters,
        "device": getattr(job.config(1), "device", "auto"),
        "instance": job.instance,
        "folder": job.source.sha256,
        "smallest_gain": smallest_gain,
        "ceiling": ceiling,
    }
    with storage.errors_about(str(target)):
        keep_source(job.source, settings)
        with scratch(target.parent, ".new-") as directory:
            search = directory / "search"
            search.mkdir(mode=0o700)  # of the judge alone
            min_judged = max(MIN_JUDGED, job.config(1).block_size + 1)
            corpus = corpus_of({"data": text}, settings)
            start["judge"] = write_texts(search, corpus, min_judged, report)
            # Of an upload of tokens, the corpus has the beginning.
            n_tokens = max(text.upload.train_tokens, len(corpus.train))
            if n_tokens > MAX_TOKENS:
                unit = corpus.tokenizer.unit
                report(f"runs read {MAX_TOKENS:,} of {n_tokens:,} {unit}")
            start["runs_read"] = digest_of(files_in(search / "text"))
            guide = GUIDE.read_text(encoding="utf-8").replace("NAME", name)
            (search / "AGENTS.md").write_text(guide, encoding="utf-8")
            SearchLedger(search).add("start", **start)
            search.rename(target)
    return Search(name, settings, report)


def check_smallest_gain(gain: float) -> None:
    """Raise InputError if a search would look for gains, in nats, that it does not keep."""
    if not MIN_GAIN <= gain < math.inf:
        problem = f"must be at least {MIN_GAIN:g} nats: no change is kept that gains less"
        raise InputError(problem, field="smallest_gain", value=gain)


def check_directory(name: str, directory: Path) -> None:
    """Raise InputError if runs may read the directory of a search, or if there is one."""
    if is_readable(directory):
        raise InputError(f"runs may read {directory}; set SM_NANOGPT_HOME to another directory")
    if directory.exists() and not remove_unfinished(directory):
        raise InputError(f"there is a search {name}; take another name, or delete {directory}")


def remove_unfinished(directory: Path) -> bool:
    """Remove a search that a command began and did not finish, so that its name is free.

    Returns False if it is in use: a command holds it, its base was measured, a job was sent, or
    money is reserved for one.
    """
    with storage.errors_about(str(directory)), (directory / HELD).open("w") as file:
        if not locks.lock(file, wait=False):
            return False
        ledger = SearchLedger(directory)
        with scratch(directory.parent, ".new-") as temporary, ledger.locked():
            if ledger.is_in_use:
                return False
            directory.rename(temporary / "search")
    return True


def write_texts(directory: Path, corpus: Corpus, min_judged: int, report: Report) -> str:
    """Write what runs read, and what the judge reads, the end of the validation text.

    Returns the SHA-256 of the latter. Raises InputError for too short a text.
    """
    tokenizer, train, val = corpus.tokenizer, draw_ids(corpus.train, MAX_TOKENS), corpus.val
    n_judged = min(MAX_JUDGED, len(val) // 2)
    if n_judged < min_judged:
        problem = f"{n_judged:,} {tokenizer.unit} would be left to judge by, and a search needs"
        raise InputError(f"{problem} {min_judged:,}: use more text, or a smaller context")
    n_val = len(val) - n_judged
    content = content_of(val[n_val : len(val)], tokenizer.words)
    judged = content.decode(errors="ignore").encode()  # without a part of a character
    write_ids(directory / "text", tokenizer, train, draw_ids(val[0:n_val], MAX_TOKENS))
    (directory / "judge.txt").write_bytes(judged)
    report(f"judge: {n_judged:,} {tokenizer.unit} kept here; no run gets them")
    return hashlib.sha256(judged).hexdigest()
