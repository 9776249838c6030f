"""Commands on state and sources. ``stateflow state`` reads the state of a live cluster or of a checkpoint, while the
cluster goes on. ``stateflow source`` shows the sources of an operator, and drops data that is stored for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, errors, savepoint_of, size, waiting
from stateflow.client import Cluster
from stateflow.client.commands import entries_under
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, StateflowError
from stateflow.operator.arrow import read_table
from stateflow.operator.operator import load
from stateflow.operator.timers import to_datetime
from stateflow.partition.entries import joined
from stateflow.private import url_of
from stateflow.types import shown

app = Commands()


state_commands = Commands("state", help="Read state, of a live cluster or of a checkpoint.")
app.add_typer(state_commands)
Operator = Annotated[str, typer.Argument(help="Name of the operator.")]
State = Annotated[str, typer.Argument(help="Name of the state: its attribute's name or its tag.")]
From = Annotated[str, typer.Option("--from", help="Checkpoint store to read instead of the cluster.")]
Savepoint = Annotated[str | None, typer.Option(help="With --from: a savepoint instead of the newest checkpoints.")]
_KEY = (
    "Key. Text is written as it is; other types as in 7, 2013-01-01, 2013-01-01T05:00:00Z, 0xff, true; several columns "
    'as in ["a", 1].'
)
Incomplete = Annotated[
    bool, typer.Option("--incomplete", help="With --from: skip partitions that cannot be read, and name them.")
]
Target = Annotated[
    str, typer.Option("--class", help="With --from: the operator's class, module:Class, if it has moved.")
]


def _pages(
    operator: str,
    state: str,
    controller: str,
    url: str,
    savepoint: str | None,
    target: str,
    lacking: list[StateflowError] | None,
    key: Any = None,
) -> Iterator[bytes]:
    """Returns pages of a state, from the cluster, or from checkpoints in the store at ``url``.

    Args:
        url: URL of a checkpoint store; empty: the cluster is read.
        lacking: list to which errors of unreadable partitions are added; None: such an error is raised.
        key: only entries of this key; None: all entries.
    """
    name = savepoint_of(savepoint)
    if not url:
        if name or target or lacking is not None:
            raise InvalidArgument(
                "--savepoint, --class and --incomplete require --from", remedy="name the checkpoint store with --from"
            )
        return Cluster(controller).scan_state(operator, state, key)
    # not needed to read a live cluster
    from stateflow.checkpoint import CheckpointStore
    from stateflow.partition.checkpoints import read_checkpoint

    store = CheckpointStore(url_of(url), create=False)
    cls = load(target) if target else None
    return read_checkpoint(store, operator, state, savepoint=name, key=key, cls=cls, lacking=_telling(lacking))


def _telling(lacking: list[StateflowError] | None) -> Callable[[StateflowError], None] | None:
    return None if lacking is None else lacking.append


@state_commands.command()
def get(
    operator: Operator,
    state: State,
    key: Annotated[str, typer.Argument(help=_KEY)],
    controller: Controller = LOCAL,
    url: From = "",
    savepoint: Savepoint = None,
    target: Target = "",
    incomplete: Incomplete = False,
    as_json: Json = False,
) -> None:
    """Show the entries of one key. Exits with status 1 if there are none."""
    lacking: list[StateflowError] | None = [] if incomplete else None
    found = entries_under(
        key, lambda meant: _pages(operator, state, controller, url, savepoint, target, lacking, meant)
    )
    if lacking is not None:  # each meaning of the key may belong to another partition
        lacking[:] = {str(error): error for error in lacking}.values()
    if found is None and not as_json:
        _warn(lacking)
    else:
        _show([] if found is None else found.to_pylist(), lacking, as_json)
    if found is None:
        said = f"{state} of {operator} has no entry for the key {shown(key)}: see `stateflow state scan`"
        errors.print(Text(said), highlight=False)
        raise typer.Exit(1)


@state_commands.command()
def scan(
    operator: Operator,
    state: State,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 100,
    controller: Controller = LOCAL,
    url: From = "",
    savepoint: Savepoint = None,
    target: Target = "",
    incomplete: Incomplete = False,
    as_json: Json = False,
) -> None:
    """Show the first entries of a state."""
    rows: list[dict[str, Any]] = []
    lacking: list[StateflowError] | None = [] if incomplete else None
    for page in _pages(operator, state, controller, url, savepoint, target, lacking):
        rows += read_table(page).to_pylist()
        if len(rows) >= limit:
            break
    _show(rows[:limit], lacking, as_json)


def _show(rows: list[dict[str, Any]], lacking: list[StateflowError] | None, as_json: bool) -> None:
    if as_json:
        emit({"entries": rows, **_said(lacking)})
        return
    _warn(lacking)
    columns = list(rows[0]) if rows else joined([]).column_names
    table = show.new_table(*columns)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in columns))
    console.print(table)


@state_commands.command()
def export(
    operator: Operator,
    state: State,
    out: Annotated[Path, typer.Option("--out", help="File to write, .parquet or .arrow.")],
    controller: Controller = LOCAL,
    url: From = "",
    savepoint: Savepoint = None,
    target: Target = "",
    incomplete: Incomplete = False,
    as_json: Json = False,
) -> None:
    """Write all entries of a state into a Parquet or Arrow file."""
    if out.suffix not in (".parquet", ".arrow"):
        raise InvalidArgument(f"{out.name!r} has no known format", remedy="use the suffix .parquet or .arrow")
    if not out.absolute().parent.is_dir():
        raise InvalidArgument("the directory does not exist", remedy="create it first", path=out.parent)
    if out.is_dir():
        raise InvalidArgument("a directory has this name", remedy="name a file with --out", path=out)
    lacking: list[StateflowError] | None = [] if incomplete else None
    with waiting(f"reading {state} of {operator}", as_json=as_json):
        rows = export_pages(_pages(operator, state, controller, url, savepoint, target, lacking), out)
    if as_json:
        emit({"rows": rows, "bytes": out.stat().st_size, "path": str(out), **_said(lacking)})
    else:
        _warn(lacking)
        console.print(f"{rows} entries, {size(out.stat().st_size)}, in {out}")


def _said(lacking: list[StateflowError] | None) -> dict[str, Any]:
    return {} if lacking is None else {"lacking": [error.to_wire() for error in lacking]}


def _warn(lacking: list[StateflowError] | None) -> None:
    for error in lacking or ():
        errors.print(Text(f"skipped: {error}", "red"))


def export_pages(pages: Iterator[bytes], out: Path) -> int:
    """Writes pages into a file. Returns the number of rows.

    The types of the columns are known only after the last page, so all pages are first written to temporary files.
    Memory holds one page at a time.
    """
    with tempfile.TemporaryDirectory(prefix="stateflow-export-") as folder:
        spooled: list[Path] = []
        schemas: list[pa.Schema] = []
        for page in pages:
            path = Path(folder) / str(len(spooled))
            path.write_bytes(page)
            spooled.append(path)
            schemas.append(read_table(page).schema)
        schema = pa.unify_schemas(schemas or [joined([]).schema], promote_options="permissive")
        temporary = out.with_name(out.name + ".new")
        rows = 0
        try:
            with _writer(temporary, schema, out.suffix) as writer:
                for path in spooled:
                    table = read_table(path.read_bytes()).cast(schema)
                    writer.write_table(table)
                    rows += table.num_rows
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return rows


def _writer(path: Path, schema: pa.Schema, suffix: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetWriter(path, schema) if suffix == ".parquet" else pa.ipc.new_file(path, schema)


source_commands = Commands("source", help="Sources of an operator: queries, batch runs, stream clients.")
app.add_typer(source_commands)


@source_commands.command("list")
def list_(
    operator: Operator,
    limit: Annotated[int, typer.Option(help="Number of newest sources; 0: all.", min=0)] = 50,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """List each source's newest batch, its age, its watermark, and the data kept for the source."""
    found = Cluster(controller).sources(operator)
    shown = found[-limit:] if limit else found
    if as_json:
        emit({"sources": [each.to_dict() for each in shown]})
        return
    columns = ("source", "batch", "idle", "partitions", "kept", "watermark", "")
    table = show.new_table(*columns, numbers=("batch", "idle", "kept"))
    now_us = SYSTEM_CLOCK.now_us()
    for each in shown:
        idle = timedelta(seconds=max(0, now_us - each.at_us) // 1_000_000) if each.at_us else "?"
        state = Text("retired", "dim") if each.retired else Text()
        if each.holds:
            state = Text("holds the watermark back", "yellow")
        batch = "" if each.batch < 0 else str(each.batch)
        kept, watermark = size(each.bytes), _moment(each.watermark_us)
        table.add_row(Text(each.source), batch, str(idle), str(each.partitions), kept, watermark, state)
    console.print(table)
    if len(found) > len(shown):
        console.print(f"{len(found) - len(shown)} more, silent for longer: --limit 0 shows all")


def _moment(micros: int | None) -> str:
    return "" if micros is None else f"{to_datetime(micros):%Y-%m-%d %H:%M:%S}"


@source_commands.command()
def retire(
    operator: Operator,
    source: Annotated[str, typer.Argument(help="Name of the source, as printed by `stateflow source list`.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Drop a source's stored output and its watermark; keep only the number of its newest batch."""
    partitions = Cluster(controller).retire_source(operator, source)
    if as_json:
        emit({"operator": operator, "source": source, "partitions": partitions})
    else:
        console.print(f"{source} retired in {partitions} partitions; if it sends again, it continues where it was")


@source_commands.command("drop-output")
def drop_output(
    operator: Operator,
    source: Annotated[str, typer.Argument(help="Name of the source, as printed by `stateflow source list`.")],
    batch: Annotated[int, typer.Option(help="Batch that the query repeats, as named in its error.", min=0)],
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the change; without it, only show what would be done.")
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Drop a batch's stored output that cannot be read, so that its query can continue. The state keeps the batch's
    effects; the batch's output rows reach no sink."""
    report = Cluster(controller).drop_output(operator, source, batch, apply=apply)
    if as_json:
        emit(report.to_dict())
        return
    count = f"{len(report.sizes)} partition{'s' if len(report.sizes) > 1 else ''}"
    done = "was dropped" if apply else "would be dropped"
    console.print(
        f"the output of batch {batch}, {size(sum(report.sizes.values()))} in {count}, {done}", highlight=False
    )
    console.print("the state keeps the batch's effects; a retry returns no rows, and the query continues after it")
    if not apply:
        console.print("dry run: repeat the command with --apply")
