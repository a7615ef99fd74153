"""Upload text to the store, and find the last upload.

A data set is a prefix `STORE/data/NAME-HASH/`. The hash covers the names and contents of its files,
so the data of a job never change. Its manifest, `STORE/data/NAME-HASH.json`, is written last: a
prefix without one is an incomplete upload.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from launcher.aws import Missing, aws_session, check_bucket, make_client
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.documents import Count, Damaged
from launcher.files.models import is_path
from launcher.files.storage import Progress
from launcher.sagemaker.stack import with_stack
from launcher.settings import Settings, load_settings
from launcher.text.files import check_enough, check_text, find_files, may_be_read
from launcher.text.formats import File, opened, stored, warn_of
from launcher.text.sources import local_paths, named_by

if TYPE_CHECKING:  # it imports torch
    from launcher.text.tokenizer import Words

logger = logging.getLogger(__name__)


NO_UPLOAD = "run `sm-nanogpt upload-data FILE`, or give --data one of `sm-nanogpt data`"
NAME = re.compile(r"[a-z0-9-]+-[0-9a-f]{12}")  # of an upload
TOKENS_VERSION = 5  # of what launcher.text.tokens writes


@dataclass(frozen=True)
class Upload:
    """A data set in a store. size is in bytes; uploaded is False if it was already there."""

    uri: str
    size: Count
    characters: Count
    vocabulary_size: Count
    sha256: str
    files: Annotated[tuple[str, ...], Field(fail_fast=True)]
    uploaded: bool = True
    train_tokens: Count = 0  # 0: the data set is text, which a run takes by characters
    val_tokens: Count = 0
    documents: Count = 0  # that were encoded as tokens
    chats: bool = False  # whether they are conversations
    contexts: dict[int, Count] = field(default_factory=dict)  # how many of them need each one
    answers: dict[str, Count] = field(default_factory=dict)  # the least that holds one, by part
    vocabulary: str = ""  # the characters of a text
    tokenizer: str = ""  # `tokens.fingerprint` of what made the tokens

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """Whether these are its files, by their names and bytes."""
        return set(sizes) == set(self.files) and sum(sizes.values()) == self.size


def upload_data(
    paths: str | Path | Iterable[str | Path],
    settings: Settings | None = None,
    progress: Progress = lambda n: None,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    column: str = "text",
    encoding: str = "",
) -> Upload:
    """Puts files of text, and those below folders, into the store as one data set.

    A path may also be `-`, for standard input, hf://datasets/OWNER/NAME/... or s3://bucket/... .
    docs/tokens.md has the formats. include adds plain text by patterns, such as `*.py`; exclude
    leaves out files or folders; encoding is that of files that are not UTF-8.

    With a tokenizer, the data set is of tokens: `bpe` learns vocab_size of them from the text
    (None: as many as fit it); else it is a tokenizer.json, a directory or a job that has one. Then
    files may also hold records: conversations, or documents in the field `column`.

    The default store is that of the stack, if AWS is configured and there is one; else it is on
    this machine. Text that is already there is not sent again.

    Raises:
        InputError: the files are not text, or too short to train on; or as with_store.
        ServiceError: the store failed.
    """
    sources = [paths] if isinstance(paths, (str, Path)) else list(paths)
    include, exclude = ((each,) if isinstance(each, str) else each for each in (include, exclude))
    if not sources:
        raise InputError("no path is given; name a file or a folder of text")
    if vocab_size is not None and tokenizer != "bpe":
        raise InputError("--vocab-size requires --tokenizer bpe")
    settings, tokens = settings or load_settings(), tokenizer is not None
    wanted = partial(may_be_read, include=include, exclude=exclude, tokens=tokens)
    with local_paths(sources, settings, progress, wanted) as roots:
        # A wrong path is refused before AWS is asked.
        files = find_files(roots, include, exclude, tokens, encoding, column)
        settings, root = with_store(settings), named_by(sources[0])
        if tokenizer is None:
            upload, kept = survey(root, files, settings)
            send(upload, kept, settings, progress)
        else:
            upload = send_tokens(root, files, tokenizer, vocab_size, settings, progress)
    noted = storage.read_cache(settings.last_uploads, dict[str, str])
    noted.pop(place(settings.data_store), None)
    noted[place(settings.data_store)] = upload.uri  # the newest is the last
    storage.write_json(str(settings.last_uploads), noted)
    return upload


def with_store(settings: Settings) -> Settings:
    """The settings, with the stack's store if they have none and there is a stack.

    If AWS cannot be asked, the text stays on this machine and a launch uploads it later.

    Raises:
        InputError: the store is a bucket of another region than the one that is set.
        Missing: the stack that the user named does not exist.
    """
    if settings.store.startswith("s3://") and (session := aws_session(settings)).region_name:
        region = session.region_name
        check_bucket(make_client(session, "s3", region), settings.store, "--store", region)
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


def survey(root: Path, files: Sequence[File], settings: Settings) -> tuple[Upload, list[File]]:
    """The data set that plain text makes, and its files. Raises InputError as check_text."""
    text, kept = check_text(root, files)
    uri = place_of(root, text.sha256, settings)
    upload = Upload(
        uri=uri,
        files=tuple(file.name for file in kept),
        uploaded=not is_there(uri, settings),
        vocabulary_size=len(text.vocabulary),
        **asdict(text),
    )
    return upload, kept


def place_of(root: Path, sha256: str, settings: Settings, kind: str = "data") -> str:
    """The URI of a data set, or a model, by the name of its source and by what it holds."""
    stem = root.absolute().name.partition(".")[0] or root.absolute().name
    slug = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "text"
    content = f"-{sha256[:12]}"
    name = slug.removesuffix(content) + content
    return storage.to_uri(storage.join(settings.data_store, kind, name))


def send_tokens(
    root: Path,
    files: Sequence[File],
    tokenizer: str | Path,
    vocab_size: int | None,
    settings: Settings,
    progress: Progress,
) -> Upload:
    """Encode text as tokens and upload them, unless they are in the store."""
    from launcher.text import tokens
    from launcher.text.tokenizer import SAMPLE, fingerprint, fitting_size, learn_words

    source = tokens.survey(files)
    warn_of(source.odd)
    check_enough(root, source.characters)
    wanted = vocab_size or fitting_size(source.characters)
    words = None if tokenizer == "bpe" else find_words(str(tokenizer), settings)
    if words and source.chats and words.tokenizer.unit == "characters":
        raise InputError(
            f"{tokenizer} was trained on characters and cannot learn conversations; train a base on"
            " `sm-nanogpt upload-data TEXT --tokenizer bpe`"
        )
    how = words.content if words else f"bpe {wanted}"
    key = hashlib.sha256(f"{TOKENS_VERSION} {source.sha256} {how}".encode()).hexdigest()
    uri = place_of(root, key, settings)
    if known := find_upload(uri, settings):
        return replace(known, uploaded=False, documents=source.documents)
    if words is None:
        logger.info(f"tokenizer: learning {wanted:,} tokens")
        storage.expect(progress, min(source.size, SAMPLE))
        words = learn_words(files, wanted, progress)
        if (learned := len(words.tokenizer)) < wanted:
            logger.info(
                f"tokenizer: {learned:,} tokens, not {wanted:,}: the text has no more to learn"
            )
    cache = settings.cache_dir
    with storage.reported(str(cache)):
        cache.mkdir(parents=True, exist_ok=True)
    with (
        storage.reported(str(cache)),
        tempfile.TemporaryDirectory(prefix="tokens-", dir=cache) as temporary,
    ):
        directory = Path(temporary)
        made = tokens.encode(files, source, words, directory, progress)
        logger.info(f"tokenizer: {made.train:,} tokens to train on, {made.val:,} to validate on")
        if (part := made.val / (made.train + made.val)) > 2 * tokens.VALIDATION_FRACTION:
            logger.warning(
                f"{part:.0%} of the tokens are for validation: each document is whole, and longer"
                " than a tenth of the text"
            )
        shards = [File(name, directory / name) for name in made.files]
        upload = Upload(
            uri=uri,
            size=sum(shard.path.stat().st_size for shard in shards),
            characters=source.characters,
            vocabulary_size=made.vocabulary_size,
            sha256=digest_of(shards),
            files=made.files,
            train_tokens=made.train,
            val_tokens=made.val,
            documents=source.documents,
            chats=source.chats > 0,
            contexts=made.contexts,
            answers=made.answers,
            tokenizer=fingerprint(words.tokenizer),
        )
        send(upload, shards, settings, progress)
    return upload


def find_words(word: str, settings: Settings) -> Words:
    """The tokenizer that a user named: a file, a directory or a job."""
    from launcher.text.tokenizer import open_words

    path = storage.path_of(word)
    if is_path(word) or word.endswith(".json"):
        if not path.exists():
            raise InputError(f"{word}: no such file or directory")
        return open_words(path)
    from launcher.models.fetch import fetch_model

    return open_words(fetch_model(word, settings))


def send(
    upload: Upload, files: Sequence[File], settings: Settings, progress: Progress = lambda n: None
) -> None:
    """Upload a surveyed data set, unless it is in the store.

    Raises:
        InputError: the text has changed since it was surveyed.
        ServiceError: the store failed.
    """
    if not upload.uploaded:
        return
    storage.expect(progress, upload.size)
    for file in files:
        with stored(file) as path:
            storage.write_file(path, storage.join(upload.uri, file.name), progress, settings)
    if digest_of(files) != upload.sha256:  # leave it without a manifest
        raise InputError("the text changed during the upload; upload it again")
    manifest = {key: value for key, value in asdict(upload).items() if key != "uploaded"}
    storage.write_json(f"{upload.uri}.json", manifest, settings)


def digest_of(files: Sequence[File]) -> str:
    """The SHA-256 over names and contents, as in check_text."""
    digest = hashlib.sha256()
    for file in files:
        with opened(file) as content:
            own = hashlib.file_digest(content, "sha256")
        digest.update(f"{file.name}\0".encode() + own.digest())
    return digest.hexdigest()


def find_upload(uri: str, settings: Settings) -> Upload | None:
    """The data set at a URI, if it has a manifest and every file is complete."""
    upload = read_manifest(uri, settings)
    whole = upload and upload.is_whole(storage.list_files(uri.rstrip("/"), settings))
    return upload if whole else None


def is_there(uri: str, settings: Settings) -> bool:
    """Whether a data set is complete at a URI. A dry run does not ask, and takes it as missing."""
    return not settings.offline and find_upload(uri, settings) is not None


def read_manifest(uri: str, settings: Settings) -> Upload | None:
    """What was uploaded to a URI, whether or not it is still complete."""
    if re.fullmatch(r"s3://[^/]+/?", uri):  # .json would name another bucket
        return None
    try:
        return storage.read_document(f"{uri.rstrip('/')}.json", Upload, settings)
    except Damaged:
        return None


def located(word: str, settings: Settings) -> str:
    """The URI of the upload that `sm-nanogpt data` lists under a name; else the word."""
    if not NAME.fullmatch(word) or Path(word).exists():
        return word
    stores = [settings.local_store, with_store(settings).data_store]
    uris = [storage.to_uri(storage.join(store, "data", word)) for store in stores]
    for uri in uris:
        if (settings.offline and storage.local_path(uri) is None) or find_upload(uri, settings):
            return uri
    raise InputError(f"there is no upload {word}: `sm-nanogpt data` lists them")


def last_upload(settings: Settings) -> str:
    """The URI of the data set that a launch without --data uses: the last upload from this machine.

    It went to the store that is set, or was kept here because AWS could not be asked.

    Raises:
        InputError: nothing was uploaded, or it is deleted or incomplete.
    """
    places = {place(settings.data_store)}
    if storage.local_path(settings.data_store) is None:
        places.add(place(settings.local_store))
    noted = storage.read_cache(settings.last_uploads, dict[str, str])
    mine = [uri for each, uri in noted.items() if each in places or not settings.store]
    if not mine:
        raise InputError(f"nothing was uploaded to {settings.data_store} from here: {NO_UPLOAD}")
    asks = not settings.offline or storage.local_path(mine[-1]) is not None
    if asks and find_upload(mine[-1], settings) is None:
        raise InputError(f"the last upload, {mine[-1]}, is deleted or incomplete: {NO_UPLOAD}")
    return mine[-1]
