"""The command `export`."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.options import Command, complete_job, settings_of
from launcher.cli.sample import ENTRY_POINT, finder, locate
from launcher.errors import ServiceError


@click.command("export", cls=Command)
@click.argument("model", metavar="JOB-ID|DIR", shell_complete=complete_job)
@click.option(
    "--to",
    "target",
    metavar="PATH",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory to create; with --format gguf, a file.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["hf", "gguf"]),
    default="hf",
    show_default=True,
    help="hf for transformers, vLLM, and the Hugging Face Hub; gguf for llama.cpp.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bf16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--license",
    metavar="NAME",
    default="unknown",
    show_default=True,
    help="License that the model card names.",
)
@ENTRY_POINT
@click.pass_context
def export_command(
    context: click.Context,
    model: str,
    target: Path,
    kind: str,
    dtype: str,
    license: str,
    entry_point: Path | None,
) -> None:
    """Write a trained model for other tools. Print where it is.

    \b
    Example:
      sm-nanogpt export JOB-ID --to my-model --dtype bf16
      sm-nanogpt export JOB-ID --to my-model.gguf --format gguf
    """
    from launcher.export import check_request, export

    target = target.expanduser()
    check_request(target, kind, dtype)
    settings = settings_of(context)
    directory = locate(model, settings, entry_point)
    from entry_point.train import TrainingError

    try:
        find = finder(directory, settings, entry_point)
        click.echo(export(directory, target, kind, dtype, license, find))
    except TrainingError as error:
        raise ServiceError(f"{directory}: {error}") from None
