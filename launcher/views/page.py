"""Make the HTML page of a report, from report.html.

The plots are in Vega-Lite, and Altair writes them. The JavaScript that draws them is part of the
page. It interprets their expressions, so the page needs neither a request nor `eval`, and its
security policy forbids both. Colors are CSS variables, so that one drawing serves a light page, a
dark page, and print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.sagemaker.cost import usd
from sm_nanogpt.launcher.views.job_fields import cost_text
from sm_nanogpt.launcher.views.report import Report, ReportedRun, value_text

SERIES = {"training": "train_loss", "validation": "val_loss"}  # the losses, by series
# The series that a plot may draw, with the width of the line in pixels and its opacity. The page
# fills `raw` with the losses as they are, if it smooths those of `training`.
LINES = (("raw", 1, 0.3), ("training", 1.25, 0.75), ("validation", 2.75, 1.0))
N_COLORS = 6  # of runs, in report.html; later runs have them again, with other dashes
DASHES = ((1, 0), (6, 3), (2, 2))  # lengths of dash and gap, in pixels
FONT = "system-ui, 'Helvetica Neue', Helvetica, Arial, sans-serif"


def clock_unit(report: Report) -> tuple[float, str]:
    """The unit of the axis of times: its length in seconds, and its name."""
    longest = max(run.seconds or 0 for run in report.runs)
    if longest < 300:
        return 1, "s"
    if longest < 3 * 3600:
        return 60, "min"
    return 3600, "h"


def x_axes_of(report: Report) -> dict[str, dict[str, str]]:
    """The x axes for which all runs have values, by name: the title and the format of numbers."""
    x_axes = {
        "step": {"title": "step", "format": ",.0f"},
        "tokens": {"title": "tokens", "format": "~s"},
    }
    if all(run.times for run in report.runs):
        _, unit = clock_unit(report)
        x_axes["time"] = {"title": f"wall time ({unit})", "format": ""}
    return x_axes


def points(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the points of all lines. `drawn` is the loss, which the page may smooth."""
    for run in report.runs:
        if report.per_byte and "bits_per_byte" not in run.best:  # the bytes of a token are unknown
            continue
        yield from points_of(run, report)


def points_of(run: ReportedRun, report: Report) -> Iterator[dict[str, Any]]:
    """Yield the points of the lines of a run."""
    factor = 1.0
    if report.per_byte:
        factor = run.best["bits_per_byte"] / run.best["val_loss"]
    seconds, _ = clock_unit(report)
    times = run.times
    for series, name in SERIES.items():
        for index, row in enumerate(run.curve.rows):
            if name not in row:
                continue
            loss = row[name] * factor
            point = {
                "run": run.label,
                "series": series,
                "color": run.label if len(report.runs) > 1 else series,
                "step": row["step"],
                "tokens": row["step"] * run.tokens_per_step,
                "loss": loss,
                "drawn": loss,
                "rate": row.get("learning_rate"),
                "speed": row.get("tokens_per_second"),
            }
            if times:
                point["time"] = times[index] / seconds
            yield point


def results(report: Report) -> list[dict[str, Any]]:
    """The result of each run that has one, with the hyperparameters that it is plotted against."""
    rows = []
    for run in report.runs:
        if run.best:
            values = {name: run.configuration[name] for name in report.varied}
            rows.append({**values, "run": run.label, "loss": report.score(run)})
    return rows


@dataclass(frozen=True)
class Style:
    """How the lines of a run, or of a series, are drawn."""

    label: str
    color: str  # of CSS
    dashes: list[int]  # the lengths of dash and gap, in pixels


