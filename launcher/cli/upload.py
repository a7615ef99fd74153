"""The command `upload-data`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from launcher.cli.options import JSON, Command, Job, settings_of, valued
from launcher.cli.show import note, print_json
from launcher.cli.words import command
from launcher.files.progress import byte_progress

SHORT = 200_000  # tokens: `cpu`, the default on a CPU, reads a shorter text over eight times


@click.command("upload-data", cls=Command)
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path())
@valued(
    "--tokenizer bpe|PATH|JOB-ID",
    "Encode the text as tokens: bpe learns them from it; or name a tokenizer.json, a Hugging"
    " Face directory, or a job (default: train on characters).",
    type=Job(trained=True, other="bpe"),
)
@valued(
    "--vocab-size N",
    "With --tokenizer bpe: number of tokens (default: the characters of the text / 512,"
    " as a power of two from 512 to 16384).",
    type=click.IntRange(257, 1 << 20),
)
@valued("--include GLOB", "Plain text too, such as '*.py'.", multiple=True)
@valued("--exclude GLOB", "Leave out files or folders.", multiple=True)
@valued("--column NAME", "Field of the text in a record (default: text).")
@valued("--encoding NAME", "Read files that are not UTF-8 in this encoding, such as cp1252.")
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
      *.txt, *.md             plain text; each file is a document
    With --tokenizer also records; each becomes a document or a conversation:
      *.jsonl, *.ndjson       JSON, one object a line
      *.json                  JSON, an array of objects, or one
      *.csv, *.tsv            tables with a header
      *.parquet               tables, as those of the Hub
    All but Parquet may be compressed:
      *.gz, *.zst             such as notes.txt.gz

    Texts are UTF-8, or UTF-16 or UTF-32 with a byte order mark; --encoding names others.

    Example:
      sm-nanogpt upload-data input.txt
      sm-nanogpt upload-data notes more.txt --include '*.py' --exclude drafts
      sm-nanogpt upload-data documents.jsonl.gz --tokenizer bpe --vocab-size 8192
    """
    from launcher.text.copies import first_text
    from launcher.text.corpus import upload_data

    settings = settings_of()
    paths = paths or (str(first_text(settings)),)
    with byte_progress("tokenize and upload" if tokenizer else "upload") as progress:
        given = {name: value for name, value in options.items() if value}
        upload = upload_data(paths, settings, progress, tokenizer, vocab_size, **given)
    characters = f"{upload.characters:,} characters"
    if tokens := upload.train_tokens + upload.val_tokens:
        kind = "conversation" if upload.chats else "document"
        documents = f"{upload.documents:,} {kind}{'s' * (upload.documents > 1)}"
        each = f"({upload.characters / tokens:.2f} characters each)"
        vocabulary = f"vocabulary {upload.vocabulary_size:,}"
        note(f"{documents}, {characters}, {tokens:,} tokens {each}, {vocabulary}")
    else:
        files = f"{len(upload.files)} file{'s' * (len(upload.files) > 1)}"
        note(f"{files}, {upload.size:,} bytes, {characters}, {upload.vocabulary_size:,} distinct")
    if not upload.uploaded:
        note("already in the store; nothing was uploaded")
    if as_json:
        print_json(upload)
    else:
        click.echo(upload.uri)
    base, where = base_of(tokenizer), "local"
    if not upload.uri.startswith("file:"):  # the cheapest first job
        where = "ml.m5.xlarge --preset quick --max-cost 0.20"
    elif upload.n_training < SHORT and not (upload.chats or base):
        where = "local --preset auto"
    note(f"next: {command('launch', '--instance', where, base)}")


def base_of(tokenizer: str | None) -> str:
    """The option that starts from the model whose tokens these are, if it is a model's."""
    from launcher.files.storage import path_of

    if tokenizer is None or tokenizer == "bpe":
        return ""
    there = path_of(tokenizer)
    is_model = (there / "config.json").exists() if there.exists() else True  # else it is a job
    return f"--init-from {shlex.quote(tokenizer)}" if is_model else ""
