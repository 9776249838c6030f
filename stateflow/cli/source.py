"""``stateflow source``: sources of an operator, and what is kept of those that no longer send."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, size
from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK
from stateflow.operator.timers import to_datetime

app = Commands("source", help="Sources of an operator: queries, batch runs, stream clients.")
Operator = Annotated[str, typer.Argument(help="Name of the operator.")]


@app.command("list")
def list_(
    operator: Operator,
    limit: Annotated[int, typer.Option(help="Number of newest sources; 0: all.", min=0)] = 50,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """List each source's newest batch, how long ago it came, its watermark, and what is kept of it."""
    found = Cluster(controller).sources(operator)
    shown = found[-limit:] if limit else found
    if as_json:
        emit({"sources": [each.to_dict() for each in shown]})
        return
    columns = ("source", "batch", "idle", "partitions", "kept", "watermark", "")
    table = show.new_table(*columns, numbers=("batch", "idle", "kept"))
    now_us = SYSTEM_CLOCK.now_us()
    for each in shown:
        idle = timedelta(seconds=max(0, now_us - each.at_us) // 1_000_000) if each.at_us else "?"
        state = Text("retired", "dim") if each.retired else Text()
        if each.holds:
            state = Text("holds the watermark back", "yellow")
        batch = "" if each.batch < 0 else str(each.batch)
        kept, watermark = size(each.bytes), _moment(each.watermark_us)
        table.add_row(Text(each.source), batch, str(idle), str(each.partitions), kept, watermark, state)
    console.print(table)
    if len(found) > len(shown):
        console.print(f"{len(found) - len(shown)} more, silent for longer: --limit 0 shows all")


def _moment(micros: int | None) -> str:
    return "" if micros is None else f"{to_datetime(micros):%Y-%m-%d %H:%M:%S}"


@app.command()
def retire(
    operator: Operator,
    source: Annotated[str, typer.Argument(help="Name of the source, as printed by `stateflow source list`.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Drop a source's stored output and its watermark; keep only the number of its newest batch."""
    partitions = Cluster(controller).retire_source(operator, source)
    if as_json:
        emit({"operator": operator, "source": source, "partitions": partitions})
    else:
        console.print(f"{source} retired in {partitions} partitions; if it comes back, it continues where it was")


@app.command("drop-output")
def drop_output(
    operator: Operator,
    source: Annotated[str, typer.Argument(help="Name of the source, as printed by `stateflow source list`.")],
    batch: Annotated[int, typer.Option(help="Batch that the query repeats, as named in its error.", min=0)],
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the change; without it, only show what would be done.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Let a query go on that cannot read a batch's stored output. The state keeps what the batch did; the batch's
    output rows reach no sink."""
    report = Cluster(controller).drop_output(operator, source, batch, apply=apply)
    if as_json:
        emit(report.to_dict())
        return
    count = f"{len(report.sizes)} partition{'s' if len(report.sizes) > 1 else ''}"
    done = "was dropped" if apply else "would be dropped"
    console.print(
        f"the output of batch {batch}, {size(sum(report.sizes.values()))} in {count}, {done}", highlight=False
    )
    console.print("the state keeps the batch's effects; a retry returns no rows, and the query continues after it")
    if not apply:
        console.print("dry run: repeat the command with --apply")
