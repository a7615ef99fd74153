"""Sweeps on the screen: `launch --sweep`, and the ranking that `jobs --group` prints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from launcher.cli.options import agree_to_cost
from launcher.cli.show import note, print_json, print_table
from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from launcher.job import Request
    from launcher.launching.launch import Ready
    from launcher.launching.sweeps import Progress, Sweep, Tries
    from launcher.settings import Settings


def launch_sweep(
    job: Request,
    settings: Settings,
    values: dict[str, list[str]],
    seeds: int,
    parallel: int,
    yes: bool,
) -> None:
    """Check all jobs of a sweep, print its id, and run it."""
    from launcher.launching.launch import check_name, new_job_id
    from launcher.launching.sweeps import Sweep, alone, grid, write_record
    from launcher.source import keep

    if job.resume is not None:
        raise InputError(
            "--resume continues one job; to start the jobs of a sweep from its weights, use"
            f" --init-from {job.resume}"
        )
    local = job.is_local
    if both := values.keys() & job.hyperparameters.keys():
        raise InputError(f"--sweep {min(both)}: --set or --config gives it too; leave one out")
    if seeds > 1 and "seed" in values:
        raise InputError("--sweep seed and --seeds cannot be combined")
    if local and parallel > 1:
        divide_cores(parallel)
        if job.processes_per_instance is None:
            job = job.model_copy(update={"processes_per_instance": 1})
    base = job.hyperparameters.get("seed", 1337)
    each = grid(values, seeds, int(base))
    check_name(job, settings)
    if job.name is not None:  # with the longest tail of its jobs' names
        job.replaced(name=f"{job.name}-{len(each)}-try99")
    sweep = Sweep(job=job, members=each, parallel=parallel)
    group = new_job_id()
    every = [sweep.ready(n, settings, f"{group}-{n}") for n in range(1, len(each) + 1)]
    first = every[0]
    if settings.offline:
        print_json([ready.plan.request for ready in every])
        return
    note(f"sweep: {len(each)} jobs, {parallel} at a time")
    if not local:
        confirm_cost(every, sweep.job.max_cost, settings, yes)
    first.upload()
    # What later jobs read must be what the first one does, whatever is changed or launched
    # meanwhile, and from any directory.
    names = ("data", "validation", "init_from", "entry_point")
    fixed = {n: place for n in names if (place := getattr(first.job, n)) is not None}
    if "entry_point" in fixed:
        fixed["entry_point"] = keep(first.job.source, settings)
    sweep = Sweep(job=job.model_copy(update=fixed), members=each, parallel=parallel)
    write_record(group, sweep, settings)
    click.echo(group)
    sys.stdout.flush()
    with alone(group, settings):
        run_sweep(group, sweep, {}, settings)


def confirm_cost(
    every: Sequence[Ready], max_cost: float | None, settings: Settings, yes: bool
) -> None:
    """Print what jobs may cost together, and ask if that is much."""
    from launcher.sagemaker.cost import usd

    worst = sum(ready.job.worst_cost or math.inf for ready in every)
    unknown = worst == math.inf
    note(f"cost: {'unknown, as is the price' if unknown else f'at most {usd(worst)} together'}")
    agree_to_cost(worst, max_cost, settings, yes)


def go_on(
    group: str, max_cost: float | None, settings: Settings, parallel: int | None, yes: bool
) -> None:
    """Continue a sweep: start the jobs that have not completed."""
    from launcher.launching.sweeps import alone, find_sweep, next_id, read_record, write_record
    from launcher.sagemaker.cost import CeilingTooLow

    with alone(group, settings):
        sweep = read_record(group, settings)
        if sweep is None:
            raise InputError(f"sweep {group} was deleted")
        if max_cost is not None:
            sweep = sweep.model_copy(update={"job": sweep.job.replaced(max_cost=max_cost)})
        if parallel:
            sweep = sweep.model_copy(update={"parallel": parallel})
        if sweep.job.is_local and sweep.parallel > 1:
            divide_cores(sweep.parallel)
        tries, every = find_sweep(group, settings)[1], []
        if not sweep.job.is_local:
            for number in sweep.left(tries):
                earlier = tries.get(number, [])
                with suppress(*[CeilingTooLow] * bool(earlier)):  # `run` tells of it
                    job_id = next_id(group, number, earlier)
                    every.append(sweep.ready(number, settings, job_id, earlier))
            confirm_cost(every, sweep.job.max_cost, settings, yes)
        write_record(group, sweep, settings)
        click.echo(group)
        sys.stdout.flush()
        run_sweep(group, sweep, tries, settings)


def divide_cores(parallel: int) -> None:
    """Give each local job an equal part of the cores."""
    from launcher.machines import cores

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // parallel)))


def run_sweep(group: str, sweep: Sweep, tries: Tries, settings: Settings) -> None:
    """Run a sweep to its end, and print the ranking. tries: its jobs so far.

    Ctrl-C stops local jobs after a checkpoint; jobs on SageMaker keep running.
    """
    from launcher.launching.sweeps import find_sweep, run, stop_all
    from launcher.sagemaker.cost import CeilingTooLow
    from launcher.tracking import wait

    n, limited = len(sweep.members), ""
    again = f"sm-nanogpt launch --resume {group}"
    try:
        for progress in run(group, sweep, tries, settings):
            number, (what, why) = progress.number, event(progress)
            values = " ".join(f"{k}={v}" for k, v in sweep.members[number - 1].items())
            note(f"[{number}/{n}] {progress.job_id} {what}: {values}{why}")
            if isinstance(progress.obstacle, CeilingTooLow):
                limited = " --max-cost USD"
    except KeyboardInterrupt as error:
        if not sweep.job.is_local:
            raise KeyboardInterrupt(
                *error.args, f"the jobs that run keep running; `{again}` starts the others"
            ) from None
        note("stopping the running jobs after a checkpoint")
        for description in stop_all(*find_sweep(group, settings), settings):
            wait(description.job_id, settings)
        raise KeyboardInterrupt(f"`{again}` continues the sweep") from None
    print_ranking(tries, sweep, err=True)
    if sum(each[-1].status == "Completed" for each in tries.values()) < n:
        raise ServiceError(f"not all jobs of the sweep completed; `{again}{limited}` continues it")


def event(progress: Progress) -> tuple[str, str]:
    """What has happened to a job, and why, for a line of the screen."""
    from launcher.aws import OverQuota
    from launcher.tracking import reason_of

    d, obstacle = progress.description, progress.obstacle
    if obstacle is not None:
        what = "waits" if isinstance(obstacle, OverQuota) else "is at its cost ceiling"
        return what, f" ({obstacle})"
    if d is None:
        return f"continues {progress.continued}" if progress.continued else "started", ""
    loss = (d.metrics or {}).get("best_loss")
    result = f", best loss {loss:.5f}" if loss is not None else ""
    return f"{d.status.lower()}{result}", f" ({reason_of(d)})" if d.status == "Failed" else ""


def print_ranking(tries: Tries, sweep: Sweep | None, err: bool = False) -> None:
    """Print the configurations of a sweep by their best loss, with its spread over seeds."""
    from launcher.launching.sweeps import ranking

    if sweep is None:  # it was launched from another machine
        ranks = ranking([each[-1] for _, each in sorted(tries.items())])
    else:
        numbers = range(1, len(sweep.members) + 1)
        found = [tries[n][-1] if tries.get(n) else None for n in numbers]
        ranks = ranking(found, sweep.members)
    names = list(ranks[0].values) if ranks else []
    rows = [["RANK", "BEST LOSS", "SPREAD", "JOBS", *names, "BEST JOB"]]
    for place, rank in enumerate(ranks, 1):
        by_loss = sorted(rank.jobs, key=lambda d: (d.metrics or {}).get("best_loss", math.inf))
        best = by_loss[0].job_id if by_loss else "-"
        losses = rank.losses
        loss = f"{rank.loss:.4f}" if losses else "-"
        spread = f"{min(losses):.4f}-{max(losses):.4f}" if len(losses) > 1 else "-"
        done = sum(d.status == "Completed" for d in rank.jobs)
        count = f"{done}/{rank.n}"
        values = [str(rank.values[name]) for name in names]
        rows.append([str(place), loss, spread, count, *values, best])
    print_table(rows, err)
