"""The models that a run starts from and learns from.

A job reads them from the channels `model` and `teacher`: a directory of this machine for a local
job, else a prefix `STORE/models/NAME-HASH/`, which is uploaded as a text is.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.documents import Scalar
from sm_nanogpt.launcher.files.models import DOCUMENTS, model_files
from sm_nanogpt.launcher.files.moved import UPLOAD_NAME
from sm_nanogpt.launcher.job import FULL_ID, Request
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.models.fetch import model_directory
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Channel

if TYPE_CHECKING:  # it imports torch
    from sm_nanogpt.entry_point.text import Tokenizer


@dataclass(frozen=True)
class InitialModel:
    """A model that a run starts from, or learns from as a teacher.

    name is what people call it. The job reads it from channel. hyperparameters are those that it
    prescribes for the run.
    """

    name: str
    channel: Channel
    hyperparameters: Mapping[str, Scalar]
    tokenizer: Tokenizer

    def check_text(self, text: Channel) -> None:
        """Raise InputError if the tokens of a text are not the model's, or if it has no ids for the
        text's characters.

        A text that was not uploaded from here is checked by the run.
        """
        upload = text.upload
        if upload is None:
            return
        from sm_nanogpt.launcher.models.sample import check_known
        from sm_nanogpt.launcher.text.tokenizer import fingerprint

        model = self.channel.shown
        problem = ""
        if upload.train_tokens and upload.tokenizer != fingerprint(self.tokenizer):
            problem = f"its tokens are not those of {model}"
        elif not upload.train_tokens and self.tokenizer.unit == "tokens":
            problem = f"it is text, and {model} takes tokens"
        if problem:
            raise InputError(
                f"{text.shown}: {problem}", code="encode-for-model", model=shlex.quote(model)
            )
        check_known(self.tokenizer, upload.vocabulary, text.shown)


def find_model(request: Request, settings: Settings, field: str) -> InitialModel:
    """Find the model that a field of a request names by a job's id, a directory, or a URI."""
    reference = str(getattr(request, field))
    path = storage.local_path(reference)
    if path is None:
        with fetched_documents(reference, settings.with_offline(False)) as directory:
            return read_model(request, field, directory, Channel(reference, reference.rstrip("/")))

    name = str(path) if path.exists() else reference
    directory = model_directory(name, settings.with_offline(False))
    model = read_model(request, field, directory, Channel(reference, storage.to_uri(directory)))
    check_weights(directory, field, reference)
    if not is_on_s3(settings.data_store):
        return model
    return replace(model, channel=channel_of_model(reference, directory, settings))


@contextmanager
def fetched_documents(uri: str, settings: Settings) -> Iterator[Path]:
    """Yield a temporary directory with the documents of a model on S3, without its weights.

    Raises InputError if no model is at the URI.
    """
    sizes = storage.list_files(uri, settings)
    if "config.json" not in sizes:
        raise InputError(f"{uri}: no config.json is there")
    with tempfile.TemporaryDirectory() as directory:
        for name in sizes.keys() & DOCUMENTS.keys():
            storage.fetch(storage.join(uri, name), Path(directory), settings=settings)
        yield Path(directory)


def read_model(request: Request, field: str, directory: Path, channel: Channel) -> InitialModel:
    """Read the model in a directory, by the training folder of a request. Raises InputError."""
    hyperparameters: dict[str, Scalar] = {}  # those of the request are not for a teacher
    if field == "init_from":
        hyperparameters = request.hyperparameters
    source = request.source
    try:
        values = source.module("huggingface").starting_values(directory, hyperparameters)
        tokenizer = source.module("text").read_tokenizer(directory)
    except source.module("errors").TrainingError as error:
        if "that script" in str(error):  # the model is of an edited folder
            raise InputError(str(error), code="name-folder") from None
        raise InputError(str(error), field=field, value=channel.shown) from None
    return InitialModel(model_name(channel.shown), channel, values, tokenizer)


def channel_of_model(reference: str, directory: Path, settings: Settings) -> Channel:
    """The channel of a model in a directory, which is to be uploaded."""
    from sm_nanogpt.launcher.text import corpus  # with the readers of all formats
    from sm_nanogpt.launcher.text.reading import File

    files = [File(path.name, path) for path in model_files(directory)]
    name = Path(reference).absolute().name
    upload = corpus.upload_of(name, files, settings, "models")
    return Channel(reference, upload.uri, upload, files)


def check_weights(directory: Path, field: str, reference: str) -> None:
    """Raise InputError if a run, which may cost money, would refuse the weights of a model."""
    from sm_nanogpt.entry_point.errors import TrainingError
    from sm_nanogpt.entry_point.huggingface import read_weights

    try:
        read_weights(directory)
    except TrainingError as error:
        raise InputError(str(error), field=field, value=reference) from None


def model_name(model: str) -> str:
    """What people call a model: the id of the job that made it, or the name of its directory."""
    for part in reversed(Path(model).parts):
        is_upload = UPLOAD_NAME.fullmatch(part) is not None
        uploaded_name = part.rpartition("-")[0] if is_upload else ""  # without its hash
        for job_id in (uploaded_name, part):
            if FULL_ID.fullmatch(job_id):
                return job_id
    return Path(model).absolute().name
