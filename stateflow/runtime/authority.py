"""Authority over a replica: it obeys one controller at a time, fenced by the term of its leader lease on the ledger.

A leading controller holds the leader lease of its ledger, and each lease has a term, greater than all terms before. A
replica stores the greatest term it has seen durably before it acts on it. A command or an answer with a smaller term
comes from a controller that was stopped and does not know that another one leads by now; the replica refuses it.

A command also names the session: the ticket with which this process registered. Only the controller and the replica
know it, so no other process can command the replica. Commands from before the last registration are void: the
controller has given them up. A session belongs to one term, so a command of a greater term cannot arrive before the
replica has registered with that term's controller.

All of this is decided here. A replica asks when a command arrives, and again, with the partition locked, before it
carries out a command that cannot be undone.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from stateflow.errors import ForeignLedger, LeaseLost, StaleTerm


@dataclass(frozen=True, slots=True)
class Command:
    """Credentials of a command: the controller's ledger, its term, and the replica's session with it."""

    ledger: str = ""
    term: int = 0
    session: str = ""

    def __repr__(self) -> str:  # a session is a secret, and must not get into logs
        return f"Command(ledger={self.ledger!r}, term={self.term})"


#: credentials of commands to a replica without a controller: all code that has the replica object may command it
NOBODY = Command()


class Authority:
    """Decides which commands and answers a replica accepts.

    Args:
        seen: ledger and greatest term seen so far.
        keep: makes (ledger, term) durable.
        alone: there is no controller, so commands need no credentials.
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
        """Checks that an answer is from this replica's ledger, in a term no older than the newest seen. Raises
        StaleTerm, ForeignLedger.

        Args:
            adopted: a former ledger whose replicas may go over to this one: a lost ledger after `stateflow adopt`, or
                the replica's own where the replica holds nothing. Each ledger counts its own terms, so the term is not
                checked where the replica knew that ledger.
        """
        known, newest = self._seen
        if known and ledger != known:
            if adopted == known:
                return
            raise ForeignLedger(
                "this replica does not belong to the controller's ledger",
                remedy="start the controller with its previous ledger, or point the replica at its own controller; "
                "if that ledger is lost, see `stateflow adopt --dry-run`",
                ledger=ledger or None,
                belongs_to=known,
            )
        if term < newest:
            raise StaleTerm(
                "another controller leads now",
                remedy="ask the leader",
                term=term,
                newest=newest,
            )

    def obey(self, command: Command, adopted: str = "") -> None:
        """Obeys only this controller from now on, and makes its term durable first. Raises what :meth:`check_answer`
        does."""
        self.check_answer(command.ledger, command.term, adopted)
        if (command.ledger, command.term) != self._seen:
            self._keep(command.ledger, command.term)
            self._seen = command.ledger, command.term
        self._obeyed = command

    def check(self, command: Command) -> None:
        """Checks that a command comes from the controller that this replica registered with last.

        Raises StaleTerm, ForeignLedger, and LeaseLost for a command from before the last registration or from a
        controller that the replica did not register with.
        """
        obeyed = self._obeyed
        if obeyed is None:
            raise LeaseLost("this replica has not registered yet", remedy="retry once it has")
        self.check_answer(command.ledger, command.term)
        if command != obeyed and not _same(command, obeyed):
            raise LeaseLost(
                "the command is not from the controller session that this replica registered with last",
                remedy="retry it",
            )


def _same(one: Command, other: Command) -> bool:
    return one.term == other.term and hmac.compare_digest(one.session.encode(), other.session.encode())
