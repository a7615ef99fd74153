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

from sm_nanogpt.launcher.aws import Missing, Offline, aws_session, check_bucket, make_client
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.cache import Cache
from sm_nanogpt.launcher.files.documents import Count, Damaged
from sm_nanogpt.launcher.files.moved import PART_OF_NAME, UPLOAD_NAME, find_moved
from sm_nanogpt.launcher.files.progress import Progress, expect, no_progress
from sm_nanogpt.launcher.files.scratch import TEMPORARY_FILES, remove_leftovers
from sm_nanogpt.launcher.finding import ambiguous, is_part
from sm_nanogpt.launcher.sagemaker.caller import owner_of_upload
from sm_nanogpt.launcher.sagemaker.stack import with_stack
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.text.documents import digest_of, survey_documents, survey_text
from sm_nanogpt.launcher.text.files import FileOptions, find_files, warn_of_held_out
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.repeats import share_within, warn_of_repeats
from sm_nanogpt.launcher.text.sources import name_of, open_sources, temporary
from sm_nanogpt.launcher.text.writing import write_files
from sm_nanogpt.launcher.values import plain

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
    contexts: dict[int, Count] = field(default_factory=dict)  # how many of them need each length
    answers: dict[str, Count] = field(default_factory=dict)  # the least length of one, by part
    vocabulary: str = ""  # the characters of a text
    tokenizer: str = ""  # `tokens.fingerprint` of what made the tokens
    # The share of its validation part that stands in its training part; None: not measured.
    repeated: Annotated[float, Field(ge=0, le=1)] | None = None
    owner: str = ""  # who uploaded it to S3, as in the tag of a job

    @property
    def n_training(self) -> int:
        """The number of tokens to train on, or of characters."""
        return self.train_tokens or int(0.9 * self.characters)

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """True if these are its files, by their names and sizes in bytes."""
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
    texts = strings_of(paths)
    name = name_of(texts[0]) if texts else "no path"
    tokenizer, vocab_size = plain(tokenizer), plain(vocab_size)
    if vocab_size is not None and tokenizer != "bpe":
        raise InputError("needs the tokenizer bpe", field="vocab_size", value=vocab_size)
    options = FileOptions(
        include=strings_of(include),
        exclude=strings_of(exclude),
        records=tokenizer is not None,
        column=column,
        encoding=encoding,
    )
    settings = settings or load_settings()
    with open_sources(texts, settings, code="first-text") as sources:
        # A wrong path is refused before AWS is asked.
        files = find_files(sources, options, progress)
        warn_of_held_out(files)
        settings = with_store(settings)
        if tokenizer is None:
            upload, files = survey_upload(name, files, settings)
            upload = send(upload, files, settings, progress)
        else:
            upload = send_tokens(name, files, tokenizer, vocab_size, settings, progress)
        warn_of_repeats(name, upload.repeated)
    note_last_upload(upload.uri, settings)
    return upload


def strings_of(values: str | Path | Upload | Iterable[str | Path | Upload]) -> list[str]:
    """The paths, URIs or patterns that a user gave: one or several, of any type that has a text."""
    strings = plain(values)
    if isinstance(strings, str):
        return [strings]
    return [plain(string) for string in strings]


def with_store(settings: Settings) -> Settings:
    """Return the settings with the stack's store, if they have none and there is a stack.

    If AWS cannot be asked, the text stays on this machine and a launch uploads it later. Raises
    InputError if the store is in another region, and Missing if there is no stack of the name.
    """
    if settings.store:
        check_store(settings)
        return settings
    if not settings.reaches_aws:
        return settings
    try:
        return with_stack(settings, names=("store",))
    except Missing:  # the stack that the user named
        raise
    except (InputError, ServiceError) as error:
        logger.info(f"could not look for a stack ({error}); keeping the text on this machine")
        return settings


def check_store(settings: Settings) -> None:
    """Raise InputError if the store is on S3 in another region, unless in a dry run."""
    if not settings.store.startswith("s3://"):
        return
    session = aws_session(settings)
    region = session.region_name
    if region:
        with suppress(Offline):
            check_bucket(make_client(session, "s3", region), settings.store, "store", region)


def store_uri(store: str) -> str:
    """The URI of a store; each store has one, and may have many paths."""
    return storage.to_uri(store).rstrip("/")