def styles_of(report: Report) -> list[Style]:
    """The style of each run, or else of each series of the only one."""
    labels = list(SERIES)
    if len(report.runs) > 1:
        labels = [run.label for run in report.runs]
    colors = [f"var(--run-{index})" for index in range(N_COLORS)]
    colors.append("var(--ink)")
    styles = []
    for number, label in enumerate(labels):
        dashes = DASHES[number // len(colors) % len(DASHES)]
        styles.append(Style(label, colors[number % len(colors)], list(dashes)))
    return styles


def color_scale(styles: Sequence[Style]) -> Any:
    """The scale of Altair that gives each label its color."""
    import altair as alt

    domain = [style.label for style in styles]
    return alt.Scale(domain=domain, range=[style.color for style in styles])


def line_plot(report: Report, value: str, title: str, series: Sequence[str]) -> dict[str, Any]:
    """A plot of a value against the steps, with a line for each run and series. A point shows its
    value when it is pointed at.

    value is the name of a value of `points`, title that of the axis, and series has names of LINES.
    """
    import altair as alt

    styles = styles_of(report)
    is_speed = value == "speed"
    y_axis = alt.Axis(format="~s") if is_speed else alt.Axis()
    base = alt.Chart(alt.NamedData("points")).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(format=",.0f"), scale=alt.Scale(nice=False)),
        y=alt.Y(f"{value}:Q", title=title, axis=y_axis, scale=alt.Scale(zero=is_speed)),
        color=alt.Color("color:N", scale=color_scale(styles), legend=None),
    )
    if len(styles) > N_COLORS + 1:
        labels = [style.label for style in styles]
        dash_scale = alt.Scale(domain=labels, range=[style.dashes for style in styles])
        base = base.encode(strokeDash=alt.StrokeDash("color:N", scale=dash_scale, legend=None))

    dot = alt.OverlayMarkDef(filled=True, size=26, opacity=1)
    dots: dict[str, Any] = {"raw": False, "training": False, "validation": dot}
    if any(len(run.curve.points("train_loss")) == 1 for run in report.runs):
        dots["training"] = dot  # a line of one point is not seen
    layers: list[Any] = []
    for name, width, opacity in LINES:
        if name in series:
            line = base.transform_filter(alt.datum.series == name).encode(detail="run:N")
            line = line.mark_line(
                strokeWidth=width, opacity=opacity, strokeJoin="round", point=dots[name]
            )
            layers.append(line)

    nearest = alt.selection_point("nearest", on="pointerover", nearest=True, empty=False)
    opacity_if_nearest = alt.condition(nearest, alt.value(1), alt.value(0))
    hover = base.transform_filter(alt.FieldOneOfPredicate(field="series", oneOf=list(SERIES)))
    hover = hover.mark_point(filled=True, size=70).add_params(nearest)
    hover = hover.encode(opacity=opacity_if_nearest, tooltip=alt.Tooltip(f"{value}:Q"))
    return styled(alt.layer(*layers, hover))


def result_plot(report: Report, name: str) -> dict[str, Any]:
    """A plot of the result of each run against a hyperparameter."""
    import altair as alt

    values = sorted({float(run.configuration[name]) for run in report.runs})
    x_scale = alt.Scale(zero=False, padding=24)
    if values[0] > 0 and values[-1] >= 4 * values[0]:
        x_scale = alt.Scale(type="log", nice=False, padding=24)
    x_axis = alt.Axis(values=values, format=".6~g", grid=True)
    x = alt.X(field=name, type="quantitative")  # "x:Q" would be read as a type
    chart = alt.Chart(alt.NamedData("results")).mark_point(filled=True, size=110, opacity=1)
    chart = chart.encode(
        x=x.title(name).axis(x_axis).scale(x_scale),
        y=alt.Y("loss:Q", title=f"best {report.unit}", scale=alt.Scale(zero=False, padding=12)),
        color=alt.Color("run:N", scale=color_scale(styles_of(report)), legend=None),
        tooltip=alt.Tooltip("loss:Q"),
    )
    return styled(chart)


def styled(chart: Any) -> dict[str, Any]:
    """The Vega-Lite document of a chart, in the width and the colors of the page."""
    spec: dict[str, Any] = chart.to_dict()
    del spec["$schema"]  # an address, which the page does not need
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
    spec["width"] = "container"
    spec["padding"] = {"left": 0, "right": 8, "top": 5, "bottom": 5}
    return spec


# -- the page --------------------------------------------------------------------------------------


@cache
def javascript() -> str:
    """The JavaScript of Vega, Vega-Lite, and Vega-Embed, in a scope of its own."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])  # such as 6.4
    bundle: Any = vl_convert.javascript_bundle  # its type demands a snippet, which is optional
    return f"(() => {{{bundle(vl_version=version)}}})();"


def report_html(report: Report, repeat: Callable[[TrainingJob], str] | None = None) -> str:
    """The report as HTML that needs no other file; repeat gives the command that repeats a job."""
    from jinja2 import Environment, FileSystemLoader

    plots = {
        "loss": line_plot(report, "drawn", report.unit, ["raw", *SERIES]),
        "speed": line_plot(report, "speed", "tokens/s", ["training"]),
        "rate": line_plot(report, "rate", "learning rate", ["training"]),
    }
    for name in report.varied:
        plots[f"by-{name}"] = result_plot(report, name)
    x_axes = x_axes_of(report)
    titles = {"loss": report.unit, "rate": "learning rate", "speed": "tokens/s"}
    for name, axis in x_axes.items():
        titles[name] = axis["title"]

    folder = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {"sort_keys": False}
    templates.filters.update(value_text=value_text, when=when, span=span, usd=usd, cost=cost_text)
    return templates.get_template("report.html").render(
        report=report,
        runs=report.runs,
        repeat=repeat,
        document={
            "plots": plots,
            "axes": x_axes,
            "titles": titles,
            "points": list(points(report)),
            "results": results(report),
        },
        styles=styles_of(report),
        javascript=javascript(),
        font=FONT,
        now=time.time(),
    )


def when(seconds: float | None) -> str:
    """A time since the epoch as a date and a time of day; "" for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def span(seconds: float | None) -> str:
    """A duration, such as 0:12:30; "" for None."""
    return "" if seconds is None else duration(seconds)
