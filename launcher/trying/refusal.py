"""Why the rules of a search do not allow a folder."""

from __future__ import annotations

from sm_nanogpt.launcher.errors import ServiceError


class Refused(ServiceError):
    """The rules do not allow this folder. is_final: nor would they if it was tried again."""

    def __init__(self, problem: str, is_final: bool = False) -> None:
        super().__init__(problem)
        self.is_final = is_final