def survey_upload(
    name: str, files: Sequence[File], settings: Settings
) -> tuple[Upload, list[File]]:
    """Read files of plain text; return the upload that they make, and those of them that it has.

    Raises InputError as survey_text.
    """
    survey = survey_text(name, files)
    uri = upload_uri(name, survey.sha256, settings)
    earlier = None
    with suppress(Offline):
        earlier = find_upload(uri, settings)
    if earlier is not None and earlier.repeated is not None:
        return replace(earlier, uploaded=False), survey.files
    upload = Upload(
        uri=uri,
        size=survey.size,
        sha256=survey.sha256,
        files=tuple(file.name for file in survey.files),
        uploaded=earlier is None,
        characters=survey.characters,
        vocabulary_size=len(survey.vocabulary),
        vocabulary=survey.vocabulary,
        repeated=share_within(survey.files, survey.characters),
    )
    return upload, survey.files


def upload_of(
    name: str, files: Sequence[File], settings: Settings, kind: str = "data", **facts: Any
) -> Upload:
    """The upload of files as they are, such as those of a model. facts are other fields of it."""
    sha256 = digest_of(files)
    uri = upload_uri(name, sha256, settings, kind)
    return Upload(
        uri=uri,
        size=sum(file.path.stat().st_size for file in files),
        sha256=sha256,
        files=tuple(file.name for file in files),
        uploaded=not is_uploaded(uri, settings),
        **facts,
    )


def upload_uri(name: str, sha256: str, settings: Settings, kind: str = "data") -> str:
    """The URI of an upload: the name of the text, and the begin of the hash of its content."""
    stem = name.partition(".")[0] or name
    slug = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "text"
    suffix = f"-{sha256[:12]}"
    return storage.to_uri(
        storage.join(settings.data_store, kind, slug.removesuffix(suffix) + suffix)
    )


