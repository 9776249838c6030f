"""``stateflow demo``: the demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stateflow.cli.group import Commands
from stateflow.cli.output import Json, emit, milliseconds
from stateflow.errors import InvalidArgument

app = Commands()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the report.")] = Path("demo-out"),
    rows: Annotated[
        int | None, typer.Option(help="Number of flights to process; default: as many as time allows.", min=1000)
    ] = None,
    max_pause: Annotated[
        str | None,
        typer.Option(help="Pause budget of every move. Default: 250ms, more if that is refused; with --follow 50ms."),
    ] = None,
    source: Annotated[str, typer.Option(help="Source of the rows: files or jetstream.")] = "files",
    nats: Annotated[
        str, typer.Option(envvar="STATEFLOW_NATS_URL", help="Server of --source jetstream.")
    ] = "nats://127.0.0.1:4222",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Vehicles drive between three sites, and the autopilot moves their state after them."
        ),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="With --follow: duration of the drive, in seconds. Default: 60.", min=6, max=3600),
    ] = None,
    rtt: Annotated[
        str | None, typer.Option(help="With --follow: round-trip time between sites. Default: 40ms.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the whole story on this machine: real flights, five processes, moves while it streams, a crash, the proof."""
    from stateflow.demo.extras import check_extras
    from stateflow.demo.surroundings import ProgressPrinter, console_of

    check_extras()
    loading = ProgressPrinter(console_of(as_json)).of("loading modules")
    if follow:
        if rows is not None or source != "files":
            raise InvalidArgument(
                "--rows and --source do not apply with --follow", remedy="leave out either them or --follow"
            )
        with loading:
            from stateflow.demo.follow.run import FollowOptions, run_follow

        budget_ms = milliseconds(max_pause or "50ms")
        drive = run_follow(
            FollowOptions(out, seconds or 60.0, milliseconds(rtt or "40ms"), budget_ms), tell_stderr=as_json
        )
        if as_json:
            emit(drive.summary())
        if not drive.held:
            raise typer.Exit(1)
        return
    if seconds is not None or rtt is not None:
        raise InvalidArgument("--seconds and --rtt require --follow", remedy="add --follow")
    if source not in ("files", "jetstream"):
        raise InvalidArgument(f"unknown source of flights: {source!r}", remedy="use --source files or jetstream")
    with loading:
        from stateflow.demo.run import DemoOptions, run_demo

    nats_url = nats if source == "jetstream" else None
    max_pause_ms = None if max_pause is None else milliseconds(max_pause)
    options = DemoOptions(out=out, rows=rows, max_pause_ms=max_pause_ms, nats_url=nats_url)
    result = run_demo(options, tell_stderr=as_json)
    if as_json:
        emit(result.summary())
    if not result.held:
        raise typer.Exit(1)
