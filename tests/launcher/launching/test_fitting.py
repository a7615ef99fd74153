"""`--fit`: the size whose page is just below so many bytes, and the loss of its forecast."""

from __future__ import annotations

import json
import re
import string
from typing import Any

import pytest
import torch
from launching import settings_of
from models import tokenizer_of

from sm_nanogpt import InputError, upload_data
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.job import COMMON_FIELDS, Expected, Request
from sm_nanogpt.launcher.launching import sizing
from sm_nanogpt.launcher.launching.fitting import EMPTY_PAGE, fit_sizes
from sm_nanogpt.launcher.launching.forecasts import Row, expected_of, in_two_generations
from sm_nanogpt.launcher.launching.launch import prepare
from sm_nanogpt.launcher.models.quantization import quantize_model
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.store import Upload
from sm_nanogpt.launcher.views.model_page import page_of

CHARACTERS = (string.ascii_letters + string.punctuation)[:65]
LETTERS = tokenizer_of(CHARACTERS)
MEGABYTE = 10**6


def text(n_characters: int = 10**7) -> dict[str, Channel]:
    upload = Upload(
        "file:///data",
        0,
        "",
        (),
        characters=n_characters,
        vocabulary=CHARACTERS,
        vocabulary_size=len(CHARACTERS),
    )
    return {"data": Channel("text", "file:///data", upload)}


def request(**fields: Any) -> Request:
    return Request(instance="local", **fields)


def normal_model(config: Config) -> GPT:
    """A model whose weights have a normal distribution: those of a trained one compress better."""
    model = GPT(config, len(LETTERS))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def saved_bytes(size: float) -> int:
    """The bytes of the page of a size, with room for all that a page may say of its job."""
    length = sizing.text_length(request(), text())
    sized_request = sizing.with_size(request(), size, length)
    model = normal_model(sized_request.config())
    card = {"data": "x" * 100, "settings": "y" * 100}
    return len(page_of(model, quantize_model(model, 6), LETTERS, "a model", card).encode())


@pytest.mark.parametrize("page_limit", [MEGABYTE // 8, MEGABYTE])
def test_the_page_of_a_fitted_size_is_just_below(page_limit):
    [fit] = fit_sizes(request(), text(), [page_limit])
    size = saved_bytes(fit.size)
    assert size <= fit.page_bytes <= page_limit < saved_bytes(fit.size + 0.25)


def test_a_page_without_its_model_is_as_small_as_planned():
    page = page_of(normal_model(Config()), {}, LETTERS, "a model", {"settings": "x" * 500})
    assert len(page.encode()) < EMPTY_PAGE


def test_more_rows_and_layers_leave_less_width():
    texts = text()
    [plain] = fit_sizes(request(), texts, [MEGABYTE])
    [deep] = fit_sizes(request(hyperparameters={"n_layer": 12}), texts, [MEGABYTE])
    [wide] = fit_sizes(request(hyperparameters={"vocab_size": 1 << 12}), texts, [MEGABYTE])
    assert max(deep.size, wide.size) < plain.size
    assert max(fit.page_bytes for fit in (plain, deep, wide)) <= MEGABYTE


def test_a_short_text_gets_a_smaller_size():
    fit, twice = fit_sizes(request(), text(100_000), [MEGABYTE, 2 * MEGABYTE])
    [by_page] = fit_sizes(request(), text(), [MEGABYTE])
    assert fit.size == twice.size < by_page.size
    assert fit.is_by_text
    assert "chosen" in str(fit)  # in a forecast, a larger one may lose less
    assert not by_page.is_by_text
    assert "chosen" not in str(by_page)


def test_a_fitted_size_is_trained_as_auto_would(rehearse, short_text_file):
    """In two generations, where they gain."""
    ran = rehearse("--instance", "ml.g5.xlarge", "--data", short_text_file, "--fit", "1MB").good
    assert json.loads(ran.out)["HyperParameters"]["generations"] == "2"


def test_bytes_are_a_number_with_a_unit():
    cases = [
        ("250kB", 250_000),
        ("1 MB", 10**6),
        ("0.5mb", 500_000),
        ("1MiB", 1 << 20),
        ("70000", 70_000),
    ]
    for typed, n_bytes in cases:
        assert request(fit=typed).fit == n_bytes


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"fit": "1 tome"}, "must be a number of bytes"),
        ({"fit": "0kB"}, "must be more than 0"),
        ({"preset": "cpu"}, "`preset=` sets the size of the model too"),
        ({"resume": "latest"}, "`resume=` sets the size of the model too"),
    ],
)
def test_a_fit_goes_with_nothing_that_sets_a_size(fields, problem):
    with pytest.raises(InputError, match=problem):
        request(**{"fit": "1MB", **fields})


def test_a_page_smaller_than_the_smallest_is_refused():
    with pytest.raises(InputError, match=r"the page of the smallest size has \d\d\.\dkB"):
        fit_sizes(request(), text(), [20_000])


def test_an_edited_folder_fits_no_page(tmp_path, cli, short_text_file):
    assert cli("copy-script", "edited").code == 0
    with (tmp_path / "edited" / "model.py").open("a") as model:
        model.write("# edited\n")
    local = ["launch", "--instance", "local", "--data", short_text_file]
    ran = cli(local, "--entry-point", "edited", "--fit", "1MB")
    assert ran.failed(2, "an edited folder computes this model")


# -- what is said of it ----------------------------------------------------------------------------


