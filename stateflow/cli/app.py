"""The ``stateflow`` command. Each command is a thin shell around the library: parse, call, show."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from stateflow import __version__
from stateflow.cli import (
    agents,
    batch,
    checkpoint,
    cluster,
    demo,
    generate,
    job,
    leaving,
    ledger,
    moving,
    processes,
    reconfig,
    run,
    savepoint,
    source,
    spark,
    stages,
    state,
)
from stateflow.cli.group import Commands
from stateflow.cli.output import console, telling

app = Commands(help="Stateful stream operators whose state can move while the pipeline runs.")
for module in (run, moving, leaving, processes, agents, generate, cluster, demo):  # in the order of `stateflow --help`
    app.add_typer(module.app)
for module in (ledger, stages, batch, checkpoint, savepoint, state, source, spark, reconfig, job):
    app.add_typer(module.app)
app.add_typer(agents.agents)


def _say_version(wanted: bool) -> None:
    if wanted:
        console.print(f"stateflow {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Stateful stream operators whose state can move while the pipeline runs."""


def main() -> None:
    try:
        with telling():
            app()
    except typer.Exit as ended:  # what failed was telling of it
        sys.exit(ended.exit_code)
