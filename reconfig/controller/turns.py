"""Turns of what waits in batches: who is next is :mod:`reconfig.batch`'s to say, and that it begins is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from reconfig.batch import Limits, Part, next_turns
from reconfig.work import Planned


@dataclass(slots=True, eq=False)
class _Ticket:
    part: Part
    planned: Planned
    turn: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    withheld: bool = False


class Turns:
    """Args:
    limits: of a batch, by its id. of_all: of all together.
    goes_on: is it neither paused nor to be left?
    begin: records that these begin; done when that is durable.
    """

    def __init__(
        self,
        limits: Callable[[str], Limits],
        of_all: Limits,
        goes_on: Callable[[str], bool],
        begin: Callable[[Sequence[Planned]], Awaitable[Any]],
        spawn: Callable[[Any], Any],
    ) -> None:
        self._limits, self._of_all, self._goes_on = limits, of_all, goes_on
        self._begin, self._spawn = begin, spawn
        self._waiting: dict[str, _Ticket] = {}  # by the item of what is planned, in the order in which they came
        self._under_way: dict[str, _Ticket] = {}
        self._looks = False  # as soon as all that comes or ends now has

    @asynccontextmanager
    async def turn(self, part: Part, planned: Planned) -> AsyncIterator[bool]:
        """Held until it has ended. False: it was withdrawn, and is not to begin. Raises what recording does."""
        ticket = _Ticket(part, planned)
        self._waiting[planned.item_id] = ticket
        self.look()
        try:
            yield await ticket.turn
        finally:
            for those in (self._waiting, self._under_way):
                if those.get(planned.item_id) is ticket:  # and not the one that was planned in its place
                    del those[planned.item_id]
            self.look()

    def withdraw(self, batch: str) -> None:
        """What waits of it does not begin."""
        left = [item for item, each in self._waiting.items() if each.part.batch == batch]
        for item in left:
            _tell(self._waiting.pop(item), False)

    def has(self, planned: Planned) -> bool:
        """Does it wait, and is it to begin when its turn comes?"""
        return self._ticket(planned) is not None

    def _ticket(self, planned: Planned) -> _Ticket | None:
        """Of what waits, and has not been told anything yet."""
        ticket = self._waiting.get(planned.item_id)
        return ticket if ticket is not None and ticket.planned == planned and not ticket.turn.done() else None

    @contextmanager
    def withheld(self, planned: Planned) -> Iterator[bool]:
        """It does not begin meanwhile. False: it does not wait, or is to begin already."""
        ticket = self._ticket(planned)
        if ticket is None:
            yield False
            return
        ticket.withheld = True
        try:
            yield True
        finally:
            ticket.withheld = False
            self.look()

    def leave(self, planned: Planned) -> None:
        """It does not begin, if it waits."""
        if (ticket := self._ticket(planned)) is not None:
            _tell(ticket, False)

    def look(self) -> None:
        """Whose turn is it now? To be called when a batch was paused, goes on, or has other limits. Once for all that
        comes or ends together: a round has thousands. Nobody asked for what begins by itself, so that its record is of
        no author."""
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look, context=Context())

    def _look(self) -> None:
        self._looks = False
        batches = {each.part.batch for each in self._waiting.values()}
        going = {batch for batch in batches if self._goes_on(batch)}
        waiting = [
            each
            for each in self._waiting.values()
            if each.part.batch in going and not (each.withheld or each.turn.done())
        ]
        if not waiting:
            return
        limits = {batch: self._limits(batch) for batch in going}
        under_way = [each.part for each in self._under_way.values()]
        places = next_turns([each.part for each in waiting], under_way, limits, self._of_all)
        chosen = [waiting[place] for place in places]
        if chosen:
            for ticket in chosen:
                item = ticket.planned.item_id
                self._under_way[item] = self._waiting.pop(item)
            self._spawn(self._let_begin(chosen))

    async def _let_begin(self, chosen: Sequence[_Ticket]) -> None:
        """All that begin at once with one record."""
        try:
            await self._begin([each.planned for each in chosen])
        except Exception as error:  # noqa: BLE001 - each is told
            for ticket in chosen:
                if not ticket.turn.done():
                    ticket.turn.set_exception(error)
            return
        for ticket in chosen:
            _tell(ticket, True)


def _tell(ticket: _Ticket, begins: bool) -> None:
    if not ticket.turn.done():  # else nobody waits for it any more
        ticket.turn.set_result(begins)
