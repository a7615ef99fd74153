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
from pathlib import Path
from statistics import fmean, linear_regression, median, stdev
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import sm_nanogpt  # noqa: E402
from sm_nanogpt.entry_point.config import Config  # noqa: E402
from sm_nanogpt.entry_point.sizes import hyperparameters_for_size  # noqa: E402
from sm_nanogpt.entry_point.text import Corpus, read_text, read_tokens  # noqa: E402
from sm_nanogpt.launcher.forecast.law import Law, MeasuredRun, shared  # noqa: E402
from sm_nanogpt.launcher.forecast.pilots import SIZES, Trial, pilots_of, run_trials  # noqa: E402
from sm_nanogpt.launcher.launching.forecasts import ForecastLedger  # noqa: E402
from sm_nanogpt.launcher.settings import load_settings  # noqa: E402
from sm_nanogpt.launcher.source import Source  # noqa: E402

RUNS, FORECASTS, TRUTHS = (
    HERE / name for name in ("forecast-runs.jsonl", "forecasts.json", "truths.jsonl")
)
LAW = HERE.parents[1] / "launcher" / "forecast" / "law.json"
RANGES = ((0.02, 0.6), (0.2, 1.5), (-0.3, 1.2))  # of the exponents
Z = 1.2816

Texts = dict[str, list[dict[str, Any]]]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- runs ------------------------------------------------------------------------------------------


def corpus_of(path: Path) -> Corpus:
    values: Any = SimpleNamespace(validation_fraction=0.1)
    if path.is_dir():
        return read_tokens(path, values)
    here: Any = SimpleNamespace(training=path, validation=None)
    return read_text(here, values, None)


