"""Commands that list nodes and partitions, move partitions, keep standbys, and replace lost replicas and ledgers.
``stateflow reconfig`` shows and controls past and running reconfigurations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import (
    LOCAL,
    NUMBER_MAX,
    Controller,
    DryRun,
    GivenMoves,
    Json,
    MaxPause,
    Policies,
    console,
    emit,
    milliseconds,
    seconds,
    shown_time,
    size,
    with_move_options,
)
from stateflow.client import Cluster, Migration, MoveReport, Reconfiguration
from stateflow.client.commands import redistribute, would_redistribute
from stateflow.errors import InvalidArgument
from stateflow.types import MoveOptions, ranges

app = Commands()


@app.command()
def adopt(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the replicas' partitions.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Adopt even if partitions are missing or exist only as sealed copies.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Record the replicas' partitions in this controller's new ledger, after the former ledger was lost."""
    found = Cluster(controller).adopt(dry_run=dry_run, partial=partial)
    if as_json:
        emit({"operators": [each.to_dict() for each in found]})
        return
    table = show.new_table("operator", "partitions", "owned", "sealed only", "missing", "conflicts")
    for each in found:
        table.add_row(
            each.name,
            str(each.count or "?"),
            *(ranges(list(numbers)) for numbers in (each.partitions, each.sealed, each.missing)),
            Text("; ".join(each.conflicts)),
        )
    console.print(table)
    console.print("nothing was changed" if dry_run else "recorded in the ledger")


# -- nodes and partitions --------------------------------------------------------------------------------------------


@app.command()
def nodes(
    controller: Controller = LOCAL,
    workers: Annotated[bool, typer.Option("--workers", help="Also show each worker of a node.")] = False,
    as_json: Json = False,
) -> None:
    """List the replicas with site, weight, last heartbeat, partitions and room for state; and the links between
    sites."""
    status = Cluster(controller).status(measured=True)
    replicas = status.replicas
    show.say_who_answered(status.follower)
    if as_json:
        emit({"nodes": [r.to_dict() for r in replicas], "links": [each.to_dict() for each in status.links]})
    else:
        resting = [each.node for each in status.maintenance]
        console.print(show.replicas(replicas, {}, workers, of_nodes=True, resting=resting))
        if status.links:
            console.print(show.links(status.links))


