"""A job in a notebook: its state and its curve, in the colors of the page."""

from __future__ import annotations

from html import escape

from launcher.curve import Curve
from launcher.job import JobDescription
from launcher.sagemaker.cost import usd

WIDTH, HEIGHT = 480, 160  # pixels
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 12, 28  # the room for labels


def card(job: JobDescription, curve: Curve | None) -> str:
    now = job.metrics or {}
    facts = {
        "job": job.named,
        "state": job.state,
        "reason": job.failure_reason,
        "instance": f"{job.instance_count} x {job.instance}",
        "step": f"{now['step']:.0f} of {now['max_steps']}" if "step" in now else "",
        "best loss": f"{now['best_loss']:.4f}" if "best_loss" in now else "",
        "cost": "" if job.cost is None else usd(job.cost),
    }
    left = "<td style='text-align: left'>"
    rows = (f"<tr><th>{n}</th>{left}{escape(v)}</td></tr>" for n, v in facts.items() if v)
    return f"<table>{''.join(rows)}</table>{drawing(curve) if curve else ''}"


def drawing(curve: Curve) -> str:
    """The losses: that of training pale, that of validation strong."""
    lines = {0.4: curve.points("train_loss"), 1.0: curve.points("val_loss")}
    points = [point for line in lines.values() for point in line]
    if len(points) < 2:
        return ""
    last, losses = max(step for step, _ in points) or 1, [loss for _, loss in points]
    low, high = min(losses), max(losses)
    across = (WIDTH - LEFT - RIGHT) / last
    down = (HEIGHT - TOP - BOTTOM) / ((high - low) or 1)
    shapes = []
    for opacity, line in lines.items():
        places = [f"{LEFT + s * across:.1f},{TOP + (high - v) * down:.1f}" for s, v in line]
        places *= 1 + (len(line) == 1)  # a line from a point to itself is a dot
        stroke = 'fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round"'
        shapes.append(f'<polyline opacity="{opacity}" {stroke} points="{" ".join(places)}"/>')
    labels = [(LEFT - 6, TOP + 4, f"{high:.2f}"), (LEFT - 6, HEIGHT - BOTTOM + 4, f"{low:.2f}")]
    labels += [(LEFT + 6, HEIGHT - 8, "0"), (WIDTH - RIGHT, HEIGHT - 8, f"step {last}")]
    labels += [(WIDTH - RIGHT, TOP + 4, "val_loss strong, train_loss pale")]
    shapes += [f'<text x="{x}" y="{y}">{label}</text>' for x, y, label in labels]
    style = 'fill="currentColor" font-size="11" text-anchor="end"'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" {style}>{"".join(shapes)}</svg>'
