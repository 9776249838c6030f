"""``stateflow init``, ``stateflow examples`` and ``stateflow doctor``: the first minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit
from stateflow.cli.show import new_table, titled

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
    """Write a small project that runs at once: an operator, its test, a pipeline, data, and how to go on."""
    from stateflow.project.writing import example_named, write_project

    chosen = None if example is None else example_named(example)
    written = write_project(directory, chosen)
    if as_json:
        emit({"directory": str(directory), "files": [path.name for path in written]})
        return
    console.print(Text(f"{directory}: {', '.join(path.name for path in written)}"), soft_wrap=True)
    run = "stateflow run pipeline.yml --once" if chosen is None else chosen.run
    console.print(Text(f"  cd {directory}\n  {run}"), soft_wrap=True)


@app.command()
def examples(as_json: Json = False) -> None:
    """List the examples that `stateflow init --example` writes: what each shows, and which states it uses."""
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
    """Check whether everything that stateflow needs is here, and say what to do. Status 1 where something is wrong."""
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
