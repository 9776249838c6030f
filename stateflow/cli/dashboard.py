"""``stateflow dashboard``: the live page of a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Insecure, Json, console, emit, log_to_stderr
from stateflow.cli.processes import STOP_S, stop_on_signal
from stateflow.private import url_of
from stateflow.settings.base import check_variables

app = Commands()


@app.command()
def dashboard(
    controller: Controller = LOCAL,
    listen: Annotated[str, typer.Option(help="host:port of the page; port 0 picks a free one.")] = "127.0.0.1:7071",
    ledger: Annotated[
        str,
        typer.Option(
            envvar="STATEFLOW_LEDGER",
            help="SQLAlchemy URL, or @FILE that holds it: to show batches and search records.",
        ),
    ] = "",
    checkpoints: Annotated[
        str,
        typer.Option(
            envvar="STATEFLOW_CHECKPOINTS",
            help="Checkpoint store to show: directory or fsspec URL, or @FILE that holds it.",
        ),
    ] = "",
    cert: Annotated[
        Path | None, typer.Option(envvar="STATEFLOW_DASHBOARD_CERT", help="Certificate that browsers accept, PEM.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(envvar="STATEFLOW_DASHBOARD_KEY", help="Private key of --cert, PEM.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Name by which browsers reach the page, if not in --cert; repeatable.")
    ] = None,
    insecure: Insecure = False,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Serve the live page of a cluster: sites, replicas, and partitions that move between them."""
    # SQLAlchemy and a web server, which no other command needs
    from stateflow.dashboard import Dashboard, DashboardOptions

    log_to_stderr(verbose, "dashboard")
    check_variables()
    options = DashboardOptions(
        controller,
        listen,
        cert,
        key,
        tuple(host or ()),
        url_of(ledger) if ledger else None,
        url_of(checkpoints) if checkpoints else None,
    )

    async def run(page: Dashboard) -> None:
        stop = stop_on_signal(False, STOP_S)
        if as_json:
            emit({"url": page.url})
        else:
            console.print(Text.assemble("the dashboard is at ", (page.url, "bold"), " (Ctrl-C ends it)"))
        await stop.wait()

    with Dashboard(options) as page:
        asyncio.run(run(page))
