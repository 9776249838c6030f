"""What comes of the parts of a batch, and who is told."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from stateflow.runtime.host import Applied
from stateflow.types import ReplicaInfo

#: what was applied; the replica that the partition went to; None: it is on its way here, ask again after the next
#: ``on_change``; or LeaseLost, and what is wrong with sender, rows or operator, or with this program
Outcome: TypeAlias = Applied | ReplicaInfo | BaseException | None


class Answers(Protocol):
    """Who asked. Told in the thread that applies. ``number``: of the part, from 0."""

    def begun(self, number: int) -> None:
        """With this part, and those before it."""
        ...

    def committing(self) -> None:
        """Some of the parts, as one group. Each of them is told next."""
        ...

    def told(self, number: int, outcome: Outcome) -> None:
        """Once of each part that was begun, unless it is given up."""
        ...

    def goes_on(self) -> bool:
        """False: no other part is begun."""
        ...
