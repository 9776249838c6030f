"""``StateManager``: what moved from which source to which sink, and where it stopped."""

from __future__ import annotations

import math
import subprocess
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select

from stateflow.errors import IllegalRecord, InvalidArgument, Locked
from stateflow.ledger import rules, stages
from stateflow.ledger.ledger import Ledger
from stateflow.ledger.reading import newest_first
from stateflow.ledger.records import App, Entry, Kind, Record, RecordState
from stateflow.ledger.schema import STAGE
from stateflow.ledger.stages import Action, Status
from stateflow.ledger.work import error_payload
from stateflow.ledger.writing import unchanged
from stateflow.types import shown

APP = App("stateflow.stages")
_SCHEMA = Kind.STAGE.payload_schema
_DONE = (STAGE.c.status == Status.SUCCESS.value, STAGE.c.action == Action.POST_PUSH.value)


class StateManager:
    """Stages in a ledger. The keyword arguments of ``insert_state`` and ``update_state`` are the stage's columns; those
    without names are in the order of ``stages.POSITIONS``.

    Times are datetimes with a zone or ISO text; a field that is None or left out stays as it is. ``error`` is not a
    column: it describes a failure, and is kept in the record. Raises InvalidArgument for unknown columns and invalid
    values, and the errors of the ledger.
    """

    def __init__(self, ledger: Ledger, *, git_directory: Path | None = None) -> None:
        self.ledger = ledger
        self._git_directory = git_directory

    def insert_state(self, *positional: Any, error: BaseException | str | None = None, **fields: Any) -> dict[str, Any]:
        """Adds a stage; its status is in_progress and its action ``sourcing pre-pull`` unless they are given.

        Without ``correlation_id_in`` the stage takes the ``correlation_id_out`` of the stage that it goes on from, see
        ``preceding``. ``state_id``, ``run_id``, ``correlation_id_out`` and ``git_sha`` are made up when left out.
        """
        row = stages.changes(stages.named(positional, fields))
        row.setdefault("run_id", self.ledger.run_id or None)
        row.setdefault("state_id", uuid.uuid4().hex)
        row.setdefault("correlation_id_out", uuid.uuid4().hex)
        row.setdefault("action", Action.PRE_PULL.value)
        row.setdefault("status", Status.IN_PROGRESS.value)
        if "correlation_id_in" not in row:
            before = next(filter(None, map(self._first, preceding(row))), None)
            row["correlation_id_in"] = before and before["correlation_id_out"]
        if "git_sha" not in row and self._git_sha:
            row["git_sha"] = self._git_sha
        state_id = row.pop("state_id")
        new = Entry(state_id, APP, RecordState.NEW, None, {"set": row}, _SCHEMA)
        entries = [new, *_entries(state_id, RecordState.NEW, new, Status(row["status"]), _payload({}, error))]
        self.ledger.append(entries)
        return self._answer(state_id)

    def update_state(self, *positional: Any, error: BaseException | str | None = None, **fields: Any) -> dict[str, Any]:
        """Changes columns of a stage. Updates made at the same time are all applied. One argument alone is the
        ``state_id``.

        A ``run_id`` that was made up becomes this ledger's: that of the run that went on with the stage. Raises
        IllegalRecord when there is no such stage.
        """
        alone = len(positional) == 1 and "state_id" not in fields
        given = {**fields, "state_id": positional[0]} if alone else stages.named(positional, fields)
        state_id = given.pop("state_id", None)
        row = stages.changes(given)
        while not self._update(state_id, row, error):
            continue  # another change came in between: it stays, and this one is applied after it
        return self._answer(state_id)

    def _update(self, state_id: Any, row: dict[str, Any], error: BaseException | str | None) -> bool:
        """Applies an update. Returns False when the stage has changed between reading and writing."""
        item = self.ledger.item(state_id) if rules.is_item_id(state_id) else None
        if item is None or item.kind is not Kind.STAGE:
            raise IllegalRecord("there is no such stage", remedy="insert it first", stage=shown(state_id))
        now, last = self.get_state(state_id), item.records[-1]
        assert now is not None
        if now["run_id"] == last.run_id != self.ledger.run_id:
            row = {"run_id": self.ledger.run_id or None} | row
        status = Status(row.get("status", now["status"]))
        entries = _entries(state_id, item.state, item.blocking, status, _payload(row, error))
        try:
            self.ledger.append(entries, unchanged({state_id: last.seq}))
        except Locked:
            newest = self.ledger.item(state_id)
            if newest is None or newest.records[-1].seq == last.seq:
                raise
            return False
        return True

    def get_current_state(
        self, job_id: str, entity: str | None = None, entity_filter: str | None = None
    ) -> dict[str, Any] | None:
        """Returns the newest stage of a job, and of an entity and a filter where they are given; None when there is
        none."""
        _check_names(job_id=job_id)
        conditions = [STAGE.c.job_id == job_id]
        if entity is not None:
            if not rules.is_item_id(entity):  # no stage has an invalid id
                return None
            conditions.append(or_(STAGE.c.source_entity == entity, STAGE.c.sink_entity == entity))
        if entity_filter is not None:
            conditions.append(or_(STAGE.c.source_filter == entity_filter, STAGE.c.sink_filter == entity_filter))
        row = self._first(newest(*conditions))
        return None if row is None else stages.answer(row)

    def get_columns(self, state_id: str) -> dict[str, Any]:
        """Returns all 26 columns of a stage, and its ``error`` where it has failed, as in ``get_failures``. Raises
        IllegalRecord when there is no such stage."""
        row, item = self.get_state(state_id), self.ledger.item(state_id)
        if row is None or item is None:
            raise IllegalRecord("there is no such stage", remedy="insert it first", stage=shown(state_id))
        return stages.columns(row) | {"error": _error_in(item.blocking)}

    def get_state(self, state_id: str) -> dict[str, Any] | None:
        """Returns one stage's row as it is stored, with times in microseconds; None when there is none."""
        return self._first(select(STAGE).where(STAGE.c.state_id == state_id))

    def get_last_record(self, entity: str) -> str | None:
        """Returns the ``last_record_pulled`` of the stage that ``get_last_stage`` returns: the place to go on from."""
        last = self.get_last_stage(entity)
        return None if last is None else last["last_record_pulled"]

    def get_last_stage(self, entity: str) -> dict[str, Any] | None:
        """Returns the newest stage that pulled this entity and was pushed with success; None when there is none."""
        row = self._first(last_done(entity)) if rules.is_item_id(entity) else None
        return None if row is None else stages.answer(row)

    def get_processing_history(self, job_id: str | None = None, *, limit: int | None = None) -> list[dict[str, Any]]:
        """Returns the stages that have not failed, with all 26 columns, oldest first; with ``limit`` only the newest
        ones."""
        _check_names(job_id=job_id)
        with self.ledger.database.reading() as connection:
            rows = list(newest_first(connection, history(job_id), STAGE.c.first_record_id, limit))
        return [stages.columns(row) for row in reversed(rows)]

    def get_failures(self, job_id: str | None = None, *, limit: int | None = None) -> list[dict[str, Any]]:
        """Returns the stages that have failed, oldest first, each with its ``error``: ``type``, ``message`` and
        ``stack``."""
        _check_names(job_id=job_id)
        query = select(STAGE).where(STAGE.c.status == Status.FAILURE.value)
        query = query if job_id is None else query.where(STAGE.c.job_id == job_id)
        with self.ledger.database.reading() as connection:
            rows = list(newest_first(connection, query, STAGE.c.first_record_id, limit))
        failed = {item.item_id: item.blocking for item in self.ledger.items(row["state_id"] for row in rows)}
        return [stages.columns(row) | {"error": _error_in(failed.get(row["state_id"]))} for row in reversed(rows)]

    def trace(self, correlation_id: str) -> list[dict[str, Any]]:
        """Returns every stage that the data of this correlation id went through, before and after it, oldest first."""
        _check_names(correlation_id=correlation_id)
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
        """Commit of the git checkout; None outside a checkout, and without git."""
        command = ["git", "-C", str(self._git_directory or Path.cwd()), "rev-parse", "HEAD"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() or None


def _entries(state_id: str, now: RecordState, blocking: Any, status: Status, payload: dict[str, Any]) -> list[Entry]:
    """Returns the shortest legal sequence of records to the status; the last has the payload. A stage's locks have no
    lease."""
    entries: list[Entry] = []
    previous = None if now is RecordState.NEW else blocking
    steps = rules.path(now, stages.RECORD_STATE[status])
    for place, state in enumerate(steps):
        named = None if state is RecordState.PROCESSING else previous
        what = payload if place == len(steps) - 1 else {"set": {}}
        previous = Entry(state_id, APP, state, named, what, _SCHEMA, math.inf)
        entries.append(previous)
    return entries


def _payload(row: dict[str, Any], error: BaseException | str | None) -> dict[str, Any]:
    return {"set": row} | ({} if error is None else error_payload(error))


def _check_names(**asked: str | None) -> None:
    """Checks names before they are looked up: some databases would find ``j`` for ``j ``. Raises InvalidArgument."""
    for name, text in asked.items():
        if text is not None and not rules.is_id(text, 255):
            raise InvalidArgument(
                f"{name} must have 1 to 255 characters, no control character and no trailing space",
                remedy="choose another",
                given=shown(text),
            )


def _error_in(record: Record | None) -> dict[str, Any] | None:
    payload = None if record is None else record.payload
    return payload.get("error") if isinstance(payload, dict) else None


def preceding(row: Mapping[str, Any]) -> list[Select[Any]]:
    """Returns queries for the stage that a new one goes on from, the most specific first: the newest that pushed what
    this one pulls; of its job and run; of its run; of its job, in an earlier run."""
    queries: list[Select[Any]] = []
    if row.get("source_entity"):
        pushed = [STAGE.c.sink_entity == row["source_entity"], *_DONE]
        for mine, theirs in (
            (row.get("source_name"), STAGE.c.sink_name),
            (row.get("source_filter"), STAGE.c.sink_filter),
        ):
            pushed += [] if mine is None else [or_(theirs.is_(None), theirs == mine)]
        queries.append(newest(*pushed))
    same = {name: STAGE.c[name] == row[name] for name in ("job_id", "run_id") if row.get(name)}
    queries += [newest(*same.values())] if len(same) == 2 else []
    return queries + [newest(same[name]) for name in ("run_id", "job_id") if name in same]


def newest(*conditions: ColumnElement[bool]) -> Select[Any]:
    return select(STAGE).where(*conditions).order_by(STAGE.c.first_record_id.desc()).limit(1)


def last_done(entity: str) -> Select[Any]:
    return newest(STAGE.c.source_entity == entity, *_DONE)


def history(job_id: str | None) -> Select[Any]:
    query = select(STAGE).where(STAGE.c.status != Status.FAILURE.value)
    return query if job_id is None else query.where(STAGE.c.job_id == job_id)
