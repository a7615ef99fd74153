"""Who asks, and for what, in the words of IAM policies; and what AWS says when it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, unquote

from policies import allowed

# moto is imported where it is used: tests that need no server import this module too.
ACCOUNT = "123456789012"
SAGEMAKER = "SAGEMAKER"  # with this key the service itself asks for a role's credentials


class Refusal(Exception):
    """An error code of AWS, its message, and the HTTP status that goes with it."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Principal:
    """Who signed a request. policies is None for the account's owner, who may do everything."""

    arn: str
    policies: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Access:
    """An action on a resource, as a policy sees it."""

    action: str
    resource: str
    context: Mapping[str, str | list[str]] = field(default_factory=dict)
    principal: str = ""

    def by(self, principal: str) -> Access:
        return replace(self, principal=principal)


def principal_of(key: str, service: str) -> Principal:
    """Raises Refusal for keys that AWS would not accept."""
    if key == "EXPIRED":
        code = "ExpiredToken" if service in ("s3", "sts", "iam") else "ExpiredTokenException"
        raise Refusal(code, "The security token included in the request is expired")
    if key == "WRONG" and service == "s3":
        raise Refusal(
            "InvalidAccessKeyId",
            "The AWS Access Key Id you provided does not exist in our records.",
            403,
        )
    if key == "WRONG":
        raise Refusal(
            "InvalidClientTokenId" if service in ("sts", "iam") else "UnrecognizedClientException",
            "The security token included in the request is invalid.",
        )
    if key == SAGEMAKER:
        return Principal("sagemaker.amazonaws.com", None)
    from moto.iam.models import iam_backends
    from moto.sts.models import sts_backends

    iam, sts = iam_backends[ACCOUNT]["aws"], sts_backends[ACCOUNT]["aws"]
    if assumed := sts.get_assumed_role_from_access_key(key):
        role = iam.get_role(assumed.role_arn.rpartition("/")[2])
        return Principal(assumed.arn, policies_of(role))
    if user := iam.get_user_from_access_key_id(key):
        return Principal(user.arn, policies_of(user))
    return Principal(f"arn:aws:iam::{ACCOUNT}:root", None)


def policies_of(owner: Any) -> list[dict[str, Any]]:
    """The documents of a user or a role of moto."""
    # Attached to a user, an inline policy is text; to a role, text too.
    inline = owner.policies.values()
    attached = (document_of(policy) for policy in owner.managed_policies.values())
    return [
        json.loads(document) if isinstance(document, str) else document
        for document in (*inline, *attached)
    ]


def document_of(policy: Any) -> Any:
    """A managed policy of moto as it now is."""
    return next(version.document for version in policy.versions if version.is_default)


def role_of(arn: str) -> Any:
    """The role of moto with this ARN, or None."""
    from moto.iam.exceptions import NotFoundException
    from moto.iam.models import iam_backends

    try:
        role = iam_backends[ACCOUNT]["aws"].get_role(arn.rpartition("/")[2])
    except NotFoundException:
        return None
    return role if role.arn == arn else None


def trusts(role: Any, service: str, context: Mapping[str, str | list[str]]) -> bool:
    """Whether a role lets a service act as it."""
    document = json.loads(role.assume_role_policy_document)
    found = document["Statement"]
    spoken = [
        {**{k: v for k, v in statement.items() if k != "Principal"}, "Resource": "*"}
        for statement in ([found] if isinstance(found, dict) else found)
        if service in str(statement["Principal"].get("Service"))
    ]
    return allowed([{**document, "Statement": spoken}], "sts:AssumeRole", "*", context)


def accesses(
    service: str, region: str, operation: str, environ: Mapping[str, Any], body: Mapping[str, Any]
) -> list[Access]:
    """What a policy has to allow for a request to be answered."""
    if service == "s3":
        return [
            a for access in s3_accesses(environ) for a in (access, *key_accesses(access, environ))
        ]
    return list(api_accesses(service, region, operation, body))


