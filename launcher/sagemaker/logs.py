"""Read the lines of a job in CloudWatch, and tell those of the script from the toolkit's."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sm_nanogpt.launcher.aws import Missing

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
# mpirun tags each line with its rank and host; torchrun does not.
MPIRUN_LINE = re.compile(r"\[\d+,mpirank:\d+,([^\]]+)\]<std(?:out|err)>:(.*)", re.DOTALL)
TOOLKIT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [\w.-]+ +([A-Z]+) ")
START_LINE = "Invoking script with the following command:"  # the command is on the next line
# A message of each process: images since 2.11 preload a library that they fail to make.
NOISE_LINE = "ERROR: ld.so: object '/libchangehostname.so' "


class Event(NamedTuple):
    """An entry of a log of CloudWatch."""

    time_ms: int  # since the epoch
    stream: str  # HOST-TIME: each start of a spot job has streams of its own
    message: str


def lines_of(
    events: Iterable[Event], raw: bool = False, running: Collection[str] = ()
) -> Iterator[str]:
    """Yield the lines of the script, and errors of the toolkit; if raw, all lines.

    running: the streams in which the script had started before the first line. Raw lines, and lines
    of hosts other than the first, start with the name of the host.
    """
    filters: dict[str, StreamFilter] = {}
    for _, stream, line in events:
        host = stream.rpartition("-")[0]
        if raw:
            yield f"{host}: {line}"
            continue
        if stream not in filters:
            filters[stream] = StreamFilter(has_started=stream in running)
        tagged = MPIRUN_LINE.match(line)
        if tagged:
            host, line = tagged[1], tagged[2]
        elif not filters[stream].passes(line):
            continue
        if not line.startswith(NOISE_LINE):
            yield line if host == "algo-1" else f"{host}: {line}"


@dataclass
class StreamFilter:
    """Tells the lines of the script in a stream from those that the toolkit prints before them."""

    has_started: bool
    awaits_command: bool = False  # the line of the command is still to come

    def passes(self, line: str) -> bool:
        """True if a line without the tag of mpirun is to be shown."""
        by_toolkit = TOOLKIT_LINE.match(line)
        if by_toolkit:
            return by_toolkit[1] in ("ERROR", "CRITICAL")
        if not self.has_started:  # hundreds of lines of environment
            self.has_started = self.awaits_command = line.startswith(START_LINE)
            return False
        if self.awaits_command:
            self.awaits_command = not line.strip()
            return False
        return True


def streams_of(client: Any, job_id: str) -> list[str]:
    """The names of a job's streams. client is of CloudWatch Logs, here and below."""
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
    """Yield the pages of a stream after a token, each with the token of the next page.

    Without a token, this begins at one end of the stream. The events of a page are in the order of
    time. Also a page before the last one may be empty.
    """
    direction = "nextBackwardToken" if backward else "nextForwardToken"
    name = stream.partition("/")[2]
    while True:
        next_token = {"nextToken": token} if token else {}
        page = client.get_log_events(
            logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=not backward, **next_token
        )
        events = []
        for event in page["events"]:
            events.append(Event(event["timestamp"], name, event["message"].rstrip("\n")))
        yield events, page[direction]
        if page[direction] == token:  # CloudWatch returns the token of the request at the end
            return
        token = page[direction]


def new_events(client: Any, job_id: str, tokens: dict[str, str]) -> list[Event]:
    """Read the events after these tokens, in the order of time. tokens has them by stream.

    The tokens are updated at the end, so that no line is lost if an outage interrupts the call.
    """
    new: list[Event] = []
    new_tokens = {}
    for stream in streams_of(client, job_id):
        for events, token in pages_of(client, stream, tokens.get(stream)):
            new += events
            new_tokens[stream] = token
    tokens |= new_tokens
    return in_order_of_time(new)


def in_order_of_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time_ms)


def last_lines(client: Any, job_id: str, count: int, raw: bool) -> list[str]:
    """Read the last lines of a job, in the order of time. Each stream is read from its end."""
    events: list[Event] = []
    running = set()
    for stream in streams_of(client, job_id):
        stream_events, starts_before = last_events(client, stream, count, raw)
        events += stream_events
        if starts_before:
            running.add(stream.partition("/")[2])
    lines = lines_of(in_order_of_time(events), raw, running)
    return list(deque(lines, maxlen=count))


def last_events(client: Any, stream: str, count: int, raw: bool) -> tuple[list[Event], bool]:
    """Read the last events of a stream: enough for `count` lines, if it has so many.

    Also returns True if the script was started before these events. (Raw lines do not need that.)
    """
    starts_before = not raw and any(has_start(page) for page, _ in pages_of(client, stream))
    name = stream.partition("/")[2]
    events: list[Event] = []
    n_lines = 0
    has_read_start = False
    for page, _ in pages_of(client, stream, backward=True):
        events = page + events
        if starts_before and has_start(page):
            starts_before = False
            has_read_start = True  # what the toolkit wrote before it is short: read all of it
        running = {name} if starts_before else set()
        n_lines += len(list(lines_of(page, raw, running)))
        if n_lines >= count + 2 and not has_read_start:  # two may be the command, after START_LINE
            break
    return events, starts_before


def has_start(events: Iterable[Event]) -> bool:
    """True if the script is started in these events."""
    return any(event.message.startswith(START_LINE) for event in events)
