"""``StateManager`` records the stages of pipelines, which move data from a source to a sink, and the progress of each
stage.

A stage is an item of the ledger. Each change of a stage is the shortest legal sequence of records that leads to its new
status. An update is written only if the stage got no other record since it was read; otherwise it is read again, and
the update is applied after that record.

A pipeline declares its state manager in YAML. ``state_manager:`` names a class of this module and a connection profile.
Secrets come from the environment::

    state_manager:
      name: state_manager
      type: PostgreSQLStateManager
      conf:
        connection: state_manager

    connections:
      state_manager:
        host: db.example.org
        port: 5432
        database: ledger
        username: ${LEDGER_USER}
        password: ${LEDGER_PASSWORD}
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import URL, ColumnElement, Select, or_, select

from stateflow.documents import read_document
from stateflow.errors import IllegalRecord, InvalidArgument, Locked
from stateflow.ledger import rules
from stateflow.ledger.board import check_names
from stateflow.ledger.ledger import Ledger, error_payload
from stateflow.ledger.records import STAGE, App, Entry, Item, Kind, RecordState, same_text
from stateflow.ledger.rules import Action, Status
from stateflow.ledger.statements import chunks, newest_first, unchanged
from stateflow.types import shown

APP = App("stateflow.stages")
_SCHEMA = Kind.STAGE.payload_schema
_DONE = (STAGE.c.status == Status.SUCCESS.value, STAGE.c.action == Action.POST_PUSH.value)
_ODBC = "ODBC Driver 18 for SQL Server"
_PROFILE = frozenset({"url", "host", "port", "database", "username", "password", "options"})
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class StateManager:
    """Stages in a ledger. The keyword arguments of ``insert_state`` and ``update_state`` are the stage's columns;
    arguments without names are in the order of ``rules.POSITIONS``.

    Times are datetimes with a zone or ISO text; a field that is None or left out stays as it is. Empty text empties
    ``first_record_pulled`` and ``last_record_pulled``. ``error`` is not a column: it describes a failure, and is kept
    in the record. Raises InvalidArgument for unknown columns and invalid values, and the errors of the ledger.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def insert_state(self, *positional: Any, error: BaseException | str | None = None, **fields: Any) -> dict[str, Any]:
        """Adds a stage; its status is in_progress and its action ``sourcing pre-pull`` unless they are given.

        Without ``correlation_id_in`` the stage gets the ``correlation_id_out`` of the stage that it continues, see
        ``preceding``. When left out, ``state_id`` and ``correlation_id_out`` are random, ``run_id`` is the ledger's,
        and ``git_sha`` is the commit of the git checkout, if there is one.
        """
        row = rules.stage_changes(rules.stage_fields(positional, fields))
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
        """Changes columns of a stage. Concurrent updates are all applied. A single positional argument is the
        ``state_id``.

        A ``run_id`` that no caller gave is replaced by this ledger's, so that it names the run that continues the
        stage. Raises IllegalRecord if there is no such stage.
        """
        alone = len(positional) == 1 and "state_id" not in fields
        given = {**fields, "state_id": positional[0]} if alone else rules.stage_fields(positional, fields)
        state_id = given.pop("state_id", None)
        row = rules.stage_changes(given)
        while not self._update(state_id, row, error):
            continue  # another change was written first: it stays, and this one is applied after it
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
        """Returns the newest stage of a job; None: there is no such stage. If ``entity`` or ``entity_filter`` is given,
        the stage's source or sink must have it.
        """
        check_names(255, job_id=job_id)
        conditions = [STAGE.c.job_id == job_id]
        if entity is not None:
            if not rules.is_item_id(entity):  # no stage has an invalid id
                return None
            conditions.append(or_(STAGE.c.source_entity == entity, STAGE.c.sink_entity == entity))
        if entity_filter is not None:
            conditions.append(
                or_(same_text(STAGE.c.source_filter, entity_filter), same_text(STAGE.c.sink_filter, entity_filter))
            )
        row = self._first(newest(*conditions))
        return None if row is None else rules.stage_answer(row)

    def get_columns(self, state_id: str) -> dict[str, Any]:
        """Returns all 26 columns of a stage, and, if it has failed, its ``error`` as in ``get_failures``. Raises
        IllegalRecord if there is no such stage."""
        row, item = self.get_state(state_id), self.ledger.item(state_id)
        if row is None or item is None:
            raise IllegalRecord("there is no such stage", remedy="insert it first", stage=shown(state_id))
        return rules.stage_columns(row) | {"error": _error_of(item)}

    def get_state(self, state_id: str) -> dict[str, Any] | None:
        """Returns one stage's row as it is stored, with times in microseconds; None when there is none."""
        return self._first(select(STAGE).where(STAGE.c.state_id == state_id))

    def get_last_record(self, entity: str) -> str | None:
        """Returns the ``last_record_pulled`` of the stage that ``get_last_stage`` returns: the place to resume from."""
        last = self.get_last_stage(entity)
        return None if last is None else last["last_record_pulled"]

    def get_last_stage(self, entity: str) -> dict[str, Any] | None:
        """Returns the newest stage that pulled this entity and pushed it successfully; None: there is no such stage."""
        row = self._first(last_done(entity)) if rules.is_item_id(entity) else None
        return None if row is None else rules.stage_answer(row)

    def get_processing_history(self, job_id: str | None = None, *, limit: int | None = None) -> list[dict[str, Any]]:
        """Returns the stages that have not failed, with all 26 columns, oldest first. With ``limit``, returns only the
        newest ones."""
        check_names(255, job_id=job_id)
        with self.ledger.database.reading() as connection:
            rows = list(newest_first(connection, history(job_id), STAGE.c.first_record_id, limit))
        return [rules.stage_columns(row) for row in reversed(rows)]

    def get_failures(self, job_id: str | None = None, *, limit: int | None = None) -> list[dict[str, Any]]:
        """Returns the stages that have failed, oldest first. Each has its ``error`` (``type``, ``message`` and
        ``stack``; None: none was given), and ``resolved``: whether a person has resolved the failure since."""
        check_names(255, job_id=job_id)
        query = select(STAGE).where(STAGE.c.status == Status.FAILURE.value)
        query = query if job_id is None else query.where(STAGE.c.job_id == job_id)
        with self.ledger.database.reading() as connection:
            rows = list(newest_first(connection, query, STAGE.c.first_record_id, limit))
        items = {item.item_id: item for item in self.ledger.items(row["state_id"] for row in rows)}
        return [rules.stage_columns(row) | _failure(items.get(row["state_id"])) for row in reversed(rows)]

    def trace(self, correlation_id: str) -> list[dict[str, Any]]:
        """Returns every stage that the data of this correlation id went through, before and after it, oldest first."""
        check_names(255, correlation_id=correlation_id)
        found: dict[str, Any] = {}
        asked: set[str] = set()
        ask = {correlation_id}
        with self.ledger.database.reading() as connection:
            while ask:
                asked |= ask
                rows = [
                    row
                    for some in chunks(ask)
                    for column in (STAGE.c.correlation_id_in, STAGE.c.correlation_id_out)
                    for row in connection.execute(select(STAGE).where(column.in_(some))).mappings()
                ]
                found |= {row["state_id"]: row for row in rows}
                ask = (
                    {row[name] for row in rows for name in ("correlation_id_in", "correlation_id_out")} - asked - {None}
                )
        ordered = sorted(found.values(), key=lambda row: row["first_record_id"])
        return [rules.stage_columns(row) for row in ordered]

    # -- parts --------------------------------------------------------------------------------------------

    def _first(self, query: Select[Any]) -> dict[str, Any] | None:
        with self.ledger.database.reading() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else dict(row)

    def _answer(self, state_id: str) -> dict[str, Any]:
        row = self.get_state(state_id)
        assert row is not None
        return rules.stage_answer(row)

    @cached_property
    def _git_sha(self) -> str | None:
        """Commit of the git checkout; None outside a checkout, and without git."""
        command = ["git", "rev-parse", "HEAD"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() or None


def _entries(state_id: str, now: RecordState, blocking: Any, status: Status, payload: dict[str, Any]) -> list[Entry]:
    """Returns the shortest legal sequence of records that leads to the status; the last record has the payload. A
    stage's locks have no lease."""
    entries: list[Entry] = []
    previous = None if now is RecordState.NEW else blocking
    steps = rules.path(now, rules.STAGE_RECORD_STATE[status])
    for place, state in enumerate(steps):
        named = None if state is RecordState.PROCESSING else previous
        what = payload if place == len(steps) - 1 else {"set": {}}
        previous = Entry(state_id, APP, state, named, what, _SCHEMA, math.inf)
        entries.append(previous)
    return entries


def _payload(row: dict[str, Any], error: BaseException | str | None) -> dict[str, Any]:
    return {"set": row} | ({} if error is None else error_payload(error))


def _failure(item: Item | None) -> dict[str, Any]:
    """Returns why a stage has failed, and whether that is resolved. None: the stage has no records."""
    if item is None:
        return {"error": None, "resolved": False}
    return {"error": _error_of(item), "resolved": item.state == RecordState.RESOLVED}


def _error_of(item: Item) -> dict[str, Any] | None:
    """Returns the newest error since the stage's last status other than failure."""
    for record in reversed(item.records):
        payload: dict[str, Any] = record.payload if isinstance(record.payload, dict) else {}
        error: dict[str, Any] | None = payload.get("error")
        if error is not None:
            return error
        changed = payload.get("set")
        if isinstance(changed, dict) and changed.get("status", Status.FAILURE) != Status.FAILURE:
            return None
    return None


def preceding(row: Mapping[str, Any]) -> list[Select[Any]]:
    """Returns queries for the stage that a new stage continues, the most specific first.

    The queries select, in this order: the newest stage that pushed the entity that the new stage pulls; the newest
    stage of its job and run; the newest stage of its run; and the newest stage of its job, in any run.
    """
    queries: list[Select[Any]] = []
    if row.get("source_entity"):
        pushed = [STAGE.c.sink_entity == row["source_entity"], *_DONE]
        for mine, theirs in (
            (row.get("source_name"), STAGE.c.sink_name),
            (row.get("source_filter"), STAGE.c.sink_filter),
        ):
            pushed += [] if mine is None else [or_(theirs.is_(None), same_text(theirs, mine))]
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


# -- State managers that YAML declares -------------------------------------------------------------------------------


class _Declared(StateManager):
    """A state manager of one kind of database.

    Args:
        connection: its profile, as in YAML, or an SQLAlchemy URL.
        environment: values for ``${NAME}`` in the profile; by default this process's environment.
        create: makes a missing ledger and upgrades an older one, see ``Ledger``.

    Raises InvalidArgument for settings that are missing, misspelt or not set in the environment, without showing a
    secret, and the errors of opening a ledger.
    """

    driver: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        connection: Mapping[str, Any] | str,
        *,
        environment: Mapping[str, str] | None = None,
        create: bool = True,
    ) -> None:
        profile = {"url": connection} if isinstance(connection, str) else connection
        url = profile_url(type(self).__name__, profile, os.environ if environment is None else environment)
        super().__init__(Ledger(url.render_as_string(hide_password=False), create=create))


