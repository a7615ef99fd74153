"""Ask a folder on how many tokens it would train, before its runs cost anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm_nanogpt.launcher.local.runs import Run, run_all
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.trying.refusal import Refused

# A train.py that only prints on how many tokens its folder would train.
PROGRAM = """
import sys, types
package = types.ModuleType("entry_point")
package.__path__ = [sys.path[0]]
sys.modules["entry_point"] = package
from entry_point.config import make_config
hyperparameters = {hyperparameters}
config = make_config(hyperparameters, hyperparameters.pop("preset", None))
steps = config.max_steps * getattr(config, "generations", 1)
print(steps * config.batch_size * config.block_size)
"""


def planned_tokens(
    source: Source, hyperparameters: Mapping[str, Any], text: Path, limit: float
) -> int:
    """The number of tokens on which a folder would train, by its config.py. Raises Refused."""
    program = PROGRAM.format(hyperparameters=dict(hyperparameters)).encode()
    printing_folder = Source(source.directory, {**source.files, "train.py": program})
    run = Run(printing_folder, {}, text, max_seconds=limit, is_isolated=True)
    [(_, ended)] = run_all([run], 1)
    last_line = ended.log.rpartition("\n")[2]
    try:
        return int(last_line)
    except ValueError:
        problem = ended.problem or "config.py does not say on how many tokens it trains"
        raise Refused(problem) from None
