"""Below launcher.cli, errors carry facts; the command line has the words for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import click

import launcher
from launcher import cli
from launcher.aws import CODES
from launcher.cli.remedies import REMEDIES, sentence
from launcher.errors import InputError, ServiceError

ROOT = Path(launcher.__file__).parent
BELOW = sorted(path for path in ROOT.rglob("*.py") if path.parent.name != "cli")


def all_options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (word for word in parameter.opts if word.startswith("--"))
    for each in getattr(command, "commands", {}).values():
        yield from all_options(each)


OPTIONS = set(all_options(cli.cli))
COMMANDS = "|".join(cli.cli.commands)


def strings(tree: ast.AST) -> Iterator[str]:
    """The literal texts of a module, without docstrings."""
    expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in expressions:
            yield str(node.value)


def test_no_message_below_the_cli_names_a_command():
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in BELOW
        for text in strings(ast.parse(path.read_text()))
        if OPTIONS & set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        or re.search(rf"`({COMMANDS})\b|sm-nanogpt ({COMMANDS})\b", text)
    ]
    assert not found, (
        f"{found}: Python users meet this message too, and have no command line; raise an error "
        "with a code and facts, and put the sentence with the command into cli/remedies.py"
    )


def codes() -> Iterator[tuple[str, set[str]]]:
    """Each code that is given to an error or a log record, and the names of the facts with it."""
    for path in BELOW:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.Call, ast.Dict)):
                continue
            given: dict[object, ast.expr]
            if isinstance(node, ast.Dict):  # extra= of a log record
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                given = dict(zip(keys, node.values, strict=False)) if "code" in keys else {}
            else:
                given = {word.arg: word.value for word in node.keywords if word.arg}
                name = node.func.id if isinstance(node.func, ast.Name) else ""
                if name.endswith("Error") or name in ERRORS:
                    given |= dict(zip(("problem", "code"), node.args, strict=False))
            code = given.get("code")
            if isinstance(code, ast.Constant) and code.value:
                yield str(code.value), {str(name) for name in given}


def subclasses(kind: type[Exception]) -> Iterator[str]:
    each: type[Exception]
    for each in kind.__subclasses__():
        yield each.__name__
        yield from subclasses(each)


ERRORS = {*subclasses(InputError), *subclasses(ServiceError)}


def test_each_code_has_a_remedy_with_its_facts():
    used = list(codes())
    needed = {code for code, _ in used} | set(filter(None, CODES.values()))
    silent, unused = needed - REMEDIES.keys(), REMEDIES.keys() - needed
    assert not silent, f"{silent}: an error with a code says what to do; add it to cli/remedies.py"
    assert not unused, f"{unused}: no error has such a code; take it out of cli/remedies.py"
    for code, facts in used:
        fields = {field for _, field, _, _ in Formatter().parse(REMEDIES[code]) if field}
        missing = fields - {"sm", "option", "excludes"} - facts
        assert not missing, f"the remedy of {code!r} uses {missing}, which the error does not carry"


def test_an_error_is_said_by_its_option():
    error = InputError("must be at least 60", field="max_wait", value=5, limit=60)
    assert (str(error), error.limit) == ("max_wait=5: must be at least 60", 60)
    assert sentence(error) == "--max-wait 5: must be at least 60"


def test_a_remedy_has_the_facts_of_its_error(monkeypatch):
    monkeypatch.setitem(REMEDIES, "is-running", "stop it first: `{sm} stop {job_id}`")
    error = ServiceError("job a is running", "is-running", job_id="a").within("cannot delete")
    assert str(error) == "cannot delete: job a is running"
    assert sentence(error).endswith("; stop it first: `sm-nanogpt stop a`")


def test_a_hundred_lines_of_code_have_two_or_three_raise():
    """A refusal is for what people meet, and for what would cost them money, data, or secrets.
    Everything else is said where an exception of pydantic, botocore, or torch becomes a line."""
    raised = written = 0
    for path in ROOT.rglob("*.py"):
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        raised += sum(isinstance(node, ast.Raise) for node in nodes)
        prose = {
            number
            for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines = enumerate(map(str.strip, source.splitlines()), start=1)
        written += sum(bool(line) and line[0] != "#" and n not in prose for n, line in lines)
    assert raised <= 0.025 * written, (
        f"{raised} raise in {written} lines of code, and 25 in 1,000 are enough: let an exception "
        "of the library become one line where the command line prints it, or join checks that "
        "refuse the same thing"
    )
