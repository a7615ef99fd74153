"""Serve the part of OpenAI's HTTP API that chats and completes, for the models of `play`.

platform.openai.com/docs/api-reference says what requests, answers, and errors hold. A field that
would change an answer and that is not supported, such as several choices or tools, is refused.
Other unknown fields are ignored.

The models compute in the server's thread, in short turns. In a second thread, torch took three
times as long for each token of a small model, and two models would share the same cores anyway. An
answer ends when its connection is closed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files.documents import first_problem
from sm_nanogpt.launcher.models.chat import Message
from sm_nanogpt.launcher.models.sample import encode_prompt, stream_samples
from sm_nanogpt.launcher.views.play import ServedModel, error_response

# The server attends to other requests after so many seconds, or after one token that takes longer.
TURN_SECONDS = 0.03

Limit = Annotated[int, Field(ge=1)] | None
DEFAULT_TEXT_LIMIT = 16  # tokens of a completion, as OpenAI has it
SAMPLING = {"temperature", "top_k", "top_p", "seed"}  # fields that stream_samples takes


class APIRequest(BaseModel):
    """The fields that requests of both kinds have."""

    model_config = ConfigDict(allow_inf_nan=False, extra="allow")

    model: str | None = None  # required if the server has several models
    max_tokens: Limit = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # a field of many other servers, not of OpenAI's
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        """The texts at which an answer ends. They are not part of it."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


class ContentPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]

    def as_message(self) -> Message:
        """Return the message with its parts joined. The role `developer` becomes `system`."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return Message(role, self.content)
        return Message(role, "".join(part.text for part in self.content))


class ChatRequest(APIRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Limit = None


class TextRequest(APIRequest):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)] | None = None
    logprobs: None = None  # a number is refused: 0 also asks for probabilities


# Fields that are refused, each with its value that asks for nothing. 0 and empty values ask for
# nothing either.
UNSUPPORTED: dict[str, Any] = {
    "tools": None,
    "functions": None,
    "n": 1,
    "best_of": 1,
    "frequency_penalty": None,
    "presence_penalty": None,
    "logit_bias": None,
    "logprobs": None,
    "response_format": {"type": "text"},
    "echo": None,
    "suffix": None,
}
LEAVE_OUT = "not supported here; leave it out"
# What is wrong with a field that pydantic refused, for fields whose types say too little.
REFUSALS = {
    "content": "must be text, as a string or as parts of type text; images and null are not taken",
    "prompt": "must be one text, not several and not ids",
    "stop": "must be a string or a list of strings",
    "logprobs": LEAVE_OUT,
}


def problem_of_request(error: ValidationError) -> str:
    """The first problem of a request: that of REFUSALS, if it has the field, or else pydantic's."""
    location = [str(part) for part in error.errors()[0]["loc"]]
    for n, name in enumerate(location, 1):
        if name in REFUSALS:
            return f"{'.'.join(location[:n])}: {REFUSALS[name]}"
    return first_problem(error)


@dataclass(frozen=True)
class Token:
    """The piece of text that a token completes; or, if not is_drawn, the rest of a text after its
    last token."""

    text: str
    is_drawn: bool = True


