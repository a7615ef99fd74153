"""What a process does before anything else. Imports nothing that takes long."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "5000"  # looks of a thread that waits, before it sleeps


def limit_spinning() -> None:
    """Has threads that wait for each other stay awake for a short time, unless the user chose one.

    With GNU's OpenMP they spin for some milliseconds. If another program uses a core, the spinning
    delays the thread that they wait for. `cpu` on two cores, alone and beside another program: 29k
    and 1k tokens/s with all of it, 28k and 8k with a sixtieth, 24k and 10k with a hundredth.
    OpenMP reads this when torch loads it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def open_standard_streams() -> None:
    """Opens /dev/null as each of stdin, stdout and stderr that is closed, as `<&-` leaves it.

    Else the next file that is opened would get the number of a stream. Whatever is written to that
    stream would then go into the file, and a child process would lose the file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # it is closed, and the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
