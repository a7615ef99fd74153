"""Show a job in a notebook: its facts, and its curve."""

from __future__ import annotations

from html import escape

from sm_nanogpt.launcher.curve import Curve
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.views.job_fields import texts_of


def card(job: JobDescription, curve: Curve | None) -> str:
    """A job as HTML: a table of its facts, and a drawing of its curve, if it is known."""
    rows = ""
    for label, text in texts_of(job).items():
        if text:
            rows += f"<tr><th>{label}</th><td style='text-align: left'>{escape(text)}</td></tr>"
    table = f"<table>{rows}</table>"
    return table if curve is None else table + drawing(curve)


def drawing(curve: Curve) -> str:
    """The losses as SVG, with a caption; '' for fewer than two. The training loss is pale, and the
    validation loss is strong."""
    training = curve.points("train_loss")
    validation = curve.points("val_loss")
    points = [*training, *validation]
    if len(points) < 2:
        return ""
    last_step = max(step for step, _ in points) or 1
    losses = [loss for _, loss in points]
    low = min(losses)
    high = max(losses)
    lines = polyline(training, opacity=0.4) + polyline(validation, opacity=1)
    frame = f'viewBox="0 {-high} {last_step} {high - low or 1}" preserveAspectRatio="none"'
    svg = f'<svg width="480" height="130" overflow="visible" {frame}>{lines}</svg>'
    caption = f"val_loss strong, train_loss pale: {high:.2f} to {low:.2f} in {last_step} steps"
    return f"{svg}<br>{caption}"


def polyline(points: list[tuple[int, float]], opacity: float) -> str:
    """A line of SVG through steps and losses."""
    if len(points) == 1:
        points = points * 2  # a line from a point to itself is a dot
    coordinates = " ".join(f"{step},{-loss}" for step, loss in points)
    stroke = 'fill="none" stroke="currentColor" stroke-width="2.5" stroke-linecap="round"'
    width = 'vector-effect="non-scaling-stroke"'
    return f'<polyline opacity="{opacity}" {stroke} {width} points="{coordinates}"/>'
