"""Rich tables and progress bars for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from time import sleep
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stateflow.cli.output import console, emit, errors, shown_time, size
from stateflow.client import ClusterStatus, MoveReport, OperatorStatus, Reconfiguration, ReplicaStatus
from stateflow.client.commands import Migration
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import Unavailable, one_line
from stateflow.reports import FollowerReport, LeftPartition, Placement
from stateflow.status import LinkReport, RefusedReplica
from stateflow.types import node_of, ranges, worker_of

WATCH_INTERVAL_S = 1.0
#: seconds between two lines about moves, if output is not a terminal
SAY_EVERY_S = 3.0
_UNBOUNDED = 1 << 15
#: fewest characters to which a column is folded while others can be left out
FOLDED_MIN = 8


def plain(value: str | Text) -> Text:
    """Returns text from elsewhere as plain text on one line, in which markup and escape codes have no effect."""
    return Text(one_line(value.plain), value.style) if isinstance(value, Text) else Text(one_line(value))


class PlainTable(Table):
    #: columns that are left out, in this order, if others would be cut or folded; a line below the table names them
    spare: tuple[str, ...] = ()
    #: columns that are left out after those, if others would be cut, or folded to less than ``FOLDED_MIN`` characters
    last_spare: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=_UNBOUNDED)
        for count in range(len(self.spare) + 1):
            left_out = self.spare[:count]
            table = self._without(left_out)
            if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                break
        for name in self.last_spare:
            if _folded(console, unbounded, table) <= options.max_width:
                break
            left_out = (*left_out, name)
            table = self._without(left_out)
        yield from Table.__rich_console__(table, console, options)
        if left_out:
            yield Text(f"too narrow to show: {', '.join(left_out)}", "dim")

    def _without(self, names: Collection[str]) -> Table:
        if not names:
            return self
        kept = [column for column in self.columns if column.header not in names]
        table = Table(
            *(column.copy() for column in kept),
            box=self.box,
            pad_edge=self.pad_edge,
            caption=self.caption,
            caption_justify=self.caption_justify,
            caption_style=self.caption_style,
        )
        for row, *cells in zip(self.rows, *(column.cells for column in kept), strict=True):
            table.add_row(*cells, style=row.style, end_section=row.end_section)
        return table

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(plain(cell) if isinstance(cell, str | Text) else cell for cell in cells), **options)


def _folded(console: Console, unbounded: ConsoleOptions, table: Table) -> int:
    """Returns the width of a table whose columns are folded to ``FOLDED_MIN`` characters, if they can be folded."""
    width = Measurement.get(console, unbounded, table).maximum
    for column in table.columns:
        if not column.no_wrap:
            texts = (column.header, *column.cells)
            widest = max(Measurement.get(console, unbounded, text).maximum for text in texts)
            width -= max(0, widest - FOLDED_MIN)
    return width


def new_table(
    *columns: str, numbers: tuple[str, ...] = (), spare: tuple[str, ...] = (), last_spare: tuple[str, ...] = ()
) -> Table:
    """Makes a table.

    Args:
        numbers: columns that are aligned to the right, and not folded.
        spare: columns that may be left out if the terminal is too narrow, in this order; others are ignored.
        last_spare: columns that may be left out after those, if the terminal is too narrow even with folded columns.
    """
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    table.spare, table.last_spare = tuple(each for each in spare if each in columns), last_spare
    for column in columns:
        number = column in numbers
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def titled(title: str, table: Table) -> Group:
    """Returns a table below a title on its own line, because a title of the table would wrap at the table's width."""
    return Group(plain(Text(title, "bold")), table)


