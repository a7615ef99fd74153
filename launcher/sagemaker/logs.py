"""The lines of a job in CloudWatch, and the script's among those of the toolkit."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from launcher.aws import Missing

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
Event = tuple[int, str, str]  # of a log: time in ms, stream (HOST-TIME here), message
# mpirun tags each line with its rank and host; torchrun does not.
TAGGED = re.compile(r"\[\d+,mpirank:\d+,([^\]]+)\]<std(?:out|err)>:(.*)", re.DOTALL)
TOOLKIT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [\w.-]+ +([A-Z]+) ")
START = "Invoking script with the following command:"  # the command is on the next line
# The images since 2.11 preload a library that they fail to make, so each process says so.
NOISE = "ERROR: ld.so: object '/libchangehostname.so' "


def lines_of(
    events: Iterable[Event], raw: bool = False, running: Collection[str] = ()
) -> Iterator[str]:
    """Yield the lines of the script, and errors of the toolkit.

    A stream is HOST-TIME: each start of a spot job has streams of its own. In those named by
    `running` the script has started before the first line. Lines of hosts other than the first
    start with the host's name. raw: yield every line, after its host's name.
    """
    started, at_command = set(running), set[str]()
    for _, stream, line in events:
        host = stream.rpartition("-")[0]
        if raw:
            yield f"{host}: {line}"
            continue
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


def streams_of(client: Any, job_id: str) -> list[str]:
    """The names of a job's streams. client is one of CloudWatch Logs, here and below."""
    try:
        pages = client.get_paginator("describe_log_streams").paginate(
            logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job_id}/"
        )
        return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
    except Missing:  # the account has no logs yet
        return []


def pages_of(
    client: Any, stream: str, token: str | None = None, backward: bool = False
) -> Iterator[tuple[list[Event], str]]:
    """Yield the pages after a token, or from one end of a stream to the other, each with the token
    of the next. A page is in order of time, and may be empty before the last."""
    direction = "nextBackwardToken" if backward else "nextForwardToken"
    while True:
        given = {"nextToken": token} if token else {}
        page = client.get_log_events(
            logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=not backward, **given
        )
        name, following = stream.partition("/")[2], page[direction]
        events = [(e["timestamp"], name, e["message"].rstrip("\n")) for e in page["events"]]
        yield events, following
        if following == token:  # where a stream ends, it returns the token of the request
            return
        token = following


def new_events(client: Any, job_id: str, seen: dict[str, str]) -> list[Event]:
    """The events since `seen`, in order of time. `seen` is updated at the end, so that no line is
    lost if an outage interrupts the call."""
    found, now = list[Event](), dict[str, str]()
    for stream in streams_of(client, job_id):
        for events, token in pages_of(client, stream, seen.get(stream)):
            found += events
            now[stream] = token
    seen |= now
    return sorted(found, key=lambda event: event[0])


def last_events(client: Any, stream: str, count: int, raw: bool) -> tuple[list[Event], set[str]]:
    """The last events of a stream, which make `count` lines if it has so many, and its name as
    `running` of lines_of if the script started before them."""

    def starts(events: Iterable[Event]) -> bool:
        return any(message.startswith(START) for _, _, message in events)

    before = not raw and any(starts(page) for page, _ in pages_of(client, stream))
    running = {stream.partition("/")[2]} if before else set[str]()
    events, found = list[Event](), 0.0
    for page, _ in pages_of(client, stream, backward=True):
        events = [*page, *events]
        if running and starts(page):
            running, found = set(), -math.inf  # what the toolkit wrote earlier is short
        found += len(list(lines_of(page, raw, running)))
        if found >= count + 2:  # the first two may be the command, which follows START
            break
    return events, running


def last_lines(client: Any, job_id: str, count: int, raw: bool) -> list[str]:
    """The last lines of a job, of all streams in order of time. Each is read from its end."""
    events, running = list[Event](), set[str]()
    for stream in streams_of(client, job_id):
        own, runs = last_events(client, stream, count, raw)
        events += own
        running |= runs
    events.sort(key=lambda event: event[0])
    return list(deque(lines_of(events, raw, running), maxlen=count))
