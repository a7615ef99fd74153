"""The stack, and what its policies allow, from deploy to destroy.

The emulator judges each request of a user and of a role by their policies, and records it.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from access import ACCOUNT, Access, document_of, policies_of, role_of, trusts
from cfnlint import decode
from emulator import Emulator, client
from launching import ENDLESS, sets, until
from moto.iam.models import iam_backends
from policies import allowed, statements

from sm_nanogpt.launcher.sagemaker import deploy

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "infra/README.md"
PART_BYTES = 5 << 20  # the smallest that S3 takes


@pytest.fixture
def account(aws, stacks, monkeypatch):
    """An account without a stack, whose administrator has set neither store nor role."""
    for name in ("STORE", "ROLE"):
        monkeypatch.delenv(f"SM_NANOGPT_{name}")
    return aws


# -- least privilege -------------------------------------------------------------------------------

Record = tuple[str, Access]  # a command, and what it was allowed


def as_launcher(account: Emulator, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, who types has the launcher policy and no other."""
    iam = client("iam", account.url)
    iam.create_user(UserName="launcher")
    iam.attach_user_policy(UserName="launcher", PolicyArn=policy)
    keys = iam.create_access_key(UserName="launcher")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])


@pytest.mark.usefixtures("containers")
def test_the_policies_allow_only_what_the_commands_need(
    account, cli, home, short_text_file, tmp_path, monkeypatch
):
    records: list[Record] = []

    def command(*arguments: str, code: int = 0) -> str:
        n_earlier = len(account.accesses)
        for cache in ("prices.json", "stacks.json"):  # each as on its first day
            (home / cache).unlink(missing_ok=True)
        ran = cli(*arguments)
        assert ran.code == code, ran.err
        name = arguments[0]
        if name == "infra":
            name += f" {arguments[1]}"
        if "--resume" in arguments:
            name += " --resume"
        for access in account.accesses[n_earlier:]:
            if not of_a_job(access):
                records.append((name, access))
        return ran.out.strip()

    def deletes_a_checkpoint() -> bool:
        deletions = [a for a in account.accesses if a.action == "s3:DeleteObject"]
        return any(map(of_a_job, deletions))

    command("infra", "deploy", "--kms", "--yes")
    stack = json.loads(cli("infra", "show", "--json").out)
    as_launcher(account, stack["policy"], monkeypatch)
    bucket, key = stack["store"].split("/")[2], stack["kms_key"]

    monkeypatch.setattr("sm_nanogpt.launcher.files.s3.PART_BYTES", PART_BYTES)
    account.refuse["UploadPart"] = ("InvalidRequest", "broken off")
    large = tmp_path / "large.txt"  # which is sent in parts
    n_copies = 1 + 2 * PART_BYTES // short_text_file.stat().st_size
    large.write_text(short_text_file.read_text() * n_copies)
    command("upload-data", str(large), code=1)
    account.refuse.clear()
    command("upload-data", str(short_text_file))
    command("doctor", "--no-train", "--instance", "ml.g5.12xlarge")
    # An instance without a disk of its own, so that the key encrypts a volume.
    arguments = ("launch", "--max-run", "7200", "--detach", "--instance")
    values = {**ENDLESS, "batch_size": 8, "checkpoint_seconds": 1}
    stopped = command(*arguments, "ml.p3.8xlarge", "--pytorch-version", "2.8.0", *sets(**values))
    until(deletes_a_checkpoint)
    command("status", stopped)
    command("logs", stopped)
    command("stop", stopped)
    step = json.loads(cli("status", stopped, "--json").out)["checkpoint_step"]
    # An image from the other repository.
    newer = ("ml.g5.12xlarge", "--pytorch-version", "2.13.0", "--launcher", "torchrun")
    options = ("--name", "longer", "--set", f"max_steps={step + 20}")
    longer = command(*arguments, *newer, "--resume", stopped, *options)
    command("logs", longer, "--follow")
    command("wait", "longer")
    command("jobs")
    sampled = command("fetch-and-sample", longer, "--prompt", "The", "--max-new-tokens", "20")
    assert sampled.startswith("The")
    command("metrics", longer)
    command("report", longer, "-o", str(tmp_path / "report.html"))
    command("delete", longer, "--yes")
    uploads = json.loads(command("data", "--json"))
    (name,) = [upload["name"] for upload in uploads if upload["jobs"] == [stopped]]
    command("delete", name, "--yes")
    command("infra", "show")

    (role,) = policies_of(role_of(stack["role"]))
    launcher = document_of(iam_backends[ACCOUNT]["aws"].get_policy(stack["policy"]))
    documents = {"LauncherPolicy": json.loads(launcher), "Role": role}
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    command("infra", "destroy", "--yes")
    for access in account.accesses:
        if ":assumed-role/" in access.principal:
            records.append(("a job", access))

    calls = [judged(record, documents) for record in records]
    check_current(calls_table(calls, {bucket: "BUCKET", key: "KEY", stack["role"]: "ROLE"}))
    for policy, document in documents.items():
        accesses = distinct(call.access for call in calls if call.policy == policy)
        assert unneeded_actions(document, accesses) == [], policy
        for access in accesses:
            for other in elsewhere(access):
                assert not is_allowed(document, other), other


