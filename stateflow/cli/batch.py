"""``stateflow batch``: batches of work, their entities and jobs, as the ledger has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from stateflow.cli.group import Commands
from stateflow.cli.ledger import DEFAULT, Url, opened_at, styled
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, shown_time
from stateflow.cli.show import new_table, titled
from stateflow.client import Cluster
from stateflow.client.words import call_off, runner_of

if TYPE_CHECKING:
    from stateflow.ledger import Board

app = Commands("batch", help="Batches of work: their progress, entities and jobs.")
Bid = Annotated[str, typer.Argument(metavar="BATCH")]
Status = Annotated[str | None, typer.Option(help="Only those with this status.")]


@contextmanager
def _board(url: str) -> Iterator[Board]:
    from stateflow.ledger import Board

    with opened_at(url) as opened:
        yield Board(opened)


@app.command("list")
def list_(
    status: Status = None,
    limit: Annotated[int, typer.Option(help="Number of newest batches to show.", min=1)] = 50,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """List batches, newest first."""
    with _board(url) as board:
        rows = board.batches(status, limit=limit)
    if as_json:
        emit({"batches": rows})
        return
    shown = new_table("batch", "name", "command", "status", "owner", "created (UTC)", "ended (UTC)")
    for row in rows:
        times = (_time(row["created_us"]), _time(row["ended_us"]))
        shown.add_row(row["bid"], row["name"], row["command"], styled(row["status"]), row["owner"] or "", *times)
    console.print(titled(f"{len(rows)} batches", shown))


@app.command()
def info(bid: Bid, url: Url = DEFAULT, as_json: Json = False) -> None:
    """Show one batch: how many of its entities are done, its pace, when it will end, and its slowest entities."""
    with _board(url) as board:
        found = board.batch(bid)
    if as_json:
        emit(found)
        return
    pace = "" if found["pace"] is None else f"{found['pace']:.3g} entities/s"
    fields: dict[str, Any] = {
        **{name: found[name] for name in ("name", "command", "status", "owner", "affinity", "job_affinity")},
        "entities": f"{found['total_entities']}{'' if found['listed'] else ', listing incomplete'}",
        **{name: found[name] for name in ("waiting", "in_progress", "succeeded", "failed", "cancelled")},
        "pace": pace,
        "created (UTC)": _time(found["created_us"]),
        "started (UTC)": _time(found["started_us"]),
        "ended (UTC)": _time(found["ended_us"]),
        "will end (UTC)": _eta(found),
    }
    rows = new_table("field", "value")
    for name, value in fields.items():
        rows.add_row(name, styled(value) if name == "status" else "" if value is None else str(value))
    slow = new_table("entity", "ms", "status", "result", numbers=("ms",))
    for each in found["extra_stats"]["slowest"]:
        slow.add_row(each["id"], str(each["ms"]), styled(each["status"]), each["result"] or "")
    console.print(Group(titled(f"batch {bid}", rows), titled("slowest entities", slow)))


@app.command()
def entities(bid: Bid, status: Status = None, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List the entities of a batch, in the order of listing."""
    with _board(url) as board:
        board.batch(bid)  # an unknown one is an error, not an empty list
        rows = board.entities(bid, status)
    if as_json:
        emit({"entities": rows})
        return
    shown = new_table("entity", "status", "ms", "result", numbers=("ms",))
    for row in rows:
        ms = "" if row["ms"] is None else str(row["ms"])
        shown.add_row(row["entity"], styled(row["status"]), ms, row["result"] or "")
    console.print(titled(f"{len(rows)} entities", shown))


@app.command()
def jobs(status: Status = None, url: Url = DEFAULT, as_json: Json = False) -> None:
    """List jobs by status, in the order of their creation."""
    from stateflow.ledger.batches import JobStatus

    with _board(url) as board:
        rows = [row for each in ([status] if status is not None else JobStatus) for row in board.jobs(each)]
    if as_json:
        emit({"jobs": rows})
        return
    shown = new_table(
        "job", "batch", "status", "tries", "worker", "affinity", "schedule", "fires (UTC)", numbers=("tries",)
    )
    for row in rows:
        texts = (row["worker"] or "", row["affinity"] or "", row["schedule"] or "", _time(row["fire_us"]))
        shown.add_row(row["job_id"], row["bid"] or "", styled(row["status"]), str(row["tries"]), *texts)
    console.print(titled(f"{len(rows)} jobs", shown))


@app.command()
def pause(bid: Bid, url: Url = DEFAULT) -> None:
    """Pause a batch: its runner stops after the present entity. `stateflow reconfig pause` pauses a reconfiguration."""
    _move(bid, "PAUSED", url)


@app.command()
def resume(bid: Bid, url: Url = DEFAULT) -> None:
    """Resume a batch; then start its runner again."""
    _move(bid, "IN_PROGRESS", url)


@app.command()
def cancel(bid: Bid, url: Url = DEFAULT, controller: Controller = LOCAL) -> None:
    """Cancel a batch; `batch retry --cancelled` takes it up again. The controller cancels its own batches, such as
    `roll/…`, `sweep/…`, `restores/…` and `reconfiguration/…`: work that has not begun does not begin."""
    kind, id_ = runner_of(bid)
    if kind:
        console.print(f"{bid}: {call_off(Cluster(controller), kind, id_)}")
    else:
        _move(bid, "CANCELLED", url)


@app.command()
def retry(
    bid: Bid,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Also retry what was cancelled.")] = False,
    url: Url = DEFAULT,
    as_json: Json = False,
) -> None:
    """Put failed entities back to waiting; the runner of the batch then does them."""
    with _board(url) as board:
        _, again = board.retry_batch(bid, allow_cancelled=cancelled)
    if as_json:
        emit({"batch": bid, "entities": again})
    else:
        console.print(f"{bid}: {len(again)} entities waiting")


def _move(bid: str, status: str, url: str) -> None:
    with _board(url) as board:
        board.move_batch(bid, status)
    console.print(f"{bid}: {status}")


def _eta(found: dict[str, Any]) -> str:
    if found["eta"] is None:
        return ""
    return f"{_time(found['eta'])} ({_time(found['eta_sooner'])} to {_time(found['eta_later'])} with 95 % confidence)"


def _time(at_us: int | None) -> str:
    return shown_time(at_us, exactly=True)
