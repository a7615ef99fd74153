"""Forecasts: the law, the pilots, the table, and what a job keeps of them."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from judged_texts import chat_of
from kills import Killed, kill_at

from sm_nanogpt import InputError, Request, ServiceError, upload_data
from sm_nanogpt import job as job_of
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.data import read_windows
from sm_nanogpt.entry_point.sizes import hyperparameters_for_size
from sm_nanogpt.entry_point.text import Corpus, Tokenizer, character_tokenizer, read_tokens
from sm_nanogpt.launcher.cli.forecast import next_request
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.forecast import clock, forecasting, pilots
from sm_nanogpt.launcher.forecast import forecaster as forecaster_module
from sm_nanogpt.launcher.forecast import pilots as pilots_module
from sm_nanogpt.launcher.forecast.checks import best_size, has_lowest, problem_of_law, up_to_lowest
from sm_nanogpt.launcher.forecast.forecaster import Forecaster
from sm_nanogpt.launcher.forecast.law import CompleteRun, Law, shared_law
from sm_nanogpt.launcher.forecast.pilots import PilotTime, PlannedPilot, Trial, pilots_of, trials_of
from sm_nanogpt.launcher.forecast.times import InstanceType
from sm_nanogpt.launcher.job import Expected
from sm_nanogpt.launcher.launching import forecasts, sizing
from sm_nanogpt.launcher.launching.forecasts import Forecast, ForecastLedger, Pilot, Row
from sm_nanogpt.launcher.launching.launch import prepare
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text import run_corpus
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.ids import draw_ids, write_ids
from sm_nanogpt.launcher.text.run_corpus import corpus_of

BENCHMARKS = Path(__file__).parents[3] / "examples/benchmarks"
IDENTITY = [
    [1.0, 0, 0],
    [0, 1.0, 0],
    [0, 0, 1.0],
]
LAW = Law((0.1, 0.5, 0.3), [0.5, 0.1, 0.2], IDENTITY, 0.005)
NUMBERS = torch.tensor([-0.2, 0.6, 0.01], dtype=torch.float64)


def true_loss(run: CompleteRun) -> float:
    return float((LAW.features([run]) @ NUMBERS).exp())


@functools.cache
def corpus(n: int = 200_000) -> Corpus:
    sentence = "law of a text is what its pilots say and no more than that\n"
    draw = random.Random(1)
    text = " ".join(draw.choices(sentence.split(" "), k=n // 3))[:n]
    tokenizer = Tokenizer(character_tokenizer("".join(sorted(set(text)))))
    index = {word.decode(): id for id, word in enumerate(tokenizer.words)}
    ids = torch.tensor([index[c] for c in text], dtype=torch.uint8)
    return Corpus(tokenizer, ids[: n * 9 // 10], ids[n * 9 // 10 :], "sha")


def obedient(
    trials: Sequence[Trial], corpus: Corpus, source: Source, at_once: int
) -> Iterator[tuple[Trial, Pilot]]:
    """Runs that lose what the law says, and compute 10**12 parameters times tokens in a second."""
    for trial in trials:
        hyperparameters = dict(trial.hyperparameters)
        hyperparameters.pop("processes", None)
        config = Config(**hyperparameters)
        tokens_per_step = config.batch_size * config.block_size
        tokens = config.max_steps * tokens_per_step
        loss = true_loss(CompleteRun(config.matrix_parameters, tokens, trial.n_tokens))
        step_seconds = 1e-12 * config.matrix_parameters * tokens_per_step
        pilot = Pilot(
            loss=loss,
            bits_per_byte=2 * loss,
            step_seconds=step_seconds,
            around=5,
            seconds=5 + config.max_steps * step_seconds,
            cpu_seconds=config.max_steps * (0.01 + step_seconds),
            train_loss=loss,
        )
        yield trial, pilot


def run_pilots_as(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forecaster_module, clock):
        monkeypatch.setattr(module, "run_trials", run)


@pytest.fixture
def lawful(monkeypatch):
    run_pilots_as(obedient, monkeypatch)
    monkeypatch.setattr(forecaster_module, "shared_law", lambda: LAW)
    monkeypatch.setattr(clock, "is_busy", lambda: False)


@pytest.fixture
def forecaster(tmp_path, lawful):
    return Forecaster(corpus(), Source.packaged(), tmp_path / "kept.jsonl")


# -- the law ---------------------------------------------------------------------------------------


def test_a_law_foretells_the_runs_of_its_text():
    runs = []
    for shape in itertools.product((10**5, 3 * 10**5), (10**5, 10**6), (10**5, 10**6)):
        run = CompleteRun(*shape)
        runs.append(replace(run, loss=true_loss(run)))

    large = CompleteRun(2 * 10**6, 10**7, 10**6)
    [(loss, deviation)] = LAW.of_text(runs).losses([large])
    assert loss == pytest.approx(true_loss(large), rel=0.01)
    assert abs(math.log(loss / true_loss(large))) < 2 * deviation


def test_forecasts_start_at_the_loss_of_the_largest_pilot():
    runs = []
    for parameters in (10**5, 2 * 10**5, 3 * 10**5):
        run = CompleteRun(parameters, 10**6, 10**6)
        runs.append(replace(run, loss=true_loss(run)))
    runs.append(replace(runs[-1], unique=2 * 10**5, loss=2 * runs[-1].loss))  # on a part
    runs[2] = replace(runs[2], loss=1.02 * runs[2].loss)
    [(loss, _)] = LAW.of_text(runs).losses([runs[2]])
    assert loss == pytest.approx(runs[2].loss)


def test_the_80_percent_intervals_hold_80_percent_of_truths():
    """Of runs on texts that had no part in the fit, up to the size of the lowest forecast."""
    held = []
    losses = {}
    for line in (BENCHMARKS / "truths.jsonl").read_text().splitlines():
        truth = json.loads(line)
        losses[truth["text"], truth["size"]] = truth["loss"]
    for recorded in json.loads((BENCHMARKS / "forecasts.json").read_text()):
        law = shared_law().of_text([run_of(pilot) for pilot in recorded["runs"]])
        rows = [row for row in recorded["rows"] if row["size"] >= 2]
        predicted = law.losses([run_of({**row, "unique": recorded["tokens"]}) for row in rows])
        lowest = min(range(len(rows)), key=lambda n: predicted[n][0])
        for row, (loss, deviation) in list(zip(rows, predicted, strict=True))[: lowest + 1]:
            truth = losses.get((recorded["text"], row["size"]))
            if truth is not None:
                held.append(abs(math.log(truth / loss)) <= forecaster_module.Z_80 * deviation)
    assert len(held) > 10
    assert sum(held) >= 0.8 * len(held)


def run_of(row: dict[str, Any]) -> CompleteRun:
    return CompleteRun(
        row["matrix_parameters"], row["trained_tokens"], row["unique"], row.get("loss", math.nan)
    )


def test_fewer_pilots_give_a_wider_interval():
    run = CompleteRun(10**5, 10**5, 10**6, 2.0)
    far = CompleteRun(10**7, 10**8, 10**6)
    [(_, deviation_of_one)] = LAW.of_text([run]).losses([far])
    [(_, deviation_of_nine)] = LAW.of_text([run] * 9).losses([far])
    assert deviation_of_one > deviation_of_nine


def test_the_shipped_law_is_a_law():
    law = shared_law()
    torch.linalg.cholesky(torch.tensor(law.covariance, dtype=torch.float64))
    small = CompleteRun(10**6, 10**6, 10**6, 1.5)
    large = CompleteRun(2 * 10**6, 4 * 10**6, 10**6)
    [(loss, deviation)] = law.of_text([small]).losses([large])
    assert 1.0 < loss < 1.6
    assert 0 < deviation < 0.1


# -- pilots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [100_000, 10**6, 10**10])
def test_pilots_read_the_text_and_parts_of_it(tokens):
    planned = pilots_of(tokens)
    parts = [unique for _, unique in planned]
    assert max(parts) == min(tokens, pilots.MAX_SAMPLE_TOKENS)
    assert min(parts) >= tokens // 8 or tokens > pilots.MAX_DIVIDED_TOKENS
    assert planned == sorted(planned, reverse=True)


@pytest.mark.parametrize("limit", [12_500, 99_999])
def test_a_part_is_drawn_from_all_over_the_text(limit):
    ids = torch.arange(100_000, dtype=torch.int32)
    part = draw_ids(ids, limit)
    assert limit * 0.7 <= len(part) <= limit
    assert len(part.unique()) == len(part)
    if len(part) > 5000:
        assert part.min() < 10_000 < 80_000 < part.max()


def test_a_part_is_written_as_a_run_reads_it(tmp_path):
    whole = corpus()
    train = draw_ids(whole.train, 50_000)
    val = draw_ids(whole.val, pilots.MAX_SAMPLE_TOKENS)
    write_ids(tmp_path / "text", whole.tokenizer, train, val)

    config: Any = Config()
    part = read_tokens(tmp_path / "text", config)
    assert part.tokenizer.words == whole.tokenizer.words
    assert len(part.train) <= 50_000 < len(whole.train)
    window = read_windows(part.val, torch.tensor([0]), 99)
    assert window.equal(read_windows(whole.val, torch.tensor([0]), 99).short())


# -- the forecast ----------------------------------------------------------------------------------


def test_a_forecast_is_near_the_truth_and_names_the_lowest(forecaster):
    table = forecaster.forecast("text", [], None)
    for row in table.rows:
        run = forecaster.sizes.run(row.size)
        assert row.expected.low < true_loss(run) < row.expected.high
        assert row.bits_per_byte == pytest.approx(2 * row.expected.loss)
        seconds = 5 + 1e-12 * run.parameters * run.tokens
        assert row.seconds["local"] == pytest.approx(seconds, rel=0.1)
    assert table.best == best_size(table.rows)
    assert table.twice_text.low < table.twice_text.nats < 0
    assert table.twice_text.nats < table.twice_text.high


@pytest.mark.parametrize(("eval_interval", "evaluations"), [(10, 9), (100, 0)])
def test_all_evaluations_but_the_last_take_time(forecaster, eval_interval, evaluations):
    """One is after each interval, which need not divide the steps, and the last at the end."""
    local_clock = clock.LocalClock(forecaster.sizes, forecaster.corpus, forecaster.ledger)
    config = Config(
        max_steps=100,
        batch_size=10,
        block_size=100,
        eval_interval=eval_interval,
        eval_tokens=3000,  # which take as long as a step
    )
    assert local_clock.steps_with_evaluations(config) == 100 + evaluations


def test_times_of_a_busy_machine_are_not_kept(forecaster, monkeypatch):
    monkeypatch.setattr(clock, "is_busy", lambda: True)
    busy = forecaster.forecast("text", [], None)
    again = forecaster.forecast("text", [], None)
    assert busy.busy
    assert again == busy
    assert "other programs" in busy.notes[0]
    assert not any(name.startswith("speed") for name in forecaster.ledger.pilots)
    monkeypatch.setattr(clock, "is_busy", lambda: False)
    quiet = forecaster.forecast("text", [], None)
    assert not quiet.busy
    assert not any("other programs" in line for line in quiet.notes)


def test_times_of_a_busy_machine_are_by_processor_seconds(forecaster, monkeypatch):
    """The pilots compute 0.01 s a step, and 10**12 parameters times tokens in a second."""
    monkeypatch.setattr(clock, "is_busy", lambda: True)
    monkeypatch.setattr(clock, "cores", lambda: 2)
    for row in forecaster.forecast("text", [], None).rows:
        config = forecaster.sizes.config(row.size)
        step = config.matrix_parameters * config.batch_size * config.block_size / 1e12
        assert row.seconds["local"] == pytest.approx(config.max_steps * (0.01 + step / 2), rel=0.3)


def test_a_program_that_starts_meanwhile_is_noticed(forecaster, monkeypatch):
    looks = iter([False, True])
    monkeypatch.setattr(clock, "is_busy", lambda: next(looks, False))
    assert forecaster.forecast("text", [], None).busy
    assert not any(name.startswith("speed") for name in forecaster.ledger.pilots)


def test_a_forecast_from_a_beginning_is_for_the_whole(tmp_path, lawful):
    path = tmp_path / "kept.jsonl"
    whole = Forecaster(corpus(), Source.packaged(), path, n_tokens=5_000_000)
    table = whole.forecast("text", [], None)
    assert table.tokens == 5_000_000
    assert table.rows[0].readings < 10


def test_a_pilot_is_kept_before_it_is_logged(tmp_path, lawful, monkeypatch):
    path = tmp_path / "kept.jsonl"

    def check(line: str) -> None:
        if ": loss" in line:
            assert line.split(": ")[1] in ForecastLedger(path).pilots

    monkeypatch.setattr(forecaster_module.logger, "info", check)
    Forecaster(corpus(), Source.packaged(), path).forecast("text", [], None)


def test_the_time_left_is_by_the_work_of_pilots_that_ended(monkeypatch):
    """Of 100 units by two at a time, 20 have taken 10 s each, 10 s ago."""
    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pilot_time = PilotTime(work=100.0, at_once=2, start_time=0.0)
    pilot_time.note_end(10.0, 10.0)
    pilot_time.note_end(10.0, 10.0)
    assert pilot_time.seconds_left == pytest.approx(40.0)
    now = 90.0
    assert pilot_time.seconds_left == 0.0


def test_pilots_say_how_long_they_go_on(monkeypatch, caplog):
    """Unless one has just ended, which is logged itself."""
    caplog.set_level("INFO")
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pilot_time = PilotTime(work=100.0, at_once=2, start_time=0.0)
    for seconds in (30.0, 60.0, 90.0, 120.0):
        now = seconds
        pilot_time.log_time()
        if now == 60.0:
            now += 5
            pilot_time.note_end(10.0, 65.0)
    assert caplog.messages == [
        "pilot: 0:00:30 so far",
        "pilot: 0:01:00 so far",
        "pilot: 0:02:00 so far",
    ]


def test_the_time_of_pilots_is_logged_while_they_run(forecaster, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("sm_nanogpt.launcher.files.progress.LINE_SECONDS", 0.01)

    def slow(*arguments: Any) -> Iterator[tuple[Trial, Pilot]]:
        launching.until(lambda: "pilot: 0:00:00 so far" in caplog.messages)
        yield from obedient(*arguments)

    run_pilots_as(slow, monkeypatch)
    forecaster.pilots()


def test_each_pilot_but_the_last_says_the_time_left(forecaster, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(forecaster_module.logger, "info", lines.append)
    forecaster.pilots()
    assert lines[0].startswith(f"pilot: {len(lines) - 1} to run, ")
    assert all(", time left " in line for line in lines[1:-1])
    assert lines[-1].endswith(f"({len(lines) - 1} of {len(lines) - 1})")


def test_a_forecast_survives_a_kill_at_its_writes(tmp_path, lawful, monkeypatch):
    """What was written whole is not run again, and the forecast is the same."""
    made = list[str]()

    def noted(trials: Sequence[Trial], *args: Any) -> Iterator[tuple[Trial, Pilot]]:
        for trial, pilot in obedient(trials, *args):
            made.append(trial.name)
            yield trial, pilot

    def make(path: Path) -> Forecast:
        whole = Forecaster(corpus(), Source.packaged(), path)
        return whole.forecast("text", [], None)

    run_pilots_as(noted, monkeypatch)
    expected = make(tmp_path / "never-killed.jsonl")
    names = list(made)
    kills = {
        "the first pilot": (1, False, names),
        "half of the second": (2, True, [names[0], names[1], *names[1:]]),
        "the last pilot": (len(names), False, names),
        "half of the forecast": (len(names) + 1, True, names),
    }
    for write, (number, is_torn, runs) in kills.items():
        made.clear()
        path = tmp_path / f"killed-{number}.jsonl"
        with monkeypatch.context() as patch:
            kill_at(patch, number, is_torn)
            with pytest.raises(Killed):
                make(path)
        assert make(path) == expected, write
        assert made == runs, write


def test_money_and_ceiling_go_by_the_speeds_that_are_known(forecaster):
    instances = [InstanceType("ml.a", 1e12, 100.0, 0.001), InstanceType("ml.b", None, 0.0, 0.001)]
    table = forecaster.forecast("text", instances, 0.8)
    for row in table.rows:
        assert row.seconds["ml.a"] > 100
        assert row.dollars["ml.a"] == pytest.approx(0.001 * row.seconds["ml.a"])
        assert row.seconds["ml.b"] is row.dollars["ml.b"] is None
    assert table.affordable is not None
    paid = {row.size: (row.dollars["ml.a"] or 0) + 0.6 for row in table.rows}
    assert paid[table.affordable] <= 0.8 < paid[max(paid)]
    assert "ml.b" in table.notes[1]


def test_a_larger_size_that_is_no_better_is_not_named():
    def row(size: float, loss: float) -> Row:
        return Row(
            size=size,
            expected=Expected(loss=loss, low=loss, high=loss),
            parameters=1,
            readings=1.0,
            bits_per_byte=1.0,
            seconds={},
            dollars={},
        )

    rows = [
        row(1, 2.0),
        row(2, 1.5),
        row(3, 1.499),
        row(4, 1.6),
    ]
    assert best_size(rows) == 2
    assert best_size([]) is None


def expected_losses(*losses: float) -> dict[float, Expected]:
    by_size = {}
    for size, loss in enumerate(losses, 1):
        by_size[float(size)] = Expected(loss=loss, low=loss, high=loss)
    return by_size


def test_sizes_over_that_of_the_lowest_loss_are_left_out():
    assert list(up_to_lowest(expected_losses(3.0, 2.0, 2.5, 5.9))) == [1, 2]
    assert list(up_to_lowest(expected_losses(3.0, 2.0, 1.5))) == [1, 2, 3]


def test_measured_losses_have_a_lowest_if_they_fall_and_rise():
    assert has_lowest(expected_losses(2.344, 1.867, 1.772, 1.826))
    assert not has_lowest(expected_losses(2.344, 1.867, 1.772, 1.773))
    assert not has_lowest(expected_losses(2.4, 1.6, 2.4, 1.6))
    assert not has_lowest(expected_losses(2.4, 2.0, 2.2, 2.1))
    assert not has_lowest({})


def rising(trials: Sequence[Trial], *args: Any) -> Iterator[tuple[Trial, Pilot]]:
    """Pilots whose larger models overfit, so much that the law does not hold."""
    for trial, pilot in obedient(trials, *args):
        width = trial.hyperparameters["n_embd"]
        yield trial, pilot.model_copy(update={"loss": 1.5 + 0.01 * abs(width - 80)})


def test_where_pilots_overfit_a_forecast_is_what_they_measured(forecaster, monkeypatch):
    run_pilots_as(rising, monkeypatch)
    table = forecaster.forecast("text", [], None)
    assert [row.size for row in table.rows] == [1.0, 1.25]
    assert all(row.expected.measured for row in table.rows)
    assert table.best == 1.25
    assert table.overfits
    assert table.twice_text is table.twice_compute is None
    assert "a size over 1.25 overfits: its loss is higher" in table.notes


def test_the_rows_of_pilots_on_the_whole_text_are_measured(forecaster):
    table = forecaster.forecast("text", [], None)
    pilots = forecaster.ledger.pilots
    for row in table.rows:
        name = f"size {row.size:g} on {forecaster.sizes.n_tokens:,}"
        assert row.expected.measured == (name in pilots)
        if row.expected.measured:
            assert row.expected.loss == pilots[name].loss
            assert str(row.expected) == f"{row.expected.loss:.3f}, measured by a pilot"
    assert sum(row.expected.measured for row in table.rows) == len(pilots_module.PILOT_SIZES)


def test_pilots_on_the_whole_text_are_evaluated_as_jobs(forecaster):
    planned = [PlannedPilot(1.0, 54_000), PlannedPilot(1.0, 27_000)]
    whole, half = trials_of(planned, forecaster.sizes)
    assert whole.hyperparameters == forecaster.sizes.hyperparameters(1.0, 54_000)
    assert half.hyperparameters["eval_interval"] == half.hyperparameters["max_steps"]


def test_a_text_with_nothing_left_to_learn_is_not_forecast():
    """Words drawn at random, of 0.554 nats a character: at size 2, a run lost 0.560."""
    losses = {1.0: 0.628, 1.25: 0.566, 1.5: 0.563, 1.75: 0.562}
    runs = []
    for size, unique in pilots_of(243_000):
        overfit = 1 + 0.01 * (243_000 / unique - 1)
        config = Config(**hyperparameters_for_size(size, unique))
        tokens = config.max_steps * config.batch_size * config.block_size
        runs.append(CompleteRun(config.matrix_parameters, tokens, unique, losses[size] * overfit))
    law = shared_law().of_text(runs)
    assert "larger models gain less" in problem_of_law(law, is_packaged=True)


def unlike(trials: Sequence[Trial], *args: Any) -> Iterator[tuple[Trial, Pilot]]:
    """Pilots that learn their text, and are asked another kind of text."""
    for trial, pilot in obedient(trials, *args):
        yield trial, pilot.model_copy(update={"loss": 5.3, "train_loss": 1.9})


def test_a_validation_text_of_another_kind_is_the_reason(forecaster, monkeypatch):
    run_pilots_as(unlike, monkeypatch)
    with pytest.raises(InputError, match=r"another kind .*: a pilot loses 5\.30 .* 1\.90 in"):
        forecaster.forecast("text", [], None)


def noisy(trials: Sequence[Trial], *args: Any) -> Iterator[tuple[Trial, Pilot]]:
    for n, (trial, pilot) in enumerate(obedient(trials, *args)):
        yield trial, pilot.model_copy(update={"loss": pilot.loss * (1.2 if n % 2 else 0.8)})


def constant(loss: float) -> Any:
    def run(trials: Sequence[Trial], *args: Any) -> Iterator[tuple[Trial, Pilot]]:
        for trial, pilot in obedient(trials, *args):
            yield trial, pilot.model_copy(update={"loss": loss, "train_loss": loss})

    return run


@pytest.mark.parametrize(
    "run, problem",
    [
        (noisy, "miss the law.*at size 1, .* at size 1.25"),
        (constant(4.0), "learn no more"),
        (constant(0.01), "repeats itself"),
    ],
)
def test_nothing_is_forecast_where_nothing_is_known(forecaster, monkeypatch, run, problem):
    run_pilots_as(run, monkeypatch)
    with pytest.raises(InputError, match=problem):
        forecaster.forecast("text", [], None)
    assert forecaster.ledger.last_forecast is None


def test_a_folder_that_compute_does_not_help_is_not_forecast(forecaster):
    """As a model without attention, whose pilots were 2.491 to 2.486."""
    sizes = [size for size, unique in pilots_of(10**6) if unique == 10**6]
    runs = []
    for size in sizes:
        runs.append(replace(forecaster.sizes.run(size, 10**6), loss=1.5 - 0.004 * size))
    assert "compute is worth" in problem_of_law(shared_law().of_text(runs), is_packaged=True)


def test_a_short_text_is_not_forecast(tmp_path):
    with pytest.raises(InputError, match="17,991 characters to train on are too few for pilots"):
        Forecaster(corpus(19_990), Source.packaged(), tmp_path / "kept.jsonl")


def test_a_text_of_20000_characters_is_forecast_by_small_sizes(tmp_path, lawful):
    short = Forecaster(corpus(20_000), Source.packaged(), tmp_path / "kept.jsonl")
    table = short.forecast("text", [], None)
    assert [row.size for row in table.rows if row.expected.measured] == [0.5, 0.75, 1, 1.25]
    assert table.rows[-1].size > 1.25
    assert min(n_tokens for _, n_tokens in pilots_of(short.sizes.n_tokens)) == 4_500


def test_a_text_that_was_learned_before_is_not_forecast(home, tmp_path, monkeypatch):
    run_pilots_as(constant(2.0), monkeypatch)
    vocabulary = [f"w{number}" for number in range(9000)]
    sentence = random.Random(1).choices(vocabulary, k=15_000)
    path = tmp_path / "twice.txt"
    path.write_text(" ".join(sentence * 2))
    with pytest.raises(InputError, match="100% of the validation text stands in"):
        forecasting.forecast(Request(data=str(path), instance="local"), load_settings())


# -- through the whole -----------------------------------------------------------------------------


def test_the_fetch_of_a_whole_upload_has_a_bar(text_file, home, monkeypatch):
    steps = list[int]()
    monkeypatch.setattr(
        run_corpus, "byte_progress", lambda label, source: nullcontext(steps.append)
    )
    uri = upload_data(text_file).uri
    corpus_of({"data": Channel(uri, uri)}, load_settings())
    assert sum(steps) == text_file.stat().st_size


@pytest.fixture
def text_here(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(text[:150_000], encoding="utf-8", newline="")
    return str(path)


def test_a_job_keeps_what_was_forecast_for_its_size(cli, lawful, text_here):
    assert cli("upload-data", text_here).good
    table = json.loads(cli("launch", "--forecast", "--json").good.out)
    row = table["rows"][0]
    request = Request(instance="local", size=row["size"])
    expected = prepare(request, load_settings()).job.expected
    assert expected is not None
    assert expected.loss == row["expected"]["loss"]
    changed = request.model_copy(update={"hyperparameters": {"max_steps": 7}})
    assert prepare(changed, load_settings()).job.expected is None


def test_a_resumed_job_keeps_size_and_forecast(cli, home, job):
    record = json.loads((job.directory / "job.json").read_text())
    expected = {"loss": 1.5, "low": 1.4, "high": 1.6}
    record["job"] |= {"summary": "size 2", "expected": expected}
    (job.directory / "job.json").write_text(json.dumps(record))
    (job.directory / "output" / "model.tar.gz").unlink()  # so that it is resumed as it was

    resumed = job_of(cli("launch", "--resume", job.job_id).good.out.strip()).describe()
    assert resumed.expected is not None
    assert str(resumed.expected) in cli("status", resumed.job_id).out
    assert resumed.summary is not None
    assert resumed.summary.startswith("size 2 resumes")

    longer = cli("launch", "--resume", job.job_id, "--set", "max_steps=12").good
    changed = job_of(longer.out.strip()).describe()
    assert changed.expected is None
    assert changed.summary == f"size 2 max_steps=12 resumes {job.job_id}"
    again = cli("launch", "--resume", changed.job_id, "--set", "max_steps=14").good
    summary = job_of(again.out.strip()).describe().summary
    assert summary == f"size 2 max_steps=14 resumes {changed.job_id}"


def test_a_table_is_printed_with_its_next_command(cli, lawful, text_here):
    ran = cli("launch", "--forecast", "--data", text_here)
    assert ran.code == 0, ran.err
    assert "twice the text" in ran.out
    size = ran.out.partition(": size ")[2].partition("\n")[0]
    next_line = f"next: sm-nanogpt launch --instance local --data {text_here} --size {size}"
    assert ran.err.splitlines()[-1] == next_line
    time_line = ran.err.splitlines()[-2]
    assert re.fullmatch(r"time: about \d+:\d\d:\d\d on local", time_line)
    assert ran.out.count("measured") == len(pilots_module.PILOT_SIZES)


def test_the_next_command_names_the_upload_that_a_part_meant(cli, lawful, text_here):
    uri = cli("upload-data", text_here).good.out.strip()
    ran = cli("launch", "--forecast", "--data", "text").good
    assert f" --data {uri.rpartition('/')[2]} --size " in ran.err.splitlines()[-1]


@pytest.mark.parametrize("gains", [False, True])
def test_a_forecast_names_generations_where_they_gain(cli, lawful, text_here, monkeypatch, gains):
    monkeypatch.setattr(sizing, "gains_by_generations", lambda size, readings: gains)
    ran = cli("launch", "--forecast", "--data", text_here).good
    assert ("--set generations=2` its loss is about " in ran.err) is gains


def test_a_ceiling_counts_on_the_types_that_are_known(cli, lawful, text_here, monkeypatch):
    instances = [
        InstanceType("ml.dear", 1e12, 100.0, 0.1),
        InstanceType("ml.cheap", 1e12, 100.0, 0.001),
    ]
    monkeypatch.setattr(forecasting, "instances_to_forecast", lambda *_: instances)
    ran = cli("launch", "--forecast", "--data", text_here, "--max-cost", "5").good
    assert "the lowest below 5.00 USD: size " in ran.out
    assert ran.err.splitlines()[-1].startswith("next: sm-nanogpt launch --instance ml.cheap ")
    assert " --max-cost 5" in ran.err.splitlines()[-1]


def row_of_times(**seconds: float | None) -> Row:
    """The forecast of size 1, by its seconds on instance types such as `ml_dear`."""
    return Row(
        size=1.0,
        parameters=1000,
        readings=1.0,
        expected=Expected(loss=1.0, low=0.9, high=1.1),
        bits_per_byte=1.0,
        seconds={name.replace("_", "."): time for name, time in seconds.items()},
        dollars={},
    )


@pytest.mark.parametrize(
    ("instance", "max_run"),
    [
        ("ml.fast", None),
        ("ml.slow", 80_000),
        ("ml.fast,ml.slow", 80_000),
        ("ml.unknown", None),
        ("local", None),
        (None, None),
    ],
)
def test_the_time_limit_is_by_the_types_of_the_request(instance, max_run):
    """Other types of the row are those of earlier jobs."""
    row = row_of_times(local=9_000.0, ml_fast=900.0, ml_slow=40_000.0, ml_unknown=None)
    typed = {} if instance is None else {"instance": instance}
    fields = next_request(typed, row)
    assert fields["instance"] == (instance or "local")
    assert fields.get("max_run") == max_run


def test_a_ceiling_without_a_known_type_says_so(cli, lawful, text_here):
    ran = cli("launch", "--forecast", "--data", text_here, "--max-cost", "5").good
    assert "no size is known to stay below 5.00 USD on SageMaker" in ran.out


def test_times_of_a_busy_machine_are_marked(cli, lawful, text_here, monkeypatch):
    monkeypatch.setattr(clock, "is_busy", lambda: True)
    ran = cli("launch", "--forecast", "--data", text_here).good
    assert ran.out.splitlines()[0].endswith("local*")
    assert "note: local" in ran.err
    [time_line] = [line for line in ran.err.splitlines() if line.startswith("time: ")]
    assert time_line.endswith(" on local, and longer while other programs run")


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--size", "3"], "--size"),
        (["--sweep", "seed=1,2"], "--sweep"),
        (["--dry-run"], "--dry-run"),
        (["--max-cost", "0"], "--max-cost 0"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_a_forecast_takes_no_other_options(cli, arguments, problem):
    ran = cli("launch", "--forecast", arguments)
    assert ran.code == 2
    assert problem in ran.error


def test_pilots_are_complete_runs(tmp_path, monkeypatch):
    """Real processes: one that ends well, and one that fails, after which none goes on."""
    whole = corpus()
    values = {"max_steps": 3, "batch_size": 2, "block_size": 32, "n_layer": 1}
    short = Trial("good", values, 50_000)
    [(_, pilot)] = pilots.run_trials([short], whole, Source.packaged(), 1)
    assert 0 < pilot.loss < 5
    assert 0 < pilot.step_seconds < pilot.seconds
    impossible = Trial("bad", {**values, "block_size": 1 << 17}, 50_000)
    with pytest.raises(ServiceError, match=r"bad.*block_size"):
        list(pilots.run_trials([impossible, short], whole, Source.packaged(), 2))


def test_a_damaged_file_of_pilots_is_none(tmp_path, monkeypatch):
    path = tmp_path / "kept.jsonl"
    path.write_text("{")
    monkeypatch.setattr(forecasts, "forecast_path", lambda *_: path)
    assert forecasts.forecast_rows(Request(instance="local"), {}, load_settings()) == []


# -- what jobs elsewhere tell ----------------------------------------------------------------------


def ended(instance: str, count: int = 1, **changes: Any) -> JobDescription:
    config = Config(**hyperparameters_for_size(3, 10**6))
    facts: dict[str, Any] = dict(
        job_id=f"sm-nanogpt-20261127-120000-{instance[3]}{count:05d}",
        status="Completed",
        secondary_status="Completed",
        instance=instance,
        instance_count=count,
        created=0.0,
        started=100.0,
        ended=100.0 + 60 + config.max_steps * 0.01,
        data="file:///gone",
        hyperparameters=asdict(config),
        metrics={"tokens_per_second": config.batch_size * config.block_size / 0.01},
    )
    return JobDescription(**{**facts, **changes})


def test_own_jobs_tell_the_speed_of_an_instance(forecaster, monkeypatch, home):
    jobs = [
        ended("ml.g5.xlarge", 4),
        ended("ml.g5.xlarge", status="Failed"),
        ended("ml.g5.xlarge", job_id="taught", inputs={"teacher": "s3://bucket/models/large"}),
        ended("ml.g5.xlarge", job_id="edited", hyperparameters={"optimizer": "of an edit"}),
        ended("ml.g5.xlarge"),
        ended("local"),
    ]
    monkeypatch.setattr(forecasting.Listing, "__iter__", lambda self: iter(jobs))
    monkeypatch.setattr(forecasting, "usd_per_second_of", lambda name, settings: 0.001)
    read = list[str]()
    monkeypatch.setattr(forecasting, "known_upload", lambda uri, settings: read.append(uri))
    request = Request(instance="ml.g6.xlarge")
    unknown, measured = forecasting.instances_to_forecast(
        request, len(forecaster.corpus.tokenizer), load_settings()
    )
    assert unknown.name == "ml.g6.xlarge"
    assert unknown.operations_per_second is None
    assert measured.name == "ml.g5.xlarge"
    assert measured.job_id == jobs[4].job_id
    assert read == [jobs[4].data]  # of no job that tells nothing
    config = forecaster.sizes.config(3.0)
    seconds = measured.seconds(forecaster.sizes.run_operations(3.0))
    assert seconds == pytest.approx(60 + 0.01 * config.max_steps, rel=0.01)


def test_sizes_that_are_far_from_the_pilots_are_left_out(tmp_path, lawful):
    path = tmp_path / "kept.jsonl"
    forecaster = Forecaster(corpus(), Source.packaged(), path, n_tokens=5_000_000)
    table = forecaster.forecast("text", [], None)
    largest = table.rows[-1].size
    assert largest < forecaster_module.TABLE_SIZES[-1]
    assert "40 times" in table.notes[-1]
    next_size = min(size for size in forecaster_module.TABLE_SIZES if size > largest)
    listed_run = forecaster.sizes.run(largest)
    far_run = forecaster.sizes.run(next_size)
    assert far_run.parameters * far_run.tokens > listed_run.parameters * listed_run.tokens


def test_conversations_are_not_forecast(cli, tmp_path):
    chats = [chat_of(f"{n}?", "no") for n in range(200)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, chats)))
    assert cli("upload-data", path, "--tokenizer", "bpe").code == 0
    ran = cli("launch", "--forecast")
    assert ran.code == 2
    assert "conversations" in ran.error
