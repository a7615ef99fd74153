"""The lines of a job in CloudWatch, and the script's among those of the toolkit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from launcher.aws import Missing, service_errors

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
Event = tuple[int, str, str]  # of a log: time in ms, stream (HOST-TIME here), message
# mpirun tags each line with its rank and host; torchrun does not.
TAGGED = re.compile(r"\[\d+,mpirank:\d+,([^\]]+)\]<std(?:out|err)>:(.*)", re.DOTALL)
TOOLKIT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [\w.-]+ +([A-Z]+) ")
START = "Invoking script with the following command:"  # the command is on the next line
# The images since 2.11 preload a library that they fail to make, so each process says so.
NOISE = "ERROR: ld.so: object '/libchangehostname.so' "


def lines_of(lines: Iterable[tuple[str, str]], raw: bool) -> Iterator[str]:
    """Yield the lines of the script, or with raw every line after its host's name."""
    if raw:
        return (f"{stream.rpartition('-')[0]}: {line}" for stream, line in lines)
    return script_lines(lines)


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


def streams_of(client: Any, job_id: str) -> list[str]:
    """The names of a job's streams. client is one of CloudWatch Logs, here and below."""
    try:
        with service_errors("DescribeLogStreams"):
            pages = client.get_paginator("describe_log_streams").paginate(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job_id}/"
            )
            return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
    except Missing:  # the account has no logs yet
        return []


def new_events(client: Any, job_id: str, seen: dict[str, str]) -> Iterator[Event]:
    """Yield each event since `seen`, a token for each stream, which is updated."""
    for stream in streams_of(client, job_id):
        token, name = seen.get(stream), stream.partition("/")[2]
        while True:  # a page may be empty before the last
            given = {"nextToken": token} if token else {}
            with service_errors("GetLogEvents"):
                page = client.get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **given
                )
            for event in page["events"]:
                yield event["timestamp"], name, event["message"].rstrip("\n")
            seen[stream] = page["nextForwardToken"]
            if token == seen[stream]:  # where a stream ends, it returns the token of the request
                break
            token = seen[stream]
