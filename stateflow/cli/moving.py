"""Commands that move partitions, and that show where they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from stateflow.cli import show
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
)
from stateflow.cli.output import command, console, emit, size
from stateflow.client import Cluster, MoveReport, Reconfiguration
from stateflow.client.cluster import Migration

reconfig = typer.Typer(no_args_is_help=True, help="Reconfigurations: what moved, moves and failed.")
Id = Annotated[str, typer.Argument(help="As `stateflow reconfig list` shows it.")]


def add_to(app: typer.Typer) -> None:
    for function in (nodes, partitions, rebalance, drain, standby):
        app.command()(function)
    app.add_typer(reconfig, name="reconfig")


# -- what is where --------------------------------------------------------------------------------------------


@command
def nodes(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """The replicas: site, weight, last heard, partitions."""
    replicas = Cluster(controller).status().replicas
    if as_json:
        emit({"nodes": [_plain(r) for r in replicas]})
        return
    table = show.new_table(
        "replica",
        "site",
        "address",
        "weight",
        "state",
        "heard",
        "partitions",
        numbers=("weight", "heard", "partitions"),
    )
    for r in replicas:
        heard = "never" if r.last_heartbeat_s < 0 else f"{r.last_heartbeat_s:.1f} s ago"
        state = Text("alive", "green") if r.alive else Text("silent", "bold red")
        table.add_row(r.name, r.site, r.address, str(r.weight), state, heard, str(r.partitions))
    console.print(table)


@command
def partitions(
    operator: Annotated[str | None, typer.Argument(help="Default: all.")] = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Each partition's owner, epoch and standbys."""
    cluster = Cluster(controller)
    if operator is not None:
        cluster.operator(operator)
    status = cluster.status()
    standbys: dict[tuple[str, int], list[str]] = {}
    for view in status.standbys:
        mark = "" if view.phase == "CATCHING_UP" else f" ({view.phase.lower()})"
        standbys.setdefault((view.operator, view.partition), []).append(view.replica + mark)
    rows = [
        (o.name, p, owner, o.epochs[p], standbys.get((o.name, p), []))
        for o in status.operators
        if operator in (None, o.name)
        for p, owner in enumerate(o.owners)
    ]
    if as_json:
        names = ("operator", "partition", "owner", "epoch", "standbys")
        emit({"partitions": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    table = show.new_table("operator", "partition", "owner", "epoch", "standbys", numbers=("partition", "epoch"))
    for name, number, owner, epoch, copies in rows:
        table.add_row(name, str(number), owner, str(epoch), " ".join(copies))
    console.print(table)


# -- moving ---------------------------------------------------------------------------------------------------


@command
def rebalance(
    operator: Annotated[str | None, typer.Argument(help="Default: all.")] = None,
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Bring every replica to its weight's share of partitions, by as few moves as that takes."""
    options: dict[str, Any] = move_options(max_pause, max_bandwidth, strategy, order, patience)
    _wait_for(Cluster(controller).rebalance(operator or "", **options), as_json)


@command
def drain(
    replica: Annotated[str, typer.Argument(help="Everything it owns leaves it.")],
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Move everything away from a replica, so that it can be stopped."""
    options: dict[str, Any] = move_options(max_pause, max_bandwidth, strategy, order, patience)
    _wait_for(Cluster(controller).drain(replica, **options), as_json)


def _wait_for(migrations: Sequence[Migration], as_json: bool) -> None:
    if not migrations and not as_json:
        console.print("nothing to move: every replica has its share")
    reports = [migration.wait() if as_json else show.migration(migration) for migration in migrations]
    if as_json:
        emit({"reconfigurations": [report.to_dict() for report in reports]})
    if any(report.state != "COMPLETED" for report in reports):
        raise typer.Exit(1)


@command
def standby(
    operator: Annotated[str, typer.Argument()],
    count: Annotated[int, typer.Argument(help="Copies beside the owner; 0 for none.")] = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Keep copies of every partition following their owners, to take over when those die."""
    begun = Cluster(controller).standby(operator, count)
    if as_json:
        emit({"operator": operator, "count": count, "standbys": [_plain(view) for view in begun]})
    else:
        console.print(f"{operator}: {count} per partition wanted, {len(begun)} begun or there (`stateflow partitions`)")


# -- reconfigurations -----------------------------------------------------------------------------------------


@reconfig.command("list")
@command
def list_(
    limit: Annotated[int, typer.Option(help="The newest so many; 0 for all.", min=0)] = 20,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Newest first."""
    found = Cluster(controller).reconfigurations(limit)
    if as_json:
        emit({"reconfigurations": [report.to_dict() for report in found]})
        return
    table = show.new_table(
        "id",
        "kind",
        "operator",
        "strategy",
        "state",
        "moves",
        "failed",
        "longest pause",
        "begun",
        numbers=("moves", "failed", "longest pause"),
    )
    for report in found:
        failed = sum(bool(move.error) for move in report.moves)
        longest = max((move.pause_ms for move in report.moves), default=0.0)
        begun = datetime.fromtimestamp(report.created_us / 1e6, UTC).isoformat(timespec="seconds")
        state = Text(report.state, "green" if report.state == "COMPLETED" else "red" if failed else "")
        table.add_row(
            report.id,
            report.kind,
            report.operator,
            report.strategy,
            state,
            str(len(report.moves)),
            str(failed),
            f"{longest:.1f} ms",
            begun,
        )
    console.print(table)


@reconfig.command()
@command
def info(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """One reconfiguration in a few lines."""
    report = Cluster(controller).reconfiguration(id)
    summary = _summary(report)
    if as_json:
        emit(summary)
        return
    for name, value in summary.items():
        console.print(f"{name:24}{value}", highlight=False)


def _summary(report: Reconfiguration) -> dict[str, Any]:
    done = [move for move in report.moves if move.state == "COMPLETED"]
    return {
        "id": report.id,
        "kind": report.kind,
        "operator": report.operator,
        "strategy": report.strategy,
        "state": report.state,
        "moves": len(report.moves),
        "completed": len(done),
        "failed": sum(bool(move.error) for move in report.moves),
        "bytes_sent": sum(move.bytes_warm + move.bytes_delta for move in report.moves),
        "bytes_reused": sum(move.bytes_reused for move in report.moves),
        "max_pause_ms": report.max_pause_ms,
        "pause_ms_longest": max((move.pause_ms for move in done), default=0.0),
        "pause_ms_predicted_longest": max((move.predicted_pause_ms for move in done), default=0.0),
        "duration_s": max((move.duration_s for move in report.moves), default=0.0),
    }


@reconfig.command()
@command
def details(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Every move of one reconfiguration."""
    report = Cluster(controller).reconfiguration(id)
    if as_json:
        emit(report.to_dict())
        return
    console.print(show.moves(report.moves))
    for move in report.moves:
        if move.note:
            console.print(f"{move.partition}: {move.note}", highlight=False)


@reconfig.command()
@command
def slowest(
    count: Annotated[int, typer.Argument(min=1)] = 10, controller: Controller = LOCAL, as_json: Json = False
) -> None:
    """The moves with the longest pauses."""
    found: list[tuple[MoveReport, Reconfiguration]] = sorted(
        ((move, each) for each in Cluster(controller).reconfigurations() for move in each.moves),
        key=lambda pair: -pair[0].pause_ms,
    )[:count]
    if as_json:
        emit({"moves": [{"reconfiguration": each.id, "operator": each.operator, **_plain(m)} for m, each in found]})
        return
    table = show.new_table(
        "id",
        "operator",
        "partition",
        "from",
        "to",
        "strategy",
        "pause",
        "predicted",
        "sent",
        numbers=("partition", "pause", "predicted", "sent"),
    )
    for m, each in found:
        table.add_row(
            each.id,
            each.operator,
            str(m.partition),
            m.source,
            m.target,
            m.strategy,
            f"{m.pause_ms:.1f} ms",
            f"{m.predicted_pause_ms:.1f} ms",
            size(m.bytes_warm + m.bytes_delta),
        )
    console.print(table)


@reconfig.command()
@command
def pause(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Begin no further moves of it; those under way complete."""
    _say(Cluster(controller).pause(id).report, as_json)


@reconfig.command()
@command
def resume(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Go on with what was paused."""
    _say(Cluster(controller).resume(id).report, as_json)


@reconfig.command()
@command
def retry(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Move again what failed, with the same options."""
    _wait_for([Cluster(controller).retry(id)], as_json)


@reconfig.command()
@command
def cancel(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Roll back what has not been fenced; the rest completes."""
    cluster = Cluster(controller)
    cluster.cancel(id)
    _say(cluster.reconfiguration(id), as_json)


def _say(report: Reconfiguration, as_json: bool) -> None:
    if as_json:
        emit(report.to_dict())
    else:
        console.print(f"{report.id} of {report.operator}: {report.state}")


def _plain(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
