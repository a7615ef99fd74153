"""Failures on purpose: NANOGPT_FAULT=RANK:STEP:ACTION shows what a run does then."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

from .errors import ConfigError


def read_fault(text: str) -> tuple[int, int, str]:
    """Rank, step, and action of NANOGPT_FAULT, such as 1:300:kill. Raises ConfigError.

    Without one, the rank is -1, which no process has.
    """
    if not text:
        return -1, -1, ""
    if found := re.fullmatch(r"(\d+):(\d+):(raise|kill|hang)", text):
        return int(found[1]), int(found[2]), found[3]
    raise ConfigError(
        f"NANOGPT_FAULT={text!r}: must be RANK:STEP:ACTION, whose action is raise, kill, or hang"
    )


def fail(action: str, stopped: Callable[[], bool]) -> None:
    """Raises OSError, kills this process, or hangs until it is asked to stop."""
    if action == "raise":
        raise OSError("NANOGPT_FAULT asked for this error")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while not stopped():
        time.sleep(0.1)
