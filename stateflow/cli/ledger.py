"""Commands on the ledger. ``stateflow ledger`` shows items, their records, and what blocks them. ``stateflow stages``
shows the stages in which data moves from a source to a sink, and where they stopped.

The module ``stateflow.ledger`` is imported only when a ledger is opened, because importing SQLAlchemy takes as long as
all other imports of a replica.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from stateflow.cli.group import Commands
from stateflow.cli.output import Json, console, default_ledger, emit, shown_time
from stateflow.cli.show import new_table, plain, titled
from stateflow.errors import IllegalRecord, InvalidArgument
from stateflow.private import UMASK, keep_private, url_of

if TYPE_CHECKING:
    from stateflow.ledger import Item, Ledger, Record, StateManager

app = Commands()


#: first bytes of a SQLite database, see https://www.sqlite.org/fileformat.html
SQLITE = b"SQLite format 3\0"

ledger_commands = Commands("ledger", help="The ledger: items and their records.")
app.add_typer(ledger_commands)
Url = Annotated[
    str,
    typer.Option(
        "--ledger",
        envvar="STATEFLOW_LEDGER",
        help="SQLAlchemy URL of the ledger, or @FILE that holds it.",
        show_default="the ledger of this user's controller",
    ),
]
ItemId = Annotated[str, typer.Argument(metavar="ITEM")]
DEFAULT = ""
TAIL_INTERVAL_S = 1.0
_STATE_STYLES = {
    "FAILED": "bold red",
    "PROCESSED": "green",
    "PROCESSING": "yellow",
    "success": "green",
    "failure": "red",
}


def _file_of(url: str) -> Path | None:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    from stateflow.ledger.database import file_of

    try:
        return file_of(make_url(url))
    except (ArgumentError, ValueError, NoSuchModuleError):
        return None  # opening the ledger reports what is wrong with the URL


def check_outlasts(url: str) -> None:
    """Checks that a new ledger would outlast this process. Raises InvalidArgument for a URL that names no file."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return  # opening the ledger reports what is wrong with the URL
    if parsed.drivername.partition("+")[0] == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise InvalidArgument(
            "the ledger would be in memory, and end with this process",
            remedy="name a file: sqlite:///path/ledger.db",
            ledger=url,
        )


def keep_file_private(url: str) -> None:
    """Restricts the files of an existing SQLite ledger to their owner: the database, its log and its index."""
    file = _file_of(url)
    if file is None or not file.is_file():
        return
    with file.open("rb") as opened:
        if opened.read(len(SQLITE)) not in (b"", SQLITE):  # another file, named by mistake: its mode stays
            return
    for path in (file, *(file.with_name(file.name + end) for end in ("-wal", "-shm"))):
        if path.exists():
            keep_private(path)


@contextmanager
def opened_at(url: str) -> Iterator[Ledger]:
    """Opens an existing ledger.

    A command must not create a ledger, because the name may be misspelt, and must not upgrade one, because an older
    program may be using it.
    """
    from stateflow.ledger import Ledger

    author = f"{_user()[:100]} (command line)"
    with Ledger(url_of(url) or default_ledger(), author=author, create=False) as opened:
        yield opened


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return f"uid {os.getuid()}"


def told(opened: Ledger) -> str | None:
    """Returns a sentence about the change that opening the ledger made; None: opening changed nothing."""
    return {"made": "a new ledger was created", "upgraded": "the ledger was upgraded"}.get(opened.opened.value)


# -- items ----------------------------------------------------------------------------------------------------


@ledger_commands.command()
def init(url: Url = DEFAULT, as_json: Json = False) -> None:
    """Create a ledger in an empty database, or upgrade an older ledger. A controller that starts does the same."""
    from stateflow.ledger import Ledger

    url = url_of(url) or default_ledger(make=True)
    check_outlasts(url)
    os.umask(UMASK)
    keep_file_private(url)
    with Ledger(url) as made:
        if as_json:
            emit({"ledger": made.id, "at": made.database.shown, "done": made.opened.value})
        else:
            did = told(made) or "the ledger already exists"
            console.print(Text(f"{did}: {made.id} at {made.database.shown}"), soft_wrap=True)


