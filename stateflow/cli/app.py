"""The ``stateflow`` command. Each command is a thin shell around the library: parse, call, show."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Annotated

import typer

from stateflow.cli import (
    agents,
    batch,
    beginning,
    certs,
    checkpoint,
    cluster,
    dashboard,
    demo,
    generate,
    job,
    leaving,
    ledger,
    maintenance,
    moving,
    operator,
    processes,
    reconfig,
    run,
    savepoint,
    source,
    spark,
    stages,
    state,
    sweeps,
    token,
)
from stateflow.cli.group import Commands
from stateflow.cli.options import Insecure
from stateflow.cli.output import console, show_everything, telling
from stateflow.release import VERSION

app = Commands(root=True, help="Stateful stream operators whose state can move while the pipeline runs.")
for module in (
    agents,
    batch,
    beginning,
    certs,
    checkpoint,
    cluster,
    dashboard,
    demo,
    generate,
    job,
    leaving,
    ledger,
    maintenance,
    moving,
    operator,
    processes,
    reconfig,
    run,
    savepoint,
    source,
    spark,
    stages,
    state,
    sweeps,
    token,
):
    app.add_typer(module.app)
app.add_typer(agents.agents)


def _say_version(wanted: bool) -> None:
    if wanted:
        console.print(f"stateflow {VERSION}\n{_beside()}", highlight=False)
        raise typer.Exit


def _beside() -> str:
    """What it runs with. Nothing of it is imported for that."""
    found = [f"Python {platform.python_version()}"]
    for name, package in (("Spark", "pyspark"), ("rocksdict", "rocksdict")):
        try:
            found.append(f"{name} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # Spark comes with an extra
            found.append(f"no {name}")
    return ", ".join(found)


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """Stateful stream operators whose state can move while the pipeline runs."""


def main() -> None:
    show_everything()
    try:
        with telling():
            app()
    except typer.Exit as ended:  # what failed was telling of it
        sys.exit(ended.exit_code)
