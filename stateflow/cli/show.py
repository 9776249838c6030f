"""What people see: rich tables and progress bars."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from time import sleep
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stateflow.cli.output import console, errors, size
from stateflow.client import ClusterStatus, MoveReport, OperatorStatus, Reconfiguration, ReplicaStatus
from stateflow.client.cluster import Migration
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import one_line
from stateflow.types import node_of, ranges, worker_of

WATCH_INTERVAL_S = 1.0
#: a move that goes on says how it stands, where nothing can be drawn
SAY_EVERY_S = 3.0


def plain(value: str | Text) -> Text:
    """What others wrote, as text and nothing else: neither markup nor escape codes act in it."""
    return Text(one_line(value.plain), value.style) if isinstance(value, Text) else Text(one_line(value))


class PlainTable(Table):
    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(plain(cell) if isinstance(cell, str | Text) else cell for cell in cells), **options)


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        number = column in numbers
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def titled(title: str, table: Table) -> Group:
    """A title of its own line: a table's would wrap at the table's width."""
    return Group(plain(Text(title, "bold")), table)


def status(now: ClusterStatus, workers: bool = False) -> RenderableType:
    """Args: workers: a line for each worker of a node, too."""
    lacking = Counter[str]()
    for operator in now.operators:
        for unserved in operator.unserved:
            lacking[unserved.owner] += len(unserved.partitions)
    table = new_table("replica", "site", "address", "state", "heard", "partitions", numbers=("heard", "partitions"))
    for name, members in _nodes(now.replicas):
        first = members[0]
        owned, lacks = sum(r.partitions for r in members), sum(lacking[r.name] for r in members)
        table.add_row(name, first.site, first.address, _states(members), heard(first), _owned(owned, lacks))
        if workers and len(members) > 1:
            for r in members:
                worker = f"  worker {worker_of(r.name)}"
                table.add_row(worker, "", r.address, state(r), heard(r), _owned(r.partitions, lacking[r.name]))
    parts: list[RenderableType] = [titled("Replicas", table)]
    if waiting := list(dict.fromkeys(map(node_of, now.without_share()))):
        named = f"{', '.join(waiting)} owns nothing" if len(waiting) == 1 else f"{', '.join(waiting)} own nothing"
        parts.append(Text(f"{named}: `stateflow rebalance` gives a share", "yellow"))
    if now.refused:
        refused = new_table("replica", "address", "directory", "refused")
        for each in now.refused:
            refused.add_row(Text(each.name), Text(each.address), Text(each.directory), Text(each.error))
        parts.append(titled("Refused", refused))
    for operator in now.operators:
        parts.append(_operator(operator))
    for deploying in now.deploying:
        parts.append(
            Text(f"{deploying.name}: being deployed, {deploying.created} of {deploying.partitions} partitions")
        )
    running = [r for r in now.reconfigurations if r.state == "RUNNING"]
    if running:
        table = new_table("id", "operator", "moves", "done", numbers=("moves", "done"))
        for under_way in running:
            done = sum(move.state == "COMPLETED" for move in under_way.moves)
            table.add_row(under_way.id, under_way.operator, str(len(under_way.moves)), str(done))
        parts.append(titled("Reconfigurations under way", table))
    return Group(*parts)


def _nodes(replicas: Sequence[ReplicaStatus]) -> list[tuple[str, list[ReplicaStatus]]]:
    found: dict[str, list[ReplicaStatus]] = {}
    for replica in sorted(replicas, key=lambda r: (node_of(r.name), worker_of(r.name))):
        found.setdefault(node_of(replica.name), []).append(replica)
    return list(found.items())


def _states(members: list[ReplicaStatus]) -> Text:
    alive = sum(r.alive for r in members)
    if alive == len(members) > 1:
        return Text(f"alive, {alive} workers", "green")
    return state(members[0]) if len(members) == 1 else Text(f"{alive} of {len(members)} workers alive", "bold red")


def heard(replica: ReplicaStatus) -> str:
    return "never" if replica.last_heartbeat_s < 0 else f"{replica.last_heartbeat_s:.1f} s ago"


def state(replica: ReplicaStatus) -> Text:
    if replica.alive:
        return Text("alive", "green")
    return Text("opening", "yellow") if replica.opening else Text("silent", "bold red")


def _owned(partitions: int, lacking: int) -> Text:
    return Text(f"{partitions}, {lacking} not served", "bold red") if lacking else Text(str(partitions))


def _operator(operator: OperatorStatus) -> RenderableType:
    """Who serves which partitions; in red those that nobody does, and why."""
    title = f"{operator.name}: {operator.partitions} partitions, assignment {operator.version}"
    if operator.sites:
        title += f", only at {', '.join(operator.sites)}"
    table = new_table("replica", "count", "partitions", numbers=("count",))
    lacking = {partition for each in operator.unserved for partition in each.partitions}
    served = [(owner, p) for p, owner in enumerate(operator.owners) if p not in lacking]
    for replica in sorted({node_of(owner) for owner, _ in served}):
        mine = [p for owner, p in served if node_of(owner) == replica]
        table.add_row(replica, str(len(mine)), ranges(mine))
    for each in operator.unserved:
        table.add_row("nobody", str(len(each.partitions)), ranges(list(each.partitions)), style="bold red")
    return Group(titled(title, table), *(Text(each.error, "red") for each in operator.unserved))


def watch_status(read: Callable[[], ClusterStatus], workers: bool = False) -> None:
    with Live(status(read(), workers), console=console, screen=True) as live:
        while True:
            sleep(WATCH_INTERVAL_S)
            live.update(status(read(), workers))


def deployed(operator: OperatorStatus) -> None:
    console.print(Text.assemble((operator.name, "bold"), " is deployed"))
    console.print(_operator(operator))


def migration(move: Migration) -> Reconfiguration:
    """A line per partition until it has ended, then the table. Returns the final report."""
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
        console.print("nothing to move: every partition is there already")
    return move.report


def _follow(move: Migration) -> None:
    """Where nothing can be drawn: now and then a line for each move that goes on."""
    said_at = SYSTEM_CLOCK.monotonic()
    for report in move.progress():
        now = SYSTEM_CLOCK.monotonic()
        if report.state == "RUNNING" and now - said_at >= SAY_EVERY_S:
            said_at = now
            for m in report.moves:
                if m.state not in ("COMPLETED", "ABORTED"):
                    errors.print(standing(m, report.max_pause_ms), highlight=False)


def standing(move: MoveReport, max_pause_ms: float) -> str:
    """How a move stands, and what it waits for. Args: max_pause_ms: its budget; 0: none."""
    return f"{move.partition}: {move.source} → {move.target}  {move.state:<11}  {_doing(move, max_pause_ms)}".rstrip()


def _doing(move: MoveReport, max_pause_ms: float) -> str:
    match move.state:
        case "WAITING":
            return "until others have moved"
        case "WARMING" if move.base_bytes:
            return f"{size(move.bytes_warm + move.bytes_reused)} of {size(move.base_bytes)} are there"
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
        return "the pause is not predicted yet"
    if not math.isfinite(move.predicted_pause_ms):
        return "changes come faster than they cross"
    said = f"pause {move.predicted_pause_ms:.1f} ms predicted"
    if not max_pause_ms:
        return said
    fits = move.predicted_pause_ms + move.margin_ms <= max_pause_ms
    return f"{said} + {move.margin_ms:.1f} ms margin {'≤' if fits else '>'} {max_pause_ms:g} ms allowed"


def moves(reports: tuple[MoveReport, ...]) -> RenderableType:
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
            "took",
        ),
        numbers=("partition", "warm", "reused", "delta", "rounds", "predicted", "pause", "took"),
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
            f"{m.duration_s:.2f} s",
        )
    failures = [Text(f"{m.partition}: {m.error}", "red") for m in reports if m.error]
    return Group(titled("Moves", table), *failures)
