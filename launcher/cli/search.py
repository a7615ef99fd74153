"""The commands of `try`: search for a better training folder under rules."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.cli.options import (
    DIRECTORY,
    JSON,
    CommandGroup,
    complete_instance,
    complete_preset,
    complete_search,
    settings_of,
    typed_parameters,
    value_option,
)
from sm_nanogpt.launcher.cli.remedies import command, sentence
from sm_nanogpt.launcher.cli.show import at_ctrl_c, note, print_json, print_table, shown
from sm_nanogpt.launcher.errors import InputError, LauncherError
from sm_nanogpt.launcher.values import counted

if TYPE_CHECKING:
    from sm_nanogpt.launcher.job import Request
    from sm_nanogpt.launcher.source import Source
    from sm_nanogpt.launcher.trying.search import Search


@dataclass(frozen=True)
class Outcome:
    """The result of `try run` for a verdict: the first word that it prints, and its exit code."""

    label: str
    exit_code: int


OUTCOMES = {
    "kept": Outcome("KEEP", 0),
    "refused": Outcome("REFUSED", 4),
    "ceiling": Outcome("CEILING", 5),
}
REVERT = Outcome("REVERT", 3)  # of any other verdict

SEARCH = value_option(
    "--group NAME",
    "The search, by the name that `try start` gave it.",
    required=True,
    shell_complete=complete_search,
)


def open_search(name: str) -> Search:
    from sm_nanogpt.launcher.trying.search import Search

    return Search(name, settings_of())


def continue_advice(*arguments: str) -> str:
    """What to do after an interruption: type a command of `try` with these arguments."""
    again = command("try", *arguments)
    return f"`{again}` goes on: it keeps the runs that have ended, and a job that still runs"


@click.group("try", cls=CommandGroup)
def try_group() -> None:
    """Search for a better model by changes of the training folder, under rules."""


@try_group.command("start")
@click.argument("name")
@value_option("--text data NAME|URI|PATH", "The text (default: the last upload).")
@value_option(
    "--preset NAME",
    "The base's hyperparameters (default: quick; on GPUs baby).",
    shell_complete=complete_preset,
)
@value_option("--size N", "Instead: the size of the base, by a dial from 0.25 to 16.", type=float)
@value_option("--entry-point DIR", "The folder to begin with.", type=DIRECTORY)
@value_option(
    "--instance TYPE",
    "Where runs are made (default: local).",
    default=LOCAL,
    shell_complete=complete_instance,
)
@value_option("--ceiling USD", "The most that all jobs of the search may cost.")
@value_option(
    "--smallest-gain NATS",
    "The smallest gain that the search looks for, at least 0.002 (default: 0.005).",
    type=float,
    default=0.005,
)
@click.pass_context
def start_command(
    context: click.Context,
    name: str,
    ceiling: float | None,
    smallest_gain: float,
    instance: str,
    **fields: Any,
) -> None:
    """Begin the search NAME: train its base with several seeds.

    A part of the text is kept for the judge, and no run gets it. If the command is
    interrupted, `try start NAME` goes on.

    Example:
      sm-nanogpt try start shakespeare --text input.txt
      sm-nanogpt copy-script my_gpt --from shakespeare
      sm-nanogpt try run my_gpt --group shakespeare --note "squared ReLU"
    """
    from sm_nanogpt.launcher.trying.rule import detectable_gains
    from sm_nanogpt.launcher.trying.start import begin_search, remove_unfinished, unfinished_search

    settings = settings_of()
    search = None
    if typed_parameters(context) == {"name"}:
        search = unfinished_search(name, settings)
    if search is None:
        request = start_request(instance, ceiling, fields)
        search = begin_search(name, request, settings, smallest_gain, ceiling)
    with at_ctrl_c(continue_advice("start", name)):
        try:
            with search.locked(shared=False):
                base = search.measure_base()
        except LauncherError:
            if not search.ledger.runs:
                remove_unfinished(search.directory)
            raise
    gains = ", ".join(f"{gain:.3f} by {n}" for n, gain in detectable_gains(base["sd"]).items())
    note(f"base: a loss of {base['loss']:.4f} nats, over 8 seeds (sd {base['sd']:.4f})")
    note(f"detectable gains, by pairs: {gains}; at most {base['pairs']} pairs are made")
    note(f"rules, and what to do: {search.directory / 'AGENTS.md'}")
    note(f"next: {command('copy-script', 'my_gpt', '--from', name)}")
    click.echo(search.directory)


def start_request(instance: str, ceiling: float | None, fields: Mapping[str, Any]) -> Request:
    """The request of the base of a search, whose fields the user typed, or left out as None.

    Its preset is `quick`, unless the user chose a preset or a size, or GPUs are billed. Raises
    InputError if jobs are billed without a ceiling, or the ceiling is for jobs that are not.
    """
    from sm_nanogpt.launcher.backends import backend_class, rents_gpus
    from sm_nanogpt.launcher.job import Request

    bills = backend_class(instance).bills
    if bills and ceiling is None:
        raise InputError("must be given for jobs on SageMaker", field="ceiling")
    if ceiling is not None and not bills:
        raise InputError("is for SageMaker", field="ceiling", value=ceiling)
    if ceiling is not None and not 0 < ceiling < math.inf:
        raise InputError("must be more than 0", field="ceiling", value=ceiling)
    typed = {field: value for field, value in fields.items() if value is not None}
    defaults = {}
    if not ("preset" in typed or "size" in typed or rents_gpus(instance)):
        defaults["preset"] = "quick"
    return Request(instance=instance, **defaults, **typed)


@try_group.command("run")
@click.argument("folder", type=DIRECTORY)
@SEARCH
@value_option("--note description TEXT", "What is tried, in a few words.", default="")
@JSON
def run_command(folder: Path, group: str, description: str, as_json: bool) -> None:
    """Judge a changed training FOLDER against the base of a search.

    Exit code 0: it is better, and is the base now; 3: it is no better; 4: the rules refuse it;
    5: it may cost more than the ceiling leaves.

    Example:
      sm-nanogpt try run my_gpt --group shakespeare --note "squared ReLU"
    """
    from sm_nanogpt.launcher.source import Source

    search = open_search(group)
    again = ["run", shlex.quote(str(folder)), "--group", group]
    if description:
        again += ["--note", shlex.quote(description)]
    with at_ctrl_c(continue_advice(*again)):
        entry = search.attempt(Source.read(folder), description)
    if as_json:
        print_json({**entry, "ledger": search.ledger.last_hash})
    else:
        click.echo(shown(verdict_line(entry, search)))
    outcome = OUTCOMES.get(entry["verdict"], REVERT)
    if outcome.exit_code:
        raise click.exceptions.Exit(outcome.exit_code)


def verdict_line(entry: dict[str, Any], search: Search) -> str:
    """A try and its verdict, in one line."""
    ceiling = search.start["ceiling"]
    ledger = search.ledger
    outcome = OUTCOMES.get(entry["verdict"], REVERT)
    parts = [f"{outcome.label} {entry['number']}"]
    if "mean" in entry:
        parts += [difference_of(entry), f"time x{entry['times']:.2f}"]
    if entry["verdict"] != "kept":
        parts.append(entry.get("why") or entry["verdict"])
    if ceiling is not None:
        parts.append(f"cost {entry['usd']:.2f}; {ledger.spent:.2f} of {ceiling:.2f} USD spent")
    parts.append(f"ledger {ledger.last_hash[:8]}")
    return "  ".join(parts)


def difference_of(entry: dict[str, Any]) -> str:
    """The change of the loss by a try, in nats, with its 95 % interval."""
    return f"{entry['mean']:+.4f} ({entry['low']:+.4f} to {entry['high']:+.4f})"


@try_group.command("log")
@click.argument("name", shell_complete=complete_search)
@value_option(
    "--gain PAIRS",
    "First measure what all kept tries gain together, by 4, 8, 16, 32, or 64 pairs.",
    type=click.Choice(["4", "8", "16", "32", "64"]),
)
@click.option("--verify", is_flag=True, help="Check that nothing was changed, and each folder.")
@JSON
def log_command(name: str, gain: str | None, verify: bool, as_json: bool) -> None:
    """List the tries of the search NAME, kept and not.

    Example:
      sm-nanogpt try log shakespeare
      sm-nanogpt try log shakespeare --gain 8
    """
    search = open_search(name)
    ledger = search.ledger
    ceiling = search.start["ceiling"]
    if gain:
        search.gain(int(gain))
    elif ceiling is not None:
        try:
            search.settle()
        except LauncherError as error:
            note(f"costs are those of the last command: {sentence(error)}")
    tries = ledger.of("try")
    if verify:
        search.verify()
        counts = f"entries: {len(ledger.entries)}; tries: {len(tries)}"
        note(f"verified; {counts}; ledger {ledger.last_hash}")
    if as_json:
        print_json(tries)
        return
    note(f"text: {search.start['text']}; base: folder {ledger.base[:8]}")
    headings = ["TRY", "VERDICT", "DIFFERENCE, 95 % INTERVAL", "PAIRS", "TIME", "USD", "FOLDER"]
    table = [[*headings, "NOTE"], *map(cells_of, tries)]
    if ceiling is None:
        column = headings.index("USD")
        for row in table:
            del row[column]
    print_table(table)
    note_running(search)
    gains = ledger.of("gain")
    if gains:
        folder = gains[-1]["folder"][:8]
        difference = difference_of(gains[-1])
        click.echo(f"all kept tries together, to {folder}: {difference}, fresh seeds")
    if ceiling is not None:
        costs = f"{ledger.spent:.2f} of {ceiling:.2f} USD, and {ledger.reserved:.2f} reserved"
        click.echo(f"cost: {costs}")


def note_running(search: Search) -> None:
    """Print which folder is being tried now, on this machine or as a job, or that the base is not
    measured yet."""
    ledger = search.ledger
    if not search.is_running and not ledger.of("base"):
        n_runs = counted(len(ledger.runs), "run")
        again = command("try", "start", search.name)
        note(f"the base is not measured yet, {n_runs} made so far; `{again}` goes on")
    for job_id, entry in ledger.open_reservations.items():
        note(f"running: job {job_id}, of {counted(len(entry['runs']), 'run')}")
    if search.makes_jobs or not search.is_running:
        return
    folder = ledger.begun_folder
    n_runs = counted(len(ledger.runs_of(folder)), "run")
    number = len(ledger.of("try")) + 1
    if running_folder(search):
        note(f"running: try {number}, folder {folder[:8]}, {n_runs} made so far")
    elif not folder:
        note(f"running: try {number}, whose folder is being checked")
    elif folder == ledger.base:
        note(f"running: the base, {n_runs} made so far")
    else:
        note("running: the gain of all kept tries is being measured")


def running_folder(search: Search) -> str:
    """The SHA-256 of the folder that is tried on this machine now, or ''.

    The runs that measure the gain of all kept tries are of the first folder and of the base.
    """
    ledger = search.ledger
    folder = ledger.begun_folder
    is_tried = folder not in (ledger.base, ledger.start["folder"])
    return folder if is_tried and search.is_running else ""


def cells_of(entry: dict[str, Any]) -> list[str]:
    """The row of a try in the table of `try log`."""
    difference = n_pairs = time_ratio = "-"
    if "mean" in entry:
        difference = difference_of(entry)
        n_pairs = str(entry["pairs"])
        time_ratio = f"x{entry['times']:.2f}"
    remark = entry["note"]
    if "why" in entry:
        remark += f" ({entry['why']})"
    return [
        str(entry["number"]),
        entry["verdict"],
        difference,
        n_pairs,
        time_ratio,
        f"{entry['usd']:.2f}",
        entry["folder"][:8],
        remark,
    ]


@try_group.command("show")
@click.argument("number", type=click.IntRange(min=1))
@SEARCH
def show_command(number: int, group: str) -> None:
    """Print what try NUMBER changes of its base.

    Example:
      sm-nanogpt try show 7 --group shakespeare
    """
    search = open_search(group)
    entry = find_try(number, search)
    base = search.source(entry["base"])
    changed = search.source(entry["folder"])
    for name in sorted({*base.files, *changed.files}):
        difference = difflib.unified_diff(
            source_lines(base, name),
            source_lines(changed, name),
            fromfile=f"base/{name}",
            tofile=f"try/{name}",
            lineterm="",
        )
        for line in difference:
            click.echo(escape_invisible(line))


def find_try(number: int, search: Search) -> dict[str, Any]:
    """The entry of a try; for a try that still runs, its folder and its base."""
    ledger = search.ledger
    tries = ledger.of("try")
    if number <= len(tries):
        return tries[number - 1]
    folder = running_folder(search)
    if number == len(tries) + 1 and folder:
        note(f"try {number} is still running")
        return {"folder": folder, "base": ledger.base}
    raise InputError(f"search {search.name} has no try {number}; it has {len(tries)}")


def source_lines(source: Source, name: str) -> list[str]:
    text = source.files.get(name, b"").decode(errors="surrogateescape")
    if not text:
        return []
    return text.removesuffix("\n").split("\n")


def escape_invisible(line: str) -> str:
    """Write each character of a line of code that is not plainly visible as an escape.

    So no person, terminal, or program reads other code than Python does.
    """
    characters = []
    for character in line:
        if not character.isprintable() and character != "\t":
            character = ascii(character)[1:-1]
        characters.append(character)
    return "".join(characters)
