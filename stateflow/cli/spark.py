"""``stateflow spark``: what Spark queries need beside their own tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stateflow.cli.group import Commands
from stateflow.cli.output import Json, console, emit

app = Commands("spark", help="Spark queries: their executors and checkpoints.")


@app.command()
def package(
    out: Annotated[Path, typer.Argument(help="Zip file to write.")],
    as_json: Json = False,
) -> None:
    """Write stateflow itself as a zip, for `spark-submit --py-files`. What it requires is not in it."""
    from stateflow.spark.package import package as write_package

    written = write_package(out)
    if as_json:
        emit(written.to_dict())
        return
    console.print(
        f"stateflow {written.version}, {written.modules} modules, compiled for Python {written.python}: {written.file}",
        highlight=False,
    )
    console.print(f"spark-submit --py-files {written.file} …", highlight=False)
    console.print("the executors' Python also needs:")
    for each in written.requires:
        console.print(f"  {each}", highlight=False, markup=False)


@app.command()
def rewind(
    directory: Annotated[Path, typer.Argument(help="checkpointLocation of the query, which must be stopped.")],
    to_batch: Annotated[int, typer.Option("--to-batch", help="Batch that the query sends next.")],
    sink: Annotated[Path | None, typer.Option(help="Directory of the query's file sink, if it has one.")] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the change; without it, only show what would be done.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put a stopped query back to a batch. Nothing is deleted: what is taken out is kept in _rewound/."""
    from stateflow.spark.rewind import rewind as rewind_query

    plan = rewind_query(directory, to_batch, sink=sink, apply=apply)
    if as_json:
        emit({**plan.to_dict(), "applied": apply})
        return
    done = "moved to _rewound/" if apply else "would be moved to _rewound/"
    for name in (*plan.moved, *plan.sink_moved):
        console.print(f"  {name}", highlight=False)
    console.print(f"{len(plan.moved) + len(plan.sink_moved)} files {done}; batch {to_batch} is sent next")
    if not apply:
        console.print("dry run: repeat the command with --apply")
