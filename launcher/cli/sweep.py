"""Run a sweep for `launch --sweep`; find the group of `--group`, and print its ranking."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

import click

from sm_nanogpt.launcher.cli.options import agree_to_cost
from sm_nanogpt.launcher.cli.remedies import command, reason_of, sentence
from sm_nanogpt.launcher.cli.show import next_step, note, print_table
from sm_nanogpt.launcher.errors import InputError, ServiceError, joined
from sm_nanogpt.launcher.values import counted

if TYPE_CHECKING:
    from sm_nanogpt.launcher.description import JobDescription
    from sm_nanogpt.launcher.groups.find import JobGroup
    from sm_nanogpt.launcher.groups.plan import SweepPlan
    from sm_nanogpt.launcher.groups.ranking import Rank
    from sm_nanogpt.launcher.groups.run import Event
    from sm_nanogpt.launcher.groups.sweep import Sweep
    from sm_nanogpt.launcher.settings import Settings


def group_of(reference: str, settings: Settings, everyone: bool = False) -> JobGroup:
    """Find the group that a user typed as `--group`, as find_group does.

    Raises InputError if it is a search of this machine that has no jobs. If the jobs could not be
    listed, that error is raised: the search may have some.
    """
    from sm_nanogpt.launcher.finding import why_not_asked
    from sm_nanogpt.launcher.groups.find import find_group
    from sm_nanogpt.launcher.trying.history import search_names

    try:
        return find_group(reference, settings, everyone)
    except InputError as error:
        is_no_sweep = error.code in ("no-such-sweep", "no-sweeps-yet")
        if not is_no_sweep or reference not in search_names(settings):
            raise
    directory = shlex.quote(str(settings.home / "tries" / reference))
    kind = f"is a search without jobs{why_not_asked(settings)}"
    contents = "it has a ledger of runs and verdicts, and texts"
    lists = f"`{command('try', 'log', reference)}` lists its tries"
    deletes = f"to delete it, `rm -r {directory}` while no command uses it"
    raise InputError(f"{reference} {kind}; {contents}; {lists}; {deletes}")


def run_sweep(plan: SweepPlan, yes: bool) -> None:
    """Ask about the cost of a sweep, print its id, run it to its end, and print the ranking and
    the next step.

    Ctrl-C stops local jobs after a checkpoint; jobs on SageMaker keep running.
    """
    from sm_nanogpt.launcher.groups.run import begin_sweep
    from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow

    sweep = plan.sweep
    if plan.plans:
        note(f"sweep: {counted(len(plan.plans), 'job')}, {sweep.parallel} at a time")
    if plan.backend.bills:
        agree_to_worst_cost(plan, yes)
    events = begin_sweep(plan)
    click.echo(plan.group.id)
    resume = command("launch", "--resume", plan.group.id)
    is_ceiling_too_low = False
    try:
        for event in events:
            note(line_of(event, sweep))
            if isinstance(event.obstacle, CeilingTooLow):
                is_ceiling_too_low = True
    except ServiceError as error:
        advice = f"`{resume}` continues the sweep"
        raise ServiceError(joined(sentence(error), advice)) from None
    except KeyboardInterrupt as error:
        advice = f"the jobs that run keep running; `{resume}` starts the others"
        if plan.backend.stops_at_ctrl_c:
            stop_jobs(plan)
            advice = f"`{resume}` continues the sweep"
        raise KeyboardInterrupt(*error.args, advice) from None

    print_ranking(plan.group, sweep, err=True)
    n_completed = sum(job.status == "Completed" for job in plan.group.newest)
    if n_completed < len(sweep.members):
        if is_ceiling_too_low:
            resume += " --max-cost USD"
        raise ServiceError(f"not all jobs of the sweep completed; `{resume}` continues it")
    note(f"`{command('report', '--group', plan.group.id)}` shows the curves of all on one page")
    best_rank = ranks_of(plan.group, sweep)[0]
    note(next_step(best_job(best_rank), plan.settings))


def agree_to_worst_cost(plan: SweepPlan, yes: bool) -> None:
    """Print what the jobs of a sweep may cost together, and ask if that is much."""
    from sm_nanogpt.launcher.sagemaker.cost import usd

    worst = plan.worst_cost
    if worst == math.inf:
        note("cost: unknown, as is the price")
    else:
        note(f"cost: at most {usd(worst)} together")
    agree_to_cost(worst, plan.sweep.job.max_cost, plan.settings, yes)


def stop_jobs(plan: SweepPlan) -> None:
    """Stop the running jobs of a sweep, and wait for their checkpoints."""
    from sm_nanogpt.launcher.groups.find import find_group
    from sm_nanogpt.launcher.groups.stop import stop_group
    from sm_nanogpt.launcher.tracking import TrackedJob

    note("stopping the running jobs after a checkpoint")
    group = find_group(plan.group.id, plan.settings)
    for job in stop_group(group, plan.settings):
        TrackedJob(job.job_id, plan.settings).wait_for_end()


def line_of(event: Event, sweep: Sweep) -> str:
    """Describe in one line what has happened to a job, and why."""
    values = sweep.members[event.number - 1].items()
    settings = " ".join(f"{name}={value}" for name, value in values)
    job = f"[{event.number}/{len(sweep.members)}] {event.job_id}"
    reason = ""
    if event.obstacle is not None:
        reason = f" ({sentence(event.obstacle)})"
    elif event.description is not None and event.description.status == "Failed":
        reason = f" ({reason_of(event.description)})"
    return f"{job} {event.what_happened}: {settings}{reason}"


def print_ranking(group: JobGroup, sweep: Sweep | None, err: bool = False) -> None:
    """Print the configurations of a sweep, that of the best loss first, with the spread of the
    losses over seeds.

    sweep: the sweep as it was requested; None if it was launched from another machine.
    """
    ranks = ranks_of(group, sweep)
    names = list(ranks[0].values) if ranks else []
    rows = [["RANK", "BEST LOSS", "SPREAD", "JOBS", *names, "BEST JOB"]]
    for position, rank in enumerate(ranks, 1):
        values = [str(rank.values[name]) for name in names]
        best = best_job(rank).job_id if rank.jobs else "-"
        rows.append([str(position), *result_cells(rank), *values, best])
    print_table(rows, err)


def ranks_of(group: JobGroup, sweep: Sweep | None) -> list[Rank]:
    """Rank the configurations of a sweep. sweep: as for print_ranking."""
    from sm_nanogpt.launcher.groups.ranking import differing_values, ranking

    if sweep is None:
        return ranking(group.newest, differing_values(group.newest))
    return ranking([group.last_try(number) for number in sweep.numbers], sweep.members)


def result_cells(rank: Rank) -> list[str]:
    """The cells of a configuration: the mean of its losses, their lowest and highest, and how many
    of its jobs completed."""
    losses = rank.losses
    loss = f"{rank.mean_loss:.4f}" if losses else "-"
    spread = f"{min(losses):.4f}-{max(losses):.4f}" if len(losses) > 1 else "-"
    n_completed = sum(job.status == "Completed" for job in rank.jobs)
    return [loss, spread, f"{n_completed}/{rank.n_jobs}"]


def best_job(rank: Rank) -> JobDescription:
    """The job with the lowest loss, of a rank that has jobs."""
    from sm_nanogpt.launcher.groups.ranking import best_first

    return best_first(rank.jobs)[0]
