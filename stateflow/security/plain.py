"""Decides whether this process's connections use plain text or TLS, and which TLS files they use.

Settings and environment variables choose the TLS files. Plain text is allowed over loopback, and elsewhere only if
``insecure`` is set: :func:`check_served` checks servers, and :func:`check_dialled` channels. With plain text, no
library that reads certificates is imported.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import SecretStr

from stateflow.errors import InsecureRefused
from stateflow.security.roles import Role
from stateflow.settings import CONFIG, NO_TOKEN, ConnectionSettings

if TYPE_CHECKING:
    from stateflow.security.certificates import TlsFiles

log = logging.getLogger(__name__)

#: names of the files that an authority writes
CA, CRL = "ca.pem", "crl.pem"
#: names of the files of a process
OWN_CERT, OWN_KEY = "cert.pem", "key.pem"
#: variables that keep a process with a certificate from using a token of the environment that it inherits
NO_TOKEN_VARIABLES = {"STATEFLOW_TOKEN": "", "STATEFLOW_TOKEN_FILE": ""}

# -- Settings and TLS files of connections ---------------------------------------------------------------------------

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


class Issuer(Protocol):
    """The authority of this process. It issues tokens for processes that work for this process on other machines.

    ``directory``: absolute path of its files, which only the user of this process can read.
    """

    directory: Path

    def task_token(self, operator: str) -> str:
        """Returns a token for processes that send rows to one operator. Raises InvalidArgument, BadCertificate."""


_issuer: Issuer | None = None
#: serial numbers of the administrators' tokens that were given to other processes
_handed_on: set[int] = set()


@contextmanager
def issuing(issuer: Issuer) -> Iterator[None]:
    """Sets the authority of this process within the block."""
    global _issuer  # noqa: PLW0603 - of the process, as its environment is
    before, _issuer = _issuer, issuer
    try:
        yield
    finally:
        _issuer = before


def own_issuer() -> Issuer | None:
    """Returns the authority of this process. None: it has none."""
    return _issuer


def use_token(text: str) -> None:
    """Sets a token for this process, which takes precedence over its settings; empty: the settings apply."""
    global _handed  # noqa: PLW0603 - set in a worker of Spark's, which runs one task at a time
    _handed = text


@functools.lru_cache(maxsize=64)
def _settings(handed: str, *_: str | None) -> ConnectionSettings:
    return _by_token(token=SecretStr(handed)) if handed else ConnectionSettings()


def of_file(path: Path) -> ConnectionSettings:
    """Returns the settings of a connection that uses the token in a file, regardless of other settings."""
    return _by_token(token_file=str(path))


def _by_token(token: SecretStr = NO_TOKEN, token_file: str = "") -> ConnectionSettings:
    return ConnectionSettings(token=token, token_file=token_file, tls_ca="", tls_cert="", tls_key="", tls_crl="")


def connection_settings() -> ConnectionSettings:
    """Returns the settings of connections from the present environment, and from the file that it names. Raises
    InvalidArgument."""
    return _settings(_handed, *(os.environ.get(name) for name in _NAMES))


def task_token(operator: str) -> str:
    """Returns the token for processes that send rows to one operator for this process; empty: there is none.

    If this process has an authority of its own, the token is for that operator only; otherwise it is that of
    :func:`token_to_hand_on`. Raises InvalidArgument, BadCertificate.
    """
    return token_to_hand_on() if _issuer is None else _issuer.task_token(operator)


def token_to_hand_on() -> str:
    """Returns the token of this process, to give it to processes on other machines; empty: there is none.

    Logs a warning, once for each token, if it is an administrator's. Raises BadCertificate.
    """
    token = own_token()
    if token:
        files = tls_files()
        assert files is not None
        own = files.current().own
        if own.identity is not None and own.identity.role == Role.ADMIN and own.serial not in _handed_on:
            _handed_on.add(own.serial)
            log.warning(
                "tasks on executors get the token of %s, with which they may do everything: give this process a token "
                "with fewer rights, `stateflow token issue NAME --role data --operator OPERATOR`",
                own.identity,
            )
    return token


def own_token() -> str:
    """Returns the token of this process; empty: it has none. Raises BadCertificate."""
    if not connection_settings().by_token:
        return ""
    files = tls_files()
    assert files is not None
    return files.token()


@functools.lru_cache(maxsize=64)
def _files(settings: ConnectionSettings) -> TlsFiles:
    from stateflow.security.certificates import TlsFiles

    return TlsFiles(settings)


def tls_files() -> TlsFiles | None:
    """Returns the TLS files that all channels and servers of this process share. None: plain text. Raises
    InvalidArgument, BadCertificate."""
    found = connection_settings()
    return _files(found) if found.tls else None


# -- Variables of a process ------------------------------------------------------------------------------------------


def variables_of(out: Path) -> dict[str, str]:
    """Returns the environment of a process whose files are in ``out``, as an authority has written them."""
    files = {"CA": CA, "CERT": OWN_CERT, "KEY": OWN_KEY, "CRL": CRL}
    return {f"STATEFLOW_TLS_{which}": str(out / file) for which, file in files.items()}


#: former values of the variables that blocks of :func:`environment` have set, for each block
_former: list[dict[str, str | None]] = []


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Sets variables within the block; afterwards they have their former values, or are unset.

    Blocks may end in any order. A variable that a later block has set keeps its value until that block ends.
    """
    before = {variable: os.environ.get(variable) for variable in given}
    _former.append(before)
    os.environ.update(given)
    try:
        yield
    finally:
        number = next(number for number, each in enumerate(_former) if each is before)
        later = _former[number + 1 :]
        del _former[number]
        for variable, value in before.items():
            if over := next((each for each in later if variable in each), None):
                over[variable] = value
            elif value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


# -- Rules for plain text --------------------------------------------------------------------------------------------

REMEDY = (
    "set STATEFLOW_TLS_CA, STATEFLOW_TLS_CERT and STATEFLOW_TLS_KEY (`stateflow certs`), "
    "or allow it with --insecure or STATEFLOW_INSECURE=1"
)
_warned: set[str] = set()


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Tells whether an address is loopback. Names are not looked up, because they may mean another host later."""
    host = host_of(address).lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check_served(listen: str, advertise: str | None, may: str = "control this process") -> None:
    """Checks a server without TLS. Raises InsecureRefused if other machines could reach it; if ``insecure`` allows
    that, logs a warning.

    Args:
        may: what a client that reaches the server could do, for messages.
    """
    for address, verb in ((listen, "listening on"), (advertise, "advertising")):
        if not address or is_loopback(address):
            continue
        if not connection_settings().insecure:
            raise InsecureRefused(
                f"{verb} {host_of(address)} in plain text would let everybody who reaches it {may}", remedy=REMEDY
            )
        log.warning("INSECURE: plain text, everybody who reaches %s may %s. %s", address, may, _RATHER)
        return


_RATHER = "Use TLS: `stateflow certs`"


def check_dialled(address: str) -> None:
    """Checks a channel without TLS. Raises InsecureRefused if it leads to another machine; if ``insecure`` allows that,
    logs a warning once per address."""
    if is_loopback(address):
        return
    if not connection_settings().insecure:
        raise InsecureRefused(
            f"{address} is not on this machine, and plain text could be read by others", remedy=REMEDY
        )
    if address not in _warned:
        _warned.add(address)
        log.warning("INSECURE: plain text to %s. %s", address, _RATHER)