class SqLiteStateManager(_Declared):
    driver = "sqlite"


class MySQLStateManager(_Declared):
    """A state manager in MySQL or MariaDB."""

    driver = "mysql"


class PostgreSQLStateManager(_Declared):
    driver = "postgresql"


class SQLServerStateManager(_Declared):
    driver = "mssql"
    options: ClassVar[Mapping[str, str]] = {"driver": _ODBC}


class AzureSQLServerStateManager(_Declared):
    driver = "mssql"
    options: ClassVar[Mapping[str, str]] = {"driver": _ODBC, "Encrypt": "yes"}


TYPES: dict[str, type[_Declared]] = {
    each.__name__: each
    for each in (
        *(SqLiteStateManager, MySQLStateManager, PostgreSQLStateManager),
        *(SQLServerStateManager, AzureSQLServerStateManager),
    )
}


def state_manager_from_yaml(
    source: str | Path | Mapping[str, Any], environment: Mapping[str, str] | None = None, *, create: bool = True
) -> StateManager:
    """Opens the ledger that a file, or a document already read, declares, and returns its state manager.

    Raises InvalidArgument for settings that are missing, misspelt or not set in the environment, without showing a
    secret.
    """
    kind, profile, _ = _declared(_document(source))
    return TYPES[kind](profile, environment=environment, create=create)


