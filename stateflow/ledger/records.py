"""The ledger's data types: applications, records, and the state of an item that follows from its records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: bytes of UTF-8, as for the keys of object stores
ITEM_ID_MAX = 1024
#: application name of a skip that holds for every application
EVERYONE = "*"


class RecordState(StrEnum):
    NEW = "NEW"
    PROCESSING = "PROCESSING"
    PROCESSED = "PROCESSED"
    FAILED = "FAILED"
    RESOLVED = "RESOLVED"
    SKIPPED = "SKIPPED"


class Kind(StrEnum):
    """The view that an item belongs to. Calls over many items list only those of kind ITEM."""

    ITEM = "item"
    STAGE = "stage"
    BATCH = "batch"
    ENTITY = "entity"
    JOB = "job"

    @classmethod
    def of(cls, payload_schema: str | None) -> Kind:
        """Returns the kind that the schema of an item's first payload names: ``stateflow.stage`` and so on belong to
        views."""
        prefix, _, name = (payload_schema or "").partition(".")
        return cls(name) if prefix == "stateflow" and name in _VIEWS else cls.ITEM

    @property
    def payload_schema(self) -> str:
        return f"stateflow.{self.value}"


_VIEWS = frozenset({"stage", "batch", "entity", "job"})


@dataclass(frozen=True, slots=True)
class App:
    """An application that writes records. ``instance`` None stands for every instance of that name; versions are never
    compared."""

    name: str
    version: str = ""
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One immutable record. ``seq`` counts an item's records from 0; ``timestamp_us`` is UTC microseconds."""

    record_id: int
    item_id: str
    seq: int
    app: App
    state: RecordState
    previous_record_id: int | None
    author: str
    timestamp_us: int
    run_id: str
    payload: Any
    payload_schema: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A record to be written. ``previous``: a record, its id, or an earlier entry of the same batch.

    ``lease_s``: lease of a PROCESSING record, in seconds; None: the ledger's default.
    """

    item_id: str
    app: App
    state: RecordState | str
    previous: Record | int | Entry | None = None
    payload: Any = None
    payload_schema: str | None = None
    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class Who:
    """The part of an application that records are matched by: name and instance."""

    name: str
    instance: str | None

    @classmethod
    def of(cls, app: App | str) -> Who:
        return cls(app, None) if isinstance(app, str) else cls(app.name, app.instance)


@dataclass(frozen=True, slots=True)
class Head:
    """The current state of an item: the fold of its records, stored beside them.

    ``state``: state of the newest record that is not a skip. ``blocking_record_id``: see ``rules.blocking``.
    """

    item_id: str
    kind: Kind
    seq: int
    state: RecordState
    newest_record_id: int
    blocking_record_id: int | None
    blocking_state: RecordState | None
    created_us: int
    updated_us: int
    processed: frozenset[Who] = frozenset()
    skipped: frozenset[Who] = frozenset()


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in a ledger. ``code`` is stable, ``what`` is for people."""

    code: str
    what: str
    item_id: str | None = None
    record_id: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """An item with its records. ``state``: state of the newest record that is not a skip."""

    item_id: str
    records: tuple[Record, ...]
    state: RecordState
    blocking: Record | None
    faults: tuple[Fault, ...] = ()
    archived: bool = False
    kind: Kind = Kind.ITEM

    @property
    def consistent(self) -> bool:
        return not self.faults
