"""Upload text to the store."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sm_nanogpt.launcher.aws import Offline
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.progress import Progress, expect, no_progress
from sm_nanogpt.launcher.files.scratch import TEMPORARY_PATTERN, remove_leftovers
from sm_nanogpt.launcher.sagemaker.caller import owner_of_upload
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.text import LEARN_BPE
from sm_nanogpt.launcher.text.documents import digest_of, survey_documents, survey_text
from sm_nanogpt.launcher.text.files import FileOptions, find_files, warn_of_held_out
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.repeats import share_within_text, warn_of_repeats
from sm_nanogpt.launcher.text.sources import TextSource, find_path, open_sources, temporary
from sm_nanogpt.launcher.text.store import (
    Upload,
    find_upload,
    has_new_store,
    is_uploaded,
    note_last_upload,
    upload_uri,
    with_store,
)
from sm_nanogpt.launcher.text.writing import FileWriter
from sm_nanogpt.launcher.values import plain

logger = logging.getLogger(__name__)

TOKENS_VERSION = 6  # of the files that launcher.text.tokens writes


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
    me: str = "",
) -> Upload:
    """Upload files of text, and the files below folders, to the store as one upload.

    A path may also be `-`, for standard input, hf://datasets/OWNER/NAME/... or s3://bucket/... .
    docs/tokens.md has the formats. include has patterns, such as `*.py`, of files to take as plain
    text; exclude has patterns of files and folders to leave out. encoding is that of files that are
    not UTF-8. me is the person in exported chats whose messages the model learns to write.

    With a tokenizer, the upload is of tokens. The tokenizer `bpe` learns vocab_size tokens from the
    text (None: a number that fits its length). Any other names a tokenizer.json, or a directory or
    a job that has one. Then files may also hold records: conversations, or documents in the field
    `column`.

    The default store is that of the stack, if AWS is configured and there is a stack; else it is on
    this machine. A text that the store has is not sent again.

    Raises InputError if the files are not text or are too short to train on, and as with_store
    does; ServiceError if the store fails.
    """
    texts = strings_of(paths)
    tokenizer = plain(tokenizer)
    vocab_size = plain(vocab_size)
    if vocab_size is not None and tokenizer != LEARN_BPE:
        raise InputError("needs the tokenizer bpe", field="vocab_size", value=vocab_size)
    options = FileOptions(
        include=strings_of(include),
        exclude=strings_of(exclude),
        records=tokenizer is not None,
        column=column,
        encoding=encoding,
        me=me,
    )
    if me and tokenizer is None:
        raise InputError(
            "is for chats, which are read as tokens", code="chats-as-tokens", field="me"
        )
    settings = settings or load_settings()
    with open_sources(texts, settings, code="first-text") as sources:
        # A wrong path is refused before AWS is asked.
        files = find_files(sources, options, progress)
        warn_of_held_out(files)
        name = name_of_first(sources, files)
        settings = with_store(settings)
        if tokenizer is None:
            upload, files = survey_upload(name, files, settings)
            upload = send(upload, files, settings, progress)
        else:
            upload = send_tokens(name, files, tokenizer, vocab_size, settings, progress)
        warn_of_repeats(name, upload.repeated)
    note_last_upload(upload.uri, settings)
    return upload


def name_of_first(sources: Sequence[TextSource], files: Sequence[File]) -> str:
    """The name of the first source from which a file is taken.

    An empty file is left out, and so is one that `exclude` fits. If no file is taken, it is the
    name of the first source.
    """
    paths = [file.path for file in files if file.path.stat().st_size > 0]
    for source in sources:
        if any(path.is_relative_to(source.path) for path in paths):
            return source.name
    return sources[0].name if sources else "no path"


def strings_of(values: str | Path | Upload | Iterable[str | Path | Upload]) -> list[str]:
    """The paths, URIs, or patterns that a user gave as one value or several, as strings."""
    strings = plain(values)
    if isinstance(strings, str):
        return [strings]
    return [plain(string) for string in strings]


def survey_path(path: Path, settings: Settings) -> tuple[Upload, list[File]]:
    """Read the text at a path of this machine; return its upload, and the files that it has.

    Raises InputError as find_path, find_files and survey_upload.
    """
    files = find_files([TextSource(find_path(str(path)))])
    warn_of_held_out(files)
    return survey_upload(path.name, files, settings)


def survey_upload(
    name: str, files: Sequence[File], settings: Settings
) -> tuple[Upload, list[File]]:
    """Read files of plain text; return their upload, and the files that it has.

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
        repeated=share_within_text(survey.files, survey.characters),
    )
    return upload, survey.files


def upload_of(
    name: str, files: Sequence[File], settings: Settings, kind: str = "data", **facts: Any
) -> Upload:
    """The upload of files that are not converted, such as a model's. facts: its other fields."""
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


def send_tokens(
    name: str,
    files: Sequence[File],
    tokenizer_name: str | Path,
    vocab_size: int | None,
    settings: Settings,
    progress: Progress,
) -> Upload:
    """Encode files as tokens and upload these, unless the store has them."""
    from sm_nanogpt.launcher.text import tokens
    from sm_nanogpt.launcher.text.tokenizer import (
        SAMPLE_BYTES,
        find_tokenizer,
        fingerprint,
        fitting_size,
        learn_tokenizer,
    )

    survey = survey_documents(files)
    survey.check(name)
    survey.skipped.talks.check_name(files[0].me)
    vocab_size = vocab_size or fitting_size(survey.characters)
    recipe = f"bpe {vocab_size}"
    tokenizer = None
    if tokenizer_name != LEARN_BPE:
        tokenizer = find_tokenizer(str(tokenizer_name), settings)
        if survey.chats and tokenizer.unit == "characters":
            problem = "was trained on characters and cannot learn conversations"
            raise InputError(f"{tokenizer_name} {problem}", code="needs-bpe")
        recipe = json.dumps(tokenizer.document, ensure_ascii=False)

    key = hashlib.sha256(f"{TOKENS_VERSION} {survey.sha256} {recipe}".encode()).hexdigest()
    uri = upload_uri(name, key, settings)
    earlier = find_upload(uri, settings)
    if earlier is not None:
        return replace(earlier, uploaded=False, documents=survey.documents)
    if tokenizer is None:
        expect(progress, min(survey.size, SAMPLE_BYTES))
        tokenizer = learn_tokenizer(files, vocab_size, progress)
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
            repeated=None if survey.chats else tokens.share_within_tokens(directory),
            **encoded,
        )
        return send(upload, shards, settings, progress)


def send(upload: Upload, files: Sequence[File], settings: Settings, progress: Progress) -> Upload:
    """Write a surveyed upload into the store, unless the store has it.

    Returns the upload with its owner. Raises InputError if its files changed meanwhile.
    """
    if not upload.uploaded:
        return upload
    directory = storage.local_path(upload.uri)
    if directory is None:
        upload = replace(upload, owner=owner_of_upload(settings))
    else:
        remove_leftovers(directory.rglob(TEMPORARY_PATTERN))  # those of an upload that was killed
        if has_new_store(settings):
            logger.info(f"new store: {settings.store}")
    expect(progress, upload.size)
    FileWriter(upload.uri, settings, progress).write_all(files)
    if digest_of(files) != upload.sha256:  # without a manifest, the upload is incomplete
        raise InputError("the text changed during the upload; upload it again")
    manifest = {key: value for key, value in asdict(upload).items() if key != "uploaded"}
    storage.write_json(f"{upload.uri}.json", manifest, settings)
    return upload
