"""Commands that take something out of a cluster for good."""

from __future__ import annotations

from typing import Annotated

import typer

from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit
from stateflow.client import Cluster

app = Commands()


@app.command()
def undeploy(
    operator: Annotated[str, typer.Argument(help="Name of the operator.")],
    delete_state: Annotated[
        bool,
        typer.Option("--delete-state", help="Confirm that its state on all replicas is deleted. Checkpoints stay."),
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Take an operator out of the cluster, and delete its state. Refused while its partitions move."""
    waiting = Cluster(controller).undeploy(operator, delete_state=delete_state)
    if as_json:
        emit({"operator": operator, "waiting": waiting})
        return
    console.print(f"{operator} undeployed")
    if waiting:
        console.print(f"no answer from these replicas, which delete their state when they return: {', '.join(waiting)}")


@app.command()
def forget(
    replica: Annotated[str, typer.Argument(help="Replica that has ended for good, or a node: all of its workers.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Forget a replica that owns nothing and has ended. A replica that registers under its name later is a new one."""
    Cluster(controller).forget(replica)
    if as_json:
        emit({"replica": replica})
    else:
        console.print(f"{replica} forgotten")
