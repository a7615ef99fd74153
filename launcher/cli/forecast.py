"""`launch --forecast`: forecast each size for a text, and print the forecast."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.cli.remedies import command, launch_options
from sm_nanogpt.launcher.cli.show import at_ctrl_c, note, print_json, print_table
from sm_nanogpt.launcher.errors import InputError, about
from sm_nanogpt.launcher.job import DEFAULT_RUN_SECONDS
from sm_nanogpt.launcher.sagemaker.cost import OVERHEAD_SECONDS, usd

if TYPE_CHECKING:
    from sm_nanogpt.launcher.cli.launch import LaunchOptions
    from sm_nanogpt.launcher.launching.forecasts import Forecast, Row
    from sm_nanogpt.launcher.settings import Settings

MAX_RUN_FACTOR = 2  # a job may take twice the time that was forecast for it


def forecast_sizes(
    context: click.Context, options: LaunchOptions, settings: Settings, as_json: bool
) -> None:
    """`launch --forecast`: print what each size would be, and start nothing."""
    from sm_nanogpt.launcher.forecast.forecasting import forecast
    from sm_nanogpt.launcher.job import Request

    check_options(context, options)
    typed = options.fields | full_names_of_texts(options.fields, settings)
    fields = {"instance": LOCAL, **typed}
    max_cost = fields.pop("max_cost", None)  # of a job on any of the known instance types
    request = Request(**fields)
    with at_ctrl_c("the pilots that have ended are kept; the same command goes on from them"):
        result = forecast(request, settings, max_cost)
    if as_json:
        print_json(result)
        return
    note(f"text: {result.text}, {result.tokens:,} {result.unit} to train on")
    note(f"pilots: {result.pilots} runs on this machine, {result.pilot_seconds:.0f} s")
    print_sizes(result)
    for line in result.notes:
        note(f"note: {line}")
    print_lowest(result, max_cost)
    size = result.best if max_cost is None else result.affordable
    if size is not None:
        row = next(row for row in result.rows if row.size == size)
        note_next(typed, row, result.busy)


def check_options(context: click.Context, options: LaunchOptions) -> None:
    """Raise InputError if an option was typed that a forecast does not take."""
    allowed = {"forecasts", "as_json", *options.fields}
    for parameter in context.command.params:
        if parameter.name in options.typed - allowed:
            raise InputError(f"{parameter.opts[0]}: a forecast takes no such option; leave it out")


def print_lowest(result: Forecast, max_cost: float | None) -> None:
    """Print the size of the lowest loss, with what would change it, and that below max_cost."""
    is_lowest = result.overfits or result.best < result.rows[-1].size
    lowest = "for this text" if is_lowest else "that can be forecast"
    click.echo(f"the lowest {lowest}: size {result.best:g}")
    if result.twice_text and result.twice_compute:
        click.echo(
            f"twice the text changes its loss by about {result.twice_text}, twice the compute by"
            f" about {result.twice_compute}"
        )
    if max_cost is None:
        return
    if result.affordable is None:
        click.echo(f"no size is known to stay below {usd(max_cost)} on SageMaker")
    else:
        click.echo(f"the lowest below {usd(max_cost)}: size {result.affordable:g}")


def note_next(typed: dict[str, Any], row: Row, busy: bool) -> None:
    """Print the command of a job of the size of a row, and the time that it takes.

    busy: as in Forecast.
    """
    from sm_nanogpt.launcher.instances import types_of
    from sm_nanogpt.launcher.launching.forecasts import in_two_generations
    from sm_nanogpt.launcher.launching.sizing import gains_by_generations

    fields = next_request(typed, row)
    name = types_of(fields["instance"])[0]
    seconds = row.seconds.get(name)
    time = f"unknown on {name}"
    if seconds is not None:
        time = f"about {duration(seconds)} on {name}"
        if is_by_processors(name, busy):
            time += ", and longer while other programs run"
    if gains_by_generations(row.size, row.readings):
        expected = in_two_generations(row.expected, row.readings)
        loss = f"about {expected.loss:.3f} ({expected.low:.3f} to {expected.high:.3f})"
        note(f"note: with `--set generations=2` its loss is {loss}, in 2.25 times the time")
    note(f"time: {time}")
    note(f"next: {command('launch', *launch_options(fields))}")


def full_names_of_texts(typed: dict[str, Any], settings: Settings) -> dict[str, str]:
    """The texts of a request, by its fields, with the name of an upload in place of a part of it:
    later, several names may have that part."""
    from sm_nanogpt.launcher.text.store import find_text, named_by

    texts = dict[str, str]()
    for field in ("data", "validation"):
        if field in typed:
            with about(field, typed[field]):
                texts[field] = named_by(find_text(typed[field], settings), settings)
    return texts


def print_sizes(result: Forecast) -> None:
    """Print a row for each size, with a column for each instance type."""
    instances = list(result.rows[0].seconds)
    headings = []
    for instance in instances:
        is_doubtful = is_by_processors(instance, result.busy)
        headings.append(f"{instance}*" if is_doubtful else instance)
    table = [["SIZE", "PARAMETERS", "READINGS", "VAL_LOSS", "80 % INTERVAL", "BITS/BYTE"]]
    table[0] += headings
    for row in result.rows:
        cells = [
            f"{row.size:g}",
            f"{row.parameters / 1e6:.1f} M",
            f"{row.readings:.1f}",
            f"{row.expected.loss:.3f}",
            interval_of(row),
            f"{row.bits_per_byte:.3f}",
        ]
        for instance in instances:
            cells.append(time_and_cost(row.seconds[instance], row.dollars.get(instance)))
        table.append(cells)
    print_table(table, align=">")


def is_by_processors(instance: str, busy: bool) -> bool:
    """True if times on an instance are by the processor time of the pilots.

    busy: as in Forecast.
    """
    from sm_nanogpt.launcher.backends import backend_class

    return busy and backend_class(instance).shares_cores


def interval_of(row: Row) -> str:
    if row.expected.measured:
        return "measured"
    return f"{row.expected.low:.3f} to {row.expected.high:.3f}"


def next_request(typed: dict[str, Any], row: Row) -> dict[str, Any]:
    """The fields of a request for a job of the size of a row: those that the user typed, and the
    instance, the size, and a time limit that fits the job.

    If the user typed max_cost, which limits the time as well, there is no time limit, and without a
    type on SageMaker the instance is the cheapest one.
    """
    from sm_nanogpt.launcher.backends import backend_class
    from sm_nanogpt.launcher.instances import types_of

    fields = {"instance": LOCAL, **typed, "size": f"{row.size:g}"}
    is_billed = backend_class(fields["instance"]).bills
    if "max_cost" in typed:
        if not is_billed:
            fields["instance"] = cheapest_type(row)
    elif is_billed:
        times = [row.seconds.get(name) or 0.0 for name in types_of(fields["instance"])]
        max_run = math.ceil(MAX_RUN_FACTOR * max(times))
        if max_run > DEFAULT_RUN_SECONDS:
            fields["max_run"] = max_run
    return fields


def cheapest_type(row: Row) -> str:
    """The instance type on which a size costs the least, with the allowance for a job's start."""
    costs = dict[str, float]()
    for name, dollars in row.dollars.items():
        seconds = row.seconds[name]
        if dollars and seconds:
            costs[name] = dollars * (1 + OVERHEAD_SECONDS / seconds)
    return min(costs, key=lambda name: costs[name])


def time_and_cost(seconds: float | None, dollars: float | None) -> str:
    if seconds is None:
        return "unknown"
    if dollars is None:
        return duration(seconds)
    return f"{duration(seconds)}, {usd(dollars)}"
