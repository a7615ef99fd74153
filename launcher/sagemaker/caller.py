"""Find who calls AWS, whom the tags of a job name as its owner, and search for jobs by tags."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sm_nanogpt.launcher.aws import aws_session, make_client, service_errors
from sm_nanogpt.launcher.description import time_of
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files.cache import Cache
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

TAG_KEY, TAG_VALUE = "sm-nanogpt", "job"  # tag of our jobs
OWNER_TAG = f"{TAG_KEY}-owner"
NAME_TAG = f"{TAG_KEY}-name"
SUMMARY_TAG = f"{TAG_KEY}-summary"

# Names that AWS's tools give to sessions. They change with each login: the time, or a task's id.
GENERATED_SESSION = re.compile(r"[A-Za-z-]*-\d{9,}|\d+|[0-9a-f]{32}")
ANY_REGION = "us-east-1"  # every region knows who calls
SSO_ROLE = "AWSReservedSSO_"  # its sessions are named after the person


@dataclass(frozen=True)
class Caller:
    """An account, and the value of the owner's tag for jobs that these credentials launch."""

    account: str
    owner: str


known_callers: dict[str, Caller] = {}  # by access key, which belongs to one caller


def caller_of(session: Any, region: str, patient: bool) -> Caller:
    """Ask AWS who calls, once for each access key. If not patient, this fails within seconds."""
    with service_errors("GetCallerIdentity"):
        credentials = session.get_credentials()
        key = credentials.get_frozen_credentials().access_key if credentials else ""
        if key not in known_callers:
            attempts = None if patient else 1
            client = make_client(session, "sts", region, attempts)
            answer = client.get_caller_identity()
            known_callers[key] = Caller(answer["Account"], owner_of(answer["Arn"]))
        return known_callers[key]


def owner_of_upload(settings: Settings) -> str:
    """The owner of an upload to S3; '' if AWS does not say, as with the keys of another server."""
    session = aws_session(settings)
    try:
        return caller_of(session, session.region_name or ANY_REGION, patient=False).owner
    except (InputError, ServiceError) as error:
        logger.info(f"who uploaded is not recorded: {error}")
        return ""


def owner_of(arn: str) -> str:
    """The value of the owner's tag of a job: `user/NAME`, `ROLE/SESSION`, or `root`.

    It is the role alone, if the name of the session changes with each login. A colon replaces a
    comma: a tag cannot have a comma, and no name has a colon.
    """
    kind, *names = arn.split(":", 5)[5].split("/")
    if kind != "assumed-role":
        return tag_value("/".join([kind, *names[-1:]]))  # a user may have a path
    role, session = names
    if GENERATED_SESSION.fullmatch(session) and not role.startswith(SSO_ROLE):
        return tag_value(role)
    return tag_value(f"{role}/{session}")


def tag_value(text: str) -> str:
    """Make a text the value of a tag, within AWS's limits for characters and length."""
    return re.sub(r"[^\w .:/=+@-]", ":", text)[:256]


def our_tags(owner: str, name: str | None, summary: str) -> list[dict[str, str]]:
    tags = {TAG_KEY: TAG_VALUE, OWNER_TAG: owner, SUMMARY_TAG: tag_value(summary)}
    if name:
        tags[NAME_TAG] = name
    return [{"Key": key, "Value": value} for key, value in tags.items()]


LAST_LAUNCHED = "last-launched.json"


@dataclass(frozen=True)
class LaunchedJob:
    """A job that was launched from here, with the tags that Search returns late."""

    caller: Caller
    region: str
    job_id: str
    name: str | None = None
    summary: str = ""


def launch_cache(settings: Settings) -> Cache[list[LaunchedJob]]:
    return Cache(settings.home / LAST_LAUNCHED, list[LaunchedJob])


def last_launches(settings: Settings) -> list[LaunchedJob]:
    """The last job that each caller launched from here in each region."""
    return launch_cache(settings).read()


def remember_launch(launched: LaunchedJob, settings: Settings) -> None:
    """Record the job that was launched last, if the disk takes it."""
    jobs = []
    for job in last_launches(settings):
        if job.caller != launched.caller or job.region != launched.region:
            jobs.append(job)
    launch_cache(settings).write([*jobs, launched])


def search_jobs(
    client: Any, owner: str | None = None, name: str | None = None, job_id: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield SageMaker's answers about the account's jobs with our tags, the newest first.

    owner, name, job_id: only jobs that have these.
    """
    properties = {
        f"Tags.{TAG_KEY}": TAG_VALUE,
        f"Tags.{OWNER_TAG}": owner,
        f"Tags.{NAME_TAG}": name,
        "TrainingJobName": job_id,
    }
    filters = [
        {"Name": key, "Operator": "Equals", "Value": value}
        for key, value in properties.items()
        if value is not None
    ]
    pages = client.get_paginator("search").paginate(
        Resource="TrainingJob",
        SearchExpression={"Filters": filters},
        SortBy="CreationTime",
        SortOrder="Descending",
    )
    for page in pages:
        for result in page["Results"]:
            yield result["TrainingJob"]


def with_last(
    jobs: Iterable[dict[str, Any]], last_id: str, last: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the jobs of Search, with the job that was launched last inserted by its time.

    Search has a new job only after seconds; `last` yields it, if it exists. If Search has it, the
    jobs of the same second keep their order; otherwise it is the newest of them.
    """
    is_placed = False
    for time, group in groupby(jobs, key=lambda job: time_of(name_of(job))):
        if is_placed or time > time_of(last_id):
            for job in group:
                if name_of(job) != last_id:
                    yield job
            continue
        jobs_of_second = list(group)
        if last_id not in map(name_of, jobs_of_second):
            yield from last
        yield from jobs_of_second
        is_placed = True
    if not is_placed:
        yield from last


def name_of(job: dict[str, Any]) -> str:
    """The id of a job in an answer of SageMaker."""
    name: str = job["TrainingJobName"]
    return name
