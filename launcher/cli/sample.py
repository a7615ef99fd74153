"""The command `fetch-and-sample`."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.options import JOB_ID, JSON, Command, finite, settings_of
from launcher.cli.show import byte_progress, note, print_json


@click.command("fetch-and-sample", cls=Command)
@JOB_ID
@click.option(
    "--prompt", metavar="TEXT", help="Start of the text (default: a new line, or a new document)."
)
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="Number of tokens to generate; of characters, where the model takes text by them.",
)
@click.option(
    "--num-samples",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of texts to generate.",
)
@click.option(
    "--temperature",
    metavar="T",
    type=click.FloatRange(min=0),
    callback=finite,
    default=0.8,
    show_default=True,
    help="Randomness; 0 always takes the most likely token.",
)
@click.option(
    "--top-k",
    metavar="K",
    type=click.IntRange(min=0),
    default=0,
    help="Sample from the K most likely tokens (default: all).",
)
@click.option(
    "--top-p",
    metavar="P",
    type=click.FloatRange(min=0, max=1, min_open=True),
    callback=finite,
    default=1.0,
    help="Nucleus sampling: keep the most likely tokens whose probabilities sum to P (default: 1).",
)
@click.option(
    "--seed",
    metavar="S",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=1337,
    show_default=True,
    help="Random seed; the same seed gives the same text.",
)
@click.option(
    "--entry-point",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The edited train.py that trained the model (default: the copy kept at launch).",
)
@JSON
@click.pass_context
def fetch_and_sample_command(
    context: click.Context,
    job_id: str,
    prompt: str | None,
    max_new_tokens: int,
    num_samples: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    entry_point: Path | None,
    as_json: bool,
) -> None:
    """Download a job's model and print text as it generates it.

    \b
    Example:
      sm-nanogpt fetch-and-sample JOB-ID --prompt "ROMEO:" --num-samples 2
    """
    from launcher.artefacts import fetch_described, script_finder
    from launcher.tracking import describe

    settings = settings_of(context)
    description = describe(job_id, settings)
    with byte_progress("fetch") as progress:
        directory = fetch_described(description, settings, progress, entry_point)
    if description.model_uri is None:
        note(
            f"job {job_id} is {description.status}; sampling its last checkpoint, {directory.name}"
        )
    note(f"model: {directory}")
    from launcher.sampling import is_edited, load_model, stream_samples

    find_script = script_finder(description, settings, entry_point)
    model, tokenizer = load_model(directory, find_script, own_script=entry_point is not None)
    if is_edited(model):
        note("sampling with the edited or older script that trained this model, which is slower")
    if temperature == 0 and prompt is None:
        note("at temperature 0 without --prompt, the text often repeats one character")
    columns = stream_samples(
        model, tokenizer, prompt, max_new_tokens, num_samples, temperature, top_k, top_p, seed
    )
    if as_json:
        texts = ["".join(text) for text in zip(*columns, strict=True)]
        print_json([(prompt or "") + text for text in texts])
        return
    # Stream the first text; print the others after it.
    others = [prompt or ""] * (num_samples - 1)
    click.echo(prompt or "", nl=False)
    for column in columns:
        click.echo(column[0], nl=False)
        others = [text + piece for text, piece in zip(others, column[1:], strict=True)]
    click.echo()
    for text in others:
        click.echo(f"---\n{text}")
