"""Names of tests say the rule."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_test_has_a_name_of_under_60_characters():
    names = []
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        names += re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    long = [name for name in names if len(name) >= 60]
    assert not long, (
        f"{long}: the name of a test is a sentence of under 60 characters, so that a list of tests "
        "reads as a list of rules; say the rule in the name, and the rest in a docstring"
    )
