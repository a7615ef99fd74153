"""The report and the page of play in a real browser: Chromium, driven by Playwright."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jobs import file_rows, sibling
from launching import settings_of
from models import lively, tokenizer_of
from served import LETTERS, served

from launcher.judge.evaluation import Evaluation, save_evaluation
from launcher.models.chat import Message
from launcher.views.model_page import page_of
from launcher.views.play import Player
from sm_nanogpt import load_model, stream_samples

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
    """Chromium notes a refused request, which the page itself shows."""
    return said.type == "error" and "status of 400" not in said.text


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
    names = ("train_loss", "val_loss", "bits_per_byte")
    assert [row.split("\t") for row in table.splitlines()] == [
        [f"{row['step']:,}", *(f"{row[name]:.4f}" for name in names)]
        for row in file_rows(job)
        if "val_loss" in row
    ]


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


@pytest.mark.parametrize("n_texts", [1, 2])
def test_numbers_stand_beside_their_labels_on_a_phone(job, cli, visit, n_texts):
    for number in range(n_texts):
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
        label, *numbers = boxes
        assert len(numbers) == n_texts
        assert all(label["x"] + label["width"] <= each["x"] for each in numbers)
        assert all(each["x"] + each["width"] <= 390 for each in numbers)


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


@pytest.fixture
def play(site, visit):
    here = f"http://127.0.0.1:{site.port}/"
    page = visit(f"{here}?token=secret", within=f"{here}.*")
    page.wait_for_selector("article")
    return page


def ended(page: Page) -> None:
    page.locator("#end:disabled").wait_for()


def test_text_streams_into_the_page(play, site):
    play.evaluate("""() => {
        window.lengths = new Set();
        const out = document.querySelector(".out");
        const note = new MutationObserver(() => lengths.add(out.textContent.length));
        note.observe(out, {childList: true});
    }""")
    assert focused(play) == "prompt"
    play.keyboard.type("abc")
    play.fill("#seed", "7")
    play.keyboard.press("Control+Enter")
    status = play.locator(".status").first
    ended(play)
    assert re.fullmatch(r"500 tokens, [\d,.]+ tokens/s, seed 7", status.inner_text())
    assert len(play.evaluate("[...lengths]")) > 3
    text = site.text(prompt="abc", max_new_tokens=500)
    assert play.locator(".out").first.text_content() == f"abc{text}"


def test_the_button_answers_to_enter(play):
    play.fill("#max_new_tokens", "5")
    tab_to(play, "generate")
    play.keyboard.press("Enter")
    ended(play)
    assert play.locator(".status").first.inner_text().startswith("5 tokens, ")


def test_arrow_keys_show_what_was_likely(play):
    play.fill("#max_new_tokens", "5")
    play.keyboard.press("Control+Enter")
    ended(play)
    tab_to(play, "DIV")
    play.keyboard.press("ArrowRight")
    assert play.locator("#likely").is_visible()
    assert play.locator("#likely .chosen").count() == 1


@pytest.fixture
def talk(directory, visit):
    """The page of a model that has learned from conversations, and its player."""
    with served([Player("mine", *load_model(directory), "its loss")]) as site:
        page = visit(f"http://127.0.0.1:{site.port}/?token=secret", within="http://127.0.0.1:.*")
        page.wait_for_selector("#anew")
        page.fill("#temperature", "0")
        page.fill("#max_new_tokens", "10")
        yield page, site.players[0]


def ask(page: Page, question: str) -> str:
    """Send a message with Enter; returns the answer."""
    page.focus("#prompt")
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    ended(page)
    answers = page.locator(".said").all_text_contents()
    return answers[-1] if answers else ""


def test_the_page_keeps_a_conversation_until_a_new_one(talk):
    page, player = talk
    said: list[Message] = []
    for system in ("", "Be short."):
        page.fill("#system", system)
        for question in ("What is 3 + 3?", "And 4?"):
            answer, first = ask(page, question), [Message("system", system)] * bool(system)
            said.append(Message("user", question))
            prompt = player.chat.fit([*first, *said], 10)
            sampling = dict(max_new_tokens=prompt.max_new_tokens, temperature=0)
            columns = stream_samples(player.model, player.tokenizer, prompt.ids, **sampling)
            assert answer == "".join(piece for (piece,) in columns)
            said.append(Message("assistant", answer))
    assert page.locator(".asked").count() == 4
    assert "its loss" in page.locator("article header").inner_text()
    page.click("#anew")
    assert page.locator(".out").text_content() == ""


def test_shift_enter_breaks_the_line_of_a_message(talk):
    page, _ = talk
    page.focus("#prompt")
    page.keyboard.type("What")
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#prompt") == "What\n"
    assert page.locator(".asked").count() == 0


@pytest.mark.parametrize("width", [1300, 390])
def test_a_message_is_typed_below_the_conversation(talk, width):
    page, _ = talk
    page.set_viewport_size({"width": width, "height": 800})
    ask(page, "What is 3 + 3?")
    boxes = [page.locator(name).bounding_box() for name in (".said", "#prompt")]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"] <= 800
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_says_what_the_model_no_longer_sees(talk):
    page, player = talk
    said: list[Message] = []
    dropped = 0
    while not dropped:
        said.append(Message("user", "What is 3 + 3?"))
        dropped = player.chat.fit(said, 10).n_dropped
        said.append(Message("assistant", ask(page, "What is 3 + 3?")))
    assert f"the oldest {dropped} messages" in page.locator(".status").inner_text()
    above = page.locator(".forgotten").evaluate(
        "line => [...line.parentNode.children].indexOf(line)"
    )
    assert above == dropped


def test_an_empty_answer_is_said_and_can_be_asked_again(talk):
    page, player = talk
    player.tokenizer.ends = {*range(len(player.tokenizer))}
    ask(page, "What is 3 + 3?")
    assert "the text is empty" in page.locator(".status").inner_text()
    assert page.input_value("#prompt") == "What is 3 + 3?"


def test_a_message_that_fails_can_be_sent_again(talk):
    page, player = talk
    ask(page, "What is 3 + 3?")
    page.fill("#prompt", "a " * player.chat.context_size)
    page.keyboard.press("Enter")
    page.locator(".status.error", has_text="too long").wait_for()
    assert page.input_value("#prompt").startswith("a a a")
    assert page.locator(".asked").count() == 1


def test_a_message_to_a_chat_and_a_plain_model_is_sent_once(directory, visit):
    plain = Player("plain", lively(), tokenizer_of(LETTERS))
    with served([Player("chat", *load_model(directory)), plain]) as site:
        page = visit(f"http://127.0.0.1:{site.port}/?token=secret", within="http://127.0.0.1:.*")
        page.wait_for_selector("#anew")
        page.fill("#max_new_tokens", "5")
        for number, message in enumerate(("2 + 2?", "bad"), 1):
            ask(page, message)
            assert page.input_value("#prompt") == ""
            assert page.locator(".asked").count() == number
        refused, fine = ("never seen: '+', '2', '?'", "5 tokens")
        assert fine in page.locator(".status").last.inner_text()
        ask(page, "2 + 2?")
        assert refused in page.locator(".status.error").inner_text()


def test_the_page_of_play_fits_a_phone(play):
    play.set_viewport_size({"width": 390, "height": 800})
    assert play.evaluate("document.documentElement.scrollWidth") <= 390


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
    saved.locator("#status", has_text="50 tokens").wait_for()
    text = saved.locator("#text").text_content() or ""
    assert text.startswith("abc")
    assert len(text) == 53
    assert set(text) <= set(LETTERS)


def test_a_saved_page_shows_what_was_likely(saved):
    saved.fill("#length", "50")
    saved.keyboard.press("Control+Enter")
    saved.locator("#status", has_text="50 tokens").wait_for()
    saved.locator(".token", has_text=re.compile("[a-i]")).first.click()
    assert saved.locator("#likely div").count() >= 5
    saved.keyboard.press("Escape")
    assert saved.locator("#likely").is_hidden()


def test_a_saved_page_says_what_the_model_lacks(saved):
    saved.fill("#prompt", "abcZ")
    saved.keyboard.press("Control+Enter")
    assert saved.locator("#status").inner_text() == "The model does not know Z"


def test_a_damaged_page_says_so(visit, tmp_path):
    page = page_of(lively(), {}, tokenizer_of(LETTERS), "my model", {})
    begin = page.index('id="model"')
    digits = page.index(">", begin) + 100
    other = "A" if page[digits] != "A" else "B"
    path = tmp_path / "model.html"
    path.write_text(page[:digits] + other + page[digits + 1 :])
    opened = visit(path.as_uri())
    opened.locator("#status", has_text="cannot be used").wait_for()
    assert opened.locator("#write:disabled").is_visible()


@pytest.mark.parametrize("width", [390, 1300])
def test_a_saved_page_fits_its_screen(saved, width):
    saved.set_viewport_size({"width": width, "height": 800})
    assert saved.evaluate("document.documentElement.scrollWidth") <= width
