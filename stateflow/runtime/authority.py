"""Whom a replica obeys: one controller at a time, by the term of its hold on the ledger.

A controller that leads has a hold on its ledger, and each hold has a term, greater than all before. A replica keeps the
greatest term that it has heard of, durably, before it does anything for it; whatever says less comes from a controller
that was stopped and does not know that another one leads by now, and is refused, command and answer alike.

What is commanded names the session too: the ticket that this process registered with. It is a secret of the two, so
nobody else commands, and what was asked before the replica registered last is void: the controller gave it up. A
session is of one term, so a command of a greater one cannot come before the replica has registered there.

This is the one place where that is decided. It is asked when a command arrives, and again, with the partition locked,
where one is carried out that cannot be undone.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from stateflow.errors import ForeignLedger, LeaseLost, StaleTerm


@dataclass(frozen=True, slots=True)
class Command:
    """Who commands: by which ledger, in which term, in which session of the replica."""

    ledger: str = ""
    term: int = 0
    session: str = ""

    def __repr__(self) -> str:  # a session is nobody else's business, logs included
        return f"Command(ledger={self.ledger!r}, term={self.term})"


#: of a replica without a controller, which is commanded by whoever has it
NOBODY = Command()


class Authority:
    """Args:
    seen: the greatest term so far, and of which ledger.
    keep: makes (ledger, term) durable.
    alone: there is no controller, and so nothing to name.
    """

    def __init__(
        self,
        seen: tuple[str, int] = ("", 0),
        keep: Callable[[str, int], None] = lambda _ledger, _term: None,
        *,
        alone: bool = True,
    ) -> None:
        self._seen, self._keep = seen, keep
        self._obeyed: Command | None = NOBODY if alone else None

    @property
    def seen(self) -> tuple[str, int]:
        return self._seen

    def check_answer(self, ledger: str, term: int, adopted: str = "") -> None:
        """May what a controller answers be believed? Raises StaleTerm, ForeignLedger.

        Args: adopted: a ledger that was lost, and whose replicas are this one's by command. Each ledger has its terms.
        """
        known, newest = self._seen
        if known and ledger != known:
            if adopted == known:
                return
            raise ForeignLedger(
                "this replica belongs to another ledger than the controller that it heard",
                remedy="start the controller with the ledger that it had, or name its own controller to the replica; "
                "if that ledger is lost, see `stateflow adopt --dry-run`",
                ledger=ledger or None,
                belongs_to=known,
            )
        if term < newest:
            raise StaleTerm(
                "another controller leads by now",
                remedy="ask the one that leads",
                term=term,
                newest=newest,
            )

    def obey(self, command: Command, adopted: str = "") -> None:
        """From now on, and nobody else. Durable first. Raises what :meth:`check_answer` does."""
        self.check_answer(command.ledger, command.term, adopted)
        if (command.ledger, command.term) != self._seen:
            self._keep(command.ledger, command.term)
            self._seen = command.ledger, command.term
        self._obeyed = command

    def check(self, command: Command) -> None:
        """Raises StaleTerm, ForeignLedger; LeaseLost when it was asked before this replica registered last, or by
        somebody whom it did not register with."""
        obeyed = self._obeyed
        if obeyed is None:
            raise LeaseLost("this replica has not registered yet", remedy="ask again when it has")
        self.check_answer(command.ledger, command.term)
        if command != obeyed and not _same(command, obeyed):
            raise LeaseLost(
                "this was not asked by the controller that this replica registered with last", remedy="ask it again"
            )


def _same(one: Command, other: Command) -> bool:
    return one.term == other.term and hmac.compare_digest(one.session.encode(), other.session.encode())
