"""The report and the page of play in a real browser: Chromium, driven by Playwright."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hard_strings import EXPRESSIONS, hard_strings, split_by, unlike_library
from model_pages import page_case, with_model
from models import lively, tokenizer_of
from reports import reported_run, with_rows
from served import LETTERS, Site, served

from sm_nanogpt import load_model, stream_samples
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.curve import Row
from sm_nanogpt.launcher.judge.evaluation import Evaluation
from sm_nanogpt.launcher.models.chat import Message
from sm_nanogpt.launcher.models.moments import Moment
from sm_nanogpt.launcher.models.quantization import quantize_model
from sm_nanogpt.launcher.views.model_page import PageMoment, page_of
from sm_nanogpt.launcher.views.page import report_html
from sm_nanogpt.launcher.views.play import ServedModel
from sm_nanogpt.launcher.views.report import ReportedRun, compare

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Error, Locator, Page, Request


@pytest.fixture(scope="module")
def chromium(pytestconfig):
    """A browser that is installed here."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None or pytestconfig.getoption("--quick"):
        pytest.skip("no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def is_error(message: ConsoleMessage) -> bool:
    """Chromium notes a request that fails, which the page itself shows."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


@pytest.fixture(scope="module")
def tab(chromium):
    """The one tab, in which all tests open their pages: a new one takes longer than many tests."""
    return chromium.new_page()


WIDE = {"width": 1280, "height": 720}
PHONE = {"width": 390, "height": 800}


@pytest.fixture
def visit(tab):
    """Opens a page, which may request what `within` matches, and must log no error."""
    problems: list[str] = []
    pattern = ""

    def check_request(request: Request) -> None:
        if not re.fullmatch(pattern, request.url) and not request.url.startswith("data:"):
            problems.append(f"requests {request.url}")

    def check_message(message: ConsoleMessage) -> None:
        if is_error(message):
            problems.append(message.text)

    def note_error(error: Error) -> None:
        problems.append(str(error))

    def go(url: str, within: str = "", viewport: Any = WIDE) -> Page:
        nonlocal pattern
        pattern = within or re.escape(url)
        tab.set_viewport_size(viewport)
        tab.goto(url)
        return tab

    listeners = {"request": check_request, "console": check_message, "pageerror": note_error}
    for event, listener in listeners.items():
        tab.on(event, listener)
    yield go
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    tab.unroute_all()
    tab.goto("about:blank")
    assert not problems


# The best validation losses of two runs, by n_embd. Their training losses are higher, and alike.
LOSSES = {32: 1.5, 64: 1.25}


def rows_of(n_embd: int) -> list[Row]:
    rows: list[Row] = []
    for step in (0, 5, 10):
        row: Row = {
            "step": step,
            "train_loss": 2.98765 - step / 100,
            "val_loss": LOSSES[n_embd] + (10 - step) / 100,
            "bits_per_byte": 2.0,
            "learning_rate": step / 1000,
            "tokens_per_second": 1000 + step,
        }
        rows.append(row)
    return rows


def two_runs() -> list[ReportedRun]:
    return [with_rows(reported_run(f"n{n}", n_embd=n), rows_of(n)) for n in LOSSES]


def write_report(directory: Path, *runs: ReportedRun) -> str:
    """The address of a report."""
    path = directory / "report.html"
    path.write_text(report_html(compare(runs)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The address of the report of two runs."""
    return write_report(tmp_path_factory.mktemp("report"), *two_runs())


JUDGED = Evaluation(
    model="",
    text="a-text-with-a-long-name-1.txt",
    size=6000,
    tokens=6000,
    bits_per_byte=2.214,
    half=0.045,
    unit="passages of 1,000 bytes",
    ngram=2.9,
    samples="100 samples of 500 characters",
    copied=80,
)


def drawn(page: Page) -> Page:
    page.wait_for_selector("#rate svg")  # the last of the plots
    return page


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.tagName"))


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element has the focus; it must come within a few."""
    for _ in range(12):
        page.keyboard.press("Tab")
        if focused(page) == name:
            return
    pytest.fail(f"Tab does not reach {name}")


# -- the report -----------------------------------------------------------------------------------


def test_a_report_draws_without_errors_or_requests(report, visit):
    page = drawn(visit(report))
    for plot in ("loss", "speed", "rate"):
        assert page.locator(f"#{plot} svg path[aria-roledescription='line mark']").count() >= 2


def test_the_axis_of_a_hyperparameter_shows_its_values(visit, tmp_path):
    runs = [reported_run(f"n{n}", n_embd=n) for n in (32, 60, 120)]
    page = drawn(visit(write_report(tmp_path, *runs)))
    page.wait_for_selector("#by-n_embd svg")
    labels = page.locator("#by-n_embd .role-axis-label text").all_text_contents()
    assert labels[:3] == ["32", "60", "120"]


def test_the_table_shows_the_values_of_the_metrics(report, visit):
    page = drawn(visit(report))
    page.get_by_text("The evaluations as a table").click()
    caption = page.locator("caption", has_text="n32, n_embd 32")
    table = page.locator("table", has=caption).locator("tbody").inner_text()
    expected = []
    for row in rows_of(32):
        losses = f"{row['train_loss']:.4f}\t{row['val_loss']:.4f}\t{row['bits_per_byte']:.4f}"
        expected.append(f"{row['step']:,}\t{losses}")
    assert table.splitlines() == expected


def test_pointing_at_a_line_shows_its_values(report, visit):
    page = drawn(visit(report))
    box = page.locator("#loss svg").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 4)
    tip = page.locator("#tip")
    tip.wait_for()
    _, series, *facts = tip.inner_text().splitlines()
    values = dict(fact.split(": ") for fact in facts)
    (row,) = [row for row in rows_of(32) if str(row["step"]) == values["step"]]
    assert series == "training"
    assert values["loss (nats per character)"] == f"{row['train_loss']:.5f}"
    assert values["tokens/s"] == f"{row['tokens_per_second']:,.0f}"


def test_a_report_fits_a_phone_with_labels_beside_numbers(visit, tmp_path):
    other_text = replace(JUDGED, text="a-text-with-a-long-name-2.txt")
    first, second = two_runs()
    first = replace(first, evaluations=[JUDGED, other_text])
    address = write_report(tmp_path, first, second)
    page = drawn(visit(address, viewport=PHONE))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    rows = page.locator(".judged tbody tr")
    assert rows.count() == len(JUDGED.facts())
    for row in rows.all():
        boxes: list[Any] = [cell.bounding_box() for cell in row.locator("th, td").all()]
        label, first, second = boxes
        assert label["x"] + label["width"] <= first["x"]
        assert label["x"] + label["width"] <= second["x"]
        assert second["x"] + second["width"] <= 390


def test_seven_differences_fit_a_laptop(visit, tmp_path):
    names = (
        "learning_rate",
        "final_learning_rate",
        "decay_fraction",
        "short_windows",
        "dropout",
        "weight_decay",
        "momentum",
    )
    values: dict[str, Any] = dict.fromkeys(names, 0.5)
    others: dict[str, Any] = dict.fromkeys(names, 0.125)
    url = write_report(tmp_path, reported_run("a", **values), reported_run("b", **others))
    page = drawn(visit(url, viewport={"width": 1300, "height": 800}))
    left, right = page.locator(".scroll").first.evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert left == right


def test_the_keyboard_reaches_what_a_report_offers(report, visit):
    page = drawn(visit(report))
    tab_to(page, "axis")
    page.keyboard.press("ArrowDown")
    page.locator("#loss svg", has_text="tokens").wait_for()
    tab_to(page, "smoothing")
    page.keyboard.press("ArrowRight")
    assert page.locator("#weight").inner_text() == "0.02"
    tab_to(page, "log")
    page.keyboard.press("Space")
    assert page.locator("#log").is_checked()
    tab_to(page, "SUMMARY")
    page.keyboard.press("Enter")
    assert page.locator("caption").first.is_visible()


# -- play -----------------------------------------------------------------------------------------


def open_play(visit: Any, site: Site, **options: Any) -> Page:
    """The page of a server, with its models, in a browser with these options."""
    address = f"http://127.0.0.1:{site.port}/"
    page = visit(f"{address}?token=secret", within=f"{re.escape(address)}.*", **options)
    page.locator("#write:enabled").wait_for()
    return page


@pytest.fixture
def play(site, visit):
    """The page of three models, of which an edited script computes the last."""
    page = open_play(visit, site)
    page.evaluate("document.querySelector('form details').open = true")
    return page


def ended(page: Page) -> None:
    page.locator("#end:disabled").wait_for()


def statuses(page: Page) -> list[str]:
    return page.locator(".status").all_inner_texts()


def written(page: Page) -> list[str]:
    """What the models wrote, with the prompt."""
    return page.locator(".text").all_text_contents()


def test_text_streams_into_the_page(play):
    play.evaluate("""() => {
        window.lengths = new Set();
        const out = document.querySelector(".text");
        const note = new MutationObserver(() => lengths.add(out.textContent.length));
        note.observe(out, {childList: true, subtree: true});
    }""")
    assert focused(play) == "prompt"
    play.keyboard.type("abc")
    play.fill("#length", "300")
    play.keyboard.press("Control+Enter")
    ended(play)
    assert re.fullmatch(r"300 characters, [\d,.]+ a second, seed \d+", statuses(play)[0])
    assert len(play.evaluate("[...lengths]")) > 3
    assert [len(text) for text in written(play)] == [303] * 3


def test_a_seed_gives_the_same_text_again(play):
    texts = []
    for seed in ("7", "7", "8"):
        play.fill("#seed", seed)
        play.fill("#length", "50")
        play.click("#write")
        ended(play)
        assert statuses(play)[0].endswith(f"seed {seed}")
        texts.append(written(play))
    assert texts[0] == texts[1] != texts[2]


def test_the_text_ends_before_a_stop_string(play):
    play.fill("#seed", "7")
    play.fill("#length", "50")
    play.click("#write")
    ended(play)
    texts = written(play)
    stop = texts[0][20:22]
    play.fill("#stop", stop.replace("\n", "\\n"))
    play.click("#write")
    ended(play)
    assert written(play) == [text.partition(stop)[0] for text in texts]


def test_the_likeliest_token_alone_is_the_greedy_one(play, site):
    """In the browser, and the last one on the server."""
    play.fill("#prompt", "abc")
    play.fill("#length", "40")
    play.fill("#top-k", "1")
    play.click("#write")
    ended(play)
    greedy = [f"abc{site.text(number, temperature=0)}" for number in range(3)]
    assert written(play) == greedy
    play.fill("#top-k", "0")
    play.evaluate("find('top-p').value = 0.05")
    play.click("#write")
    ended(play)
    assert written(play) == greedy


def test_a_text_of_the_server_says_so_and_not_what_was_likely(play):
    play.fill("#length", "5")
    play.click("#write")
    ended(play)
    play.locator(".text").last.locator(".token").first.click()
    assert play.locator("#likely").is_hidden()
    facts = play.locator("article .facts").last.inner_text()
    assert "an edited folder computes this model" in facts


def test_a_number_that_is_none_is_replaced_in_sight(play):
    play.fill("#length", "many")
    play.click("#write")
    play.keyboard.press("Escape")
    assert play.input_value("#length") == "500"


def test_stop_ends_all_texts(play):
    play.fill("#length", "1000000")
    play.click("#write")
    for status in play.locator(".status").all():
        status.filter(has_text="characters").wait_for()
    play.keyboard.press("Escape")
    for status in play.locator(".status").all():
        status.filter(has_text="stopped").wait_for()


def test_a_server_that_has_ended_is_named(visit):
    edited = ServedModel("edited", lively(), tokenizer_of(LETTERS))
    edited.model.__class__ = type("Edited", (GPT,), {})
    with served([edited]) as site:
        page = open_play(visit, site)
        page.route("**/v1/*", lambda route: route.abort())
    page.click("#write")
    page.locator(".status.error", has_text="The server does not answer.").wait_for()


def test_the_keyboard_writes_and_shows_what_was_likely(play):
    play.fill("#length", "5")
    tab_to(play, "write")
    play.keyboard.press("Enter")
    ended(play)
    assert statuses(play)[0].startswith("5 characters, ")
    tab_to(play, "SECTION")
    play.keyboard.press("ArrowRight")
    play.evaluate("document.dispatchEvent(new Event('scroll'))")  # as one that comes into view
    assert play.locator("#likely").is_visible()
    assert play.locator("#likely .chosen").count() == 1


@pytest.fixture(scope="module")
def chat_site(directory):
    """The server of a model that has learned from conversations."""
    with served([ServedModel("mine", *load_model(directory), {"best loss": "its loss"})]) as site:
        yield site


@pytest.fixture
def talk(chat_site, visit):
    """The page of that model, and the model as served."""
    page = open_play(visit, chat_site)
    page.evaluate("find('temperature').value = 0")
    page.evaluate("document.querySelector('form details').open = true")
    page.fill("#length", "10")
    return page, chat_site.models[0]


def ask(page: Page, question: str) -> str:
    """Send a message with Enter; returns the answer."""
    page.focus("#prompt")
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    ended(page)
    answers = page.locator(".answer").all_text_contents()
    return answers[-1] if answers else ""


def test_the_page_keeps_a_conversation_until_a_new_one(talk):
    page, served_model = talk
    messages: list[Message] = []
    for system in ("", "Be short."):
        page.fill("#system", system)
        instruction = [Message("system", system)] if system else []
        for question in ("What is 3 + 3?", "And 4?"):
            answer = ask(page, question)
            messages.append(Message("user", question))
            prompt = served_model.chat.fit([*instruction, *messages], 10)
            columns = stream_samples(
                served_model.model,
                served_model.tokenizer,
                prompt.ids,
                prompt.max_new_tokens,
                temperature=0,
            )
            assert answer == "".join(piece for (piece,) in columns)
            messages.append(Message("assistant", answer))
    assert page.locator(".question").count() == 4
    assert "its loss" in page.locator("#abouts").inner_text()
    page.click("#anew")
    assert written(page) == [""]


def test_the_end_of_an_answer_is_in_sight(talk):
    """Also of one that is written at once."""
    page, _ = talk
    page.evaluate("performance.now = () => 0")
    for _ in range(5):
        ask(page, "What is 3 + 3?")
    below = "text => text.scrollHeight - text.scrollTop - text.clientHeight"
    assert page.locator(".text").evaluate(below) < 2


def test_shift_enter_breaks_the_line_of_a_message(talk):
    page, _ = talk
    page.focus("#prompt")
    page.keyboard.type("What")
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#prompt") == "What\n"
    assert page.locator(".question").count() == 0


@pytest.mark.parametrize("width", [1300, 390])
def test_a_message_is_typed_below_the_conversation(talk, width):
    page, _ = talk
    page.set_viewport_size({"width": width, "height": 800})
    ask(page, "What is 3 + 3?")
    names = (".answer", "#prompt", "#abouts")
    boxes: list[Any] = [page.locator(name).bounding_box() for name in names]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"] <= 800
    assert boxes[1]["y"] + boxes[1]["height"] <= boxes[2]["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_says_what_the_model_no_longer_sees(talk):
    page, served_model = talk
    messages: list[Message] = []
    n_dropped = 0
    while not n_dropped:
        messages.append(Message("user", "What is 3 + 3?"))
        n_dropped = served_model.chat.fit(messages, 10).n_dropped
        messages.append(Message("assistant", ask(page, "What is 3 + 3?")))
    n_above = page.locator(".forgotten").evaluate(
        "line => [...line.parentNode.children].indexOf(line)"
    )
    assert n_above == n_dropped


def test_an_empty_answer_is_said_and_can_be_asked_again(directory, visit):
    model, tokenizer = load_model(directory)
    tokenizer.ends = {*range(len(tokenizer))}
    with served([ServedModel("mine", model, tokenizer)]) as site:
        page = open_play(visit, site)
        ask(page, "What is 3 + 3?")
        assert statuses(page) == ["The text is empty."]
        assert page.input_value("#prompt") == "What is 3 + 3?"


def test_a_message_that_fails_can_be_sent_again(talk):
    page, served_model = talk
    ask(page, "What is 3 + 3?")
    page.fill("#prompt", "a " * served_model.chat.context_size)
    page.keyboard.press("Enter")
    page.locator(".status.error", has_text="too long").wait_for()
    assert page.input_value("#prompt").startswith("a a a")
    assert page.locator(".question").count() == 1


def test_a_message_to_a_chat_and_a_plain_model_is_sent_once(directory, visit):
    plain = ServedModel("plain", lively(), tokenizer_of(LETTERS))
    with served([ServedModel("chat", *load_model(directory)), plain]) as site:
        page = open_play(visit, site)
        page.fill("#length", "5")
        for number, message in enumerate(("2 + 2?", "bad"), 1):
            ask(page, message)
            assert page.input_value("#prompt") == ""
            assert page.locator(".question").count() == number
        assert statuses(page)[1].startswith("5 characters")
        ask(page, "2 + 2?")
        assert statuses(page)[1] == "The model does not know 2 + ?"


@pytest.mark.parametrize("width", [390, 1300])
def test_what_is_said_of_the_models_stands_below_all_texts(width, site, visit):
    page = open_play(visit, site, viewport={"width": width, "height": 800})
    texts: list[Any] = [text.bounding_box() for text in page.locator(".text").all()]
    abouts: list[Any] = [about.bounding_box() for about in page.locator("#abouts details").all()]
    assert max(box["y"] + box["height"] for box in texts) < min(box["y"] for box in abouts)
    names = page.locator("#abouts summary").all_inner_texts()
    assert names == [f"About {served_model.name}" for served_model in site.models]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def write_page(directory: Path, page: str) -> str:
    """The address of a page."""
    path = directory / "model.html"
    path.write_text(page)
    return path.as_uri()


@pytest.fixture(scope="module")
def saved_address(tmp_path_factory):
    model = lively()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    page = page_of(model, weights, tokenizer_of(LETTERS), "my model", {"data": "abc.txt"})
    return write_page(tmp_path_factory.mktemp("saved"), page)


@pytest.fixture
def saved(visit, saved_address):
    """The saved page of a model of characters."""
    page = visit(saved_address)
    page.locator("#write:enabled").wait_for()
    return page


def test_the_engine_writes_the_same_ids_in_a_browser(tokenizer, saved):
    case = page_case("conversations", tokenizer)
    page, ids = case.rounded(bits=5)
    assert saved.evaluate(with_model(page, case.greedy_code)) == ids


def test_a_browser_encodes_text_as_the_library(tokenizer, saved):
    tokenizer = split_by(tokenizer, EXPRESSIONS["Qwen3.5"])
    strings = hard_strings()
    page = page_of(lively(), {}, tokenizer, "a model", {})
    code = f"{json.dumps(strings)}.map((text) => tokenizer.encode(text))"
    ids = saved.evaluate(with_model(page, code))
    assert unlike_library(strings, ids, tokenizer) == []


def test_a_saved_page_asks_nothing_of_a_network(saved, chromium):
    """By the browser's own record of requests, from before the page opens."""
    context = chromium.new_context()
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    urls: list[str] = []
    session.on("Network.requestWillBeSent", lambda event: urls.append(event["request"]["url"]))
    page.goto(saved.url)
    page.locator("#write:enabled").wait_for()
    page.click("#write")
    ended(page)
    context.close()
    assert [url for url in urls if not url.startswith("data:")] == [saved.url]


def test_a_saved_page_shows_what_was_likely(saved):
    saved.fill("#length", "50")
    saved.keyboard.press("Control+Enter")
    saved.locator(".status", has_text="50 characters").wait_for()
    saved.locator(".token", has_text=re.compile("[a-i]")).first.click()
    assert saved.locator("#likely div").count() >= 5
    saved.keyboard.press("Escape")
    assert saved.locator("#likely").is_hidden()


def test_a_saved_page_says_what_the_model_lacks(saved):
    saved.fill("#prompt", "abcZ")
    saved.keyboard.press("Control+Enter")
    assert statuses(saved) == ["The model does not know Z"]


def test_a_damaged_page_says_so(visit, tmp_path):
    page = page_of(lively(), {}, tokenizer_of(LETTERS), "my model", {})
    begin = page.index('class="model"')
    digits = page.index(">", begin) + 100
    other = "A" if page[digits] != "A" else "B"
    opened = visit(write_page(tmp_path, page[:digits] + other + page[digits + 1 :]))
    opened.locator("#facts", has_text="cannot be used").wait_for()
    assert opened.locator("#write:disabled").is_visible()


@pytest.fixture(scope="module")
def learned_address(tmp_path_factory):
    end = lively()
    moments = []
    for step, factor in ((0, 0.0), (10, 0.2), (2000, 0.6)):
        weights = quantize_model(scaled(lively(), factor), 8)
        moments.append(PageMoment(step, 3.5 - factor, weights))
    moments.append(PageMoment(3000, 2.5, quantize_model(end, 8)))
    tokenizer = tokenizer_of(LETTERS)
    page = page_of(end, moments[-1].parameters, tokenizer, "my model", {}, moments)
    return write_page(tmp_path_factory.mktemp("learned"), page)


@pytest.fixture
def learned(visit, learned_address):
    """The saved page of a model and of three earlier moments, which know fewer letters."""
    page = visit(learned_address)
    page.locator("#write:enabled").wait_for()
    page.fill("#length", "40")
    return page


def scaled(model: GPT, factor: float) -> GPT:
    """The model with its weights times a factor."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def written_anew(page: Page) -> str:
    """The text, once it is whole."""
    page.locator(".status", has_text="40 characters").wait_for()
    page.locator("#end:disabled").wait_for()
    return page.locator(".text").text_content() or ""


def test_the_slider_rewrites_the_text_by_earlier_models(learned):
    learned.fill("#prompt", "abc")
    learned.keyboard.press("Control+Enter")
    end = written_anew(learned)
    slider = learned.get_by_label("How it learned")
    assert slider.get_attribute("aria-valuetext") == "step 3,000 of 3,000, 2.50 bits per byte"
    slider.focus()
    learned.keyboard.press("Home")
    learned.locator(".moment-text", has_text="step 0 of 3,000, 3.50 bits per byte").wait_for()
    first = written_anew(learned)
    assert first != end
    assert first.startswith("abc")
    learned.keyboard.press("ArrowRight")
    learned.locator(".moment-text", has_text="step 10 of 3,000").wait_for()
    assert written_anew(learned) not in (first, end)
    learned.keyboard.press("End")
    learned.locator(".moment-text", has_text="step 3,000").wait_for()
    assert written_anew(learned) == end  # by the same seed


def test_the_served_page_has_the_slider_too(visit):
    """Its moments are asked of the server, with their exact weights."""
    model = lively()
    moments = [Moment(0, scaled(lively(), 0.2)), Moment(3000, model)]
    served_model = ServedModel("mine", model, tokenizer_of(LETTERS), moments=moments)
    with served([served_model]) as site:
        page = open_play(visit, site)
        page.fill("#length", "40")
        page.fill("#prompt", "abc")
        page.keyboard.press("Control+Enter")
        end = written_anew(page)
        slider = page.get_by_label("How it learned")
        slider.focus()
        page.keyboard.press("Home")
        page.locator(".moment-text", has_text="step 0 of 3,000").wait_for()
        assert written_anew(page) != end
        page.keyboard.press("End")
        page.locator(".moment-text", has_text="step 3,000").wait_for()
        assert written_anew(page) == end


def test_two_models_side_by_side_have_no_slider(visit):
    model = lively()
    moments = [Moment(0, model), Moment(9, model)]
    served_models = [
        ServedModel(name, model, tokenizer_of(LETTERS), moments=moments)
        for name in ("one", "another")
    ]
    with served(served_models) as site:
        page = open_play(visit, site)
        assert not any(box.is_visible() for box in page.locator(".moments").all())


def test_the_slider_names_the_generation_of_a_later_model(visit, tmp_path):
    """Whose first step has random weights again."""
    model = lively()
    weights = quantize_model(model, 8)
    moments = [PageMoment(step, None, weights, generation=2) for step in (0, 9)]
    content = page_of(model, weights, tokenizer_of(LETTERS), "my model", {}, moments)
    page = visit(write_page(tmp_path, content))
    slider = page.get_by_label("How it learned")
    slider.press("Home")
    assert slider.get_attribute("aria-valuetext") == "generation 2, step 0 of 9"


def test_the_training_can_be_watched_and_stopped(learned):
    learned.get_by_role("button", name="Watch").click()
    learned.locator(".moment-text", has_text="step 10 of").wait_for()
    learned.get_by_role("button", name="Stop watching").click()
    learned.get_by_role("button", name="Watch", exact=True).wait_for()
    assert "step 10 of" in (learned.locator(".moment-text").text_content() or "")


def test_the_slider_fits_a_phone(learned):
    learned.set_viewport_size(PHONE)
    assert learned.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("viewport", [PHONE, WIDE], ids=["phone", "laptop"])
@pytest.mark.parametrize(("n_moments", "last_step"), [(8, 600_000), (20, 2000)])
def test_the_steps_below_the_slider_do_not_touch(n_moments, last_step, viewport, visit, tmp_path):
    model = lively()
    weights = quantize_model(model, 8)
    last = n_moments - 1
    moments = []
    for index in range(n_moments):
        step = last_step * index // last
        moments.append(PageMoment(step, 4.0 - index / last, weights))
    content = page_of(model, weights, tokenizer_of(LETTERS), "my model", {}, moments)
    page = visit(write_page(tmp_path, content), viewport=viewport)
    page.locator("#write:enabled").wait_for()
    page.evaluate("new Promise(requestAnimationFrame)")  # the labels are fitted as it is drawn
    labels = [label for label in page.locator(".steps span").all() if label.is_visible()]
    assert len(labels) > 2
    assert labels[0].inner_text() == "0"
    assert labels[-1].inner_text() == f"{last_step:,}"
    box = edges(page.locator(".moments"))
    sides = [edges(label) for label in labels]
    assert box[0] < sides[0][0]
    assert sides[-1][1] < box[1]
    for (_, right), (left, _) in itertools.pairwise(sides):
        assert right < left


def edges(element: Locator) -> tuple[float, float]:
    """The left and the right edge of an element, in pixels."""
    box = element.bounding_box()
    assert box is not None
    return box["x"], box["x"] + box["width"]


def test_a_page_of_one_moment_has_no_slider(saved):
    assert saved.locator(".moments").is_hidden()


def test_the_slider_answers_the_last_message_anew(directory, visit, tmp_path):
    end, tokenizer = load_model(directory)
    earlier, _ = load_model(directory)
    scaled(earlier, 0.1)
    moments = [
        PageMoment(0, None, quantize_model(earlier, 8)),
        PageMoment(9, None, quantize_model(end, 8)),
    ]
    content = page_of(end, moments[1].parameters, tokenizer, "my model", {}, moments)
    page = visit(write_page(tmp_path, content))
    page.locator("#write:enabled").wait_for()
    page.fill("#length", "10")
    slider = page.get_by_label("How it learned")
    slider.press("Home")  # before any message
    slider.press("End")
    ask(page, "What is 3 + 3?")
    answer = ask(page, "And 4?")
    slider.press("Home")
    ended(page)
    assert page.locator(".question").all_text_contents() == ["What is 3 + 3?", "And 4?"]
    assert page.locator(".answer").last.text_content() != answer
    slider.press("End")
    ended(page)
    assert page.locator(".answer").all_text_contents()[1:] == [answer]
    assert page.locator(".curve").count() == 0  # as no loss was measured
