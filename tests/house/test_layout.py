"""How the code is laid out: the length of files, and which may import which."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest
from pages import ARCHITECTURE, ROOT, blocks, name_of


def imports_of(module: str, files: dict[str, Path]) -> set[str]:
    """Those of `files` that a module imports, also within functions, but not for type checks."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(files[module].read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom):
            assert not node.level or module.startswith("entry_point."), f"{module}: relative import"
            sdk = "launcher.sagemaker.estimator"
            assert module == sdk or (node.module or "").partition(".")[0] != "sagemaker", module
            name = f"entry_point.{node.module}" if node.level else node.module or ""
            found |= {name, *(f"{name}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        nodes.extend(ast.iter_child_nodes(node))
    return found & files.keys() - {module}


LINES_OF_A_FILE = 450


# Files with more lines, each with the reason why it is one topic.
LONG_FILES = {
    "launcher/sagemaker/backend.py": "all that SageMaker answers as a backend, one method each",
    "entry_point/trainer.py": "one run, from its first step to its model, in the order of a run",
}


@pytest.mark.parametrize("room", ["launcher", "entry_point"])
def test_a_long_file_says_why_it_is_one_topic(room):
    lines = {
        file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in (ROOT / room).rglob("*.py")
    }
    long = {name for name, n in lines.items() if n > LINES_OF_A_FILE}
    assert not long - LONG_FILES.keys(), (
        f"over {LINES_OF_A_FILE} lines: a person should be able to read a whole topic. If a part "
        "has a topic of its own, move it to a file of that name. If the file is one topic, add it "
        "to LONG_FILES with the reason. Shorten no text for this"
    )


def test_imports_run_as_the_architecture_is_drawn():
    lines = blocks(ARCHITECTURE, "")[0].splitlines()
    drawn = {
        name.removesuffix(".py").rstrip("/").replace("/", "."): row
        for row, line in enumerate(lines)
        for name in line.partition("|")[0].split()
    }
    paths = [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("entry_point/*.py")]
    files = {name_of(p).removesuffix(".py").replace("/", "."): p for p in paths}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    del files["launcher"]  # which imports none of them
    row = {}
    for module in files:
        name = module.removeprefix("launcher.")
        while name not in drawn:
            name, dot, _ = name.rpartition(".")
            assert dot, (
                f"{module} is not in the drawing of docs/architecture.md: add it to the row of the "
                "modules that it imports, or to one above"
            )
        row[module] = drawn[name]
    used = {module: imports_of(module, files) for module in files}
    upward = [f"{m} imports {other}" for m in used for other in used[m] if row[other] < row[m]]
    assert not upward, (
        f"{upward}: a module imports from its own row of the drawing in docs/architecture.md and "
        "from those below, so that who reads a row has to know only these; pass what is needed as "
        "an argument, or move it down"
    )
    graphlib.TopologicalSorter(used).prepare()  # raises CycleError
