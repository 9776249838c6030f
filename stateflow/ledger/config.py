"""``state_manager:`` in YAML, and the connection profiles that it names. Secrets come from the environment.

::

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

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import URL

from stateflow.documents import read_document
from stateflow.errors import InvalidArgument
from stateflow.ledger.ledger import Ledger
from stateflow.ledger.manager import StateManager

_ODBC = "ODBC Driver 18 for SQL Server"
_PROFILE = frozenset({"url", "host", "port", "database", "username", "password", "options"})
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class _Declared(StateManager):
    """A state manager of one kind of database.

    Args:
        connection: its profile, as in YAML, or an SQLAlchemy URL.
        environment: values for ``${NAME}`` in the profile; by default this process's environment.
        create: makes the ledger where there is none and upgrades an older one, see ``Ledger``.

    Raises InvalidArgument for what is missing, misspelt or not set in the environment, never showing a secret, and the
    errors of opening a ledger.
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

    Raises InvalidArgument for what is missing, misspelt or not set in the environment, never showing a secret.
    """
    kind, profile, _ = _declared(_document(source))
    return TYPES[kind](profile, environment=environment, create=create)


def ledger_url(document: Mapping[str, Any], environment: Mapping[str, str]) -> URL:
    """Returns the URL of the ledger that a document declares. Pure. Raises InvalidArgument."""
    kind, profile, name = _declared(document)
    return profile_url(kind, profile, environment, name)


def _declared(document: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """Returns the type, the connection profile, and the profile's name."""
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
                "the url is not a database URL", remedy="correct it in the profile", profile=name
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
    """Replaces ``${NAME}`` by the environment's values. A password can come from nowhere else."""
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
