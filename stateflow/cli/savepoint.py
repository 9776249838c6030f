"""``stateflow savepoint``: checkpoints with a name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from stateflow.checkpoint import CheckpointStore
from stateflow.cli.checkpoint import Operator, columns, opened, show_taken
from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Checkpoints, Controller, Json, console, emit, size, waiting
from stateflow.client import Cluster

app = Commands("savepoint", help="Named checkpoints, kept until they are deleted.")
Savepoint = Annotated[str, typer.Argument(help="Name of the savepoint.")]


@app.command()
def create(name: Savepoint, operator: Operator = None, controller: Controller = LOCAL, as_json: Json = False) -> None:
    """Take a checkpoint of every partition and keep it under a name."""
    with waiting(f"taking {name}", as_json=as_json):
        taken = Cluster(controller).savepoint(name, operator or "")
    show_taken(taken, as_json, savepoint=name)


@app.command("list")
def list_savepoints(url: Checkpoints, as_json: Json = False) -> None:
    """List the savepoints of a store."""
    found = opened(url).savepoints()
    if as_json:
        emit({"savepoints": {name: [str(each) for each in partitions] for name, partitions in found.items()}})
        return
    table = columns("savepoint", "operator", "partitions")
    for name, partitions in found.items():
        for operator in sorted({each.operator for each in partitions}):
            table.add_row(name, operator, str(sum(each.operator == operator for each in partitions)))
    console.print(table)


@app.command()
def export(
    name: Savepoint,
    url: Checkpoints,
    to: Annotated[str, typer.Option("--to", help="Directory or fsspec URL of the other store.")],
    as_json: Json = False,
) -> None:
    """Copy a savepoint, whole, into another store: for another cluster, or for keeping."""
    source, target = opened(url), CheckpointStore(to)
    target.check_writable()
    with waiting(f"copying {name}", as_json=as_json):
        copied = source.export(name, target)
    if as_json:
        emit({"savepoint": name, "bytes_copied": copied, "url": target.url})
    else:
        console.print(Text.assemble((name, "bold"), f": {size(copied)} copied to {target.url}"))


@app.command()
def delete(name: Savepoint, url: Checkpoints, as_json: Json = False) -> None:
    """Delete a savepoint; its blobs go with the next `stateflow checkpoint gc`."""
    partitions = opened(url).delete_savepoint(name)
    if as_json:
        emit({"savepoint": name, "partitions": partitions})
    else:
        console.print(Text.assemble((name, "bold"), f" deleted ({partitions} partitions)"))