@ledger_commands.command()
def show(
    item: Annotated[
        str | None, typer.Argument(metavar="ITEM", help="Item to show with its records; default: list items.")
    ] = None,
    state: Annotated[str | None, typer.Option(help="Only items in this state.")] = None,
    processed_by: Annotated[str | None, typer.Option(help="Only items that this application has processed.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of items.", min=1)] = 100,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Show one item with its records, or a list of items."""
    with opened_at(url) as opened:
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


@ledger_commands.command()
def resolve(
    item: ItemId,
    note: Annotated[str, typer.Option(help="Description of the fix; kept in the record.")],
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Record that the cause of a blocked item was removed; the item can be processed again."""
    with opened_at(url) as opened:
        _written(opened.resolve(item, note), as_json)


@ledger_commands.command()
def skip(
    item: ItemId,
    app: Annotated[str, typer.Option(help="Application that must skip the item; * for all.")] = "*",
    note: Annotated[str | None, typer.Option(help="Reason; kept in the record.")] = None,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Make one application or all of them skip an item from now on."""
    from reconfig.controller.history import APPS

    with opened_at(url) as opened:
        found = opened.item(item) if app in {"*", *APPS} else None
        if found is not None and found.records[0].app.name in APPS:
            raise InvalidArgument(
                "the item is the controller's own, which could never continue or end it",
                remedy="cancel the work, e.g. with `stateflow reconfig cancel`; if the item is blocked, resolve it",
                item=item,
            )
        _written(opened.skip(item, app, note), as_json)


@ledger_commands.command()
def verify(url: Url = DEFAULT, as_json: Json = False) -> None:
    """Check every record and everything derived from them. Exits with status 1 if there is a fault."""
    with opened_at(url) as opened:
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


@ledger_commands.command()
def archive(
    older_than: Annotated[
        str, typer.Option(help="Archive only items whose newest record is at least this old, e.g. 90d, 12h, 30m.")
    ],
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Archive the records of items that are done; open items stay."""
    age = _age(older_than)
    with opened_at(url) as opened:
        count = opened.archive(age)
    emit({"archived": count}) if as_json else console.print(f"{count} items archived")


@ledger_commands.command()
def tail(
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of newest records.", min=0)] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new records as they arrive, until Ctrl-C.")
    ] = False,
    url: Url = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per record.")] = False,
) -> None:
    """Show the newest records; with -f, also new ones as they arrive."""
    with opened_at(url) as opened:
        newest = opened.newest(max(1, lines))  # at least one, after which new records follow
        after = newest[-1].record_id if newest else 0
        _tell_all(newest[-lines:] if lines else [], as_json)
        while follow:
            sleep(TAIL_INTERVAL_S)
            for record in opened.records(after=after):
                after = record.record_id
                _tell_all([record], as_json)


def _tell_all(records: list[Record], as_json: bool) -> None:
    for record in records:
        emit(_record(record)) if as_json else console.print(_line(record), soft_wrap=True)


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is not an age", remedy="write 90d, 12h, 30m or 10s")
    try:
        return timedelta(seconds=float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]])
    except OverflowError:
        raise InvalidArgument(f"the age {text!r} is too large", remedy="write 90d, 12h, 30m or 10s") from None


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


def styled(state: str) -> Text:
    return plain(Text(state, _STATE_STYLES.get(state, "")))


def _line(record: Record) -> Text:
    said = "" if record.payload is None else str(record.payload)
    line = Text(f"{record.record_id:>8}  {shown_time(record.timestamp_us, exactly=True)}  ")
    line.append(styled(f"{record.state:<10}"))
    return line.append(plain(f"  {record.item_id}  {_app(record)}  {said[:120]}"))


def _one_item(item: Item) -> RenderableType:
    rows = new_table(
        "record", "time (UTC)", "state", "answers", "application", "author", "payload", numbers=("record",)
    )
    for record in item.records:
        rows.add_row(
            str(record.record_id),
            shown_time(record.timestamp_us, exactly=True),
            styled(str(record.state)),
            str(record.previous_record_id or ""),
            Text(_app(record)),
            Text(record.author),
            Text("" if record.payload is None else str(record.payload)),
        )
    title = f"{item.item_id}: {item.state}"
    if item.blocking is not None:
        title += f", blocked by record {item.blocking.record_id}"
    faults = [plain(Text(f"{fault.code}: {fault.what}", "red")) for fault in item.faults]
    return Group(titled(title + (", archived" if item.archived else ""), rows), *faults)


def _many_items(items: list[Item], total: int) -> RenderableType:
    rows = new_table("item", "state", "blocked by", "records", "newest (UTC)", numbers=("blocked by", "records"))
    for item in items:
        blocked = str(item.blocking.record_id) if item.blocking else ""
        newest = shown_time(item.records[-1].timestamp_us, exactly=True)
        rows.add_row(Text(item.item_id), styled(str(item.state)), blocked, str(len(item.records)), newest)
    more = f", the first {len(items)} shown" if len(items) < total else ""
    return titled(f"{total} items{more}", rows)


