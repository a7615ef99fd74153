"""The error for a folder that the rules of a search do not allow."""

from __future__ import annotations

from sm_nanogpt.launcher.errors import ServiceError


class Refused(ServiceError):
    """The rules of a search do not allow a folder. is_final: it may not be tried again."""

    def __init__(self, problem: str, is_final: bool = False) -> None:
        super().__init__(problem)
        self.is_final = is_final
