"""Train a GPT of your own in three calls, on Amazon SageMaker or on this machine.

    import sm_nanogpt as sm

    data = sm.upload_data("input.txt")
    job = sm.launch(sm.Request(instance="local", data=data.uri, preset="cpu")).wait()
    print(job.sample("ROMEO:"))

docs/python.md tells of all names. Most are imported when they are first used.
"""

from typing import TYPE_CHECKING

import launcher
from launcher.library import job

if TYPE_CHECKING:
    from launcher import *  # noqa: F403

__all__ = ["job"]
__all__ += launcher.__all__
__getattr__ = launcher.__getattr__


def __dir__() -> list[str]:
    return __all__
