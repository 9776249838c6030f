"""Sweeps, which are long work at many nodes: following one, a line for each change, and its outcome."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, errors, size, waiting
from stateflow.client import Cluster, RollingRestart, Sweep, Sweeping

app = Commands()
Site = Annotated[str, typer.Option(help="Only partitions at this site or node when it begins.")]
Limit = Annotated[int, typer.Option(min=1, max=256, help="Number of nodes at a time.")]


@app.command()
def verify(
    operator: Annotated[str | None, typer.Argument(help="Only this operator's partitions.")] = None,
    site: Site = "",
    limit: Limit = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Let every owner read its partitions whole, slowly, and report what is damaged. Batches go on."""
    follow_sweep(Cluster(controller).verify_all(operator or "", site=site, limit=limit), as_json)


def follow_nodes(begun: RollingRestart | Sweeping, as_json: bool) -> None:
    """Follows work at many nodes until it is over. Prints a line where something changed."""
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
    """Follows a sweep, and shows its outcome. Exits with status 1 where it did not end well."""
    follow_nodes(begun, as_json)
    report = begun.report
    if as_json:
        emit(report.to_dict())
    else:
        _show(report)
    if report.state != "DONE":
        raise typer.Exit(1)


def _show(report: Sweep) -> None:
    verifies = report.chore == "verify"
    told = ("read", "cells", "compared") if verifies else ("new", "of")
    table = show.new_table("node", "status", "partitions", *told, "s", numbers=("partitions", *told, "s"))
    for each in report.nodes:
        if each.node.startswith("(") and not each.partitions and not each.error:
            continue  # nothing has moved meanwhile
        status = Text(each.status, "green" if each.status == "COMPLETED" else "bold red")
        values = [size(each.bytes_new), size(each.bytes_total)]
        if verifies:
            values = [size(each.bytes_read), str(each.cells), str(each.compared)]
        table.add_row(each.node, status, str(each.partitions), *values, f"{each.ms / 1e3:.1f}")
    console.print(show.titled(f"{report.batch}: {report.state}", table))
    for fault in report.faults():
        at = f" at {fault.replica}" if fault.replica else ""
        console.print(Text(f"{fault.operator}/{fault.partition}{at}: {fault.error}", "red"))
