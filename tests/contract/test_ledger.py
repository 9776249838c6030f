"""The ledger keeps its contract on each database."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import event, select
from sqlalchemy.dialects import mssql, mysql
from sqlalchemy.schema import CreateColumn, CreateIndex

from stateflow.clock import ManualClock
from stateflow.ledger import App, Entry, Holder, Ledger
from stateflow.ledger.migrations.versions import v0001_ledger, v0002_hold, v0003_keys, v0004_bundles
from stateflow.ledger.records import HOLD, METADATA, ItemId, now_us
from tests.contract.databases import fresh_database
from tests.contract.ledger_bundles_suite import BundlesContract
from tests.contract.ledger_keeping_suite import KeepingContract
from tests.contract.ledger_leader_lease_suite import HoldContract
from tests.contract.ledger_suite import LedgerContract
from tests.contract.ledger_views_suite import ViewsContract
from tests.sizes import SEED

#: server that the gate runs the contract on; it changes with the commit's seed, and `make test-all` runs both
IN_TURN = ("postgresql", "mariadb")[SEED % 2]


def in_turn(cls: type) -> type:
    return cls if cls.kind == IN_TURN else pytest.mark.thorough(cls)  # type: ignore[attr-defined]


@pytest.fixture(scope="class")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the URL of a database that the tests of a class share; each test uses its own items."""
    with fresh_database(request.cls.kind, tmp_path_factory.mktemp("ledger")) as url:
        yield url


@pytest.fixture(scope="class")
def ledger(url: str) -> Iterator[Ledger]:
    with Ledger(url, author="me", run_id="run-1", clock=ManualClock(123)) as ledger:
        yield ledger


@pytest.fixture
def fresh_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with fresh_database(request.cls.kind, tmp_path) as url:
        yield url


@pytest.fixture
def fresh(fresh_url: str) -> Iterator[Ledger]:
    with Ledger(fresh_url) as ledger:
        yield ledger


class TestSqlite(LedgerContract, KeepingContract, ViewsContract, HoldContract, BundlesContract):
    kind = "sqlite"

    def full_scans(self, connection: Any, statement: str, parameters: Any) -> list[str]:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
        return [row.detail for row in plan if row.detail.startswith("SCAN ledger_")]


@in_turn
class TestPostgresql(LedgerContract, KeepingContract, ViewsContract, HoldContract, BundlesContract):
    kind = "postgresql"

    def full_scans(self, connection: Any, statement: str, parameters: Any) -> list[str]:
        connection.exec_driver_sql("SET enable_seqscan = off")  # what is still scanned has no index
        plan = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars().all()
        return [line.strip() for line in plan if "Seq Scan" in line]


@in_turn
class TestMariadb(LedgerContract, KeepingContract, ViewsContract, HoldContract, BundlesContract):
    kind = "mariadb"

    def full_scans(self, connection: Any, statement: str, parameters: Any) -> list[str]:
        plan = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).mappings().all()
        return [str(dict(row)) for row in plan if row["type"] == "ALL" and str(row["table"]).startswith("ledger_")]


