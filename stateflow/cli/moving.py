"""Commands about nodes and partitions: where they are, moving them, standbys, and lost replicas and ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import (
    LOCAL,
    Controller,
    DryRun,
    Json,
    Limit,
    MaxBandwidth,
    MaxPause,
    Order,
    Patience,
    PerLink,
    PerNode,
    Policies,
    Strategy,
    console,
    emit,
    fields_of,
    move_options,
    seconds,
)
from stateflow.client import Cluster, Migration
from stateflow.client.words import redistribute, would_redistribute
from stateflow.errors import InvalidArgument
from stateflow.types import ranges

app = Commands()


@app.command()
def adopt(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what replicas have.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Adopt even if partitions are missing or exist only as sealed copies.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Record what replicas have in this controller's ledger, which knows nothing of it, after another ledger was
    lost."""
    found = Cluster(controller).adopt(dry_run=dry_run, partial=partial)
    if as_json:
        emit({"operators": [fields_of(each) for each in found]})
        return
    table = show.new_table("operator", "partitions", "owned", "sealed only", "missing", "conflicts")
    for each in found:
        table.add_row(
            each.name,
            str(each.count or "?"),
            *(ranges(list(numbers)) for numbers in (each.partitions, each.sealed, each.missing)),
            Text("; ".join(each.conflicts)),
        )
    console.print(table)
    console.print("nothing was changed" if dry_run else "recorded in the ledger")


# -- what is where --------------------------------------------------------------------------------------------


@app.command()
def nodes(
    controller: Controller = LOCAL,
    workers: Annotated[bool, typer.Option("--workers", help="Also show each worker of a node.")] = False,
    as_json: Json = False,
) -> None:
    """List the replicas: site, weight, last heard, partitions, room for state; and the links between sites."""
    status = Cluster(controller).status(measured=True)
    replicas = status.replicas
    show.say_who_answered(status.follower)
    if as_json:
        emit({"nodes": [fields_of(r) for r in replicas], "links": [fields_of(each) for each in status.links]})
    else:
        resting = [each.node for each in status.maintenance]
        console.print(show.replicas(replicas, {}, workers, of_nodes=True, resting=resting))
        if status.links:
            console.print(show.links(status.links))


