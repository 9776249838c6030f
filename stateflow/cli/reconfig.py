"""``stateflow reconfig``: what moved, moves and failed."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.moving import wait_for
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, shown_time, size
from stateflow.client import Cluster, MoveReport, Reconfiguration
from stateflow.errors import InvalidArgument

app = Commands("reconfig", help="Reconfigurations: moves done, under way and failed.")
NewLimit = Annotated[int | None, typer.Option("--limit", help="Maximum number of moves at a time; 0: no limit.", min=0)]
NewPerNode = Annotated[
    int | None,
    typer.Option(
        "--per-node", help="Maximum number at a time with the same node as source or target; 0: no limit.", min=0
    ),
]
NewPerLink = Annotated[
    int | None,
    typer.Option("--per-link", help="Maximum number at a time between the same two sites; 0: no limit.", min=0),
]
Id = Annotated[str, typer.Argument(help="Id, as printed by `stateflow reconfig list`.")]


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(help="Number of newest reconfigurations; 0: all.", min=0)] = 20,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """List reconfigurations, newest first."""
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
        "began (UTC)",
        numbers=("moves", "failed", "longest pause"),
        spare=("strategy", "began (UTC)", "kind", "moves", "failed"),
    )
    for report in found:
        failed = report.counts()["failed"]
        longest = max((move.pause_ms for move in report.moves), default=0.0)
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
            shown_time(report.created_us),
        )
    console.print(table)


@app.command()
def info(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Show one reconfiguration in a few lines."""
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
    if name == "remaining_s":
        return f"about {length(value[0])}, with 95 % confidence {length(value[1])} to {length(value[2])}"
    return f"{value:.1f} ms" if "_ms" in name else f"{value:.2f} s" if name.endswith("_s") else str(value)


