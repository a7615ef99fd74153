"""The judge of policies itself: each rule of IAM's that ours or a test's policy may use.

The expected answers of CASES are those of https://github.com/cloud-copilot/iam-simulate too.
"""

from __future__ import annotations

from typing import Any

import pytest
from policies import allowed

OBJECT = "arn:aws:s3:::bucket/nanogpt/data/a.txt"
BUCKET = "arn:aws:s3:::bucket"
ROLE = "arn:aws:iam::123456789012:role/training"
JOB = "arn:aws:sagemaker:us-east-1:123456789012:training-job/sm-nanogpt-1"


def allow(action: Any = "*", resource: Any = "*", **rest: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **rest}


def deny(action: Any = "*", resource: Any = "*", **rest: Any) -> dict[str, Any]:
    return {**allow(action, resource, **rest), "Effect": "Deny"}


def when(operator: str, key: str, *values: str, action: Any = "*") -> dict[str, Any]:
    """An allowing statement with one condition."""
    return allow(action, Condition={operator: {key: list(values)}})


GET = ("s3:GetObject", OBJECT)
LIST = ("s3:ListBucket", BUCKET)
PASS = ("iam:PassRole", ROLE)
ADD_TAGS = ("sagemaker:AddTags", JOB)
PASSED = {"iam:PassedToService": "sagemaker.amazonaws.com"}
PREFIX = {"s3:prefix": "nanogpt/data"}
SOURCE = {"aws:SourceArn": JOB}
TAGS = {"aws:TagKeys": ["team", "sm-nanogpt"]}