def of_a_job(access: Access) -> bool:
    """Whether a role asked for it, and so a job; SageMaker itself takes the role beforehand."""
    return ":assumed-role/" in access.principal or access.principal == "sagemaker.amazonaws.com"


@dataclass(frozen=True)
class Call:
    """Who accesses what, and the statement of a policy that allows it; '' for an administrator."""

    who: str
    access: Access
    policy: str = ""
    statement: str = ""


def judged(record: Record, documents: dict[str, dict[str, Any]]) -> Call:
    """A recorded access with the statement that allows it."""
    command, access = record
    if access.principal.endswith(":root"):
        return Call(f"`{command}`", access)
    policy = "Role" if of_a_job(access) else "LauncherPolicy"
    for statement in statements(documents[policy]):
        if is_allowed({**documents[policy], "Statement": [statement]}, access):
            who = command if of_a_job(access) else f"`{command}`"
            return Call(who, access, policy, statement["Sid"])
    raise AssertionError(f"{command}: {access} is allowed by no statement of {policy}")


def distinct(accesses: Iterable[Access]) -> list[Access]:
    """Each access once, whoever asked for it."""
    return list({repr(access.by("")): access for access in accesses}.values())


def is_allowed(document: dict[str, Any], access: Access) -> bool:
    return allowed([document], access.action, access.resource, access.context)


def unneeded_actions(document: dict[str, Any], accesses: list[Access]) -> list[str]:
    """The actions of a policy without which it allows all these accesses."""
    unneeded = []
    for index, statement in enumerate(statements(document)):
        actions = statement["Action"]
        if isinstance(actions, str):
            actions = [actions]
        for action in actions:
            others = [other for other in actions if other != action]
            smaller = copy.deepcopy(document)
            smaller["Statement"][index]["Action"] = others or ["none:None"]
            if all(is_allowed(smaller, access) for access in accesses):
                unneeded.append(f"{statement['Sid']}: {action}")
    return unneeded


def elsewhere(access: Access) -> Iterator[Access]:
    """The same action where nobody gave leave: on another thing, or under another condition."""
    moved = []
    for pattern, replacement in (
        (r"^arn:aws:s3:::[^/]+", "arn:aws:s3:::another-bucket"),
        (r"^(arn:aws:s3:::[^/]+)/nanogpt/", r"\1/other/"),
        (r"training-job/sm-nanogpt-", "training-job/somebody-elses-"),
        (r"log-stream:sm-nanogpt-", "log-stream:somebody-elses-"),
        (r"log-group:/aws/sagemaker/TrainingJobs", "log-group:another"),
        (r":stack/sm-nanogpt/", ":stack/another/"),
        (r":role/.*", ":role/administrator"),
        (r":repository/.*", ":repository/another"),
        (r"^(arn:aws:kms:.*):key/.*", r"\1:key/another"),
    ):
        resource = re.sub(pattern, replacement, access.resource)
        if resource != access.resource:
            moved.append(Access(access.action, resource, access.context))
    assert moved or access.resource == "*", access
    yield from moved
    changed = {
        "s3:prefix": "other/",
        "iam:PassedToService": "ec2.amazonaws.com",
        "kms:GrantIsForAWSResource": "false",
        "cloudwatch:namespace": "another",
    }
    for key in access.context:
        if key in changed:
            yield Access(access.action, access.resource, {key: changed[key]})
            yield Access(access.action, access.resource, {})


