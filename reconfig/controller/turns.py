"""Gives turns to moves that wait in batches, in the order that :mod:`reconfig.batch` decides, and records them."""

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
    """Moves that wait for their turn, and those that have it.

    Args:
        limits: returns the limits of a batch, by its id.
        of_all: limits of all batches together.
        goes_on: tells whether a batch is running, and not paused or over.
        begin: records that moves begin; done when that is durable.
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
        self._waiting: dict[str, _Ticket] = {}  # by ledger item, in the order of their arrival
        self._under_way: dict[str, _Ticket] = {}
        self._looks = False  # a look is scheduled, after all that comes or ends in this pass of the event loop

    @asynccontextmanager
    async def turn(self, part: Part, planned: Planned) -> AsyncIterator[bool]:
        """Waits for the turn of a move, and holds it to the end of the block. Raises what recording raises.

        Yields False where the move was withdrawn and must not begin.
        """
        ticket = _Ticket(part, planned)
        self._waiting[planned.item_id] = ticket
        self.look()
        try:
            yield await ticket.turn
        finally:
            for those in (self._waiting, self._under_way):
                if those.get(planned.item_id) is ticket:  # and not that of a move planned in its place
                    del those[planned.item_id]
            self.look()

    def withdraw(self, batch: str) -> None:
        """Withdraws all waiting moves of a batch: they do not begin."""
        left = [item for item, each in self._waiting.items() if each.part.batch == batch]
        for item in left:
            _tell(self._waiting.pop(item), False)

    def has(self, planned: Planned) -> bool:
        """Tells whether a move waits, and begins when its turn comes."""
        return self._ticket(planned) is not None

    def _ticket(self, planned: Planned) -> _Ticket | None:
        """Returns the ticket of a move; None: the move does not wait, or was told already whether it begins."""
        ticket = self._waiting.get(planned.item_id)
        return ticket if ticket is not None and ticket.planned == planned and not ticket.turn.done() else None

    @contextmanager
    def withheld(self, planned: Planned) -> Iterator[bool]:
        """Keeps a move from beginning during the block. Yields False where it does not wait, or begins already."""
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
        """Withdraws a move, if it waits: it does not begin."""
        if (ticket := self._ticket(planned)) is not None:
            _tell(ticket, False)

    def look(self) -> None:
        """Schedules a look at whose turn it is. Call it when a batch is paused, resumes, or has other limits.

        One look serves all moves that come or end together, as a round has thousands. It runs in an empty context, so
        that its records have no author: no caller asked for what begins by itself.
        """
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
        """Records that the chosen moves begin, all in one step, and tells them."""
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
    if not ticket.turn.done():  # else no task waits for it any more
        ticket.turn.set_result(begins)
