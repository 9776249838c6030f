"""The order in which several controllers are asked. Sans-io."""

from __future__ import annotations

from dataclasses import dataclass

from stateflow.errors import InvalidArgument, NotLeading, StateflowError
from stateflow.types import ADDRESS, shown


def addresses_of(text: str) -> list[str]:
    """Parses ``a:7070,b:7070``, each address once. Raises InvalidArgument for none, or for an invalid address."""
    found = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not found:
        raise InvalidArgument("no controller address given", remedy="pass host:port, or several separated by commas")
    for each in found:
        if not ADDRESS.holds(each):
            raise InvalidArgument(f"{shown(each)} is not a valid {ADDRESS.what}", remedy=ADDRESS.how)
    return found


@dataclass(slots=True)
class Seen:
    """The newest term of a leader, and the newest ledger record, that answers to a client rested on."""

    term: int = 0
    record: int = 0

    def takes(self, term: int, record: int) -> bool:
        """Tells whether an answer is no older than those before, and notes it.

        A follower's answer (term 0) always counts, as the follower has read the record that it was asked for. A former
        leader that does not know that it leads no more is recognised by its term. A new term may have fewer records, if
        a ledger was restored.
        """
        if not term:
            self.record = max(self.record, record)
        elif term < self.term:
            return False
        else:
            self.record = record if term > self.term else max(self.record, record)
            self.term = term
        return True


class Round:
    """One round over the controllers: it asks each once at most, and the leader that they name.

    ``asked`` is the controller to ask, first or next. A controller may name a leader that has died. So the round ends
    only when every address has been asked, as another controller may lead by now. ``unled``: one of them answered that
    it does not lead.
    """

    def __init__(self, addresses: list[str], first: str) -> None:
        self._addresses, self.asked = addresses, first
        self._tried = {first}
        self.unled = False

    def go_on(self, error: StateflowError) -> bool:
        """Notes that ``asked`` failed with ``error``, and moves ``asked`` on.

        Returns False if all were asked; ``asked`` is then where the next round begins.
        """
        order = self._behind(self.asked)
        if isinstance(error, NotLeading):
            self.unled = True
            order = [*filter(None, [error.where.get("leader")]), *order]
        untried = next((each for each in order if each not in self._tried), None)
        self.asked = untried or order[0]
        self._tried.add(self.asked)
        return untried is not None

    def _behind(self, asked: str) -> list[str]:
        at = self._addresses.index(asked) if asked in self._addresses else -1
        return [*self._addresses[at + 1 :], *self._addresses[: at + 1]]
