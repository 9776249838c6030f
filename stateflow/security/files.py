"""The TLS files of a process, which may be replaced while it runs."""

from __future__ import annotations

import logging
import os
import stat
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import BadCertificate
from stateflow.security.certificates import Certificate, checked_pair, decoded_token, revoked_of
from stateflow.settings import ConnectionSettings

log = logging.getLogger(__name__)
#: minimum of seconds between two checks of the files
LOOK_S = 1.0
#: the first warning comes this long before the certificate expires, or at a quarter of its lifetime if that is less;
#: each further one when half of the remaining time has passed
SOON = timedelta(days=7)
LAST_SAID = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Material:
    """Contents of the TLS files. ``number``: greater with every change of the authority, the certificate or the key."""

    number: int
    ca: bytes
    cert: bytes
    key: bytes
    own: Certificate
    revoked: frozenset[int]


def utc(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_us() / 1e6, UTC)


class TlsFiles:
    """The TLS files of a process. If replaced files are wrong, those read before stay in use: a certificate and its key
    are two files, and one of them is replaced first. A token, in a file or in the settings, holds all three.

    Raises BadCertificate if the first files are wrong.
    """

    def __init__(self, settings: ConnectionSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings, self._clock = settings, clock
        paths = [settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_crl, settings.token_file]
        self._paths = [path for path in paths if path]
        self._lock = threading.Lock()
        self._looked_at = clock.monotonic()
        self._seen = self._signature()
        self._material = self._read(0, frozenset())
        self._said: tuple[int, timedelta] | None = None  # serial number, and time left at the last warning
        self._say()

    def current(self) -> Material:
        """Returns the contents in use. The call is cheap and thread-safe."""
        if self._clock.monotonic() - self._looked_at >= LOOK_S:
            with self._lock:
                self._look()
        return self._material

    def _look(self) -> None:
        self._looked_at = self._clock.monotonic()
        seen = self._signature()
        if seen != self._seen:
            self._take(seen)
        self._say()

    def _take(self, seen: list[tuple[int, int, int] | None]) -> None:
        self._seen = seen
        try:
            found = self._read(self._material.number, self._material.revoked)
        except BadCertificate as error:
            log.warning("changed TLS files are not valid, the former ones stay in use: %s", error)
            return
        if found != self._material:
            log.info("changed TLS files are in use: %s until %s", found.own.identity, found.own.not_after)
            self._material = found

    def _say(self) -> None:
        """Warns when the certificate is about to expire."""
        own = self._material.own
        left = own.not_after - utc(self._clock)
        due = min(SOON, (own.not_after - own.not_before) / 4)
        if self._said is not None and self._said[0] == own.serial:
            due = self._said[1] / 2
        if not LAST_SAID <= left <= due:
            return
        self._said = own.serial, left
        log.warning(
            "the certificate of %s expires at %s UTC, in %s: %s",
            own.identity,
            f"{own.not_after:%Y-%m-%d %H:%M}",
            timedelta(seconds=round(left.total_seconds())),
            "issue another token" if self._settings.by_token else "run `stateflow certs renew`, and replace the files",
        )

    def _signature(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = os.stat(path)  # noqa: PTH116 - of four files a second
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                found.append(None)
        return found

    def _read(self, number: int, revoked: frozenset[int]) -> Material:
        """Reads the files.

        Args:
            number, revoked: those of the contents in use before.
        """
        settings = self._settings
        where = settings.tls_cert or settings.token_file or "STATEFLOW_TOKEN"
        if settings.by_token:
            ca, cert, key = decoded_token(self.token())
        else:
            ca, cert = _bytes(settings.tls_ca, "TLS_CA"), _bytes(settings.tls_cert, "TLS_CERT")
            _check_private(settings.tls_key)
            key = _bytes(settings.tls_key, "TLS_KEY")
        own = checked_pair(ca, cert, key, utc(self._clock), where)
        if settings.tls_crl:
            revoked = revoked_of(_bytes(settings.tls_crl, "TLS_CRL"), ca, settings.tls_crl)
        before = getattr(self, "_material", None)
        changed = before is None or (before.ca, before.cert, before.key) != (ca, cert, key)
        return Material(number + changed, ca, cert, key, own, revoked)

    def token(self) -> str:
        """Returns the present token, if the settings have one. Raises BadCertificate."""
        settings = self._settings
        if not settings.token_file:
            return settings.token.get_secret_value()
        _check_private(settings.token_file)
        return _bytes(settings.token_file, "TOKEN_FILE").decode("ascii", "replace")


def _bytes(path: str, which: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadCertificate(
            f"the file of STATEFLOW_{which} cannot be read: {error.strerror}",
            remedy="correct the path in the environment or the settings file",
            file=path,
        ) from error


def _check_private(path: str) -> None:
    """Checks that others cannot read a file. Its group may read it, because Kubernetes hands secrets to a process in
    that way. Raises BadCertificate."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except OSError:
        return  # reported when it is read
    if os.name == "posix" and mode & stat.S_IRWXO:
        raise BadCertificate("the key is readable by other users", remedy=f"chmod 600 {path}", file=path)