def status(now: ClusterStatus, workers: bool = False) -> RenderableType:
    """Returns the tables of a cluster's status.

    Args:
        workers: adds a line for each worker of a node.
    """
    lacking = Counter[str]()
    for operator in now.operators:
        for unserved in operator.unserved:
            lacking[unserved.owner] += len(unserved.partitions)
    parts: list[RenderableType] = [] if now.follower is None else [answered_by(now.follower)]
    if now.leader is not None:
        parts.append(plain(Text(f"the controller at {now.leader.address} leads, in term {now.leader.term}", "dim")))
    resting = [each.node for each in now.maintenance]
    parts.append(titled("Replicas", replicas(now.replicas, lacking, workers, resting=resting)))
    if waiting := list(dict.fromkeys(map(node_of, now.without_share()))):
        named = (
            f"{', '.join(waiting)} owns no partitions"
            if len(waiting) == 1
            else f"{', '.join(waiting)} own no partitions"
        )
        parts.append(Text(f"{named}: `stateflow rebalance` assigns a share", "yellow"))
    if now.refused:
        refused = new_table("replica", "address", "directory", "refused")
        for each, count in _refused(now.refused):
            name = each.name if count == 1 else f"{node_of(each.name)} ({count} workers)"
            refused.add_row(Text(name), Text(each.address), Text(each.directory), Text(each.error))
        parts.append(titled("Refused", refused))
    if now.damaged:
        damaged = new_table("partition", "replica", "error found by verification")
        for fault in now.damaged:
            damaged.add_row(f"{fault.operator}/{fault.partition}", Text(fault.replica), Text(fault.error, "red"))
        parts.append(titled("Damaged", damaged))
    for operator in now.operators:
        parts.append(_operator(operator))
    for deploying in now.deploying:
        if deploying.tried is None:
            doing, done = "being deployed", deploying.created
        else:
            doing, done = "trying a new version on its stored state", deploying.tried
        parts.append(Text(f"{deploying.name}: {doing}, {done} of {deploying.partitions} partitions"))
    running = [r for r in now.reconfigurations if r.state == "RUNNING"]
    if running:
        table = new_table("id", "operator", "moves", "done", numbers=("moves", "done"))
        for under_way in running:
            done = sum(move.state == "COMPLETED" for move in under_way.moves)
            table.add_row(under_way.id, under_way.operator, str(len(under_way.moves)), str(done))
        parts.append(titled("Reconfigurations under way", table))
    return Group(*parts)


def answered_by(follower: FollowerReport) -> Text:
    """Returns a line which says that a follower has answered instead of the leader, and how old the answer is."""
    leads = f"a follower of {follower.leader}" if follower.leader else "a follower, no leader known"
    where = f" ({follower.address})" if follower.address else ""
    return plain(Text(f"answered by {leads}{where}, as of {follower.age_s:.1f} s ago", "yellow"))


def say_who_answered(follower: FollowerReport | None) -> None:
    """Prints on stderr that a follower has answered; prints nothing if ``follower`` is None."""
    if follower is not None:
        errors.print(answered_by(follower), highlight=False)


def replicas(
    found: Sequence[ReplicaStatus],
    lacking: Mapping[str, int],
    workers: bool = False,
    of_nodes: bool = False,
    resting: Collection[str] = (),
) -> Table:
    """Returns a table of replicas, with a line for each node.

    Args:
        workers: True adds a line for each worker of a node.
        lacking: replica → number of its partitions that are not served.
        of_nodes: True adds the columns weight and room.
        resting: nodes that are in maintenance.
    """
    numbers = ("weight", "heard", "partitions", "room")
    weight_column, room_column = (["weight"], ["room"]) if of_nodes else ([], [])
    columns = ("replica", "site", "address", *weight_column, "state", "heard", "partitions", *room_column)
    table = new_table(*columns, numbers=numbers, spare=("weight", "room"), last_spare=("address", "heard", "site"))
    table.columns[2].no_wrap = True  # a folded address cannot be copied
    for name, members in _nodes(found):
        first = members[0]
        owned, lacks = sum(r.partitions for r in members), sum(lacking.get(r.name, 0) for r in members)
        weight = [str(sum(r.weight for r in members))] if of_nodes else []
        room = [_room(members)] if of_nodes else []
        silent = max(members, key=lambda r: (r.last_heartbeat_s < 0, r.last_heartbeat_s))
        states = _states(members)
        if name in resting:
            plainly = all(r.alive and not r.stopped for r in members)  # the table has to fit 80 columns
            rests = Text("maintenance", "yellow")
            states = rests if plainly else Text.assemble(states, ", ", rests)
        table.add_row(name, first.site, first.address, *weight, states, heard(silent), _owned(owned, lacks), *room)
        for r in members if workers and len(members) > 1 else ():
            weight = [str(r.weight)] if of_nodes else []
            room = [_room([r])] if of_nodes else []
            of_worker = _owned(r.partitions, lacking.get(r.name, 0))
            table.add_row(f"  worker {worker_of(r.name)}", "", r.address, *weight, state(r), heard(r), of_worker, *room)
    table.caption, table.caption_justify, table.caption_style = _releases(found), "left", ""
    return table


