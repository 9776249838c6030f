"""Records of the ledger: their data types, the schemas of their payloads, and the tables that store them.

A record's payload is stored as JSON. If the record names a schema, the payload is checked against it.

``ledger_record`` holds the records; ``ledger_archive`` holds those that were archived. ``ledger_item``,
``ledger_verdict`` and the tables of stages, batches, entities and jobs are projections: they are written in the
transaction that writes the records, and can be derived from them. ``ledger_lease`` holds the end of each lock's lease,
by the database's clock. ``ledger_identity`` holds the ledger's id, and ``ledger_hold`` its leader lease, in one row
each. ``ledger_bundle`` holds the code bundles of operators: records name a bundle by its digest.

One definition of the tables serves all databases; only the column types differ between them. Points in time are stored
as microseconds since 1970-01-01 UTC, within the range of a datetime.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema_specifications import REGISTRY as SPECIFICATIONS  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects import mssql, mysql, postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from stateflow.errors import InvalidArgument, InvalidPayload
from stateflow.types import shown

#: in bytes of UTF-8: the limit that object stores have for keys
ITEM_ID_MAX = 1024
#: application name of a skip that applies to every application
EVERYONE = "*"


class RecordState(StrEnum):
    NEW = "NEW"
    PROCESSING = "PROCESSING"
    PROCESSED = "PROCESSED"
    FAILED = "FAILED"
    RESOLVED = "RESOLVED"
    SKIPPED = "SKIPPED"


class Kind(StrEnum):
    """The view that an item belongs to. Ledger calls over many items list only items of kind ITEM."""

    ITEM = "item"
    STAGE = "stage"
    BATCH = "batch"
    ENTITY = "entity"
    JOB = "job"

    @classmethod
    def of(cls, payload_schema: str | None) -> Kind:
        """Returns the kind of an item whose first payload has this schema: STAGE for ``stateflow.stage`` and so on,
        ITEM for every other schema and for None."""
        prefix, _, name = (payload_schema or "").partition(".")
        return cls(name) if prefix == "stateflow" and name in _VIEWS else cls.ITEM

    @property
    def payload_schema(self) -> str:
        return f"stateflow.{self.value}"


_VIEWS = frozenset({"stage", "batch", "entity", "job"})


@dataclass(frozen=True, slots=True)
class App:
    """An application that writes records. With ``instance`` None it stands for every instance of that name; versions
    are never compared."""

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
    """A record to be written.

    Attributes:
        previous: the record that this one answers, given as a record, its id, or an earlier entry of the same call.
        lease_s: lease of a PROCESSING record, in seconds; None: the ledger's default.
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


#: a payload of this size fits into MySQL's smallest usual packet, an escape for each quote and backslash included
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
    """Returns, in words, how a payload violates this schema; None: the payload is valid."""
    try:
        found = best_match(_validator(schema).iter_errors(payload))
    except Exception as error:  # noqa: BLE001 - stored text may be no schema, and fails in any way
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
    """Builds a validator that resolves references within the schema and to JSON Schema's own schemas, and fetches
    nothing.
    """
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
        raise InvalidArgument(f"the schema name {name!r} is reserved", remedy="choose one without 'stateflow.'")
    try:
        if not isinstance(schema, Mapping):
            raise TypeError("it is not a dict")
        Draft202012Validator.check_schema(schema)
        body = json.dumps(schema, sort_keys=True, allow_nan=False)
        _check_references(schema)
        return body
    except (SchemaError, TypeError, ValueError, RecursionError, re.error, Unresolvable) as error:
        said = error.message if isinstance(error, SchemaError) else _said(error)
        raise InvalidArgument(
            f"the schema is not a JSON schema: {said[:200]}",
            remedy="follow JSON Schema 2020-12, see json-schema.org",
            schema=name,
        ) from error


