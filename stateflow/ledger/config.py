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
from typing import Any

import yaml
from sqlalchemy import URL

from stateflow.errors import InvalidArgument
from stateflow.ledger.ledger import Ledger
from stateflow.ledger.manager import StateManager

DRIVERS = {
    "SqLiteStateManager": "sqlite",
    "MySQLStateManager": "mysql",
    "PostgreSQLStateManager": "postgresql",
    "SQLServerStateManager": "mssql",
    "AzureSQLServerStateManager": "mssql",
}
_ODBC = "ODBC Driver 18 for SQL Server"
_PROFILE = frozenset({"url", "host", "port", "database", "username", "password", "options"})
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def state_manager_from_yaml(
    source: str | Path | Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> StateManager:
    """The state manager that a file, or a document already read, declares; its ledger is opened.

    Raises InvalidArgument for what is missing, misspelt or not set in the environment, never showing a secret.
    """
    url = ledger_url(_document(source), os.environ if environment is None else environment)
    return StateManager(Ledger(url.render_as_string(hide_password=False)))


def ledger_url(document: Mapping[str, Any], environment: Mapping[str, str]) -> URL:
    """Pure. Raises InvalidArgument."""
    declared = _part(document, "state_manager")
    kind = declared.get("type")
    if kind not in DRIVERS:
        raise InvalidArgument(
            f"state_manager.type cannot be {kind!r}", remedy=f"use {' | '.join(DRIVERS)}", where_in="state_manager.type"
        )
    name = _part(declared, "conf", "state_manager.conf").get("connection")
    profiles = _part(document, "connections")
    if not isinstance(name, str) or not isinstance(profiles.get(name), Mapping):
        raise InvalidArgument(
            f"there is no connection profile {name!r}",
            remedy=f"name one under connections: {', '.join(map(str, profiles)) or 'there is none yet'}",
        )
    profile: Mapping[str, Any] = profiles[name]
    unknown = sorted(set(profile) - _PROFILE)
    if unknown:
        raise InvalidArgument(
            f"a connection profile has no {unknown[0]!r}", remedy=f"use {', '.join(sorted(_PROFILE))}", profile=name
        )
    filled = {key: _filled(key, value, environment, name) for key, value in profile.items()}
    return _url(kind, filled, name)


def _url(kind: str, profile: Mapping[str, Any], name: str) -> URL:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    if "url" in profile:
        try:
            return make_url(profile["url"])
        except (ArgumentError, ValueError):
            raise InvalidArgument("its url is no database URL", remedy="see its profile", profile=name) from None
    if not profile.get("database"):
        raise InvalidArgument("a connection profile names a database", remedy="add database:", profile=name)
    driver, options = DRIVERS[kind], dict(profile.get("options") or {})
    if driver == "sqlite":
        return URL.create("sqlite", database=str(profile["database"]), query=options)
    if driver == "mssql":
        options.setdefault("driver", _ODBC)
    if kind == "AzureSQLServerStateManager":
        options.setdefault("Encrypt", "yes")
    try:
        port = int(profile["port"]) if profile.get("port") else None
    except ValueError:
        raise InvalidArgument(f"{profile['port']!r} is no port", remedy="use a number", profile=name) from None
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
    """``${NAME}`` as the environment has it. A password can come from nowhere else."""
    if isinstance(value, Mapping):
        return {inner: _filled(inner, each, environment, profile) for inner, each in value.items()}
    if not isinstance(value, str):
        value = None if value is None else str(value)
    if key == "password" and value is not None and not _VARIABLE.fullmatch(value):
        raise InvalidArgument(
            "a password is written in a file", remedy="put it into the environment and write ${NAME}", profile=profile
        )

    def look_up(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise InvalidArgument(f"{match[1]} is not set in the environment", remedy="set it", profile=profile)
        return environment[match[1]]

    return None if value is None else _VARIABLE.sub(look_up, value)


def _document(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    try:
        document = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{source} cannot be read: {error.strerror}", remedy="name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise InvalidArgument(f"{source} is no YAML: {said[:200]}", remedy="correct it") from error
    if not isinstance(document, Mapping):
        raise InvalidArgument(f"{source} declares nothing", remedy="add state_manager: and connections:")
    return document


def _part(document: Mapping[str, Any], key: str, where: str | None = None) -> Mapping[str, Any]:
    part = document.get(key)
    if not isinstance(part, Mapping):
        raise InvalidArgument(f"{where or key} is missing", remedy=f"add {where or key}: with its fields")
    return part
