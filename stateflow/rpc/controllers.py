"""Which of several controllers is asked, and in which order: sans-io."""

from __future__ import annotations

from dataclasses import dataclass

from stateflow.errors import InvalidArgument, NotLeading, StateflowError
from stateflow.types import ADDRESS


def addresses_of(text: str) -> list[str]:
    """``a:7070,b:7070``, each once. Raises InvalidArgument where it names none, or what is no address."""
    found = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not found:
        raise InvalidArgument("no controller is named", remedy="write host:port, or several with commas")
    for each in found:
        if not ADDRESS.holds(each):
            raise InvalidArgument(f"{each!r} is not a valid {ADDRESS.what}", remedy=ADDRESS.how)
    return found


@dataclass(slots=True)
class Seen:
    """What a client's answers rested on: the newest term of who led, the newest record of the ledger."""

    term: int = 0
    record: int = 0

    def takes(self, term: int, record: int) -> bool:
        """Is an answer no older than those before? One of who does not lead (term 0) has read the record that it was
        asked for. One who leads no more, and does not know it, is told by its term: with the next, records may be fewer
        by those of a ledger that was put back."""
        if not term:
            self.record = max(self.record, record)
        elif term < self.term:
            return False
        else:
            self.record = record if term > self.term else max(self.record, record)
            self.term = term
        return True


class Round:
    """Each controller is asked once at most, and the one that they say leads: ``asked`` is the first, or the next.

    One that says who leads may say so of one that has died. So those that were not asked yet are, before the round is
    over: another one may lead by now. ``unled``: one of them answered that it does not lead.
    """

    def __init__(self, addresses: list[str], first: str) -> None:
        self._addresses, self.asked = addresses, first
        self._tried = {first}
        self.unled = False

    def go_on(self, error: StateflowError) -> bool:
        """``asked`` failed with this: ask ``asked`` now. False: all of them were asked, it is where to begin anew."""
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
