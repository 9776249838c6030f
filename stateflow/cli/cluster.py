"""Commands for the operators of a cluster: deploy, look, move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.options import (
    LOCAL,
    Controller,
    Json,
    MaxBandwidth,
    MaxPause,
    Order,
    Patience,
    Strategy,
    move_options,
    partition_numbers,
)
from stateflow.cli.output import console, emit
from stateflow.client import Cluster
from stateflow.errors import InvalidArgument
from stateflow.runtime.operator import DEFAULT_PARTITIONS, load

app = Commands()


@app.command()
def deploy(
    target: Annotated[str, typer.Argument(help="package.module:Class or file.py:Class")],
    partitions: Annotated[int, typer.Option(help="Slices of the key space; fixed for ever.")] = DEFAULT_PARTITIONS,
    name: Annotated[str | None, typer.Option(help="Default: the class's name.")] = None,
    site: Annotated[
        list[str] | None, typer.Option(help="Only on replicas of this site, also later; repeatable.")
    ] = None,
    anywhere: Annotated[
        bool, typer.Option("--anywhere", help="On replicas of any site, whatever an earlier --site said.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Deploy an operator: create its partitions on the replicas."""
    if site and anywhere:
        raise InvalidArgument("--site and --anywhere contradict each other", remedy="give one of them")
    cluster = Cluster(controller)
    operator = load(_absolute(target))
    cluster.deploy(operator, partitions, sites=() if anywhere else site or None, name=name)
    status = next(o for o in cluster.status().operators if o.name == (name or operator.__name__))
    if as_json:
        emit({"operator": status.name, "partitions": status.partitions, "owners": list(status.owners)})
    else:
        show.deployed(status)


def _absolute(target: str) -> str:
    file, _, qualname = target.rpartition(":")
    return f"{Path(file).resolve()}:{qualname}" if file.endswith(".py") else target


@app.command()
def status(
    controller: Controller = LOCAL,
    watch: Annotated[bool, typer.Option("--watch", help="Live, until Ctrl-C.")] = False,
    workers: Annotated[bool, typer.Option("--workers", help="Each worker of a node, too.")] = False,
    as_json: Json = False,
) -> None:
    """What runs where."""
    cluster = Cluster(controller)
    if as_json:
        emit(cluster.status().to_dict())
    elif watch:
        show.watch_status(cluster.status, workers)
    else:
        console.print(show.status(cluster.status(), workers))


@app.command()
def migrate(
    operator: Annotated[str, typer.Argument()],
    partition: Annotated[list[str], typer.Argument(help="Partitions: 3, 5-9, or all.")],
    to: Annotated[str, typer.Option("--to", help="A site or a replica.")],
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Move partitions to another site or replica while the pipeline runs."""
    cluster = Cluster(controller)
    numbers = partition_numbers(partition, cluster.operator(operator).partitions)
    options = move_options(max_pause, max_bandwidth, strategy, order, patience)
    move = cluster.migrate(operator, numbers, to, options)
    report = move.wait() if as_json else show.migration(move)
    if as_json:
        emit(report.to_dict())
    if report.state != "COMPLETED":
        raise typer.Exit(1)
