"""Commands on operators and nodes, such as deploy, status, migrate and maintenance; and ``verify``, a sweep over many
nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import (
    LOCAL,
    NUMBER_MAX,
    Controller,
    DryRun,
    GivenMoves,
    Json,
    Shown,
    console,
    emit,
    errors,
    shown_time,
    size,
    waiting,
    with_move_options,
)
from stateflow.client import Cluster, RollingRestart, Sweep, Sweeping
from stateflow.client.commands import partition_numbers
from stateflow.client.packing import comes_along, pack
from stateflow.code.loading import is_text
from stateflow.errors import InvalidArgument, OperatorNotDeployed
from stateflow.operator.operator import DEFAULT_PARTITIONS, load
from stateflow.reports import OperatorVersion
from stateflow.types import MoveOptions

app = Commands()


@app.command()
def deploy(
    target: Annotated[str, typer.Argument(help="Operator class: package.module:Class or file.py:Class.")],
    partitions: Annotated[
        int | None,
        typer.Option(help=f"Number of partitions, fixed by the first deployment; its default is {DEFAULT_PARTITIONS}."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name in the cluster; default: the class name.")] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(help="Serve the operator only at this site, also in later deployments; repeatable."),
    ] = None,
    anywhere: Annotated[
        bool, typer.Option("--anywhere", help="Serve the operator at any site; revokes an earlier --site.")
    ] = False,
    failover: Annotated[
        str | None,
        typer.Option(
            help="automatic or manual; with manual, a site that is cut off keeps serving, and no replica takes over."
        ),
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="Requirement of the operator's code, in pip syntax; repeatable.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Further module or package to send along; repeatable.")
    ] = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="Send no code: the module is installed on the replicas.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Deploy an operator: send its code to the sites, and create its partitions on the replicas."""
    if site and anywhere:
        raise InvalidArgument("--site and --anywhere contradict each other", remedy="pass one of them")
    if installed and (require or include):
        raise InvalidArgument("--installed sends no code", remedy="leave out --installed, or --require and --include")
    cluster = Cluster(controller)
    operator = load(_absolute(target))
    there = installed or is_text(target) or comes_along(operator)
    called = name or operator.__name__
    before = _version(cluster, called)
    with waiting(f"packing {called}", as_json=as_json, look=_deploying(controller, called)) as shown:
        bundle = pack(operator, require or (), include or ()) if require or include or not there else None
        shown.what = f"deploying {called}"
        cluster.deploy(
            operator, partitions, sites=() if anywhere else site or None, name=name, bundle=bundle, failover=failover
        )
    status = next(o for o in cluster.status().operators if o.name == called)
    after = _version(cluster, called)
    if as_json:
        told = {"operator": status.name, "partitions": status.partitions, "owners": list(status.owners)}
        emit({**told, "version": after, "version_before": before})
    else:
        show.deployed(status, before, after)


def _deploying(controller: str, operator: str) -> Callable[[Shown], None]:
    """Returns a function that updates the progress of a deployment."""

    def look(shown: Shown) -> None:
        for each in Cluster(controller).status().deploying:
            if each.name != operator:
                continue
            if each.tried is not None:
                shown.what = f"trying the new version of {operator} on its stored state"
            shown.of(each.created if each.tried is None else each.tried, each.partitions)

    return look


def _version(cluster: Cluster, operator: str) -> int:
    """Returns the number of the serving version; 0: the operator is not deployed."""
    try:
        return cluster.versions(operator)[-1].number
    except OperatorNotDeployed:
        return 0


def _absolute(target: str) -> str:
    file, _, qualname = target.rpartition(":")
    return f"{Path(file).resolve()}:{qualname}" if file.endswith(".py") else target


@app.command()
def status(
    controller: Controller = LOCAL,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    workers: Annotated[bool, typer.Option("--workers", help="Also show each worker of a node.")] = False,
    as_json: Json = False,
) -> None:
    """Show what runs where."""
    cluster = Cluster(controller)
    if as_json:
        emit(cluster.status().to_dict())
    elif watch:
        show.watch_status(cluster.status, workers)
    else:
        console.print(show.status(cluster.status(), workers))


