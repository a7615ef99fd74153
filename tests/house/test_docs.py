"""What the documentation shows exists: commands, options, hyperparameters, names, links, arrows."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from pages import ARCHITECTURE, FENCE, NANOGPT, ROOT, blocks, commands, name_of, shown_commands

import sm_nanogpt
from sm_nanogpt.entry_point.command_line import OPTIONS
from sm_nanogpt.entry_point.config import OPTIMIZERS, Config, make_config
from sm_nanogpt.entry_point.presets import PRESETS
from sm_nanogpt.launcher.cli import cli
from sm_nanogpt.launcher.cli.options import JobParameter
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.instances import count_gpus, gpu_of, offline_price
from sm_nanogpt.launcher.judge.evaluation import ANCHORS
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.formats import FORMATS
from sm_nanogpt.launcher.views.job_fields import columns_of

NAMES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "infra/README.md")
MANUAL = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = (
    "SECURITY.md",
    "llms.txt",
    "examples/benchmarks/README.md",
    "examples/benchmarks/ideas.md",
    "examples/tutorials/README.md",
    "tests/aws/README.md",
)
PAGES = [*MANUAL, *(ROOT / name for name in OTHERS)]
AWS = ROOT / "docs/aws.md"
HYPERPARAMETER_PAGE = ROOT / "docs/hyperparameters.md"
HYPERPARAMETERS = {field.name for field in dataclasses.fields(Config)}
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"""(?:\]\(|\bsrc="|\bsrcset=")([^)"\s]+)[)"]""")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


@pytest.fixture(autouse=True)
def no_job_is_looked_for(monkeypatch):
    monkeypatch.setattr(JobParameter, "convert", lambda self, value, param, ctx: value)


def parse(
    command: click.Command, arguments: list[str], parent: click.Context | None = None
) -> None:
    """Parses as the command line does, and runs nothing. Raises click's or our own errors."""
    context = command.make_context(command.name, list(arguments), parent)
    if isinstance(command, click.Group):
        _, arguments, _ = command.make_parser(context).parse_args(list(arguments))
        _, subcommand, arguments = command.resolve_command(context, arguments)
        assert subcommand is not None
        parse(subcommand, arguments, context)


def option_names(command: click.Command) -> set[str]:
    names: set[str] = set()
    for parameter in command.params:
        names.update(parameter.opts)
        names.update(parameter.secondary_opts)
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            names |= option_names(subcommand)
    return names


def commands_with(option: str, group: click.Group = cli, prefix: str = "") -> set[str]:
    """The names of the commands that have an option, such as "infra show"."""
    names = set()
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            names |= commands_with(option, command, f"{name} ")
        elif option in option_names(command):
            names.add(f"{prefix}{name}")
    return names


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    names = set()
    for heading in HEADING.findall(prose(page)):
        letters = re.sub(r"[^\w\- ]", "", heading.lower())
        names.add(letters.replace(" ", "-"))
    return names


def test_each_shown_command_parses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_gpt").mkdir()  # which copy-script writes
    for name in ("questions.jsonl", "secrets.txt"):  # options of eval take files that exist
        Path(name).touch()
    for page in PAGES:
        for arguments in shown_commands(page):
            try:
                parse(cli, arguments)
            except (click.ClickException, InputError) as error:
                pytest.fail(f"{name_of(page)} shows {shlex.join(arguments)}: {error}")


def test_shown_commands_are_found_and_checked():
    names = {arguments[0] for arguments in shown_commands(ROOT / "README.md")}
    assert names >= {"upload-data", "launch", "fetch-and-sample", "infra", "doctor", "logs"}
    (arguments,) = commands("A=1 job_id=$(sm-nanogpt launch --instnce local) && echo  # why")
    with pytest.raises(click.NoSuchOption):
        parse(cli, arguments)


def test_each_named_option_exists():
    options = option_names(cli) | {f"--{option.name}" for option in OPTIONS} | {"--help"}
    for page in MANUAL:
        unknown = set(re.findall(r"`(--[a-z][a-z-]*)", prose(page))) - options
        assert not unknown, f"{name_of(page)} names {unknown}, which are options of no command"


def test_the_commands_that_print_json_are_listed():
    start = "These commands print JSON with `--json`:"
    _, _, page_after = AWS.read_text("utf-8").partition(start)
    sentence, _, _ = page_after.partition(".\n")
    expected = commands_with("--json") - {"launch"} | {"launch --forecast"}
    assert set(CODE.findall(sentence)) == expected, (
        f"docs/aws.md says `{start}`; let it name these: {sorted(expected)}"
    )


def test_each_named_setting_and_import_exists():
    variables = {name.upper() for name in (*Settings.model_fields, "name")}
    for page in PAGES:
        unknown = set(re.findall(r"--set ([a-z]\w*)", page.read_text("utf-8"))) - HYPERPARAMETERS
        assert not unknown, f"{name_of(page)} sets {unknown}, which are fields of no Config"
        unknown = set(re.findall(r"\bSM_NANOGPT_([A-Z_]+)", prose(page))) - variables
        assert not unknown, f"{name_of(page)} names SM_NANOGPT_{unknown}, which are no settings"
        for block in blocks(page, "toml"):
            unknown = set(tomllib.loads(block)) - HYPERPARAMETERS - set(Settings.model_fields)
            assert not unknown, f"{name_of(page)} sets {unknown}, which are no settings"
        for block in blocks(page, "python"):
            unknown = attributes_of_sm(block) - set(sm_nanogpt.__all__)
            assert not unknown, f"{name_of(page)} uses sm.{unknown}, which does not exist"


