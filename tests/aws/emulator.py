"""AWS on loopback, as far as sm-nanogpt meets it: one server, moto's, with SageMaker's jobs in it.

Every request goes through here: it is recorded, held against the credentials and policies of who
signed it, and answered by `sagemaker_service` or by moto.

`make emulator` serves until Ctrl-C, and prints what to put into the shell of a user.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import boto3
from access import ACCOUNT, Access, Principal, Refusal, accesses, principal_of
from container import lacking
from money_service import MoneyService
from moto.logs.models import logs_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from policies import allowed
from sagemaker_service import SageMaker
from training_runs import Containers
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

REGION = "us-east-1"
ROLE_ACTIONS = ("s3:*", "logs:*", "ecr:*", "cloudwatch:*", "kms:*")  # of a role that may do it all
SMALL_PAGES = {"DescribeLogStreams": 1, "GetLogEvents": 3}

Start = Callable[..., Any]


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class Emulator:
    """The WSGI application, and what a test may look at or change."""

    def __init__(self, sagemaker: SageMaker) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.url = ""
        self.credentials: dict[str, Callable[[], dict[str, str]]] = {}  # path: of whom
        self.reset(sagemaker)

    def reset(self, sagemaker: SageMaker) -> None:
        """Forgets the jobs and the calls; what moto holds stays."""
        self.sagemaker = sagemaker
        self.money = MoneyService()
        self.calls: list[tuple[str, dict[str, Any]]] = []  # but those to S3: operation and body
        self.accesses: list[Access] = []  # everything, in the words of policies
        self.refuse: dict[str, tuple[Any, ...]] = {}  # operation: what Refusal takes

    # -- one request -------------------------------------------------------------------------------

    def __call__(self, environ: dict[str, Any], start_response: Start) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path in self.credentials:  # as a container asks for those of its role
            return answer(start_response, 200, "application/json", self.credentials[path]())
        scope = re.search(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/", auth(environ))
        key, region, service = scope.groups() if scope else ("", REGION, "s3")
        body = {} if service == "s3" else read_body(environ)
        operation = operation_of(environ, body)
        if service == "s3" and (bucket_region := region_of_bucket(environ)):
            start_response = with_header(start_response, ("x-amz-bucket-region", bucket_region))
        else:
            bucket_region = region
        try:
            if bucket_region != region:
                raise Refusal(
                    "PermanentRedirect",
                    "The bucket you are attempting to access must be addressed using the specified"
                    " endpoint. Please send all future requests to this endpoint.",
                    301,
                )
            principal = principal_of(key, service)
            self.judge(principal, accesses(service, region, operation, environ, body))
            if service in ("pricing", "servicequotas"):
                value = self.money.call(operation, body)
                return answer(start_response, 200, "application/x-amz-json-1.1", value)
            if service != "s3" and operation != "GetCallerIdentity":  # which nobody is denied
                self.calls.append((operation, body))
            if operation in self.refuse:
                raise Refusal(*self.refuse[operation])
            if operation == "GetCallerIdentity":  # moto knows one user alone
                return answer(start_response, 200, "text/xml", identity(principal))
            if service == "sagemaker":
                value = self.sagemaker.call(operation, body)
                return answer(start_response, 200, "application/x-amz-json-1.1", value)
        except Refusal as refusal:
            return refused(start_response, service, environ, refusal)
        if operation == "GetLogEvents" and "nextToken" not in body and (page := empty_page(body)):
            return answer(start_response, 200, "application/x-amz-json-1.1", page)
        if operation in SMALL_PAGES and "limit" not in body:
            rewind(environ, {**body, "limit": SMALL_PAGES[operation]})
        return self.moto(environ, start_response)

    def serve(self, fd: int | None = None) -> BaseWSGIServer:
        """Serves on a port of loopback, or on a socket that listens already."""
        server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet, fd=fd)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def judge(self, principal: Principal, accesses: Iterable[Access]) -> None:
        for access in accesses:
            access = access.by(principal.arn)
            self.accesses.append(access)
            if principal.policies is not None and not allowed(
                principal.policies, access.action, access.resource, access.context
            ):
                raise Refusal(
                    "AccessDenied" if access.action.startswith("s3:") else "AccessDeniedException",
                    f"User: {principal.arn} is not authorized to perform: {access.action} on"
                    f" resource: {access.resource} because no identity-based policy allows the"
                    f" {access.action} action",
                    403,
                )


def empty_page(body: dict[str, Any]) -> dict[str, Any]:
    """A page without events before the first of a stream: AWS may answer so at any time."""
    group = logs_backends[ACCOUNT][REGION].groups.get(body["logGroupName"])
    if not group or body["logStreamName"] not in group.streams:
        return {}
    count = len(group.streams[body["logStreamName"]].events)
    tokens = {"nextForwardToken": "f/-1", "nextBackwardToken": f"b/{count:056d}"}
    return {"events": [], **tokens}


def identity(principal: Principal) -> str:
    """GetCallerIdentity's answer."""
    body = {"Arn": principal.arn, "UserId": "AIDAEXAMPLE", "Account": ACCOUNT}
    fields = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in body.items())
    result = f"<GetCallerIdentityResult>{fields}</GetCallerIdentityResult>"
    return f"<GetCallerIdentityResponse>{result}</GetCallerIdentityResponse>"


def auth(environ: dict[str, Any]) -> str:
    return str(environ.get("HTTP_AUTHORIZATION", ""))