def _releases(found: Sequence[ReplicaStatus]) -> str | None:
    """Returns a line with the releases of the nodes; None: all nodes run the same release."""
    of: dict[str, list[str]] = {}
    for name, members in _nodes(found):
        if version := members[0].version:
            of.setdefault(version, []).append(name)
    if len(of) < 2:
        return None
    said = [f"{version}: {', '.join(names[:4])}{' …' * (len(names) > 4)}" for version, names in sorted(of.items())]
    return "stateflow releases: " + "; ".join(said)


def _room(members: Sequence[ReplicaStatus]) -> str:
    """Returns the largest room of these replicas, as text; empty: not known."""
    known = [r.room_bytes for r in members if r.room_bytes is not None]
    return size(max(known)) if known else ""


def links(found: Sequence[LinkReport]) -> RenderableType:
    table = new_table("from", "to", "round trip", "bandwidth", numbers=("round trip", "bandwidth"))
    for each in found:
        rtt = "" if each.rtt_ms is None else f"{each.rtt_ms:.1f} ms"
        rate = "" if each.bytes_per_s is None else f"{size(each.bytes_per_s)}/s"
        table.add_row(each.source, each.target, rtt, rate)
    return titled("Links", table)


def _nodes(replicas: Sequence[ReplicaStatus]) -> list[tuple[str, list[ReplicaStatus]]]:
    found: dict[str, list[ReplicaStatus]] = {}
    for replica in sorted(replicas, key=lambda r: (node_of(r.name), worker_of(r.name))):
        found.setdefault(node_of(replica.name), []).append(replica)
    return list(found.items())


def _refused(found: Sequence[RefusedReplica]) -> list[tuple[RefusedReplica, int]]:
    """Returns (first worker, number of workers) for each group of workers of a node that are refused for the same
    reason."""
    groups: dict[tuple[str, str], list[RefusedReplica]] = {}
    for each in found:
        groups.setdefault((node_of(each.name), each.error.partition(" (")[0]), []).append(each)
    return [(each[0], len(each)) for each in groups.values()]


def _states(members: list[ReplicaStatus]) -> Text:
    if len(members) == 1:
        return state(members[0])
    if all(r.alive is None for r in members):
        return Text(f"unknown, {len(members)} workers", "yellow")
    alive, opening = sum(bool(r.alive) for r in members), sum(r.opening and not r.alive for r in members)
    if alive == len(members):
        return Text(f"alive, {alive} workers", "green")
    here = f"{alive} of {len(members)} workers alive" + (f", {opening} opening" if opening else "")
    return Text(here, "yellow" if alive + opening == len(members) else "bold red")


def heard(replica: ReplicaStatus) -> str:
    if replica.alive is None:
        return ""
    return "never" if replica.last_heartbeat_s < 0 else f"{replica.last_heartbeat_s:.1f} s ago"


def state(replica: ReplicaStatus) -> Text:
    if replica.alive is None:
        return Text("unknown", "yellow")
    if replica.alive:
        return Text("stopping", "yellow") if replica.stopped else Text("alive", "green")
    if replica.stopped:
        return Text("stopped", "yellow")
    return Text("opening", "yellow") if replica.opening else Text("silent", "bold red")


def _owned(partitions: int, lacking: int) -> Text:
    return Text(f"{partitions}, {lacking} not served", "bold red") if lacking else Text(str(partitions))


def _operator(operator: OperatorStatus) -> RenderableType:
    """Returns a table of an operator's nodes and the partitions that they serve.

    Partitions that no node serves are shown in red, followed by the reasons.
    """
    title = f"{operator.name}: {operator.partitions} partitions, assignment {operator.version}"
    if operator.sites:
        title += f", only at {', '.join(operator.sites)}"
    if operator.failover != "automatic":
        title += f", failover {operator.failover}"
    table = new_table("replica", "count", "partitions", numbers=("count",))
    lacking = {partition for each in operator.unserved for partition in each.partitions}
    served = [(owner, p) for p, owner in enumerate(operator.owners) if p not in lacking]
    for replica in sorted({node_of(owner) for owner, _ in served}):
        mine = [p for owner, p in served if node_of(owner) == replica]
        table.add_row(replica, str(len(mine)), ranges(mine))
    for each in operator.unserved:
        table.add_row("unserved", str(len(each.partitions)), ranges(list(each.partitions)), style="bold red")
    return Group(titled(title, table), *(Text(each.error, "red") for each in operator.unserved))


