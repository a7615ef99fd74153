"""Serve the local page on which people try trained models, on loopback.

The browser computes the models. The API of api.py answers other programs, and answers the page for
models that the browser cannot compute.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.description import end_of
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.models.chat import Chat, TooLong
from sm_nanogpt.launcher.models.moments import Moment
from sm_nanogpt.launcher.views.model_page import pack_for_page, served_moment, served_page


@dataclass(frozen=True)
class ServedModel:
    """A model that is served. It generates one text at a time for the API."""

    name: str  # of its job, or else its directory
    model: GPT
    tokenizer: Tokenizer
    card: Mapping[str, str] = field(default_factory=dict)  # what the page says of it, by label
    job_id: str = ""
    moments: Sequence[Moment] = ()  # of its training; the last is the model
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def chat(self) -> Chat:
        """The model as a chat. Raises InputError if it has not learned from conversations."""
        return Chat(self.model, self.tokenizer)

    @property
    def title(self) -> str:
        """The name, with the end of the job's id, such as `own1t (…79bf20)`."""
        if self.job_id in ("", self.name):
            return self.name
        return f"{self.name} (…{end_of(self.job_id)})"


def make_app(
    served_models: Sequence[ServedModel],
    key: str,
    api_routes: Sequence[Route],
    origins: Sequence[str] = (),
) -> ASGIApp:
    """Make the app that serves the page, its models, and the API to requests with the key.

    origins: other origins whose pages may read the answers.
    """
    html = served_page(len(served_models))
    headers = {
        "Content-Security-Policy": "frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",  # the address holds the key
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }

    async def page(request: HTTPRequest) -> Response:
        return HTMLResponse(html, headers=headers)

    async def model(request: HTTPRequest) -> Response:
        number = request.path_params["number"]
        if number >= len(served_models):
            return error_response(404, f"no model {number}")
        content = pack_for_page(served_models[number])
        return Response(content, headers=headers, media_type="application/octet-stream")

    async def moment(request: HTTPRequest) -> Response:
        number = request.path_params["number"]
        index = request.path_params["index"]
        if number >= len(served_models) or index >= len(served_models[number].moments):
            return error_response(404, f"no moment {index} of model {number}")
        content = served_moment(served_models[number].moments[index].model)
        return Response(content, headers=headers, media_type="application/octet-stream")

    async def not_found(request: HTTPRequest, error: Exception) -> Response:
        path = request.url.path
        return error_response(404, f"{request.method} {path} is not there{hint_for(path)}")

    async def failed(request: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response()
        if isinstance(error, ServiceError):  # an edited folder failed; other errors are requests'
            return error_response(500, str(error))
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return error_response(400, str(error), code)

    routes = [
        Route("/", page),
        Route("/page/model/{number:int}", model),
        Route("/page/model/{number:int}/moment/{index:int}", moment),
        *api_routes,
    ]
    errors = (ClientDisconnect, InputError, ServiceError)
    handlers: dict[Any, Any] = {404: not_found, **dict.fromkeys(errors, failed)}
    app = Starlette(routes=routes, exception_handlers=handlers)
    guarded_app = require_key(merge_slashes(app), key)
    # CORSMiddleware is outside of the guard: a browser asks about origins before it sends the key.
    return CORSMiddleware(
        guarded_app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )


def hint_for(path: str) -> str:
    """Describe what may be wrong with the base URL of a client that asks for this path; or ''."""
    if re.match(r"/v1/v1(/|$)", path):
        return "; /v1 is twice in the base URL"
    if path == "/v1":
        return "; /v1/models lists the models"
    return "" if path.startswith("/v1/") else "; /v1 is missing from the base URL"


def merge_slashes(app: ASGIApp) -> ASGIApp:
    """Merge several slashes of a path into one: a base URL that ends in a slash gives two."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        path = re.sub("/+", "/", scope["path"])
        await app({**scope, "path": path.rstrip("/") or "/"}, receive, send)

    return route


def error_response(status: int, message: str, code: str | None = None) -> JSONResponse:
    """Return an error in the form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


def require_key(app: ASGIApp, key: str) -> ASGIApp:
    """Refuse requests without the key, such as those of other sites, whatever host they name.

    The key is `token` in the address, or the bearer token of the Authorization header.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        request = HTTPRequest(scope)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            bearer = ""
        token = request.query_params.get("token", bearer)
        if secrets.compare_digest(token.encode(), key.encode()):
            await app(scope, receive, send)
            return
        message = "use the address or the API key that the server printed"
        await error_response(401, message, "invalid_api_key")(scope, receive, send)

    return guard


def listen(port: int) -> socket.socket:
    """Listen on loopback. Port 0 takes a free port. Raises InputError if the port is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InputError(os_reason(error), "port-taken", field="port", value=port) from None


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Make the server of an app, whose `run` raises KeyboardInterrupt after Ctrl-C.

    Ctrl-C also ends the answers that are being written.
    """
    # One core is left to the browser. If the browser takes one of two cores, two threads of torch
    # wait for each other: a small model made 55 tokens/s instead of 600.
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=0,
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    # uvicorn logs the answers that Ctrl-C cancels as errors.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
    return server
