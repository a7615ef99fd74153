"""The law behind `launch --forecast`: make the runs, fit the law, and hold forecasts against truth.

Examples:
  python examples/benchmarks/forecasting.py run TEXT... --sizes 2 2.5    # adds to the runs
  python examples/benchmarks/forecasting.py fit                          # writes law.json
  python examples/benchmarks/forecasting.py collect                      # after launch --forecast
  python examples/benchmarks/forecasting.py truths                       # after launch --size
  python examples/benchmarks/forecasting.py score                        # one against the other
  python examples/benchmarks/forecasting.py twice TEXT... --sizes 2  # the worth of twice the text

TEXT is a text file, or an upload of tokens. `run` makes the pilots of each text, and runs of the
other sizes on it and on half of it, two at a time with a thread each, and adds them to
forecast-runs.jsonl. `fit` finds the exponents that make these runs likeliest, with the numbers of
each text drawn from a normal distribution (empirical Bayes: Bishop 2006, 3.5, by EM). It prints
what the law of the other texts says of each text's larger runs, from its pilots. It widens the
intervals by how far the truths of other texts, in truths.jsonl, were from the law.

`collect` writes the forecasts that this home keeps to forecasts.json, and `truths` its completed
jobs to truths.jsonl. `score` compares the two, and two plain rules: the loss of the largest pilot,
and a straight line of log loss over log compute through the pilots on the whole text.

`twice` says from pilots on half of each text what a size gains with the whole, and then runs both
with three seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression, median, stdev
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import sm_nanogpt  # noqa: E402
from sm_nanogpt.entry_point.config import Config  # noqa: E402
from sm_nanogpt.entry_point.sizes import hyperparameters_for_size  # noqa: E402
from sm_nanogpt.entry_point.text import Corpus, read_text, read_tokens  # noqa: E402
from sm_nanogpt.launcher.forecast.law import CompleteRun, Law, shared_law  # noqa: E402
from sm_nanogpt.launcher.forecast.pilots import PILOT_SIZES, Trial, pilots_of, run_trials  # noqa: E402
from sm_nanogpt.launcher.launching.forecasts import ForecastLedger  # noqa: E402
from sm_nanogpt.launcher.settings import load_settings  # noqa: E402
from sm_nanogpt.launcher.source import Source  # noqa: E402

RUNS = ROOT / "examples/benchmarks/forecast-runs.jsonl"
FORECASTS = ROOT / "examples/benchmarks/forecasts.json"
TRUTHS = ROOT / "examples/benchmarks/truths.jsonl"
LAW = ROOT / "launcher/forecast/law.json"
RANGES = ((0.02, 0.6), (0.2, 1.5), (-0.3, 1.2))  # of the exponents
Z = 1.2816  # standard deviations on each side that hold 80 % of a normal distribution

Row = dict[str, Any]  # of a file
Texts = dict[str, list[Row]]  # the runs of each text


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def name_of_text(upload: str) -> str:
    """The name of a text, from that of its upload, which ends with a hash."""
    return re.sub(r"-[0-9a-f]{12}$", "", Path(upload).name)


# -- runs ------------------------------------------------------------------------------------------


def corpus_of(path: Path) -> Corpus:
    config: Any = SimpleNamespace(validation_fraction=0.1)
    if path.is_dir():
        return read_tokens(path, config)
    container: Any = SimpleNamespace(training=path, validation=None)
    return read_text(container, config, None)


def trial_of(size: float, n_tokens: int) -> Trial:
    return Trial(f"{size:g}", hyperparameters_for_size(size, n_tokens), n_tokens)


def make_runs(path: Path, sizes: list[float]) -> None:
    corpus = corpus_of(path)
    whole = len(corpus.train)
    trials = [trial_of(size, n_tokens) for size, n_tokens in pilots_of(whole)]
    for size in sizes:
        trials += [trial_of(size, whole), trial_of(size, whole // 2)]
    for trial, outcome in run_trials(trials, corpus, Source.packaged(), at_once=2):
        config = Config(**trial.hyperparameters)
        row = {
            "text": path.stem,
            "size": float(trial.name),
            "parameters": config.matrix_parameters,
            "tokens": config.max_steps * config.batch_size * config.block_size,
            "unique": trial.n_tokens,
            "loss": round(outcome.loss, 5),
        }
        with RUNS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


# -- fit -------------------------------------------------------------------------------------------


def runs_of(rows: Sequence[Row]) -> list[CompleteRun]:
    """The runs in rows of forecast-runs.jsonl."""
    runs = []
    for row in rows:
        runs.append(CompleteRun(row["parameters"], row["tokens"], row["unique"], row["loss"]))
    return runs


def read_texts() -> Texts:
    texts: Texts = defaultdict(list)
    for row in read(RUNS):
        texts[row["text"]].append(row)
    return texts


@dataclass(frozen=True)
class TextData:
    """The runs of a text, for a regression."""

    features: Tensor  # float64 [runs, 3]
    log_losses: Tensor  # float64 [runs]

    def nearly_least_squares(self) -> Tensor:
        """The numbers of the text, which a weak pull to zero determines if there are few runs."""
        pull = 0.01 * torch.eye(3, dtype=torch.float64)
        features = torch.cat([self.features, pull])
        log_losses = torch.cat([self.log_losses, torch.zeros(3, dtype=torch.float64)])
        return torch.linalg.lstsq(features, log_losses).solution


def likeliest(texts: Texts, exponents: tuple[float, ...], rounds: int = 40) -> tuple[float, Law]:
    """The log likelihood of the runs under these exponents, and the law with the best prior."""
    shape = Law(exponents, [], [], 0.0)
    data = []
    for rows in texts.values():
        log_losses = torch.tensor([math.log(row["loss"]) for row in rows], dtype=torch.float64)
        data.append(TextData(shape.features(runs_of(rows)), log_losses))

    identity = torch.eye(3, dtype=torch.float64)
    starts = torch.stack([text.nearly_least_squares() for text in data])
    mean = starts.mean(0)
    covariance = starts.T.cov(correction=0) + 1e-4 * identity
    variance = 1e-4  # of the noise
    for _ in range(rounds):
        mean, covariance, variance = improve(data, mean, covariance, variance)
    likelihood = log_likelihood(data, mean, covariance, variance)
    return likelihood, Law(exponents, mean.tolist(), covariance.tolist(), math.sqrt(variance))


def improve(
    data: Sequence[TextData], mean: Tensor, covariance: Tensor, variance: float
) -> tuple[Tensor, Tensor, float]:
    """One round of expectation maximization: a likelier prior, and a likelier noise."""
    precision = torch.linalg.inv(covariance)
    posteriors = []
    posterior_covariances = []
    squares = 0.0
    n_runs = 0
    for text in data:
        x, y = text.features, text.log_losses
        posterior_covariance = torch.linalg.inv(precision + x.T @ x / variance)
        evidence = torch.linalg.solve(covariance, mean) + x.T @ y / variance
        posterior = posterior_covariance @ evidence
        posteriors.append(posterior)
        posterior_covariances.append(posterior_covariance)
        squares += float((y - x @ posterior).square().sum())
        squares += float((x @ posterior_covariance * x).sum())
        n_runs += len(y)

    numbers = torch.stack(posteriors)  # [texts, 3]
    between_texts = numbers.T.cov(correction=0)
    within_texts = torch.stack(posterior_covariances).mean(0)
    covariance = between_texts + within_texts + 1e-6 * torch.eye(3, dtype=torch.float64)
    return numbers.mean(0), covariance, max(squares / n_runs, 1e-6)


def log_likelihood(
    data: Sequence[TextData], mean: Tensor, covariance: Tensor, variance: float
) -> float:
    """That of the runs of all texts, but for a constant."""
    total = 0.0
    for text in data:
        x, y = text.features, text.log_losses
        covariance_of_runs = x @ covariance @ x.T + variance * torch.eye(len(y), dtype=x.dtype)
        residuals = y - x @ mean
        square = residuals @ torch.linalg.solve(covariance_of_runs, residuals)
        total -= 0.5 * float(square + torch.logdet(covariance_of_runs))
    return total


def fit(texts: Texts, tries: int = 200) -> Law:
    """The best law by random search: half of the tries anywhere, half around the best so far."""
    random.seed(1)
    best_likelihood = -math.inf
    best_law: Law | None = None
    for n in range(tries):
        if best_law is None or n < tries // 2:
            exponents = [random.uniform(low, high) for low, high in RANGES]
        else:
            exponents = []
            for exponent, (low, high) in zip(best_law.exponents, RANGES, strict=True):
                candidate = random.gauss(exponent, 0.06 * (high - low))
                exponents.append(min(high, max(low, candidate)))
        likelihood, law = likeliest(texts, tuple(exponents))
        if likelihood > best_likelihood:
            best_likelihood, best_law = likelihood, law
    assert best_law is not None
    return best_law


def leave_one_out(texts: Texts, exponents: tuple[float, ...]) -> None:
    """Print what the other texts' law says of each text's larger runs, from its pilots alone."""
    errors = []  # on whole texts
    for name, rows in texts.items():
        other_texts = dict(texts)
        del other_texts[name]
        _, law = likeliest(other_texts, exponents)
        pilots = [row for row in rows if row["size"] <= max(PILOT_SIZES)]
        larger = [row for row in rows if row["size"] > max(PILOT_SIZES)]
        predicted = law.of_text(runs_of(pilots)).losses(runs_of(larger))

        n_tokens = max(row["unique"] for row in rows)
        for row, (loss, deviation) in zip(larger, predicted, strict=True):
            error = math.log(row["loss"] / loss)
            if row["unique"] == n_tokens:
                errors.append(abs(error))
            print(
                f"{name:24} size {row['size']:4g} on {row['unique']:9,}: {row['loss']:.4f},"
                f" forecast {loss:.4f} ({error:+.2%}, deviation {deviation:.2%})"
            )
    print(f"on whole texts: median error {median(errors):.2%}, worst {max(errors):.2%}")


def standard_errors(law: Law) -> list[float]:
    """How many standard deviations each measured log loss is above its forecast by a law.

    The law was fitted without these texts: the forecasts, with their pilots, are in forecasts.json,
    and the measured losses in truths.jsonl. `launch --forecast` names no size beyond the one with
    the lowest forecast, so larger ones are left out.
    """
    measured = {}
    for truth in read(TRUTHS):
        measured[truth["text"], truth["size"]] = truth["loss"]

    errors = []
    for forecast in json.loads(FORECASTS.read_text()):
        text = forecast["text"]
        law_of_text = law.of_text([pilot_of(pilot) for pilot in forecast["runs"]])
        sizes = [row["size"] for row in forecast["rows"] if row["size"] > max(PILOT_SIZES)]
        runs = [run_at(size, forecast["tokens"]) for size in sizes]
        predicted = law_of_text.losses(runs)
        lowest = min(loss for loss, _ in predicted)
        for size, (loss, deviation) in zip(sizes, predicted, strict=True):
            if (text, size) in measured:
                measured_loss = measured[text, size]
                errors.append(math.log(measured_loss / loss) / deviation)
                print(f"{text:24} size {size:4g}: {measured_loss:.4f}, law {loss:.4f}")
            if loss == lowest:
                break
    return errors


def widening(errors: Sequence[float]) -> float:
    """The factor by which 80 % intervals have to be wider, by these standard_errors; 1 or more.

    The wider intervals hold 80 % of the errors, and 80 % of a normal distribution whose mean square
    is that of the errors.
    """
    magnitudes = sorted(abs(error) for error in errors)
    n_held = math.ceil(0.8 * len(magnitudes))
    to_hold_errors = magnitudes[n_held - 1] / Z
    root_mean_square = math.sqrt(fmean(error**2 for error in errors))
    factor = max(1.0, root_mean_square, to_hold_errors)
    return math.ceil(100 * factor) / 100


def pilot_of(row: Row) -> CompleteRun:
    """The run in a row of forecasts.json."""
    return CompleteRun(row["matrix_parameters"], row["trained_tokens"], row["unique"], row["loss"])


def write_law() -> None:
    texts = read_texts()
    law = fit(texts)
    leave_one_out(texts, law.exponents)
    spread = widening(standard_errors(law))
    print(f"exponents {law.exponents}, noise {law.noise:.4f}, spread {spread:.2f}")
    document = {
        "exponents": rounded(law.exponents, 4),
        "mean": rounded(law.mean, 6),
        "covariance": [rounded(row, 9) for row in law.covariance],
        "noise": round(law.noise, 5),
        "spread": spread,
    }
    LAW.write_text(json.dumps(document, indent=1) + "\n")


def rounded(values: Sequence[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]


# -- collect ---------------------------------------------------------------------------------------


def collect() -> None:
    """Write each forecast of this home, with its pilots, and what the plain rules need."""
    forecasts = []
    for path in sorted((load_settings().home / "forecasts").glob("*.jsonl")):
        ledger = ForecastLedger(path)
        forecast = ledger.last_forecast
        if forecast is None:
            continue
        rows = []
        for row in forecast.rows:
            rows.append({**row.model_dump(), **sizes_of(row.size, forecast.tokens)})
        document = forecast.model_dump()
        document["text"] = name_of_text(forecast.text)
        document["rows"] = rows
        document["runs"] = pilots_in(ledger)
        forecasts.append(document)
    FORECASTS.write_text(json.dumps(forecasts, indent=1) + "\n")


def pilots_in(ledger: ForecastLedger) -> list[Row]:
    pilots = []
    for name, pilot in ledger.pilots.items():
        match = re.fullmatch(r"size (.+) on ([\d,]+)", name)
        if match is not None:
            n_tokens = int(match[2].replace(",", ""))
            sizes = sizes_of(float(match[1]), n_tokens)
            pilots.append({**sizes, "unique": n_tokens, "loss": pilot.loss})
    return pilots


def sizes_of(size: float, unique: int) -> dict[str, int]:
    """The matrix parameters, and the tokens that a run of this size trains on."""
    config = Config(**hyperparameters_for_size(size, unique))
    trained = config.max_steps * config.batch_size * config.block_size
    return {"matrix_parameters": config.matrix_parameters, "trained_tokens": trained}


def truths() -> None:
    """Write the size, loss and seconds of each completed job of this home that has a forecast."""
    with TRUTHS.open("w") as file:
        for job in reversed(sm_nanogpt.jobs(status="Completed")):
            description = job.describe()
            if description.expected is None or description.metrics is None:
                continue
            if not description.ended or not description.started:
                continue
            row = {
                "text": name_of_text(description.data),
                "size": float((description.summary or "").split()[1]),
                "loss": description.metrics["best_loss"],
                "seconds": round(description.ended - description.started, 1),
            }
            file.write(json.dumps(row) + "\n")


# -- score -----------------------------------------------------------------------------------------


def score() -> None:
    """Print each forecast beside its truth, and the errors of the forecasts and of plain rules."""
    pilots: dict[str, list[Row]] = {}  # of each text
    rows: dict[tuple[str, float], Row] = {}  # of each text and size
    for forecast in json.loads(FORECASTS.read_text()):
        pilots[forecast["text"]] = forecast["runs"]
        for row in forecast["rows"]:
            rows[forecast["text"], row["size"]] = row

    errors: dict[str, list[float]] = defaultdict(list)
    errors_of_time = []
    n_within = 0
    for truth in read(TRUTHS):
        text, size, loss = truth["text"], truth["size"], truth["loss"]
        row = rows[text, size]
        expected = row["expected"]
        guesses = {"forecast": expected["loss"], **plain_rules(pilots[text], row)}
        for name, guess in guesses.items():
            errors[name].append(abs(math.log(loss / guess)))
        if expected["low"] <= loss <= expected["high"]:
            n_within += 1
        seconds = truth.get("seconds", 0)
        forecast_seconds = row["seconds"].get("local", 0)
        if seconds and forecast_seconds:
            errors_of_time.append(abs(seconds / forecast_seconds - 1))
        print(
            f"{text:12} size {size:4g}: {loss:.4f}, forecast {expected['loss']:.4f}"
            f" ({expected['low']:.4f} to {expected['high']:.4f}),"
            f" {seconds:.0f} s, forecast {forecast_seconds:.0f} s"
        )
    for name, of_rule in errors.items():
        print(f"{name}: median error {median(of_rule):.2%}, worst {max(of_rule):.2%}")
    print(f"80 % intervals hold {n_within} of {len(errors['forecast'])}")
    if errors_of_time:
        print(f"time: median error {median(errors_of_time):.1%}, worst {max(errors_of_time):.1%}")


def plain_rules(pilots: list[Row], row: Row) -> dict[str, float]:
    """The loss of the largest pilot; and a line of log loss over log compute, by least squares."""
    n_tokens = max(pilot["unique"] for pilot in pilots)
    on_whole = [pilot for pilot in pilots if pilot["unique"] == n_tokens]
    compute = [log_compute(pilot) for pilot in on_whole]
    losses = [math.log(pilot["loss"]) for pilot in on_whole]
    slope, intercept = linear_regression(compute, losses)
    line = slope * log_compute(row) + intercept
    last = losses[compute.index(max(compute))]
    return {"last pilot": math.exp(last), "line": math.exp(line)}


def log_compute(run: Row) -> float:
    return math.log(run["matrix_parameters"] * run["trained_tokens"])


# -- twice -----------------------------------------------------------------------------------------


def twice(path: Path, size: float, seeds: Sequence[int] = (1, 2, 3)) -> None:
    """Print what pilots on half of a text say that the whole is worth, and what it came to."""
    corpus = corpus_of(path)
    whole = len(corpus.train)
    half = whole // 2
    trials = [trial_of(pilot_size, n_tokens) for pilot_size, n_tokens in pilots_of(half)]
    for seed in seeds:
        for n_tokens in (whole, half):
            values = {**hyperparameters_for_size(size, n_tokens), "seed": seed}
            trials.append(Trial(f"seed {seed}", values, n_tokens))

    pilots: list[CompleteRun] = []
    losses: dict[int, dict[str, float]] = {whole: {}, half: {}}  # by their seeds
    for trial, outcome in run_trials(trials, corpus, Source.packaged(), at_once=2):
        if trial.name.startswith("seed"):
            losses[trial.n_tokens][trial.name] = outcome.loss
        else:
            pilots.append(run_at(float(trial.name), trial.n_tokens, outcome.loss))
    gains = [losses[whole][seed] - loss for seed, loss in losses[half].items()]

    law = shared_law().of_text(pilots)
    with_half = run_at(size, half)
    [(loss, _)] = law.losses([with_half])
    change, deviation = law.change(with_half, run_at(size, whole))
    expected = loss * math.expm1(change)
    low = loss * math.expm1(change - Z * deviation)
    high = loss * math.expm1(change + Z * deviation)
    print(
        f"{path.stem}: forecast {expected:+.3f} ({low:+.3f} to {high:+.3f}), measured"
        f" {fmean(gains):+.3f} (sd {stdev(gains):.3f} over {len(gains)} seeds)"
    )


def run_at(size: float, unique: int, loss: float = math.nan) -> CompleteRun:
    """A run of a size on so many tokens; without a loss, one that is to be forecast."""
    sizes = sizes_of(size, unique)
    return CompleteRun(sizes["matrix_parameters"], sizes["trained_tokens"], unique, loss)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = ("run", "fit", "collect", "truths", "score", "twice")
    parser.add_argument("action", choices=actions)
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT")
    parser.add_argument("--sizes", nargs="*", type=float, default=[2, 2.5], metavar="N")
    args = parser.parse_args()
    if args.action == "run":
        for path in args.texts:
            make_runs(path, args.sizes)
    elif args.action == "twice":
        for path in args.texts:
            twice(path, args.sizes[0])
    elif args.action == "fit":
        write_law()
    elif args.action == "collect":
        collect()
    elif args.action == "truths":
        truths()
    else:
        score()


if __name__ == "__main__":
    main()
