"""The files of a process that TLS needs, as they are now: they may be replaced while it runs."""

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
from stateflow.security.reading import Certificate, checked_pair, revoked_of
from stateflow.security.token import decoded
from stateflow.settings import ConnectionSettings

log = logging.getLogger(__name__)
#: how often the files are looked at, while somebody asks
LOOK_S = 1.0
#: before it expires it is said that it will: this, or a quarter of its time; then each time half of what was
#: left has passed
SOON = timedelta(days=7)
LAST_SAID = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Material:
    """``number``: greater with every change of the authority, the certificate or the key."""

    number: int
    ca: bytes
    cert: bytes
    key: bytes
    own: Certificate
    revoked: frozenset[int]


def utc(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_us() / 1e6, UTC)


class TlsFiles:
    """Files that are wrong when they are replaced leave things as they were: a certificate and its key are two files,
    and one of them comes first. A token is all three, in a file or not.

    Raises BadCertificate where they are wrong at first.
    """

    def __init__(self, settings: ConnectionSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings, self._clock = settings, clock
        paths = [settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_crl, settings.token_file]
        self._paths = [path for path in paths if path]
        self._lock = threading.Lock()
        self._looked_at = clock.monotonic()
        self._seen = self._signature()
        self._material = self._read(0, frozenset())
        self._said: tuple[int, timedelta] | None = None  # serial number, and what was left
        self._say()

    def current(self) -> Material:
        """Cheap. Called by any thread."""
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
            log.warning("the files of TLS have changed and are not used: %s", error)
            return
        if found != self._material:
            log.info("the files of TLS have changed and are used: %s until %s", found.own.identity, found.own.not_after)
            self._material = found

    def _say(self) -> None:
        """That it is about to expire."""
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
            "issue another token" if self._settings.by_token else "`stateflow certs renew`, and replace the files",
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
        """Args: number, revoked: of what was there before."""
        settings = self._settings
        where = settings.tls_cert or settings.token_file or "STATEFLOW_TOKEN"
        if settings.by_token:
            ca, cert, key = decoded(self.token())
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
        """As it is now, where it is by one. Raises BadCertificate."""
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
            remedy="correct it in the environment or the file of settings",
            file=path,
        ) from error


def _check_private(path: str) -> None:
    """A group may have it: that is how Kubernetes hands secrets to a process. Raises BadCertificate."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except OSError:
        return  # said when it is read
    if os.name == "posix" and mode & stat.S_IRWXO:
        raise BadCertificate("the key can be read by everybody here", remedy=f"chmod 600 {path}", file=path)
