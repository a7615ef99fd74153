"""The page on which people try a model, and prompts in the terminal."""

from __future__ import annotations

import json
import re
import shutil
import signal
import struct
from dataclasses import replace
from datetime import datetime
from typing import Any

import launching
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import lively, tokenizer_of
from served import LETTERS, WISH, Site

from sm_nanogpt import Job, Settings, stream_samples
from sm_nanogpt.launcher.cli.models import open_served_model
from sm_nanogpt.launcher.tracking import TrackedJob
from sm_nanogpt.launcher.views.api import Token, until_stop
from sm_nanogpt.launcher.views.model_card import card_for, summary_in
from sm_nanogpt.launcher.views.model_page import page_of
from sm_nanogpt.launcher.views.play import ServedModel, listen

TWENTY = ": " + ", ".join(repr(chr(code)) for code in range(1000, 1020)) + " and more; replace"


def expected(served_model: ServedModel, temperature: float = 0.8) -> str:
    """What the library generates for WISH."""
    columns = stream_samples(
        served_model.model, served_model.tokenizer, "abc", 40, 1, temperature, seed=7
    )
    return "".join(piece for (piece,) in columns)


# -- the server ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/v1/models", "/nothing"])
def test_a_request_without_the_key_is_refused(site, path):
    assert site.connect(path, token="").status == 401


@pytest.mark.parametrize("token", ["secreT", "%C3%A9"])
def test_another_key_is_refused(site, token):
    assert site.connect("/v1/models", token=token).status == 401


def test_a_host_of_any_name_needs_the_key_alone(site):
    """A page that rebinds its name to this machine does not know the key."""
    assert site.connect("/v1/models", host="host.docker.internal:8765").status == 200
    assert site.connect("/v1/models", host="host.docker.internal:8765", token="").status == 401


def test_the_served_page_has_the_script_of_a_saved_one(site):
    page = site.connect("/").read().decode()
    saved = page_of(lively(), {}, tokenizer_of(LETTERS), "a model", {})
    served_script, saved_script = (
        re.findall(r"<script>.*</script>", html, re.DOTALL) for html in (page, saved)
    )
    assert served_script == saved_script
    assert "connect-src 'self'" in page
    assert "connect-src" not in saved
    assert not re.search(r"https?://|src=", page)
    headers = site.connect("/").headers
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_every_input_of_the_page_has_a_label(site):
    page = site.connect("/").read().decode()
    inputs = set(re.findall(r'<(?:input|textarea) id="([\w-]+)"', page))
    assert inputs == set(re.findall(r'<label for="([\w-]+)"', page))
    assert inputs >= {"prompt", "temperature", "length", "top-k", "top-p", "seed", "stop", "system"}


def header_of(site: Site, number: int) -> Any:
    """What the server says of a model, without its tensors."""
    content = site.connect(f"/page/model/{number}").read()
    (size,) = struct.unpack("<I", content[:4])
    return json.loads(content[4 : 4 + size])


def test_the_page_gets_the_exact_weights_of_a_model(site):
    content = site.connect("/page/model/0").read()
    tensors = header_of(site, 0)["tensors"]
    parameters = [*site.models[0].model.parameters()]
    assert [tensor["size"] for tensor in tensors] == [p.numel() for p in parameters]
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert content.endswith(weights.numpy().tobytes())


def test_the_page_learns_why_the_server_computes_a_model(site, monkeypatch):
    assert "served" not in header_of(site, 0)
    served = header_of(site, 2)["served"]
    assert served["name"] == "model-2"
    assert "edited folder" in served["reason"]
    monkeypatch.setattr("sm_nanogpt.launcher.views.model_page.SLOW_PARAMETERS", 100)
    header = header_of(site, 0)
    assert header["served"] == {"name": "model-0", "reason": "it has over 100 parameters"}
    assert "tensors" not in header


def test_a_model_of_another_number_is_not_there(site):
    assert site.connect("/page/model/3").status == 404


# -- generations -----------------------------------------------------------------------------------


def test_each_model_generates_the_text_of_the_library(site):
    texts = [site.text(number) for number in range(3)]
    assert texts == [expected(served_model) for served_model in site.models]
    assert texts[0] != texts[1]
    assert site.text(temperature=0) == expected(site.models[0], 0)
    assert site.text(temperature=2, top_k=1) == expected(site.models[0], 0)


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"temperature": "hot"}, "temperature: "),
        ({"top_p": 2}, "top_p=2: must be over 0 and at most 1"),
        ({"prompt": "".join(map(chr, range(1000, 9000)))}, TWENTY),
    ],
)
def test_a_wrong_setting_is_refused_by_name(site, wish, named):
    answer = site.connect("/v1/completions", {"model": "model-0", **WISH, **wish})
    message = json.loads(answer.read())["error"]["message"]
    assert answer.status == 400
    assert "\n" not in message
    assert named in message


def test_a_stop_string_ends_the_text(site):
    text = expected(site.models[0])
    stop = text[20:23]
    assert site.text(stop=stop) == text[: text.index(stop)]


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@settings(derandomize=True, database=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4)), STOPS)
def test_the_stop_string_that_is_complete_first_ends_the_text(pieces, stops):
    """Of two that begin at the same place, the longer one ends it."""
    tokens = [token.text for token in until_stop(map(Token, pieces), stops)]
    assert "".join(tokens) == text_before_stop("".join(pieces), stops)
    *whole_tokens, _ = tokens or [""]
    assert whole_tokens == pieces[: len(whole_tokens)]