def length(seconds: float) -> str:
    """Returns a length of time for people, to about two figures."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _summary(report: Reconfiguration) -> dict[str, Any]:
    done = [move for move in report.moves if move.state == "COMPLETED"]
    limits = {name: getattr(report, name) for name in ("limit", "per_node", "per_link") if getattr(report, name)}
    left = None if report.over else report.remaining()
    return {
        "id": report.id,
        "kind": report.kind,
        "operator": report.operator,
        "strategy": report.strategy,
        "state": report.state,
        "by": report.by,
        "begun": f"{shown_time(report.created_us)}Z",
        "moves": len(report.moves),
        **report.counts(),
        **limits,
        "bytes_sent": sum(move.bytes_warm + move.bytes_delta for move in report.moves),
        "bytes_reused": sum(move.bytes_reused for move in report.moves),
        "max_pause_ms": report.max_pause_ms,
        "pause_ms_longest": max((move.pause_ms for move in done), default=0.0),
        "pause_ms_predicted_longest": max((move.predicted_pause_ms for move in done), default=0.0),
        "duration_s": max((move.duration_s for move in report.moves), default=0.0),
        "worked_s": report.worked_s,
        **({} if left is None else {"remaining_s": [left.s, left.low_s, left.high_s]}),
    }


@app.command()
def summary(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Sum all reconfigurations up: by state, their moves, bytes and pauses."""
    found = Cluster(controller).reconfigurations(0)
    show.say_who_answered(found[0].follower if found else None)
    moves = [move for report in found for move in report.moves]
    pauses = sorted(move.pause_ms for move in moves if move.stands == "completed")
    stands = Counter(move.stands for move in moves)
    told: dict[str, Any] = {
        "reconfigurations": len(found),
        **{state.lower(): count for state, count in sorted(Counter(report.state for report in found).items())},
        "moves": len(moves),
        **{f"moves_{name}": stands[name] for name in ("waiting", "in_progress", "completed", "failed", "cancelled")},
        "bytes_sent": sum(move.bytes_warm + move.bytes_delta for move in moves),
        "bytes_reused": sum(move.bytes_reused for move in moves),
        "pause_ms_median": pauses[len(pauses) // 2] if pauses else 0.0,
        "pause_ms_longest": max(pauses, default=0.0),
        "errors": dict(Counter(move.fault.code for move in moves if move.fault is not None).most_common()),
    }
    if as_json:
        emit(told)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in told.items():
        if name == "errors":
            value = ", ".join(f"{code}: {count}" for code, count in value.items()) or "none"
        table.add_row(re.sub(r"_ms(?=_|$)", "", name).replace("_", " "), _readable(name, value))
    console.print(table, highlight=False)


@app.command("in-process")
def in_process(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List the moves under way, of all reconfigurations."""
    status = Cluster(controller).status()
    show.say_who_answered(status.follower)
    found = status.reconfigurations
    under_way = [(each, move) for each in found for move in each.moves if move.stands == "in_progress"]
    if as_json:
        moves = [{"reconfiguration": each.id, "operator": each.operator, **m.to_dict()} for each, m in under_way]
        emit({"moves": moves})
        return
    table = show.new_table(
        "id",
        "operator",
        "partition",
        "from",
        "to",
        "phase",
        "sent",
        "lag",
        "since",
        numbers=("partition", "sent", "lag", "since"),
        spare=("lag", "since", "operator"),
    )
    for each, m in under_way:
        sent, lag = size(m.bytes_warm + m.bytes_delta), size(m.lag_bytes)
        since = f"{m.duration_s:.1f} s"
        table.add_row(each.id, each.operator, str(m.partition), m.source, m.target, m.state, sent, lag, since)
    console.print(table)


@app.command()
def details(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List every move of one reconfiguration."""
    report = Cluster(controller).reconfiguration(id)
    show.say_who_answered(report.follower)
    if as_json:
        emit(report.to_dict())
        return
    console.print(show.moves(report.moves, times=True))
    for move in report.moves:
        if move.note:
            console.print(f"{move.partition}: {move.note}", highlight=False)


@app.command()
def slowest(
    count: Annotated[int, typer.Argument(min=1)] = 10, controller: Controller = LOCAL, as_json: Json = False
) -> None:
    """List the moves with the longest pauses."""
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
    """Begin no further moves; those under way complete."""
    _say(Cluster(controller).pause(id).report, as_json)


@app.command()
def resume(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Resume a paused reconfiguration."""
    _say(Cluster(controller).resume(id).report, as_json)


@app.command()
def edit(
    id: Id,
    limit: NewLimit = None,
    per_node: NewPerNode = None,
    per_link: NewPerLink = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Change how many of its moves go on at a time; those under way complete."""
    if limit is per_node is per_link is None:
        raise InvalidArgument("no limit to change", remedy="pass --limit, --per-node or --per-link")
    _say(Cluster(controller).edit(id, limit=limit, per_node=per_node, per_link=per_link).report, as_json)


@app.command()
def retry(
    id: Id,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Also retry what was cancelled.")] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Retry the moves that failed, with the same options."""
    wait_for([Cluster(controller).retry(id, cancelled=cancelled)], as_json)


@app.command()
def cancel(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Roll back moves that are not fenced yet; the others complete."""
    cluster = Cluster(controller)
    cluster.cancel(id)
    _say(cluster.reconfiguration(id), as_json)


@app.command()
def resolve(
    id: Id,
    serve_source: Annotated[
        bool,
        typer.Option("--serve-source", help="The source serves what it sealed; nothing is lost if that is sound."),
    ] = False,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore",
            help="Do not trust the source: a standby or the newest checkpoint serves. What was "
            "acknowledged after that is lost, and requested again with position_gap.",
        ),
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give up fenced moves whose target cannot prove that it has what the source sealed.

    Such a move cannot be cancelled: only the source can roll a fenced move back, and it has sealed the partition. First
    the target promises never to own the partition, then the partition is taken over. `reconfig details` and the
    target's log say what differs; the copy is in the target's evidence/.
    """
    if serve_source == restore:
        raise InvalidArgument(
            "exactly one of --serve-source and --restore is required",
            remedy="pass --serve-source, or --restore if the source cannot be trusted",
        )
    cluster = Cluster(controller)
    report = cluster.resolve(id, "restore" if restore else "serve-source").wait()
    _say(report, as_json)


def _say(report: Reconfiguration, as_json: bool) -> None:
    if as_json:
        emit(report.to_dict())
    else:
        console.print(f"{report.id} of {report.operator}: {report.state}")
