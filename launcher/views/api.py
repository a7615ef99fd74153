"""The part of OpenAI's HTTP API that chats and completes, for the models of `play`.

platform.openai.com/docs/api-reference says what requests, answers and errors hold. What would
change an answer and cannot be done here, such as several choices or tools, is refused; the rest is
ignored.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launcher.errors import ServiceError
from launcher.files.documents import first_problem
from launcher.models.chat import Message
from launcher.models.sample import encode
from launcher.views.play import Player, Queued, SamplingRequest, Token, problem, stream_tokens, turn

Most = Annotated[int, Field(ge=1)] | None


class Wanted(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(allow_inf_nan=False, extra="allow")

    model: str | None = None  # needed only where there are several
    max_tokens: Most = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class Part(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def plain(self) -> Message:
        parts = self.content if isinstance(self.content, str) else (p.text for p in self.content)
        return Message("system" if self.role == "developer" else self.role, "".join(parts))


class WantedChat(Wanted):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Most = None


class WantedText(Wanted):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)] | None = None
    logprobs: None = None  # a number; 0 asks for some too


# What cannot be done here; and the values that ask for nothing, besides 0 and what is empty.
MISSING = (
    *("tools", "functions", "n", "best_of", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("logprobs", "response_format", "echo", "suffix"),
)
USUAL: dict[str, Any] = {"n": 1, "best_of": 1, "response_format": {"type": "text"}}
LEAVE_OUT = "not supported here; leave it out"
REFUSALS = {
    "content": "must be text, as a string or as parts of type text; images and null are not taken",
    "prompt": "must be one text, not several and not ids",
    "stop": "must be a string or a list of strings",
    "logprobs": LEAVE_OUT,
}


def reason(error: ValidationError) -> str:
    """The first thing that is wrong, in a sentence of ours where its field has one."""
    names = [str(each) for each in error.errors()[0]["loc"]]
    for n, name in enumerate(names, 1):
        if name in REFUSALS:
            return f"{'.'.join(names[:n])}: {REFUSALS[name]}"
    return first_problem(error)


@dataclass
class Answer:
    kind: str  # chat.completion or text_completion
    model: str
    prompt_tokens: int
    tokens: int = 0
    full: bool = False  # whether the text reached max_tokens
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def said(self, made: Sequence[Token]) -> str:
        self.tokens += sum(bool(token.likely) for token in made)
        # What is left of a text that ran out comes after its last token, as that of no token.
        self.full = not made[-1].likely
        return "".join(token.text for token in made)

    @property
    def usage(self) -> dict[str, int]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        return {**counts, "total_tokens": sum(counts.values())}

    def body(self, text: str | None, *, chunk: bool, first: bool = False) -> dict[str, Any]:
        """The answer, or a chunk of it; the text None ends it."""
        ended, why = not chunk or text is None, "length" if self.full else "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": why if ended else None}
        chat = self.kind == "chat.completion"
        if chat and chunk:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {} if text is None else {**role, "content": text}
        elif chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text or ""
        head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{self.id}", "created": self.created}
        kind = f"{self.kind}{'.chunk' * (chat and chunk)}"
        return {**head, "object": kind, "model": self.model, "choices": [choice]}


def routes(players: Sequence[Player]) -> list[Route]:
    """/v1/models, /v1/chat/completions and /v1/completions."""
    # A model goes by its name; also by the id of its job, and by its title on the page.
    by_name = {player.name: player for player in players}
    by_title = {player.title: player for player in players}
    by_job_id = {player.job_id: player for player in players if player.job_id}
    by_any_name = {**by_title, **by_job_id, **by_name}

    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "sm-nanogpt"}

    async def models(request: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [*map(entry, by_name)]})

    async def model(request: HTTPRequest) -> Response:
        name = request.path_params["name"]
        # A directory begins with a slash, which is one with that before it.
        player = by_any_name.get(name) or by_any_name.get(f"/{name}")
        if player is None:
            return problem(404, f"no model {name!r}", "model_not_found")
        return JSONResponse(entry(player.name))

    async def complete(request: HTTPRequest, kind: type[WantedChat] | type[WantedText]) -> Response:
        try:
            wanted = kind.model_validate_json(await request.body())
        except ValidationError as error:
            return problem(400, reason(error))
        for name, value in (wanted.model_extra or {}).items():
            if name in MISSING and value and value != USUAL.get(name):
                return problem(400, f"{name}: {LEAVE_OUT}")
        if wanted.model is None and len(by_name) > 1:
            return problem(400, f"model: must be one of {', '.join(by_name)}")
        player = players[0] if wanted.model is None else by_any_name.get(wanted.model)
        if player is None:
            said = f"no model {wanted.model!r}; there is {', '.join(by_name)}"
            return problem(404, said, "model_not_found")
        answer, tokens = begin(player, wanted)
        if wanted.stream:
            usage = bool((wanted.stream_options or {}).get("include_usage"))
            return Queued(events(answer, tokens, usage), player.lock, "text/event-stream")
        parts = []
        async with player.lock:
            while made := turn(tokens):
                parts.append(answer.said(made))
                if await request.is_disconnected():
                    break
        body = answer.body("".join(parts), chunk=False)
        return JSONResponse({**body, "usage": answer.usage})

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", partial(complete, kind=WantedChat), methods=["POST"]),
        Route("/v1/completions", partial(complete, kind=WantedText), methods=["POST"]),
    ]


def begin(player: Player, wanted: WantedChat | WantedText) -> tuple[Answer, Iterator[Token]]:
    """The answer to a request, and its tokens. Raises InputError."""
    size, most = player.model.config.block_size, wanted.max_tokens
    if isinstance(wanted, WantedChat):
        most = most if wanted.max_completion_tokens is None else wanted.max_completion_tokens
        messages = [message.plain() for message in wanted.messages]
        _, ids, most = player.chat.fitting(messages, size if most is None else most)
        kind = "chat.completion"
    else:
        prompt = "".join(wanted.prompt or "")
        ids = encode(player.tokenizer, prompt, size) if prompt else [player.tokenizer.start]
        kind, most = "text_completion", 16 if most is None else most
    request = SamplingRequest(
        max_new_tokens=most,
        temperature=1.0 if wanted.temperature is None else wanted.temperature,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        seed=secrets.randbits(31) if wanted.seed is None else wanted.seed,
        stop=wanted.stop or "",
    )
    return Answer(kind, player.name, len(ids)), stream_tokens(player, request, ids)


async def events(answer: Answer, tokens: Iterator[Token], usage: bool) -> AsyncIterator[str]:
    """Server-sent events: chunks, then perhaps the usage, then [DONE]."""

    def event(body: dict[str, Any]) -> str:
        return f"data: {json.dumps({'usage': None, **body} if usage else body)}\n\n"

    first = True
    try:
        while made := turn(tokens):
            text = answer.said(made)
            if text or first:
                yield event(answer.body(text, chunk=True, first=first))
            first = False
            await asyncio.sleep(0)  # so that others are served, and one who left is noticed
        yield event(answer.body(None, chunk=True))
        if usage:
            yield event({**answer.body(None, chunk=True), "choices": [], "usage": answer.usage})
        yield "data: [DONE]\n\n"
    except ServiceError as error:  # an edited script fails
        yield event({"error": {"message": str(error), "type": "server_error"}})