def rows(*losses: float) -> list[Row]:
    by_size = []
    for size, loss in enumerate(losses, 1):
        expected = Expected(loss=loss, low=loss - 0.1, high=loss + 0.1)
        row = Row(
            size=size,
            parameters=1,
            readings=1,
            expected=expected,
            bits_per_byte=1,
            seconds={},
            dollars={},
        )
        by_size.append(row)
    return by_size


def test_a_size_between_two_has_a_loss_between():
    cases = [(1, 2.0), (1.5, 1.75), (2, 1.5), (2.25, 1.4), (0.95, None), (3.05, None)]
    for size, loss in cases:
        expected = expected_of(size, rows(2.0, 1.5, 1.1))
        assert (expected and expected.loss) == (loss and pytest.approx(loss))


def test_a_launch_names_the_command_that_forecasts(rehearse):
    ran = rehearse("--instance", "ml.g5.xlarge", "--fit", "250kB").good
    assert "fit: size " in ran.err
    assert "launch --forecast --data " in ran.err


def test_a_forecast_is_advised_by_the_name_of_an_upload(rehearse, home, text_file):
    upload = upload_data(text_file, settings_of(home))
    launch = ["--instance", "ml.g5.xlarge", "--fit", "250kB", "--data", upload.uri]
    assert f"--data {upload.uri.rpartition('/')[2]}` makes" in rehearse(launch).good.err


def test_no_forecast_is_advised_for_a_short_text(rehearse, short_text_file, tmp_path):
    text = short_text_file.read_text()
    (tmp_path / "short.txt").write_text(text[:19_000])  # nine tenths of which are trained on
    ran = rehearse("--instance", "ml.g5.xlarge", "--fit", "250kB", "--data", "short.txt").good
    assert "are too few for pilots" in ran.err
    assert "--forecast" not in ran.err


def test_a_launch_says_what_twice_the_file_gives(rehearse, text_file, monkeypatch):
    from sm_nanogpt.launcher.launching import draft

    monkeypatch.setattr(draft, "forecast_rows", lambda *_: rows(2.0, 1.5, 1.1))

    def launch(*options: str) -> str:
        long_text = ["--instance", "ml.g5.xlarge", "--data", text_file]
        err: str = rehearse(long_text, options).good.err
        return err

    assert "twice the file, size " in launch("--fit", "250kB")
    assert "the forecast has no loss for size" in launch("--fit", "70kB")
    changed = launch("--fit", "250kB", "--set", "max_steps=7")
    assert "no loss is forecast for a run that differs" in changed


def test_a_dry_run_has_the_time_of_the_forecast(cli, text_file, monkeypatch):
    from sm_nanogpt.launcher.launching import draft, forecasts

    timed = [row.model_copy(update={"seconds": {"local": 42.0}}) for row in rows(2.0, 1.5, 1.1)]
    for module in (draft, forecasts):
        monkeypatch.setattr(module, "forecast_rows", lambda *_: timed)
    launch = ("launch", "--instance", "local", "--data", text_file, "--dry-run", "--size", "2")
    assert "about 0:00:42 by the forecast" in cli(launch).good.err
    assert "by the forecast" not in cli(launch, "--set", "max_steps=7").good.err


def test_a_job_of_two_generations_is_forecast_to_lose_less(home, short_text_file, monkeypatch):
    from sm_nanogpt.launcher.launching import draft

    monkeypatch.setattr(draft, "forecast_rows", lambda *_: rows(2.0, 1.5, 1.1))

    def expected(generations: int) -> Expected | None:
        values = {"generations": generations}
        job_request = request(data=str(short_text_file), size=1.5, hyperparameters=values)
        return prepare(job_request, settings_of(home)).job.expected

    one, two = expected(1), expected(2)
    assert one is not None and two is not None
    assert two.loss < one.loss
    assert expected(3) is None  # not measured


def test_a_fitted_job_of_two_generations_is_forecast_as_two(rehearse, short_text_file, monkeypatch):
    from sm_nanogpt.launcher.launching import draft

    monkeypatch.setattr(draft, "forecast_rows", lambda *_: rows(2.0, 1.5, 1.1))
    launch = ["--instance", "ml.g5.xlarge", "--data", short_text_file, "--fit", "1MB"]
    losses = []
    for options in (["--set", "generations=1"], []):
        err = rehearse(launch, *options).good.err
        match = re.search(r"forecast: loss (\d\.\d+)", err)
        assert match is not None
        losses.append(float(match[1]))
    one, two = losses
    assert two < one


def test_generations_not_known_to_gain_have_no_forecast(home, text_file, monkeypatch):
    """Of a text that each reads less than four times."""
    from sm_nanogpt.launcher.launching import draft

    monkeypatch.setattr(draft, "forecast_rows", lambda *_: rows(2.0, 1.5, 1.1))
    values = {"generations": 2}
    job_request = request(data=str(text_file), size=1.0, hyperparameters=values)
    assert prepare(job_request, settings_of(home)).job.expected is None


def test_two_generations_gain_more_by_more_readings():
    one = Expected(loss=2.0, low=1.9, high=2.1)
    by_4_readings = in_two_generations(one, 4)
    by_16_readings = in_two_generations(one, 16)
    assert by_16_readings.loss < by_4_readings.loss < one.loss
    assert by_4_readings.high / by_4_readings.low > one.high / one.low  # it is less certain
    assert not in_two_generations(one.model_copy(update={"measured": True}), 4).measured


def test_a_job_remembers_what_its_page_may_have(home, short_text_file):
    job = prepare(request(data=str(short_text_file), fit="70kB"), settings_of(home)).job
    record = job.model_dump(mode="json", include=COMMON_FIELDS)
    assert record["page_limit"] == 70_000
    assert record["fit"] is None
    assert record["size"] == pytest.approx(0.5, abs=0.2)
