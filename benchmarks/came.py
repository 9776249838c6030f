"""A receiver of batch outcomes, for benchmarks that call a replica's code in their own process."""

from __future__ import annotations

from stateflow.partition.batches import Outcome
from stateflow.partition.processor import Applied


class Came:
    """Collects the outcomes that a replica reports for the parts of one batch."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}

    def begun(self, number: int) -> None: ...

    def committing(self) -> None: ...

    def told(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome

    def goes_on(self) -> bool:
        return True

    def applied(self) -> list[Applied]:
        """Returns the results of all parts, in the order of the parts. Raises the first outcome that is an error."""
        found: list[Applied] = []
        for _, outcome in sorted(self._outcomes.items(), key=lambda each: each[0]):
            if isinstance(outcome, BaseException):
                raise outcome
            assert isinstance(outcome, Applied)
            found.append(outcome)
        return found
