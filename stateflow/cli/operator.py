"""``stateflow operator``: versions of deployed operators."""

from __future__ import annotations

from typing import Annotated

import typer

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, shown_time
from stateflow.client import Cluster
from stateflow.reports import OperatorVersion

app = Commands(
    "operator",
    help="Versions of operators: `stateflow deploy` adds one, `stateflow upgrade` switches to an earlier one.",
)


@app.command()
def versions(
    operator: Annotated[str, typer.Argument()],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """List an operator's versions as they were deployed; the last one serves."""
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