@dataclass
class ChatAnswer:
    """An answer without its text: the fields of its documents, and counts of its tokens so far."""

    is_chat: bool
    model: str
    prompt_tokens: int
    completion_tokens: int = 0
    reached_limit: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, turn: Sequence[Token]) -> str:
        """Count tokens; return their text."""
        self.completion_tokens += sum(token.is_drawn for token in turn)
        # The last piece of a text that reached its limit belongs to no token.
        self.reached_limit = not turn[-1].is_drawn
        return "".join(token.text for token in turn)

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    @property
    def finish_reason(self) -> str:
        return "length" if self.reached_limit else "stop"

    def body(self, text: str) -> dict[str, Any]:
        """Return the whole answer."""
        message = {"role": "assistant", "content": text}
        return {**self.document("message", message, self.finish_reason), "usage": self.usage}

    def chunk(self, text: str, is_first: bool) -> dict[str, Any]:
        """Return a part of the answer."""
        delta = {"content": text}
        if is_first:
            delta["role"] = "assistant"
        return self.document("delta", delta, None)

    def last_chunk(self) -> dict[str, Any]:
        """Return the part that ends the answer."""
        return self.document("delta", {}, self.finish_reason)

    def document(
        self, field: str, message: dict[str, str], finish_reason: str | None
    ) -> dict[str, Any]:
        """Return a document with one choice, which holds a text or, in a chat, a message.

        field is that of the message: `message`, or `delta` in a part of an answer.
        """
        prefix = "cmpl"
        kind = "text_completion"
        choice: dict[str, Any] = {"text": message.get("content", "")}
        if self.is_chat:
            prefix = "chatcmpl"
            kind = "chat.completion" if field == "message" else "chat.completion.chunk"
            choice = {field: message}
        return {
            "id": f"{prefix}-{self.id}",
            "created": self.created,
            "object": kind,
            "model": self.model,
            "choices": [{"index": 0, "finish_reason": finish_reason, **choice}],
        }


def routes(served_models: Sequence[ServedModel]) -> list[Route]:
    """Return the routes /v1/models, /v1/chat/completions and /v1/completions."""
    # A request may name a model by its name, by the id of its job, or by its title on the page.
    by_name = {served.name: served for served in served_models}
    by_title = {served.title: served for served in served_models}
    by_job_id = {served.job_id: served for served in served_models if served.job_id}
    by_any_name = {**by_title, **by_job_id, **by_name}

    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "sm-nanogpt"}

    async def models(request: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [*map(entry, by_name)]})

    async def model(request: HTTPRequest) -> Response:
        name = request.path_params["name"]
        # A name that is a path begins with a slash, which was merged with the one before it.
        served = by_any_name.get(name) or by_any_name.get(f"/{name}")
        if served is None:
            return error_response(404, f"no model {name!r}", "model_not_found")
        return JSONResponse(entry(served.name))

    async def complete(
        http_request: HTTPRequest, kind: type[ChatRequest] | type[TextRequest]
    ) -> Response:
        request = read_request(await http_request.body(), kind)
        if request.model is None and len(by_name) > 1:
            raise InputError(f"model: must be one of {', '.join(by_name)}")
        served = served_models[0] if request.model is None else by_any_name.get(request.model)
        if served is None:
            message = f"no model {request.model!r}; there is {', '.join(by_name)}"
            return error_response(404, message, "model_not_found")

        answer, tokens = start_answer(served, request)
        if request.stream:
            has_usage = bool((request.stream_options or {}).get("include_usage"))
            return LockedStream(events(answer, tokens, has_usage), served.lock, "text/event-stream")
        text = ""
        async with served.lock:
            while turn := next_turn(tokens):
                text += answer.add(turn)
                if await http_request.is_disconnected():
                    break
        return JSONResponse(answer.body(text))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", partial(complete, kind=ChatRequest), methods=["POST"]),
        Route("/v1/completions", partial(complete, kind=TextRequest), methods=["POST"]),
    ]


def read_request(
    content: bytes, kind: type[ChatRequest] | type[TextRequest]
) -> ChatRequest | TextRequest:
    """Read a request of a kind. Raises InputError if it is wrong, or asks for what is not
    supported."""
    try:
        request = kind.model_validate_json(content)
    except ValidationError as error:
        raise InputError(problem_of_request(error)) from None
    for name, value in (request.model_extra or {}).items():
        if name in UNSUPPORTED and value and value != UNSUPPORTED[name]:
            raise InputError(f"{name}: {LEAVE_OUT}")
    return request


