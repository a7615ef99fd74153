"""The API of play, as OpenAI's answers."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from models import lively, tokenizer_of
from served import LETTERS, served
from starlette.testclient import TestClient
from talks import HELLO, exchange, ids_of

from sm_nanogpt import load_model
from sm_nanogpt.launcher.models.chat import Message
from sm_nanogpt.launcher.views import api
from sm_nanogpt.launcher.views.play import ServedModel, make_app


@pytest.fixture
def served_model(directory):
    return ServedModel("mine", *load_model(directory))


@pytest.fixture(scope="module")
def openai():
    """OpenAI's package, whose import takes a second."""
    import openai

    return openai


@pytest.fixture
def client(served_model, openai):
    """OpenAI's own client of the server, without a socket."""

    def make(key: str = "secret", path: str = "/v1") -> Any:
        app = make_app([served_model], "secret", api.routes([served_model]))
        return openai.OpenAI(
            base_url=f"http://127.0.0.1{path}",
            api_key=key,
            http_client=TestClient(app, base_url="http://127.0.0.1"),
            max_retries=0,
        )

    return make


def test_the_client_of_openai_chats_and_completes(client, served_model, chat, monkeypatch, openai):
    monkeypatch.setattr("sm_nanogpt.launcher.views.api.TURN_SECONDS", 0)  # each token is a chunk
    api_client = client()
    (model,) = api_client.models.list().data
    assert api_client.models.retrieve("mine") == model
    with pytest.raises(openai.NotFoundError):
        api_client.models.retrieve("other")
    wish: Any = dict(
        model="mine",
        messages=exchange("What is 3 + 3?", "6")[:1],
        temperature=0,
        max_tokens=6,
    )
    answer = api_client.chat.completions.create(**wish)
    text = answer.choices[0].message.content
    assert f"{text}\n" == chat("What is 3 + 3?").out
    ids = ids_of(served_model.chat, Message("user", "What is 3 + 3?"))
    assert answer.usage.prompt_tokens == len(ids)
    short = api_client.chat.completions.create(**{**wish, "max_tokens": 1})
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 1
    newer = api_client.chat.completions.create(**wish, max_completion_tokens=1)
    assert newer.usage == short.usage
    parts = [{"type": "text", "text": text} for text in ("What is ", "3 + 3?")]
    conversation = [{"role": "developer", "content": "Hi"}, {"role": "user", "content": parts}]
    completion = api_client.chat.completions.create(**{**wish, "messages": conversation})
    messages = [Message("system", "Hi"), Message("user", "What is 3 + 3?")]
    assert completion.usage.prompt_tokens == len(ids_of(served_model.chat, *messages))
    *chunks, last = api_client.chat.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage == answer.usage
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == text
    first_role, *other_roles = [delta.role for delta in deltas]
    assert first_role == "assistant"
    assert not any(other_roles)
    wish = dict(model="mine", prompt="What", max_tokens=5, seed=1)
    completed = api_client.completions.create(**wish).choices[0].text
    streamed = api_client.completions.create(**wish, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == completed
    (cut,) = api_client.completions.create(**wish, stop=[completed[1:2]]).choices
    assert cut.text == completed.partition(completed[1:2])[0]
    assert cut.finish_reason == "stop"


def test_what_a_request_leaves_out_has_the_values_of_openai(client, served_model):
    served_model.tokenizer.ends = set()

    def text(**wish):
        answer = client().completions.create(model="mine", prompt="The", max_tokens=30, **wish)
        return answer.choices[0].text

    assert text(seed=1) == text(seed=1, temperature=1, top_p=1)
    assert text(seed=1) != text(temperature=0) == text(top_p=1e-9)
    assert text() != text()  # each has a seed of its own


def test_an_answer_ends_where_the_context_does(client, served_model):
    size = served_model.model.config.block_size
    served_model.tokenizer.ends = set()
    messages = exchange("What is 3 + 3?", "6") * 4 + HELLO
    for limit in ({}, {"max_tokens": 10 * size}):
        usage = client().chat.completions.create(model="mine", messages=messages, **limit).usage
        assert usage.prompt_tokens <= size - size // 4
        assert usage.total_tokens == size
    usage = client().completions.create(model="mine", prompt="a " * size, max_tokens=1).usage
    assert usage.prompt_tokens == size


def test_a_model_that_fails_is_an_error_of_the_server(client, monkeypatch, openai):
    monkeypatch.setattr(
        "sm_nanogpt.launcher.models.engine.generate", lambda *_, **__: map(int, "x")
    )
    wish: Any = dict(model="mine", prompt="The")
    with pytest.raises(openai.InternalServerError):
        client().completions.create(**wish)
    with pytest.raises(openai.APIError):
        [*client().completions.create(**wish, stream=True)]


@pytest.fixture
def refusal(client, openai):
    """The error for a request that chats, or completes a prompt, with these changes."""

    def refusal(**changes: Any) -> Any:
        wish: dict[str, Any] = {"model": "mine", **changes}
        create = client().completions.create
        if "prompt" not in wish:
            wish = {"messages": HELLO, **wish}
            create = client().chat.completions.create
        with pytest.raises(openai.APIStatusError) as error:
            create(**wish)
        return error.value

    return refusal


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model": "other"}, 404),
        ({"messages": []}, 400),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400),
        ({"temperature": -1}, 400),
        ({"response_format": {"type": "json_object"}}, 400),
        ({"prompt": "a", "logprobs": 1}, 400),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(refusal, changes, status):
    error = refusal(**changes)
    assert error.status_code == status
    assert error.body.keys() == {"message", "type", "param", "code"}


IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content: must be text"),
        ({"prompt": ["a", "b"]}, "prompt: must be one text"),
        ({"stop": [1]}, "stop: must be a string or a list of strings"),
        ({"n": 2}, "n: not supported here"),
    ],
)
def test_a_refusal_is_a_sentence_of_our_own(refusal, changes, message):
    assert refusal(**changes).body["message"].startswith(message)


def test_a_message_beyond_the_context_has_the_code_of_openai(refusal):
    error = refusal(messages=[{"role": "user", "content": "a " * 10**6}])
    assert error.code == "context_length_exceeded"


def test_any_number_of_stop_strings_is_taken_in_any_order(client):
    """OpenAI takes four, and Continue sends more."""
    wish: Any = dict(model="mine", prompt="What", max_tokens=20, temperature=2, seed=1)
    text = client().completions.create(**wish).choices[0].text
    stops = [text[3:5], text[2:5], text[4:7], "<1>", "<2>", "<3>"]
    for order in (stops, stops[::-1]):
        (choice,) = client().completions.create(**wish, stop=order).choices
        assert choice.text == text[:2]


def test_a_base_url_without_v1_is_told(client, openai):
    without = client(path="/")
    for call in (
        without.models.list,
        partial(without.chat.completions.create, model="mine", messages=HELLO),
    ):
        with pytest.raises(openai.NotFoundError, match="/v1 is missing from the base URL"):
            call()


@pytest.fixture
def ask(served_model):
    """Asks the API of two models, one of which is that of a job with a name."""
    named = replace(served_model, name="named", job_id="sm-nanogpt-20261128-182734-6306f7")
    other = replace(served_model, name="/models/other")

    def ask(path: str, body: Any = None, models: int = 2) -> Any:
        served_models = [named, other][:models]
        http = TestClient(make_app(served_models, "t", api.routes(served_models)))
        method = "GET" if body is None else "POST"
        headers = {"authorization": "bearer t"}
        url = f"http://testserver{path}"
        return http.request(method, url, json=body, headers=headers)

    return ask


def test_several_slashes_are_one(ask):
    models = ask("//v1///models/").json()["data"]
    assert [model["id"] for model in models] == ["named", "/models/other"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1beta/models", "/v1 is missing from the base URL"),
        ("//v1//v1", "/v1 is twice in the base URL"),
        ("/v1", "/v1/models lists the models"),
        ("/v1/responses", "GET /v1/responses is not there"),
    ],
)
def test_a_wrong_path_says_what_is_wrong_with_it(ask, path, hint):
    answer = ask(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith(hint)


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("sm-nanogpt-20261128-182734-6306f7", "named"),
        ("named (…6306f7)", "named"),
        ("/models/other", "/models/other"),
    ],
)
def test_a_model_answers_to_each_of_its_names(ask, name, listed):
    done = ask("/v1/completions", {"model": name, "prompt": "The", "max_tokens": 1})
    assert done.status_code == 200
    assert done.json()["model"] == listed
    assert ask(f"/v1/models/{name}").json()["id"] == listed


