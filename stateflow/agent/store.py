"""What an agent keeps: the file ``AGENT`` in its data directory, which says who it is and what it is to have.

It is written whole, and durable before anything is done for it. So an agent that is started again has its replicas at
once, whether a controller answers or not, and obeys none whose term is over.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stateflow.durable import write_durably
from stateflow.errors import InvalidArgument
from stateflow.fleet import Spawned

FILE = "AGENT"


@dataclass(frozen=True, slots=True)
class Kept:
    """``id``: of the data directory, made once. ``ledger`` and ``term``: of the newest controller that was obeyed."""

    id: str
    name: str
    ledger: str = ""
    term: int = 0
    wanted: tuple[Spawned, ...] = ()


class Store:
    """Args: directory: claimed. Raises InvalidArgument where it is another agent's, or says nothing."""

    def __init__(self, directory: Path, name: str) -> None:
        self._file = directory / FILE
        self.kept = self._read() or self._write(Kept(uuid.uuid4().hex, name))
        if self.kept.name != name:
            if self.kept.wanted:
                raise InvalidArgument(
                    f"the data directory belongs to agent {self.kept.name!r}",
                    remedy=f"start it with --name {self.kept.name}, or give {name!r} its own --data-dir",
                    path=directory,
                )
            self._write(replace(self.kept, name=name))

    def keep(self, ledger: str, term: int, wanted: Iterable[Spawned]) -> None:
        """Durable when it returns. Raises OSError: then what was kept is so still."""
        new = replace(self.kept, ledger=ledger, term=term, wanted=tuple(wanted))
        if new != self.kept:
            self._write(new)

    def _write(self, kept: Kept) -> Kept:
        write_durably(self._file, json.dumps(asdict(kept)))
        self.kept = kept
        return kept

    def _read(self) -> Kept | None:
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return None
        try:
            fields = json.loads(text)
            fields["wanted"] = tuple(Spawned(**each) for each in fields["wanted"])
            return Kept(**fields)
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidArgument(
                "the file does not say what the agent is to have",
                remedy="put it back from a copy; without one, remove it and start the agent under a new --name: the "
                "replicas' state stays in `replicas`",
                path=self._file,
            ) from error
