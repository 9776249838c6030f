"""Connections of this process, by its settings. With plain text, no library that reads certificates is imported."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from stateflow.settings import CONFIG, NO_TOKEN, ConnectionSettings

if TYPE_CHECKING:
    from stateflow.security.files import TlsFiles

_NAMES = (
    "STATEFLOW_TLS_CA",
    "STATEFLOW_TLS_CERT",
    "STATEFLOW_TLS_KEY",
    "STATEFLOW_TLS_CRL",
    "STATEFLOW_TOKEN",
    "STATEFLOW_TOKEN_FILE",
    "STATEFLOW_INSECURE",
    "STATEFLOW_HTTP_PROXY",
    CONFIG,
)
_handed = ""


def use_token(text: str) -> None:
    """Sets the token that this process was handed, which comes before its settings; empty: it was handed none."""
    global _handed  # noqa: PLW0603 - set in a worker of Spark's, which does one task at a time
    _handed = text


@functools.lru_cache(maxsize=64)
def _settings(handed: str, *_: str | None) -> ConnectionSettings:
    return _by_token(token=SecretStr(handed)) if handed else ConnectionSettings()


def of_file(path: Path) -> ConnectionSettings:
    """Returns the settings of a connection by the token in a file, regardless of other settings."""
    return _by_token(token_file=str(path))


def _by_token(token: SecretStr = NO_TOKEN, token_file: str = "") -> ConnectionSettings:
    return ConnectionSettings(token=token, token_file=token_file, tls_ca="", tls_cert="", tls_key="", tls_crl="")


def connection_settings() -> ConnectionSettings:
    """Returns the settings of connections by the environment as it is now, and the file that it names. Raises
    InvalidArgument."""
    return _settings(_handed, *(os.environ.get(name) for name in _NAMES))


def own_token() -> str:
    """Returns the token to hand to processes that work for this one elsewhere; empty: it has none. Raises
    BadCertificate."""
    if not connection_settings().by_token:
        return ""
    files = tls_files()
    assert files is not None
    return files.token()


@functools.lru_cache(maxsize=64)
def _files(settings: ConnectionSettings) -> TlsFiles:
    from stateflow.security.files import TlsFiles

    return TlsFiles(settings)


def tls_files() -> TlsFiles | None:
    """Returns the TLS files that all channels and servers of this process share. None: plain text. Raises
    InvalidArgument, BadCertificate."""
    found = connection_settings()
    return _files(found) if found.tls else None
