"""How a search begins: its text is cut, and its directory is made."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from entry_point.text import Corpus
from launcher.errors import InputError
from launcher.files import storage
from launcher.forecast.pilots import drawn, write_ids
from launcher.job import Request
from launcher.judge.texts import content_of
from launcher.launching import launch
from launcher.launching.forecasting import corpus_of
from launcher.local.confine import packages
from launcher.settings import Settings
from launcher.source import keep
from launcher.text.corpus import digest_of
from launcher.trying.ledger import Ledger
from launcher.trying.search import Search, Told, files_of, place_of

MOST_TOKENS = 1 << 28  # of the text that runs read
JUDGED = 1 << 16  # tokens of the validation text that are kept for the judge, at most
FEWEST = 1000  # of them


def begin(
    name: str, request: Request, settings: Settings, see: float, ceiling: float | None, told: Told
) -> Search:
    """Begin a search: keep a part of the text for the judge, and train the base.

    request names text, training folder, preset or size, and instance. see is the gain, in nats,
    that the search looks for; ceiling is in USD. Raises InputError if it cannot begin.
    """
    place = place_of(name, settings)
    if any(place.resolve().is_relative_to(each.resolve()) for each in packages()):
        raise InputError(f"runs may read {place}; set SM_NANOGPT_HOME to another directory")
    if place.exists():
        raise InputError(f"there is a search {name}; take another name, or delete {place}")
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
        with tempfile.TemporaryDirectory(prefix=".new-", dir=place.parent) as scratch:
            (made := Path(scratch) / "search").mkdir(mode=0o700)  # of the judge alone
            least = max(FEWEST, job.config(1).block_size + 1)
            begun["judge"] = write_texts(made, corpus_of({"data": text}, settings), least, told)
            begun["runs_read"] = digest_of(files_of(made / "text"))
            guide = (Path(__file__).parent / "AGENTS.md").read_text(encoding="utf-8")
            (made / "AGENTS.md").write_text(guide.replace("NAME", name), encoding="utf-8")
            Ledger(made).add("start", **begun)
            made.rename(place)
    return Search(name, settings, told)


def write_texts(place: Path, corpus: Corpus, least: int, told: Told) -> str:
    """Write what runs read, and what the judge reads: the end of the validation text.

    Returns the SHA-256 of the latter. Raises InputError if it has fewer than `least` tokens.
    """
    train, val, words = drawn(corpus.train, MOST_TOKENS), corpus.val, corpus.tokenizer.words
    n = min(JUDGED, len(val) // 2)
    if n < least:
        few = f"{n:,} {corpus.tokenizer.unit} would be left to judge by, and a search needs"
        raise InputError(f"{few} {least:,}: use more text, or a smaller context")
    judged = content_of(val[len(val) - n : len(val)], words)
    judged = judged.decode(errors="ignore").encode()  # without a part of a character
    write_ids(place / "text", corpus.tokenizer, train, drawn(val[0 : len(val) - n], MOST_TOKENS))
    (place / "judge.txt").write_bytes(judged)
    told(f"judge: {n:,} {corpus.tokenizer.unit} kept here; no run gets them")
    if len(train) < len(corpus.train):
        told(f"runs read {len(train):,} of {len(corpus.train):,} {corpus.tokenizer.unit}")
    return hashlib.sha256(judged).hexdigest()
