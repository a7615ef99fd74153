"""Check a job against the account's quotas. Called by the SageMaker backend and `doctor`.

Each instance type has a quota for training jobs, one for spot training jobs and one for warm pools;
others limit the hosts and the run time of a job. Service Quotas reads a quota by its code, which
HOME/quota-codes.json keeps, since finding it by name takes a list of more than a thousand. A type
that the list lacks is looked up once a day.
"""

from __future__ import annotations

import logging
from datetime import date
from typing import Any

from launcher.aws import quick_client, service_errors
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.documents import Document
from launcher.job import TrainingJob
from launcher.machines import looks_like_gpu
from launcher.settings import Settings

logger = logging.getLogger(__name__)

TRAINING = "training job usage"
SPOT = "spot training job usage"
WARM_POOL = "training warm pool usage"
PER_JOB = "Maximum number of instances per training job"  # 20 by default
PER_SPOT_JOB = "Maximum number of instances per spot training job"
LONGEST_RUN = "Longest run time for a training job"  # in seconds; 432,000 by default
DAY = 86_400  # the run time that SageMaker gives a job that asks for none
NO_QUOTA = "ListServiceQuotas: the account has no quota of that name"
CONSOLE = "the Service Quotas console (Amazon SageMaker)"
WITHOUT_GPU = "`launch --instance ml.m5.xlarge --preset quick` needs no GPU"  # for new accounts


def check_quotas(job: TrainingJob, settings: Settings, session: Any) -> None:
    """Check the quotas for a job. Logs a quota that cannot be read, and leaves it to SageMaker.

    Raises:
        InputError: a quota is smaller than the job needs.
    """
    uses = [SPOT if job.spot else TRAINING] + ([WARM_POOL] if job.keep_alive else [])
    instead = "use another --instance"
    # SageMaker refuses a job if the quota of any of its types is too small.
    needs = {
        f"{instance} for {use}": (job.instance_count, instead)
        for instance in job.instances
        for use in uses
    }
    if job.instance_count > 1:
        limit = PER_SPOT_JOB if job.spot else PER_JOB
        needs[limit] = (job.instance_count, "use a smaller --instance-count")
    if job.time_limit > DAY:
        needs[LONGEST_RUN] = (job.time_limit, "use a smaller --max-run")
    for name, (need, instead) in needs.items():
        try:
            allowed = read_quota(name, settings, session)
        except ServiceError as error:
            logger.info(f"quota: could not check {name!r}: {error}")
            if str(error) == NO_QUOTA:
                continue
            return
        if allowed < need:
            on_spot = len(job.instances) == 1 and name.endswith(f" for {TRAINING}")
            other = f"; spot jobs have another quota ({SPOT!r}): try --spot" if on_spot else ""
            other += f"; {WITHOUT_GPU}" if allowed < 1 and looks_like_gpu(job.instance) else ""
            raise InputError(
                f"the account's quota {name!r} is {allowed:.0f} in {session.region_name}, and this"
                f" job needs {need}: request an increase in {CONSOLE}, or {instead}{other}"
            )


def read_quota(name: str, settings: Settings, session: Any) -> float:
    """The applied value of a quota of SageMaker.

    Raises:
        ServiceError: it cannot be read, or the account has none of that name.
    """
    with service_errors("ListServiceQuotas"):
        client = quick_client(session, "service-quotas", session.region_name, attempts=2)
    file = settings.home / "quota-codes.json"
    known = storage.read_cache(file, dict[str, Listed])
    kept = known.get(session.region_name)
    if kept and name in kept.codes:
        with service_errors("GetServiceQuota"):
            answer = client.get_service_quota(ServiceCode="sagemaker", QuotaCode=kept.codes[name])
            quota = answer["Quota"]
            if quota["QuotaName"] == name:
                return float(quota["Value"])
    elif kept and kept.day == date.today():
        raise ServiceError(NO_QUOTA)
    with service_errors("ListServiceQuotas"):
        pages = client.get_paginator("list_service_quotas").paginate(
            ServiceCode="sagemaker", PaginationConfig={"PageSize": 100}
        )
        values = {quota["QuotaName"]: quota for page in pages for quota in page["Quotas"]}
    codes = {known: quota["QuotaCode"] for known, quota in values.items() if "training" in known}
    known[session.region_name] = Listed(day=date.today(), codes=codes)
    storage.write_cache(file, known)
    if name not in values:
        raise ServiceError(NO_QUOTA)
    return float(values[name]["Value"])


class Listed(Document):
    """The codes of a region's quotas, by name, as they were listed on a day."""

    day: date
    codes: dict[str, str]
