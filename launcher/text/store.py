"""Find uploads in a store: by URI, by name, or the last one.

An upload is a prefix `STORE/data/NAME-HASH/`. The hash covers the names and contents of its files,
so the data of a job never change. Its manifest, `STORE/data/NAME-HASH.json`, is written last: an
upload without a manifest is incomplete.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sm_nanogpt.launcher.aws import Missing, Offline, aws_session, check_bucket, make_client
from sm_nanogpt.launcher.errors import InputError, ServiceError, did_you_mean
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.cache import Cache
from sm_nanogpt.launcher.files.documents import Count, Damaged
from sm_nanogpt.launcher.files.moved import PART_OF_NAME, UPLOAD_NAME, find_moved
from sm_nanogpt.launcher.finding import ambiguity_error, is_part
from sm_nanogpt.launcher.locations import is_on_s3, last_part
from sm_nanogpt.launcher.sagemaker.stack import with_stack
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

VALIDATION_FRACTION = 0.1  # of a text that comes without a validation text: its end


@dataclass(frozen=True)
class Upload:
    """Files in a store, or on their way there: a text, tokens of one, or a model."""

    uri: str
    size: Count  # bytes
    sha256: str
    files: Annotated[tuple[str, ...], Field(fail_fast=True)]
    uploaded: bool = True  # False: the store had it already
    characters: Count = 0  # 0: a model
    vocabulary_size: Count = 0
    train_tokens: Count = 0  # 0: text, which a run takes by characters
    val_tokens: Count = 0
    documents: Count = 0  # the number that were encoded as tokens
    chats: bool = False  # True: the documents are conversations
    contexts: dict[int, Count] = field(default_factory=dict)  # number of conversations, by length
    # The shortest context that holds an answer, by part.
    answers: dict[str, Count] = field(default_factory=dict)
    vocabulary: str = ""  # the characters of a text
    tokenizer: str = ""  # the `fingerprint` of the tokenizer that made the tokens
    # The share of the validation part that the training part contains; None: not measured.
    repeated: Annotated[float, Field(ge=0, le=1)] | None = None
    owner: str = ""  # who uploaded it to S3, as in the tag of a job

    def n_training(self, validation_fraction: float = VALIDATION_FRACTION) -> int:
        """The tokens to train on; or the characters, if a fraction at the end validates."""
        return self.train_tokens or int(self.characters * (1 - validation_fraction))

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """True if these are its files, by their names and sizes in bytes."""
        return set(sizes) == set(self.files) and sum(sizes.values()) == self.size


def with_store(settings: Settings) -> Settings:
    """Return the settings with the stack's store, if they have no store and there is a stack.

    If AWS cannot be asked, the text stays on this machine, and a launch uploads it later. Raises
    InputError if the store is in another region, and Missing if the stack that the user named does
    not exist.
    """
    if settings.store:
        check_store(settings)
        return settings
    if not settings.reaches_aws:
        return settings
    try:
        return with_stack(settings, names=("store",))
    except Missing:  # the user named this stack
        raise
    except (InputError, ServiceError) as error:
        logger.info(f"could not look for a stack ({error}); keeping the text on this machine")
        return settings


def check_store(settings: Settings) -> None:
    """Raise InputError if the store is on S3 in another region. A dry run does not check."""
    if not is_on_s3(settings.store):
        return
    session = aws_session(settings)
    region = session.region_name
    if region:
        with suppress(Offline):
            check_bucket(make_client(session, "s3", region), settings.store, "store", region)


def named_by(uri: str, settings: Settings) -> str:
    """What a user may type for the text at a URI: the name of an upload, if it is in a store of
    these settings, or else the URI."""
    store, _, name = uri.rstrip("/").rpartition("/data/")
    stores = (store_uri(settings.local_store), store_uri(settings.data_store))
    return name if store in stores and UPLOAD_NAME.fullmatch(name) else uri


def has_new_store(settings: Settings) -> bool:
    """True if the user set a directory as the store, and it does not exist yet."""
    directory = storage.local_path(store_uri(settings.data_store))
    return bool(settings.store) and directory is not None and not directory.exists()


def check_store_directory(settings: Settings) -> None:
    """Raise InputError if the store is a directory that does not exist, or may not be read."""
    if has_new_store(settings):
        raise InputError("there is no such directory", field="store", value=settings.store)
    directory = storage.local_path(store_uri(settings.data_store))
    if directory is None or not directory.exists():
        return
    if not os.access(directory, os.R_OK | os.X_OK):
        raise InputError("permission denied", field="store", value=settings.data_store)


def store_uri(store: str) -> str:
    """The URI of a store, which may be named by several paths, and has one URI."""
    return storage.to_uri(store).rstrip("/")


def upload_uri(name: str, sha256: str, settings: Settings, kind: str = "data") -> str:
    """The URI of an upload, with the name of the text and the first digits of its hash."""
    stem = name.partition(".")[0] or name
    slug = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "text"
    suffix = f"-{sha256[:12]}"
    return storage.to_uri(
        storage.join(settings.data_store, kind, slug.removesuffix(suffix) + suffix)
    )


def find_upload(uri: str, settings: Settings) -> Upload | None:
    """Find the upload at a URI; None if it has no manifest, or a file is missing or incomplete."""
    upload = read_manifest(uri, settings)
    if upload is None or not upload.is_whole(storage.list_files(uri.rstrip("/"), settings)):
        return None
    return upload


def is_uploaded(uri: str, settings: Settings, if_offline: bool = False) -> bool:
    """True if the upload at a URI is complete. if_offline is returned in a dry run, which does not
    ask S3."""
    try:
        return find_upload(uri, settings) is not None
    except Offline:
        return if_offline


def read_manifest(uri: str, settings: Settings) -> Upload | None:
    """Read the manifest of an upload, which may be incomplete by now; None if there is none."""
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
    """Read the manifest of a text; None if there is no URI, no manifest, or no access to it."""
    if not uri:
        return None
    try:
        return read_manifest(uri, settings)
    except (InputError, ServiceError):
        return None


def deleted_uploads(uris: Iterable[str], settings: Settings) -> list[str]:
    """The names of the uploads at these URIs that have no manifest, or a damaged one.

    Other URIs do not count, and neither do the uploads of a store that cannot be asked.
    """
    names = []
    for uri in uris:
        name = last_part(uri)
        if not UPLOAD_NAME.fullmatch(name):
            continue
        with suppress(InputError, ServiceError):
            if read_manifest(uri, settings) is None:
                names.append(name)
    return names


def find_text(typed: str, settings: Settings) -> str:
    """Return the URI of the upload that a user named by its name, a part of that, or an earlier
    location.

    Any other path or URI is returned unchanged. Raises InputError if `typed` is no path, and
    either names no upload or is a part of several names.
    """
    if not PART_OF_NAME.fullmatch(typed) or Path(typed).exists():
        return find_moved(typed, settings)
    check_store_directory(settings)
    stores = (settings.local_store, with_store(settings).data_store)
    roots = [storage.join(store_uri(store), "data") for store in stores]
    if not UPLOAD_NAME.fullmatch(typed):
        return find_by_part(typed, roots, settings)
    for root in roots:
        uri = storage.join(root, typed)
        if is_uploaded(uri, settings, if_offline=True):
            return uri
    names: list[str] = []
    for root in roots:
        with suppress(InputError, ServiceError):
            names += upload_names_in(root, settings)
    raise no_upload_error(typed, names)


def no_upload_error(typed: str, names: Iterable[str]) -> InputError:
    """The error for a name that is neither a file nor an upload, with similar names of uploads."""
    problem = f"there is neither a file nor an upload {typed}"
    suggestion = upload_suggestion(typed, names)
    if suggestion:
        problem += f"; {suggestion}"
    return InputError(problem, code="no-upload")


def upload_suggestion(typed: str, names: Iterable[str]) -> str:
    """Return `did you mean A or B?` with names of uploads that are like `typed`; or ''."""
    names = sorted(set(names))  # two stores may have the same upload, or be one store
    stems = sorted({name.rpartition("-")[0] for name in names})
    return did_you_mean(typed, stems) or did_you_mean(typed, names)


def find_by_part(part: str, roots: Iterable[str], settings: Settings) -> str:
    """The URI of the upload below these roots whose name has a part. See choose_upload.

    If one root cannot be listed, the others count. Raises InputError or ServiceError if no upload
    matches.
    """
    uris: dict[str, str] = {}
    failure: InputError | ServiceError | None = None
    for root in roots:
        try:
            for name in upload_names_in(root, settings):
                uris.setdefault(name, storage.join(root, name))
        except (InputError, ServiceError) as error:
            failure = error
    match = choose_upload(part, uris)
    if match is None:
        if failure is not None:
            raise failure.within(f"cannot find the upload {part!r}")
        raise no_upload_error(part, uris)
    if failure is not None:
        logger.info(f"{failure}; only this machine has been searched for {part}")
    return uris[match]


def upload_names_in(root: str, settings: Settings) -> list[str]:
    """The names of the uploads below a URI that have a manifest."""
    names = []
    for file in storage.list_files(root, settings):
        name = file.removesuffix(".json")
        if name != file and UPLOAD_NAME.fullmatch(name):
            names.append(name)
    return names


def local_upload_names(settings: Settings) -> list[str]:
    """The names of the uploads in this machine's store, sorted."""
    return sorted(upload_names_in(storage.join(store_uri(settings.local_store), "data"), settings))


