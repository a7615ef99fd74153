"""The report and the page of play in a real browser: Chromium, driven by Playwright."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hard_strings import EXPRESSIONS, hard_strings, split_by, unlike_library
from jobs import file_rows, sibling
from launching import settings_of
from model_pages import CONFIGS, page_case, with_model
from models import lively, tokenizer_of
from served import LETTERS, Site, served

from sm_nanogpt import load_model, stream_samples
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.judge.evaluation import Evaluation, save_evaluation
from sm_nanogpt.launcher.models.chat import Message
from sm_nanogpt.launcher.models.moments import Moment
from sm_nanogpt.launcher.models.quantization import quantize_model
from sm_nanogpt.launcher.views.model_page import PageMoment, page_of
from sm_nanogpt.launcher.views.play import Player

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page


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


def is_error(said: ConsoleMessage) -> bool:
    """Chromium notes a request that fails, which the page itself shows."""
    return said.type == "error" and not said.text.startswith("Failed to load resource")


@pytest.fixture
def visit(chromium):
    """Opens a page, which may request what `within` matches, and must log no error."""
    contexts, wrong = [], list[str]()

    def go(url: str, within: str = "", **options: Any) -> Page:
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        allowed = re.compile(within or re.escape(url))

        def requested(address: str) -> None:
            if not allowed.fullmatch(address) and not address.startswith("data:"):
                wrong.append(f"requests {address}")

        page.on("request", lambda request: requested(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if is_error(said) else None)
        page.goto(url)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def report(job, cli):
    """The address of a report of two runs, of which the second is better."""
    ran = cli("report", job.job_id, sibling(job, 1, 1.25, n_embd=64))
    assert ran.code == 0, ran.err
    return Path(ran.out.strip()).absolute().as_uri()


JUDGED = Evaluation(
    model="",
    text="",
    size=6000,
    tokens=6000,
    bits_per_byte=2.214,
    half=0.045,
    unit="passages of 1,000 bytes",
    perplexity=4.64,
    xz=3.1,
    samples="100 samples of 500 characters",
    cuts=512,
    worst=[],
    canaries=[],
    answers={},
    parts=[],
    documents=[],
    ngram=2.9,
    validation=2.2,
    overlap=0.01,
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


def test_the_axis_of_a_hyperparameter_shows_its_values(job, cli, visit):
    others = [sibling(job, n, 1.25, n_embd=60 * n) for n in (1, 2)]
    ran = cli("report", job.job_id, others)
    page = drawn(visit(Path(ran.out.strip()).absolute().as_uri()))
    page.wait_for_selector("#by-n_embd svg")
    labels = page.locator("#by-n_embd .role-axis-label text").all_text_contents()
    assert labels[:3] == ["32", "60", "120"]


def test_the_table_shows_the_values_of_the_metrics(report, job, visit):
    page = drawn(visit(report))
    page.get_by_text("The evaluations as a table").click()
    caption = page.locator("caption", has_text=f"{job.job_id[-6:]}, n_embd 32")
    table = page.locator("table", has=caption).locator("tbody").inner_text()
    expected = []
    for row in file_rows(job):
        if "val_loss" in row:
            losses = f"{row['train_loss']:.4f}\t{row['val_loss']:.4f}\t{row['bits_per_byte']:.4f}"
            expected.append(f"{row['step']:,}\t{losses}")
    assert table.splitlines() == expected


def test_pointing_at_a_line_shows_its_values(report, job, visit):
    page = drawn(visit(report))
    box = page.locator("#loss svg").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 4)
    tip = page.locator("#tip")
    tip.wait_for()
    _, series, *facts = tip.inner_text().splitlines()
    told = dict(fact.split(": ") for fact in facts)
    (row,) = [row for row in file_rows(job) if str(row["step"]) == told["step"]]
    assert series == "training"  # the validation losses of the other run are lower
    assert told["loss (nats per character)"] == f"{row['train_loss']:.5f}"
    assert told["tokens/s"] == f"{row['tokens_per_second']:,.0f}"


def test_a_report_fits_a_phone(report, visit):
    page = drawn(visit(report, viewport={"width": 390, "height": 800}))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_numbers_stand_beside_their_labels_on_a_phone(job, cli, visit):
    for number in range(2):
        text = f"a-text-with-a-long-name-{number}.txt"
        save_evaluation(
            replace(JUDGED, model=job.job_id, text=text), str(number), settings_of(job.home)
        )
    address = Path(cli("report", job.job_id).good.out.strip()).absolute().as_uri()
    page = drawn(visit(address, viewport={"width": 390, "height": 800}))
    rows = page.locator(".judged tbody tr")
    assert rows.count() == len(JUDGED.facts())
    for row in rows.all():
        boxes: list[Any] = [cell.bounding_box() for cell in row.locator("th, td").all()]
        label, first, second = boxes
        assert label["x"] + label["width"] <= first["x"]
        assert label["x"] + label["width"] <= second["x"]
        assert second["x"] + second["width"] <= 390


def test_seven_differences_fit_a_laptop(job, cli, visit):
    words = "learning_rate final_learning_rate decay_fraction short_windows dropout weight_decay"
    names = [*words.split(), "momentum"]
    ran = cli("report", job.job_id, sibling(job, 1, 1.25, **dict.fromkeys(names, 0.125)))
    url = Path(ran.out.strip()).absolute().as_uri()
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
    return open_play(visit, site)


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


def test_the_page_writes_the_greedy_text_of_the_sampler(play, site):
    """In the browser, and the last one on the server."""
    play.evaluate("find('temperature').value = 0")
    play.fill("#prompt", "abc")
    play.fill("#length", "40")
    play.keyboard.press("Control+Enter")
    ended(play)
    texts = [site.text(number, temperature=0) for number in range(3)]
    assert written(play) == [f"abc{text}" for text in texts]
    assert play.locator(".text").last.locator(".token").count() > 0
    play.locator(".text").last.locator(".token").first.click()
    assert play.locator("#likely").is_hidden()
    assert (
        "an edited folder computes this model" in play.locator("article .facts").last.inner_text()
    )


def test_a_seed_gives_the_same_text_again(play):
    texts = []
    for seed in ("7", "7", "8"):
        play.evaluate("document.querySelector('form details').open = true")
        play.fill("#seed", seed)
        play.fill("#length", "50")
        play.click("#write")
        ended(play)
        assert statuses(play)[0].endswith(f"seed {seed}")
        texts.append(written(play))
    assert texts[0] == texts[1] != texts[2]


def test_the_text_ends_before_a_stop_string(play):
    play.evaluate("document.querySelector('form details').open = true")
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
    play.evaluate("document.querySelector('form details').open = true")
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
    edited = Player("edited", lively(), tokenizer_of(LETTERS))
    edited.model.__class__ = type("Edited", (GPT,), {})
    with served([edited]) as site:
        page = open_play(visit, site)
        page.route("**/v1/*", lambda route: route.abort())
    page.click("#write")
    page.locator(".status.error", has_text="The server does not answer.").wait_for()


def test_the_button_answers_to_enter(play):
    play.fill("#length", "5")
    tab_to(play, "write")
    play.keyboard.press("Enter")
    ended(play)
    assert statuses(play)[0].startswith("5 characters, ")


def test_arrow_keys_show_what_was_likely(play):
    play.fill("#length", "5")
    play.keyboard.press("Control+Enter")
    ended(play)
    tab_to(play, "SECTION")
    play.keyboard.press("ArrowRight")
    assert play.locator("#likely").is_visible()
    assert play.locator("#likely .chosen").count() == 1


@pytest.fixture
def talk(directory, visit):
    """The page of a model that has learned from conversations, and its player."""
    player = Player("mine", *load_model(directory), {"best loss": "its loss"})
    with served([player]) as site:
        page = open_play(visit, site)
        page.evaluate("find('temperature').value = 0")
        page.evaluate("document.querySelector('form details').open = true")
        page.fill("#length", "10")
        yield page, player


def ask(page: Page, question: str) -> str:
    """Send a message with Enter; returns the answer."""
    page.focus("#prompt")
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    ended(page)
    answers = page.locator(".answer").all_text_contents()
    return answers[-1] if answers else ""


def test_the_page_keeps_a_conversation_until_a_new_one(talk):
    page, player = talk
    messages: list[Message] = []
    for system in ("", "Be short."):
        page.fill("#system", system)
        instruction = [Message("system", system)] if system else []
        for question in ("What is 3 + 3?", "And 4?"):
            answer = ask(page, question)
            messages.append(Message("user", question))
            prompt = player.chat.fit([*instruction, *messages], 10)
            columns = stream_samples(
                player.model, player.tokenizer, prompt.ids, prompt.max_new_tokens, temperature=0
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
    page, player = talk
    messages: list[Message] = []
    n_dropped = 0
    while not n_dropped:
        messages.append(Message("user", "What is 3 + 3?"))
        n_dropped = player.chat.fit(messages, 10).n_dropped
        messages.append(Message("assistant", ask(page, "What is 3 + 3?")))
    n_above = page.locator(".forgotten").evaluate(
        "line => [...line.parentNode.children].indexOf(line)"
    )
    assert n_above == n_dropped


def test_an_empty_answer_is_said_and_can_be_asked_again(directory, visit):
    model, tokenizer = load_model(directory)
    tokenizer.ends = {*range(len(tokenizer))}
    with served([Player("mine", model, tokenizer)]) as site:
        page = open_play(visit, site)
        ask(page, "What is 3 + 3?")
        assert statuses(page) == ["The text is empty."]
        assert page.input_value("#prompt") == "What is 3 + 3?"


def test_a_message_that_fails_can_be_sent_again(talk):
    page, player = talk
    ask(page, "What is 3 + 3?")
    page.fill("#prompt", "a " * player.chat.context_size)
    page.keyboard.press("Enter")
    page.locator(".status.error", has_text="too long").wait_for()
    assert page.input_value("#prompt").startswith("a a a")
    assert page.locator(".question").count() == 1


def test_a_message_to_a_chat_and_a_plain_model_is_sent_once(directory, visit):
    plain = Player("plain", lively(), tokenizer_of(LETTERS))
    with served([Player("chat", *load_model(directory)), plain]) as site:
        page = open_play(visit, site)
        page.fill("#length", "5")
        for number, message in enumerate(("2 + 2?", "bad"), 1):
            ask(page, message)
            assert page.input_value("#prompt") == ""
            assert page.locator(".question").count() == number
        assert statuses(page)[1].startswith("5 characters")
        ask(page, "2 + 2?")
        assert statuses(page)[1] == "The model does not know 2 + ?"


def test_the_page_of_play_fits_a_phone(play):
    play.set_viewport_size({"width": 390, "height": 800})
    assert play.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("width", [390, 1300])
def test_what_is_said_of_the_models_stands_below_all_texts(width, site, visit):
    page = open_play(visit, site, viewport={"width": width, "height": 800})
    texts: list[Any] = [text.bounding_box() for text in page.locator(".text").all()]
    abouts: list[Any] = [about.bounding_box() for about in page.locator("#abouts details").all()]
    assert max(box["y"] + box["height"] for box in texts) < min(box["y"] for box in abouts)
    names = page.locator("#abouts summary").all_inner_texts()
    assert names == [f"About {player.name}" for player in site.players]


@pytest.fixture
def saved(visit, tmp_path):
    """The saved page of a model of characters."""
    model = lively()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    path = tmp_path / "model.html"
    path.write_text(page_of(model, weights, tokenizer_of(LETTERS), "my model", {"data": "abc.txt"}))
    page = visit(path.as_uri())
    page.locator("#write:enabled").wait_for()
    return page


def test_a_saved_page_writes_text_by_itself(saved):
    saved.fill("#prompt", "abc")
    saved.fill("#length", "50")
    saved.keyboard.press("Control+Enter")
    saved.locator(".status", has_text="50 characters").wait_for()
    text = written(saved)[0]
    assert text.startswith("abc")
    assert len(text) == 53
    assert set(text) <= set(LETTERS)


def test_a_saved_page_writes_the_greedy_text_of_the_sampler(saved):
    saved.evaluate("find('temperature').value = 0")
    saved.fill("#prompt", "abc")
    saved.fill("#length", "1000")
    saved.keyboard.press("Control+Enter")
    saved.locator(".status", has_text="1,000 characters").wait_for()
    columns = stream_samples(lively(), tokenizer_of(LETTERS), "abc", 1000, temperature=0)
    assert written(saved) == ["abc" + "".join(piece for (piece,) in columns)]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_writes_the_same_ids_in_a_browser(name, tokenizer, saved):
    """With exact weights, as our sampler, and with rounded ones, as our engine on these."""
    case = page_case(name, tokenizer)
    assert saved.evaluate(with_model(case.page, case.greedy_code)) == case.greedy_ids
    page, ids = case.rounded(bits=5)
    assert saved.evaluate(with_model(page, case.greedy_code)) == ids


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_browser_encodes_text_as_the_library(name, tokenizer, saved):
    tokenizer = split_by(tokenizer, EXPRESSIONS[name])
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
    path = tmp_path / "model.html"
    path.write_text(page[:digits] + other + page[digits + 1 :])
    opened = visit(path.as_uri())
    opened.locator("#facts", has_text="cannot be used").wait_for()
    assert opened.locator("#write:disabled").is_visible()


def test_a_saved_page_fits_a_phone(saved):
    saved.set_viewport_size({"width": 390, "height": 800})
    assert saved.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.fixture
def learned(visit, tmp_path):
    """The saved page of a model and of three earlier moments, which know fewer letters."""
    end = lively()
    moments = []
    for step, factor in ((0, 0.0), (10, 0.2), (2000, 0.6)):
        model = lively()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        moments.append(PageMoment(step, 3.5 - factor, quantize_model(model, 8)))
    moments.append(PageMoment(3000, 2.5, quantize_model(end, 8)))
    path = tmp_path / "model.html"
    tokenizer = tokenizer_of(LETTERS)
    path.write_text(page_of(end, moments[-1].parameters, tokenizer, "my model", {}, moments))
    page = visit(path.as_uri())
    page.locator("#write:enabled").wait_for()
    page.fill("#length", "40")
    return page


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
    models = [lively(), lively()]
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.mul_(0.2)
    moments = [Moment(0, models[0]), Moment(3000, models[1])]
    player = Player("mine", models[1], tokenizer_of(LETTERS), moments=moments)
    with served([player]) as site:
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
    players = [
        Player(name, model, tokenizer_of(LETTERS), moments=moments) for name in ("one", "another")
    ]
    with served(players) as site:
        page = open_play(visit, site)
        assert not any(box.is_visible() for box in page.locator(".moments").all())


def test_the_slider_names_the_generation_of_a_later_model(visit, tmp_path):
    """Whose first step has random weights again."""
    model = lively()
    weights = quantize_model(model, 8)
    moments = [PageMoment(step, None, weights, generation=2) for step in (0, 9)]
    path = tmp_path / "model.html"
    path.write_text(page_of(model, weights, tokenizer_of(LETTERS), "my model", {}, moments))
    page = visit(path.as_uri())
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
    learned.set_viewport_size({"width": 390, "height": 800})
    assert learned.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_page_of_one_moment_has_no_slider(saved):
    assert saved.locator(".moments").is_hidden()


def test_the_slider_answers_the_last_message_anew(directory, visit, tmp_path):
    end, tokenizer = load_model(directory)
    earlier, _ = load_model(directory)
    with torch.no_grad():
        for parameter in earlier.parameters():
            parameter.mul_(0.1)
    moments = [
        PageMoment(0, None, quantize_model(earlier, 8)),
        PageMoment(9, None, quantize_model(end, 8)),
    ]
    path = tmp_path / "model.html"
    path.write_text(page_of(end, moments[1].parameters, tokenizer, "my model", {}, moments))
    page = visit(path.as_uri())
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
