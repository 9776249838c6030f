"""The ledger's tables. One definition serves all databases; the types here hold what differs between them.

``ledger_record`` is the truth; ``ledger_archive`` holds the records that were archived. ``ledger_item``,
``ledger_verdict`` and the tables of stages, batches, entities and jobs are projections: they are written in the
transaction that writes the records, and can be derived from them. ``ledger_lease`` says until when a lock holds, by the
database's clock. ``ledger_identity`` has the id of this ledger and ``ledger_hold`` its present holder; each is one row.
``ledger_bundle`` has the code bundles of operators: records name a bundle by its digest.

Points in time are stored as microseconds since 1970-01-01 UTC, all of which a datetime can show.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
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

from stateflow.errors import InvalidArgument
from stateflow.ledger.records import ITEM_ID_MAX
from stateflow.types import shown

#: revision of a fresh ledger's schema, which this program reads and writes
REVISION = "0004"
VERSION_TABLE = "ledger_version"

METADATA = MetaData()

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: a year short of datetime's range, so that every zone can show them
FIRST_US = (datetime(2, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND
LAST_US = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND - 1


# -- points in time -------------------------------------------------------------------------------------------


def is_time(us: object) -> bool:
    return isinstance(us, int) and FIRST_US <= us <= LAST_US


def to_time(us: Any) -> Any:
    """Converts to a datetime in UTC. Other values, which occur only in damaged or older ledgers, are returned
    unchanged."""
    return _EPOCH + us * _MICROSECOND if is_time(us) else us


def microseconds(name: str, value: Any) -> int:
    """Converts a datetime or ISO 8601 text with its zone to microseconds; microseconds are returned. Raises
    InvalidArgument."""
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
            f"{name} cannot be {shown(value)}: not within the years 2 to 9998",
            remedy="pass whole numbers as microseconds since 1970-01-01 UTC",
        )
    return us


# -- types ----------------------------------------------------------------------------------------------------


def text_id(length: int) -> TypeEngine[str]:
    """Type of text that every database compares byte by byte: ``a`` and ``A`` are two ids, and their order is the
    same."""
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
    """Microseconds since 1970-01-01 UTC by the database's clock, at the start of the statement, so that an index serves
    it."""

    type = BigInteger()
    inherit_cache = True


_NOW_US = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS BIGINT)",
    "mysql": "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)",
    "mssql": "DATEDIFF_BIG(microsecond, '1970-01-01', SYSUTCDATETIME())",
}


@compiles(now_us)
def _compile_now_us(element: now_us, compiler: Any, **_: Any) -> str:
    return _NOW_US[compiler.dialect.name]


# -- records --------------------------------------------------------------------------------------------------

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
#: code bundles of operators, in parts; ``body`` of all parts has the SHA-256 ``digest``
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


# -- views ----------------------------------------------------------------------------------------------------

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
