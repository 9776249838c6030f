"""What people see: rich tables and progress bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import sleep

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stateflow.cli.output import console, size
from stateflow.client import ClusterStatus, MoveReport, OperatorStatus, Reconfiguration
from stateflow.client.cluster import Migration

WATCH_INTERVAL_S = 1.0
_DONE = {"WAITING": 0, "WARMING": 1, "CATCHING_UP": 2, "FENCED": 3, "OWNED": 4, "COMPLETED": 5, "ABORTED": 5}


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return table


def titled(title: str, table: Table) -> Group:
    """A title of its own line: a table's would wrap at the table's width."""
    return Group(Text(title, "bold"), table)


def status(now: ClusterStatus) -> RenderableType:
    replicas = new_table(
        "Replicas",
        "replica",
        "site",
        "address",
        "state",
        "heard",
        "partitions",
        numbers=("heard", "partitions"),
    )
    for r in now.replicas:
        heard = "never" if r.last_heartbeat_s < 0 else f"{r.last_heartbeat_s:.1f} s ago"
        state = Text("alive", "green") if r.alive else Text("silent", "bold red")
        replicas.add_row(r.name, r.site, r.address, state, heard, str(r.partitions))
    parts: list[RenderableType] = [titled("Replicas", replicas)]
    for operator in now.operators:
        parts.append(_operator(operator))
    running = [r for r in now.reconfigurations if r.state == "RUNNING"]
    if running:
        table = new_table("id", "operator", "moves", "done", numbers=("moves", "done"))
        for under_way in running:
            done = sum(move.state == "COMPLETED" for move in under_way.moves)
            table.add_row(under_way.id, under_way.operator, str(len(under_way.moves)), str(done))
        parts.append(titled("Reconfigurations under way", table))
    return Group(*parts)


def _operator(operator: OperatorStatus) -> RenderableType:
    title = f"{operator.name}: {operator.partitions} partitions, assignment {operator.version}"
    table = new_table("replica", "count", "partitions", numbers=("count",))
    for replica, count in sorted(Counter(operator.owners).items()):
        mine = [p for p, owner in enumerate(operator.owners) if owner == replica]
        table.add_row(replica, str(count), ranges(mine))
    return titled(title, table)


def ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2 5``."""
    words: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if start is not None and (number is None or number != (previous or 0) + 1):
            words.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = None
        if start is None:
            start = number
        previous = number
    return " ".join(words)


def watch_status(read: Callable[[], ClusterStatus]) -> None:
    with Live(status(read()), console=console, screen=True) as live:
        while True:
            sleep(WATCH_INTERVAL_S)
            live.update(status(read()))


def deployed(operator: OperatorStatus) -> None:
    console.print(f"[bold]{operator.name}[/] is deployed")
    console.print(_operator(operator))


def migration(move: Migration) -> Reconfiguration:
    """A bar per partition until it has ended, then the table. Returns the final report."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[phase]:<12} {task.fields[size]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {
            m.id: progress.add_task(f"{m.partition}: {m.source} → {m.target}", total=5, phase=m.state, size="")
            for m in move.report.moves
        }
        for report in move.progress():
            for m in report.moves:
                moved = size(m.bytes_warm + m.bytes_delta)
                progress.update(tasks[m.id], completed=_DONE.get(m.state, 0), phase=m.state, size=moved)
    if move.report.moves:
        console.print(moves(move.report.moves))
    else:
        console.print("nothing to move: every partition is there already")
    return move.report


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
