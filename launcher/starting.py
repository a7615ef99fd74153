"""Find the model that a run starts from, and check that it knows the text. Called by `submission`.

A job reads it from the channel `model`: a directory of this machine for a local job, else a prefix
`STORE/models/NAME-HASH/`, which is uploaded like a data set.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import corpus, storage
from launcher.documents import check_regular
from launcher.errors import InputError
from launcher.job import Request
from launcher.settings import Settings

if TYPE_CHECKING:  # it imports torch
    from entry_point.data import Tokenizer

DOCUMENTS = ("config.json", "training.json", "tokenizer.json", "tokenizer_config.json")
INDEX = "model.safetensors.index.json"
LARGEST = 1 << 25  # bytes of a document on S3


@contextmanager
def opened(named: str, settings: Settings) -> Iterator[tuple[Path, str | None]]:
    """A directory with the documents of a model, and the URI of one that is on S3.

    Raises:
        InputError: there is no such directory.
        ServiceError: there is no such job, or it left no model.
    """
    path = storage.local_path(named)
    if path is None:
        sizes = storage.list_files(named, settings)
        if "config.json" not in sizes:
            raise InputError(f"{named}: no config.json is there")
        with tempfile.TemporaryDirectory() as temporary:
            for name in sizes.keys() & DOCUMENTS:
                if sizes[name] > LARGEST:
                    raise InputError(f"{named}: {name} is larger than {LARGEST >> 20} MiB")
                storage.fetch(storage.join(named, name), Path(temporary), settings=settings)
            yield Path(temporary), named.rstrip("/")
        return
    if path.is_dir():
        check_regular(path)
        yield path, None
        return
    if path.exists() or "/" in named:
        raise InputError(f"{named}: no such directory")
    from launcher.artefacts import fetch_model
    from launcher.tracking import full_id

    yield fetch_model(full_id(named, settings), settings), None


def files_of(directory: Path) -> list[Path]:
    """The files that a run reads."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file() and (path.name in (*DOCUMENTS, INDEX) or path.suffix == ".safetensors")
    )


def survey(named: str, directory: Path, settings: Settings) -> tuple[corpus.Upload, list[Path]]:
    """What `corpus.send` puts into the store, and the files here."""
    sources = files_of(directory)
    sha256 = corpus.digest_of([(path.name, path) for path in sources])
    uri = corpus.place_of(Path(named), sha256, settings, "models")
    upload = corpus.Upload(
        uri=uri,
        size=sum(path.stat().st_size for path in sources),
        characters=0,
        vocabulary_size=0,
        sha256=sha256,
        files=tuple(path.name for path in sources),
        uploaded=not corpus.is_there(uri, settings),
    )
    return upload, sources


def with_values(request: Request, directory: Path) -> tuple[Request, Tokenizer]:
    """The request with the hyperparameters that the model prescribes, and the model's tokenizer.

    Raises:
        InputError: the script does not compute this model, or a hyperparameter differs from it.
    """
    source = request.source
    try:
        values = source.module("huggingface").starting_values(directory, request.hyperparameters)
        tokenizer: Tokenizer = source.module("data").read_tokenizer(directory)
    except source.module("errors").TrainingError as error:
        words = str(error).replace("use that script", "name it with --entry-point DIR")
        raise InputError(f"--init-from {request.init_from}: {words}") from None
    return request.model_copy(update={"hyperparameters": values}), tokenizer


def check_known(named: str, upload: corpus.Upload | None, tokenizer: Tokenizer, model: str) -> None:
    """Raise InputError if the model has no ids for the text; `model` is its name.

    For text that `upload-data` did not put there, the run itself checks.
    """
    if upload is None:
        return
    encode = f"encode the text with `sm-nanogpt upload-data PATH --tokenizer {model}`"
    if upload.train_tokens:
        from launcher.tokens import fingerprint

        if upload.tokenizer != fingerprint(tokenizer):
            raise InputError(f"{named}: its tokens are not those of {model}; {encode}")
    elif tokenizer.unit == "tokens":
        raise InputError(f"{named}: it is text, and {model} takes tokens; {encode}")
    elif unknown := sorted(set(upload.vocabulary) - {word.decode() for word in tokenizer.words}):
        raise InputError(
            f"{named}: it has characters that {model} does not know:"
            f" {', '.join(map(repr, unknown[:20]))}{' and more' * (len(unknown) > 20)}"
        )
