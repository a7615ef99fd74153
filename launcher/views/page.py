"""The page of a report.

The page is report.html. Its plots are Vega-Lite, written by Altair. The JavaScript that draws them
is part of the page, and interprets their expressions, so the page needs neither a request nor
`eval`, and its policy forbids both. Colors are CSS variables: the same drawing serves a light page,
a dark one and print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from entry_point.metrics import duration
from launcher.job import TrainingJob
from launcher.sagemaker.cost import usd
from launcher.views.job_fields import cost_text
from launcher.views.report import Report, plain

SERIES = {"training": "train_loss", "validation": "val_loss"}
LINES = (("raw", 1, 0.3), ("training", 1.25, 0.75), ("validation", 2.75, 1.0))  # width, opacity
N_COLORS = 6  # of runs, in report.html; from the eighth run on, they return with dashes
DASHES = ((1, 0), (6, 3), (2, 2))
FONT = "system-ui, 'Helvetica Neue', Helvetica, Arial, sans-serif"


def clock_unit(report: Report) -> tuple[float, str]:
    longest = max(run.seconds or 0 for run in report.runs)
    return (1, "s") if longest < 300 else (60, "min") if longest < 3 * 3600 else (3600, "h")


def axes(report: Report) -> dict[str, dict[str, str]]:
    """The x axes that all runs have: title and number format."""
    known = {"step": ("step", ",.0f"), "tokens": ("tokens", "~s")}
    if all(run.times for run in report.runs):
        known["time"] = f"wall time ({clock_unit(report)[1]})", ""
    return {name: dict(title=title, format=form) for name, (title, form) in known.items()}


def points(report: Report) -> Iterator[dict[str, Any]]:
    """The points of all lines. `drawn` is the loss, which the page may replace by a mean."""
    unit, _ = clock_unit(report)
    several = len(report.runs) > 1
    for run in report.runs:
        if report.per_byte and "bits_per_byte" not in run.best:  # the bytes of a token are unknown
            continue
        factor = run.best["bits_per_byte"] / run.best["val_loss"] if report.per_byte else 1.0
        times = dict(zip((row["step"] for row in run.curve.rows), run.times, strict=False))
        for series, name in SERIES.items():
            for row in (row for row in run.curve.rows if name in row):
                yield {
                    "run": run.label,
                    "series": series,
                    "color": run.label if several else series,
                    "step": row["step"],
                    "tokens": row["step"] * run.tokens_per_step,
                    "loss": row[name] * factor,
                    "drawn": row[name] * factor,
                    "rate": row.get("learning_rate"),
                    "speed": row.get("tokens_per_second"),
                    **({"time": times[row["step"]] / unit} if times else {}),
                }


def results(report: Report) -> list[dict[str, Any]]:
    """For each run, its varied hyperparameters and its result."""
    return [
        {name: run.configuration[name] for name in report.varied}
        | {"run": run.label, "loss": report.score(run)}
        for run in report.runs
        if run.best
    ]


def styles(report: Report) -> list[tuple[str, str, list[int]]]:
    """Label, color and dashes of each line."""
    several = len(report.runs) > 1
    labels = [run.label for run in report.runs] if several else list(SERIES)
    colors = [*(f"var(--run-{index})" for index in range(N_COLORS)), "var(--ink)"]
    return [
        (label, colors[n % len(colors)], list(DASHES[n // len(colors) % len(DASHES)]))
        for n, label in enumerate(labels)
    ]


def line_plot(report: Report, y: str, title: str, series: Sequence[str]) -> dict[str, Any]:
    """A line for each run and series. The page shows the values of the point near the pointer."""
    import altair as alt

    labels, colors, dashes = zip(*styles(report), strict=True)
    scale = alt.Scale(domain=labels, range=colors)
    axis = alt.Axis(format="~s") if y == "speed" else alt.Axis()
    base = alt.Chart(alt.NamedData("points")).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(format=",.0f"), scale=alt.Scale(nice=False)),
        y=alt.Y(f"{y}:Q", title=title, axis=axis, scale=alt.Scale(zero=y == "speed")),
        color=alt.Color("color:N", scale=scale, legend=None),
    )
    if len(labels) > N_COLORS + 1:
        dash = alt.Scale(domain=labels, range=dashes)
        base = base.encode(strokeDash=alt.StrokeDash("color:N", scale=dash, legend=None))
    dot = alt.OverlayMarkDef(filled=True, size=26, opacity=1)  # else a single one is not seen
    has_one_point = any(len(run.curve.points("train_loss")) == 1 for run in report.runs)
    dots = {"raw": False, "training": dot if has_one_point else False, "validation": dot}
    layers: list[Any] = [
        base.transform_filter(alt.datum.series == name)
        .mark_line(strokeWidth=width, opacity=opacity, strokeJoin="round", point=dots[name])
        .encode(detail="run:N")
        for name, width, opacity in LINES
        if name in series
    ]
    near = alt.selection_point("near", on="pointerover", nearest=True, empty=False)
    seen = alt.condition(near, alt.value(1), alt.value(0))
    hover = base.transform_filter(alt.FieldOneOfPredicate(field="series", oneOf=list(SERIES)))
    hover = hover.mark_point(filled=True, size=70).add_params(near)
    hover = hover.encode(opacity=seen, tooltip=alt.Tooltip(f"{y}:Q"))
    return finished(alt.layer(*layers, hover))


def result_plot(report: Report, name: str) -> dict[str, Any]:
    """The result of each run against a hyperparameter."""
    import altair as alt

    labels, colors, _ = zip(*styles(report), strict=True)
    values = sorted({float(run.configuration[name]) for run in report.runs})
    wide = values[0] > 0 and values[-1] >= 4 * values[0]
    how: dict[str, Any] = {"type": "log", "nice": False} if wide else {"zero": False}
    axis, scale = alt.Axis(values=values, format=".6~g", grid=True), alt.Scale(**how, padding=24)
    x = alt.X(field=name, type="quantitative")  # "x:Q" would be read as a type
    chart = alt.Chart(alt.NamedData("results")).mark_point(filled=True, size=110, opacity=1)
    chart = chart.encode(
        x=x.title(name).axis(axis).scale(scale),
        y=alt.Y("loss:Q", title=f"best {report.unit}", scale=alt.Scale(zero=False, padding=12)),
        color=alt.Color("run:N", scale=alt.Scale(domain=labels, range=colors), legend=None),
        tooltip=alt.Tooltip("loss:Q"),
    )
    return finished(chart)


def finished(chart: Any) -> dict[str, Any]:
    """The Vega-Lite document of a chart, as wide as its place, in the page's colors."""
    spec: dict[str, Any] = chart.to_dict()
    del spec["$schema"]  # an address, which nothing here reads
    lines = dict.fromkeys(("gridColor", "domainColor", "tickColor"), "var(--line)")
    texts = dict.fromkeys(("labelColor", "titleColor"), "var(--muted)")
    fonts = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    above = {"titleAngle": 0, "titleAlign": "left", "titleX": -40, "titleY": -16}
    spec["config"] = {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": {**lines, **texts, **fonts, "labelOverlap": "greedy"},
        "axisX": {"grid": False, "titlePadding": 8, "tickCount": {"expr": "ceil(width / 90)"}},
        "axisY": {**above, "domain": False, "ticks": False, "tickCount": 5, "minExtent": 40},
    }
    return {**spec, "width": "container", "padding": {"left": 0, "right": 8, "top": 5, "bottom": 5}}


