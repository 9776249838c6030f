"""Certificates for the processes of a cluster on this machine, and for its users."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from stateflow.durable import write_durably
from stateflow.security.identity import Identity
from stateflow.security.variables import CRL, OWN_CERT, environment, variables_of


class Certificates:
    """An authority in ``directory``, and beside it a directory for each identity that has a certificate."""

    def __init__(self, directory: Path) -> None:
        from stateflow.security.authority import Authority

        self._directory = directory
        place = directory / "authority"
        self.authority = Authority(place) if (place / "ca.key").exists() else Authority.init(place, "local")
        self._own = ExitStack()

    def issue(self, name: str, role: str, host: str = "", operators: tuple[str, ...] = ()) -> Mapping[str, str]:
        """Issues a certificate, unless there is one. Returns the variables that name its files."""
        out = self._directory / f"{role}-{name}"
        if not (out / OWN_CERT).exists():
            self.authority.issue(Identity.of(role, name, operators), [host] if host else [], out)
        return variables_of(out)

    def renew(self) -> None:
        """Renews all certificates, with new keys."""
        for out in self._issued():
            self.authority.renew(out)

    def revoke(self, who: str) -> None:
        """Revokes a certificate, and gives all identities the new revocation list."""
        self.authority.revoke(who)
        for out in self._issued():
            write_durably(out / CRL, self.authority.crl.read_bytes(), 0o644)

    def _issued(self) -> list[Path]:
        return sorted(path.parent for path in self._directory.glob(f"*/{OWN_CERT}"))

    def begin(self) -> None:
        """Makes this process an administrator until :meth:`end`."""
        self.end()
        self._own.enter_context(environment(self.issue("local", "admin")))

    def end(self) -> None:
        self._own.close()
