"""Extract the script's lines from a log in which SageMaker's toolkit writes ten times as much.

Called by `launcher.backends.sagemaker`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# mpirun tags each line with its rank and host; torchrun does not.
TAGGED = re.compile(r"\[\d+,mpirank:\d+,([^\]]+)\]<std(?:out|err)>:(.*)", re.DOTALL)
TOOLKIT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [\w.-]+ +([A-Z]+) ")
START = "Invoking script with the following command:"  # the command is on the next line
# The images since 2.11 preload a library that they fail to make, so each process says so.
NOISE = "ERROR: ld.so: object '/libchangehostname.so' "


def script_lines(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of the script, and errors of the toolkit, from pairs (stream, line).

    A stream is HOST-TIME: each start of a spot job has streams of its own. Lines of hosts other
    than the first start with the host's name.
    """
    started, at_command = set[str](), set[str]()
    for stream, line in lines:
        host = stream.rpartition("-")[0]
        if tagged := TAGGED.match(line):
            host, line = tagged[1], tagged[2]
        elif by_toolkit := TOOLKIT.match(line):
            if by_toolkit[1] not in ("ERROR", "CRITICAL"):
                continue
        elif stream not in started:  # hundreds of lines of environment
            if line.startswith(START):
                started.add(stream)
                at_command.add(stream)
            continue
        elif stream in at_command:
            if line.strip():
                at_command.remove(stream)
            continue
        if not line.startswith(NOISE):
            yield line if host == "algo-1" else f"{host}: {line}"
