"""The commands of `try`: search for a better training folder under rules."""

from __future__ import annotations

import difflib
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.options import JSON, Group, settings_of, valued
from launcher.cli.remedies import command, sentence
from launcher.cli.show import at_ctrl_c, note, print_json, print_table, shown
from launcher.errors import InputError, LauncherError

if TYPE_CHECKING:
    from launcher.source import Source
    from launcher.trying.search import Search

CODES = {"kept": 0, "refused": 4, "ceiling": 5}  # of a verdict; 3 of any other
GOES_ON = "`{}` goes on with what has ended, and with a job that runs"
WORDS = {"kept": "KEEP", "refused": "REFUSED", "ceiling": "CEILING"}
SEARCH = valued("--group NAME", "The search, by the name that `try start` gave it.", required=True)


def opened(name: str) -> Search:
    from launcher.trying.search import Search

    return Search(name, settings_of(), note)


@click.group("try", cls=Group)
def try_group() -> None:
    """Search for a better model by changes of the training folder, under rules."""


@try_group.command("start")
@click.argument("name")
@valued("--text data NAME|URI|PATH", "The text (default: the last upload).")
@valued("--preset NAME", "The base's hyperparameters (default: quick; on GPUs baby).")
@valued("--size N", "Instead: the size of the base, by a dial from 0.25 to 16.", type=float)
@valued("--entry-point DIR", "The folder to begin with.", type=click.Path(path_type=Path))
@valued("--instance TYPE", "Where runs are made (default: local).", default="local")
@valued("--ceiling USD", "The most that all jobs of the search may cost.")
@valued(
    "--smallest-gain NATS",
    "The smallest gain that counts (default: 0.005).",
    type=float,
    default=0.005,
)
def start_command(name: str, ceiling: float | None, smallest_gain: float, **given: Any) -> None:
    """Begin the search NAME: keep text for the judge, and train the base with several seeds.

    Example:
      sm-nanogpt try start shakespeare --text input.txt
      sm-nanogpt copy-script my_gpt --from shakespeare
      sm-nanogpt try run my_gpt --group shakespeare --note "squared ReLU"
    """
    from launcher.backends import backend_class
    from launcher.instances import looks_like_gpu
    from launcher.job import Request
    from launcher.trying.rule import detectable_gains
    from launcher.trying.start import begin, remove_unfinished

    bills = backend_class(given["instance"]).bills
    if bills != (ceiling is not None):
        problem = "must be given for jobs on SageMaker" if bills else "is for SageMaker"
        raise InputError(problem, field="ceiling", value=ceiling)
    for field, value in (("smallest_gain", smallest_gain), ("ceiling", ceiling)):
        if value is not None and not 0 < value < math.inf:
            raise InputError("must be more than 0", field=field, value=value)
    if given["preset"] is given["size"] is None and not looks_like_gpu(given["instance"]):
        given["preset"] = "quick"
    request = Request(**{key: value for key, value in given.items() if value is not None})
    search = begin(name, request, settings_of(), smallest_gain, ceiling, note)
    with at_ctrl_c(GOES_ON.format(command("try", "run", "FOLDER", "--group", name))):
        try:
            with search.held(shared=False):
                base = search.base()
        except LauncherError:
            remove_unfinished(search.directory)
            raise
    gains = ", ".join(f"{gain:.3f} by {n}" for n, gain in detectable_gains(base["sd"]).items())
    note(f"base: a loss of {base['loss']:.4f} nats, over 8 seeds (sd {base['sd']:.4f})")
    note(f"detectable gains, by pairs: {gains}; at most {base['pairs']} pairs are made")
    note(f"rules, and what to do: {search.directory / 'AGENTS.md'}")
    note(f"next: {command('copy-script', 'my_gpt', '--from', name)}")
    click.echo(search.directory)