def make_runs(path: Path, sizes: list[float]) -> None:
    corpus = corpus_of(path)
    whole = len(corpus.train)
    pairs = list(pilots_of(whole))
    for size in sizes:
        pairs += [(size, whole), (size, whole // 2)]
    trials = [Trial(f"{size:g}", hyperparameters_for_size(size, n), n) for size, n in pairs]
    for trial, outcome in run_trials(trials, corpus, Source.packaged(), at_once=2):
        config = Config(**trial.hyperparameters)
        row = {
            "text": path.stem,
            "size": float(trial.name),
            "parameters": config.matrix_parameters,
            "tokens": config.max_steps * config.batch_size * config.block_size,
            "unique": trial.unique,
            "loss": round(outcome.loss, 5),
        }
        with RUNS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


# -- fit -------------------------------------------------------------------------------------------


def run_of(row: dict[str, Any]) -> MeasuredRun:
    return MeasuredRun(row["parameters"], row["tokens"], row["unique"], row["loss"])


def by_text(rows: list[dict[str, Any]]) -> Texts:
    texts: Texts = defaultdict(list)
    for row in rows:
        texts[row["text"]].append(row)
    return texts


def likeliest(texts: Texts, exponents: tuple[float, ...], rounds: int = 40) -> tuple[float, Law]:
    """The log likelihood of the runs under these exponents, and the law with the best prior."""
    shape, tiny = Law(exponents, [], [], 0.0), torch.eye(3, dtype=torch.float64)
    data = []
    for rows in texts.values():
        losses = torch.tensor([math.log(row["loss"]) for row in rows], dtype=torch.float64)
        data.append((shape.features([run_of(row) for row in rows]), losses))
    starts = [
        torch.linalg.lstsq(
            torch.cat([x, 0.01 * tiny]), torch.cat([y, torch.zeros(3, dtype=torch.float64)])
        ).solution
        for x, y in data
    ]
    mean, noise = torch.stack(starts).mean(0), 1e-4
    covariance = torch.stack(starts).T.cov(correction=0) + 1e-4 * tiny
    for _ in range(rounds):
        posteriors, squares, count = [], 0.0, 0
        for x, y in data:
            inner = torch.linalg.inv(torch.linalg.inv(covariance) + x.T @ x / noise)
            numbers = inner @ (torch.linalg.solve(covariance, mean) + x.T @ y / noise)
            posteriors.append((numbers, inner))
            squares += float((y - x @ numbers).square().sum() + (x @ inner * x).sum())
            count += len(y)
        numbers = torch.stack([each for each, _ in posteriors])
        mean, noise = numbers.mean(0), max(squares / count, 1e-6)
        spread: Tensor = torch.stack([each for _, each in posteriors]).mean(0)
        covariance = numbers.T.cov(correction=0) + spread + 1e-6 * tiny
    total = 0.0
    for x, y in data:
        whole = x @ covariance @ x.T + noise * torch.eye(len(y), dtype=torch.float64)
        away = y - x @ mean
        total -= 0.5 * float(away @ torch.linalg.solve(whole, away) + torch.logdet(whole))
    return total, Law(exponents, mean.tolist(), covariance.tolist(), math.sqrt(noise))


def fit(texts: Texts, tries: int = 200) -> Law:
    """The best law by random search: half of the tries anywhere, half around the best so far."""
    random.seed(1)
    best: tuple[float, Law] | None = None
    for n in range(tries):
        if best is None or n < tries // 2:
            exponents = tuple(random.uniform(*limits) for limits in RANGES)
        else:
            moved = []
            for exponent, (low, high) in zip(best[1].exponents, RANGES, strict=True):
                candidate = random.gauss(exponent, 0.06 * (high - low))
                moved.append(min(high, max(low, candidate)))
            exponents = tuple(moved)
        likelihood, law = likeliest(texts, exponents)
        if best is None or likelihood > best[0]:
            best = (likelihood, law)
    assert best is not None
    return best[1]


def leave_one_out(texts: Texts, exponents: tuple[float, ...]) -> list[float]:
    """Print what the other texts' law says of each text's larger runs, from its pilots alone.

    Returns the errors of log loss over their forecast standard deviations, on whole texts.
    """
    scores, errors = [], []
    for name, rows in texts.items():
        _, law = likeliest({n: each for n, each in texts.items() if n != name}, exponents)
        larger = [row for row in rows if row["size"] > max(SIZES)]
        own_law = law.of_text([run_of(row) for row in rows if row["size"] <= max(SIZES)])
        predicted = own_law.losses([run_of(row) for row in larger])
        for row, (loss, deviation) in zip(larger, predicted, strict=True):
            error = math.log(row["loss"] / loss)
            if row["unique"] == max(each["unique"] for each in rows):
                scores.append(error / deviation)
                errors.append(abs(error))
            print(
                f"{name:24} size {row['size']:4g} on {row['unique']:9,}: {row['loss']:.4f},"
                f" forecast {loss:.4f} ({error:+.2%}, deviation {deviation:.2%})"
            )
    print(f"on whole texts: median error {median(errors):.2%}, worst {max(errors):.2%}")
    return scores


def scores_of_others(law: Law) -> list[float]:
    """The errors of log loss over their forecast standard deviations, on texts without a part in
    the fit: those of truths.jsonl, from the pilots in forecasts.json.

    Sizes that are larger than that of the lowest forecast are left out, as no forecast names them.
    """
    scores = []
    losses = {(truth["text"], truth["size"]): truth["loss"] for truth in read(TRUTHS)}
    for forecast in json.loads(FORECASTS.read_text()):
        own_law = law.of_text([pilot_of(pilot) for pilot in forecast["runs"]])
        rows = [row for row in forecast["rows"] if row["size"] > max(SIZES)]
        runs = [pilot_of({**row, "unique": forecast["tokens"], "loss": math.nan}) for row in rows]
        predicted = own_law.losses(runs)
        lowest = min(range(len(rows)), key=lambda n: predicted[n][0])
        for row, (loss, deviation) in list(zip(rows, predicted, strict=True))[: lowest + 1]:
            truth = losses.get((forecast["text"], row["size"]))
            if truth is not None:
                scores.append(math.log(truth / loss) / deviation)
                print(f"{forecast['text']:24} size {row['size']:4g}: {truth:.4f}, law {loss:.4f}")
    return scores


def spread_of(scores: Sequence[float]) -> float:
    """What widens 80 % intervals so that they hold 80 % of these scores, and those of a normal
    distribution with their mean square."""
    sizes = sorted(map(abs, scores))
    n_held = math.ceil(0.8 * len(sizes))
    mean_square = sum(score**2 for score in scores) / len(scores)
    return math.ceil(100 * max(1.0, math.sqrt(mean_square), sizes[n_held - 1] / Z)) / 100


def pilot_of(row: dict[str, Any]) -> MeasuredRun:
    return MeasuredRun(row["matrix_parameters"], row["trained_tokens"], row["unique"], row["loss"])


def write_law() -> None:
    texts = by_text(read(RUNS))
    law = fit(texts)
    leave_one_out(texts, law.exponents)
    spread = spread_of(scores_of_others(law))
    print(f"exponents {law.exponents}, noise {law.noise:.4f}, spread {spread:.2f}")
    rounded: dict[str, Any] = {
        "exponents": [round(each, 4) for each in law.exponents],
        "mean": [round(each, 6) for each in law.mean],
        "covariance": [[round(each, 9) for each in row] for row in law.covariance],
        "noise": round(law.noise, 5),
        "spread": spread,
    }
    LAW.write_text(json.dumps(rounded, indent=1) + "\n")


# -- collect ---------------------------------------------------------------------------------------


def collect() -> None:
    """Write each forecast of this home, with its pilots, and what the plain rules need."""
    made = []
    for path in sorted((load_settings().home / "forecasts").glob("*.jsonl")):
        ledger = ForecastLedger(path)
        forecast = ledger.last_forecast
        if forecast is None:
            continue
        pilots = []
        for name, pilot in ledger.pilots.items():
            if " on " in name:
                size, unique = name.removeprefix("size ").split(" on ")
                n = int(unique.replace(",", ""))
                pilots.append({**sizes_of(float(size), n), "unique": n, "loss": pilot.loss})
        rows = [
            {**row.model_dump(), **sizes_of(row.size, forecast.tokens)} for row in forecast.rows
        ]
        facts = forecast.model_dump()
        name = re.sub(r"-[0-9a-f]{12}$", "", forecast.text)
        made.append({**facts, "text": Path(name).name, "rows": rows, "runs": pilots})
    FORECASTS.write_text(json.dumps(made, indent=1) + "\n")


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
            if (
                description.expected is None
                or description.metrics is None
                or not (description.ended and description.started)
            ):
                continue
            row = {
                "text": re.sub(r"-[0-9a-f]{12}$", "", Path(description.data).name),
                "size": float((description.summary or "").split()[1]),
                "loss": description.metrics["best_loss"],
                "seconds": round(description.ended - description.started, 1),
            }
            file.write(json.dumps(row) + "\n")


# -- score -----------------------------------------------------------------------------------------


def score() -> None:
    """Print each forecast beside its truth, and the errors of the forecasts and of plain rules."""
    made = {each["text"]: each for each in json.loads(FORECASTS.read_text())}
    errors: dict[str, list[float]] = defaultdict(list)
    within, times = 0, []
    for truth in read(TRUTHS):
        forecast = made[truth["text"]]
        row = next(each for each in forecast["rows"] if each["size"] == truth["size"])
        expected, loss = row["expected"], truth["loss"]
        guesses = {"forecast": expected["loss"], **plain_rules(forecast["runs"], row)}
        for name, guess in guesses.items():
            errors[name].append(abs(math.log(loss / guess)))
        within += expected["low"] <= loss <= expected["high"]
        if row["seconds"].get("local") and truth.get("seconds"):
            times.append(abs(truth["seconds"] / row["seconds"]["local"] - 1))
        print(
            f"{truth['text']:12} size {truth['size']:4g}: {loss:.4f}, forecast"
            f" {expected['loss']:.4f} ({expected['low']:.4f} to {expected['high']:.4f}),"
            f" {truth.get('seconds', 0):.0f} s, forecast {row['seconds'].get('local', 0):.0f} s"
        )
    for name, found in errors.items():
        print(f"{name}: median error {median(found):.2%}, worst {max(found):.2%}")
    print(f"80 % intervals hold {within} of {len(errors['forecast'])}")
    if times:
        print(f"time: median error {median(times):.1%}, worst {max(times):.1%}")


def twice(path: Path, size: float, seeds: Sequence[int] = (1, 2, 3)) -> None:
    """Print what pilots on half of a text say that the whole is worth, and what it came to."""
    corpus = corpus_of(path)
    whole, half = len(corpus.train), len(corpus.train) // 2
    trials = [Trial(f"{s:g}", hyperparameters_for_size(s, n), n) for s, n in pilots_of(half)]
    for seed in seeds:
        for n in (whole, half):
            values = {**hyperparameters_for_size(size, n), "seed": seed}
            trials.append(Trial(f"seed {seed}", values, n))
    pilots: list[MeasuredRun] = []
    losses: dict[int, list[float]] = {whole: [], half: []}
    for trial, outcome in run_trials(trials, corpus, Source.packaged(), at_once=2):
        if trial.name.startswith("seed"):
            losses[trial.unique].append(outcome.loss)
        else:
            pilots.append(run_at(float(trial.name), trial.unique, outcome.loss))

    law = shared().of_text(pilots)
    with_half, with_whole = run_at(size, half), run_at(size, whole)
    [(loss, _)] = law.losses([with_half])
    change, deviation = law.change(with_half, with_whole)
    predicted = [loss * math.expm1(change + z * deviation) for z in (0, -Z, Z)]
    truth = [a - b for a, b in zip(losses[whole], losses[half], strict=True)]
    print(
        f"{path.stem}: told {predicted[0]:+.3f} ({predicted[1]:+.3f} to {predicted[2]:+.3f}),"
        f" came {fmean(truth):+.3f} (sd {stdev(truth):.3f} over {len(truth)} seeds)"
    )


def run_at(size: float, unique: int, loss: float = math.nan) -> MeasuredRun:
    sizes = sizes_of(size, unique)
    return MeasuredRun(sizes["matrix_parameters"], sizes["trained_tokens"], unique, loss)


def plain_rules(pilots: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, float]:
    """The loss of the largest pilot; and a line of log loss over log compute, by least squares."""
    n_tokens = max(pilot["unique"] for pilot in pilots)
    on_whole = [pilot for pilot in pilots if pilot["unique"] == n_tokens]
    compute = [log_compute(pilot) for pilot in on_whole]
    losses = [math.log(pilot["loss"]) for pilot in on_whole]
    slope, intercept = linear_regression(compute, losses)
    line = slope * log_compute(row) + intercept
    last = losses[compute.index(max(compute))]
    return {"last pilot": math.exp(last), "line": math.exp(line)}


def log_compute(run: dict[str, Any]) -> float:
    return math.log(run["matrix_parameters"] * run["trained_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "fit", "collect", "truths", "score", "twice"))
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT")
    parser.add_argument("--sizes", nargs="*", type=float, default=[2, 2.5], metavar="N")
    args = parser.parse_args()
    if args.what == "run":
        for path in args.texts:
            make_runs(path, args.sizes)
    elif args.what == "twice":
        for path in args.texts:
            twice(path, args.sizes[0])
    else:
        {"fit": write_law, "collect": collect, "truths": truths, "score": score}[args.what]()


if __name__ == "__main__":
    main()