def _written(record: Record, as_json: bool) -> None:
    emit(_record(record)) if as_json else console.print(_line(record), soft_wrap=True)


stage_commands = Commands("stages", help="Stages of pipelines: data moved from a source to a sink.")
app.add_typer(stage_commands)
OfJob = Annotated[str | None, typer.Option("--job", help="Only stages of this job.")]
Limit = Annotated[int, typer.Option(help="Number of newest stages.", min=1)]


@contextmanager
def _manager(url: str) -> Iterator[StateManager]:
    from stateflow.ledger import StateManager

    with opened_at(url) as opened:
        yield StateManager(opened)


@stage_commands.command()
def current(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    entity: Annotated[str | None, typer.Option(help="Only stages with this source or sink entity.")] = None,
    entity_filter: Annotated[str | None, typer.Option("--filter", help="Only stages with this filter.")] = None,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Show the newest stage of a job: its progress, or where and why it stopped."""
    with _manager(url) as manager:
        found = manager.get_current_state(job, entity, entity_filter)
        if found is None:
            raise IllegalRecord("the job has no such stage", remedy="see `stateflow stages history`", job=job)
        _one(found | manager.get_columns(found["state_id"]), as_json)


@stage_commands.command()
def last(entity: Annotated[str, typer.Argument(metavar="ENTITY")], url: Url = DEFAULT, as_json: Json = False) -> None:
    """Show the newest stage that pulled an entity and pushed it successfully."""
    with _manager(url) as manager:
        found = manager.get_last_stage(entity)
        if found is None:
            raise IllegalRecord(
                "no stage has pushed this entity yet", remedy="see `stateflow stages history`", entity=entity
            )
        _one(found | manager.get_columns(found["state_id"]), as_json)


@stage_commands.command()
def history(job: OfJob = None, limit: Limit = 50, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List stages that have not failed, oldest first."""
    with _manager(url) as manager:
        _many(manager.get_processing_history(job, limit=limit), as_json)


@stage_commands.command()
def failed(job: OfJob = None, limit: Limit = 50, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List stages that have failed, and why, oldest first."""
    with _manager(url) as manager:
        rows = manager.get_failures(job, limit=limit)
    _many(rows, as_json, errors=True)


@stage_commands.command()
def trace(
    correlation: Annotated[str, typer.Argument(metavar="CORRELATION_ID")], url: Url = DEFAULT, as_json: Json = False
) -> None:
    """List every stage that the data of a correlation id went through."""
    with _manager(url) as manager:
        rows = manager.trace(correlation)
    if not rows:
        raise IllegalRecord(
            "no stage has this correlation id", remedy="see `stateflow stages history`", correlation_id=correlation
        )
    _many(rows, as_json)


def _one(stage: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(stage)
        return
    rows = new_table("field", "value")
    for name, value in stage.items():
        if name != "error":
            rows.add_row(name, styled(value) if name == "status" else Text("" if value is None else str(value)))
    if stage["error"] is not None:
        rows.add_row("error", Text(_said(stage["error"]), "red"))
    console.print(titled(f"stage {stage['state_id']}", rows))


def _many(rows: list[dict[str, Any]], as_json: bool, *, errors: bool = False) -> None:
    if as_json:
        emit({"stages": rows})
        return
    named = ("stage", "job", "action", "status", "from", "to", "rows", "updated (UTC)", *(["error"] if errors else []))
    shown = new_table(*named, numbers=("rows",))
    for row in rows:
        source = " ".join(filter(None, (row["source_name"], row["source_entity"])))
        sink = " ".join(filter(None, (row["sink_name"], row["sink_entity"])))
        shown.add_row(
            row["state_id"],
            row["job_id"] or "",
            row["action"],
            styled(row["status"]),
            source,
            sink,
            "" if row["row_count"] is None else str(row["row_count"]),
            str(row["updated_on"])[:19],
            *([f"{'resolved: ' if row['resolved'] else ''}{_said(row['error'])[:300]}"] if errors else []),
        )
    console.print(titled(f"{len(rows)} stages", shown))


def _said(error: dict[str, Any] | None) -> str:
    """Returns an error without its stack trace, which remains in the record."""
    if error is None:
        return ""
    return f"{error['type']}: {error['message']}" if error.get("type") else str(error.get("message", ""))
