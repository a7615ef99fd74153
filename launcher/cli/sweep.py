"""Sweeps on the screen: `launch --sweep`, and the ranking that `jobs --group` prints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from launcher.cli.options import agree_to_cost
from launcher.cli.remedies import command, reason_of, sentence
from launcher.cli.show import note, print_table
from launcher.errors import ServiceError

if TYPE_CHECKING:
    from launcher.launching.records import Sweep, Tries
    from launcher.launching.sweeps import Progress, SweepPlan


def run_sweep(plan: SweepPlan, yes: bool) -> None:
    """Ask about the cost of a sweep, print its id, run it to its end, and print the ranking.

    Ctrl-C stops local jobs after a checkpoint; jobs on SageMaker keep running.
    """
    from launcher.launching.sweeps import find_sweep, stop_all
    from launcher.sagemaker.cost import CeilingTooLow, usd
    from launcher.tracking import wait

    n = len(plan.sweep.members)
    if plan.plans:
        note(f"sweep: {len(plan.plans)} jobs, {plan.sweep.parallel} at a time")
    if plan.backend.bills:
        worst = plan.worst_cost
        unknown = worst == math.inf
        note(f"cost: {'unknown, as is the price' if unknown else f'at most {usd(worst)} together'}")
        agree_to_cost(worst, plan.sweep.job.max_cost, plan.settings, yes)
    happening = plan.submit()
    click.echo(plan.group)
    again, more = ("launch", "--resume", plan.group), list[str]()
    try:
        for each in happening:
            number, (what, why) = each.number, event(each)
            values = " ".join(f"{k}={v}" for k, v in plan.sweep.members[number - 1].items())
            note(f"[{number}/{n}] {each.job_id} {what}: {values}{why}")
            if isinstance(each.obstacle, CeilingTooLow):
                more = ["--max-cost", "USD"]
    except ServiceError as error:
        raise ServiceError(f"{sentence(error)}; `{command(*again)}` continues the sweep") from None
    except KeyboardInterrupt as error:
        then = f"the jobs that run keep running; `{command(*again)}` starts the others"
        if plan.backend.stops_at_ctrl_c:
            note("stopping the running jobs after a checkpoint")
            for description in stop_all(*find_sweep(plan.group, plan.settings), plan.settings):
                wait(description.job_id, plan.settings)
            then = f"`{command(*again)}` continues the sweep"
        raise KeyboardInterrupt(*error.args, then) from None
    print_ranking(plan.tries, plan.sweep, err=True)
    if sum(each[-1].status == "Completed" for each in plan.tries.values() if each) < n:
        continues = command(*again, *more)
        raise ServiceError(f"not all jobs of the sweep completed; `{continues}` continues it")


def event(progress: Progress) -> tuple[str, str]:
    """What has happened to a job, and why, for a line of the screen."""
    from launcher.aws import OverQuota

    d, obstacle = progress.description, progress.obstacle
    if obstacle is not None:
        what = "waits" if isinstance(obstacle, OverQuota) else "is at its cost ceiling"
        return what, f" ({sentence(obstacle)})"
    if d is None:
        return f"continues {progress.continued}" if progress.continued else "started", ""
    result = "" if d.best_loss is None else f", best loss {d.best_loss:.5f}"
    return f"{d.status.lower()}{result}", f" ({reason_of(d)})" if d.status == "Failed" else ""


def print_ranking(tries: Tries, sweep: Sweep | None, err: bool = False) -> None:
    """Print the configurations of a sweep by their best loss, with its spread over seeds."""
    from launcher.launching.sweeps import ranking

    # Without a record, it was launched from another machine.
    numbers = range(1, len(sweep.members) + 1) if sweep else sorted(tries)
    found = [tries[n][-1] if tries.get(n) else None for n in numbers]
    ranks = ranking(found, sweep.members if sweep else None)
    names = list(ranks[0].values) if ranks else []
    rows = [["RANK", "BEST LOSS", "SPREAD", "JOBS", *names, "BEST JOB"]]
    for place, rank in enumerate(ranks, 1):
        by_loss = sorted(rank.jobs, key=lambda d: math.inf if d.best_loss is None else d.best_loss)
        best = by_loss[0].job_id if by_loss else "-"
        losses = rank.losses
        loss = f"{rank.loss:.4f}" if losses else "-"
        spread = f"{min(losses):.4f}-{max(losses):.4f}" if len(losses) > 1 else "-"
        count = f"{sum(d.status == 'Completed' for d in rank.jobs)}/{rank.n}"
        values = [str(rank.values[name]) for name in names]
        rows.append([str(place), loss, spread, count, *values, best])
    print_table(rows, err)
