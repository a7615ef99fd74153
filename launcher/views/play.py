"""The local page on which people try trained models: a server on loopback.

A generation is one POST, whose answer streams a JSON line for each token; closing the connection
ends it. The models compute in the server's thread, in short turns: in a second thread, torch took
three times as long for each token of a small model, and two models want the same cores anyway.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
import uvicorn
from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as checked
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Sent
from torch import Tensor

from entry_point.data import Tokenizer
from entry_point.model import GPT
from launcher.errors import InputError, ServiceError
from launcher.files.documents import adapter, reason_of
from launcher.models.chat import Chat, Message
from launcher.models.sample import is_edited, stream_samples

PAGE = Path(__file__).with_name("play.html")
MOST_LIKELY = 5
UNREAD = 10.0  # seconds that a text waits for its reader until it ends
TURN = 0.03  # seconds; at most this, or one token, passes until the server looks at requests


@dataclass(frozen=True)
class Player:
    """A model on the page, which generates one text at a time."""

    name: str
    model: GPT
    tokenizer: Tokenizer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def chat(self) -> Chat:
        """Raises InputError if the model has not learned from conversations."""
        return Chat(self.model, self.tokenizer)

    def described(self) -> dict[str, object]:
        return {
            "name": self.name,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "unit": self.tokenizer.unit,
            "chats": self.tokenizer.chats,
            "edited": is_edited(self.model),
        }


@checked(frozen=True)
class SamplingRequest:
    """What the page asks for; stream_samples checks the numbers' ranges."""

    prompt: str  # "": a new text
    max_new_tokens: int
    temperature: Annotated[float, Field(allow_inf_nan=False)]
    top_k: int
    top_p: float
    seed: int
    stop: str | list[str]  # the text ends before any of them
    messages: list[Message] | None = None  # a conversation to answer, in place of the prompt


@dataclass(frozen=True)
class Token:
    """A piece of text, and the likely tokens at its place with the model's own probabilities.

    `chosen` is the index of the token that was drawn, which follows the most likely ones if it is
    none of them. likely is empty at the end of a text.
    """

    text: str
    likely: Sequence[tuple[str, float]] = ()
    chosen: int = 0


def stream_tokens(
    player: Player, wanted: SamplingRequest, ids: list[int] | None = None
) -> Iterator[Token]:
    """Yield the tokens of one text. The text is that of stream_samples, up to wanted.stop.

    Raises:
        InputError: as stream_samples; or the model does not answer such messages.
    """
    seen: list[tuple[list[tuple[str, float]], int]] = []
    most = wanted.max_new_tokens
    if wanted.messages is not None:
        _, ids = player.chat.fitting(wanted.messages, most)
        most = min(most, player.chat.room(ids))
    columns = stream_samples(
        player.model,
        player.tokenizer,
        ids or wanted.prompt or None,
        most,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        seed=wanted.seed,
        watch=lambda logits, ids: seen.append(likely(logits[0], int(ids[0]), player.tokenizer)),
    )
    tokens: Iterator[Token] = (
        Token(piece, *seen.pop()) if seen else Token(piece) for (piece,) in columns
    )
    for stop in [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop:
        tokens = until(tokens, stop) if stop else tokens
    return tokens


def likely(
    logits: Tensor, chosen: int, tokenizer: Tokenizer
) -> tuple[list[tuple[str, float]], int]:
    """The most likely tokens after logits [V], with the chosen one, and its index among them."""

    def text(id: int) -> str:
        if id == tokenizer.end:
            return tokenizer.end_of_text or ""
        return tokenizer.word(id).decode(errors="backslashreplace")

    probabilities = logits.softmax(dim=-1)
    ids: list[int] = probabilities.topk(min(MOST_LIKELY, len(logits))).indices.tolist()
    ids += [chosen] * (chosen not in ids)
    return [(text(id), float(probabilities[id])) for id in ids], ids.index(chosen)


def until(tokens: Iterator[Token], stop: str) -> Iterator[Token]:
    """Yield tokens up to the first `stop`; hold back those that may be its beginning."""
    held: list[Token] = []
    for token in tokens:
        held.append(token)
        text = "".join(each.text for each in held)
        end = text.find(stop)
        free = end
        if end < 0:
            begun = (n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n]))
            free = len(text) - next(begun, 0)
        while held and len(held[0].text) <= free:
            free -= len(held[0].text)
            yield held.pop(0)
        if end >= 0:
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
    """Lines that wait for a lock, and hold it until they end, or nobody reads them."""

    def __init__(
        self, lines: AsyncIterator[str], lock: asyncio.Lock, kind: str = "application/x-ndjson"
    ) -> None:
        super().__init__(lines, media_type=kind)
        self.lock = lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def impatient(message: Sent) -> None:
            await asyncio.wait_for(send(message), UNREAD)

        async with self.lock:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, impatient)