def test_the_clock_of_mysql_does_not_follow_local_time() -> None:
    """Leases end by UTC, because an hour of local time occurs twice when summer time ends.

    In the first of these hours UNIX_TIMESTAMP(NOW()) is an hour ahead on servers whose time zone has summer time. Such
    a zone cannot be set here: the servers under test have no tables of time zones.
    """
    sql = str(select(now_us()).compile(dialect=mysql.dialect()))  # type: ignore[no-untyped-call]
    assert "UTC_TIMESTAMP(6)" in sql
    assert "NOW(" not in sql


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_connection_to_a_silent_machine_ends(kind: str, tmp_path: Path) -> None:
    """The system gives up a connection whose other end acknowledges nothing, in half a minute instead of hours.

    Without that a controller whose server failed over would wait on the old connection.
    """
    with fresh_database(kind, tmp_path) as url, Ledger(url) as ledger, ledger.database.reading() as connection:
        driver = connection.connection.driver_connection
        number = driver.fileno() if kind == "postgresql" else driver._sock.fileno()  # type: ignore[union-attr]
        with socket.socket(fileno=os.dup(number)) as link:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL
            assert [link.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [30_000, 10, 10]


def test_a_postgresql_database_without_an_encoding_keeps_every_text(tmp_path: Path) -> None:
    with fresh_database("postgresql", tmp_path, "ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'") as url:
        with Ledger(url, author="Zoë") as ledger:
            ledger.process_new_item("größe", App("müller"), lambda _: {"x": "ü€"})
        with Ledger(url, create=False) as again:
            item = again.item("größe")
            assert item is not None
            assert (item.records[-1].payload, item.records[-1].author) == ({"x": "ü€"}, "Zoë")
            assert again.verify() == []


# -- SQL Server and Azure SQL: compiled, not run ----------------------------------------------------------------


def test_every_statement_compiles_for_sql_server() -> None:
    """Every statement that the public API executes can be compiled for SQL Server; this needs no driver."""
    statements: list[Any] = []
    with Ledger("sqlite://") as ledger:
        ledger.put_many(Entry(f"item-{n:05}", App(f"app-{n % 7}"), "NEW") for n in range(3000))
        ledger.put("item-00005", App("app-5"), "PROCESSING")
        event.listen(ledger.database.engine, "before_execute", lambda _c, statement, *_: statements.append(statement))
        KeepingContract.everything(ledger)
        ledger.verify()
        ledger.rebuild()
    assert len(statements) > 100
    server = mssql.dialect()  # type: ignore[no-untyped-call]
    compiled = {str(statement.compile(dialect=server)) for statement in statements if hasattr(statement, "compile")}
    assert any("WITH (UPDLOCK, ROWLOCK)" in sql for sql in compiled), "an item's head is locked before it is judged"
    assert any("SYSUTCDATETIME" in sql for sql in compiled)
    assert all("LIMIT" not in sql for sql in compiled)


def test_who_looks_at_the_hold_keeps_it_for_sql_server() -> None:
    """The check of the leader lease locks the lease's row on SQL Server, too.

    SQL Server has no FOR SHARE. Without a lock hint, another process could take the lease between a successful check
    and the write that follows it.
    """
    statements: list[Any] = []
    with Ledger("sqlite://") as ledger:
        ledger.take_leadership(Holder("one"), 600.0)
        event.listen(ledger.database.engine, "before_execute", lambda _c, statement, *_: statements.append(statement))
        ledger.put("item", App("app"), "NEW")
    server = mssql.dialect()  # type: ignore[no-untyped-call]
    compiled = [str(statement.compile(dialect=server)) for statement in statements]
    assert [sql for sql in compiled if "WITH (HOLDLOCK, ROWLOCK)" in sql and HOLD.name in sql]


def test_the_schema_compiles_for_sql_server() -> None:
    said = StringIO()
    context = MigrationContext.configure(
        dialect_name="mssql", opts={"as_sql": True, "output_buffer": said, "transactional_ddl": False}
    )
    with Operations.context(context):
        v0001_ledger._create_record()
        v0001_ledger._create_others()
        v0002_hold.create(set())
        v0003_keys.upgrade()
        v0004_bundles.create()
    migrated = " ".join(said.getvalue().split())
    key_type = "VARCHAR(1024) COLLATE Latin1_General_100_BIN2_UTF8"
    server = mssql.dialect()  # type: ignore[no-untyped-call]
    for table in METADATA.sorted_tables:
        assert f"CREATE TABLE {table.name} (" in migrated
        keys = {name for name, _ in v0003_keys.KEYS.get(table.name, ())}
        assert keys == {each.name for each in table.columns if isinstance(each.type, ItemId)}
        for column in table.columns:
            made = " ".join(str(CreateColumn(column).compile(dialect=server)).split())
            changed = f"ALTER TABLE {table.name} ALTER COLUMN {column.name} {key_type}"
            added = f"ALTER TABLE {table.name} ADD {made}"
            assert (changed if column.name in keys else made) in migrated or added in migrated
        for index in table.indexes:
            created = str(CreateIndex(index).compile(dialect=server))
            assert created in migrated
            if keys & set(index.columns.keys()):
                assert migrated.rindex(created) > migrated.rindex(key_type), "it was away while its column changed"
        primary = ", ".join(table.primary_key.columns.keys())
        if keys & set(table.primary_key.columns.keys()):
            assert f"ADD CONSTRAINT {table.name}_key PRIMARY KEY NONCLUSTERED ({primary})" in migrated
    assert "NVARCHAR(255) COLLATE Latin1_General_BIN2" in migrated
