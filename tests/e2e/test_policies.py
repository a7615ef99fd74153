"""The judge of policies itself: each rule of IAM's that ours or a test's policy may use.

The expected answers are those of https://github.com/cloud-copilot/iam-simulate too.
"""

from __future__ import annotations

from typing import Any

import pytest
from policies import allowed

OBJECT = "arn:aws:s3:::bucket/nanogpt/data/a.txt"
BUCKET = "arn:aws:s3:::bucket"
ROLE = "arn:aws:iam::123456789012:role/training"
JOB = "arn:aws:sagemaker:us-east-1:123456789012:training-job/sm-nanogpt-1"
OUR_JOBS = "arn:aws:sagemaker:*:123456789012:training-job/sm-nanogpt-*"

Statement = dict[str, Any]


def allow(action: Any = "*", resource: Any = "*", **elements: Any) -> Statement:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **elements}


def deny(action: Any = "*", resource: Any = "*", **elements: Any) -> Statement:
    return {**allow(action, resource, **elements), "Effect": "Deny"}


def all_but(name: str, value: str) -> Statement:
    """An allowing statement with NotAction or NotResource."""
    statement = {"Effect": "Allow", "Action": "*", "Resource": "*", f"Not{name}": value}
    return {key: value for key, value in statement.items() if key != name}


def when(operator: str, key: str, *values: str) -> Statement:
    """An allowing statement with one condition."""
    return allow(Condition={operator: {key: list(values)}})


def prefix(operator: str, *values: str) -> Statement:
    return when(operator, "s3:prefix", *values)


def source(operator: str, value: str) -> Statement:
    return when(operator, "aws:SourceArn", value)


def tags(operator: str, *values: str) -> Statement:
    return when(operator, "aws:TagKeys", *values)


GET = ("s3:GetObject", OBJECT)
LIST = ("s3:ListBucket", BUCKET)
PASS = ("iam:PassRole", ROLE)
TAG = ("sagemaker:AddTags", JOB)
SAGEMAKER = "sagemaker.amazonaws.com"
ACCOUNT = {"aws:PrincipalAccount": "123456789012"}
PASSED = {"iam:PassedToService": SAGEMAKER}
PREFIX = {"s3:prefix": "nanogpt/data"}
OTHER_DELIMITER = {**PREFIX, "s3:delimiter": "-"}
MINE = {**PREFIX, "aws:username": "nanogpt"}
SOURCE = {"aws:SourceArn": JOB}
TAGS = {"aws:TagKeys": ["team", "sm-nanogpt"]}
SECURE, OPEN = {"aws:SecureTransport": "true"}, {"aws:SecureTransport": "false"}
IF_OPEN = deny(Condition={"Bool": OPEN})
OF_TEAM = allow("*", f"{BUCKET}/${{aws:PrincipalTag/team}}/*")
OF_TEAM_OR_OURS = allow("*", f"{BUCKET}/${{aws:PrincipalTag/team, 'nanogpt'}}/*")
OF_ACCOUNT = allow("*", "arn:aws:iam::${aws:PrincipalAccount}:role/training")
BOTH_OPERATORS = {"Null": {"s3:prefix": "false"}, "StringLike": {"s3:prefix": "nano*"}}
BOTH_KEYS = {"StringEquals": {"s3:prefix": "nanogpt/data", "s3:delimiter": "/"}}