# -- Points in time --------------------------------------------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: first valid time; the limits are a year inside datetime's range, so that every time zone can show all valid times
FIRST_US = (datetime(2, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND
LAST_US = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND - 1


def is_time(us: object) -> bool:
    return isinstance(us, int) and FIRST_US <= us <= LAST_US


def to_time(us: Any) -> Any:
    """Converts microseconds to a datetime in UTC. A value that is not a time, as in a damaged or older ledger, is
    returned unchanged.
    """
    return _EPOCH + us * _MICROSECOND if is_time(us) else us


def microseconds(name: str, value: Any) -> int:
    """Converts a datetime or ISO 8601 text with its zone to microseconds; returns a number of microseconds unchanged.
    Raises InvalidArgument for any other value, and for times outside the years 2 to 9998."""
    us = value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            pass
    if isinstance(value, datetime) and value.tzinfo is not None:
        us = (value - _EPOCH) // _MICROSECOND
    if isinstance(us, bool) or not isinstance(us, int):
        raise InvalidArgument(
            f"{name} cannot be {shown(value)}",
            remedy="use a datetime or ISO text with a time zone, e.g. datetime.now(timezone.utc)",
        )
    if not is_time(us):
        raise InvalidArgument(
            f"{name} cannot be {shown(value)}, which is not within the years 2 to 9998",
            remedy="pass whole numbers as microseconds since 1970-01-01 UTC",
        )
    return us


# -- Column types ----------------------------------------------------------------------------------------------------


def text_id(length: int) -> TypeEngine[str]:
    """Type of text that every database compares byte by byte: ``a`` and ``A`` are two ids, and all databases sort ids
    alike."""
    return (
        String(length)
        .with_variant(mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin"), "mysql")
        .with_variant(mssql.NVARCHAR(length, collation="Latin1_General_BIN2"), "mssql")
        .with_variant(postgresql.VARCHAR(length, collation="C"), "postgresql")
    )


class ItemId(TypeDecorator[str]):
    """Type of an item's id, compared byte by byte. Ids have up to 1,024 bytes, as keys of object stores do. MySQL's
    indexes have no room for 1,024 characters of up to four bytes each, so MySQL stores bytes. SQL Server (2019 and
    later) counts the length in UTF-8 bytes."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        types: dict[str, TypeEngine[Any]] = {
            "mysql": mysql.VARBINARY(ITEM_ID_MAX),
            "mssql": mssql.VARCHAR(ITEM_ID_MAX, collation="Latin1_General_100_BIN2_UTF8"),
            "postgresql": postgresql.VARCHAR(ITEM_ID_MAX, collation="C"),
        }
        return dialect.type_descriptor(types.get(dialect.name, String(ITEM_ID_MAX)))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        return value.encode("utf-8", "surrogatepass") if dialect.name == "mysql" and value is not None else value

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def long_text() -> TypeEngine[str]:
    return Text().with_variant(mysql.LONGTEXT(charset="utf8mb4"), "mysql").with_variant(mssql.NVARCHAR(), "mssql")


def long_bytes() -> TypeEngine[bytes]:
    return LargeBinary().with_variant(mysql.LONGBLOB(), "mysql")


def big_key() -> TypeEngine[int]:
    """Type of a key that the database numbers: SQLite numbers rows by itself only where the type is exactly INTEGER."""
    return BigInteger().with_variant(Integer, "sqlite")


class now_us(FunctionElement[int]):  # noqa: N801 - named as the SQL function that it is
    """Microseconds since 1970-01-01 UTC by the database's clock. The value is constant within a statement, so that an
    index serves comparisons with it."""

    type = BigInteger()
    inherit_cache = True


_NOW_US = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS BIGINT)",
    # not NOW(): local time, in which an hour occurs twice when summer time ends
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "mssql": "DATEDIFF_BIG(microsecond, '1970-01-01', SYSUTCDATETIME())",
}


@compiles(now_us)
def _compile_now_us(element: now_us, compiler: Any, **_: Any) -> str:
    return _NOW_US[compiler.dialect.name]


class same_text(FunctionElement[bool]):  # noqa: N801 - named as the comparison that it is
    """Compares two texts byte by byte. Needed for columns of type ``long_text``, because MySQL and SQL Server compare
    those by a collation for which ``a`` and ``A`` are equal."""

    type = Boolean()
    inherit_cache = True


@compiles(same_text)
def _compile_same_text(element: same_text, compiler: Any, **options: Any) -> str:
    one, other = (compiler.process(each, **options) for each in element.clauses)
    return {
        "mysql": f"CAST({one} AS BINARY) = CAST({other} AS BINARY)",
        "mssql": f"{one} COLLATE Latin1_General_BIN2 = {other}",
    }.get(compiler.dialect.name, f"{one} = {other}")


# -- Tables ----------------------------------------------------------------------------------------------------------

#: revision of a fresh ledger's schema, which this program reads and writes
REVISION = "0004"
VERSION_TABLE = "ledger_version"

METADATA = MetaData()
OPTIONS: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin"}


def _key(*columns: str) -> PrimaryKeyConstraint:
    """Builds a primary key that is not clustered: it is longer than SQL Server allows for the key of a clustered
    index."""
    return PrimaryKeyConstraint(*columns, mssql_clustered=False)


def _record_columns() -> list[Column[Any]]:
    return [
        Column("item_id", ItemId(), nullable=False),
        Column("seq", Integer, nullable=False),
        Column("app_name", text_id(128), nullable=False),
        Column("app_version", text_id(64), nullable=False),
        Column("app_instance", text_id(128)),
        Column("state", text_id(16), nullable=False),
        Column("previous_record_id", BigInteger),
        Column("author", text_id(128), nullable=False),
        Column("timestamp_us", BigInteger, nullable=False),
        Column("run_id", text_id(64), nullable=False),
        Column("payload", long_text()),
        Column("payload_schema", text_id(128)),
    ]


RECORD = Table(
    "ledger_record",
    METADATA,
    Column("record_id", big_key(), primary_key=True, autoincrement=True),
    *_record_columns(),
    UniqueConstraint("item_id", "seq", name="ledger_record_item_seq"),
    sqlite_autoincrement=True,
    **OPTIONS,
)
ARCHIVE = Table(
    "ledger_archive",
    METADATA,
    Column("record_id", big_key(), primary_key=True, autoincrement=False),
    *_record_columns(),
    UniqueConstraint("item_id", "seq", name="ledger_archive_item_seq"),
    **OPTIONS,
)
ITEM = Table(
    "ledger_item",
    METADATA,
    Column("item_id", ItemId()),
    Column("kind", text_id(16), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("state", text_id(16), nullable=False),
    Column("newest_record_id", BigInteger, nullable=False),
    Column("blocking_record_id", BigInteger),
    Column("blocking_state", text_id(16)),
    Column("created_us", BigInteger, nullable=False),
    Column("updated_us", BigInteger, nullable=False),
    Column("archived", SmallInteger, nullable=False),
    _key("item_id"),
    Index("ledger_item_ready", "kind", "archived", "blocking_record_id", "item_id"),
    Index("ledger_item_state", "kind", "archived", "state", "item_id"),
    Index("ledger_item_age", "archived", "state", "updated_us"),
    **OPTIONS,
)
#: applications that processed an item, and those that must skip it; ``app_instance`` is '' for none, as NULLs would not
#: be unique
VERDICT = Table(
    "ledger_verdict",
    METADATA,
    Column("item_id", ItemId()),
    Column("verdict", text_id(16)),
    Column("app_name", text_id(128)),
    Column("app_instance", text_id(128)),
    _key("item_id", "verdict", "app_name", "app_instance"),
    Index("ledger_verdict_app", "verdict", "app_name", "app_instance", "item_id"),
    **OPTIONS,
)
LEASE = Table(
    "ledger_lease",
    METADATA,
    Column("item_id", ItemId()),
    Column("record_id", BigInteger, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    _key("item_id"),
    Index("ledger_lease_until", "until_us"),
    **OPTIONS,
)
SCHEMA = Table(
    "ledger_schema",
    METADATA,
    Column("name", text_id(128), primary_key=True),
    Column("body", long_text(), nullable=False),
    **OPTIONS,
)
IDENTITY = Table(
    "ledger_identity",
    METADATA,
    Column("only", SmallInteger, primary_key=True, autoincrement=False),
    Column("id", text_id(64), nullable=False),
    **OPTIONS,
)
HOLD = Table(
    "ledger_hold",
    METADATA,
    Column("only", SmallInteger, primary_key=True, autoincrement=False),
    Column("term", BigInteger, nullable=False),
    Column("holder", text_id(64), nullable=False),
    Column("about", long_text(), nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False),
    **OPTIONS,
)
#: code bundles of operators, in parts; ``digest`` is the SHA-256 of all bodies, joined
BUNDLE = Table(
    "ledger_bundle",
    METADATA,
    Column("digest", text_id(64)),
    Column("number", Integer, autoincrement=False),
    Column("count", Integer, nullable=False),
    Column("stored_us", BigInteger, nullable=False),
    Column("body", long_bytes(), nullable=False),
    _key("digest", "number"),
    **OPTIONS,
)


# -- Tables of views -------------------------------------------------------------------------------------------------

STAGE = Table(
    "ledger_stage",
    METADATA,
    Column("state_id", ItemId()),
    Column("run_id", text_id(64)),
    Column("job_id", text_id(255)),
    Column("correlation_id_in", text_id(255)),
    Column("correlation_id_out", text_id(255)),
    Column("action", text_id(32)),
    Column("status", text_id(16)),
    Column("source_name", long_text()),
    Column("source_type", long_text()),
    Column("sink_name", long_text()),
    Column("sink_type", long_text()),
    Column("source_entity", ItemId()),
    Column("source_filter", long_text()),
    Column("sink_entity", ItemId()),
    Column("sink_filter", long_text()),
    Column("first_record_pulled", long_text()),
    Column("last_record_pulled", long_text()),
    Column("git_sha", text_id(64)),
    Column("sourcing_start_time", BigInteger),
    Column("sourcing_end_time", BigInteger),
    Column("sinking_start_time", BigInteger),
    Column("sinking_end_time", BigInteger),
    Column("updated_on", BigInteger, nullable=False),
    Column("row_count", BigInteger),
    Column("created_on", BigInteger, nullable=False),
    Column("manifest_name", long_text()),
    Column("first_record_id", BigInteger, nullable=False),
    _key("state_id"),
    Index("ledger_stage_order", "first_record_id"),
    Index("ledger_stage_job", "job_id", "first_record_id"),
    Index("ledger_stage_entity", "source_entity", "status", "action", "first_record_id"),
    Index("ledger_stage_run", "run_id", "first_record_id"),
    Index("ledger_stage_sink", "sink_entity", "status", "action", "first_record_id"),
    Index("ledger_stage_status", "status", "first_record_id"),
    Index("ledger_stage_in", "correlation_id_in"),
    Index("ledger_stage_out", "correlation_id_out"),
    **OPTIONS,
)
BATCH = Table(
    "ledger_batch",
    METADATA,
    Column("bid", ItemId()),
    Column("name", long_text()),
    Column("command", long_text()),
    Column("status", text_id(32), nullable=False),
    Column("owner", long_text()),
    Column("affinity", long_text()),
    Column("job_affinity", long_text()),
    Column("created_us", BigInteger, nullable=False),
    Column("started_us", BigInteger),
    Column("ended_us", BigInteger),
    Column("listed", SmallInteger, nullable=False),
    Column("first_record_id", BigInteger, nullable=False),
    Column("worked_us", BigInteger),
    Column("resumed_us", BigInteger),
    _key("bid"),
    Index("ledger_batch_status", "status", "first_record_id"),
    Index("ledger_batch_order", "first_record_id"),
    **OPTIONS,
)
ENTITY = Table(
    "ledger_entity",
    METADATA,
    Column("item_id", ItemId()),
    Column("bid", ItemId(), nullable=False),
    Column("entity", ItemId(), nullable=False),
    Column("status", text_id(16), nullable=False),
    Column("ms", BigInteger),
    Column("result", long_text()),
    Column("first_record_id", BigInteger, nullable=False),
    _key("item_id"),
    Index("ledger_entity_status", "bid", "status", "first_record_id"),
    Index("ledger_entity_slowest", "bid", "ms"),
    **OPTIONS,
)
JOB = Table(
    "ledger_job",
    METADATA,
    Column("job_id", ItemId()),
    Column("bid", ItemId()),
    Column("name", text_id(255)),
    Column("status", text_id(16), nullable=False),
    Column("tries", Integer, nullable=False),
    Column("worker", text_id(255)),
    Column("affinity", long_text()),
    Column("schedule", long_text()),
    Column("fire_us", BigInteger),
    Column("started_us", BigInteger),
    Column("ended_us", BigInteger),
    Column("first_record_id", BigInteger, nullable=False),
    _key("job_id"),
    Index("ledger_job_status", "status", "first_record_id"),
    Index("ledger_job_batch", "bid", "first_record_id"),
    **OPTIONS,
)
#: tables that can be derived from the records
PROJECTIONS = (ITEM, VERDICT, STAGE, BATCH, ENTITY, JOB)