def start_answer(
    served: ServedModel, request: ChatRequest | TextRequest
) -> tuple[ChatAnswer, Iterator[Token]]:
    """Start to answer a request: return the empty answer, and its tokens. Raises InputError."""
    if isinstance(request, ChatRequest):
        ids, limit = chat_prompt(served, request)
    else:
        ids, limit = text_prompt(served, request)

    sampling: dict[str, Any] = {"temperature": 1.0, "seed": secrets.randbits(31)}
    sampling |= request.model_dump(include=SAMPLING, exclude_none=True)
    pieces = stream_samples(served.model, served.tokenizer, ids, limit, **sampling)
    tokens = (
        Token(piece, is_drawn=index < limit)
        for index, (piece,) in enumerate(pieces)  # a list with the piece of the only sample
    )

    answer = ChatAnswer(isinstance(request, ChatRequest), served.name, len(ids))
    return answer, until_stop(tokens, request.stops)


def chat_prompt(served: ServedModel, request: ChatRequest) -> tuple[list[int], int]:
    """Return the ids of a conversation, and the limit of tokens of its answer."""
    limit = request.max_completion_tokens or request.max_tokens or served.model.config.block_size
    messages = [message.as_message() for message in request.messages]
    prompt = served.chat.fit(messages, limit)
    return prompt.ids, prompt.max_new_tokens


def text_prompt(served: ServedModel, request: TextRequest) -> tuple[list[int], int]:
    """Return the ids of a text, and the limit of tokens that continue it."""
    limit = request.max_tokens or DEFAULT_TEXT_LIMIT
    text = request.prompt
    if isinstance(text, list):
        (text,) = text  # the only one that TextRequest allows
    if not text:
        return [served.tokenizer.start], limit
    return encode_prompt(served.tokenizer, text, served.model.config.block_size), limit


def until_stop(tokens: Iterator[Token], stops: Sequence[str]) -> Iterator[Token]:
    """Yield tokens up to the first text of `stops`.

    The first is the one that is complete first; if several are, the longest of them. Tokens in
    which a stop may begin are held back until that is decided.
    """
    held_tokens: list[Token] = []
    for token in tokens:
        held_tokens.append(token)
        text = "".join(token.text for token in held_tokens)
        stop_start = find_stop(text, stops)
        n_free = stop_start  # the characters that belong to the answer
        if n_free is None:
            n_free = len(text) - count_begun_characters(text, stops)
        while held_tokens and len(held_tokens[0].text) <= n_free:
            n_free -= len(held_tokens[0].text)
            yield held_tokens.pop(0)
        if stop_start is not None:
            if n_free:
                yield replace(held_tokens[0], text=held_tokens[0].text[:n_free])
            return
    yield from held_tokens


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the stop begins that ends first, or the longest of several; None if there is
    none."""
    spans = []  # end, start
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            spans.append((start + len(stop), start))
    return min(spans)[1] if spans else None


def count_begun_characters(text: str, stops: Sequence[str]) -> int:
    """Count the characters at the end of a text that may be the beginning of a stop."""
    n_begun = 0
    for stop in stops:
        for n in range(n_begun + 1, min(len(stop), len(text)) + 1):
            if text.endswith(stop[:n]):
                n_begun = n
    return n_begun


def next_turn(tokens: Iterator[Token]) -> list[Token]:
    """Return the tokens of the next turn, at least one; [] at the end of the answer."""
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


async def events(
    answer: ChatAnswer, tokens: Iterator[Token], has_usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events: chunks, then the usage if has_usage, then [DONE]."""

    def event(body: dict[str, Any]) -> str:
        if has_usage:
            body = {"usage": None, **body}
        return f"data: {json.dumps(body)}\n\n"

    is_first = True
    try:
        while turn := next_turn(tokens):
            text = answer.add(turn)
            if text or is_first:
                yield event(answer.chunk(text, is_first))
            is_first = False
            await asyncio.sleep(0)  # serves others, and ends if the client has left
        yield event(answer.last_chunk())
        if has_usage:
            yield event({**answer.last_chunk(), "choices": [], "usage": answer.usage})
        yield "data: [DONE]\n\n"
    except ServiceError as error:  # the code of an edited folder failed
        yield event({"error": {"message": str(error), "type": "server_error"}})
