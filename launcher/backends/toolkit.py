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


def script_lines(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of the script, and errors of the toolkit, from pairs (host, line).

    Lines of hosts other than the first start with the host's name.
    """
    started, at_command = set[str](), set[str]()
    for host, line in lines:
        if tagged := TAGGED.match(line):
            host, line = tagged[1], tagged[2]
        elif by_toolkit := TOOLKIT.match(line):
            if by_toolkit[1] not in ("ERROR", "CRITICAL"):
                continue
        elif host not in started:  # hundreds of lines of environment
            if line.startswith(START):
                started.add(host)
                at_command.add(host)
            continue
        elif host in at_command:
            if line.strip():
                at_command.remove(host)
            continue
        yield line if host == "algo-1" else f"{host}: {line}"
