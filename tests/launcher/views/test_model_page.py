"""A model as one page: its engine in JavaScript, run by Node.js, against the sampler's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hard_strings import EXPRESSIONS, hard_strings, library_pieces, split_by, unlike_library
from jobs import copy_job
from model_pages import CONFIGS, GREEDY, LETTERS, greedy_ids, page_case, with_model
from models import lively
from playwright._impl._driver import compute_driver_executable

from sm_nanogpt import Job
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.conversations import Packed
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Corpus, Tokenizer
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.models.chat import Chat, Message
from sm_nanogpt.launcher.models.moments import Moment
from sm_nanogpt.launcher.models.quantization import quantize_model, with_quantized_weights
from sm_nanogpt.launcher.text.tokenizer import END_OF_TEXT
from sm_nanogpt.launcher.values import in_units
from sm_nanogpt.launcher.views import saved_page
from sm_nanogpt.launcher.views.model_page import PageMoment, page_of
from sm_nanogpt.launcher.views.saved_page import PageDraft, count_copied_bytes, save_page


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    """In which copies of the training text are looked for: drawing them takes most of the time."""
    monkeypatch.setattr(saved_page, "N_SAMPLES", 2)
    monkeypatch.setattr(saved_page, "SAMPLE_TOKENS", 20)


def node() -> str:
    return shutil.which("node") or str(compute_driver_executable()[0])


def run(page: str, code: str, tmp_path: Path) -> Any:
    """What `code`, an expression of JavaScript, gives with the model of a page."""
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0].split("// -- the page")[0]
    program = tmp_path / "program.js"
    program.write_text(
        f"{script}\n{with_model(page, code)}"
        ".then((result) => console.log(JSON.stringify(result)));\n"
    )
    done = subprocess.run([node(), str(program)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["characters", "grouped heads", "tied head", "conversations"])
def test_the_page_writes_what_the_sampler_writes(name, tokenizer, tmp_path):
    case = page_case(name, tokenizer)
    assert run(case.page, case.greedy_code, tmp_path) == case.greedy_ids


@pytest.mark.parametrize("name", ["tied head", "norm weights", "BPE"])
def test_the_page_computes_with_the_quantized_weights(name, tokenizer, tmp_path):
    case = page_case(name, tokenizer)
    page, ids = case.rounded(bits=5)
    assert run(page, case.greedy_code, tmp_path) == ids


@pytest.mark.parametrize(("name", "normalizer"), [("GPT-2", None), ("Qwen3.5", "NFC")])
def test_the_page_encodes_text_as_the_library(name, normalizer, tokenizer, text, tmp_path):
    tokenizer = split_by(tokenizer, EXPRESSIONS[name], normalizer)
    strings = [*hard_strings(), text[-2000:]]
    page = page_of(lively(), {}, tokenizer, "a model", {})
    code = f"{json.dumps(strings)}.map((text) => tokenizer.encode(text))"
    ids = run(page, code, tmp_path)
    assert unlike_library(strings, ids, tokenizer) == []


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_page_splits_text_as_the_library(name, tokenizer, tmp_path):
    """Also where no merge shows it in the ids."""
    tokenizer = split_by(tokenizer, EXPRESSIONS[name])
    strings = hard_strings()
    page = page_of(lively(), {}, tokenizer, "a model", {})
    code = f"""{json.dumps(strings)}.map((text) =>
        Array.from(text.matchAll(tokenizer.pattern), ([piece]) => piece))"""
    pieces = run(page, code, tmp_path)
    assert pieces == library_pieces(tokenizer, strings)


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "user", "content": "How are you? " * 4},
            {"role": "assistant", "content": "I am well."},
            {"role": "user", "content": "What is a line break?"},
        ],
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "How are you? " * 3},
            {"role": "assistant", "content": "I am well."},
            {"role": "user", "content": "And now?"},
        ],
    ],
    ids=["plain", "with an instruction"],
)
def test_the_page_reads_a_conversation_as_the_chat(messages, tokenizer, tmp_path):
    tokenizer = Tokenizer(tokenizer.document, END_OF_TEXT, chats=True)
    model = lively(Config(n_layer=1, n_head=1, n_embd=8, block_size=64))
    page = page_of(model, {}, tokenizer, "a model", {})
    code = f"tokenizer.encodeConversation({json.dumps(messages)}, 64, 20)"
    prompt = Chat(model, tokenizer).fit([Message(**message) for message in messages], 20)
    assert prompt.n_dropped == 2
    assert run(page, code, tmp_path) == {"ids": prompt.ids, "nDropped": 2}


def test_the_page_draws_from_the_likeliest_alone(tmp_path):
    page = page_of(lively(), {}, LETTERS, "a model", {})
    code = """[[2, 1], [0, 0.6], [0, 0.01]].map(([topK, topP]) => {
        const logits = [0.1, 0.4, 0.3, 0.2].map(Math.log);
        const random = randomBy(1);
        const settings = {temperature: 1, topK, topP};
        const ids = Array.from({length: 100}, () => draw(logits, settings, random));
        return [...new Set(ids)].sort();
    })"""
    assert run(page, code, tmp_path) == [[1, 2], [1, 2], [1]]


def test_the_page_names_characters_that_the_model_lacks(tmp_path):
    page = page_of(lively(), {}, LETTERS, "a model", {})
    code = "(() => { try { tokenizer.encode('aéz'); } catch (error) { return error.message; } })()"
    assert run(page, code, tmp_path) == "The model does not know é z"


def test_the_prompt_of_a_conversation_is_read_once(tmp_path):
    model = lively(CONFIGS["grouped heads"])
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    page = page_of(model, weights, LETTERS, "a model", {})
    first, second = [1, 2, 3, 4], [1, 2, 3, 5, 6]
    code = f"""[[...model.read({first})].length, [...model.read({second})].length,
        Array.from(model.logits)]"""
    n_first, n_second, logits = run(page, code, tmp_path)
    assert (n_first, n_second) == (4, 2)
    expected = model(torch.tensor([second]))[0, -1]
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-4, rtol=1e-4)


def test_each_moment_writes_what_the_sampler_writes(tmp_path):
    end, earlier = lively(CONFIGS["characters"]), lively(CONFIGS["characters"])
    with torch.no_grad():
        for parameter in earlier.parameters():
            parameter.copy_(parameter.flip(0))
    moments = [
        PageMoment(0, 8.0, quantize_model(earlier, bits=5)),
        PageMoment(7, None, quantize_model(end, bits=5)),
    ]
    page = page_of(end, moments[-1].parameters, LETTERS, "a model", {}, moments)
    assert run(page, "header.moments", tmp_path) == [
        {"generation": None, "step": 0, "loss": 8.0},
        {"generation": None, "step": 7, "loss": None},
    ]
    (block,) = re.findall(r'class="moment"[^>]*>([^<]*)<', page)
    weights = f"readTensors(header, unpack(await decompress({json.dumps(block)})).tensors)"
    greedy = GREEDY % ([1, 2], 50)
    code = f"[{greedy}, (model.weights = {weights}, model.clear(), 0), {greedy}]"
    last, _, first = run(page, code, tmp_path)
    for ids, moment in ((first, moments[0]), (last, moments[1])):
        rounded = with_quantized_weights(end, moment.parameters)
        assert ids == greedy_ids(rounded, [1, 2], 50)
    assert first != last


def test_a_page_holds_its_model_and_asks_for_nothing():
    page = page_of(lively(), {}, LETTERS, "</script><b>", {"Text": "<i>of a stranger"})
    assert "<b>" not in page
    assert "<i>" not in page
    assert not re.search(r"https?://|src=", page)
    assert "default-src 'none'" in page


def test_play_saves_a_page_and_says_what_it_holds(job, cli, tmp_path):
    ran = cli("play", job.job_id, "--save", "model.html")
    assert (ran.code, ran.out) == (0, "model.html\n")
    assert re.search(r"weights: \d bits; .* bits per byte instead of", ran.err)
    assert re.search(r"copies: \d+ bytes, the longest passage of the training text in", ran.err)
    size = (tmp_path / "model.html").stat().st_size
    assert f"size: {in_units(size)}; " in ran.err
    assert size < 2_000_000
    assert "moments: of steps 0, 1, 2, 3, 4, 5, 6, 10\n" in ran.err


def test_a_page_that_takes_long_says_how_long(job, cli, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.files.progress.LINE_SECONDS", 0.05)
    ran = cli("play", job.job_id, "--save", "model.html").good
    assert "making the page: 0:00:0" in ran.err


def test_a_model_of_conversations_copies_in_its_answers(monkeypatch):
    """~id is of a question. Two conversations fill a row each."""
    end = 9
    conversations = torch.tensor([~1, ~2, 3, ~end, ~4, 5, 5, ~end])
    packed = Packed(conversations, end, block_size=3)
    prompts = []

    def answer(
        _model: GPT, _tokenizer: Tokenizer, prompt: list[int], *_: int
    ) -> Iterator[list[str]]:
        prompts.append(tuple(prompt))
        yield ["a"]

    monkeypatch.setattr(saved_page, "stream_samples", answer)
    count_copied_bytes(lively(), LETTERS, Corpus(LETTERS, packed, packed, ""))
    assert set(prompts) == {(1, 2), (4,)}


def test_a_page_takes_the_moments_that_fit_it(tmp_path, monkeypatch):
    model = lively(Config(n_layer=2, n_head=2, n_embd=64, block_size=8))
    moments = [Moment(step, model) for step in range(8)]
    draft = PageDraft(model, LETTERS, None, "a model", {})
    alone = save_page(draft, tmp_path / "alone.html").size
    limit = 3 * alone
    monkeypatch.setattr(saved_page, "DEFAULT_LIMIT", limit)
    page = save_page(draft, tmp_path / "some.html", moments=moments)
    assert page.size <= limit
    assert 0 < page.path.read_text().count('class="moment"') < 7
    page = save_page(draft, tmp_path / "five.html", moments=moments, n_moments=5)
    assert page.size > limit
    assert page.moments == "of steps 0, 2, 4, 5, 7; the run kept 8"
    page = save_page(draft, tmp_path / "none.html", alone + 1000, moments)
    assert page.moments.startswith("the end alone, as all 8 would make over ")


def test_a_page_without_moments_says_so(job, cli):
    directory = Path(Job(job.job_id).model())
    shutil.rmtree(directory / "moments")
    assert "moments: the run kept none\n" in cli("play", directory, "--save", "a.html").good.err


def no_measuring(*_: object) -> None:
    pytest.fail("the rounding is measured before the page is refused")


def test_moments_of_a_run_that_kept_none_are_refused_at_once(job, monkeypatch):
    shutil.rmtree(Path(Job(job.job_id).model()) / "moments")
    monkeypatch.setattr(saved_page, "round_weights", no_measuring)
    with pytest.raises(InputError, match="moments=4"):
        Job(job.job_id).page("b.html", moments=4)


def test_a_tokenizer_of_another_kind_is_refused_at_once(tokenizer, monkeypatch):
    monkeypatch.setattr(saved_page, "round_weights", no_measuring)
    steps = [{"type": "Digits"}, *tokenizer.document["pre_tokenizer"]["pretokenizers"]]
    splitter = {"type": "Sequence", "pretokenizers": steps}
    by_digits = Tokenizer({**tokenizer.document, "pre_tokenizer": splitter}, END_OF_TEXT)
    with pytest.raises(InputError, match="cannot split text"):
        PageDraft(lively(), by_digits, None, "a model", {})


@pytest.mark.parametrize(
    "options",
    [["--bits", "5"], ["latest", "--save", "a.html"]],
    ids=["bits of no file", "two models"],
)
def test_a_page_that_cannot_be_saved_is_refused(options, job, cli):
    ran = cli("play", job.job_id, options)
    assert ran.code == 2, ran.err
    assert not list(job.home.parent.rglob("*.html"))


def test_a_model_of_an_edited_folder_has_no_page():
    class Edited(GPT):
        """The model of an edited script."""

    model = lively()
    model.__class__ = Edited
    with pytest.raises(InputError, match="edited"):
        PageDraft(model, LETTERS, None, "a model", {})


# -- in at most so many bytes ----------------------------------------------------------------------


def save(tmp_path: Path, bits: int | None = None, limit: int | None = None) -> tuple[int, int]:
    """The bits of a page's weights, and its bytes."""
    model = lively(Config(n_layer=2, n_head=2, n_embd=64, block_size=8))
    draft = PageDraft(model, LETTERS, None, "a model", {}, bits)
    page = save_page(draft, tmp_path / "a.html", limit)
    assert page.size == (tmp_path / "a.html").stat().st_size
    return page.rounding.bits, page.size


