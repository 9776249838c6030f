"""``stateflow job``: what is done by itself, at a time or again and again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.options import (
    LOCAL,
    Controller,
    Json,
    MaxBandwidth,
    MaxPause,
    Order,
    Patience,
    Strategy,
    move_options,
    partition_numbers,
)
from stateflow.cli.output import console, emit, fields_of
from stateflow.client import Cluster
from stateflow.reports import JobReport

app = Commands("job", help="What is done by itself: at a time, or again and again.")
Name = Annotated[str, typer.Argument(help="The job's name.")]


@app.command()
def create(
    name: Name,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule", help="once 2030-01-01T18:00:00Z, every 3600 (s), or cron 0 18 * * 1-5 Europe/Berlin."
        ),
    ],
    do: Annotated[str, typer.Option("--do", help="rebalance, migrate, drain or checkpoint.")],
    operator: Annotated[str, typer.Option(help="Default: all.")] = "",
    policy: Annotated[str, typer.Option("--policy", help="Of a rebalance: ring, load, locality, or several.")] = "",
    partitions: Annotated[list[str] | None, typer.Option("--partition", help="Of a migration: 3, 5-9 or all.")] = None,
    to: Annotated[str, typer.Option(help="Of a migration: where; of a drain: the replica that is drained.")] = "",
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Have something done by itself, each time once, whichever controller leads then."""
    cluster = Cluster(controller)
    numbers = partition_numbers(partitions, cluster.operator(operator).partitions) if partitions else []
    report = cluster.create_job(
        name,
        schedule,
        do,
        operator=operator,
        policies=[each.strip() for each in policy.split(",")] if policy else (),
        partitions=numbers,
        to=to,
        options=move_options(max_pause, max_bandwidth, strategy, order, patience),
    )
    _show(report, as_json)


@app.command("list")
def list_jobs(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """All of them, when they are due, and what became of their last run."""
    found = Cluster(controller).jobs()
    if as_json:
        emit({"jobs": [fields_of(each) for each in found]})
        return
    table = show.new_table(
        "job", "does", "schedule", "next", "last for", "state", "came of it", spare=("came of it", "last for")
    )
    for each in found:
        last = each.runs[-1] if each.runs else None
        table.add_row(
            each.name,
            each.do,
            each.schedule,
            "paused" if each.paused else _time(each.next_us),
            "" if last is None else _time(last.at_us),
            "" if last is None else last.state,
            "" if last is None else last.note,
        )
    console.print(table)


@app.command()
def info(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """One job and its runs."""
    _show(Cluster(controller).job(name), as_json)


@app.command()
def pause(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Not done any more, until it is resumed; a run under way goes on."""
    _show(Cluster(controller).change_job(name, "pause"), as_json)


@app.command()
def resume(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Done again from now on; what was due meanwhile is not made up for."""
    _show(Cluster(controller).change_job(name, "resume"), as_json)


@app.command("run-now")
def run_now(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Once more, now."""
    _show(Cluster(controller).change_job(name, "run"), as_json)


@app.command()
def delete(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Not done any more; its runs stay in the ledger."""
    report = Cluster(controller).change_job(name, "delete")
    if as_json:
        emit(fields_of(report))
    else:
        console.print(f"{name} is deleted")


def _show(report: JobReport, as_json: bool) -> None:
    if as_json:
        emit(fields_of(report))
        return
    when = "paused" if report.paused else f"next {_time(report.next_us)}"
    console.print(f"{report.name}: {report.do} {report.operator or 'all operators'}, {report.schedule}, {when}")
    if report.runs:
        table = show.new_table("for", "state", "took", "came of it", "reconfigurations", spare=("reconfigurations",))
        for run in report.runs:
            took = f"{(run.ended_us - run.began_us) / 1e6:.1f} s" if run.ended_us else ""
            table.add_row(_time(run.at_us), run.state, took, run.note, " ".join(run.reconfigurations))
        console.print(table)


def _time(us: int) -> str:
    return f"{datetime.fromtimestamp(us // 1_000_000, UTC):%Y-%m-%d %H:%M:%SZ}" if us else "never"
