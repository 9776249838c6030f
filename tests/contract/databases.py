"""Empty databases for tests, in SQLite and on the servers that the environment names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

SERVERS = {"postgresql": "STATEFLOW_TEST_POSTGRES_URL", "mariadb": "STATEFLOW_TEST_MARIADB_URL"}
_DRIVERS = {"postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql"}


@contextmanager
def fresh_database(kind: str, directory: Path, options: str = "") -> Iterator[str]:
    """Yields the SQLAlchemy URL of an empty database, and drops the database afterwards.

    Args:
        options: of the statement that creates the database on a server.

    Skips the test if the environment names no server of this kind.
    """
    if kind == "sqlite":
        yield f"sqlite:///{directory / f'{uuid.uuid4().hex}.db'}"
        return
    given = os.environ.get(SERVERS[kind])
    if not given:
        pytest.skip(f"{SERVERS[kind]} names no {kind} server")
    server = make_url(given)
    name = f"stateflow_test_{uuid.uuid4().hex}"
    admin = create_engine(server.set(drivername=_DRIVERS[kind]), isolation_level="AUTOCOMMIT")
    try:
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} {options}"))
        try:
            yield server.set(database=name).render_as_string(hide_password=False)
        finally:
            with admin.connect() as connection:
                force = " WITH (FORCE)" if kind == "postgresql" else ""
                connection.execute(text(f"DROP DATABASE {name}{force}"))
    finally:
        admin.dispose()
