"""The commands `fetch-and-sample` and `play`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.launcher.cli.options import (
    JSON,
    MODEL,
    Command,
    InputFile,
    JobParameter,
    OutputFile,
    settings_of,
    value_option,
)
from sm_nanogpt.launcher.cli.remedies import command
from sm_nanogpt.launcher.cli.show import note, print_json, print_text
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.values import in_units

if TYPE_CHECKING:
    from sm_nanogpt.entry_point.model import GPT
    from sm_nanogpt.entry_point.text import Tokenizer
    from sm_nanogpt.launcher.models.moments import Moment
    from sm_nanogpt.launcher.settings import Settings
    from sm_nanogpt.launcher.views.play import ServedModel

ENTRY_POINT = value_option(
    "--entry-point DIR",
    "The edited folder that trained the model (default: the copy kept at launch).",
    type=InputFile(dir_okay=True),
)

# Some arguments of stream_samples, which checks them: their defaults, and what they do.
SAMPLING: dict[str, tuple[float, str]] = {
    "--max-new-tokens N": (500, "Tokens (or characters) to generate."),
    "--temperature T": (0.8, "Randomness; 0 takes the most likely token."),
    "--top-k K": (0, "Sample from the K most likely tokens (0: all)."),
    "--top-p P": (1.0, "Sample from the most likely tokens whose probabilities sum to P."),
    "--seed S": (1337, "The same seed gives the same text."),
}


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of SAMPLING to a command, which takes them as **sampling."""
    for usage, (default, text) in reversed(SAMPLING.items()):
        command = value_option(usage, text, default=default, show_default=True)(command)
    return command