def ledger_url(document: Mapping[str, Any], environment: Mapping[str, str]) -> URL:
    """Returns the URL of the ledger that a document declares. Pure. Raises InvalidArgument."""
    kind, profile, name = _declared(document)
    return profile_url(kind, profile, environment, name)


def _declared(document: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """Returns the type of the declared state manager, its connection profile, and the profile's name."""
    declared = _part(document, "state_manager")
    kind = declared.get("type")
    if kind not in TYPES:
        raise InvalidArgument(
            f"state_manager.type cannot be {kind!r}", remedy=f"use {' | '.join(TYPES)}", where_in="state_manager.type"
        )
    name = _part(declared, "conf", "state_manager.conf").get("connection")
    profiles = _part(document, "connections")
    if not isinstance(name, str) or not isinstance(profiles.get(name), Mapping):
        raise InvalidArgument(
            f"there is no connection profile {name!r}",
            remedy=f"name one under connections: {', '.join(map(str, profiles)) or 'there are none yet'}",
        )
    return kind, profiles[name], name


def profile_url(kind: str, profile: Mapping[str, Any], environment: Mapping[str, str], name: str = "connection") -> URL:
    """Returns the database URL of a connection profile. Pure. Raises InvalidArgument."""
    unknown = sorted(set(profile) - _PROFILE)
    if unknown:
        raise InvalidArgument(
            f"unknown field {unknown[0]!r} in a connection profile",
            remedy=f"use {', '.join(sorted(_PROFILE))}",
            profile=name,
        )
    filled = {key: _filled(key, value, environment, name) for key, value in profile.items()}
    return _url(kind, filled, name)


def _url(kind: str, profile: Mapping[str, Any], name: str) -> URL:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    if "url" in profile:
        try:
            url = make_url(profile["url"])
        except (ArgumentError, ValueError):
            raise InvalidArgument(
                "the url is not a database URL", remedy="write it like mysql://host/name", profile=name
            ) from None
        found = url.drivername.partition("+")[0]
        if {"mariadb": "mysql", "postgres": "postgresql"}.get(found, found) != TYPES[kind].driver:
            raise InvalidArgument(
                f"the url names a {found} database, but {kind} needs {TYPES[kind].driver}",
                remedy="use the type that matches the URL",
                profile=name,
            )
        return url
    if not profile.get("database"):
        raise InvalidArgument("a connection profile must name a database", remedy="add database:", profile=name)
    driver, options = TYPES[kind].driver, {**TYPES[kind].options, **(profile.get("options") or {})}
    if driver == "sqlite":
        return URL.create("sqlite", database=str(profile["database"]), query=options)
    try:
        port = int(profile["port"]) if profile.get("port") else None
    except ValueError:
        raise InvalidArgument(f"{profile['port']!r} is not a port", remedy="use a number", profile=name) from None
    return URL.create(
        driver,
        username=profile.get("username"),
        password=profile.get("password"),
        host=str(profile.get("host") or "127.0.0.1"),
        port=port,
        database=str(profile["database"]),
        query={key: str(value) for key, value in options.items()},
    )


def _filled(key: str, value: Any, environment: Mapping[str, str], profile: str) -> Any:
    """Replaces ``${NAME}`` by the environment's values. A password can only be given that way."""
    if isinstance(value, Mapping):
        return {inner: _filled(inner, each, environment, profile) for inner, each in value.items()}
    if not isinstance(value, str):
        value = None if value is None else str(value)
    if key == "password" and value is not None and not _VARIABLE.fullmatch(value):
        raise InvalidArgument(
            "a connection profile contains a plain-text password",
            remedy="set it in the environment and write ${NAME}",
            profile=profile,
        )

    def look_up(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise InvalidArgument(f"{match[1]} is not set in the environment", remedy="set it", profile=profile)
        return environment[match[1]]

    return None if value is None else _VARIABLE.sub(look_up, value)


def _document(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    document = read_document(Path(source), lambda _: True)
    if not isinstance(document, Mapping):
        raise InvalidArgument(f"{source} declares no ledger", remedy="add state_manager: and connections:")
    return document


def _part(document: Mapping[str, Any], key: str, where: str | None = None) -> Mapping[str, Any]:
    part = document.get(key)
    if not isinstance(part, Mapping):
        raise InvalidArgument(f"{where or key} is missing", remedy=f"add {where or key}: with its fields")
    return part
