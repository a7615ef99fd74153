"""Upload text to the store, and find the last upload.

An upload is a prefix `STORE/data/NAME-HASH/`. The hash covers the names and contents of its files,
so the data of a job never change. Its manifest, `STORE/data/NAME-HASH.json`, is written last: a
prefix without one is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from launcher.aws import Missing, Offline, aws_session, check_bucket, make_client
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.cache import Cache
from launcher.files.documents import Count, Damaged
from launcher.files.moved import PART_OF_NAME, UPLOAD_NAME, find_moved
from launcher.files.progress import Progress, expect, no_progress
from launcher.files.scratch import TEMPORARY_FILES, remove_leftovers
from launcher.finding import is_part
from launcher.sagemaker.caller import owner_of_upload
from launcher.sagemaker.stack import with_stack
from launcher.settings import Settings, load_settings
from launcher.text.copies import copied, name_of, temporary
from launcher.text.files import find_files, read_plain, warn_of_held_out
from launcher.text.formats import File, opened
from launcher.text.repeats import share_within, warn_of_repeats
from launcher.text.writing import write_files
from launcher.values import plain

logger = logging.getLogger(__name__)

TOKENS_VERSION = 6  # of what launcher.text.tokens writes


@dataclass(frozen=True)
class Upload:
    """Files in a store, or on their way there: a text, tokens of one, or a model."""

    uri: str
    size: Count  # bytes
    sha256: str
    files: Annotated[tuple[str, ...], Field(fail_fast=True)]
    uploaded: bool = True  # False: they were already there
    characters: Count = 0  # 0: a model
    vocabulary_size: Count = 0
    train_tokens: Count = 0  # 0: text, which a run takes by characters
    val_tokens: Count = 0
    documents: Count = 0  # that were encoded as tokens
    chats: bool = False  # whether they are conversations
    contexts: dict[int, Count] = field(default_factory=dict)  # how many of them need each one
    answers: dict[str, Count] = field(default_factory=dict)  # the least that holds one, by part
    vocabulary: str = ""  # the characters of a text
    tokenizer: str = ""  # `tokens.fingerprint` of what made the tokens
    # The share of its validation part that stands in its training part; None: not measured.
    repeated: Annotated[float, Field(ge=0, le=1)] | None = None
    owner: str = ""  # who uploaded it to S3, as in the tag of a job

    @property
    def n_training(self) -> int:
        """The tokens to train on, or characters."""
        return self.train_tokens or int(0.9 * self.characters)

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """Whether these are its files, by their names and bytes."""
        return set(sizes) == set(self.files) and sum(sizes.values()) == self.size


def upload_data(
    paths: str | Path | Upload | Iterable[str | Path | Upload],
    settings: Settings | None = None,
    progress: Progress = no_progress,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    column: str = "text",
    encoding: str = "",
) -> Upload:
    """Puts files of text, and those below folders, into the store as one upload.

    A path may also be `-`, for standard input, hf://datasets/OWNER/NAME/... or s3://bucket/... .
    docs/tokens.md has the formats. include adds plain text by patterns, such as `*.py`; exclude
    leaves out files or folders; encoding is that of files that are not UTF-8.

    With a tokenizer, the upload is of tokens: `bpe` learns vocab_size of them from the text
    (None: as many as fit it); else it is a tokenizer.json, a directory or a job that has one. Then
    files may also hold records: conversations, or documents in the field `column`.

    The default store is that of the stack, if AWS is configured and there is one; else it is on
    this machine. Text that is already there is not sent again.

    Raises InputError if the files are not text or are too short to train on, and as with_store
    does; ServiceError if the store failed.
    """
    tokenizer, vocab_size, given = plain(tokenizer), plain(vocab_size), plain(paths)
    given = [given] if isinstance(given, str) else given
    locations: list[str] = [plain(path) for path in given]
    include, exclude = ((each,) if isinstance(each, str) else each for each in (include, exclude))
    if vocab_size is not None and tokenizer != "bpe":
        raise InputError("needs the tokenizer bpe", field="vocab_size", value=vocab_size)
    settings, name = settings or load_settings(), name_of(locations[0]) if locations else "no path"
    with copied(locations, settings, progress, code="first-text") as (here, fill):
        # A wrong path is refused before AWS is asked.
        files = find_files(here, include, exclude, tokenizer is not None, encoding, column, fill)
        warn_of_held_out(files)
        settings = with_store(settings)
        if tokenizer is None:
            upload, files = survey(name, files, settings)
            upload = send(upload, files, settings, progress)
        else:
            upload = send_tokens(name, files, tokenizer, vocab_size, settings, progress)
        warn_of_repeats(name, upload.repeated)
    note_last_upload(upload.uri, settings)
    return upload


def with_store(settings: Settings) -> Settings:
    """The settings, with the stack's store if they have none and there is a stack.

    If AWS cannot be asked, the text stays on this machine and a launch uploads it later. Raises
    InputError if the store is in another region, and Missing if there is no stack of the name.
    """
    if settings.store.startswith("s3://") and (session := aws_session(settings)).region_name:
        region = session.region_name
        with suppress(Offline):
            check_bucket(make_client(session, "s3", region), settings.store, "store", region)
    if settings.store or not settings.reaches_aws:
        return settings
    try:
        return with_stack(settings, names=("store",))
    except Missing:  # the stack that was named
        raise
    except (InputError, ServiceError) as error:
        logger.info(f"could not look for a stack ({error}); keeping the text on this machine")
        return settings


def place(store: str) -> str:
    """The canonical name of a store."""
    return storage.to_uri(store).rstrip("/")


def survey(name: str, files: Sequence[File], settings: Settings) -> tuple[Upload, list[File]]:
    """The upload that plain text makes, and its files. Raises InputError as read_plain."""
    counts, kept = read_plain(name, files)
    uri = uri_of(name, counts.sha256, settings)
    with suppress(Offline):
        earlier = find_upload(uri, settings)
        if earlier is not None and earlier.repeated is not None:
            return replace(earlier, uploaded=False), kept
    upload = Upload(
        uri=uri,
        size=counts.size,
        sha256=counts.sha256,
        files=tuple(file.name for file in kept),
        uploaded=not is_there(uri, settings),
        characters=counts.characters,
        vocabulary_size=len(counts.vocabulary),
        vocabulary=counts.vocabulary,
        repeated=share_within(kept, counts.characters),
    )
    return upload, kept


def upload_of(
    name: str, files: Sequence[File], settings: Settings, kind: str = "data", **facts: Any
) -> Upload:
    """The upload of files as they are."""
    sha256 = digest_of(files)
    return Upload(
        uri=(uri := uri_of(name, sha256, settings, kind)),
        size=sum(file.path.stat().st_size for file in files),
        sha256=sha256,
        files=tuple(file.name for file in files),
        uploaded=not is_there(uri, settings),
        **facts,
    )


def uri_of(name: str, sha256: str, settings: Settings, kind: str = "data") -> str:
    """The URI of an upload, by the name of what was given and by what it holds."""
    stem = name.partition(".")[0] or name
    slug = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "text"
    content = f"-{sha256[:12]}"
    name = slug.removesuffix(content) + content
    return storage.to_uri(storage.join(settings.data_store, kind, name))


def send_tokens(
    name: str,
    files: Sequence[File],
    named: str | Path,
    vocab_size: int | None,
    settings: Settings,
    progress: Progress,
) -> Upload:
    """Encode text as tokens and upload them, unless they are in the store."""
    from launcher.text import tokenizer as tokenizers
    from launcher.text import tokens

    counts = tokens.survey(files)
    counts.check(name)
    wanted = vocab_size or tokenizers.fitting_size(counts.characters)
    tokenizer = None if named == "bpe" else tokenizers.find_tokenizer(str(named), settings)
    if tokenizer and counts.chats and tokenizer.unit == "characters":
        what = f"{named} was trained on characters and cannot learn conversations"
        raise InputError(what, "needs-bpe")
    how = f"bpe {wanted}"
    if tokenizer:
        how = json.dumps(tokenizer.document, ensure_ascii=False)
    key = hashlib.sha256(f"{TOKENS_VERSION} {counts.sha256} {how}".encode()).hexdigest()
    uri = uri_of(name, key, settings)
    if known := find_upload(uri, settings):
        return replace(known, uploaded=False, documents=counts.documents)
    if tokenizer is None:
        logger.info(f"tokenizer: learning {wanted:,} tokens")
        expect(progress, min(counts.size, tokenizers.SAMPLE))
        tokenizer = tokenizers.learn_tokenizer(files, wanted, progress)
        if (learned := len(tokenizer)) < wanted:
            what = f"{learned:,} tokens, not {wanted:,}: the text has no more to learn"
            logger.info(f"tokenizer: {what}")
    with temporary(settings) as directory:
        made = tokens.encode(files, counts, tokenizer, directory, progress)
        shards = [File(name, directory / name) for name in made["files"]]
        upload = Upload(
            uri=uri,
            size=sum(shard.path.stat().st_size for shard in shards),
            sha256=digest_of(shards),
            characters=counts.characters,
            documents=counts.documents,
            chats=counts.chats > 0,
            tokenizer=tokenizers.fingerprint(tokenizer),
            repeated=None if counts.chats else tokens.share_within(directory),
            **made,
        )
        return send(upload, shards, settings, progress)


def send(upload: Upload, files: Sequence[File], settings: Settings, progress: Progress) -> Upload:
    """Put a surveyed upload into the store, unless it is there.

    Returns it with its owner. Raises InputError if its files changed meanwhile.
    """
    if not upload.uploaded:
        return upload
    directory = storage.local_path(upload.uri)
    if directory is None:
        upload = replace(upload, owner=owner_of_upload(settings))
    else:
        remove_leftovers(directory.rglob(TEMPORARY_FILES))  # of an upload that was killed
    expect(progress, upload.size)
    write_files(files, upload.uri, settings, progress)
    if digest_of(files) != upload.sha256:  # leave it without a manifest
        raise InputError("the text changed during the upload; upload it again")
    manifest = {key: value for key, value in asdict(upload).items() if key != "uploaded"}
    storage.write_json(f"{upload.uri}.json", manifest, settings)
    return upload


def digest_of(files: Sequence[File]) -> str:
    """The SHA-256 over names and contents, as in read_plain."""
    digest = hashlib.sha256()
    for file in files:
        with opened(file) as content:
            own = hashlib.file_digest(content, "sha256")
        digest.update(f"{file.name}\0".encode() + own.digest())
    return digest.hexdigest()


def find_upload(uri: str, settings: Settings) -> Upload | None:
    """The upload at a URI, if it has a manifest and every file is complete."""
    upload = read_manifest(uri, settings)
    whole = upload and upload.is_whole(storage.list_files(uri.rstrip("/"), settings))
    return upload if whole else None


def is_there(uri: str, settings: Settings, unasked: bool = False) -> bool:
    """Whether an upload is complete at a URI; `unasked` if a dry run does not ask."""
    try:
        return find_upload(uri, settings) is not None
    except Offline:
        return unasked


def read_manifest(uri: str, settings: Settings) -> Upload | None:
    """What was uploaded to a URI, whether or not it is still complete."""
    if re.fullmatch(r"s3://[^/]+/?", uri):  # .json would name another bucket
        return None
    try:
        upload = storage.read_document(f"{uri.rstrip('/')}.json", Upload, settings)
    except Damaged:
        return None
    return upload and replace(upload, uri=uri)  # a moved store's manifests name its old place


def known_upload(uri: str | None, settings: Settings) -> Upload | None:
    """The manifest of a data set; None if it is gone, or was never uploaded."""
    try:
        return read_manifest(uri, settings) if uri else None
    except (InputError, ServiceError):
        return None


def located(word: str, settings: Settings) -> str:
    """The URI of an upload that is given by its name or a part of it, or was moved; else the word.

    Raises InputError for a word that is no path and means no upload, or several.
    """
    if not PART_OF_NAME.fullmatch(word) or Path(word).exists():
        return find_moved(word, settings)
    stores = [place(settings.local_store), place(with_store(settings).data_store)]
    roots = [storage.join(store, "data") for store in stores]
    if not UPLOAD_NAME.fullmatch(word):
        return find_by_part(word, roots, settings)
    for root in roots:
        uri = storage.join(root, word)
        if is_there(uri, settings, unasked=True):
            return uri
    raise InputError(f"there is neither a file nor an upload {word}", "no-upload")


def find_by_part(part: str, roots: Iterable[str], settings: Settings) -> str:
    """The URI of the upload below these roots that a part of its name means."""
    uris, failure = dict[str, str](), None
    for root in roots:
        try:
            for name in names_in(root, settings):
                uris.setdefault(name, storage.join(root, name))
        except (InputError, ServiceError) as error:
            failure = error
    match = choose(part, uris)
    if match is not None:
        if failure is not None:
            logger.info(f"{failure}; only this machine has been searched for {part}")
        return uris[match]
    if failure is not None:
        raise failure.within(f"cannot find the upload {part!r}")
    raise InputError(f"there is neither a file nor an upload {part}", "no-upload")


def names_in(root: str, settings: Settings) -> list[str]:
    """The names of the uploads at a URI that have a manifest."""
    files = storage.list_files(root, settings)
    names = [file.removesuffix(".json") for file in files if file.endswith(".json")]
    return [name for name in names if UPLOAD_NAME.fullmatch(name)]


def choose(part: str, names: Iterable[str]) -> str | None:
    """The upload that a part of a name means, of these; None if none matches.

    A part is all before the hash, or else the start or the end of a name. Raises InputError if
    several match.
    """
    names = sorted(names)
    matches = [name for name in names if name.rpartition("-")[0] == part]
    matches = matches or [name for name in names if is_part(part, name)]
    if len(matches) > 1:
        shown = ", ".join(matches[:3]) + " and more" * (len(matches) > 3)
        problem = f"{part!r} matches {len(matches)} uploads: {shown}; give more of the name"
        raise InputError(problem)
    if not matches:
        return None
    logger.info(f"{part} is upload {matches[0]}")
    return matches[0]


def last_uploads(settings: Settings) -> Cache[dict[str, str]]:
    """The URI of the last upload to each store, by `place`, the newest last."""
    return Cache(settings.home / "last-uploads.json", dict[str, str])


def note_last_upload(uri: str, settings: Settings) -> None:
    cache = last_uploads(settings)
    uris = cache.read()
    store = place(settings.data_store)
    uris.pop(store, None)
    uris[store] = uri  # the newest is the last
    storage.write_json(str(cache.file), uris)  # raises, where the cache would not


def last_upload(settings: Settings) -> str:
    """The URI of the last upload from this machine, which a launch takes unless another is named.

    It went to the store that is set, or was kept here because AWS could not be asked. Raises
    InputError if there is none, or it is deleted or incomplete.
    """
    places = {place(settings.data_store)}
    if storage.local_path(settings.data_store) is None:
        places.add(place(settings.local_store))
    last = last_uploads(settings).read()
    uris = [find_moved(uri, settings) for uri in last.values()]
    if settings.store:
        uris = [uri for uri in uris if uri.rpartition("/data/")[0] in places]
    problem = f"nothing was uploaded to {settings.data_store} from here"
    for uri in uris[-1:]:
        if is_there(uri, settings, unasked=True):
            return uri
        problem = f"the last upload, {uri}, is deleted or incomplete"
    raise InputError(problem, "no-last-upload")