@app.command()
def takeover(
    operator: Annotated[str, typer.Argument()],
    partition: Annotated[
        list[str] | None, typer.Argument(help="Partitions, e.g. 3 5-9; default: all that are not served.")
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Accept the loss of batches that the owners served after their last heartbeat."
        ),
    ] = False,
    dry_run: DryRun = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Take over the partitions of owners that are gone for good, for an operator with manual failover."""
    cluster = Cluster(controller)
    numbers = partition_numbers(" ".join(partition), cluster.operator(operator).partitions) if partition else []
    if dry_run:
        show.proposed(cluster.would_take_over(operator, numbers), as_json, takeovers=True)
        return
    with waiting(f"taking over partitions of {operator}", as_json=as_json):
        begun = [migration.wait() for migration in cluster.take_over(operator, numbers, accept_loss=accept_loss)]
    if as_json:
        emit({"reconfigurations": [report.to_dict() for report in begun]})
    else:
        for move in (move for report in begun for move in report.moves):
            said = ": ".join(filter(None, (move.state, move.error or move.note)))
            console.print(f"partition {move.partition}: {move.source} to {move.target}, {said}")
    if any(report.state != "COMPLETED" for report in begun):
        raise typer.Exit(1)


@app.command()
def upgrade(
    operator: Annotated[str, typer.Argument()],
    to: Annotated[
        int, typer.Option("--to", help="Version number, see `stateflow operator versions`.", min=1, max=NUMBER_MAX)
    ],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Switch all replicas to a version of the operator that was deployed before, newer or older."""
    with waiting(f"upgrading {operator}", as_json=as_json, look=_deploying(controller, operator)):
        now = Cluster(controller).upgrade(operator, to)
    if as_json:
        emit({"operator": operator, **now.to_dict()})
    else:
        console.print(f"{operator}: version {to} serves from the next batch on, as version {now.number}")


