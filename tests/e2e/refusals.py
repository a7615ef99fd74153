"""What a service says when it refuses."""

from __future__ import annotations


class Refusal(Exception):
    """An error code of AWS, its message, and the HTTP status that goes with it."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status
