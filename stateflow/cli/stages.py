"""``stateflow stages``: what moved from which source to which sink, and where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from stateflow.cli.group import Commands
from stateflow.cli.ledger import DEFAULT, Url, opened_at, styled
from stateflow.cli.output import Json, console, emit
from stateflow.cli.show import new_table, titled
from stateflow.errors import IllegalRecord

if TYPE_CHECKING:
    from stateflow.ledger import StateManager

app = Commands("stages", help="Stages of pipelines: what moved from which source to which sink.")
OfJob = Annotated[str | None, typer.Option("--job", help="Only stages of this job.")]
Limit = Annotated[int, typer.Option(help="Number of newest stages.", min=1)]


@contextmanager
def _manager(url: str) -> Iterator[StateManager]:
    from stateflow.ledger import StateManager

    with opened_at(url) as opened:
        yield StateManager(opened)


@app.command()
def current(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    entity: Annotated[str | None, typer.Option(help="Only stages with this source or sink entity.")] = None,
    entity_filter: Annotated[str | None, typer.Option("--filter", help="Only stages with this filter.")] = None,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Show the newest stage of a job: what it does now, or where it stopped, and why."""
    with _manager(url) as manager:
        found = manager.get_current_state(job, entity, entity_filter)
        if found is None:
            raise IllegalRecord("the job has no such stage", remedy="see `stateflow stages history`", job=job)
        _one(found | manager.get_columns(found["state_id"]), as_json)


@app.command()
def last(entity: Annotated[str, typer.Argument(metavar="ENTITY")], url: Url = DEFAULT, as_json: Json = False) -> None:
    """Show the newest stage that pulled an entity and was pushed with success."""
    with _manager(url) as manager:
        found = manager.get_last_stage(entity)
        if found is None:
            raise IllegalRecord(
                "no stage has pushed this entity yet", remedy="see `stateflow stages history`", entity=entity
            )
        _one(found | manager.get_columns(found["state_id"]), as_json)


@app.command()
def history(job: OfJob = None, limit: Limit = 50, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List stages that have not failed, oldest first."""
    with _manager(url) as manager:
        _many(manager.get_processing_history(job, limit=limit), as_json)


@app.command()
def failed(job: OfJob = None, limit: Limit = 50, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List stages that have failed, and why, oldest first."""
    with _manager(url) as manager:
        rows = manager.get_failures(job, limit=limit)
    _many(rows, as_json, errors=True)


@app.command()
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
            *([_said(row["error"])[:300]] if errors else []),
        )
    console.print(titled(f"{len(rows)} stages", shown))


def _said(error: dict[str, Any] | None) -> str:
    """Returns an error without its stack, which the record has."""
    if error is None:
        return ""
    return f"{error['type']}: {error['message']}" if error.get("type") else str(error.get("message", ""))
