"""Below launcher/cli, errors carry facts; the command line has the words for them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import click

from sm_nanogpt import launcher
from sm_nanogpt.launcher import cli, library
from sm_nanogpt.launcher.aws import REMEDY_CODES
from sm_nanogpt.launcher.cli.remedies import REMEDIES, sentence
from sm_nanogpt.launcher.errors import InputError, ServiceError

ROOT = Path(launcher.__file__).parent
BELOW = sorted(path for path in ROOT.rglob("*.py") if path.parent.name != "cli")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def all_options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (word for word in parameter.opts if word.startswith("--"))
    for subcommand in getattr(command, "commands", {}).values():
        yield from all_options(subcommand)


OPTIONS = set(all_options(cli.cli))
COMMANDS = "|".join(cli.cli.commands)


def strings(tree: ast.AST) -> Iterator[str]:
    """The literal texts of a module, without docstrings."""
    expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in expressions:
            yield str(node.value)


def test_no_message_below_the_cli_names_a_command():
    messages = []
    for path in BELOW:
        for text in strings(tree_of(path)):
            names_option = OPTIONS & set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
            names_command = re.search(rf"`({COMMANDS})\b|sm-nanogpt ({COMMANDS})\b", text)
            if names_option or names_command:
                messages.append(f"{path.relative_to(ROOT)}: {text}")
    assert not messages, (
        f"{messages}: Python users meet this message too, and have no command line; raise an error "
        "with a code and facts, and put the sentence with the command into cli/remedies.py"
    )


def codes() -> Iterator[tuple[str, set[str]]]:
    """Each code that is given to an error or a log record, and the names of the facts with it."""
    for path in BELOW:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, (ast.Call, ast.Dict)):
                continue
            arguments: dict[object, ast.expr] = {}
            if isinstance(node, ast.Dict):  # extra= of a log record
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                if "code" in keys:
                    arguments |= zip(keys, node.values, strict=False)
            else:
                arguments |= {
                    keyword.arg: keyword.value for keyword in node.keywords if keyword.arg
                }
                name = node.func.id if isinstance(node.func, ast.Name) else ""
                if name.endswith("Error") or name in ERRORS:
                    arguments |= zip(("problem", "code"), node.args, strict=False)
            code = arguments.get("code")
            if isinstance(code, ast.Constant) and code.value:
                yield str(code.value), {str(name) for name in arguments}


def subclasses(kind: type[Exception]) -> Iterator[str]:
    subclass: type[Exception]
    for subclass in kind.__subclasses__():
        yield subclass.__name__
        yield from subclasses(subclass)


assert library  # it imports the modules of all errors
ERRORS = {*subclasses(InputError), *subclasses(ServiceError)}


def test_each_code_has_a_remedy_with_its_facts():
    codes_used = list(codes())
    codes_needed = {code for code, _ in codes_used}
    codes_needed |= {code for code in REMEDY_CODES.values() if code}
    silent = codes_needed - REMEDIES.keys()
    assert not silent, f"{silent}: an error with a code says what to do; add it to cli/remedies.py"
    unused = REMEDIES.keys() - codes_needed
    assert not unused, f"{unused}: no error has such a code; take it out of cli/remedies.py"
    for code, facts in codes_used:
        fields = {field for _, field, _, _ in Formatter().parse(REMEDIES[code])}
        missing = fields - {None, "sm", "option", "excludes"} - facts
        assert not missing, f"the remedy of {code!r} uses {missing}, which the error does not carry"


def test_an_error_is_said_by_its_option():
    error = InputError("must be at least 60", field="max_wait", value=5, limit=60)
    assert str(error) == "max_wait=5: must be at least 60"
    assert error.limit == 60
    assert sentence(error) == "--max-wait 5: must be at least 60"


def test_another_argument_is_said_by_its_option():
    error = InputError("is for one image; `image_uri=` names another", field="preset", value="auto")
    assert str(error) == "preset=auto: is for one image; `image_uri=` names another"
    assert sentence(error) == "--preset auto: is for one image; --image-uri names another"
    assert sentence(InputError("must not be `latest`")) == "must not be `latest`"
    column = InputError("reviews.csv: two columns are called `name`")
    assert sentence(column) == str(column)


def test_a_remedy_has_the_facts_of_its_error(monkeypatch):
    monkeypatch.setitem(REMEDIES, "is-running", "stop it first: `{sm} stop {job_id}`")
    error = ServiceError("job a is running", "is-running", job_id="a").within("cannot delete")
    assert str(error) == "cannot delete: job a is running"
    assert sentence(error).endswith("; stop it first: `sm-nanogpt stop a`")


def test_a_hundred_lines_of_code_have_two_or_three_raise():
    """A refusal is for what people meet, and for what would cost them money, data, or secrets.
    Everything else is said where an exception of pydantic, botocore, or torch becomes a line."""
    n_raise = 0
    n_lines = 0
    for path in ROOT.rglob("*.py"):
        source = path.read_text()
        docstring_lines: set[int] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise):
                n_raise += 1
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstring_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for number, line in enumerate(source.splitlines(), start=1):
            text = line.strip()
            if text and not text.startswith("#") and number not in docstring_lines:
                n_lines += 1
    assert n_raise <= 0.025 * n_lines, (
        f"{n_raise} raise in {n_lines} lines of code, and 25 in 1,000 are enough: let an exception "
        "of the library become one line where the command line prints it, or join checks that "
        "refuse the same thing"
    )