def test_a_page_takes_fewer_bits_to_stay_within_its_limit(tmp_path, caplog):
    caplog.set_level("INFO")
    bits, size = save(tmp_path)
    assert save(tmp_path, limit=size + 1000) == (bits, size)
    assert not caplog.text
    fewer, smaller = save(tmp_path, limit=size - 3000)
    assert fewer < bits
    assert smaller <= size - 3000
    assert "fewer bits" in caplog.text


def test_a_page_that_no_bits_make_small_is_refused(tmp_path):
    with pytest.raises(InputError, match="with 4 bits a weight the page has"):
        save(tmp_path, limit=10_000)
    assert not list(tmp_path.iterdir())


def test_bits_that_are_asked_for_go_over_the_limit(tmp_path):
    bits, size = save(tmp_path, limit=10_000, bits=6)
    assert bits == 6
    assert size > 10_000


def test_play_saves_a_page_within_the_limit_of_its_job(job, cli, home):
    copy_job(job, f"{job.job_id}-3", page_limit=10_000)
    refused = cli("play", f"{job.job_id}-3", "--save", "b.html")
    assert refused.failed(2, "its job was launched for 10.0kB; --bits 4 writes it all the same")
    options = ("--bits", "4", "--moments", "3")
    forced = cli("play", f"{job.job_id}-3", "--save", "b.html", options).good
    assert re.search(r"moments: of steps 0, \d, 10; the run kept 8\n", forced.err)
    assert "more than the 10.0kB for which the job was launched" in forced.err