def text_before_stop(text: str, stops: list[str]) -> str:
    """The text before the stop that is complete first, or before the longest of several."""
    longest_first = sorted(stops, key=len, reverse=True)
    for end in range(len(text) + 1):
        for stop in longest_first:
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@pytest.mark.parametrize("stops", [["STOP"], ["TO", "STOP", "c" * 10**6] * 500])
def test_what_cannot_begin_a_stop_string_is_not_held_back(stops):
    pieces = iter(["a", "S", "b", "d"])
    tokens = until_stop(map(Token, pieces), stops)
    assert [next(tokens).text for _ in range(3)] == ["a", "S", "b"]
    assert list(pieces) == ["d"]


def start_endless(site: Site, token: str = "secret", **changes: Any) -> Any:
    """The answer to a request for a text without an end."""
    wish = {**WISH, "model": "model-0", "max_tokens": 10**9, "stream": True, **changes}
    return site.connect("/v1/completions", wish, token=token)


def test_a_reader_that_leaves_ends_the_generation(site):
    answer = start_endless(site)
    assert answer.readline()
    answer.close()
    assert len(site.text()) == 40  # it would wait for the other one


def test_an_open_generation_blocks_no_other_model(site):
    with start_endless(site) as answer:
        assert site.text(1) == expected(site.models[1])  # another model, at the same time
        assert answer.readline()


# -- the command -----------------------------------------------------------------------------------


def test_a_job_is_played_until_ctrl_c(job):
    directory = Job(job.job_id).model()
    with launching.started("play", "latest", directory, home=job.home) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline()
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})\n", url)
        assert match, url
        port, token = match.groups()
        site = Site(int(port), [])
        wish = {**WISH, "prompt": "The ", "temperature": 0}
        for number in range(2):
            assert site.connect(f"/page/model/{number}", token=token).status == 200
        answer = site.connect("/v1/completions", {**wish, "model": job.job_id}, token=token)
        text = json.loads(answer.read())["choices"][0]["text"]
        assert "The " + text == Job(job.job_id).sample("The ", 40, temperature=0)
        endless = {**wish, "model": job.job_id, "max_tokens": 10**9, "stream": True}
        with (
            site.connect("/v1/completions", endless, token=token) as answer,
            site.connect("/v1/completions", endless, token=token, waits=True),
        ):
            assert answer.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        assert process.stdout.read() == ""
        assert "Traceback" not in process.stderr.read()


def test_a_key_of_ones_own_is_kept(job):
    command = ("play", job.job_id, "--cors", "http://localhost:3000")
    env = {"SM_NANOGPT_API_KEY": "my key/1"}
    with launching.started(command, home=job.home, env=env) as process:
        assert process.stdout is not None
        port, token = re.findall(r":(\d+)/\?token=(.*)", process.stdout.readline())[0]
        assert Site(int(port), []).connect("/v1/models", token=token).status == 200
        assert token == "my%20key%2F1"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and "API key my key/1\n" in process.stderr.read()


def test_a_page_tells_the_loss_and_settings_of_a_job(job):
    model = job.directory / "hosts/algo-1/model"
    training = json.loads((model / "training.json").read_text())
    summary = summary_in(model)
    assert summary.startswith(f"val_loss {training['val_loss']:.4f} at step {training['step']}; ")
    assert "n_embd=32" in summary
    assert summary_in(job.directory) == ""


def test_a_page_tells_the_date_of_a_job(job):
    description = TrackedJob(job.job_id, Settings(home=job.home)).describe()
    noon = datetime(2026, 11, 30, 12)
    at_noon = replace(description, created=noon.timestamp())
    assert card_for(job.directory, at_noon)["date"] == "2026-11-30"
    assert "date" not in card_for(job.directory, None)


def test_a_job_is_played_by_its_name_and_settings(job):
    record = json.loads((job.directory / "job.json").read_text())
    record["job"]["name"] = "mine"
    (job.directory / "job.json").write_text(json.dumps(record))
    directory = Job(job.job_id).model()
    for model in (job.job_id, str(directory)):
        served_model = open_served_model(model, Settings(home=job.home), None, True)
        assert served_model.name == "mine"
        assert served_model.job_id == job.job_id
        assert served_model.title == f"mine (…{job.job_id[-6:]})"
        assert served_model.card["job"] == job.job_id
    shutil.copytree(directory, "elsewhere")
    served_model = open_served_model("./elsewhere", Settings(home=job.home), None, True)
    assert served_model.title == served_model.name == "./elsewhere"
    assert "n_embd=32" in served_model.card["settings"]


def test_an_origin_without_a_scheme_is_refused(cli):
    for origin in ("localhost:3000", "http://localhost:3000/"):
        assert cli("play", "x", "--cors", origin).failed(2, "is like http://localhost:3000")


def test_a_missing_model_or_a_taken_port_is_refused(cli):
    assert cli("play", "./nothing").failed(2, "./nothing: no such directory")
    assert cli("play", "sm-nanogpt-nothing").code == 1
    with listen(0) as taken:
        port = taken.getsockname()[1]
        assert cli("play", "some-job", "--port", port).failed(2, f"--port {port}: ")
