"""What comes of a batch that a replica without its sockets is given."""

from __future__ import annotations

from stateflow.runtime.host import Applied
from stateflow.runtime.outcomes import Outcome


class Came:
    """Is told."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}

    def begun(self, number: int) -> None: ...

    def committing(self) -> None: ...

    def told(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome

    def goes_on(self) -> bool:
        return True

    def applied(self) -> list[Applied]:
        """Of all parts, in order. Raises what came of one, where that is an error."""
        found: list[Applied] = []
        for _, outcome in sorted(self._outcomes.items(), key=lambda each: each[0]):
            if isinstance(outcome, BaseException):
                raise outcome
            assert isinstance(outcome, Applied)
            found.append(outcome)
        return found
