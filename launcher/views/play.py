"""The local page on which people try trained models: a server on loopback.

A generation is one POST, whose answer streams a JSON line for each token; closing the connection
ends it. The models compute in the server's thread, in short turns: in a second thread, torch took
three times as long for each token of a small model, and two models want the same cores anyway.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as checked
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from entry_point.model import GPT
from entry_point.text import Tokenizer
from launcher.errors import InputError, ServiceError
from launcher.files.documents import adapter_for, first_problem
from launcher.job import end_of
from launcher.models.chat import Chat, Message, TooLong
from launcher.models.load import is_edited
from launcher.models.sample import stream_samples

PAGE = Path(__file__).with_name("play.html")
MOST_LIKELY = 5
NUMBERS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")  # of a SamplingRequest
# The server looks at other requests after so many seconds, or after one token if that takes longer.
TURN_SECONDS = 0.03


@dataclass(frozen=True)
class Player:
    """A model on the page, which generates one text at a time."""

    name: str  # of its job, or else its directory
    model: GPT
    tokenizer: Tokenizer
    about: str = ""  # its loss and settings
    job_id: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def chat(self) -> Chat:
        """Raises InputError if the model has not learned from conversations."""
        return Chat(self.model, self.tokenizer)

    @property
    def title(self) -> str:
        """The name, with the end of the job's id: own1t (…79bf20)."""
        if self.job_id in ("", self.name):
            return self.name
        return f"{self.name} (…{end_of(self.job_id)})"

    def facts(self) -> dict[str, object]:
        """Returns what the page shows of the model."""
        return {
            "name": self.title,
            "about": self.about,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "unit": self.tokenizer.unit,
            "chats": self.tokenizer.chats,
            "edited": is_edited(self.model),
        }


@checked(frozen=True)
class SamplingRequest:
    """What the page asks for; stream_samples checks the numbers' ranges."""

    max_new_tokens: int
    temperature: Annotated[float, Field(allow_inf_nan=False)]
    top_p: float
    seed: int
    stop: str | list[str]  # the text ends before any of them
    top_k: int = 0
    prompt: str = ""  # "": a new text
    messages: list[Message] | None = None  # a conversation to answer, in place of the prompt


@dataclass(frozen=True)
class Token:
    """A piece of text, and the likeliest texts of its token.

    likely has each text with the model's own probability; it is empty for what remains of a text
    after its last token. chosen is the index of the drawn one, which comes last if it is none of
    the likeliest.
    """

    text: str
    likely: Sequence[tuple[str, float]] = ()
    chosen: int = 0


def stream_tokens(
    player: Player, request: SamplingRequest, ids: list[int] | None = None
) -> Iterator[Token]:
    """Yields the tokens of one text after the ids, or else the prompt, up to a stop."""
    drawn: list[Token] = []  # at most one, whose text comes next

    def watch(logits: Tensor, next_ids: Tensor) -> None:
        drawn.append(drawn_token(logits[0], int(next_ids[0]), player.tokenizer))

    numbers = {name: getattr(request, name) for name in NUMBERS}
    prompt = ids or request.prompt or None
    columns = stream_samples(player.model, player.tokenizer, prompt, watch=watch, **numbers)

    def tokens() -> Iterator[Token]:
        for (piece,) in columns:
            token = drawn.pop() if drawn else Token("")
            yield replace(token, text=piece)

    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    return until(tokens(), [stop for stop in stops if stop])


def drawn_token(logits: Tensor, chosen_id: int, tokenizer: Tokenizer) -> Token:
    """Returns the token of the id that was drawn by logits [V], without its text."""
    probabilities = logits.softmax(dim=-1)
    n_likely = min(MOST_LIKELY, len(logits))
    ids: list[int] = probabilities.topk(n_likely).indices.tolist()
    if chosen_id not in ids:
        ids.append(chosen_id)
    likely = []
    for id in ids:
        text = tokenizer.word(id).decode(errors="backslashreplace")
        if id == tokenizer.end:
            text = tokenizer.end_of_text or ""
        likely.append((text, float(probabilities[id])))
    return Token("", likely, ids.index(chosen_id))


def until(tokens: Iterator[Token], stops: Sequence[str]) -> Iterator[Token]:
    """Yields tokens up to the one of `stops` that is complete first, or the longest of several.

    It holds back tokens with which a stop may begin.
    """
    held: list[Token] = []
    for token in tokens:
        held.append(token)
        text = "".join(token.text for token in held)
        end = find_stop(text, stops)
        n_free = len(text) - begun_characters(text, stops) if end is None else end
        while held and len(held[0].text) <= n_free:
            n_free -= len(held[0].text)
            yield held.pop(0)
        if end is not None:
            if n_free:
                yield replace(held[0], text=held[0].text[:n_free])
            return
    yield from held


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the stop that ends first begins, or the longest of several; None without."""
    spans = []  # end, start
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            spans.append((start + len(stop), start))
    return min(spans)[1] if spans else None


def begun_characters(text: str, stops: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop."""
    n_begun = 0
    for stop in stops:
        for n in range(n_begun + 1, min(len(stop), len(text)) + 1):
            if text.endswith(stop[:n]):
                n_begun = n
    return n_begun


def next_turn(tokens: Iterator[Token]) -> list[Token]:
    """Returns the tokens of the next turn, at least one; none if there are no more."""
    deadline = time.monotonic() + TURN_SECONDS
    turn = []
    for token in tokens:
        turn.append(token)
        if time.monotonic() > deadline:
            break
    return turn


class LockedStream(StreamingResponse):
    """A response that waits for a lock before its first line, and holds it until the last."""

    def __init__(self, lines: AsyncIterator[str], lock: asyncio.Lock, media_type: str) -> None:
        super().__init__(lines, media_type=media_type)
        self.lock = lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.lock:
            await super().__call__(scope, receive, send)


def make_app(
    players: Sequence[Player], key: str, api_routes: Sequence[Route], origins: Sequence[str] = ()
) -> ASGIApp:
    """Serves the page, its models, their generations and the API to requests that carry the key.

    Pages of these other origins may read the answers.
    """
    html = PAGE.read_text(encoding="utf-8")

    async def page(request: HTTPRequest) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}';"
            " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
            " frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",  # the address holds the key
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        return HTMLResponse(html.replace("{nonce}", nonce), headers=headers)

    async def models(request: HTTPRequest) -> Response:
        return JSONResponse([player.facts() for player in players])

    async def generate(request: HTTPRequest) -> Response:
        player = players[request.path_params["number"]]
        sampling = adapter_for(SamplingRequest).validate_json(await request.body())
        ids = None
        n_dropped = 0
        if sampling.messages is not None:
            prompt = player.chat.fit(sampling.messages, sampling.max_new_tokens)
            ids = prompt.ids
            n_dropped = prompt.n_dropped
            sampling = replace(sampling, max_new_tokens=prompt.max_new_tokens)
        tokens = stream_tokens(player, sampling, ids)

        async def lines() -> AsyncIterator[str]:
            try:
                while turn := next_turn(tokens):
                    yield "".join(f"{json.dumps(asdict(token))}\n" for token in turn)
                    await asyncio.sleep(0)
            except ServiceError as error:  # an edited script fails
                yield f"{json.dumps({'error': str(error)})}\n"

        response = LockedStream(lines(), player.lock, "application/x-ndjson")
        response.headers["x-dropped"] = str(n_dropped)  # messages that the model does not see
        return response

    async def not_found(request: HTTPRequest, error: Exception) -> Response:
        path = request.url.path
        return error_response(404, f"{request.method} {path} is not there{hint_for(path)}")

    async def failed(request: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response()
        if isinstance(error, ServiceError):  # an edited script fails; all else is the client's
            return error_response(500, str(error))
        if isinstance(error, ValidationError):
            return error_response(400, first_problem(error))
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return error_response(400, str(error), code)

    routes = [
        Route("/", page),
        Route("/page/models", models),
        Route("/page/generate/{number:int}", generate, methods=["POST"]),
        *api_routes,
    ]
    errors = (ClientDisconnect, ValidationError, InputError, ServiceError)
    handlers: dict[Any, Any] = {404: not_found, **dict.fromkeys(errors, failed)}
    app = Starlette(routes=routes, exception_handlers=handlers)
    guarded_app = require_key(merge_slashes(app), key)
    # It is outside of the guard, since a browser asks about origins before it sends the key.
    return CORSMiddleware(
        guarded_app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )


def hint_for(path: str) -> str:
    """Says what may be wrong with the base URL of a client that asks for this path."""
    if re.match(r"/v1/v1(/|$)", path):
        return "; /v1 is twice in the base URL"
    if path == "/v1":
        return "; /v1/models lists the models"
    return "" if path.startswith("/v1/") else "; /v1 is missing from the base URL"


def merge_slashes(app: ASGIApp) -> ASGIApp:
    """Makes one slash of several in a path: a base URL that ends in a slash makes two."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        path = re.sub("/+", "/", scope["path"])
        await app({**scope, "path": path.rstrip("/") or "/"}, receive, send)

    return route


def error_response(status: int, message: str, code: str | None = None) -> JSONResponse:
    """Returns an error in the form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


def require_key(app: ASGIApp, key: str) -> ASGIApp:
    """Refuses requests without the key, so also those of other sites, whatever host they name.

    The key is in the address, as `token`, or it is the bearer of the Authorization header.
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
    """Listens on loopback; port 0 takes a free one. Raises InputError if the port is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InputError(f"{error.strerror}", "port-taken", field="port", value=port) from None


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Returns a server of the page, whose `run` raises KeyboardInterrupt after Ctrl-C.

    Ctrl-C also ends its generations.
    """
    # Leave a core to the browser: where it takes one of two, two threads wait for each other, and
    # a small model made 55 tokens/s instead of 600.
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
    # It logs as errors the generations that Ctrl-C cancels.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
    return server