def read_body(environ: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a request, which can be read again afterwards."""
    content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(content)
    if "form-urlencoded" in environ.get("CONTENT_TYPE", ""):
        return {name: values[0] for name, values in parse_qs(content.decode()).items()}
    try:
        return dict(json.loads(content or b"{}"))
    except ValueError:
        return {}


def region_of_bucket(environ: dict[str, Any]) -> str:
    """The region of the bucket that a request to S3 is about; "" if there is no such bucket."""
    name = environ["PATH_INFO"].lstrip("/").partition("/")[0]
    bucket = s3_backends[ACCOUNT]["aws"].buckets.get(name)
    return str(bucket.region_name) if bucket else ""


def with_header(start_response: Start, header: tuple[str, str]) -> Start:
    def start(status: str, headers: list[tuple[str, str]], *arguments: Any) -> Any:
        names = {name.lower() for name, _ in headers}
        return start_response(status, [*headers, *[header] * (header[0] not in names)], *arguments)

    return start


def rewind(environ: dict[str, Any], body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    environ["wsgi.input"] = io.BytesIO(content)
    environ["CONTENT_LENGTH"] = str(len(content))


def operation_of(environ: dict[str, Any], body: dict[str, Any]) -> str:
    if environ["REQUEST_METHOD"] == "PUT" and "partNumber=" in environ.get("QUERY_STRING", ""):
        return "UploadPart"
    target = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
    return str(target or body.get("Action") or environ["REQUEST_METHOD"])


def answer(
    start_response: Start, status: int, kind: str, value: Any, head: bool = False
) -> list[bytes]:
    content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    headers = [("Content-Type", kind), ("Content-Length", str(len(content)))]
    start_response(f"{status} {'OK' if status == 200 else 'Refused'}", headers)
    return [] if head else [content]


def refused(
    start_response: Start, service: str, environ: dict[str, Any], refusal: Refusal
) -> list[bytes]:
    """A refusal as the service's protocol has it."""
    code, message = refusal.code, str(refusal)
    if service == "s3":
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        xml = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        head = environ["REQUEST_METHOD"] == "HEAD"
        return answer(start_response, refusal.status, "application/xml", xml, head)
    if "form-urlencoded" in environ.get("CONTENT_TYPE", ""):
        xml = f"<ErrorResponse><Error><Code>{code}</Code><Message>{escape(message)}</Message>"
        xml += "</Error></ErrorResponse>"
        return answer(start_response, refusal.status, "text/xml", xml)
    body = {"__type": code, "message": message, "Message": message}
    return answer(start_response, refusal.status, "application/x-amz-json-1.1", body)


# -- serving ---------------------------------------------------------------------------------------


@contextmanager
def serving(sagemaker: SageMaker) -> Iterator[Emulator]:
    """The emulator, at its `url`."""
    emulator = Emulator(sagemaker)
    server = emulator.serve()
    emulator.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield emulator
    finally:
        server.shutdown()
        server.server_close()


def make_role(url: str, name: str, *actions: str, trusted: str = "sagemaker.amazonaws.com") -> str:
    """A role that may do these actions, everywhere; returns its ARN."""
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": trusted}}
    iam = client("iam", url)
    role = iam.create_role(
        RoleName=name,
        AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [statement]}),
    )
    if actions:
        may = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [may]})
        iam.put_role_policy(RoleName=name, PolicyName="may", PolicyDocument=policy)
    return str(role["Role"]["Arn"])


def client(service: str, url: str) -> Any:
    """A client of the account's owner."""
    return boto3.client(
        service,
        region_name=REGION,
        endpoint_url=url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="AWS on loopback, whose training jobs run here.")
    parser.add_argument("--gpus", type=int, default=2, help="ranks on each host (default: 2)")
    parser.add_argument(
        "--rate", type=float, default=20, help="SageMaker's seconds in one of ours (default: 20)"
    )
    parser.add_argument("--empty", action="store_true", help="an account without bucket and role")
    args = parser.parse_args()
    problem = lacking()
    if problem:  # it serves all the same
        print(f"jobs will fail, as there are no containers: {problem}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="emulator-") as directory:
        containers = Containers(Path(directory), gpus=args.gpus, rate=args.rate)
        sagemaker = SageMaker(containers, rate=args.rate)
        sagemaker.search_lag = 5.0

        def interrupt(*_: Any) -> None:
            for job in sagemaker.jobs.values():
                job.interrupting.set()

        signal.signal(signal.SIGUSR1, interrupt)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        from cloudformation_service import repaired  # which imports most of moto

        with repaired(), serving(sagemaker) as emulator, contextlib.closing(containers):
            containers.attach(emulator)
            variables = {
                "AWS_ENDPOINT_URL": emulator.url,
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_REGION": REGION,
            }
            if not args.empty:
                client("s3", emulator.url).create_bucket(Bucket="emulated")
                variables["SM_NANOGPT_STORE"] = "s3://emulated/nanogpt"
                variables["SM_NANOGPT_ROLE"] = make_role(emulator.url, "training", *ROLE_ACTIONS)
            for name, value in variables.items():
                print(f"export {name}={value}", flush=True)
            spot = f"kill -USR1 {os.getpid()} takes the machines from spot jobs"
            print(f"account {ACCOUNT}; Ctrl-C ends it and its jobs; {spot}", file=sys.stderr)
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)


if __name__ == "__main__":
    main()
