"""The file ``AGENT`` in an agent's data directory: its identity, and the replicas that it is to run.

The file is written as a whole, and is durable before the agent acts on it. So an agent that is started again runs its
replicas at once, even if no controller answers, and obeys no controller whose term is over.
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
    """The contents of the file.

    ``id``: id of the data directory, made once. ``ledger`` and ``term``: of the newest controller that was obeyed.
    """

    id: str
    name: str
    ledger: str = ""
    term: int = 0
    wanted: tuple[Spawned, ...] = ()


class Store:
    """Reads and writes the file. Raises InvalidArgument where it is another agent's, or cannot be read.

    Args:
        directory: the agent's data directory, which the caller has claimed.
    """

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
        """Writes new orders, which are durable when this returns. Raises OSError; then the former ones stay."""
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
                "the file does not describe the agent's replicas",
                remedy="restore it from a backup; without one, remove it and start the agent under a new --name: the "
                "replicas' state stays in `replicas`",
                path=self._file,
            ) from error