def watch_status(read: Callable[[], ClusterStatus], workers: bool = False) -> None:
    """Shows the status anew each second, until Ctrl-C.

    What is no terminal, and a terminal that cannot be drawn on, get one status after the other. While no controller
    answers, its error is above the last status. If none answers at the beginning, the error is raised.
    """
    shown: RenderableType = status(read(), workers)
    drawn = console.is_terminal and not console.is_dumb_terminal
    live = Live(shown, console=console, screen=True) if drawn else None
    if live is None:
        console.print(shown)
    with live or nullcontext():
        while True:
            sleep(WATCH_INTERVAL_S)
            try:
                now = shown = status(read(), workers)
            except Unavailable as error:
                now = Group(plain(Text(str(error), "bold red")), shown)
            if live is None:
                console.print(now)
            else:
                live.update(now)


def deployed(operator: OperatorStatus, before: int, after: int) -> None:
    """Shows the outcome of a deployment.

    Args:
        before: number of the version that served before; 0: the operator was not deployed.
        after: number of the version that serves now.
    """
    if not before:
        what = f" deployed, version {after}"
    elif after == before:
        what = f" is already deployed: version {after} serves, code unchanged"
    else:
        what = f" upgraded: version {after} serves from the next batch on, in place of {before}"
    console.print(Text.assemble((operator.name, "bold"), what))
    console.print(_operator(operator))


def migration(move: Migration) -> Reconfiguration:
    """Shows a line for each partition until the migration has ended, then a table. Returns the final report."""
    if errors.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True) as progress:
            tasks = {m.id: progress.add_task(standing(m, move.report.max_pause_ms)) for m in move.report.moves}
            for report in move.progress():
                for m in report.moves:
                    progress.update(tasks[m.id], description=standing(m, report.max_pause_ms))
    else:
        _follow(move)
    if move.report.moves:
        console.print(moves(move.report.moves))
    else:
        console.print("nothing to move: every partition is already there")
    return move.report


def _follow(move: Migration) -> None:
    """Prints a line for each running move at intervals, for output that is not a terminal."""
    said_at = SYSTEM_CLOCK.monotonic()
    for report in move.progress():
        now = SYSTEM_CLOCK.monotonic()
        if report.state == "RUNNING" and now - said_at >= SAY_EVERY_S:
            said_at = now
            for m in report.moves:
                if m.state not in ("COMPLETED", "ABORTED"):
                    errors.print(standing(m, report.max_pause_ms), highlight=False)


def standing(move: MoveReport, max_pause_ms: float) -> str:
    """Returns a line that describes the progress of a move, or what the move waits for.

    Args:
        max_pause_ms: the move's pause budget; 0: none.
    """
    return f"{move.partition}: {move.source} → {move.target}  {move.state:<11}  {_doing(move, max_pause_ms)}".rstrip()


def _doing(move: MoveReport, max_pause_ms: float) -> str:
    match move.state:
        case "WAITING":
            return "for other moves to end"
        case "UNKNOWN":
            return move.note or "under way; only the leader knows its progress"
        case "WARMING" if move.base_bytes:
            return f"{size(move.bytes_warm + move.bytes_reused)} of {size(move.base_bytes)} at the target"
        case "CATCHING_UP":
            behind = f"{size(move.bytes_warm + move.bytes_delta)} sent, {size(move.lag_bytes)} behind"
            return f"{behind}; {_promise(move, max_pause_ms)}"
        case "ABORTED":
            return move.error.partition(":")[0]
        case "COMPLETED":
            return f"{size(move.bytes_warm + move.bytes_delta)} sent, {move.pause_ms:.1f} ms paused"
    return ""


