"""Commands that move partitions, and that show where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

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
)
from stateflow.cli.output import console, emit, fields_of
from stateflow.client import Cluster, Migration
from stateflow.types import ranges

app = Commands()


@app.command()
def adopt(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also where partitions are missing, or only sealed copies are there.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Take what replicas have into this controller's ledger, which knows nothing of it: another ledger was lost."""
    found = Cluster(controller).adopt(dry_run=dry_run, partial=partial)
    if as_json:
        emit({"operators": [fields_of(each) for each in found]})
        return
    table = show.new_table("operator", "partitions", "owned", "sealed only", "missing", "in the way")
    for each in found:
        table.add_row(
            each.name,
            str(each.count or "?"),
            *(ranges(list(numbers)) for numbers in (each.partitions, each.sealed, each.missing)),
            Text("; ".join(each.conflicts)),
        )
    console.print(table)
    console.print("nothing was changed" if dry_run else "they are in the ledger now")


# -- what is where --------------------------------------------------------------------------------------------


@app.command()
def nodes(
    controller: Controller = LOCAL,
    workers: Annotated[bool, typer.Option("--workers", help="Each worker of a node, too.")] = False,
    as_json: Json = False,
) -> None:
    """The replicas: site, weight, last heard, partitions."""
    status = Cluster(controller).status()
    replicas = status.replicas
    show.say_who_answered(status.follower)
    if as_json:
        emit({"nodes": [fields_of(r) for r in replicas]})
    else:
        console.print(show.replicas(replicas, {}, workers, weights=True))


@app.command()
def partitions(
    operator: Annotated[str | None, typer.Argument(help="Default: all.")] = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Each partition's owner, epoch and standbys."""
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
def rebalance(
    operator: Annotated[str | None, typer.Argument(help="Default: all.")] = None,
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Bring every replica to its weight's share of partitions, by as few moves as that takes."""
    options = move_options(max_pause, max_bandwidth, strategy, order, patience)
    wait_for(Cluster(controller).rebalance(operator or "", options), as_json)


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Everything it owns leaves it; of a node: all of its workers.")],
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Move everything away from a replica, so that it can be stopped."""
    options = move_options(max_pause, max_bandwidth, strategy, order, patience)
    wait_for(Cluster(controller).drain(replica, options), as_json)


@app.command()
def replace(
    replica: Annotated[str, typer.Argument(help="Whose data directory is lost for good.")],
    directory: Annotated[str, typer.Option(help="Where several ask for the name: whose it becomes.")] = "",
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give a replica's name to a new data directory: what the former one has is lost to the cluster."""
    given, partitions = Cluster(controller).replace(replica, directory)
    if as_json:
        emit({"replica": replica, "directory": given, "partitions": partitions})
    else:
        console.print(
            f"{replica} is directory {given} now; its {partitions} partitions come from standbys and checkpoints"
        )


def wait_for(migrations: Sequence[Migration], as_json: bool) -> None:
    """Show them until they have ended; status 1 where one did not complete."""
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
    count: Annotated[int, typer.Argument(help="Copies beside the owner; 0 for none.")] = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Keep copies of every partition following their owners, to take over when those die."""
    begun = Cluster(controller).standby(operator, count)
    if as_json:
        emit({"operator": operator, "count": count, "standbys": [fields_of(view) for view in begun]})
    else:
        console.print(f"{operator}: {_wanted(count, len(begun))} (`stateflow partitions {operator}` shows them)")


def _wanted(count: int, there: int) -> str:
    if not count:
        return f"no standbys are wanted any more, {there} are being ended" if there else "no standbys are wanted"
    return f"{count} per partition wanted, {there} begun or there"
