"""Commands on work that the ledger records. ``stateflow batch`` shows batches of work with their entities and jobs;
``stateflow job`` manages work that the cluster starts by itself, once or on a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.ledger import DEFAULT, Url, opened_at, styled
from stateflow.cli.output import (
    LOCAL,
    Controller,
    GivenMoves,
    Json,
    console,
    emit,
    errors,
    shown_time,
    with_move_options,
)
from stateflow.cli.show import new_table, titled
from stateflow.client import Cluster
from stateflow.client.commands import call_off, partition_numbers, runner_of
from stateflow.reports import JobReport, JobRun
from stateflow.types import MoveOptions, ranges

if TYPE_CHECKING:
    from stateflow.ledger import Board

app = Commands()


batch_commands = Commands("batch", help="Batches of work: their progress, entities and jobs.")
app.add_typer(batch_commands)
Bid = Annotated[str, typer.Argument(metavar="BATCH")]
Status = Annotated[str | None, typer.Option(help="List only entries with this status.")]


@contextmanager
def _board(url: str) -> Iterator[Board]:
    from stateflow.ledger import Board

    with opened_at(url) as opened:
        yield Board(opened)


@batch_commands.command("list")
def list_(
    status: Status = None,
    limit: Annotated[int, typer.Option(help="Number of newest batches to show.", min=1)] = 50,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """List batches, newest first."""
    with _board(url) as board:
        rows = board.batches(status, limit=limit)
    if as_json:
        emit({"batches": rows})
        return
    shown = new_table("batch", "name", "command", "status", "owner", "created (UTC)", "ended (UTC)")
    for row in rows:
        times = (_at(row["created_us"]), _at(row["ended_us"]))
        shown.add_row(row["bid"], row["name"], row["command"], styled(row["status"]), row["owner"] or "", *times)
    console.print(titled(f"{len(rows)} batches", shown))


@batch_commands.command()
def info(bid: Bid, url: Url = DEFAULT, as_json: Json = False) -> None:
    """Show one batch: how many entities are done, the pace, the expected end, and the slowest entities."""
    with _board(url) as board:
        found = board.batch(bid)
    if as_json:
        emit(found)
        return
    pace = "" if found["pace"] is None else f"{found['pace']:.3g} entities/s"
    fields: dict[str, Any] = {
        **{name: found[name] for name in ("name", "command", "status", "owner", "affinity", "job_affinity")},
        "entities": f"{found['total_entities']}{'' if found['listed'] else ', listing incomplete'}",
        **{name: found[name] for name in ("waiting", "in_progress", "succeeded", "failed", "cancelled")},
        "pace": pace,
        "created (UTC)": _at(found["created_us"]),
        "started (UTC)": _at(found["started_us"]),
        "ended (UTC)": _at(found["ended_us"]),
        "will end (UTC)": _eta(found),
    }
    rows = new_table("field", "value")
    for name, value in fields.items():
        rows.add_row(name, styled(value) if name == "status" else "" if value is None else str(value))
    slow = new_table("entity", "ms", "status", "result", numbers=("ms",))
    for each in found["extra_stats"]["slowest"]:
        slow.add_row(each["id"], str(each["ms"]), styled(each["status"]), each["result"] or "")
    console.print(Group(titled(f"batch {bid}", rows), titled("slowest entities", slow)))


@batch_commands.command()
def entities(bid: Bid, status: Status = None, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List the entities of a batch, in the order of listing."""
    with _board(url) as board:
        board.batch(bid)  # an unknown batch is an error, not an empty list
        rows = board.entities(bid, status)
    if as_json:
        emit({"entities": rows})
        return
    shown = new_table("entity", "status", "ms", "result", numbers=("ms",))
    for row in rows:
        ms = "" if row["ms"] is None else str(row["ms"])
        shown.add_row(row["entity"], styled(row["status"]), ms, row["result"] or "")
    console.print(titled(f"{len(rows)} entities", shown))


