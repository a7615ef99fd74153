"""How the code is laid out: the length of files, and which may import which."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest
from pages import ARCHITECTURE, ROOT, blocks, name_of


def imports_of(module: str, files: dict[str, Path]) -> set[str]:
    """Those of `files` that a module imports, also within functions, but not for type checks."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(files[module].read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom):
            assert not node.level or module.startswith("entry_point."), (
                f"{module}: a relative import; write sm_nanogpt.launcher..., as others do"
            )
            sdk = "launcher.sagemaker.estimator"
            assert module == sdk or (node.module or "").partition(".")[0] != "sagemaker", (
                f"{module} imports the SageMaker SDK, which takes seconds; only {sdk} may"
            )
            name = (node.module or "").removeprefix("sm_nanogpt.")
            if node.level:
                name = f"entry_point.{name}".removesuffix(".")
            names.add(name)
            names |= {f"{name}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        nodes.extend(ast.iter_child_nodes(node))
    return names & files.keys() - {module}


LINES_OF_A_FILE = 450


# Files with more lines, each with the reason why it is one topic.
LONG_FILES: dict[str, str] = {}


@pytest.mark.parametrize("room", ["launcher", "entry_point"])
def test_a_long_file_says_why_it_is_one_topic(room):
    long_files = set()
    for file in (ROOT / room).rglob("*.py"):
        if len(file.read_text(encoding="utf-8").splitlines()) > LINES_OF_A_FILE:
            long_files.add(file.relative_to(ROOT).as_posix())
    unexplained = long_files - LONG_FILES.keys()
    assert not unexplained, (
        f"over {LINES_OF_A_FILE} lines: a person should be able to read a whole topic. If a part "
        "has a topic of its own, move it to a file of that name. If the file is one topic, add it "
        "to LONG_FILES with the reason. Shorten no text for this"
    )


def test_the_list_of_modules_is_complete():
    listed: set[str] = set()
    room = ""
    for line in (ROOT / "docs/modules.md").read_text("utf-8").splitlines():
        heading = re.match(r"#+ `(\S+)/`", line)
        if heading:
            room = heading[1]
        elif line.startswith("| `"):
            names = re.findall(r"`(\w+)`", line.split("|")[1])
            listed.update(f"{room}/{name}.py" for name in names)

    modules = set()
    for path in [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("entry_point/*.py")]:
        if path.name != "__init__.py":
            modules.add(name_of(path))
    assert listed == modules, (
        f"{sorted(listed ^ modules)}: docs/modules.md lists each module once, with its task, under "
        "the heading of its room; add a new module there, and take out one that is gone"
    )


def test_imports_run_as_the_architecture_is_drawn():
    drawing = blocks(ARCHITECTURE, "")[0]
    rows_drawn = {}
    for number, line in enumerate(drawing.splitlines()):
        for name in line.partition("|")[0].split():
            rows_drawn[name.removesuffix(".py").rstrip("/").replace("/", ".")] = number

    files = {}
    for path in [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("entry_point/*.py")]:
        module = name_of(path).removesuffix(".py").replace("/", ".")
        files[module.removesuffix(".__init__")] = path
    del files["launcher"]  # which imports none of them

    rows = {}
    for module in files:
        name = module.removeprefix("launcher.")
        while name not in rows_drawn:
            name, dot, _ = name.rpartition(".")
            assert dot, (
                f"{module} is not in the drawing of docs/architecture.md: add it to the row of the "
                "modules that it imports, or to one above"
            )
        rows[module] = rows_drawn[name]

    imports = {module: imports_of(module, files) for module in files}
    upward = []
    for module, imported_modules in imports.items():
        for imported in imported_modules:
            if rows[imported] < rows[module]:
                upward.append(f"{module} imports {imported}")
    assert not upward, (
        f"{upward}: a module imports from its own row of the drawing in docs/architecture.md and "
        "from those below, so that who reads a row has to know only these; pass what is needed as "
        "an argument, or move it down"
    )
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError
