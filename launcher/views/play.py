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
TURN = 0.03  # seconds; at most this, or one token, passes until the server looks at requests
Likely = tuple[list[tuple[str, float]], int]


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

    def described(self) -> dict[str, object]:
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
    """A piece of text, and the likely tokens at its place with the model's own probabilities."""

    text: str
    likely: Sequence[tuple[str, float]] = ()  # empty at the end of a text
    chosen: int = 0  # which one was drawn: the last, if it is none of the most likely


def stream_tokens(
    player: Player, wanted: SamplingRequest, ids: list[int] | None = None
) -> Iterator[Token]:
    """Yield the tokens of one text after the ids, or else the prompt, up to wanted.stop."""
    seen: list[Likely] = []
    columns = stream_samples(
        player.model,
        player.tokenizer,
        ids or wanted.prompt or None,
        watch=lambda logits, ids: seen.append(likely(logits[0], int(ids[0]), player.tokenizer)),
        **{name: getattr(wanted, name) for name in NUMBERS},
    )
    tokens = (Token(piece, *seen.pop()) if seen else Token(piece) for (piece,) in columns)
    stops = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
    return until(tokens, [stop for stop in stops if stop])


def likely(logits: Tensor, chosen: int, tokenizer: Tokenizer) -> Likely:
    """The most likely tokens after logits [V], with the chosen one, and its index among them."""

    def text(id: int) -> str:
        if id == tokenizer.end:
            return tokenizer.end_of_text or ""
        return tokenizer.word(id).decode(errors="backslashreplace")

    probabilities = logits.softmax(dim=-1)
    ids: list[int] = probabilities.topk(min(MOST_LIKELY, len(logits))).indices.tolist()
    ids += [chosen] * (chosen not in ids)
    return [(text(id), float(probabilities[id])) for id in ids], ids.index(chosen)


def until(tokens: Iterator[Token], stops: Sequence[str]) -> Iterator[Token]:
    """Yield tokens up to the one of `stops` that is complete first, or the longest of several.

    Tokens that may be the beginning of one are held back.
    """
    held: list[Token] = []
    for token in tokens:
        held.append(token)
        text = "".join(each.text for each in held)
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        ends = ((n, stop[:n]) for stop in stops for n in range(min(len(stop), len(text)) + 1))
        begun = (n for n, begin in ends if text.endswith(begin))
        free = min(found)[1] if found else len(text) - max(begun, default=0)
        while held and len(held[0].text) <= free:
            free -= len(held[0].text)
            yield held.pop(0)
        if found:
            if free:
                yield replace(held[0], text=held[0].text[:free])
            return
    yield from held


def turn(tokens: Iterator[Token]) -> list[Token]:
    """The tokens of the next turn, at least one; none if there are no more."""
    made, deadline = [], time.monotonic() + TURN
    for token in tokens:
        made.append(token)
        if time.monotonic() > deadline:
            break
    return made


class Queued(StreamingResponse):
    """Lines that wait for a lock, and hold it until they end."""

    def __init__(self, lines: AsyncIterator[str], lock: asyncio.Lock, kind: str) -> None:
        super().__init__(lines, media_type=kind)
        self.lock = lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.lock:
            await super().__call__(scope, receive, send)


def make_app(
    players: Sequence[Player], key: str, more: Sequence[Route], origins: Sequence[str] = ()
) -> ASGIApp:
    """The page, its models, their generations, and more, for requests that carry the key.

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
        return JSONResponse([player.described() for player in players])

    async def generate(request: HTTPRequest) -> Response:
        player = players[request.path_params["number"]]
        wanted = adapter_for(SamplingRequest).validate_json(await request.body())
        dropped, ids = 0, None
        if wanted.messages is not None:
            dropped, ids, most = player.chat.fitting(wanted.messages, wanted.max_new_tokens)
            wanted = replace(wanted, max_new_tokens=most)
        tokens = stream_tokens(player, wanted, ids)

        async def lines() -> AsyncIterator[str]:
            try:
                while made := turn(tokens):
                    yield "".join(f"{json.dumps(asdict(token))}\n" for token in made)
                    await asyncio.sleep(0)
            except ServiceError as error:  # an edited script fails
                yield f"{json.dumps({'error': str(error)})}\n"

        answer = Queued(lines(), player.lock, "application/x-ndjson")
        answer.headers["x-dropped"] = str(dropped)  # messages that the model does not see
        return answer

    async def nothing(request: HTTPRequest, error: Exception) -> Response:
        path = request.url.path
        return problem(404, f"{request.method} {path} is not there{hint_for(path)}")

    async def refused(request: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response()
        said = first_problem(error) if isinstance(error, ValidationError) else str(error)
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        # An edited script that fails raises ServiceError; the other errors are the client's.
        return problem(500 if isinstance(error, ServiceError) else 400, said, code)

    routes = [
        Route("/", page),
        Route("/page/models", models),
        Route("/page/generate/{number:int}", generate, methods=["POST"]),
        *more,
    ]
    errors = (ClientDisconnect, ValidationError, InputError, ServiceError)
    handlers: dict[Any, Any] = {404: nothing, **dict.fromkeys(errors, refused)}
    inner = Starlette(routes=routes, exception_handlers=handlers)
    guard = guarded(of_single_slashes(inner), key)
    # Outside of the guard: a browser asks before it sends the key.
    return CORSMiddleware(guard, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


def hint_for(path: str) -> str:
    """What may be wrong with the base URL of a client that asks for this path."""
    if re.match(r"/v1/v1(/|$)", path):
        return "; /v1 is twice in the base URL"
    if path == "/v1":
        return "; /v1/models lists the models"
    return "" if path.startswith("/v1/") else "; /v1 is missing from the base URL"


def of_single_slashes(app: ASGIApp) -> ASGIApp:
    """Read several slashes of a path as one, as a base URL that ends in a slash makes two."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        path = re.sub("/+", "/", scope["path"])
        await app({**scope, "path": path.rstrip("/") or "/"}, receive, send)

    return route


def problem(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error in the shape of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


def guarded(app: ASGIApp, key: str) -> ASGIApp:
    """Refuse requests without the key, so also those of other sites, by whatever name of host."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        request, answer = HTTPRequest(scope), app
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = request.query_params.get("token", bearer if scheme.lower() == "bearer" else "")
        if not secrets.compare_digest(given.encode(), key.encode()):
            said = "use the address or the API key that the server printed"
            answer = problem(401, said, "invalid_api_key")
        await answer(scope, receive, send)

    return guard


def listen(port: int) -> socket.socket:
    """Listen on loopback; port 0 takes a free one. Raises InputError if the port is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InputError(f"{error.strerror}", "port-taken", field="port", value=port) from None


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server of the page. Ctrl-C ends its generations and raises KeyboardInterrupt from `run`."""
    # Leave a core to the browser: where it takes one of two, two threads wait for each other, and
    # a small model made 55 tokens/s instead of 600.
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    quiet: dict[str, Any] = dict(log_config=None, access_log=False)
    config = uvicorn.Config(app, lifespan="off", ws="none", timeout_graceful_shutdown=0, **quiet)
    server = uvicorn.Server(config)
    # It logs as errors the generations that Ctrl-C cancels.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
    return server