def choose_upload(part: str, names: Iterable[str]) -> str | None:
    """Choose the name of an upload that has a part; None if no name has it.

    A part is the name without its hash, or else the start or the end of the name. Raises InputError
    if several names match.
    """
    names = sorted(names)
    matches = [name for name in names if name.rpartition("-")[0] == part]
    if not matches:
        matches = [name for name in names if is_part(part, name)]
    if not matches:
        return None
    if len(matches) > 1:
        raise ambiguity_error(part, matches, "uploads", "name")
    logger.info(f"{part} is upload {matches[0]}")
    return matches[0]


def last_uploads(settings: Settings) -> Cache[dict[str, str]]:
    """The URIs of the last upload to each store, by the URI of the store, the newest last."""
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

    It went to the store of the settings, or stayed here because AWS could not be asked. Raises
    InputError if there is none, it is deleted or incomplete, or the store does not exist.
    """
    check_store_directory(settings)
    uris = [find_moved(uri, settings) for uri in last_uploads(settings).read().values()]
    if settings.store:
        stores = {store_uri(settings.data_store)}
        if is_on_s3(settings.data_store):
            stores.add(store_uri(settings.local_store))
        uris = [uri for uri in uris if uri.rpartition("/data/")[0] in stores]
    if not uris:
        problem = f"nothing was uploaded to {settings.data_store} from here"
        raise InputError(problem, code="no-last-upload")
    uri = uris[-1]
    if not is_uploaded(uri, settings, if_offline=True):
        raise InputError(f"the last upload, {uri}, is deleted or incomplete", code="no-last-upload")
    return uri