CASES: dict[str, tuple[list[dict[str, Any]], tuple[str, str], dict[str, Any], bool]] = {
    # what is asked for, on what
    "nothing allows by itself": ([], GET, {}, False),
    "the action by its name": ([allow("s3:GetObject")], GET, {}, True),
    "the action in any case": ([allow("S3:getobject")], GET, {}, True),
    "another action": ([allow("s3:PutObject")], GET, {}, False),
    "no part of an action": ([allow("s3:Get")], GET, {}, False),
    "wildcards in the action": ([allow("s3:G?tO*")], GET, {}, True),
    "one of several actions": ([allow(["s3:PutObject", "s3:GetObject"])], GET, {}, True),
    "the resource by its name": ([allow("*", OBJECT)], GET, {}, True),
    "no part of a resource": ([allow("*", BUCKET)], GET, {}, False),
    "a prefix of the bucket": ([allow("*", f"{BUCKET}/nanogpt/*")], GET, {}, True),
    "another prefix": ([allow("*", f"{BUCKET}/other/*")], GET, {}, False),
    "a prefix that only begins alike": ([allow("*", f"{BUCKET}/nano/*")], GET, {}, False),
    "a ? is one letter": ([allow("*", f"{BUCKET}/nanogpt/data/?.txt")], GET, {}, True),
    "a wildcard inside one part": (
        [allow("*", "arn:aws:sagemaker:*:123456789012:training-job/sm-nanogpt-*")],
        ("sagemaker:StopTrainingJob", JOB),
        {},
        True,
    ),
    "an ARN that ends early goes on with wildcards": (
        [allow("*", "arn:aws:sagemaker:*:*")],
        ADD_TAGS,
        {},
        True,
    ),
    "a dot is a dot": ([allow("*", f"{BUCKET}/nanogpt/data/a.tx.")], GET, {}, False),
    "all but another action": (
        [{"Effect": "Allow", "NotAction": "s3:Put*", "Resource": "*"}],
        GET,
        {},
        True,
    ),
    "all but this action": (
        [{"Effect": "Allow", "NotAction": "s3:Get*", "Resource": "*"}],
        GET,
        {},
        False,
    ),
    "all but this resource": (
        [{"Effect": "Allow", "Action": "*", "NotResource": f"{BUCKET}/*"}],
        GET,
        {},
        False,
    ),
    "all but another resource": (
        [{"Effect": "Allow", "Action": "*", "NotResource": f"{BUCKET}/other/*"}],
        GET,
        {},
        True,
    ),
    # deny
    "a deny wins": ([allow(), deny("s3:GetObject")], GET, {}, False),
    "a deny of something else": ([allow(), deny("s3:PutObject")], GET, {}, True),
    "a deny whose condition fails": (
        [allow(), deny(Condition={"Bool": {"aws:SecureTransport": "false"}})],
        GET,
        {"aws:SecureTransport": "true"},
        True,
    ),
    "a deny whose condition holds": (
        [allow(), deny(Condition={"Bool": {"aws:SecureTransport": "false"}})],
        GET,
        {"aws:SecureTransport": "false"},
        False,
    ),
    # conditions
    "equal": ([when("StringEquals", "iam:PassedToService", *PASSED.values())], PASS, PASSED, True),
    "the key in any case": (
        [when("StringEquals", "IAM:passedtoservice", *PASSED.values())],
        PASS,
        PASSED,
        True,
    ),
    "not equal": (
        [when("StringEquals", "iam:PassedToService", "ec2.amazonaws.com")],
        PASS,
        PASSED,
        False,
    ),
    "equal to one of several": (
        [when("StringEquals", "s3:prefix", "x", "nanogpt/data")],
        LIST,
        PREFIX,
        True,
    ),
    "no wildcard in StringEquals": ([when("StringEquals", "s3:prefix", "*")], LIST, PREFIX, False),
    "alike": ([when("StringLike", "s3:prefix", "nanogpt/*")], LIST, PREFIX, True),
    "alike, but not in that case": (
        [when("StringLike", "s3:prefix", "NANOGPT/*")],
        LIST,
        PREFIX,
        False,
    ),
    "not alike": ([when("StringLike", "s3:prefix", "other/*")], LIST, PREFIX, False),
    "a key that the request lacks": ([when("StringLike", "s3:prefix", "*")], LIST, {}, False),
    "a negated key that the request lacks": (
        [when("StringNotEquals", "s3:prefix", "x")],
        LIST,
        {},
        True,
    ),
    "negated, other than all of them": (
        [when("StringNotEquals", "s3:prefix", "x", "y")],
        LIST,
        PREFIX,
        True,
    ),
    "negated, but one of them": (
        [when("StringNotEquals", "s3:prefix", "x", "nanogpt/data")],
        LIST,
        PREFIX,
        False,
    ),
    "not alike, negated": ([when("StringNotLike", "s3:prefix", "other/*")], LIST, PREFIX, True),
    "if it is there, and it is": (
        [when("StringEqualsIfExists", "s3:prefix", "x")],
        LIST,
        PREFIX,
        False,
    ),
    "if it is there, and it is not": (
        [when("StringEqualsIfExists", "s3:prefix", "x")],
        LIST,
        {},
        True,
    ),
    "an ARN alike": (
        [when("ArnLike", "aws:SourceArn", "arn:*:sagemaker:*:123456789012:training-job/*")],
        GET,
        SOURCE,
        True,
    ),
    "an ARN of another account": (
        [when("ArnLike", "aws:SourceArn", "arn:*:sagemaker:*:210987654321:*")],
        GET,
        SOURCE,
        False,
    ),
    "wildcards in ArnEquals too": (
        [when("ArnEquals", "aws:SourceArn", "arn:aws:sagemaker:*:*:training-job/*")],
        GET,
        SOURCE,
        True,
    ),
    "an ARN unlike": (
        [when("ArnNotLike", "aws:SourceArn", "arn:aws:sagemaker:*:*:model/*")],
        GET,
        SOURCE,
        True,
    ),
    "null, and it is there": ([when("Null", "s3:prefix", "true")], LIST, PREFIX, False),
    "null, and it is not": ([when("Null", "s3:prefix", "true")], LIST, {}, True),
    "not null, and it is there": ([when("Null", "s3:prefix", "false")], LIST, PREFIX, True),
    "two operators, both": (
        [allow(Condition={"Null": {"s3:prefix": "false"}, "StringLike": {"s3:prefix": "nano*"}})],
        LIST,
        PREFIX,
        True,
    ),
    "two keys, one of them wrong": (
        [allow(Condition={"StringEquals": {"s3:prefix": "nanogpt/data", "s3:delimiter": "/"}})],
        LIST,
        {**PREFIX, "s3:delimiter": "-"},
        False,
    ),
    # keys with several values
    "all values": (
        [when("ForAllValues:StringEquals", "aws:TagKeys", "team", "sm-nanogpt", "more")],
        ADD_TAGS,
        TAGS,
        True,
    ),
    "all values but one": (
        [when("ForAllValues:StringEquals", "aws:TagKeys", "team")],
        ADD_TAGS,
        TAGS,
        False,
    ),
    "all values of none": (
        [when("ForAllValues:StringEquals", "aws:TagKeys", "x")],
        ADD_TAGS,
        {},
        True,
    ),
    "any value": ([when("ForAnyValue:StringLike", "aws:TagKeys", "sm-*")], ADD_TAGS, TAGS, True),
    "any value, but none": (
        [when("ForAnyValue:StringEquals", "aws:TagKeys", "x")],
        ADD_TAGS,
        TAGS,
        False,
    ),
    "any value of none": (
        [when("ForAnyValue:StringEquals", "aws:TagKeys", "x")],
        ADD_TAGS,
        {},
        False,
    ),
    # variables
    "a variable in a resource": (
        [allow("*", f"{BUCKET}/${{aws:PrincipalTag/team}}/*")],
        GET,
        {"aws:PrincipalTag/team": "nanogpt"},
        True,
    ),
    "a variable without a value": (
        [allow("*", f"{BUCKET}/${{aws:PrincipalTag/team}}/*")],
        GET,
        {},
        False,
    ),
    "a variable with a default": (
        [allow("*", f"{BUCKET}/${{aws:PrincipalTag/team, 'nanogpt'}}/*")],
        GET,
        {},
        True,
    ),
    "a variable whose value looks like a wildcard": (
        [allow("*", f"{BUCKET}/${{aws:PrincipalTag/team}}/*")],
        GET,
        {"aws:PrincipalTag/team": "*"},
        False,
    ),
    "a variable in a condition": (
        [when("StringLike", "s3:prefix", "${aws:username}/*")],
        LIST,
        {**PREFIX, "aws:username": "nanogpt"},
        True,
    ),
    "an asterisk that is one": ([when("StringLike", "s3:prefix", "nano${*}")], LIST, PREFIX, False),
    "no variable before the last part of an ARN": (
        [allow("*", "arn:aws:iam::${aws:PrincipalAccount}:role/training")],
        PASS,
        {"aws:PrincipalAccount": "123456789012"},
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_judged_as_iam_judges_it(case):
    statements, (action, resource), context, expected = CASES[case]
    document = {"Version": "2012-10-17", "Statement": statements}
    assert allowed([document], action, resource, context) is expected


def test_each_document_may_allow_and_each_may_deny():
    one = {"Version": "2012-10-17", "Statement": allow("s3:GetObject")}
    other = {"Version": "2012-10-17", "Statement": allow("s3:PutObject")}
    no = {"Version": "2012-10-17", "Statement": [deny("s3:*")]}
    assert allowed([one, other], *GET, {})
    assert not allowed([one, other, no], *GET, {})


@pytest.mark.parametrize(
    "document",
    [
        {"Statement": allow()},
        {"Version": "2012-10-17", "Statement": allow(Principal="*")},
        {"Version": "2012-10-17", "Statement": when("NumericLessThan", "s3:max-keys", "10")},
        {"Version": "2012-10-17", "Statement": when("ForAllValues:Date", "aws:CurrentTime", "x")},
        {"Version": "2012-10-17", "Statement": when("StringEquals", "aws:TagKeys", "team")},
    ],
    ids=["an old version", "a principal", "a number", "a date", "a list without a quantifier"],
)
def test_an_unknown_policy_element_is_refused(document):
    with pytest.raises(NotImplementedError):
        allowed([document], "s3:ListBucket", BUCKET, {"s3:max-keys": "5", **TAGS})
