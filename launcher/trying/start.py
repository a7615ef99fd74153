"""Begin a search: keep a part of the text for the judge, and give the rest to the runs."""

from __future__ import annotations

import hashlib
import logging
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
from sm_nanogpt.launcher.text.channels import Channel, corpus_of
from sm_nanogpt.launcher.text.corpus import digest_of
from sm_nanogpt.launcher.text.ids import content_of, draw_ids, write_ids
from sm_nanogpt.launcher.text.reading import files_in
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.rule import MIN_GAIN
from sm_nanogpt.launcher.trying.runs import run_maker_class
from sm_nanogpt.launcher.trying.search import HELD, Search, directory_of

logger = logging.getLogger(__name__)

MAX_TOKENS = 1 << 28  # tokens of the text that runs read
MAX_JUDGED = 1 << 16  # tokens of the validation text that are kept for the judge
MIN_JUDGED = 1000
GUIDE = Path(__file__).parent / "AGENTS.md"


def begin_search(
    name: str,
    request: Request,
    settings: Settings,
    smallest_gain: float,
    ceiling: float | None,
) -> Search:
    """Begin a search: write the texts of the judge and of the runs, and the first entry.

    request has the text, the training folder, the preset or size, and the instance. smallest_gain
    is the gain that the search looks for, in nats. ceiling is in USD, or None on this machine.
    Raises InputError if the search cannot begin.
    """
    check_smallest_gain(smallest_gain)
    target = directory_of(name, settings)
    check_directory(name, target)
    run_maker_class(request.instance or "")
    draft = fill(with_one_generation(request), settings)
    launch.check(draft)
    job = draft.job
    if len(job.instances) > 1:
        problem = "a search takes one type, or its times would not compare"
        raise InputError(problem, field="instance", value=job.instance)
    text = draft.texts["data"]
    n_tokens = check_text(text)
    if not draft.backend.is_remote:
        check_unreadable(text)

    hyperparameters = {"preset": job.preset} if job.preset else job.all_hyperparameters()
    hyperparameters.pop("seed", None)
    config = job.config(world_size=1)
    start = {
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
            directory.mkdir(mode=0o700)  # only the judge may read it
            corpus = corpus_of({"data": text}, settings)
            min_judged = max(MIN_JUDGED, config.block_size + 1)
            start["judge"] = write_texts(directory, corpus, min_judged)
            # The corpus has only the beginning of an upload of tokens.
            n_tokens = max(n_tokens, len(corpus.train))
            if n_tokens > MAX_TOKENS:
                logger.info(f"runs read {MAX_TOKENS:,} of {n_tokens:,} {corpus.tokenizer.unit}")
            start["runs_read"] = digest_of(files_in(directory / "text"))
            guide = GUIDE.read_text(encoding="utf-8").replace("NAME", name)
            (directory / "AGENTS.md").write_text(guide, encoding="utf-8")
            SearchLedger(directory).add("start", **start)
            directory.rename(target)
    return Search(name, settings)


def with_one_generation(request: Request) -> Request:
    """The request with generations=1, if a launch would choose the number together with the size.

    With two generations, each run would take more than twice as long.
    """
    if not request.has_open_size:
        return request
    hyperparameters = {"generations": 1, **request.hyperparameters}
    return request.model_copy(update={"hyperparameters": hyperparameters})


def check_text(text: Channel) -> int:
    """The training tokens of a text. Raises InputError for a text that a search cannot take."""
    if text.upload is not None and not text.upload.chats:
        return text.upload.train_tokens
    problem = "its length is not known" if text.upload is None else "conversations are not judged"
    raise InputError(f"{text.shown}: {problem}; a search takes text that was uploaded from here")


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


def check_directory(name: str, directory: Path) -> None:
    """Raise InputError if runs could read the directory of a search, or if it exists."""
    if is_readable(directory):
        raise InputError(f"runs may read {directory}; set SM_NANOGPT_HOME to another directory")
    if directory.exists() and not remove_unfinished(directory):
        raise InputError(f"there is a search {name}; take another name, or delete {directory}")


def remove_unfinished(directory: Path) -> bool:
    """Remove a search that a command began and did not finish, so that its name is free.

    If the search is in use, this removes nothing and returns False: if a command holds it, its base
    was measured, a job was sent, or money is reserved for one.
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


def write_texts(directory: Path, corpus: Corpus, min_judged: int) -> str:
    """Write the text of the runs, and that of the judge: the end of the validation text.

    Returns the SHA-256 of the judge's text. Raises InputError if the text is too short.
    """
    tokenizer = corpus.tokenizer
    n_judged = min(MAX_JUDGED, len(corpus.val) // 2)
    if n_judged < min_judged:
        problem = f"{n_judged:,} {tokenizer.unit} would be left to judge by, and a search needs"
        raise InputError(f"{problem} {min_judged:,}: use more text, or a smaller context")

    n_val = len(corpus.val) - n_judged
    train = draw_ids(corpus.train, MAX_TOKENS)
    val = draw_ids(corpus.val[0:n_val], MAX_TOKENS)
    write_ids(directory / "text", tokenizer, train, val)
    content = content_of(corpus.val[n_val : len(corpus.val)], tokenizer.words)
    judged = content.decode(errors="ignore").encode()  # drops a part of a character at an end
    (directory / "judge.txt").write_bytes(judged)
    logger.info(f"judge: {n_judged:,} {tokenizer.unit} kept here; no run gets them")
    return hashlib.sha256(judged).hexdigest()