@batch_commands.command()
def jobs(status: Status = None, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List jobs by status, in the order of their creation."""
    from stateflow.ledger.rules import JobStatus

    with _board(url) as board:
        rows = [row for each in ([status] if status is not None else JobStatus) for row in board.jobs(each)]
    if as_json:
        emit({"jobs": rows})
        return
    shown = new_table(
        "job", "batch", "status", "tries", "worker", "affinity", "schedule", "fires (UTC)", numbers=("tries",)
    )
    for row in rows:
        texts = (row["worker"] or "", row["affinity"] or "", row["schedule"] or "", _at(row["fire_us"]))
        shown.add_row(row["job_id"], row["bid"] or "", styled(row["status"]), str(row["tries"]), *texts)
    console.print(titled(f"{len(rows)} jobs", shown))


@batch_commands.command()
def pause(bid: Bid, url: Url = DEFAULT) -> None:
    """Pause a batch; its runner stops after the entity in progress. For a reconfiguration, use `stateflow reconfig
    pause`."""
    _move(bid, "PAUSED", url)


@batch_commands.command()
def resume(bid: Bid, url: Url = DEFAULT) -> None:
    """Resume a batch; then start its runner again."""
    _move(bid, "IN_PROGRESS", url)


@batch_commands.command()
def cancel(bid: Bid, url: Url = DEFAULT, controller: Controller = LOCAL) -> None:
    """Cancel a batch; `batch retry --cancelled` resumes it. The controller cancels its own batches, such as `roll/…`,
    `sweep/…`, `restores/…` and `reconfiguration/…`: it begins no further work of them."""
    kind, id_ = runner_of(bid)
    if kind:
        console.print(f"{bid}: {call_off(Cluster(controller), kind, id_)}")
    else:
        _move(bid, "CANCELLED", url)


@batch_commands.command()
def retry(
    bid: Bid,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Also retry cancelled entities.")] = False,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Set failed entities back to waiting; the batch's runner then processes them again."""
    with _board(url) as board:
        _, again = board.retry_batch(bid, allow_cancelled=cancelled)
    if as_json:
        emit({"batch": bid, "entities": again})
    else:
        console.print(f"{bid}: {len(again)} entities waiting")


def _move(bid: str, status: str, url: str) -> None:
    with _board(url) as board:
        board.move_batch(bid, status)
    console.print(f"{bid}: {status}")


def _eta(found: dict[str, Any]) -> str:
    if found["eta"] is None:
        return ""
    return f"{_at(found['eta'])} ({_at(found['eta_sooner'])} to {_at(found['eta_later'])} with 95 % confidence)"


def _at(at_us: int | None) -> str:
    return shown_time(at_us, exactly=True)


job_commands = Commands("job", help="Jobs: work that the cluster starts once or on a schedule.")
app.add_typer(job_commands)
Name = Annotated[str, typer.Argument(help="Name of the job.")]


@job_commands.command()
@with_move_options("limit", "per_node", "per_link")
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
    policy: Annotated[
        str, typer.Option("--policy", help="For rebalance: ring, load, locality, or several, e.g. locality,load.")
    ] = "",
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
    options: GivenMoves = MoveOptions,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Create a job: work that the cluster starts by itself, once for each due time, whichever controller leads."""
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
        options=options(),
    )
    _show(report, as_json)


@job_commands.command("list")
def list_jobs(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List jobs with their next due time and the outcome of their last run."""
    found = Cluster(controller).jobs()
    show.say_who_answered(found[0].follower if found else None)
    if as_json:
        emit({"jobs": [each.to_dict() for each in found]})
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


@job_commands.command("info")
def job_info(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Show one job and its runs."""
    _show(Cluster(controller).job(name), as_json)


@job_commands.command("pause")
def pause_job(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Pause a job: no run begins until it is resumed. A run under way continues."""
    _show(Cluster(controller).change_job(name, "pause"), as_json)


@job_commands.command("resume")
def resume_job(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Resume a paused job. Runs that were due during the pause are skipped."""
    _show(Cluster(controller).change_job(name, "resume"), as_json)


@job_commands.command("run-now")
def run_now(
    name: Name,
    wait: Annotated[
        bool, typer.Option("--wait/--async", help="Wait until the run has ended, or print the run's id at once.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Run a job once, now; `stateflow job result RUN` shows the outcome."""
    cluster = Cluster(controller)
    run = cluster.run_job(name)
    _result(cluster.job_run(run.id, wait=True) if wait else run, as_json)


@job_commands.command()
def result(
    run: Annotated[str, typer.Argument(help="Id of the run, as printed by `run-now` and `job info`.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Show the outcome of a run, operator by operator, or what the run waits for. Exits with status 1 if the run
    failed."""
    _result(Cluster(controller).job_run(run, wait=wait), as_json)


def _result(run: JobRun, as_json: bool) -> None:
    show.say_who_answered(run.follower)
    if as_json:
        emit(run.to_dict())
    else:
        console.print(f"{run.id}: {run.state}{f', {run.note}' if run.note else ''}", highlight=False)
        for stage in run.stages:
            came = stage.error or " ".join(stage.reconfigurations) or "nothing to do"
            console.print(f"  {stage.operator}: {came}", highlight=False)
    if run.state == "FAILED":
        raise typer.Exit(1)


@job_commands.command()
def delete(name: Name, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Delete a job; its runs stay in the ledger.

    A run under way finishes its operator, and begins no other.
    """
    report = Cluster(controller).change_job(name, "delete")
    if as_json:
        emit(report.to_dict())
    else:
        console.print(f"{name} deleted")


def _show(report: JobReport, as_json: bool) -> None:
    if as_json:
        emit(report.to_dict())
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
    """Returns a description of a job's work, without its times and nodes."""
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
