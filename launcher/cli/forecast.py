"""What `launch --forecast` prints."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.show import at_ctrl_c, note, print_json, print_table
from launcher.cli.words import command
from launcher.errors import InputError
from launcher.sagemaker.cost import usd

if TYPE_CHECKING:
    from launcher.settings import Settings

TAKEN = {"instance", "data", "validation", "entry_point", "max_cost"}


def show_forecast(given: dict[str, Any], settings: Settings, as_json: bool) -> None:
    """Forecast each size, and print a table. given: the options of `launch` that were typed."""
    from launcher.job import Request
    from launcher.launching.forecasting import forecast

    if other := sorted(given.keys() - TAKEN):
        raise InputError("--forecast is for all sizes; leave it out", field=other[0])
    instance = given.pop("instance", "local")
    request = Request(**given, instance=instance)
    with at_ctrl_c("the pilots that have ended are kept"):
        made = forecast(request, settings, lambda line: note(f"pilot: {line}"))
    if as_json:
        print_json(made)
        return
    note(f"text: {made.text}, {made.tokens:,} {made.unit} to train on")
    note(f"pilots: {made.pilots} runs on this machine, {made.pilot_seconds:.0f} s")
    places = list(made.rows[0].seconds)
    head = ["SIZE", "PARAMETERS", "READINGS", "VAL_LOSS", "80 % OF THE TIME", "BITS/BYTE", *places]
    rows = [
        [
            f"{row.size:g}",
            f"{row.parameters / 1e6:.1f} M",
            f"{row.readings:.1f}",
            f"{row.expected.loss:.3f}",
            f"{row.expected.low:.3f} to {row.expected.high:.3f}",
            f"{row.bits_per_byte:.3f}",
            *(cell(row.seconds[place], row.dollars.get(place)) for place in places),
        ]
        for row in made.rows
    ]
    print_table([head, *rows], align=">")
    for line in made.notes:
        note(f"note: {line}")
    click.echo(
        f"the lowest for this text: size {made.best:g}; twice the text changes its loss by about"
        f" {made.twice_text:+.3f}, twice the compute by about {made.twice_compute:+.3f}"
    )
    size = made.best
    if request.max_cost and not request.is_local:
        size = made.affordable or 0.0
        below = f"the lowest below {usd(request.max_cost)}: size {size:g}"
        click.echo(below if size else f"no size is known to stay below {usd(request.max_cost)}")
    if size:
        words = ["launch", "--instance", instance, "--size", f"{size:g}"]
        note(f"next: {command(*words)}")


def cell(seconds: float | None, dollars: float | None) -> str:
    if seconds is None:
        return "unknown"
    time = str(timedelta(seconds=round(seconds)))
    return f"{time}, {usd(dollars)}" if dollars is not None else time