def make_app(players: Sequence[Player], port: int, token: str, more: Sequence[Route]) -> ASGIApp:
    """The page, its models, their generations, and more, for requests that carry the token."""
    html = PAGE.read_text(encoding="utf-8")

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}';"
            " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
            " frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",  # the address holds the token
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        return HTMLResponse(html.replace("{nonce}", nonce), headers=headers)

    async def models(request: Request) -> Response:
        return JSONResponse([player.described() for player in players])

    def generate(player: Player) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                wanted = adapter(SamplingRequest).validate_json(await request.body())
                tokens = stream_tokens(player, wanted)
            except ClientDisconnect:
                return Response()
            except ValidationError as error:
                return PlainTextResponse(reason_of(error), status_code=422)
            except InputError as error:
                return PlainTextResponse(str(error), status_code=422)

            async def lines() -> AsyncIterator[str]:
                try:
                    while made := turn(tokens):
                        yield "".join(f"{json.dumps(asdict(token))}\n" for token in made)
                        await asyncio.sleep(0)
                except ServiceError as error:  # an edited script fails
                    yield f"{json.dumps({'error': str(error)})}\n"

            return Queued(lines(), player.lock)

        return answer

    routes = [Route("/", page), Route("/models", models), *more]
    for number, player in enumerate(players):
        routes.append(Route(f"/generate/{number}", generate(player), methods=["POST"]))
    return guarded(Starlette(routes=routes), port, token)


def problem(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error in the shape of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


def guarded(app: ASGIApp, port: int, token: str) -> ASGIApp:
    """Refuse cross-site requests: without the token, or with a foreign Host (DNS rebinding)."""
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        request, answer = Request(scope), app
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")  # an API key
        given = request.query_params.get("token", bearer)
        if request.headers.get("host") not in hosts:
            answer = PlainTextResponse(f"the host must be 127.0.0.1:{port}", status_code=400)
            if request.url.path.startswith("/v1/"):
                answer = problem(400, f"the host must be 127.0.0.1:{port}")
        elif not secrets.compare_digest(given.encode(), token.encode()):
            answer = PlainTextResponse("open the address that was printed", status_code=403)
            if request.url.path.startswith("/v1/"):
                answer = problem(401, "the API key is the token of the address", "invalid_api_key")
        await answer(scope, receive, send)

    return guard


def listen(port: int) -> socket.socket:
    """Listen on loopback; port 0 takes a free one. Raises InputError if the port is taken."""
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InputError(
            f"--port {port}: {error.strerror}; leave it out to take a free one"
        ) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # of its connections too
    return listener


def make_server(
    players: Sequence[Player], port: int, token: str, more: Sequence[Route] = ()
) -> uvicorn.Server:
    """A server of the page. Ctrl-C ends its generations and raises KeyboardInterrupt from `run`."""
    # Leave a core to the browser: where it takes one of two, two threads wait for each other, and
    # a small model made 55 tokens/s instead of 600.
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(players, port, token, more),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=0,
        )
    )
    # It logs as errors the generations that Ctrl-C cancels, and those that nobody reads.
    unread = "ASGI callable returned without completing response."
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not server.should_exit and record.getMessage() != unread
    )
    return server
