"""Commands that move partitions, and that show where they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

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
)
from stateflow.cli.output import command, console, emit, size
from stateflow.client import Cluster, Migration, MoveReport, Reconfiguration
from stateflow.errors import InvalidArgument
from stateflow.types import ranges

reconfig = Commands("reconfig", help="Reconfigurations: what moved, moves and failed.")
Id = Annotated[str, typer.Argument(help="As `stateflow reconfig list` shows it.")]


def add_to(app: typer.Typer) -> None:
    for function in (adopt, nodes, partitions, rebalance, drain, replace, standby):
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
        table.add_row(r.name, r.site, r.address, str(r.weight), show.state(r), show.heard(r), str(r.partitions))
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
    options = move_options(max_pause, max_bandwidth, strategy, order, patience)
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
    options = move_options(max_pause, max_bandwidth, strategy, order, patience)
    _wait_for(Cluster(controller).drain(replica, **options), as_json)


@command
def replace(
    replica: Annotated[str, typer.Argument(help="Whose data directory is lost for good.")],
    directory: Annotated[str, typer.Option(help="Where several ask for the name: whose it becomes.")] = "",
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give a replica's name to a new data directory: what the former one has is lost to the cluster."""
    given, partitions = Cluster(controller).replace(replica, directory)
    if as_json:
        emit({"replica": replica, "directory": given, "partitions": partitions})
    else:
        console.print(
            f"{replica} is directory {given} now; its {partitions} partitions come from standbys and checkpoints"
        )


@command
def adopt(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also where partitions are missing, or only sealed copies are there.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Take what replicas have into this controller's ledger, which knows nothing of it: another ledger was lost."""
    found = Cluster(controller).adopt(dry_run=dry_run, partial=partial)
    if as_json:
        emit({"operators": [_plain(each) for each in found]})
        return
    table = show.new_table("operator", "partitions", "owned", "sealed only", "missing", "in the way")
    for each in found:
        table.add_row(
            each.name,
            str(each.count or "?"),
            *(ranges(list(numbers)) for numbers in (each.partitions, each.sealed, each.missing)),
            Text("; ".join(each.conflicts)),
        )
    console.print(table)
    console.print("nothing was changed" if dry_run else "they are in the ledger now")


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
        console.print(f"{operator}: {_wanted(count, len(begun))} (`stateflow partitions {operator}` shows them)")


def _wanted(count: int, there: int) -> str:
    if not count:
        return f"no standbys are wanted any more, {there} are being ended" if there else "no standbys are wanted"
    return f"{count} per partition wanted, {there} begun or there"


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
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in summary.items():
        table.add_row(re.sub(r"_m?s(?=_|$)", "", name).replace("_", " "), _readable(name, value))
    console.print(table, highlight=False)


def _readable(name: str, value: Any) -> str:
    if name == "max_pause_ms" and not value:
        return "no budget"
    if name.startswith("bytes_"):
        return size(value)
    return f"{value:.1f} ms" if "_ms" in name else f"{value:.2f} s" if name.endswith("_s") else str(value)


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


@reconfig.command()
@command
def resolve(
    id: Id,
    serve_source: Annotated[
        bool,
        typer.Option(
            "--serve-source", help="Loses nothing, if what the source has is sound: it serves what it sealed."
        ),
    ] = False,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore",
            help="Do not trust the source: a standby or the newest checkpoint serves. What was "
            "acknowledged after that is lost, and asked for again with position_gap.",
        ),
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give up moves that stand behind their fence because the target cannot prove what the source sealed.

    Cancelling cannot: only the source's word rolls a fenced move back, and it has sealed. First the target promises
    never to own, then the partition is taken over. `reconfig details` and the target's log say what differs; the copy
    is in the target's evidence/.
    """
    if serve_source == restore:
        raise InvalidArgument(
            "it is not said who is to serve", remedy="give --serve-source, or --restore if it cannot be trusted"
        )
    cluster = Cluster(controller)
    report = cluster.resolve(id, "restore" if restore else "serve-source").wait()
    _say(report, as_json)


def _say(report: Reconfiguration, as_json: bool) -> None:
    if as_json:
        emit(report.to_dict())
    else:
        console.print(f"{report.id} of {report.operator}: {report.state}")


def _plain(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
