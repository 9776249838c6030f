"""The ledger's data types: applications, records, and the state of an item that follows from its records.

A record's payload is stored as JSON. If it names a schema, it is checked against that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema_specifications import REGISTRY as SPECIFICATIONS  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from stateflow.errors import InvalidArgument, InvalidPayload

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
    """The part of an application by which records are matched: name and instance."""

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
    """One thing that is wrong in a ledger. ``code`` is stable, ``what`` is a sentence for people."""

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


# -- Payloads and their schemas --------------------------------------------------------------------------------------

#: schemas of the views' payloads: ``set`` holds the columns that a record changes
BUILTIN: Mapping[str, Mapping[str, Any]] = {
    kind.payload_schema: {
        "type": "object",
        "required": ["set"],
        "properties": {"set": {"type": "object"}},
    }
    for kind in Kind
    if kind is not Kind.ITEM
}


#: fits MySQL's smallest usual packet, with an escape for each quote and backslash
PAYLOAD_BYTES_MAX = 15 << 20
_HALF = re.compile("[\ud800-\udfff]")


def encode(payload: Any, item_id: str) -> str | None:
    """Returns a payload as JSON text; None stays None. Only lone surrogates are escaped. Raises
    InvalidPayload for a payload that is not JSON, NaN included, or is too large."""
    if payload is None:
        return None
    try:
        text = json.dumps(payload, sort_keys=True, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPayload(
            f"the payload is not JSON: {error}", remedy="use dicts, lists, strings, numbers and None", item=item_id
        ) from error
    if not text.isascii():
        text = _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
    size = stored_bytes(text)
    if size > PAYLOAD_BYTES_MAX:
        raise InvalidPayload(
            f"the payload has {size:,} bytes, the limit is {PAYLOAD_BYTES_MAX:,}",
            remedy="store it elsewhere, and put a reference into the record",
            item=item_id,
        )
    return text


def stored_bytes(text: str) -> int:
    """Returns the size of a text in UTF-8 bytes, with quotes and backslashes counted twice."""
    return (len(text) if text.isascii() else len(text.encode())) + text.count('"') + text.count("\\")


def problem(payload: Any, schema: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a payload, or None."""
    try:
        found = best_match(_validator(schema).iter_errors(payload))
    except (Unresolvable, RecursionError, re.error) as error:
        return f"its schema cannot be applied: {_said(error)}"
    if found is None:
        return None
    where = "/".join(str(each) for each in found.absolute_path)
    return f"{found.message[:200]}{f' at {where}' if where else ''}"


def check(payload: Any, name: str, schema: Mapping[str, Any] | None, item_id: str) -> None:
    """Checks a payload against the schema that it names. Raises InvalidPayload."""
    if schema is None:
        raise InvalidPayload(
            f"unknown payload schema {name!r}", remedy="register it with ledger.register_schema", item=item_id
        )
    wrong = problem(payload, schema)
    if wrong is not None:
        raise InvalidPayload(
            f"the payload violates its schema: {wrong}", remedy="correct the payload", item=item_id, schema=name
        )


def _validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    """Builds a validator that resolves references within the schema and to JSON Schema's own; it fetches nothing."""
    return Draft202012Validator(schema, registry=SPECIFICATIONS)


def _said(error: Exception) -> str:
    return "it refers to itself endlessly" if isinstance(error, RecursionError) else str(error)[:200]


def _check_references(schema: Mapping[str, Any]) -> None:
    """Checks a schema's references and patterns. Raises Unresolvable, and re.error for an invalid pattern."""
    resource = DRAFT202012.create_resource(schema)
    todo = [(SPECIFICATIONS.resolver_with_root(resource), resource)]
    while todo:
        resolver, here = todo.pop()
        contents = here.contents if isinstance(here.contents, Mapping) else {}
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(contents.get(keyword), str):
                resolver.lookup(contents[keyword])
        for pattern in (contents.get("pattern"), *contents.get("patternProperties", {})):
            if isinstance(pattern, str):
                re.compile(pattern)
        todo += [(resolver.in_subresource(each), each) for each in here.subresources()]


def check_schema(name: str, schema: Mapping[str, Any]) -> str:
    """Returns the schema as canonical JSON. Raises InvalidArgument."""
    if name in BUILTIN or name.startswith("stateflow."):
        raise InvalidArgument(f"the schema name {name!r} is taken", remedy="choose one without 'stateflow.'")
    try:
        Draft202012Validator.check_schema(schema)
        body = json.dumps(schema, sort_keys=True, allow_nan=False)
        _check_references(schema)
        return body
    except (SchemaError, TypeError, ValueError, RecursionError, re.error, Unresolvable) as error:
        said = error.message if isinstance(error, SchemaError) else _said(error)
        raise InvalidArgument(
            f"not a JSON schema: {said[:200]}", remedy="see json-schema.org, 2020-12", schema=name
        ) from error
