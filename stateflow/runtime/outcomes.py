"""Outcomes of the parts of a batch, and the caller that is told of them."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from stateflow.runtime.host import Applied
from stateflow.types import ReplicaInfo

#: ``Applied``; the replica that the partition moved to; None: the partition is on its way here, or its requests are
#: held: ask again after the next ``on_change``; or an error: LeaseLost, or what is wrong with sender, rows, operator or
#: this program
Outcome: TypeAlias = Applied | ReplicaInfo | BaseException | None


class Answers(Protocol):
    """A caller that is told of outcomes, in the thread that applies. ``number``: number of the part, from 0."""

    def begun(self, number: int) -> None:
        """Called when this part is begun, as all parts before it are."""
        ...

    def committing(self) -> None:
        """Called before some of the parts are committed as one group. The outcome of each follows."""
        ...

    def told(self, number: int, outcome: Outcome) -> None:
        """Called with the outcome of a part: once for each that was begun, unless the part is given up."""
        ...

    def goes_on(self) -> bool:
        """Returns whether another part may be begun."""
        ...