def test_a_model_alone_needs_no_name(ask):
    assert ask("/v1/completions", {"prompt": "The", "max_tokens": 1}, models=1).status_code == 200
    several = ask("/v1/completions", {"model": None, "prompt": "The"})
    assert several.status_code == 400
    assert "named, /models/other" in several.json()["error"]["message"]


def test_a_prompt_of_null_is_as_one_left_out(ask):
    wish = {"model": "named", "max_tokens": 5, "seed": 1}
    without = ask("/v1/completions", wish).json()
    of_null = ask("/v1/completions", {**wish, "prompt": None}).json()
    assert of_null["choices"] == without["choices"]
    assert of_null["usage"] == without["usage"]


def test_a_wrong_method_is_told_the_right_one(client, openai):
    with pytest.raises(openai.APIStatusError, match="405") as caught:
        client().get("/chat/completions", cast_to=object)
    assert caught.value.status_code == 405
    assert caught.value.response.headers["allow"] == "POST"
    with pytest.raises(openai.NotFoundError, match="GET /v1/other is not there"):
        client().get("/other", cast_to=object)


@pytest.mark.parametrize(
    ("origin", "status", "allowed"),
    [("http://localhost:3000", 200, "http://localhost:3000"), ("http://localhost:3001", 400, None)],
)
def test_only_a_named_origin_may_ask_from_its_pages(served_model, origin, status, allowed):
    app = make_app([served_model], "secret", api.routes([served_model]), ["http://localhost:3000"])
    http = TestClient(app, headers={"origin": origin})
    question = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-os",
    }
    assert http.options("/v1/chat/completions", headers=question).status_code == status
    for key in ("secret", "wrong"):  # a page reads why it is refused
        answer = http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.fixture
def api_of(openai):
    """OpenAI's own client of a server on a socket."""
    with contextlib.ExitStack() as stack:

        def make(served_model: ServedModel) -> Any:
            site = stack.enter_context(served([served_model]))
            url = f"http://127.0.0.1:{site.port}/v1"
            return openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)

        yield make


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_answer(api_of, streams, openai):
    api_client = api_of(ServedModel("mine", lively(), tokenizer_of(LETTERS)))
    endless: Any = dict(model="mine", prompt="a", max_tokens=10**9)
    if streams:
        stream = api_client.completions.create(**endless, stream=True)
        next(stream)
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            api_client.with_options(timeout=0.3).completions.create(**endless)
    # It would wait for the other one.
    assert api_client.completions.create(model="mine", prompt="a", max_tokens=1).choices


def test_several_clients_wait_their_turn(api_of, served_model):
    api_client = api_of(served_model)
    wish: Any = dict(model="mine", messages=HELLO, temperature=0, max_tokens=4)

    def answer(n: int) -> Any:
        chunks = api_client.chat.completions.create(**wish, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = api_client.chat.completions.create(**wish).choices[0].message.content
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(answer, range(6))) == {alone}


def test_a_request_needs_the_key(client, openai):
    with pytest.raises(openai.AuthenticationError):
        client("wrong").models.list()


def test_a_base_model_refuses_to_chat_and_completes(tuned):
    base, _, _ = tuned
    served_model = ServedModel("base", *load_model(base.directory / "hosts/algo-1/model"))
    app = make_app([served_model], "t", api.routes([served_model]))
    http = TestClient(app, headers={"authorization": "bearer t"})
    refused = http.post("/v1/chat/completions", json={"model": "base", "messages": HELLO})
    done = http.post("/v1/completions", json={"model": "base", "prompt": "The", "seed": 1})
    assert refused.status_code == 400
    assert done.status_code == 200
    assert done.json()["usage"]["completion_tokens"] == 16
