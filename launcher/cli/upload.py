"""The command `upload-data`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.cli.options import (
    JSON,
    PATH,
    Command,
    JobParameter,
    settings_of,
    value_option,
)
from sm_nanogpt.launcher.cli.remedies import command
from sm_nanogpt.launcher.cli.show import note, print_json
from sm_nanogpt.launcher.files.progress import byte_progress
from sm_nanogpt.launcher.text import LEARN_BPE
from sm_nanogpt.launcher.values import counted

if TYPE_CHECKING:
    from sm_nanogpt.launcher.text.formats import Format
    from sm_nanogpt.launcher.text.store import Upload

SHORT_TEXT_TOKENS = (
    200_000  # tokens: `cpu`, the default on a CPU, reads a shorter text over eight times
)


class UploadCommand(Command):
    """Puts the table of formats into its help only when that is shown, as reading it takes long."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from sm_nanogpt.launcher.text.formats import FORMATS

        plain = [format for format in FORMATS if format.is_plain]
        records = [format for format in FORMATS if format.reader is not None]
        template = self.help or ""
        help_text = template.replace("PLAIN-FORMATS", help_lines(plain))
        self.help = help_text.replace("RECORD-FORMATS", help_lines(records))
        super().format_help_text(ctx, formatter)
        self.help = template


def help_lines(formats: Sequence[Format]) -> str:
    """A line for each format, with its patterns, and what is read of its files."""
    return "\n".join(f"  {format.patterns:<22}  {format.help}" for format in formats)


@click.command("upload-data", cls=UploadCommand)
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=PATH)
@value_option(
    "--tokenizer bpe|PATH|JOB-ID",
    "Encode the text as tokens: bpe learns them from it; or name a tokenizer.json, a Hugging"
    " Face directory, or a job (default: train on characters).",
    type=JobParameter(reads="model", other=LEARN_BPE),
)
@value_option(
    "--vocab-size N",
    "With --tokenizer bpe: number of tokens (default: the characters of the text / 512,"
    " as a power of two from 512 to 16384).",
    type=click.IntRange(257, 1 << 20),
)
@value_option("--include GLOB", "Plain text too, such as '*.py'.", multiple=True)
@value_option("--exclude GLOB", "Leave out files or folders.", multiple=True)
@value_option("--column NAME", "Field of the text in a record (default: text).")
@value_option(
    "--me NAME",
    "In chats that a messenger exported: whose messages the model learns to write.",
)
@value_option("--encoding NAME", "Read files that are not UTF-8 in this encoding, such as cp1252.")
@JSON
def upload_data_command(
    paths: tuple[str, ...],
    tokenizer: str | None,
    vocab_size: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Upload text to the store and print its URI.

    Each PATH is a file, or a folder whose files are taken by their formats; `-`, for standard
    input; hf://datasets/OWNER/NAME/..., of the Hub; or s3://bucket/... . Without PATH, the text is
    tiny Shakespeare.

    \b
    PLAIN-FORMATS
    With --tokenizer also records; each becomes a document or a conversation:
    RECORD-FORMATS
    All but Parquet may be compressed:
      *.gz, *.zst             such as notes.txt.gz

    Texts are UTF-8, or UTF-16 or UTF-32 with a byte order mark; --encoding names others.

    Example:
      sm-nanogpt upload-data input.txt
      sm-nanogpt upload-data notes more.txt --include '*.py' --exclude drafts
      sm-nanogpt upload-data documents.jsonl.gz --tokenizer bpe --vocab-size 8192
    """
    from sm_nanogpt.launcher.launching.texts import warn_of_few_conversations
    from sm_nanogpt.launcher.text.corpus import upload_data
    from sm_nanogpt.launcher.text.first_text import first_text

    settings = settings_of()
    paths = paths or (str(first_text(settings)),)
    set_options = {name: value for name, value in options.items() if value}
    with byte_progress("tokenize and upload" if tokenizer else "upload") as progress:
        upload = upload_data(paths, settings, progress, tokenizer, vocab_size, **set_options)
    note(summary_of(upload))
    if not upload.uploaded:
        note("already in the store; nothing was uploaded")
    if not init_from_option(tokenizer):
        warn_of_few_conversations(upload)
    if as_json:
        print_json(upload)
    else:
        click.echo(upload.uri)
    note(f"next: {next_command(upload, tokenizer)}")


def summary_of(upload: Upload) -> str:
    """Describe the length of an upload: `3 documents, 9,000 characters, 2,250 tokens ...`."""
    characters = f"{upload.characters:,} characters"
    n_tokens = upload.train_tokens + upload.val_tokens
    if not n_tokens:
        files = counted(len(upload.files), "file")
        return f"{files}, {upload.size:,} bytes, {characters}, {upload.vocabulary_size:,} distinct"
    documents = counted(upload.documents, "conversation" if upload.chats else "document")
    tokens = f"{n_tokens:,} tokens ({upload.characters / n_tokens:.2f} characters each)"
    return f"{documents}, {characters}, {tokens}, vocabulary {upload.vocabulary_size:,}"


def next_command(upload: Upload, tokenizer: str | None = None) -> str:
    """The command of the cheapest first job on an upload.

    For few conversations without a base model, it is the command that uploads a text for one.
    """
    from sm_nanogpt.launcher.launching.texts import are_few_conversations
    from sm_nanogpt.launcher.locations import is_on_s3

    init_from = init_from_option(tokenizer)
    if not init_from and are_few_conversations(upload):
        return command("upload-data", "TEXT", "--tokenizer", LEARN_BPE)
    options = f"--instance {LOCAL}"
    if is_on_s3(upload.uri):
        options = "--instance ml.m5.xlarge --preset quick --max-cost 0.20"
    elif upload.n_training() < SHORT_TEXT_TOKENS and not init_from:
        options += " --preset auto"
    return command("launch", options, init_from)


def init_from_option(tokenizer: str | None) -> str:
    """The option of `launch` for the model whose tokenizer was taken, quoted for a shell; or ''."""
    from sm_nanogpt.launcher.files.storage import path_of

    if tokenizer is None or tokenizer == LEARN_BPE:
        return ""
    path = path_of(tokenizer)
    if path.exists() and not (path / "config.json").exists():  # a tokenizer without a model
        return ""
    return f"--init-from {shlex.quote(tokenizer)}"