def send_tokens(
    name: str,
    files: Sequence[File],
    tokenizer_name: str | Path,
    vocab_size: int | None,
    settings: Settings,
    progress: Progress,
) -> Upload:
    """Encode text as tokens and upload them, unless they are in the store."""
    from sm_nanogpt.launcher.text import tokens
    from sm_nanogpt.launcher.text.tokenizer import (
        find_tokenizer,
        fingerprint,
        fitting_size,
        learn_bpe,
    )

    survey = survey_documents(files)
    survey.check(name)
    vocab_size = vocab_size or fitting_size(survey.characters)
    recipe = f"bpe {vocab_size}"
    tokenizer = None
    if tokenizer_name != "bpe":
        tokenizer = find_tokenizer(str(tokenizer_name), settings)
        if survey.chats and tokenizer.unit == "characters":
            problem = "was trained on characters and cannot learn conversations"
            raise InputError(f"{tokenizer_name} {problem}", "needs-bpe")
        recipe = json.dumps(tokenizer.document, ensure_ascii=False)

    key = hashlib.sha256(f"{TOKENS_VERSION} {survey.sha256} {recipe}".encode()).hexdigest()
    uri = upload_uri(name, key, settings)
    earlier = find_upload(uri, settings)
    if earlier is not None:
        return replace(earlier, uploaded=False, documents=survey.documents)
    if tokenizer is None:
        tokenizer = learn_bpe(files, vocab_size, survey.size, progress)
    with temporary(settings) as directory:
        encoded = tokens.encode(files, survey, tokenizer, directory, progress)
        shards = [File(name, directory / name) for name in encoded["files"]]
        upload = Upload(
            uri=uri,
            size=sum(shard.path.stat().st_size for shard in shards),
            sha256=digest_of(shards),
            characters=survey.characters,
            documents=survey.documents,
            chats=survey.chats > 0,
            tokenizer=fingerprint(tokenizer),
            repeated=None if survey.chats else tokens.share_within(directory),
            **encoded,
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


# -- find ------------------------------------------------------------------------------------------


def find_upload(uri: str, settings: Settings) -> Upload | None:
    """The upload at a URI, or None if it has no manifest or a file of it is not complete."""
    upload = read_manifest(uri, settings)
    if upload is None or not upload.is_whole(storage.list_files(uri.rstrip("/"), settings)):
        return None
    return upload


def is_uploaded(uri: str, settings: Settings, if_offline: bool = False) -> bool:
    """True if an upload is complete at a URI. A dry run does not ask S3; it gets `if_offline`."""
    try:
        return find_upload(uri, settings) is not None
    except Offline:
        return if_offline


def read_manifest(uri: str, settings: Settings) -> Upload | None:
    """What was uploaded to a URI, whether or not it is still complete; None if nothing was."""
    if re.fullmatch(r"s3://[^/]+/?", uri):  # .json would name another bucket
        return None
    try:
        upload = storage.read_document(f"{uri.rstrip('/')}.json", Upload, settings)
    except Damaged:
        return None
    if upload is None:
        return None
    return replace(upload, uri=uri)  # the store may have been moved since


def known_upload(uri: str | None, settings: Settings) -> Upload | None:
    """The manifest of a text; None if it is gone, or if it cannot be read."""
    if not uri:
        return None
    try:
        return read_manifest(uri, settings)
    except (InputError, ServiceError):
        return None


def find_text(typed: str, settings: Settings) -> str:
    """Resolve the name of an upload, a part of the name, or its earlier location to its URI.

    Another path or URI is returned as it is. Raises InputError if what the user typed is no path,
    and is the name of no upload or a part of several names.
    """
    if not PART_OF_NAME.fullmatch(typed) or Path(typed).exists():
        return find_moved(typed, settings)
    stores = (settings.local_store, with_store(settings).data_store)
    roots = [storage.join(store_uri(store), "data") for store in stores]
    if not UPLOAD_NAME.fullmatch(typed):
        return find_by_part(typed, roots, settings)
    for root in roots:
        uri = storage.join(root, typed)
        if is_uploaded(uri, settings, if_offline=True):
            return uri
    raise no_upload(typed)


def no_upload(typed: str) -> InputError:
    return InputError(f"there is neither a file nor an upload {typed}", "no-upload")


def find_by_part(part: str, roots: Iterable[str], settings: Settings) -> str:
    """The URI of the upload below these roots that a part of its name means."""
    uris: dict[str, str] = {}
    failure: InputError | ServiceError | None = None
    for root in roots:
        try:
            for name in names_in(root, settings):
                uris.setdefault(name, storage.join(root, name))
        except (InputError, ServiceError) as error:
            failure = error
    match = choose(part, uris)
    if match is None:
        if failure is not None:
            raise failure.within(f"cannot find the upload {part!r}")
        raise no_upload(part)
    if failure is not None:
        logger.info(f"{failure}; only this machine has been searched for {part}")
    return uris[match]


def names_in(root: str, settings: Settings) -> list[str]:
    """The names of the uploads below a URI that have a manifest."""
    names = []
    for file in storage.list_files(root, settings):
        name = file.removesuffix(".json")
        if name != file and UPLOAD_NAME.fullmatch(name):
            names.append(name)
    return names


def choose(part: str, names: Iterable[str]) -> str | None:
    """The upload that a part of a name means, of these; None if it means none.

    A part is all before the hash, or else the start or the end of a name. Raises InputError if
    several match.
    """
    names = sorted(names)
    matches = [name for name in names if name.rpartition("-")[0] == part]
    if not matches:
        matches = [name for name in names if is_part(part, name)]
    if not matches:
        return None
    if len(matches) > 1:
        raise ambiguous(part, matches, "uploads", "name")
    logger.info(f"{part} is upload {matches[0]}")
    return matches[0]


def last_uploads(settings: Settings) -> Cache[dict[str, str]]:
    """The URI of the last upload to each store, by the URI of the store, the newest last."""
    return Cache(settings.home / "last-uploads.json", dict[str, str])


def note_last_upload(uri: str, settings: Settings) -> None:
    """Record the last upload. Raises ServiceError if the disk is full."""
    cache = last_uploads(settings)
    uris = cache.read()
    store = store_uri(settings.data_store)
    uris.pop(store, None)
    uris[store] = uri  # the newest is the last
    storage.write_json(str(cache.file), uris)


def last_upload(settings: Settings) -> str:
    """The URI of the last upload from this machine, which a launch takes by default.

    It went to the store that is set, or was kept here because AWS could not be asked. Raises
    InputError if there is none, or it is deleted or incomplete.
    """
    uris = [find_moved(uri, settings) for uri in last_uploads(settings).read().values()]
    if settings.store:
        stores = {store_uri(settings.data_store)}
        if storage.local_path(settings.data_store) is None:
            stores.add(store_uri(settings.local_store))
        uris = [uri for uri in uris if uri.rpartition("/data/")[0] in stores]
    if not uris:
        problem = f"nothing was uploaded to {settings.data_store} from here"
        raise InputError(problem, "no-last-upload")
    uri = uris[-1]
    if not is_uploaded(uri, settings, if_offline=True):
        raise InputError(f"the last upload, {uri}, is deleted or incomplete", "no-last-upload")
    return uri