@try_group.command("run")
@click.argument("folder", type=click.Path(path_type=Path))
@SEARCH
@valued("--note words TEXT", "What is tried, in a few words.", default="")
@JSON
def run_command(folder: Path, group: str, words: str, as_json: bool) -> None:
    """Judge a changed training FOLDER against the base of a search.

    Exit code 0: it is better, and is the base now; 3: it is no better; 4: the rules refuse it;
    5: it may cost more than the ceiling leaves.

    Example:
      sm-nanogpt try run my_gpt --group shakespeare --note "squared ReLU"
    """
    from launcher.source import Source

    search = opened(group)
    again = command("try", "run", shlex.quote(str(folder)), "--group", group)
    with at_ctrl_c(GOES_ON.format(again)):
        entry = search.attempt(Source.read(folder), words)
    if as_json:
        print_json({**entry, "ledger": search.ledger.last_hash})
    else:
        click.echo(shown(verdict(entry, search)))
    if code := CODES.get(entry["verdict"], 3):
        raise click.exceptions.Exit(code)


def verdict(entry: dict[str, Any], search: Search) -> str:
    """A try in one line."""
    ceiling, ledger = search.start["ceiling"], search.ledger
    line = [f"{WORDS.get(entry['verdict'], 'REVERT')} {entry['number']}"]
    if "mean" in entry:
        line += [numbers(entry), f"time x{entry['times']:.2f}"]
    if entry["verdict"] != "kept":
        line.append(entry.get("why") or entry["verdict"])
    if ceiling is not None:
        line.append(f"cost {entry['usd']:.2f}; {ledger.spent:.2f} of {ceiling:.2f} USD spent")
    return "  ".join([*line, f"ledger {ledger.last_hash[:8]}"])


def numbers(entry: dict[str, Any]) -> str:
    return f"{entry['mean']:+.4f} ({entry['low']:+.4f} to {entry['high']:+.4f})"


@try_group.command("log")
@click.argument("name")
@valued(
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
    search = opened(name)
    ceiling, ledger = search.start["ceiling"], search.ledger
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
    money = [] if ceiling is None else ["USD"]
    rows = [["TRY", "VERDICT", "DIFFERENCE, 95 % INTERVAL", "PAIRS", "TIME", *money, "FOLDER"]]
    rows[0].append("NOTE")
    for e in tries:
        measured = [numbers(e), str(e["pairs"]), f"x{e['times']:.2f}"] if "mean" in e else ["-"] * 3
        measured += [f"{e['usd']:.2f}"] * len(money)
        said = f"{e['note']} ({e['why']})" if "why" in e else e["note"]
        rows.append([str(e["number"]), e["verdict"], *measured, e["folder"][:8], said])
    print_table(rows)
    for e in ledger.of("gain")[-1:]:
        click.echo(f"all kept tries together, to {e['folder'][:8]}: {numbers(e)}, fresh seeds")
    if ceiling is not None:
        also = f"{ledger.reserved:.2f} reserved"
        click.echo(f"cost: {ledger.spent:.2f} of {ceiling:.2f} USD, and {also}")


@try_group.command("show")
@click.argument("number", type=click.IntRange(min=1))
@SEARCH
def show_command(number: int, group: str) -> None:
    """Print what try NUMBER changes of the base that it was tried against.

    Example:
      sm-nanogpt try show 7 --group shakespeare
    """
    search = opened(group)
    tries = search.ledger.of("try")
    if number > len(tries):
        raise InputError(f"search {group} has no try {number}; its tries: {len(tries)}")
    entry = tries[number - 1]
    base, tried = search.source(entry["base"]), search.source(entry["folder"])
    for name in sorted({*base.files, *tried.files}):
        lines, new_lines = lines_of(base, name), lines_of(tried, name)
        for line in difflib.unified_diff(
            lines, new_lines, f"base/{name}", f"try/{name}", lineterm=""
        ):
            click.echo(visible(line))


def lines_of(source: Source, name: str) -> list[str]:
    text = source.files.get(name, b"").decode(errors="surrogateescape")
    return text.removesuffix("\n").split("\n") if text else []


def visible(line: str) -> str:
    """A line of code with an escape for each character that is not plainly visible: nobody, be it a
    person, a terminal or a program, reads other code than Python does."""
    return "".join(
        character if character.isprintable() or character == "\t" else ascii(character)[1:-1]
        for character in line
    )