CASES: dict[str, tuple[list[Statement], tuple[str, str], dict[str, Any], bool]] = {
    # what is asked for, on what
    "nothing allows by itself": ([], GET, {}, False),
    "the action by its name": ([allow("s3:GetObject")], GET, {}, True),
    "the action in any case": ([allow("S3:getobject")], GET, {}, True),
    "no part of an action": ([allow("s3:Get")], GET, {}, False),
    "wildcards in the action": ([allow("s3:G?tO*")], GET, {}, True),
    "one of several actions": ([allow(["s3:PutObject", "s3:GetObject"])], GET, {}, True),
    "the resource by its name": ([allow("*", OBJECT)], GET, {}, True),
    "no part of a resource": ([allow("*", BUCKET)], GET, {}, False),
    "a prefix of the bucket": ([allow("*", f"{BUCKET}/nanogpt/*")], GET, {}, True),
    "a prefix that only begins alike": ([allow("*", f"{BUCKET}/nano/*")], GET, {}, False),
    "a ? is one letter": ([allow("*", f"{BUCKET}/nanogpt/data/?.txt")], GET, {}, True),
    "a wildcard inside one part": ([allow("*", OUR_JOBS)], TAG, {}, True),
    "an ARN goes on with wildcards": ([allow("*", "arn:aws:sagemaker:*:*")], TAG, {}, True),
    "a dot is a dot": ([allow("*", f"{BUCKET}/nanogpt/data/a.tx.")], GET, {}, False),
    "all but another action": ([all_but("Action", "s3:Put*")], GET, {}, True),
    "all but this action": ([all_but("Action", "s3:Get*")], GET, {}, False),
    "all but this resource": ([all_but("Resource", f"{BUCKET}/*")], GET, {}, False),
    "all but another resource": ([all_but("Resource", f"{BUCKET}/other/*")], GET, {}, True),
    # deny
    "a deny wins": ([allow(), deny("s3:GetObject")], GET, {}, False),
    "a deny of something else": ([allow(), deny("s3:PutObject")], GET, {}, True),
    "a deny whose condition fails": ([allow(), IF_OPEN], GET, SECURE, True),
    "a deny whose condition holds": ([allow(), IF_OPEN], GET, OPEN, False),
    # conditions
    "equal": ([when("StringEquals", "iam:PassedToService", SAGEMAKER)], PASS, PASSED, True),
    "the key in any case": (
        [when("StringEquals", "S3:Prefix", "nanogpt/data")],
        LIST,
        PREFIX,
        True,
    ),
    "equal to one of several": ([prefix("StringEquals", "x", "nanogpt/data")], LIST, PREFIX, True),
    "no wildcard in StringEquals": ([prefix("StringEquals", "*")], LIST, PREFIX, False),
    "alike": ([prefix("StringLike", "nanogpt/*")], LIST, PREFIX, True),
    "alike, but not in that case": ([prefix("StringLike", "NANOGPT/*")], LIST, PREFIX, False),
    "a key that the request lacks": ([prefix("StringLike", "*")], LIST, {}, False),
    "a negated key that it lacks": ([prefix("StringNotEquals", "x")], LIST, {}, True),
    "other than all of them": ([prefix("StringNotEquals", "x", "y")], LIST, PREFIX, True),
    "not other than one": ([prefix("StringNotEquals", "x", "nanogpt/data")], LIST, PREFIX, False),
    "not alike, negated": ([prefix("StringNotLike", "other/*")], LIST, PREFIX, True),
    "if it is there, and it is": ([prefix("StringEqualsIfExists", "x")], LIST, PREFIX, False),
    "if it is there, and it is not": ([prefix("StringEqualsIfExists", "x")], LIST, {}, True),
    "an ARN alike": ([source("ArnLike", "arn:*:sagemaker:*:123456789012:*")], GET, SOURCE, True),
    "an ARN of others": (
        [source("ArnLike", "arn:*:sagemaker:*:210987654321:*")],
        GET,
        SOURCE,
        False,
    ),
    "wildcards in ArnEquals too": ([source("ArnEquals", OUR_JOBS)], GET, SOURCE, True),
    "an ARN unlike": ([source("ArnNotLike", "arn:aws:sagemaker:*:*:model/*")], GET, SOURCE, True),
    "null, and it is there": ([prefix("Null", "true")], LIST, PREFIX, False),
    "null, and it is not": ([prefix("Null", "true")], LIST, {}, True),
    "not null, and it is there": ([prefix("Null", "false")], LIST, PREFIX, True),
    "two operators, both": ([allow(Condition=BOTH_OPERATORS)], LIST, PREFIX, True),
    "two keys, one of them wrong": ([allow(Condition=BOTH_KEYS)], LIST, OTHER_DELIMITER, False),
    # keys with several values
    "all values": ([tags("ForAllValues:StringEquals", "team", "sm-nanogpt", "x")], TAG, TAGS, True),
    "all values but one": ([tags("ForAllValues:StringEquals", "team")], TAG, TAGS, False),
    "all values of none": ([tags("ForAllValues:StringEquals", "x")], TAG, {}, True),
    "any value": ([tags("ForAnyValue:StringLike", "sm-*")], TAG, TAGS, True),
    "any value, but none": ([tags("ForAnyValue:StringEquals", "x")], TAG, TAGS, False),
    "any value of none": ([tags("ForAnyValue:StringEquals", "x")], TAG, {}, False),
    # variables
    "a variable in a resource": ([OF_TEAM], GET, {"aws:PrincipalTag/team": "nanogpt"}, True),
    "a variable without a value": ([OF_TEAM], GET, {}, False),
    "a variable with a default": ([OF_TEAM_OR_OURS], GET, {}, True),
    "a variable's value is no wildcard": ([OF_TEAM], GET, {"aws:PrincipalTag/team": "*"}, False),
    "a variable in a condition": ([prefix("StringLike", "${aws:username}/*")], LIST, MINE, True),
    "an asterisk that is one": ([prefix("StringLike", "nano${*}")], LIST, PREFIX, False),
    "no variable before an ARN's last part": ([OF_ACCOUNT], PASS, ACCOUNT, False),
}


def test_a_request_is_judged_as_iam_judges_it():
    for case, (statements, (action, resource), context, expected) in CASES.items():
        document = {"Version": "2012-10-17", "Statement": statements}
        assert allowed([document], action, resource, context) is expected, case


def test_each_document_may_allow_and_each_may_deny():
    one = {"Version": "2012-10-17", "Statement": allow("s3:GetObject")}
    other = {"Version": "2012-10-17", "Statement": allow("s3:PutObject")}
    no = {"Version": "2012-10-17", "Statement": [deny("s3:*")]}
    assert allowed([one, other], *GET, {})
    assert not allowed([one, other, no], *GET, {})


@pytest.mark.parametrize(
    "element",
    [
        {"Version": "2008-10-17"},
        {"Statement": allow(Principal="*")},
        {"Statement": when("NumericLessThan", "s3:max-keys", "10")},
        {"Statement": when("ForAllValues:Date", "aws:CurrentTime", "x")},
        {"Statement": tags("StringEquals", "team")},  # a list without a quantifier
    ],
)
def test_an_unknown_policy_element_is_refused(element):
    document = {"Version": "2012-10-17", "Statement": allow(), **element}
    with pytest.raises(NotImplementedError):
        allowed([document], *LIST, {"s3:max-keys": "5", **TAGS})
