"""What `launch --forecast` prints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from entry_point.metrics import duration
from launcher.cli.remedies import command, options
from launcher.cli.show import at_ctrl_c, note, print_json, print_table
from launcher.job import DEFAULT_RUN
from launcher.sagemaker.cost import AROUND_SECONDS, usd

if TYPE_CHECKING:
    from launcher.forecast.table import Row
    from launcher.settings import Settings


def show_forecast(given: dict[str, Any], settings: Settings, as_json: bool) -> None:
    """Forecast each size, and print a table. given: the fields of a request that were typed."""
    from launcher.backends import backend_class
    from launcher.forecast.forecasting import forecast
    from launcher.job import Request

    fields = {"instance": "local", **given}
    max_cost = fields.pop("max_cost", None)  # of a job on any of the known instance types
    request = Request(**fields)
    with at_ctrl_c("the pilots that have ended are kept"):
        made = forecast(request, settings, lambda line: note(f"pilot: {line}"), max_cost)
    if as_json:
        print_json(made)
        return
    note(f"text: {made.text}, {made.tokens:,} {made.unit} to train on")
    note(f"pilots: {made.pilots} runs on this machine, {made.pilot_seconds:.0f} s")
    places = list(made.rows[0].seconds)
    columns = [f"{name}*" if name == "local" and made.busy else name for name in places]
    head = ["SIZE", "PARAMETERS", "READINGS", "VAL_LOSS", "80 % INTERVAL", "BITS/BYTE", *columns]
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
    lowest = "for this text" if made.best < made.rows[-1].size else "that can be forecast"
    click.echo(f"the lowest {lowest}: size {made.best:g}")
    click.echo(
        f"twice the text changes its loss by about {made.twice_text}, twice the compute by about"
        f" {made.twice_compute}"
    )
    size: float | None = made.best
    if max_cost is not None:
        size, ceiling = made.affordable, usd(max_cost)
        below = f"the lowest below {ceiling}: size {size:g}" if size else ""
        click.echo(below or f"no size is known to stay below {ceiling} on SageMaker")
    if size:
        wanted = {"instance": "local", **given, "size": f"{size:g}"}
        row = next(row for row in made.rows if row.size == size)
        if max_cost is not None and not backend_class(wanted["instance"]).bills:
            wanted["instance"] = cheapest_type(row)
        longest = max((s for name, s in row.seconds.items() if s and name != "local"), default=0.0)
        if "max_cost" not in given and 2 * longest > DEFAULT_RUN:
            wanted["max_run"] = math.ceil(2 * longest)
        note(f"next: {command('launch', *options(wanted))}")


def cheapest_type(row: Row) -> str:
    """The instance type on which a size costs the least, with the allowance for a job's start."""
    costs = dict[str, float]()
    for name, dollars in row.dollars.items():
        seconds = row.seconds[name]
        if dollars and seconds:
            costs[name] = dollars * (1 + AROUND_SECONDS / seconds)
    return min(costs, key=lambda name: costs[name])


def cell(seconds: float | None, dollars: float | None) -> str:
    if seconds is None:
        return "unknown"
    time = duration(seconds)
    return f"{time}, {usd(dollars)}" if dollars is not None else time
