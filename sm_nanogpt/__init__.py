"""Train a GPT of your own in three calls, on Amazon SageMaker or on this machine.

    import sm_nanogpt as sm

    data = sm.upload_data("input.txt")
    job = sm.launch(sm.Request(instance="local", data=data.uri, preset="cpu")).wait()
    print(job.sample("ROMEO:"))

docs/python.md tells of all names. They are imported when they are first used, from the package
`launcher`, whose `launcher.job` is a module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import launcher

if TYPE_CHECKING:
    from launcher import *  # noqa: F403
    from launcher.library import job

__all__ = ["job"]
__all__ += launcher.__all__


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "job":
        from launcher.library import job

        return job
    return getattr(launcher, name)
