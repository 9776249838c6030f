"""``stateflow maintenance``: nodes that are cordoned; ``stateflow drain NODE --maintenance`` begins a maintenance."""

from __future__ import annotations

from typing import Annotated

import typer

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, fields_of, shown_time
from stateflow.client import Cluster

app = Commands("maintenance", help="Nodes in maintenance; `stateflow drain NODE --maintenance` begins one.")


@app.command("list")
def list_(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List the nodes that are in maintenance."""
    status = Cluster(controller).status()
    show.say_who_answered(status.follower)
    if as_json:
        emit({"maintenance": [fields_of(each) for each in status.maintenance]})
        return
    table = show.new_table("node", "set", "since (UTC)", "until (UTC)")
    for each in status.maintenance:
        table.add_row(
            each.node, each.one_of, shown_time(each.since_us), shown_time(each.until_us or None) or "open-ended"
        )
    console.print(table)


@app.command()
def end(
    node: Annotated[str, typer.Argument(help="Node whose maintenance ends.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """End the maintenance of a node; `stateflow rebalance` gives it its share."""
    Cluster(controller).end_maintenance(node)
    if as_json:
        emit({"node": node, "maintenance": False})
    else:
        console.print(f"{node} can get partitions again: `stateflow rebalance` gives it its share")