def test_the_bucket_is_private_and_expires_checkpoints_alone():
    """By the template, since moto leaves such properties out."""
    resources = decode.decode(str(deploy.TEMPLATE))[0]["Resources"]
    bucket = resources["Bucket"]["Properties"]
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4
    assert bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    uploads, checkpoints = bucket["LifecycleConfiguration"]["Rules"]
    assert uploads["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert checkpoints["Prefix"] == "nanogpt/checkpoints/"
    assert checkpoints["ExpirationInDays"] == 90
    curve = 20_000 * 200  # rows of a long run, and the bytes of one
    assert int(checkpoints["ObjectSizeGreaterThan"]) > curve
    (deny,) = resources["BucketPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert deny["Effect"] == "Deny"
    assert deny["Principal"] == "*"
    assert deny["Action"] == "s3:*"
    assert deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert resources["Bucket"]["DeletionPolicy"] == resources["Key"]["DeletionPolicy"] == "Retain"


def test_the_role_serves_only_our_sagemaker_jobs(account, cli):
    assert cli("infra", "deploy", "--yes").good
    role = role_of(json.loads(cli("infra", "show", "--json").out)["role"])
    job = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/sm-nanogpt-1"
    for service, origin, may in (
        ("sagemaker.amazonaws.com", (ACCOUNT, job), True),
        ("lambda.amazonaws.com", (ACCOUNT, job), False),
        ("sagemaker.amazonaws.com", ("210987654321", job), False),
        ("sagemaker.amazonaws.com", (ACCOUNT, job.replace(ACCOUNT, "210987654321")), False),
        ("sagemaker.amazonaws.com", (ACCOUNT, job.replace("sm-nanogpt", "other")), False),
        ("sagemaker.amazonaws.com", (ACCOUNT, job.replace("training", "processing")), False),
    ):
        context = dict(zip(("aws:SourceAccount", "aws:SourceArn"), origin, strict=True))
        assert trusts(role, service, context) == may, (service, origin)


# -- the table of calls ----------------------------------------------------------------------------


def calls_table(calls: list[Call], names: dict[str, str]) -> str:
    """Markdown: who calls what on which resource, and the statement that allows it."""
    actions = defaultdict[tuple[str, str, str], set[str]](set)
    for call in calls:
        by = f"{call.policy}: {call.statement}" if call.policy else "an administrator"
        resource = without_ids(call.access.resource, names)
        actions[call.who, by, resource].add(call.access.action)
    lines = ["| who | calls | on | allowed by |", "|---|---|---|---|"]
    for who, by, resource in sorted(actions):
        names_of_actions = [f"`{action}`" for action in sorted(actions[who, by, resource])]
        lines.append(f"| {who} | {', '.join(names_of_actions)} | `{resource}` | {by} |")
    return "\n".join([*lines, ""])


def without_ids(resource: str, names: dict[str, str]) -> str:
    """An ARN without what differs from one run to the next."""
    for text, name in names.items():
        resource = resource.replace(text, name)
    for pattern, name in (
        (r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}", "JOB-ID"),
        (r"/(data|checkpoints)/.*", r"/\1/*"),
        (r"(algo-\d)-\d+", r"\1-*"),
        (r"stack/sm-nanogpt/[0-9a-f-]+$", "stack/sm-nanogpt/*"),
        (rf":us-east-1:{ACCOUNT}:", ":REGION:ACCOUNT:"),
        (r":us-east-1:\d{12}:", ":REGION:AWS:"),
        (rf"::{ACCOUNT}:", "::ACCOUNT:"),
        (r"^arn:aws:s3:::", "s3://"),
    ):
        resource = re.sub(pattern, name, resource)
    return resource


def check_current(table: str) -> None:
    """Holds the table against infra/README.md; UPDATE_CALLS=1 writes it there."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split("<!-- calls -->\n")
    _, after = rest.split("<!-- end of calls -->\n")
    new_text = f"{before}<!-- calls -->\n{table}<!-- end of calls -->\n{after}"
    if os.environ.get("UPDATE_CALLS"):
        README.write_text(new_text, encoding="utf-8")
    assert README.read_text(encoding="utf-8") == new_text, (
        "infra/README.md tells of other calls; UPDATE_CALLS=1 .venv/bin/pytest"
        " tests/e2e/test_account.py writes it anew"
    )