@click.command("fetch-and-sample", cls=Command)
@MODEL
@value_option(
    "--prompt TEXT",
    "Start of the text (default: a new line, or a new document). A model that has learned from"
    " conversations answers it.",
)
@value_option("--num-samples N", "Number of texts to generate.", default=1, show_default=True)
@sampling_options
@ENTRY_POINT
@JSON
def fetch_and_sample_command(
    model: str,
    prompt: str | None,
    num_samples: int,
    entry_point: Path | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Download a job's model and print text from it. `sample` is short for this command.

    DIR is a model directory on this machine: `fetch-and-sample` prints it after `model:`. Without
    a prompt, the line breaks before the first word are left out.

    Example:
      sm-nanogpt fetch-and-sample JOB-ID --prompt "ROMEO:" --num-samples 2
    """
    loaded = open_model(model, settings_of(), entry_point)
    from sm_nanogpt.launcher.models.sample import stream_answers

    if loaded.tokenizer.chats and prompt is None:
        chat = command("chat", shlex.quote(model))
        note(f"the model has learned from conversations: `{chat}` talks to it")
    columns = stream_answers(
        loaded.model, loaded.tokenizer, prompt, num_samples=num_samples, **sampling
    )
    start = ""  # what an answer continues
    if prompt is None:
        columns = without_first_breaks(columns)
    elif not loaded.tokenizer.chats:
        start = prompt

    if as_json:
        print_json([start + "".join(text) for text in zip(*columns, strict=True)])
        return
    print_text(start, nl=False)
    other_texts = [start] * (num_samples - 1)
    for first_piece, *other_pieces in columns:  # the first text as it comes, the others after it
        print_text(first_piece, nl=False)
        for number, piece in enumerate(other_pieces):
            other_texts[number] += piece
    print_text("".join(f"\n---\n{text}" for text in other_texts))


def without_first_breaks(columns: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the pieces of several texts, without the line breaks with which a text begins.

    Each list has the next piece of each text.
    """
    has_text = set[int]()  # numbers of the texts that have more than line breaks
    for pieces in columns:
        pieces = list(pieces)
        for number, piece in enumerate(pieces):
            if number not in has_text:
                pieces[number] = piece.lstrip("\r\n")
            if pieces[number]:
                has_text.add(number)
        yield pieces


@dataclass(frozen=True)
class LoadedModel:
    """A model that is loaded, and its directory on this machine."""

    directory: Path
    model: GPT
    tokenizer: Tokenizer


def open_model(name: str, settings: Settings, entry_point: Path | None) -> LoadedModel:
    """Load the model of a job, which is fetched first, or the model in a directory."""
    from sm_nanogpt.launcher.models.fetch import model_directory

    directory = model_directory(name, settings, entry_point)
    note(f"model: {directory}")
    from sm_nanogpt.launcher.models.load import is_edited, load_model

    model, tokenizer = load_model(directory, settings, entry_point)
    if is_edited(model):
        note("sampling with the edited or older script that trained this model, which is slower")
    return LoadedModel(directory, model, tokenizer)


def open_served_model(
    model: str, settings: Settings, entry_point: Path | None, with_moments: bool
) -> ServedModel:
    """Load a model for `play`. Its name is that of its job, or, without a job, what the user typed.

    with_moments: load its moments too, so that the page shows how it has learned. A failure to read
    them is only a warning.
    """
    from sm_nanogpt.launcher.models.moments import read_moments
    from sm_nanogpt.launcher.views.model_card import card_for, job_behind
    from sm_nanogpt.launcher.views.play import ServedModel

    loaded = open_model(model, settings, entry_point)
    moments: Sequence[Moment] = ()
    if with_moments:
        try:
            moments = read_moments(loaded.directory, loaded.model)
        except ServiceError as error:
            note(f"warning: the page does not show how the model learned: {error}")
    job = job_behind(model, loaded.directory, settings)
    card = card_for(loaded.directory, job)
    served = ServedModel(model, loaded.model, loaded.tokenizer, card, moments=moments)
    if job is None:
        return served
    return replace(served, name=job.name or job.job_id, job_id=job.job_id)


def check_origins(
    context: click.Context, parameter: click.Parameter, origins: tuple[str, ...]
) -> tuple[str, ...]:
    for origin in origins:
        if not re.fullmatch(r"\*|null|[\w.+-]+://[^/]+", origin):
            raise InputError(f"--cors {origin}: an origin is like http://localhost:3000")
    return origins


@click.command("play", cls=Command)
@MODEL
@click.argument("other", metavar="[JOB-ID|DIR]", required=False, type=JobParameter(reads="model"))
@value_option("--port N", "Port (default: a free one).", type=click.IntRange(1, 65535))
@value_option(
    "--cors origins ORIGIN",
    "Let the pages of another origin use the API, as http://localhost:3000. Repeatable.",
    multiple=True,
    callback=check_origins,
)
@click.option(
    "--open/--no-open",
    "opens",
    default=None,
    help="Open the page in a browser (default: if stdout is a terminal).",
)
@value_option(
    "--save path FILE.html",
    "Write the model as one HTML file, which computes in any browser and needs no server.",
    type=OutputFile(),
)
@value_option(
    "--bits N",
    "Bits of a weight in that file (default: the fewest, from 4 on, that cost at most 0.005 bits"
    " per byte on the validation text).",
    type=click.IntRange(4, 8),
)
@value_option(
    "--moments n_moments N",
    "Moments of the training in that file, among which its page has a slider (default: those that"
    " the run kept, as many as make at most 20 MB; 1: the end alone).",
    type=click.IntRange(1, 100),
)
@ENTRY_POINT
def play_command(
    model: str,
    other: str | None,
    port: int | None,
    origins: tuple[str, ...],
    opens: bool | None,
    path: Path | None,
    bits: int | None,
    n_moments: int | None,
    entry_point: Path | None,
) -> None:
    """Try one model, or two side by side, on a local web page. Ctrl-C ends it.

    Name a job, or a model directory: `fetch-and-sample` prints it after `model:`. The key of the
    page and the API is SM_NANOGPT_API_KEY, or api_key in config.toml, or a new one.

    With --save, the page is a file that you can send: the model is inside of it.

    Example:
      sm-nanogpt play JOB-ID
      sm-nanogpt play JOB-ID another-job
      sm-nanogpt play JOB-ID --save model.html
    """
    if path is not None:
        if other is not None:
            raise InputError("--save takes one model")
        save_model(model, path, bits, n_moments, entry_point)
        return
    for option, value in (("--bits", bits), ("--moments", n_moments)):
        if value is not None:
            raise InputError(f"{option} is for --save FILE.html")
    if opens is None:
        opens = sys.stdout.isatty()
    models = [model] if other is None else [model, other]
    serve_models(models, port or 0, origins, opens, entry_point)


def serve_models(
    models: Sequence[str],
    port: int,
    origins: Sequence[str],
    opens: bool,
    entry_point: Path | None,
) -> None:
    """Serve the page of one model or two until Ctrl-C, and print its address.

    port: 0 takes a free one. opens: open the page in a browser.
    """
    import secrets
    import webbrowser
    from urllib.parse import quote

    from sm_nanogpt.launcher.views import api, play

    settings = settings_of()
    listener = play.listen(port)
    with_moments = len(models) == 1  # two models side by side have no slider
    served_models = [
        open_served_model(model, settings, entry_point, with_moments) for model in models
    ]
    if len({served.name for served in served_models}) < len(served_models):  # two jobs of one name
        served_models = [
            replace(served, name=served.job_id or served.name) for served in served_models
        ]
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    key = settings.api_key or secrets.token_urlsafe()
    url = f"{address}/?token={quote(key, safe='')}"
    click.echo(url)
    note("open this address in a browser; Ctrl-C ends the server")
    note(f"for OpenAI's clients: base URL {address}/v1, API key {key}")
    if opens:
        webbrowser.open(url)
    with suppress(KeyboardInterrupt):
        app = play.make_app(served_models, key, api.routes(served_models), origins)
        play.make_server(app).run(sockets=[listener])


def save_model(
    model: str, path: Path, bits: int | None, n_moments: int | None, entry_point: Path | None
) -> None:
    """Write a model as one page, describe the page, and print its path."""
    from sm_nanogpt.launcher.views.model_card import job_behind
    from sm_nanogpt.launcher.views.model_page import SLOW_PARAMETERS, count_parameters
    from sm_nanogpt.launcher.views.saved_page import describe_copies, save_model_page

    settings = settings_of()
    loaded = open_model(model, settings, entry_point)
    job = job_behind(model, loaded.directory, settings)
    page = save_model_page(
        name=model,
        directory=loaded.directory,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        path=path,
        settings=settings,
        job=job,
        bits=bits,
        n_moments=n_moments,
    )
    limit = job.page_limit if job else None
    note(f"weights: {page.rounding}")
    if page.copied is not None:
        note(f"copies: {describe_copies(page.copied)}")
    note(f"moments: {page.moments}")
    if limit is not None and page.size > limit:
        note(f"the page has more than the {in_units(limit)} for which the job was launched")
    note(f"size: {in_units(page.size)}; whoever has the file has the model")
    if count_parameters(loaded.model) > SLOW_PARAMETERS:
        note(f"it has over {SLOW_PARAMETERS:,} parameters: a browser writes slower than one reads")
    print_text(f"{page.path}\n", nl=False)