def key_accesses(access: Access, environ: Mapping[str, Any]) -> Iterator[Access]:
    """What S3 does with a KMS key, as the one who asks, for an object that the key encrypts."""
    bucket = access.resource.removeprefix("arn:aws:s3:::").partition("/")[0]
    key = environ.get("HTTP_X_AMZ_SERVER_SIDE_ENCRYPTION_AWS_KMS_KEY_ID") or bucket_key(bucket)
    if key is None:
        return
    in_parts = "partNumber" in environ.get("QUERY_STRING", "")
    if access.action == "s3:PutObject":
        yield Access("kms:GenerateDataKey", key)
    if (access.action == "s3:GetObject" and environ["REQUEST_METHOD"] != "HEAD") or in_parts:
        yield Access("kms:Decrypt", key)


def bucket_key(bucket: str) -> str | None:
    """The ARN of the key that encrypts a bucket by default."""
    from moto.s3.models import s3_backends

    found = s3_backends[ACCOUNT]["aws"].buckets.get(bucket)
    rule = ((found and found.encryption) or {}).get("Rule", {})
    rule = rule[0] if isinstance(rule, list) else rule
    return rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID") or None


def s3_accesses(environ: Mapping[str, Any]) -> Iterator[Access]:
    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    method = environ["REQUEST_METHOD"]
    if not bucket:
        yield Access("s3:ListAllMyBuckets", "*")
    elif not key:
        arn = f"arn:aws:s3:::{bucket}"
        prefix = {"s3:prefix": query["prefix"][0]} if "prefix" in query else {}
        if method == "GET" and "location" in query:
            yield Access("s3:GetBucketLocation", arn)
        elif method == "GET" and "uploads" in query:
            yield Access("s3:ListBucketMultipartUploads", arn, prefix)
        elif method in ("GET", "HEAD"):
            yield Access("s3:ListBucket", arn, prefix)
        elif method == "POST" and "delete" in query:
            yield Access("s3:DeleteObject", f"{arn}/*")
        else:
            yield Access("s3:CreateBucket" if method == "PUT" else "s3:DeleteBucket", arn)
    else:
        arn = f"arn:aws:s3:::{bucket}/{key}"
        if method in ("GET", "HEAD"):
            yield Access(
                "s3:ListMultipartUploadParts" if "uploadId" in query else "s3:GetObject", arn
            )
        elif method == "DELETE":
            yield Access(
                "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject", arn
            )
        else:
            encryption = environ.get("HTTP_X_AMZ_SERVER_SIDE_ENCRYPTION")
            context = {"s3:x-amz-server-side-encryption": encryption} if encryption else {}
            yield Access("s3:PutObject", arn, context)
            if source := environ.get("HTTP_X_AMZ_COPY_SOURCE"):
                yield Access("s3:GetObject", f"arn:aws:s3:::{unquote(source).lstrip('/')}")


def api_accesses(
    service: str, region: str, operation: str, body: Mapping[str, Any]
) -> Iterator[Access]:
    prefix = f"{region}:{ACCOUNT}"
    action = f"{service}:{operation}"
    if service == "sagemaker" and "TrainingJobName" in body:
        arn = f"arn:aws:sagemaker:{prefix}:training-job/{body['TrainingJobName']}"
        yield Access(action, arn)
        if operation == "CreateTrainingJob":
            if body.get("Tags"):
                yield Access("sagemaker:AddTags", arn)
            passed = {"iam:PassedToService": "sagemaker.amazonaws.com"}
            yield Access("iam:PassRole", body["RoleArn"], passed)
    elif service == "logs" and "logGroupName" in body:
        arn = f"arn:aws:logs:{prefix}:log-group:{body['logGroupName']}"
        stream = body.get("logStreamName")
        yield Access(action, f"{arn}:log-stream:{stream}" if stream else f"{arn}:*")
    elif service == "cloudformation" and "StackName" in body:
        name = body["StackName"]
        arn = f"arn:aws:cloudformation:{prefix}:stack/{name}/*"
        yield Access(action, name if name.startswith("arn:") else arn)
    elif service == "iam" and "PolicySourceArn" in body:
        yield Access(action, body["PolicySourceArn"])
    elif service == "iam" and "RoleName" in body:
        yield Access(action, f"arn:aws:iam::{ACCOUNT}:role/{body['RoleName']}")
    elif service != "sts" or operation != "GetCallerIdentity":  # which nobody can be denied
        yield Access(action, "*")
