"""``stateflow demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stateflow.cli.group import Commands
from stateflow.cli.options import Json, milliseconds
from stateflow.cli.output import emit
from stateflow.errors import InvalidArgument

app = Commands()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("demo-out"),
    rows: Annotated[int | None, typer.Option(help="Replay only the first so many flights.", min=1000)] = None,
    max_pause: Annotated[str, typer.Option(help="Budget of every move: raise it on a busy machine.")] = "250ms",
    source: Annotated[str, typer.Option(help="files or jetstream.")] = "files",
    nats: Annotated[
        str, typer.Option(envvar="STATEFLOW_NATS_URL", help="The server of --source jetstream.")
    ] = "nats://127.0.0.1:4222",
    as_json: Json = False,
) -> None:
    """The whole story on this machine: real flights, five processes, moves while it streams, a crash, and the proof."""
    from stateflow.demo.extras import check_extras

    check_extras()
    from stateflow.demo.run import DemoOptions, run_demo

    if source not in ("files", "jetstream"):
        raise InvalidArgument(f"the flights cannot come from {source!r}", remedy="use --source files or jetstream")
    nats_url = nats if source == "jetstream" else None
    options = DemoOptions(out=out, rows=rows, max_pause_ms=milliseconds(max_pause), nats_url=nats_url)
    result = run_demo(options, tell_stderr=as_json)
    if as_json:
        emit(result.summary())
    if not result.held:
        raise typer.Exit(1)
