"""A job on the screen and in a notebook: what is known about it, and its curve."""

from __future__ import annotations

import time
from datetime import timedelta
from html import escape

from launcher.curve import Curve, seconds_left, total_steps
from launcher.instances import has_local_disks
from launcher.job import JobDescription
from launcher.sagemaker.cost import usd


def card(job: JobDescription, curve: Curve | None) -> str:
    left = "<td style='text-align: left'>"
    rows = (f"<tr><th>{n}</th>{left}{escape(v)}</td></tr>" for n, v in facts(job).items() if v)
    return f"<table>{''.join(rows)}</table>{drawing(curve) if curve else ''}"


def facts(job: JobDescription) -> dict[str, str | None]:
    """What there is to know about a job, by its name; None for what is not known."""
    now, billed, trained = job.metrics or {}, job.billable_seconds, job.training_seconds
    last, bits = now.get("val_loss"), now.get("bits_per_byte")
    best, total = now.get("best_loss", last), total_steps(job.hyperparameters)
    left = seconds_left(now, job.hyperparameters) if job.is_running else None
    saved = f", {1 - billed / trained:.0%} saved by spot" if job.spot and billed and trained else ""
    return {
        "job": job.job_id,
        "name": job.name,
        "settings": job.summary,
        "search": job.search,
        "state": job.state,
        "reason": job.failure_reason,
        "instance": f"{job.instance_count} x " * (job.instance_count > 1) + job.instance,
        "data": job.data,
        "step": f"{now['step']:.0f}/{total}" if "step" in now else None,
        "best loss": None if best is None else f"{best:.4f}",
        "forecast": None if job.expected is None else str(job.expected),
        "bits/byte": f"{bits * best / last:.4f}" if bits and best and last else None,  # of the best
        "tokens/s": f"{speed:,.0f}" if (speed := now.get("tokens_per_second")) else None,
        "time left": None if left is None else str(timedelta(seconds=round(left))),
        "model": job.model_uri,
        "checkpoints": job.checkpoint_uri,
        "billable": None if billed is None else f"{billed} s{saved}",
        "cost": cost_words(job),
        "message": job.message if job.is_running else None,
    }


def cost_words(job: JobDescription) -> str | None:
    """What a job has cost, and the price used."""
    if job.cost is None or job.price is None:
        return None
    so_far = " so far (estimated)" * job.is_running
    if job.has_open_pool(time.time()):
        so_far = f" so far, including all {job.keep_alive} s of its warm pool"
    disk = "" if has_local_disks(job.instance) else " plus its disk"
    price = f"{usd(job.price.per_hour)} per instance and hour{disk} ({job.price.source})"
    return f"{usd(job.cost)}{so_far}, at {price}"


def drawing(curve: Curve) -> str:
    """The losses: that of training pale, that of validation strong."""
    lines = {0.4: curve.points("train_loss"), 1.0: curve.points("val_loss")}
    points = [point for line in lines.values() for point in line]
    if len(points) < 2:
        return ""
    last, losses = max(step for step, _ in points) or 1, [loss for _, loss in points]
    low, high, shapes = min(losses), max(losses), ""
    stroke = 'fill="none" stroke="currentColor" stroke-width="2.5" stroke-linecap="round"'
    for opacity, line in lines.items():
        line *= 1 + (len(line) == 1)  # a line from a point to itself is a dot
        places = " ".join(f"{step},{-loss}" for step, loss in line)
        fixed = 'vector-effect="non-scaling-stroke"'
        shapes += f'<polyline opacity="{opacity}" {stroke} {fixed} points="{places}"/>'
    box = f'viewBox="0 {-high} {last} {high - low or 1}" preserveAspectRatio="none"'
    said = f"val_loss strong, train_loss pale: {high:.2f} to {low:.2f} in {last} steps"
    return f'<svg width="480" height="130" overflow="visible" {box}>{shapes}</svg><br>{said}'