# -- the page --------------------------------------------------------------------------------------


@cache
def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed, in a scope of their own."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])  # such as 6.4
    bundle: Any = vl_convert.javascript_bundle  # its type demands a snippet, which is optional
    return f"(() => {{{bundle(vl_version=version)}}})();"


def page(report: Report, repeat: Callable[[TrainingJob], str] | None = None) -> str:
    """The report as HTML that needs nothing else; repeat gives the command that repeats a job."""
    from jinja2 import Environment, FileSystemLoader

    plots = {
        "loss": line_plot(report, "drawn", report.unit, ["raw", *SERIES]),
        "speed": line_plot(report, "speed", "tokens/s", ["training"]),
        "rate": line_plot(report, "rate", "learning rate", ["training"]),
        **{f"by-{name}": result_plot(report, name) for name in report.varied},
    }
    titles = {"loss": report.unit, "rate": "learning rate", "speed": "tokens/s"}
    titles |= {name: axis["title"] for name, axis in axes(report).items()}
    data = {"points": list(points(report)), "results": results(report)}
    folder = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {"sort_keys": False}
    templates.filters.update(plain=plain, when=when, span=span, usd=usd, cost=cost_text)
    return templates.get_template("report.html").render(
        report=report,
        runs=report.runs,
        repeat=repeat,
        document={"plots": plots, "axes": axes(report), "titles": titles, **data},
        styles=styles(report),
        javascript=javascript(),
        font=FONT,
        now=time.time(),
    )


def when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def span(seconds: float | None) -> str:
    """A duration, such as 0:12:30."""
    return "" if seconds is None else duration(seconds)
