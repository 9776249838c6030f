"""Serving calls of Apply streams: rows in, committed outputs back. Shares ahead of their partition are held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from stateflow.clock import Clock
from stateflow.errors import StateflowError, Unavailable
from stateflow.replica.confirmations import Confirmations
from stateflow.replica.gathering import gathered
from stateflow.replica.lane import LeftBehind
from stateflow.replica.samples import Samples
from stateflow.replica.turns import Turns, stops
from stateflow.replica.watching import BEAT_S, Watch
from stateflow.rpc.wire import unexpected
from stateflow.runtime.acknowledging import held_up, late, moved
from stateflow.runtime.garbage import Garbage
from stateflow.runtime.host import Applied
from stateflow.runtime.outcomes import Outcome as Came
from stateflow.runtime.positions import Share
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.waiting import Waiting
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: when the replica stops, for a thread whose batch was interrupted
LAST_S = 0.5
#: what comes of a share; None: its partition is on its way here
Outcome: TypeAlias = Applied | ReplicaInfo | StateflowError | None
#: what its sender is told
Answer: TypeAlias = tuple[PartitionId, Applied | StateflowError]


class Exchange(Protocol):
    """One call."""

    async def receive(self, patience_s: float | None = None) -> Collection[Share] | None:
        """What comes next; None: that was all. Raises InvalidArgument; TimeoutError when its sender was silent for
        ``patience_s`` although it was listened to."""
        ...

    async def answer(self, answers: Sequence[Answer]) -> None: ...

    async def give_sign_of_life(self) -> None:
        """The batch is worked on."""
        ...


@dataclass(slots=True)
class _Call:
    """An exchange under way. ``begun``: by partition, of shares that are not whole. ``waiting``: bytes of these, and of
    shares whose partition is on its way. ``rows``: that were applied."""

    exchange: Exchange
    operator: str = ""
    begun: dict[int, list[bytes]] = field(default_factory=dict)
    waiting: int = 0
    rows: int = 0


@dataclass(slots=True)
class _Turn:
    """Of a call in the thread for batches. ``places``: of the parts, among its shares. ``outcomes``: by place.
    ``begun_with``: the last place. ``over``: nobody waits for what comes of it any more."""

    turns: Turns
    places: list[int] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    begun_with: int = 0
    over: bool = False

    def begun(self, number: int) -> None:
        self.begun_with = self.places[number]

    def told(self, number: int, outcome: Came) -> None:
        if isinstance(outcome, StateflowError):
            outcome = outcome.with_traceback(None)  # which holds frames, and so the outcomes, for long
        elif isinstance(outcome, BaseException):
            log.error("a batch failed", exc_info=outcome)  # what disks do comes named
            outcome = unexpected(outcome)
        if not self.over:
            self.outcomes[self.places[number]] = outcome

    def goes_on(self) -> bool:
        return not (self.over or self.turns.stopping)


class Applier:
    """``turns``: of the thread for batches; ``watch``: over it; ``samples``: of what requests took;
    ``confirmations``: by standbys.

    Args:
        changed: an event that is set at the next change of a partition's lifecycle.
        ask: told of each partition that a batch waits for.
        garbage: collected between batches.
    """

    def __init__(
        self,
        node: ReplicaNode,
        clock: Clock,
        changed: Callable[[PartitionId], asyncio.Event],
        ask: Callable[[PartitionId], None],
        garbage: Garbage | None = None,
    ) -> None:
        self.node = node
        self.turns = Turns(clock)
        self.watch = Watch(node, self.turns, clock)
        self.samples = Samples(clock)
        self.confirmations = Confirmations(node, clock, changed)
        self._clock, self._changed, self._ask, self._garbage = clock, changed, ask, garbage
        self._waiting = Waiting(node.settings.waiting_bytes_max)

    async def run(self, exchange: Exchange) -> None:
        """Raises what is wrong with the batch as a whole; what is wrong with a partition is its answer."""
        call = _Call(exchange)
        try:
            await self._run(call)
        finally:
            self._waiting.let_go(call.waiting)

    async def _run(self, call: _Call) -> None:
        started = self._clock.monotonic()
        early: list[Share] = []
        while (came := await self._next(call)) is not None:
            came_early = await self._apply_all(call, self._whole(call, came))
            self._keep(call, came_early)
            early += came_early
        held_from = self._clock.monotonic() if early else None
        if early:
            await self._apply_early(call, early)
        self.samples.add(call.operator, call.rows, started, held_from)

    # -- what comes ---------------------------------------------------------------------------------------

    async def _next(self, call: _Call) -> Collection[Share] | None:
        """Raises Unavailable when nothing comes while a share waits for its rest."""
        if not call.begun:
            return await call.exchange.receive()
        silence_s = self.node.settings.hold_timeout_s
        try:
            return await call.exchange.receive(silence_s)
        except TimeoutError as error:
            what = f"the rest of a batch's rows did not come within {silence_s:g} s"
            raise Unavailable(what, remedy="send the batch again") from error

    def _whole(self, call: _Call, came: Collection[Share]) -> list[Share]:
        """The shares that are whole by now."""
        self._keep(call, [share for share in came if not share.is_whole])
        whole: list[Share] = []
        for share in came:
            number = share.partition.partition
            if not share.is_whole:
                call.begun.setdefault(number, []).append(share.rows)
            elif number in call.begun:
                begun = call.begun.pop(number)
                self._let_go(call, sum(map(len, begun)))
                whole.append(share._replace(rows=b"".join([*begun, share.rows])))
            else:
                whole.append(share)
        return whole

    def _keep(self, call: _Call, shares: Collection[Share]) -> None:
        """Their rows wait. Raises what :meth:`Waiting.admit` does."""
        if more := sum(len(share.rows) for share in shares):
            self._waiting.admit(more, call.waiting, next(iter(shares)).batch.source)
            call.waiting += more

    def _let_go(self, call: _Call, bytes_: int) -> None:
        call.waiting -= bytes_
        self._waiting.let_go(bytes_)

    # -- what comes of it ---------------------------------------------------------------------------------

    async def _apply_all(self, call: _Call, shares: list[Share]) -> list[Share]:
        """Apply and answer; returns the shares whose partition is still on its way here."""
        if not shares:
            return []
        call.operator = shares[0].partition.operator
        by_place: dict[int, Outcome] = {}
        while left := [place for place in range(len(shares)) if place not in by_place]:
            if self.turns.stopping:
                by_place |= {place: stops(shares[place].partition) for place in left}
            else:
                came = await self._in_thread(call, [shares[place] for place in left])
                by_place |= {left[place]: outcome for place, outcome in came.items()}
        outcomes = [by_place[place] for place in range(len(shares))]
        if self._garbage is not None and self._garbage.is_due():
            self.turns.spare(self._garbage.collect)
        if self.confirmations.is_needed:
            outcomes = await self._replicated(shares, outcomes)
        early: list[Share] = []
        answers: list[Answer] = []
        for share, outcome in zip(shares, outcomes, strict=True):
            if outcome is None:
                early.append(share)
            elif isinstance(outcome, ReplicaInfo):
                answers.append((share.partition, moved(outcome, self.node.lifecycle(share.partition).epoch)))
            else:
                answers.append((share.partition, outcome))
                call.rows += outcome.rows if isinstance(outcome, Applied) else 0
        if answers:
            await call.exchange.answer(answers)
        return early

    async def _in_thread(self, call: _Call, shares: list[Share]) -> dict[int, Outcome]:
        """Of some shares, by place: of all, where the thread comes back and goes on."""
        turn = _Turn(self.turns)
        with self.watch.telling(call.exchange.give_sign_of_life) as caller:
            try:
                await self.turns.run(self._apply, shares, turn)
                outcomes = turn.outcomes
            except LeftBehind:
                turn.over = True
                outcomes = dict(turn.outcomes)
                for place in range(turn.begun_with + 1):
                    if place not in outcomes:
                        partition = shares[place].partition
                        outcomes[place] = self.node.batches.refusal(partition) or held_up(partition)
            finally:
                turn.over = True  # a call that was cancelled needs no more of its shares
        await caller.said()
        return outcomes

    def _apply(self, shares: list[Share], turn: _Turn) -> None:
        whole, turn.places, wrong = gathered(shares)
        turn.outcomes |= wrong
        self.node.batches.apply(whole, turn)

    async def _replicated(self, shares: list[Share], outcomes: list[Outcome]) -> list[Outcome]:
        """When a standby has durably what was applied, or it is not said."""
        deadline = self.confirmations.deadline()
        said: list[Outcome] = []
        for share, outcome in zip(shares, outcomes, strict=True):
            if isinstance(outcome, Applied):
                said.append(await self.confirmations.of(share.partition, outcome.sequence, deadline) or outcome)
            else:
                said.append(outcome)
        return said

    async def _apply_early(self, call: _Call, early: list[Share]) -> None:
        """Shares that came ahead of their partition: served as soon as it is here, else sent back."""
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        for share in early:
            self._ask(share.partition)
        while early:
            events = [self._changed(share.partition) for share in early]
            early = await self._apply_all(call, early)
            left = deadline - self._clock.monotonic()
            if early and left <= 0:
                await call.exchange.answer([(share.partition, late(share.partition)) for share in early])
                return
            if early:
                waits = [asyncio.ensure_future(event.wait()) for event in events]
                changed, pending = await asyncio.wait(
                    waits, timeout=min(left, BEAT_S), return_when=asyncio.FIRST_COMPLETED
                )
                if not changed:
                    await call.exchange.give_sign_of_life()
                for wait in pending:
                    wait.cancel()

    async def close(self) -> None:
        """What is in hand is finished, within half the time there is to stop in, or given up; nothing is begun. When
        this returns nobody works on a batch, but for a thread that does not come back."""
        self.turns.stop()
        if await self.turns.is_over(self.node.settings.stop_timeout_s / 2):
            return
        await self.watch.end_all()
        await self.turns.is_over(LAST_S)
