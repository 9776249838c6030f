"""Certificates for the processes of a cluster on this machine, and for who tries it out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from stateflow.durable import write_durably
from stateflow.environment import environment
from stateflow.security.identity import Identity
from stateflow.security.variables import CRL, OWN_CERT, variables_of


class Certificates:
    """An authority in ``directory``, and a directory beside it for each who has a certificate."""

    def __init__(self, directory: Path) -> None:
        from stateflow.security.authority import Authority

        self._directory = directory
        place = directory / "authority"
        self.authority = Authority(place) if (place / "ca.key").exists() else Authority.init(place, "local")
        self._own = ExitStack()

    def issue(self, name: str, role: str, host: str = "", operators: tuple[str, ...] = ()) -> Mapping[str, str]:
        """Its environment: where its files are. One that is there stays."""
        out = self._directory / f"{role}-{name}"
        if not (out / OWN_CERT).exists():
            self.authority.issue(Identity.of(role, name, operators), [host] if host else [], out)
        return variables_of(out)

    def renew(self) -> None:
        """Everybody's, with other keys."""
        for out in self._issued():
            self.authority.renew(out)

    def revoke(self, who: str) -> None:
        """And everybody is told."""
        self.authority.revoke(who)
        for out in self._issued():
            write_durably(out / CRL, self.authority.crl.read_bytes(), 0o644)

    def _issued(self) -> list[Path]:
        return sorted(path.parent for path in self._directory.glob(f"*/{OWN_CERT}"))

    def begin(self) -> None:
        """This process is an administrator, until :meth:`end`."""
        self.end()
        self._own.enter_context(environment(self.issue("local", "admin")))

    def end(self) -> None:
        self._own.close()