@app.command()
@with_move_options()
def migrate(
    operator: Annotated[str, typer.Argument()],
    partition: Annotated[list[str], typer.Argument(help="Partitions, e.g. 3 5-9, or all.")],
    to: Annotated[str, typer.Option("--to", help="Target site or replica.")],
    options: GivenMoves = MoveOptions,
    dry_run: DryRun = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Move partitions to another site or replica while the pipeline runs."""
    cluster = Cluster(controller)
    numbers = partition_numbers(" ".join(partition), cluster.operator(operator).partitions)
    if dry_run:
        show.proposed(cluster.would_migrate(operator, numbers, to), as_json)
        return
    move = cluster.migrate(operator, numbers, to, options())
    report = move.wait() if as_json else show.migration(move)
    if as_json:
        emit(report.to_dict())
    if report.state != "COMPLETED":
        raise typer.Exit(1)


operator_commands = Commands(
    "operator",
    help="Versions of operators: `stateflow deploy` adds one, `stateflow upgrade` switches to an earlier one.",
)
app.add_typer(operator_commands)


@operator_commands.command()
def versions(
    operator: Annotated[str, typer.Argument()],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """List an operator's versions in the order of deployment; the last one serves."""
    found = Cluster(controller).versions(operator)
    if as_json:
        emit({"operator": operator, "versions": [each.to_dict() for each in found]})
        return
    table = show.new_table("version", "deployed (UTC)", "operator", "code", numbers=("version",))
    for each in found:
        table.add_row(str(each.number), shown_time(each.recorded_us), each.target, _code(each))
    console.print(table)


def _code(version: OperatorVersion) -> str:
    if version.bundle:
        return f"bundle {version.bundle[:12]}"
    return f"text {version.source_digest[:12]}" if version.source_digest else "installed on the replicas"


@app.command()
def undeploy(
    operator: Annotated[str, typer.Argument(help="Name of the operator.")],
    delete_state: Annotated[
        bool,
        typer.Option(
            "--delete-state", help="Confirm that the operator's state is deleted on all replicas; checkpoints stay."
        ),
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Remove an operator from the cluster, and delete its state. The command is refused while its partitions move."""
    waiting = Cluster(controller).undeploy(operator, delete_state=delete_state)
    if as_json:
        emit({"operator": operator, "waiting": waiting})
        return
    console.print(f"{operator} undeployed")
    if waiting:
        console.print(f"no answer from these replicas, which delete their state when they return: {', '.join(waiting)}")


@app.command()
def forget(
    replica: Annotated[str, typer.Argument(help="Replica that has ended for good, or a node with all of its workers.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Forget a replica that has ended and owns no partition. A replica that later registers under the name counts as
    new."""
    Cluster(controller).forget(replica)
    if as_json:
        emit({"replica": replica})
    else:
        console.print(f"{replica} forgotten")


maintenance_commands = Commands(
    "maintenance", help="Nodes in maintenance; `stateflow drain NODE --maintenance` begins one."
)
app.add_typer(maintenance_commands)


@maintenance_commands.command("list")
def list_maintenance(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List the nodes that are in maintenance."""
    status = Cluster(controller).status()
    show.say_who_answered(status.follower)
    if as_json:
        emit({"maintenance": [each.to_dict() for each in status.maintenance]})
        return
    table = show.new_table("node", "set", "since (UTC)", "until (UTC)")
    for each in status.maintenance:
        table.add_row(
            each.node, each.one_of, shown_time(each.since_us), shown_time(each.until_us or None) or "open-ended"
        )
    console.print(table)


@maintenance_commands.command("end")
def end_maintenance(
    node: Annotated[str, typer.Argument(help="Node whose maintenance ends.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """End the maintenance of a node; `stateflow rebalance` then gives the node its share of partitions."""
    Cluster(controller).end_maintenance(node)
    if as_json:
        emit({"node": node, "maintenance": False})
    else:
        console.print(f"{node} can get partitions again: `stateflow rebalance` gives it its share")


Site = Annotated[str, typer.Option(help="Only partitions that are at this site or node at the beginning.")]
NodeLimit = Annotated[int, typer.Option(min=1, max=256, help="Number of nodes at a time.")]


@app.command()
def verify(
    operator: Annotated[str | None, typer.Argument(help="Only this operator's partitions.")] = None,
    site: Site = "",
    limit: NodeLimit = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Let every owner read its partitions completely, at a limited rate, and report damage. Processing continues."""
    follow_sweep(Cluster(controller).verify_all(operator or "", site=site, limit=limit), as_json)


def follow_nodes(begun: RollingRestart | Sweeping, as_json: bool) -> None:
    """Follows work at many nodes until the work has ended. Prints a line for each change of a node."""
    said: dict[str, str] = {}
    with waiting("node by node", as_json=as_json) as shown:
        for report in begun.progress():
            for each in report.nodes:
                line = f"{each.node} {each.status.lower().replace('_', ' ')}"
                line += f": {each.error}" if each.error else f", {each.ms / 1e3:.1f} s" if each.ms else ""
                if not as_json and each.status != "WAITING" and said.get(each.node) != line:
                    said[each.node] = line
                    errors.print(line, highlight=False)
            shown.of(sum(each.status not in ("WAITING", "IN_PROGRESS") for each in report.nodes), len(report.nodes))


def follow_sweep(begun: Sweeping, as_json: bool) -> None:
    """Follows a sweep, and shows its outcome. Exits with status 1 unless the sweep ended as DONE."""
    follow_nodes(begun, as_json)
    report = begun.report
    if as_json:
        emit(report.to_dict())
    else:
        _show_sweep(report)
    if report.state != "DONE":
        raise typer.Exit(1)


def _show_sweep(report: Sweep) -> None:
    verifies = report.chore == "verify"
    told = ("read", "cells", "compared") if verifies else ("new", "of")
    table = show.new_table("node", "status", "partitions", *told, "s", numbers=("partitions", *told, "s"))
    for each in report.nodes:
        if each.node.startswith("(") and not each.partitions and not each.error:
            continue  # no partition moved during the sweep
        status = Text(each.status, "green" if each.status == "COMPLETED" else "bold red")
        values = [size(each.bytes_new), size(each.bytes_total)]
        if verifies:
            values = [size(each.bytes_read), str(each.cells), str(each.compared)]
        table.add_row(each.node, status, str(each.partitions), *values, f"{each.ms / 1e3:.1f}")
    console.print(show.titled(f"{report.batch}: {report.state}", table))
    for fault in report.faults():
        at = f" at {fault.replica}" if fault.replica else ""
        console.print(Text(f"{fault.operator}/{fault.partition}{at}: {fault.error}", "red"))
