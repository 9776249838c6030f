"""``stateflow reconfig``: what moved, moves and failed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.moving import wait_for
from stateflow.cli.options import LOCAL, Controller, Json
from stateflow.cli.output import console, emit, size
from stateflow.client import Cluster, MoveReport, Reconfiguration
from stateflow.errors import InvalidArgument

app = Commands("reconfig", help="Reconfigurations: what moved, moves and failed.")
Id = Annotated[str, typer.Argument(help="As `stateflow reconfig list` shows it.")]


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(help="The newest so many; 0 for all.", min=0)] = 20,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Newest first."""
    found = Cluster(controller).reconfigurations(limit)
    show.say_who_answered(found[0].follower if found else None)
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
        spare=("strategy", "begun", "kind", "moves", "failed"),
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


@app.command()
def info(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """One reconfiguration in a few lines."""
    report = Cluster(controller).reconfiguration(id)
    show.say_who_answered(report.follower)
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


@app.command()
def details(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Every move of one reconfiguration."""
    report = Cluster(controller).reconfiguration(id)
    show.say_who_answered(report.follower)
    if as_json:
        emit(report.to_dict())
        return
    console.print(show.moves(report.moves))
    for move in report.moves:
        if move.note:
            console.print(f"{move.partition}: {move.note}", highlight=False)


@app.command()
def slowest(
    count: Annotated[int, typer.Argument(min=1)] = 10, controller: Controller = LOCAL, as_json: Json = False
) -> None:
    """The moves with the longest pauses."""
    found: list[tuple[MoveReport, Reconfiguration]] = sorted(
        ((move, each) for each in Cluster(controller).reconfigurations() for move in each.moves),
        key=lambda pair: -pair[0].pause_ms,
    )[:count]
    if as_json:
        emit({"moves": [{"reconfiguration": each.id, "operator": each.operator, **m.to_dict()} for m, each in found]})
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
        spare=("strategy", "predicted", "sent", "operator"),
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


@app.command()
def pause(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Begin no further moves of it; those under way complete."""
    _say(Cluster(controller).pause(id).report, as_json)


@app.command()
def resume(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Go on with what was paused."""
    _say(Cluster(controller).resume(id).report, as_json)


@app.command()
def retry(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Move again what failed, with the same options."""
    wait_for([Cluster(controller).retry(id)], as_json)


@app.command()
def cancel(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Roll back what has not been fenced; the rest completes."""
    cluster = Cluster(controller)
    cluster.cancel(id)
    _say(cluster.reconfiguration(id), as_json)


@app.command()
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
