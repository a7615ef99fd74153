"""The command `play`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click

from launcher.cli.options import Command, complete_job, settings_of
from launcher.cli.sample import ENTRY_POINT, load
from launcher.cli.show import note


@click.command("play", cls=Command)
@click.argument("model", metavar="JOB-ID|DIR", shell_complete=complete_job)
@click.argument("other", metavar="[JOB-ID|DIR]", required=False, shell_complete=complete_job)
@click.option(
    "--port", metavar="N", type=click.IntRange(1, 65535), help="Port (default: a free one)."
)
@click.option(
    "--open/--no-open",
    "opens",
    default=None,
    help="Open the page in a browser (default: if stdout is a terminal).",
)
@ENTRY_POINT
@click.pass_context
def play_command(
    context: click.Context,
    model: str,
    other: str | None,
    port: int | None,
    opens: bool | None,
    entry_point: Path | None,
) -> None:
    """Try one model, or two side by side, on a local web page. Ctrl-C ends it.

    Name a job, or a model directory: `fetch-and-sample` prints it after `model:`.

    \b
    Example:
      sm-nanogpt play JOB-ID
      sm-nanogpt play JOB-ID another-job
    """
    import secrets
    import webbrowser

    from launcher import play
    from launcher.tracking import full_id

    settings = settings_of(context)
    listener = play.listen(port or 0)
    players = [
        play.Player(full_id(word, settings), *load(word, settings, entry_point))
        for word in (model, other)
        if word
    ]
    at, token = listener.getsockname()[1], secrets.token_urlsafe()
    url = f"http://127.0.0.1:{at}/?token={token}"
    click.echo(url)
    note("open this address in a browser; Ctrl-C ends the page")
    if sys.stdout.isatty() if opens is None else opens:
        webbrowser.open(url)
    with suppress(KeyboardInterrupt):
        play.make_server(players, at, token).run(sockets=[listener])
    note("ended")
