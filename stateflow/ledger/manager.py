"""``StateManager``: what moved from which source to which sink, and where it stopped."""

from __future__ import annotations

import math
import subprocess
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select

from stateflow.errors import IllegalRecord, InvalidArgument
from stateflow.ledger import rules, stages
from stateflow.ledger.ledger import Ledger
from stateflow.ledger.reading import newest_first
from stateflow.ledger.records import App, Entry, Kind, RecordState
from stateflow.ledger.schema import STAGE
from stateflow.ledger.stages import Action, Status
from stateflow.ledger.writing import unchanged

APP = App("stateflow.stages")
_SCHEMA = Kind.STAGE.payload_schema


class StateManager:
    """Stages in a ledger. The keyword arguments of ``insert_state`` and ``update_state`` are the stage's columns.

    Times are datetimes with a zone or ISO text; a field that is None or left out stays as it is. Raises
    InvalidArgument for columns and values that are none, and what the ledger raises.
    """

    def __init__(self, ledger: Ledger, *, git_directory: Path | None = None) -> None:
        self.ledger = ledger
        self._git_directory = git_directory

    def insert_state(self, **fields: Any) -> dict[str, Any]:
        """A new stage; its status is in_progress and its action ``sourcing pre-pull`` unless they are given.

        Without ``correlation_id_in`` it takes the ``correlation_id_out`` of the stage before it in the same job and
        run. ``state_id``, ``run_id``, ``correlation_id_out`` and ``git_sha`` are made up when left out.
        """
        row = stages.changes(fields)
        row.setdefault("run_id", self.ledger.run_id or None)
        row.setdefault("state_id", uuid.uuid4().hex)
        row.setdefault("correlation_id_out", uuid.uuid4().hex)
        row.setdefault("action", Action.PRE_PULL.value)
        row.setdefault("status", Status.IN_PROGRESS.value)
        if "correlation_id_in" not in row and "job_id" in row:
            before = self._first(newest(STAGE.c.job_id == row["job_id"], STAGE.c.run_id == row["run_id"]))
            row["correlation_id_in"] = before and before["correlation_id_out"]
        if "git_sha" not in row and self._git_sha:
            row["git_sha"] = self._git_sha
        state_id = row.pop("state_id")
        new = Entry(state_id, APP, RecordState.NEW, None, {"set": row}, _SCHEMA)
        entries = [new, *self._entries(state_id, RecordState.NEW, new, Status(row["status"]), {})]
        self.ledger.append(entries)
        return self._answer(state_id)

    def update_state(self, state_id: str, **fields: Any) -> dict[str, Any]:
        """Change columns of a stage. Raises IllegalRecord when there is no such stage."""
        row = stages.changes(fields)
        item = self.ledger.item(state_id) if rules.is_id(state_id, rules.ITEM_ID_MAX) else None
        if item is None or item.kind is not Kind.STAGE:
            raise IllegalRecord("there is no such stage", remedy="insert it first", stage=repr(state_id)[:60])
        if row.get("state_id", state_id) != state_id:
            raise InvalidArgument("a stage's state_id stays", remedy="insert another stage", stage=state_id)
        row.pop("state_id", None)
        now = self.get_state(state_id)
        assert now is not None
        status = Status(row.get("status", now["status"]))
        entries = self._entries(state_id, item.state, item.blocking, status, row)
        self.ledger.append(entries, unchanged({state_id: item.records[-1].seq}))
        return self._answer(state_id)

    def get_current_state(
        self, job_id: str, entity: str | None = None, entity_filter: str | None = None
    ) -> dict[str, Any] | None:
        """The newest stage of a job, of one entity and filter if they are given; None when there is none."""
        conditions = [STAGE.c.job_id == job_id]
        if entity is not None:
            conditions.append(or_(STAGE.c.source_entity == entity, STAGE.c.sink_entity == entity))
        if entity_filter is not None:
            conditions.append(or_(STAGE.c.source_filter == entity_filter, STAGE.c.sink_filter == entity_filter))
        row = self._first(newest(*conditions))
        return None if row is None else stages.answer(row)

    def get_state(self, state_id: str) -> dict[str, Any] | None:
        """One stage's row as it is stored: times in microseconds."""
        return self._first(select(STAGE).where(STAGE.c.state_id == state_id))

    def get_last_record(self, entity: str) -> dict[str, Any] | None:
        """The newest stage that pulled this entity and was pushed with success; None when there is none."""
        row = self._first(last_done(entity))
        return None if row is None else stages.answer(row)

    def get_processing_history(self, job_id: str | None = None, *, limit: int | None = None) -> list[dict[str, Any]]:
        """Stages that have not failed, all 26 columns of each, oldest first; with ``limit`` the newest so many."""
        with self.ledger.database.reading() as connection:
            rows = list(newest_first(connection, history(job_id), STAGE.c.first_record_id, limit))
        return [stages.columns(row) for row in reversed(rows)]

    def trace(self, correlation_id: str) -> list[dict[str, Any]]:
        """Every stage that the data of this correlation id went through, before and after it, oldest first."""
        found: dict[str, Any] = {}
        asked: set[str] = set()
        ask = {correlation_id}
        with self.ledger.database.reading() as connection:
            while ask:
                asked |= ask
                rows = [
                    row
                    for column in (STAGE.c.correlation_id_in, STAGE.c.correlation_id_out)
                    for row in connection.execute(select(STAGE).where(column.in_(sorted(ask)))).mappings()
                ]
                found |= {row["state_id"]: row for row in rows}
                ask = (
                    {row[name] for row in rows for name in ("correlation_id_in", "correlation_id_out")} - asked - {None}
                )
        ordered = sorted(found.values(), key=lambda row: row["first_record_id"])
        return [stages.columns(row) for row in ordered]

    # -- parts --------------------------------------------------------------------------------------------

    @staticmethod
    def _entries(state_id: str, now: RecordState, blocking: Any, status: Status, row: dict[str, Any]) -> list[Entry]:
        """The shortest legal way to the status; the columns are in its last record. A stage's locks have no lease."""
        entries: list[Entry] = []
        previous = None if now is RecordState.NEW else blocking
        for state in rules.path(now, stages.RECORD_STATE[status]):
            named = None if state is RecordState.PROCESSING else previous
            previous = Entry(state_id, APP, state, named, {"set": {}}, _SCHEMA, math.inf)
            entries.append(previous)
        last = entries[-1]
        return [*entries[:-1], Entry(state_id, APP, last.state, last.previous, {"set": row}, _SCHEMA, math.inf)]

    def _first(self, query: Select[Any]) -> dict[str, Any] | None:
        with self.ledger.database.reading() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else dict(row)

    def _answer(self, state_id: str) -> dict[str, Any]:
        row = self.get_state(state_id)
        assert row is not None
        return stages.answer(row)

    @cached_property
    def _git_sha(self) -> str | None:
        """None outside a git checkout, and without git."""
        command = ["git", "-C", str(self._git_directory or Path.cwd()), "rev-parse", "HEAD"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() or None


def newest(*conditions: ColumnElement[bool]) -> Select[Any]:
    return select(STAGE).where(*conditions).order_by(STAGE.c.first_record_id.desc()).limit(1)


def last_done(entity: str) -> Select[Any]:
    return newest(
        STAGE.c.source_entity == entity,
        STAGE.c.status == Status.SUCCESS.value,
        STAGE.c.action == Action.POST_PUSH.value,
    )


def history(job_id: str | None) -> Select[Any]:
    query = select(STAGE).where(STAGE.c.status != Status.FAILURE.value)
    return query if job_id is None else query.where(STAGE.c.job_id == job_id)