@app.command()
def partitions(
    operator: Annotated[str | None, typer.Argument(help="Operator; default: all.")] = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """List each partition's owner, epoch and standbys."""
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


@app.command()
@with_move_options()
def rebalance(
    operator: Annotated[str | None, typer.Argument(help="Operator; default: all.")] = None,
    policy: Policies = "ring",
    dry_run: DryRun = False,
    options: GivenMoves = MoveOptions,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give every replica its share of partitions by weight, with as few moves as possible. Other policies move
    partitions by their load, or to the site that their rows come from."""
    moves, cluster = options(), Cluster(controller)
    names = [name.strip() for name in policy.split(",")]
    if dry_run:
        show.proposed(would_redistribute(cluster, names, operator or ""), as_json)
    else:
        wait_for(redistribute(cluster, names, operator or "", moves), as_json)


@app.command()
def autopilot(
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="ring, load, locality, or several in order of priority, e.g. locality,load."),
    ] = None,
    max_pause: MaxPause = None,
    cool_down: Annotated[
        str | None,
        typer.Option("--cool-down", help="How long a partition stays put after a move; default: 60s."),
    ] = None,
    moves_per_minute: Annotated[
        float | None,
        typer.Option("--moves-per-minute", help="Maximum number of moves that begin per minute; default: 60."),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Stop the autopilot.")] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Let partitions follow their rows and their load from now on. Without options, show the autopilot's settings."""
    given = {
        "--max-pause": max_pause is not None,
        "--cool-down": cool_down is not None,
        "--moves-per-minute": moves_per_minute is not None,
    }
    said = [option for option, is_given in given.items() if is_given]
    if off and policy is not None:
        raise InvalidArgument("--off and --policy contradict each other", remedy="pass one of them")
    if said and policy is None:
        raise InvalidArgument(
            f"{' and '.join(said)} {'has' if len(said) == 1 else 'have'} no effect without --policy",
            remedy="pass --policy, too: each command replaces all of the autopilot's settings",
        )
    cluster = Cluster(controller)
    if off or policy is not None:
        names = [] if off or policy is None else [name.strip() for name in policy.split(",")]
        most = MoveOptions(None if max_pause is None else milliseconds(max_pause)).max_pause_ms
        told = cluster.autopilot(
            *names,
            max_pause_ms=most,
            cool_down_s=seconds(cool_down or "60s"),
            moves_per_minute=60.0 if moves_per_minute is None else moves_per_minute,
        )
    else:
        told = cluster.autopilot_orders()
    if as_json:
        emit(told.to_dict())
    elif not told.policies:
        console.print("the autopilot is off")
    else:
        pause = "no pause budget" if told.max_pause_ms is None else f"pauses within {told.max_pause_ms:g} ms"
        console.print(
            f"the autopilot follows {', '.join(told.policies)}: {pause}, cool-down {told.cool_down_s:g} s, "
            f"{told.moves_per_minute:g} moves a minute at most; `stateflow reconfig list` shows its moves"
        )


@app.command()
@with_move_options()
def drain(
    replica: Annotated[str, typer.Argument(help="Replica to drain, or a node with all of its workers.")],
    maintenance: Annotated[
        bool, typer.Option("--maintenance", help="Keep the node without partitions until the maintenance ends.")
    ] = False,
    for_: Annotated[
        str | None,
        typer.Option("--for", help="Duration of the maintenance, e.g. 2h; default: until `stateflow maintenance end`."),
    ] = None,
    one_of: Annotated[
        str, typer.Option("--one-of", help="Name of a set of nodes, of which only one may be in maintenance at a time.")
    ] = "",
    options: GivenMoves = MoveOptions,
    dry_run: DryRun = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Move all partitions away from a replica, so that the replica can be stopped."""
    moves, cluster = options(), Cluster(controller)
    if (for_ or one_of) and not maintenance:
        raise InvalidArgument("--for and --one-of require --maintenance", remedy="add --maintenance")
    if dry_run:
        show.proposed(cluster.would_drain(replica), as_json)
        return
    if not maintenance:
        wait_for(cluster.drain(replica, moves), as_json)
        return
    begun = cluster.maintain(replica, for_s=seconds(for_) if for_ else 0.0, one_of=one_of, options=moves)
    if not as_json:
        console.print(f"{replica} is in maintenance; `stateflow maintenance end {replica}` ends it")
    if begun or as_json:
        wait_for(begun, as_json)


@app.command()
def replace(
    replica: Annotated[str, typer.Argument(help="Replica whose data directory is lost for good.")],
    directory: Annotated[
        str, typer.Option(help="Id of the data directory that gets the name, if several processes claim the name.")
    ] = "",
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give a replica's name to a new data directory; the cluster no longer uses the state in the former directory."""
    given, partitions = Cluster(controller).replace(replica, directory)
    if as_json:
        emit({"replica": replica, "directory": given, "partitions": partitions})
    else:
        console.print(
            f"{replica} now has directory {given}; standbys and checkpoints restore its {partitions} partitions"
        )


def wait_for(migrations: Sequence[Migration], as_json: bool) -> None:
    """Shows migrations until they have ended. Exits with status 1 if one of them did not complete."""
    if not migrations and not as_json:
        console.print("nothing to move: every replica has its share")
    reports = [migration.wait() if as_json else show.migration(migration) for migration in migrations]
    if as_json:
        emit({"reconfigurations": [report.to_dict() for report in reports]})
    if any(report.state != "COMPLETED" for report in reports):
        raise typer.Exit(1)


@app.command()
def standby(
    operator: Annotated[str, typer.Argument()],
    count: Annotated[int, typer.Argument(help="Number of standbys per partition; 0: none.")] = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Keep standby copies of every partition, which follow the owner and take over when it dies."""
    begun = Cluster(controller).standby(operator, count)
    if as_json:
        emit({"operator": operator, "count": count, "standbys": [view.to_dict() for view in begun]})
    else:
        console.print(f"{operator}: {_wanted(count, len(begun))} (`stateflow partitions {operator}` shows them)")


def _wanted(count: int, there: int) -> str:
    if not count:
        return f"no standbys from now on, {there} ending" if there else "no standbys"
    return f"{count} per partition requested, {there} started or running"


reconfig_commands = Commands("reconfig", help="Reconfigurations: moves done, under way and failed.")
app.add_typer(reconfig_commands)
NewLimit = Annotated[int | None, typer.Option("--limit", help="Maximum number of moves at a time; 0: no limit.", min=0)]
NewPerNode = Annotated[
    int | None,
    typer.Option(
        "--per-node",
        help="Maximum number of moves at a time with the same node as source or target; 0: no limit.",
        min=0,
    ),
]
NewPerLink = Annotated[
    int | None,
    typer.Option(
        "--per-link", help="Maximum number of moves at a time between the same two sites; 0: no limit.", min=0
    ),
]
Id = Annotated[str, typer.Argument(help="Id of the reconfiguration, as printed by `stateflow reconfig list`.")]


@reconfig_commands.command("list")
def list_(
    limit: Annotated[int, typer.Option(help="Number of newest reconfigurations; 0: all.", min=0, max=NUMBER_MAX)] = 20,
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


@reconfig_commands.command()
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
    """Returns a duration as text with its unit, rounded to about two digits."""
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


@reconfig_commands.command()
def summary(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Summarise all reconfigurations: their number in each state, and their moves, bytes and pauses."""
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


@reconfig_commands.command("in-process")
def in_process(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List the moves under way in all reconfigurations."""
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


@reconfig_commands.command()
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


@reconfig_commands.command()
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


@reconfig_commands.command()
def pause(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Pause a reconfiguration: no further moves begin, and moves under way complete."""
    _say(Cluster(controller).pause(id).report, as_json)


@reconfig_commands.command()
def resume(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Resume a paused reconfiguration."""
    _say(Cluster(controller).resume(id).report, as_json)


@reconfig_commands.command()
def edit(
    id: Id,
    limit: NewLimit = None,
    per_node: NewPerNode = None,
    per_link: NewPerLink = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Limit how many moves of a reconfiguration run at a time; moves under way complete."""
    if limit is per_node is per_link is None:
        raise InvalidArgument("no limit is given", remedy="pass --limit, --per-node or --per-link")
    _say(Cluster(controller).edit(id, limit=limit, per_node=per_node, per_link=per_link).report, as_json)


@reconfig_commands.command()
def retry(
    id: Id,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Also retry cancelled moves.")] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Retry the failed moves of a reconfiguration, with the same options."""
    wait_for([Cluster(controller).retry(id, cancelled=cancelled)], as_json)


@reconfig_commands.command()
def cancel(id: Id, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Cancel a reconfiguration: moves that are not fenced yet are rolled back, and fenced moves complete."""
    cluster = Cluster(controller)
    cluster.cancel(id)
    _say(cluster.reconfiguration(id), as_json)


@reconfig_commands.command()
def resolve(
    id: Id,
    serve_source: Annotated[
        bool,
        typer.Option("--serve-source", help="Let the source serve its sealed copy. A sound copy loses nothing."),
    ] = False,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore",
            help="Do not use the source's copy, but a standby or the newest checkpoint. Batches that were acknowledged "
            "later are lost, and their sources get position_gap.",
        ),
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give up fenced moves whose target has a copy that differs from the sealed partition.

    Such a move cannot be cancelled, because the source has sealed the partition. First the target promises never to own
    the partition; then the controller takes the partition over. The reconfiguration itself ends as FAILED. `reconfig
    details` and the target's log say what differs; the target keeps its copy in evidence/.
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
