"""The schema of a ledger's database: locks on preparing it, and upgrades."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import create_engine

from stateflow.ledger import App, Ledger, Record, RecordState, schema


class Mysql:
    """A connection to MySQL that has the database ``name``, and refuses the names of locks that MySQL refuses."""

    def __init__(self, name: str, *, is_mariadb: bool = False) -> None:
        self.dialect = SimpleNamespace(is_mariadb=is_mariadb)
        self.name, self.locked = name, ""

    def execute(self, statement: Any, values: dict[str, Any] | None = None) -> Any:
        if str(statement) == "SELECT DATABASE()":
            return SimpleNamespace(scalar=lambda: self.name)
        assert str(statement).startswith("SELECT GET_LOCK(")
        self.locked = (values or {}).get("name", f"stateflow.{self.name}")
        assert self.dialect.is_mariadb or len(self.locked) <= 64
        return SimpleNamespace(scalar=lambda: 1)


def test_a_database_of_mysql_may_have_a_long_name() -> None:
    """MySQL refuses names of locks above 64 characters. Shorter ones stay as earlier releases chose them."""
    locked = {}
    for name in ("x", "y" * 54, "y" * 54 + "1", "y" * 54 + "2"):
        connection: Any = Mysql(name)
        schema._lock(connection, "mysql")
        locked[name] = connection.locked
    assert len(set(locked.values())) == 4
    assert [each for name, each in locked.items() if each == f"stateflow.{name}"] == [
        "stateflow.x",
        f"stateflow.{'y' * 54}",
    ]
    connection = Mysql("y" * 60, is_mariadb=True)
    schema._lock(connection, "mysql")
    assert connection.locked == f"stateflow.{'y' * 60}"


V0 = """
CREATE TABLE ledger_record (
    record_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, item_id VARCHAR(255) NOT NULL, seq INTEGER NOT NULL,
    app_name VARCHAR(128) NOT NULL, app_version VARCHAR(64) NOT NULL, app_instance VARCHAR(128),
    state VARCHAR(16) NOT NULL, previous_record_id BIGINT, author VARCHAR(128) NOT NULL,
    timestamp_us BIGINT NOT NULL, run_id VARCHAR(64) NOT NULL, payload TEXT,
    CONSTRAINT ledger_record_item_seq UNIQUE (item_id, seq)
)
"""


def test_a_ledger_from_before_there_were_migrations(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(V0)
        for row in (
            (1, "move/1", 0, "app", "1", None, "NEW", None, "me", 5, "", '{"a": 1}'),
            (2, "move/1", 1, "app", "1", None, "PROCESSING", 1, "me", 6, "", None),
            (3, "move/2", 0, "app", "1", None, "NEW", None, "me", 7, "", None),
        ):
            connection.exec_driver_sql(f"INSERT INTO ledger_record VALUES ({', '.join('?' * 12)})", row)
    engine.dispose()
    with Ledger(url) as ledger:
        assert ledger.verify() == []
        first = Record(1, "move/1", 0, App("app", "1"), RecordState.NEW, None, "me", 5, "", {"a": 1})
        assert next(ledger.records()) == first
        assert ledger.put("move/1", App("app", "2"), RecordState.PROCESSED, 2).record_id == 4
        assert ledger.query() == ["move/1", "move/2"]
