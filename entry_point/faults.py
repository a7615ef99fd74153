"""Failures on purpose: NANOGPT_FAULT=RANK:STEP:ACTION shows what a run does then."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class Fault:
    """What a rank does before a step."""

    rank: int
    step: int
    action: str  # raise, kill, or hang

    def strike(self, is_stopped: Callable[[], bool]) -> None:
        """Raises OSError, kills this process, or hangs until it is asked to stop."""
        if self.action == "raise":
            raise OSError("NANOGPT_FAULT asked for this error")
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while not is_stopped():
            time.sleep(0.1)


def read_fault(text: str) -> Fault | None:
    """The fault that NANOGPT_FAULT names, such as 1:300:kill. Raises ConfigError."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+):(\d+):(raise|kill|hang)", text)
    if match is None:
        raise ConfigError(
            f"NANOGPT_FAULT={text!r}: must be RANK:STEP:ACTION, whose action is raise, kill, or"
            " hang"
        )
    return Fault(int(match[1]), int(match[2]), match[3])