def _promise(move: MoveReport, max_pause_ms: float) -> str:
    if not move.rounds:
        return "pause not predicted yet"
    if not math.isfinite(move.predicted_pause_ms):
        return "changes arrive faster than they can be sent"
    said = f"pause {move.predicted_pause_ms:.1f} ms predicted"
    if not max_pause_ms:
        return said
    fits = move.predicted_pause_ms + move.margin_ms <= max_pause_ms
    return f"{said} + {move.margin_ms:.1f} ms margin {'≤' if fits else '>'} {max_pause_ms:g} ms allowed"


def proposed(found: Placement, as_json: bool, takeovers: bool = False) -> None:
    """Shows the outcome of a dry run."""
    if as_json:
        emit(found.to_dict())
    else:
        console.print(placement(found, takeovers))


def placement(proposed: Placement, takeovers: bool = False) -> RenderableType:
    """Returns a table of proposed moves with their reasons, and the effects of these moves.

    Args:
        takeovers: the moves are takeovers from owners that do not answer.
    """
    quiet = f"no answer from {', '.join(proposed.silent)}: no partition moves to or from there"
    unknown: list[RenderableType] = [Text(quiet, "yellow")] if proposed.silent else []
    for lack in proposed.lacking:
        names, free, coming = ", ".join(lack.replicas), size(lack.free_bytes), size(lack.coming_bytes)
        unknown.append(Text(f"no_room: {names}: {free} free for state, {coming} would be added: refused", "red"))
    if proposed.left:
        unknown.append(_left(proposed.left))
    if not proposed.moves:
        settled = "nothing to move" if proposed.left else "nothing to move: the placement meets the policies"
        return Group(*unknown, Text(settled))
    table = new_table(
        "operator", "partition", "from", "to", "state", "reason", numbers=("partition", "state"), spare=("state",)
    )
    for move in proposed.moves:
        table.add_row(move.operator, str(move.partition), move.source, move.target, size(move.bytes), move.reason)
    if takeovers:
        return Group(table, Text(f"{len(proposed.moves)} takeovers\ndry run: nothing was taken over"))
    whole = sum(move.bytes for move in proposed.moves)
    said = Text(
        f"{len(proposed.moves)} moves, {size(whole)}; expected pause {proposed.pause_ms:.0f} ms each, at most "
        f"{proposed.pause_ms_at_most:.0f} ms, plus the time to send the last changes\n"
        f"highest load relative to share: rows {proposed.uneven_rows:.2f} now, {proposed.uneven_rows_after:.2f} after; "
        f"bytes {proposed.uneven_bytes:.2f} now, {proposed.uneven_bytes_after:.2f} after\ndry run: nothing was moved"
    )
    return Group(table, *unknown, said)


def _left(found: Sequence[LeftPartition]) -> RenderableType:
    table = new_table("operator", "partition", "reason", numbers=("partition",))
    for each in found:
        table.add_row(each.operator, str(each.partition), each.reason)
    return titled("Not moved", table)


def moves(reports: tuple[MoveReport, ...], *, times: bool = False) -> RenderableType:
    """Returns a table of moves.

    Args:
        times: True adds a column with the time at which each move began.
    """
    table = new_table(
        *(
            "partition",
            "from",
            "to",
            "state",
            "warm",
            "reused",
            "delta",
            "rounds",
            "predicted",
            "pause",
            *(("began (UTC)",) if times else ()),
            "took",
        ),
        numbers=("partition", "warm", "reused", "delta", "rounds", "predicted", "pause", "took"),
        spare=("rounds", "reused", "delta", "predicted", "warm", "took"),
    )
    for m in reports:
        good = m.state == "COMPLETED"
        table.add_row(
            str(m.partition),
            m.source,
            m.target,
            Text(m.state, "green" if good else "red"),
            size(m.bytes_warm),
            size(m.bytes_reused),
            size(m.bytes_delta),
            str(m.rounds),
            f"{m.predicted_pause_ms:.1f} ms" if good else "",
            f"{m.pause_ms:.1f} ms" if good else "",
            *((shown_time(m.started_us or None),) if times else ()),
            f"{m.duration_s:.2f} s",
        )
    failures = [Text(f"{m.partition}: {m.error}", "red") for m in reports if m.error]
    return Group(titled("Moves", table), *failures)
