"""Commands for Spark. ``stateflow run`` runs a pipeline from a file; ``stateflow spark`` packages stateflow for
executors, and rewinds queries.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from stateflow.cli.group import Commands
from stateflow.cli.output import Json, console, emit, waiting
from stateflow.errors import InvalidArgument

if TYPE_CHECKING:
    from stateflow.spark import OperatorMetrics, Seconds
    from stateflow.spark.pipeline import Progress

app = Commands()


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="Pipeline file, e.g. pipeline.yml.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter; repeatable.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Process the existing input, then exit.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the effective configuration and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of text.")] = False,
) -> None:
    """Run a declared pipeline of a source, operators and a sink. Ctrl-C or SIGTERM stops it; the next run continues."""
    from stateflow.spark.pipeline import load_pipeline, run_pipeline

    pipeline = load_pipeline(file, dict(map(_setting, settings or ())), os.environ)
    if show:
        import yaml

        if as_json:
            emit(pipeline.shown)
        else:
            print(yaml.safe_dump(pipeline.shown, sort_keys=False, allow_unicode=True), end="")
        return
    stop = threading.Event()
    starting = contextlib.ExitStack()

    def started() -> None:
        starting.close()
        for number in (signal.SIGINT, signal.SIGTERM):  # only now, because Spark has set its own handlers before
            signal.signal(number, lambda *_: stop.set())
        if not as_json:
            console.print(f"{pipeline.config.name} is running (Ctrl-C stops it)", highlight=False)

    def tell(progress: Progress) -> None:
        metrics = progress.metrics
        if as_json:
            operators = [] if metrics is None else [each.to_dict() for each in metrics.operators]
            emit(
                {
                    "batch": progress.batch,
                    "rows": progress.rows,
                    "duration_ms": progress.duration_ms,
                    "rows_per_s": round(progress.rows_per_s, 1),
                    "rows_total": progress.rows_total,
                    "batches_total": progress.batches_total,
                    **({} if metrics is None else metrics.seconds.to_dict()),
                    "operators": operators,
                }
            )
        else:
            spent = "" if metrics is None else f"; {_spent(metrics.seconds)}"
            console.print(
                f"batch {progress.batch}: {progress.rows:,} rows in {progress.duration_ms / 1000:.1f} s, "
                f"{progress.rows_per_s:,.0f} rows/s; {progress.rows_total:,} rows in total{spent}",
                highlight=False,
                soft_wrap=True,
            )

    with starting:
        starting.enter_context(waiting(f"starting Spark for {pipeline.config.name}", as_json=as_json))
        outcome = run_pipeline(pipeline, once=once, stop=stop, tell=tell, started=started)
    how = "stopped" if outcome.stopped else "done before" if outcome.done_before else "finished"
    if as_json:
        operators = [each.to_dict() for each in outcome.operators]
        emit({"state": how, "rows": outcome.rows, "batches": outcome.batches, "operators": operators})
    else:
        counted = "" if outcome.rows is None else f": {outcome.rows:,} rows in {outcome.batches} batches"
        again = "; already recorded in the ledger, nothing was run again" if outcome.done_before else ""
        console.print(f"{how}{counted}{again}", highlight=False, soft_wrap=True)
        if outcome.operators:
            console.print(_table(outcome.operators))


def _spent(seconds: Seconds) -> str:
    parts = {"spark": seconds.spark, "routing": seconds.routing, "rpc": seconds.rpc}
    parts |= {"operator": seconds.operator, "commit": seconds.commit}
    return "ms in " + ", ".join(f"{part} {spent * 1e3:,.0f}" for part, spent in parts.items())


def _table(operators: Iterable[OperatorMetrics]) -> RenderableType:
    from stateflow.cli.show import new_table, titled

    parts = "spark", "routing", "rpc", "operator", "commit"
    table = new_table("name", "rows", "tasks", *parts, numbers=("rows", "tasks", *parts))
    for each in operators:
        name = each.operator if each.source is None else f"{each.operator} ({each.source})"
        spent = (f"{getattr(each.seconds, part):,.2f}" for part in parts)
        table.add_row(name, f"{each.rows:,}", f"{each.tasks:,}", *spent)
    return titled("Operators, seconds summed over all tasks", table)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"{text!r} is not of the form NAME=VALUE", remedy="write --set name=value")
    return name, value


spark_commands = Commands("spark", help="Spark queries: their executors and checkpoints.")
app.add_typer(spark_commands)


@spark_commands.command()
def package(
    out: Annotated[Path, typer.Argument(help="Zip file to write.")],
    as_json: Json = False,
) -> None:
    """Write the package stateflow as a zip for `spark-submit --py-files`, without the packages that it requires."""
    from stateflow.spark.session import write_package

    written = write_package(out)
    if as_json:
        emit(written.to_dict())
        return
    console.print(
        f"stateflow {written.version}, {written.modules} modules, compiled for Python {written.python}: {written.file}",
        highlight=False,
    )
    console.print(f"spark-submit --py-files {shlex.quote(str(written.file))} …", highlight=False, soft_wrap=True)
    console.print("the executors' Python also needs:")
    for each in written.requires:
        console.print(f"  {each}", highlight=False, markup=False)


@spark_commands.command()
def rewind(
    directory: Annotated[Path, typer.Argument(help="checkpointLocation of the query, which must be stopped.")],
    to_batch: Annotated[int, typer.Option("--to-batch", help="Batch that the query sends next.")],
    sink: Annotated[Path | None, typer.Option(help="Directory of the query's file sink, if it has one.")] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the change; without it, only show what would be done.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Set a stopped query back to an earlier batch. Files of later batches are moved to _rewound/; none is deleted."""
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
