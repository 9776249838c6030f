"""``stateflow ledger`` and ``stateflow stages``: what was decided and done, and what stands in the way.

The ledger is imported where it is opened: SQLAlchemy takes as long to import as a replica takes for all else.
"""

from __future__ import annotations

import dataclasses
import getpass
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from stateflow.cli.output import command, console, emit
from stateflow.cli.show import new_table, titled
from stateflow.errors import IllegalRecord, InvalidArgument

if TYPE_CHECKING:
    from stateflow.ledger import Item, Ledger, Record, StateManager

ledger = typer.Typer(no_args_is_help=True, help="Items and their records: what was decided and done.")
stages = typer.Typer(no_args_is_help=True, help="Stages of pipelines: what moved from which source to which sink.")
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]
Url = Annotated[str, typer.Option("--ledger", envvar="STATEFLOW_LEDGER", help="SQLAlchemy URL.")]
ItemId = Annotated[str, typer.Argument(metavar="ITEM")]
DEFAULT = "sqlite:///ledger.db"
TAIL_INTERVAL_S = 1.0
_STATE_STYLES = {
    "FAILED": "bold red",
    "PROCESSED": "green",
    "PROCESSING": "yellow",
    "success": "green",
    "failure": "red",
}


@contextmanager
def _opened(url: str) -> Iterator[Ledger]:
    """Commands look at a ledger that is there; they never make one where a name was misspelt."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from stateflow.ledger import Ledger

    try:
        parsed = make_url(url)
        file = parsed.database if parsed.get_backend_name() == "sqlite" else None
    except (ArgumentError, ValueError):
        file = None  # the ledger says what is wrong with it
    if file and not file.startswith("file:") and file != ":memory:" and not Path(file).exists():
        raise InvalidArgument("there is no ledger", remedy="name it with --ledger or STATEFLOW_LEDGER", file=file)
    with Ledger(url, author=f"{getpass.getuser()[:100]} (command line)") as opened:
        yield opened


def _stages_of(opened: Ledger) -> StateManager:
    from stateflow.ledger import StateManager

    return StateManager(opened)


# -- items ----------------------------------------------------------------------------------------------------


@ledger.command("show")
@command
def show(
    item: Annotated[str | None, typer.Argument(metavar="ITEM", help="One item with its records; else a list.")] = None,
    state: Annotated[str | None, typer.Option(help="Only items in this state.")] = None,
    processed_by: Annotated[str | None, typer.Option(help="Only items this application has processed.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many items.", min=1)] = 100,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Show one item with its records, or a list of items."""
    with _opened(url) as opened:
        if item is not None:
            found = opened.item(item)
            if found is None:
                raise IllegalRecord("there is no such item", remedy="list them with `stateflow ledger show`", item=item)
            emit(_item(found)) if as_json else console.print(_one_item(found))
            return
        ids = opened.fetch(processed_by, state)
        items = opened.items(ids[:limit])
    if as_json:
        emit({"total": len(ids), "items": [_item(each, records=False) for each in items]})
    else:
        console.print(_many_items(items, len(ids)))


