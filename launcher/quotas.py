"""How many instances of a type the account may use at once, by Service Quotas.

Each type has a quota for training jobs, one for spot training jobs and one for warm pools. A quota
is read by its code, which has to be looked up by name once, in a list of more than a thousand; the
codes are kept in HOME/quota-codes.json. A type that the list lacks is looked up once a day.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from launcher import storage
from launcher.aws import quick_client, service_errors
from launcher.errors import InputError, ServiceError
from launcher.job import TrainingJob
from launcher.settings import Settings, Tell

TRAINING = "training job usage"
SPOT = "spot training job usage"
WARM_POOL = "training warm pool usage"
NO_QUOTA = "ListServiceQuotas: the account has no quota of that name"
CONSOLE = "the Service Quotas console (Amazon SageMaker)"


def check_quotas(job: TrainingJob, settings: Settings, session: Any, tell: Tell) -> None:
    """Tells if a quota cannot be read; SageMaker refuses then what it has to.

    Raises:
        InputError: the account may not use as many instances as the job needs.
    """
    uses = [SPOT if job.spot else TRAINING] + ([WARM_POOL] if job.keep_alive else [])
    for use in uses:
        name = f"{job.instance} for {use}"
        try:
            allowed = read_quota(name, settings, session)
        except ServiceError as error:
            tell(f"quota: {name!r} is not checked: {error}")
            return
        if allowed < job.instance_count:
            other = f"; {SPOT!r} is another quota" if use == TRAINING else ""
            raise InputError(
                f"the account's quota {name!r} is {allowed:g} in {session.region_name}, and this"
                f" job needs {job.instance_count}: ask for more in {CONSOLE}, or take another"
                f" --instance{other}"
            )


def read_quota(name: str, settings: Settings, session: Any) -> float:
    """The applied value of a quota of SageMaker.

    Raises:
        ServiceError: it cannot be read, or the account has none of that name.
    """
    with service_errors("ListServiceQuotas"):
        client = quick_client(session, "service-quotas", session.region_name, attempts=2)
    file = settings.home / "quota-codes.json"
    kept = Listed.kept(file, session.region_name)
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
    listed = Listed(day=date.today(), codes=codes)
    storage.write_cache(file, session.region_name, listed.model_dump(mode="json"))
    if name not in values:
        raise ServiceError(NO_QUOTA)
    return float(values[name]["Value"])


class Listed(BaseModel):
    """The codes of a region's quotas, by name, as they were listed on a day."""

    day: date
    codes: dict[str, str]

    @classmethod
    def kept(cls, file: Path, region: str) -> Listed | None:
        try:
            return cls.model_validate(storage.read_cache(file).get(region))
        except ValidationError:
            return None
