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


def new_events(client: Any, job_id: str, seen: dict[str, str]) -> Iterator[Event]:
    """Yield each event since `seen`, which is updated. client is one of CloudWatch Logs."""
    try:
        with service_errors("DescribeLogStreams"):
            pages = client.get_paginator("describe_log_streams").paginate(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job_id}/"
            )
            streams = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
    except Missing:  # the account has no logs yet
        return
    for stream in streams:
        while True:
            token = {"nextToken": seen[stream]} if stream in seen else {}
            with service_errors("GetLogEvents"):
                page = client.get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **token
                )
                events, following = page["events"], page["nextForwardToken"]
            for event in events:
                message = event["message"].rstrip("\n")
                yield event["timestamp"], stream.removeprefix(f"{job_id}/"), message
            # At its end, a stream returns the token of the request.
            finished = seen.get(stream) == following
            seen[stream] = following
            if finished:
                break