@ledger.command("resolve")
@command
def resolve(
    item: ItemId,
    note: Annotated[str, typer.Option(help="What you did about it; kept in the record.")],
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Say that what blocks an item was dealt with; it can be processed again."""
    with _opened(url) as opened:
        _written(opened.resolve(item, note), as_json)


@ledger.command("skip")
@command
def skip(
    item: ItemId,
    app: Annotated[str, typer.Option(help="The application that must leave it alone; * for all.")] = "*",
    note: Annotated[str | None, typer.Option(help="Why; kept in the record.")] = None,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Have an application, or all, leave an item alone from now on."""
    with _opened(url) as opened:
        _written(opened.skip(item, app, note), as_json)


@ledger.command("verify")
@command
def verify(url: Url = DEFAULT, as_json: Json = False) -> None:
    """Check every record and everything derived from them. Status 1 when there is a fault."""
    with _opened(url) as opened:
        faults = opened.verify()
    if as_json:
        emit({"faults": [dataclasses.asdict(fault) for fault in faults]})
    elif faults:
        rows = new_table("fault", "item", "record", "what", numbers=("record",))
        for fault in faults:
            record = "" if fault.record_id is None else str(fault.record_id)
            rows.add_row(Text(fault.code, "red"), Text(fault.item_id or ""), record, Text(fault.what))
        console.print(titled(f"{len(faults)} faults", rows))
    else:
        console.print("the ledger is sound")
    if faults:
        raise typer.Exit(1)


@ledger.command("archive")
@command
def archive(
    older_than: Annotated[str, typer.Option(help="Age of the newest record, e.g. 90d, 12h, 30m.")],
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Put away the records of items that are done; what is open stays."""
    age = _age(older_than)
    with _opened(url) as opened:
        count = opened.archive(age)
    emit({"archived": count}) if as_json else console.print(f"{count} items archived")


@ledger.command("tail")
@command
def tail(
    lines: Annotated[int, typer.Option("--lines", "-n", help="The newest so many records.", min=0)] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And those that come, until Ctrl-C.")] = False,
    url: Url = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per record.")] = False,
) -> None:
    """Show the newest records, and with -f those that come."""
    with _opened(url) as opened:
        newest = opened.newest_record_id()
        after = max(0, newest - lines)
        while True:
            for record in opened.records(after=after):
                after = record.record_id
                emit(_record(record)) if as_json else console.print(_line(record), soft_wrap=True)
            if not follow:
                return
            sleep(TAIL_INTERVAL_S)


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is no age", remedy="write 90d, 12h, 30m or 10s")
    try:
        return timedelta(seconds=float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]])
    except OverflowError:
        raise InvalidArgument(f"{text!r} is too long", remedy="write 90d, 12h, 30m or 10s") from None


def _time(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _app(record: Record) -> str:
    instance = f" [{record.app.instance}]" if record.app.instance else ""
    return f"{record.app.name} {record.app.version}{instance}".strip()


def _record(record: Record) -> dict[str, Any]:
    return dataclasses.asdict(record) | {"state": str(record.state)}


def _item(item: Item, *, records: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {
        "item_id": item.item_id,
        "kind": item.kind.value,
        "state": str(item.state),
        "blocking_record_id": item.blocking.record_id if item.blocking else None,
        "archived": item.archived,
        "faults": [dataclasses.asdict(fault) for fault in item.faults],
    }
    return found | ({"records": [_record(record) for record in item.records]} if records else {})


def _styled(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, ""))


def _line(record: Record) -> Text:
    said = "" if record.payload is None else str(record.payload)
    line = Text(f"{record.record_id:>8}  {_time(record.timestamp_us)}  ")
    return line.append(_styled(f"{record.state:<10}")).append(f"  {record.item_id}  {_app(record)}  {said[:120]}")


def _one_item(item: Item) -> RenderableType:
    rows = new_table(
        "record", "time (UTC)", "state", "answers", "application", "author", "payload", numbers=("record",)
    )
    for record in item.records:
        rows.add_row(
            str(record.record_id),
            _time(record.timestamp_us),
            _styled(str(record.state)),
            str(record.previous_record_id or ""),
            Text(_app(record)),
            Text(record.author),
            Text("" if record.payload is None else str(record.payload)),
        )
    title = f"{item.item_id}: {item.state}"
    if item.blocking is not None:
        title += f", blocked by record {item.blocking.record_id}"
    faults = [Text(f"{fault.code}: {fault.what}", "red") for fault in item.faults]
    return Group(titled(title + (", archived" if item.archived else ""), rows), *faults)


def _many_items(items: list[Item], total: int) -> RenderableType:
    rows = new_table("item", "state", "blocked by", "records", "newest (UTC)", numbers=("blocked by", "records"))
    for item in items:
        blocked = str(item.blocking.record_id) if item.blocking else ""
        newest = _time(item.records[-1].timestamp_us)
        rows.add_row(Text(item.item_id), _styled(str(item.state)), blocked, str(len(item.records)), newest)
    more = f", the first {len(items)} of them" if len(items) < total else ""
    return titled(f"{total} items{more}", rows)


def _written(record: Record, as_json: bool) -> None:
    emit(_record(record)) if as_json else console.print(_line(record), soft_wrap=True)


# -- stages ---------------------------------------------------------------------------------------------------


@stages.command("current")
@command
def current(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    entity: Annotated[str | None, typer.Option(help="Only of this source or sink entity.")] = None,
    entity_filter: Annotated[str | None, typer.Option("--filter", help="Only with this filter.")] = None,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """The newest stage of a job: what it does now, or where it stopped."""
    with _opened(url) as opened:
        found = _stages_of(opened).get_current_state(job, entity, entity_filter)
    if found is None:
        raise IllegalRecord("the job has no such stage", remedy="see `stateflow stages history`", job=job)
    _answer(found, as_json)


@stages.command("history")
@command
def history(
    job: Annotated[str | None, typer.Option(help="Only of this job.")] = None,
    limit: Annotated[int, typer.Option(help="The newest so many.", min=1)] = 50,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Stages that have not failed, oldest first."""
    with _opened(url) as opened:
        _many_stages(_stages_of(opened).get_processing_history(job, limit=limit), as_json)


@stages.command("last")
@command
def last(entity: Annotated[str, typer.Argument(metavar="ENTITY")], url: Url = DEFAULT, as_json: Json = False) -> None:
    """The newest stage that pulled an entity and was pushed with success."""
    with _opened(url) as opened:
        found = _stages_of(opened).get_last_record(entity)
    if found is None:
        raise IllegalRecord("nothing of it was pushed yet", remedy="see `stateflow stages history`", entity=entity)
    _answer(found, as_json)


@stages.command("trace")
@command
def trace(
    correlation: Annotated[str, typer.Argument(metavar="CORRELATION_ID")], url: Url = DEFAULT, as_json: Json = False
) -> None:
    """Every stage that the data of a correlation id went through."""
    with _opened(url) as opened:
        rows = _stages_of(opened).trace(correlation)
    if not rows:
        raise IllegalRecord(
            "no stage has this correlation id", remedy="see `stateflow stages history`", correlation_id=correlation
        )
    _many_stages(rows, as_json)


def _answer(stage: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(stage)
        return
    rows = new_table("field", "value")
    for name, value in stage.items():
        rows.add_row(name, Text("" if value is None else str(value)))
    console.print(titled(f"stage {stage['state_id']}", rows))


def _many_stages(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        emit({"stages": rows})
        return
    shown = new_table("stage", "job", "action", "status", "from", "to", "rows", "updated (UTC)", numbers=("rows",))
    for row in rows:
        source = " ".join(filter(None, (row["source_name"], row["source_entity"])))
        sink = " ".join(filter(None, (row["sink_name"], row["sink_entity"])))
        shown.add_row(
            Text(row["state_id"]),
            Text(row["job_id"] or ""),
            row["action"],
            _styled(row["status"]),
            Text(source),
            Text(sink),
            "" if row["row_count"] is None else str(row["row_count"]),
            row["updated_on"].strftime("%Y-%m-%d %H:%M:%S"),
        )
    console.print(titled(f"{len(rows)} stages", shown))