def attributes_of_sm(source: str) -> set[str]:
    """The names that a piece of Python takes from `sm`."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if ast.unparse(node.value) == "sm"}


def test_each_relative_link_and_anchor_resolves():
    for page in PAGES:
        for link in LINK.findall(prose(page)):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{name_of(page)} links to {link}"
            assert not anchor or anchor in anchors(target), f"{name_of(page)} links to {link}"


def test_each_picture_is_shown_and_small():
    shown = {link for page in PAGES for link in LINK.findall(prose(page))}
    for path in (ROOT / "docs/pictures").iterdir():
        is_shown = any(link.endswith(f"pictures/{path.name}") for link in shown)
        assert is_shown, f"{path.name} is shown by no page: show it or delete it"
        assert path.stat().st_size < 150_000, f"{path.name}: draw it smaller, under 150 kB"


def test_a_release_makes_each_link_of_readme_absolute(tmp_path):
    page = tmp_path / "README.md"
    page.write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    script = ROOT / ".ci/absolute_links.py"
    subprocess.run([sys.executable, script, page, "you/sm-nanogpt", "v0.1.0"], check=True)
    links = LINK.findall(prose(page))
    assert "https://github.com/you/sm-nanogpt/blob/v0.1.0/docs/aws.md" in links
    pictures = "https://raw.githubusercontent.com/you/sm-nanogpt/v0.1.0/docs/pictures"
    assert f"{pictures}/three-commands.svg" in links
    assert all(link.startswith("https://") for link in links)


def rows(page: Path) -> list[list[str]]:
    """The cells of each row of a page's tables."""
    rows = []
    for line in prose(page).split("\n"):
        if line.startswith("|"):
            cells = line.strip("|").split("|")
            rows.append([cell.strip() for cell in cells])
    return rows


def test_the_page_of_formats_has_the_table_of_the_product():
    described = {cells[0].strip("`"): cells[1] for cells in rows(ROOT / "docs/tokens.md")}
    for format in FORMATS:
        if not format.is_refused:
            assert described.get(format.patterns) == format.help, (
                f"{format.name}: the table of docs/tokens.md needs the row "
                f"| `{format.patterns}` | {format.help} | what a document is |"
            )


def test_the_table_for_users_of_nanogpt_is_complete():
    options = option_names(cli)
    names: set[str] = set()
    for cells in rows(NANOGPT):
        names.update(CODE.findall(cells[1]))
    missing = HYPERPARAMETERS - names
    assert not missing, (
        f"{missing}: a user of nanoGPT looks for each hyperparameter in "
        "docs/from-nanogpt.md; add a row there"
    )
    for name in names - HYPERPARAMETERS:
        if name.startswith("--"):
            assert name in options
        else:
            assert name.startswith("sm-nanogpt")
            for arguments in commands(name):
                parse(cli, arguments)


def test_the_table_of_presets_shows_their_values():
    table = {cells[0].strip("`"): cells[1:] for cells in rows(HYPERPARAMETER_PAGE)}
    for name in PRESETS:
        assert name in table, f"{name}: the table of presets in docs/hyperparameters.md needs a row"
        model, training = table[name]
        c = make_config({}, name)
        size = f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, context {c.block_size}"
        assert re.split(", tied:|:", model)[0] == size
        assert (", tied:" in model) == c.tie_embeddings
        assert training.startswith(f"{c.max_steps} steps of {c.batch_size} sequences")


def test_the_page_of_hyperparameters_names_each_optimizer():
    [cells] = [cells for cells in rows(HYPERPARAMETER_PAGE) if cells[0] == "`optimizer`"]
    missing = OPTIMIZERS.keys() - CODE.findall(cells[1])
    assert not missing, f"{missing}: the row `optimizer` of docs/hyperparameters.md names each"


def test_the_page_of_eval_shows_each_anchor():
    text = (ROOT / "docs/eval.md").read_text("utf-8")
    missing = [anchor.heading for anchor in ANCHORS.values() if anchor.heading not in text]
    assert not missing, f"{missing}: show each in the output of docs/eval.md, and say what it means"


def test_the_table_of_instance_types_shows_their_facts():
    for cells in rows(AWS):
        name = cells[0].strip("`")
        if not name.startswith("ml."):
            continue
        gpu = gpu_of(name)
        price = offline_price(name)
        facts = ["none", ""]
        if gpu is not None:
            facts = [f"{count_gpus(name)} {gpu.name}", f"{gpu.memory} GB"]
        facts.append(f"{price.per_hour:.2f}" if price is not None else "")
        assert cells[1:] == facts, name


def test_architecture_names_exist_in_their_files():
    for cells in rows(ARCHITECTURE):
        for path in CODE.findall(cells[0]):
            assert (ROOT / path).is_file(), f"docs/architecture.md names {path}, which is gone"
            names = CODE.findall(cells[1])
            if names:  # else it may be no Python
                body = ast.parse((ROOT / path).read_text()).body
                for name in names:
                    assert is_defined(body, name), f"{path} does not define {name}"


def is_defined(body: list[ast.stmt], name: str) -> bool:
    """Whether statements define a name, or the attribute of a class after its dot."""
    first, _, attribute = name.partition(".")
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not attribute and first in [ast.unparse(target) for target in targets]:
                return True
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == first:
            return not attribute or is_defined(node.body, attribute)
    return False


def test_each_column_of_a_list_of_jobs_is_explained():
    explained: set[str] = set()
    for cells in rows(AWS):
        explained.update(CODE.findall(cells[0]))
    missing = set(columns_of([])) - explained
    assert not missing, f"{missing}: the table of columns in docs/aws.md needs a row for each"


def test_committed_notebooks_hold_no_output():
    for path in (ROOT / "examples").rglob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        assert not any(cell.get("outputs") for cell in cells), (
            f"{name_of(path)} has outputs, which say what was true on one machine, and change with "
            "each run; clear the outputs of all cells and save it"
        )
