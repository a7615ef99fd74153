"""The end of a process at a chosen write of a ledger."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sm_nanogpt.launcher.files.ledger import Ledger


class Killed(BaseException):
    """The process is gone; nothing catches this."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int, is_torn: bool) -> None:
    """End the process at a write of a ledger, counted from 1: in the middle of it, or after."""
    write, n_writes = Ledger.write, Counter[str]()

    def counted(ledger: Ledger, kind: str, **facts: Any) -> Any:
        n_writes["all"] += 1
        if n_writes["all"] < number:
            return write(ledger, kind, **facts)
        if is_torn:
            with ledger.path.open("ab") as file:
                file.write(b'{"previous": "')
        else:
            write(ledger, kind, **facts)
        raise Killed

    monkeypatch.setattr(Ledger, "write", counted)
