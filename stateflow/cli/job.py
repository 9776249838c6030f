"""``stateflow job``: work that begins by itself, once or on a schedule."""

from __future__ import annotations

from typing import Annotated

import typer

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import (
    LOCAL,
    Controller,
    Json,
    MaxBandwidth,
    MaxPause,
    Order,
    Patience,
    Strategy,
    console,
    emit,
    errors,
    fields_of,
    move_options,
    shown_time,
)
from stateflow.client import Cluster
from stateflow.client.words import partition_numbers
from stateflow.reports import JobReport, JobRun
from stateflow.types import ranges

app = Commands("job", help="Jobs: work that the cluster starts once or on a schedule.")
Name = Annotated[str, typer.Argument(help="Name of the job.")]


@app.command()
def create(
    name: Name,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule", help="once 2030-01-01T18:00:00Z, every 20s (15m, 2h, 7d), or cron 0 18 * * 1-5 Europe/Berlin."
        ),
    ],
    do: Annotated[str, typer.Option("--do", help="What to do: rebalance, migrate, drain or checkpoint.")],
    operator: Annotated[str, typer.Option(help="Operator; default: all.")] = "",
    policy: Annotated[str, typer.Option("--policy", help="For rebalance: ring, load, locality, or several.")] = "",
    partitions: Annotated[
        list[str] | None, typer.Option("--partition", help="For migrate: partitions, e.g. 3, 5-9, or all.")
    ] = None,
    to: Annotated[str, typer.Option(help="For migrate: target site or replica; for drain: replica to drain.")] = "",
    coordinator: Annotated[
        str,
        typer.Option(
            help="Constraint on the controller: hard or soft:SECONDS, then node NAME, site NAME or label KEY=VALUE."
        ),
    ] = "",
    workers: Annotated[
        str,
        typer.Option(
            help="Constraint on target nodes, in the same form; at the end, :2-4 requires 2 and uses at most 4."
        ),
    ] = "",
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Create a job: work that begins by itself, each time once, whichever controller leads then."""
    cluster = Cluster(controller)
    numbers = partition_numbers(" ".join(partitions), cluster.operator(operator).partitions) if partitions else []
    report = cluster.create_job(
        name,
        schedule,
        do,
        operator=operator,
        policies=[each.strip() for each in policy.split(",")] if policy else (),
        partitions=numbers,
        to=to,
        coordinator=coordinator,
        workers=workers,
        options=move_options(max_pause, max_bandwidth, strategy, order, patience),
    )
    _show(report, as_json)


@app.command("list")
def list_jobs(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List jobs: when they are due, and the outcome of their last run."""
    found = Cluster(controller).jobs()
    show.say_who_answered(found[0].follower if found else None)
    if as_json:
        emit({"jobs": [fields_of(each) for each in found]})
        return
    for each in found:
        if each.error:
            errors.print(show.plain(each.error), highlight=False)
    table = show.new_table(
        "job", "does", "schedule", "next", "last due", "state", "outcome", spare=("outcome", "last due")
    )
    for each in found:
        last = each.runs[-1] if each.runs else None
        table.add_row(
            each.name,
            _does(each),
            each.schedule,
            "paused" if each.paused else _time(each.next_us),
            "" if last is None else _time(last.at_us),
            "unreadable" if each.error else "" if last is None else last.state,
            "" if last is None else last.note,
        )
    console.print(table)


@app.command()
def info(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Show one job and its runs."""
    _show(Cluster(controller).job(name), as_json)


@app.command()
def pause(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Begin no more runs until it is resumed; a run under way goes on."""
    _show(Cluster(controller).change_job(name, "pause"), as_json)


@app.command()
def resume(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Begin runs again from now on; runs that were due meanwhile are not made up for."""
    _show(Cluster(controller).change_job(name, "resume"), as_json)


@app.command("run-now")
def run_now(
    name: Name,
    wait: Annotated[
        bool, typer.Option("--wait/--async", help="Wait until the run has ended; otherwise print its id at once.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Run a job once, now; `stateflow job result RUN` shows the outcome."""
    cluster = Cluster(controller)
    run = cluster.run_job(name)
    _result(cluster.job_run(run.id, wait=True) if wait else run, as_json)


@app.command()
def result(
    run: Annotated[str, typer.Argument(help="Id of the run, as printed by `run-now` and `job info`.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Show what came of a run, operator by operator, or what it waits for. Status 1 where it failed."""
    _result(Cluster(controller).job_run(run, wait=wait), as_json)


def _result(run: JobRun, as_json: bool) -> None:
    show.say_who_answered(run.follower)
    if as_json:
        emit(fields_of(run))
    else:
        console.print(f"{run.id}: {run.state}{f', {run.note}' if run.note else ''}", highlight=False)
        for stage in run.stages:
            came = stage.error or " ".join(stage.reconfigurations) or "nothing to do"
            console.print(f"  {stage.operator}: {came}", highlight=False)
    if run.state == "FAILED":
        raise typer.Exit(1)


@app.command()
def delete(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Delete a job; its runs stay in the ledger."""
    report = Cluster(controller).change_job(name, "delete")
    if as_json:
        emit(fields_of(report))
    else:
        console.print(f"{name} deleted")


def _show(report: JobReport, as_json: bool) -> None:
    if as_json:
        emit(fields_of(report))
        return
    if report.error:
        errors.print(show.plain(report.error), highlight=False)
    else:
        when = "paused" if report.paused else f"next {_time(report.next_us)}"
        console.print(f"{report.name}: {report.do} {report.operator or 'all operators'}, {report.schedule}, {when}")
    for what, affinity in (("coordinated by", report.coordinator), ("moves go to", report.workers)):
        if affinity:
            console.print(f"{what}: {affinity}", highlight=False)
    console.print(f"does: {_does(report)}", highlight=False)
    if report.runs:
        table = show.new_table("run", "due", "state", "took", "outcome", spare=("due",))
        for run in report.runs:
            took = f"{(run.ended_us - run.began_us) / 1e6:.1f} s" if run.ended_us else ""
            table.add_row(run.id, _time(run.at_us), run.state, took, run.note)
        console.print(table)


def _does(job: JobReport) -> str:
    """Returns all that a job does, without when and where."""
    said = [job.do, job.operator or "all operators"]
    if job.do == "migrate":
        said += [ranges(list(job.partitions)), "to", job.to]
    elif job.do == "drain":
        said = [job.do, job.to] if not job.operator else [job.do, job.to, "of", job.operator]
    elif job.do == "rebalance":
        said += ["by", ",".join(job.policies) or "ring"]
    return " ".join(said)


def _time(us: int) -> str:
    return f"{shown_time(us)}Z" if us else "never"