@app.command()
def partitions(
    operator: Annotated[str | None, typer.Argument(help="Operator; default: all.")] = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """List each partition's owner, epoch and standbys."""
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
    operator: Annotated[str | None, typer.Argument(help="Operator; default: all.")] = None,
    policy: Policies = "ring",
    dry_run: DryRun = False,
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    limit: Limit = None,
    per_node: PerNode = None,
    per_link: PerLink = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Bring every replica to its weight's share of partitions, with as few moves as possible; or move partitions to
    where their load, or their rows, are best served."""
    options, cluster = (
        move_options(max_pause, max_bandwidth, strategy, order, patience, (limit, per_node, per_link)),
        Cluster(controller),
    )
    names = [name.strip() for name in policy.split(",")]
    if dry_run:
        show.proposed(would_redistribute(cluster, names, operator or ""), as_json)
    else:
        wait_for(redistribute(cluster, names, operator or "", options), as_json)


@app.command()
def autopilot(
    policy: Annotated[
        str | None, typer.Option("--policy", help="locality, load, ring, or several in order of priority.")
    ] = None,
    max_pause: MaxPause = None,
    cool_down: Annotated[
        str | None,
        typer.Option("--cool-down", help="How long a partition stays put after a move; default: 60s."),
    ] = None,
    moves_per_minute: Annotated[
        float | None,
        typer.Option("--moves-per-minute", help="Maximum number of moves that begin per minute; default: 60."),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Stop the autopilot.")] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Let partitions follow their rows and their load from now on; without options, show its orders."""
    given = {
        "--max-pause": max_pause is not None,
        "--cool-down": cool_down is not None,
        "--moves-per-minute": moves_per_minute is not None,
    }
    said = [option for option, is_given in given.items() if is_given]
    if off and policy is not None:
        raise InvalidArgument("--off and --policy contradict each other", remedy="pass one of them")
    if said and policy is None:
        raise InvalidArgument(
            f"{' and '.join(said)} {'has' if len(said) == 1 else 'have'} no effect without --policy",
            remedy="pass --policy, too: each command replaces all of the autopilot's settings",
        )
    cluster = Cluster(controller)
    if off or policy is not None:
        names = [] if off or policy is None else [name.strip() for name in policy.split(",")]
        most = move_options(max_pause, None, "auto", "number", None).max_pause_ms
        told = cluster.autopilot(
            *names,
            max_pause_ms=most,
            cool_down_s=seconds(cool_down or "60s"),
            moves_per_minute=60.0 if moves_per_minute is None else moves_per_minute,
        )
    else:
        told = cluster.autopilot_orders()
    if as_json:
        emit(fields_of(told))
    elif not told.policies:
        console.print("the autopilot is off")
    else:
        pause = "no pause budget" if told.max_pause_ms is None else f"pauses within {told.max_pause_ms:g} ms"
        console.print(
            f"the autopilot follows {', '.join(told.policies)}: {pause}, cool-down {told.cool_down_s:g} s, "
            f"{told.moves_per_minute:g} moves a minute at most; `stateflow reconfig list` shows its moves"
        )


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Replica to drain, or a node: all of its workers.")],
    maintenance: Annotated[
        bool, typer.Option("--maintenance", help="Keep the node without partitions until the maintenance ends.")
    ] = False,
    for_: Annotated[
        str | None,
        typer.Option("--for", help="Duration of the maintenance, e.g. 2h; default: until it is ended by command."),
    ] = None,
    one_of: Annotated[
        str, typer.Option("--one-of", help="Name of a set of nodes, of which only one may be in maintenance at a time.")
    ] = "",
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    limit: Limit = None,
    per_node: PerNode = None,
    per_link: PerLink = None,
    dry_run: DryRun = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Move everything away from a replica, so that it can be stopped."""
    options = move_options(max_pause, max_bandwidth, strategy, order, patience, (limit, per_node, per_link))
    cluster = Cluster(controller)
    if (for_ or one_of) and not maintenance:
        raise InvalidArgument("--for and --one-of require --maintenance", remedy="add --maintenance")
    if dry_run:
        show.proposed(cluster.would_drain(replica), as_json)
        return
    if not maintenance:
        wait_for(cluster.drain(replica, options), as_json)
        return
    begun = cluster.maintain(replica, for_s=seconds(for_) if for_ else 0.0, one_of=one_of, options=options)
    if not as_json:
        console.print(f"{replica} is in maintenance; `stateflow maintenance end {replica}` ends it")
    if begun or as_json:
        wait_for(begun, as_json)


@app.command()
def replace(
    replica: Annotated[str, typer.Argument(help="Replica whose data directory is lost for good.")],
    directory: Annotated[str, typer.Option(help="Data directory that gets the name, if several ask for it.")] = "",
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Give a replica's name to a new data directory; the state in the former one is lost to the cluster."""
    given, partitions = Cluster(controller).replace(replica, directory)
    if as_json:
        emit({"replica": replica, "directory": given, "partitions": partitions})
    else:
        console.print(
            f"{replica} now has directory {given}; its {partitions} partitions come from standbys and checkpoints"
        )


def wait_for(migrations: Sequence[Migration], as_json: bool) -> None:
    """Shows migrations until they have ended. Exits with status 1 where one did not complete."""
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
    count: Annotated[int, typer.Argument(help="Number of standbys per partition; 0: none.")] = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Keep copies of every partition that follow its owner, to take over when the owner dies."""
    begun = Cluster(controller).standby(operator, count)
    if as_json:
        emit({"operator": operator, "count": count, "standbys": [fields_of(view) for view in begun]})
    else:
        console.print(f"{operator}: {_wanted(count, len(begun))} (`stateflow partitions {operator}` shows them)")


def _wanted(count: int, there: int) -> str:
    if not count:
        return f"no standbys from now on, {there} ending" if there else "no standbys"
    return f"{count} per partition requested, {there} started or running"
