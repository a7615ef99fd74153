"""All but the training: texts, jobs, models and reports. `sm_nanogpt` has the names for users.

Nothing here prints but progress bars, in a terminal or a notebook, and `launcher.cli`: what a
launch finds out (image, price, text) is logged at level INFO below the logger `launcher`. Importing
this package costs nothing; it raises ImportError where another package `entry_point` hides that of
this project.
"""

import logging
from importlib.util import find_spec
from pathlib import Path

_own = str(Path(__file__).parents[1] / "entry_point")
_spec = find_spec("entry_point")  # a name that another project, or a copied folder, may have too
_found = (_spec.submodule_search_locations or [str(_spec.origin)])[0] if _spec else _own
if _found != _own:
    raise ImportError(
        f"package entry_point is {_found}, which hides {_own}: rename it, or start Python elsewhere"
    )

logging.getLogger(__name__).addHandler(logging.NullHandler())
