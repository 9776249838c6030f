"""``stateflow source``: sources of an operator, and what is kept of those that no longer send."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.options import LOCAL, Controller, Json
from stateflow.cli.output import console, emit, size
from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK
from stateflow.runtime.timers import to_datetime

app = Commands("source", help="Sources of an operator: queries, batch runs, stream clients.")
Operator = Annotated[str, typer.Argument(help="The operator's name.")]


@app.command("list")
def list_(
    operator: Operator,
    limit: Annotated[int, typer.Option(help="How many of the newest; 0: all.", min=0)] = 50,
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
        console.print(f"{len(found) - len(shown)} more were silent for longer: --limit 0 shows all")


def _moment(micros: int | None) -> str:
    return "" if micros is None else f"{to_datetime(micros):%Y-%m-%d %H:%M:%S}"


@app.command()
def retire(
    operator: Operator,
    source: Annotated[str, typer.Argument(help="The source's name, as `stateflow source list` prints it.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Drop a source's stored output and its watermark; keep only the number of its newest batch."""
    partitions = Cluster(controller).retire_source(operator, source)
    if as_json:
        emit({"operator": operator, "source": source, "partitions": partitions})
    else:
        console.print(f"{source} is retired in {partitions} partitions; it goes on where it was, should it come back")


@app.command("drop-output")
def drop_output(
    operator: Operator,
    source: Annotated[str, typer.Argument(help="The source's name, as `stateflow source list` prints it.")],
    batch: Annotated[int, typer.Option(help="The batch that the query repeats, as its error names it.", min=0)],
    apply: Annotated[bool, typer.Option("--apply", help="Do it; without, only say what would be done.")] = False,
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
    done = "is dropped" if apply else "would be dropped"
    console.print(
        f"the output of batch {batch}, {size(sum(report.sizes.values()))} in {count}, {done}", highlight=False
    )
    console.print("the state keeps what the batch did; a retry of it gives no rows, and the query goes on behind it")
    if not apply:
        console.print("this was a dry run: repeat it with --apply")
