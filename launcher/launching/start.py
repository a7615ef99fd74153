"""The model that a run starts from, and what its size means for the text and the memory.

A job reads it from the channel `model`: a directory of this machine for a local job, else a prefix
`STORE/models/NAME-HASH/`, which is uploaded as a text is.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import InputError
from launcher.files import storage
from launcher.files.documents import Scalar
from launcher.files.models import DOCUMENTS, model_files
from launcher.job import FULL_ID, Request
from launcher.launching.texts import READINGS, Channel, n_training
from launcher.machines import GPUS
from launcher.models.fetch import model_directory
from launcher.settings import Settings
from launcher.text import corpus
from launcher.text.formats import File

if TYPE_CHECKING:  # it imports torch
    from entry_point.text import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitialModel:
    """The model that a run starts from: what people call it, the channel from which the job reads
    it, the hyperparameters that it prescribes, and its tokenizer."""

    name: str
    channel: Channel
    hyperparameters: Mapping[str, Scalar]
    tokenizer: Tokenizer

    def check_known(self, text: Channel) -> None:
        """Raise InputError if the model has no ids for a text.

        For text that was not uploaded from here, the run itself checks.
        """
        if (upload := text.upload) is None:
            return
        from launcher.models.sample import check_known
        from launcher.text.tokenizer import fingerprint

        problem, model = "", self.channel.named
        if upload.train_tokens and upload.tokenizer != fingerprint(self.tokenizer):
            problem = f"its tokens are not those of {model}"
        elif not upload.train_tokens and self.tokenizer.unit == "tokens":
            problem = f"it is text, and {model} takes tokens"
        if problem:
            raise InputError(f"{text.named}: {problem}", "encode-for-model", model=model)
        check_known(self.tokenizer, upload.vocabulary, text.named)


def find_model(request: Request, settings: Settings) -> InitialModel:
    """The model that a request names, by a job's id, a directory or a URI, and its channel."""
    reference = str(request.init_from)
    with opened(reference, settings.with_offline(False)) as (directory, uri):
        values, tokenizer = read_model(request, directory)
        channel = Channel(reference, uri or storage.to_uri(directory), None, [])
        if uri is None and storage.local_path(settings.data_store) is None:
            upload, sources = survey(reference, directory, settings)
            channel = Channel(reference, upload.uri, upload, sources)
    return InitialModel(base_of(reference), channel, values, tokenizer)


def read_model(request: Request, directory: Path) -> tuple[Mapping[str, Scalar], Tokenizer]:
    """The hyperparameters that a model prescribes, and its tokenizer."""
    source = request.source
    try:
        values = source.module("huggingface").starting_values(directory, request.hyperparameters)
        return values, source.module("text").read_tokenizer(directory)
    except source.module("errors").TrainingError as error:
        if "that script" in str(error):  # of an edited folder
            raise InputError(str(error), "name-script") from None
        raise InputError(str(error), field="init_from", value=request.init_from) from None


def base_of(named: str) -> str:
    """What people call a model: the id of the job that made it, or the name of its directory."""
    ids = [part for part in Path(named).parts if FULL_ID.fullmatch(part)]
    return ids[-1] if ids else Path(named).absolute().name


@contextmanager
def opened(named: str, settings: Settings) -> Iterator[tuple[Path, str | None]]:
    """A directory with the documents of a model, and the URI of one that is on S3."""
    path = storage.local_path(named)
    if path is None:
        sizes = storage.list_files(named, settings)
        if "config.json" not in sizes:
            raise InputError(f"{named}: no config.json is there")
        with tempfile.TemporaryDirectory() as temporary:
            for name in sizes.keys() & DOCUMENTS.keys():
                storage.fetch(storage.join(named, name), Path(temporary), settings=settings)
            yield Path(temporary), named.rstrip("/")
        return
    yield model_directory(str(path) if path.exists() else named, settings), None


def survey(named: str, directory: Path, settings: Settings) -> tuple[corpus.Upload, list[File]]:
    """What `corpus.send` puts into the store, and the files here."""
    sources = [File(path.name, path) for path in model_files(directory)]
    sha256 = corpus.digest_of(sources)
    uri = corpus.uri_of(Path(named).absolute().name, sha256, settings, "models")
    upload = corpus.Upload(
        uri=uri,
        size=sum(file.path.stat().st_size for file in sources),
        sha256=sha256,
        files=tuple(file.name for file in sources),
        uploaded=not corpus.is_there(uri, settings),
    )
    return upload, sources


# -- size ------------------------------------------------------------------------------------------


TOKENS_PER_PARAMETER = 20  # that a parameter is worth (arXiv:2203.15556, table 3)
FITTING = {True: ("baby", "small", "gpt2"), False: ("laptop",)}  # on GPUs or not, by size
SHORT = 200_000  # tokens: the steps of `laptop` read a text of fewer over MOST_IF_REGULARIZED times


def size_of(channel: Channel) -> tuple[int, int, bool]:
    """Tokens to train on, or characters; how many different ones; whether of conversations."""
    if (upload := channel.upload) is not None:
        return n_training(upload), upload.vocabulary_size, upload.chats
    raise InputError(
        f"{channel.named}: preset=auto needs the length of the text, and knows that of local texts,"
        " and of uploads unless this is a dry run; name a preset"
    )


def count_parameters(config: Any, vocabulary_size: int) -> int:
    """The parameters of a model, less those of its norms."""
    rows = config.vocab_size or vocabulary_size
    return int(config.matrix_parameters + rows * config.n_embd * (2 - config.tie_embeddings))


def fitted(request: Request, tokens: int, vocabulary_size: int, chats: bool = False) -> Request:
    """The request with the largest preset that so many tokens of text can fill, and as many steps.

    The smallest preset for the machine keeps at least the steps that it has. On a CPU, a short text
    that is not of conversations gets `quick` and few steps.
    """
    on_gpus = request.instances[0] in GPUS
    short = tokens < SHORT and not on_gpus and not chats
    names = ("quick",) if short else FITTING[on_gpus]
    readable = READINGS * tokens

    def sized(name: str) -> Request:
        return request.model_copy(update={"preset": name})

    def worth(name: str) -> int:
        return TOKENS_PER_PARAMETER * count_parameters(sized(name).config(1), vocabulary_size)

    chosen = max((n for n in names if worth(n) <= readable), default=names[0], key=names.index)
    config = sized(chosen).config(1)
    step = config.batch_size * config.block_size
    steps = min(worth(chosen), readable) // step
    steps = max(steps, config.max_steps) if chosen == names[0] and not short else max(1, steps)
    values = {"max_steps": steps, **request.hyperparameters}
    request = sized(chosen).model_copy(update={"hyperparameters": values})
    parameters = count_parameters(config, vocabulary_size)
    logger.info(
        f"preset: {chosen}, {parameters / 1e6:.1f} M parameters for {tokens:,} tokens of text;"
        f" {values['max_steps']} steps of {step} tokens"
    )
    return request


def with_whole_windows(request: Request, text: Channel) -> Request:
    """The request without a preset's short windows, if the text is of conversations."""
    given = {name.replace("-", "_") for name in request.hyperparameters}
    chats = text.upload is not None and text.upload.chats
    short = getattr(request.config(1), "short_windows", 0)
    if not chats or "short_windows" in given or not short:
        return request
    logger.info(f"short_windows=0 (the preset's {short} would cut conversations)")
    values = {**request.hyperparameters, "short_windows": 0}
    return request.model_copy(update={"hyperparameters": values})
