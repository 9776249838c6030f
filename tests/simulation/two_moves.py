"""A model of a second move among three replicas, A, B and C, while late requests of the first move arrive.

The first move is from A to B. The second move starts from every end state that ``one_move`` can reach. It is from the
present owner to one of the other two replicas, with every fault of ``one_move``. Meanwhile at most ``stale_max`` late
requests of the first move arrive: its prepare, fence, cancellation, abandonment or release. After a late prepare, B
follows A again. If A is sealed for the first move, B then receives that seal a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reconfig.decisions import migration as m
from stateflow.errors import StateflowError
from stateflow.partition.lifecycle import FenceAnswer, State
from stateflow.types import ReplicaInfo
from tests.simulation.explore import Explored, explore
from tests.simulation.one_move import (
    EPOCH,
    GRANTED,
    LOST,
    MOVE,
    Broken,
    Cycle,
    Durable,
    Model,
    P,
    Rules,
    World,
    _may_commit,
    freeze,
    freeze_move,
)

INFOS = {name: ReplicaInfo(name, "site", f"{name}:1") for name in "ABC"}
AT_A = frozenset({"fence", "cancel", "release"})


class SecondMove(Model):
    """The model of a second move.

    Args:
        first: the end state of the first move.
        to: the target of the second move: B or C if A owns the partition, A or C if B owns it.
        stale_max: how many late requests of the first move may arrive.
    """

    def __init__(self, rules: Rules, first: World, to: str, stale_max: int) -> None:
        owner = "B" if first.outcome == "owned" else "A"
        epoch = GRANTED if first.outcome == "owned" else EPOCH
        granted = (GRANTED if first.granted else EPOCH) + 1
        super().__init__(replace(rules, move_id="m2", epoch=epoch, granted=granted, successor=INFOS[to]))
        self._first, self._stale_max = first, stale_max
        (third,) = {"A", "B", "C"} - {owner, to}
        self._field = {owner: "source", to: "target", third: "third"}
        kinds = ["prepare", "cancel", "abandon"] + ["release"] * (first.outcome == "owned")
        assert first.source is not None
        if first.granted and (first.outcome == "owned" or MOVE in first.source[-1]):
            kinds.append("fence")  # otherwise A has restarted since the fence was sent, and the request is lost
        self._stale = tuple(sorted(kinds))

    def start(self) -> World:
        left: dict[str, tuple[Cycle | None, Durable]] = {
            "A": (self._first.source, self._first.source_disk),
            "B": (self._first.target, self._first.target_disk),
            "C": (freeze(self.rules.lifecycle(P)), None),
        }
        move = self.rules.move(self.rules.epoch, self.rules.granted)
        world = super().start()._replace(move=freeze_move(move), todo=(), stale=self._stale if self._stale_max else ())
        if self._first.target is not None and self._first.target[0] is State.WARMING:
            world = world._replace(stale_pull=0)  # the cancellation reached neither end of the transfer
        for name, (cycle, disk) in left.items():
            world = world._replace(**{self._field[name]: cycle, f"{self._field[name]}_disk": disk})
        instructions = move.handle(m.Begin())
        return world._replace(move=freeze_move(move), todo=tuple(instructions))

    def steps(self, w: World) -> Iterator[tuple[str, World, bool]]:
        yield from super().steps(w)
        if w.stale:
            yield "late requests are lost", w._replace(stale=()), True
        for kind in w.stale:
            stale = tuple(other for other in w.stale if other != kind)
            if len(self._stale) - len(stale) >= self._stale_max:
                stale = ()
            after = self._late(w._replace(stale=stale), kind)
            if after is not None:
                yield f"late {kind} of the first move", after, False
        if w.stale_pull >= 0:
            yield "the first move's transfer ends", self._follow_again(w), True  # assumed: it breaks at some time
        if w.third is not None:
            restarted = w._replace(third=self._restarted(w.third_disk))
            yield "the third restarts", self._forget_requests(restarted, "third"), False

    def _fault(self, w: World, name: str) -> Iterator[World]:
        for after in super()._fault(w, name):
            role = name.partition(" ")[0]
            yield self._forget_requests(after, role) if name.endswith("ends") else after

    def _forget_requests(self, w: World, role: str) -> World:
        """Drops the late requests to a process that ends, as they are lost with its connections."""
        if role == self._field["A"]:
            return w._replace(stale=tuple(kind for kind in w.stale if kind not in AT_A))
        if role == self._field["B"]:
            return w._replace(stale=tuple(kind for kind in w.stale if kind in AT_A))
        return w

    def _late(self, w: World, kind: str) -> World | None:
        """Delivers a late request, and returns the world after it.

        Returns None if the request cannot be delivered now: its receiver is down, or a batch holds the lock there.
        """
        name = "A" if kind in AT_A else "B"
        field = self._field[name]
        cycle: Cycle | None = getattr(w, field)
        if cycle is None:
            return None
        lifecycle = self.thaw(cycle)
        try:
            match kind:
                case "fence":
                    if lifecycle.state is State.OWNED and w.stale_pull < 0:
                        return w  # no replica follows
                    if lifecycle.fence(MOVE, GRANTED, INFOS["B"]) is FenceAnswer.SEAL_NOW:
                        lifecycle.sealed()
                        w = w._replace(**{f"{field}_disk": (State.SEALED, lifecycle.epoch)})
                case "cancel" | "abandon":
                    if lifecycle.running:
                        return None
                    lifecycle.cancel(MOVE)
                    if lifecycle.state is State.WARMING and lifecycle.move_id == MOVE:
                        lifecycle.abandon(MOVE)
                        w = w._replace(stale_pull=-1)
                case "prepare":
                    if lifecycle.state is State.WARMING and lifecycle.move_id == MOVE:
                        return w
                    lifecycle.prepare(MOVE, EPOCH)
                    w = w._replace(stale_pull=0)
        except StateflowError:
            return w
        return w._replace(**{field: freeze(lifecycle)})

    def _follow_again(self, w: World) -> World:
        """Ends the transfer that B repeated for the first move.

        If A is sealed for that move, B becomes the owner; otherwise B gives the partition up.
        """
        a, b = getattr(w, self._field["A"]), getattr(w, self._field["B"])
        w = w._replace(stale_pull=-1)
        if b is None:
            return w
        target = self.thaw(b)
        if target.state is not State.WARMING or target.move_id != MOVE:
            return w
        field = self._field["B"]
        if a is not None:
            source = self.thaw(a)
            if source.state is State.SEALED and source.move_id == MOVE:
                try:
                    target.own(MOVE, GRANTED)
                except StateflowError:
                    pass
                else:
                    return w._replace(**{field: freeze(target), f"{field}_disk": (State.OWNED, GRANTED)})
        target.abandon(MOVE)
        return w._replace(**{field: freeze(target)})

    def _restarted(self, disk: Durable) -> Cycle:
        lifecycle = self.rules.lifecycle(P)
        if disk is not None:
            state, epoch = disk
            lifecycle.recover(state, epoch, MOVE, INFOS["B"] if state is State.SEALED else None)
        return freeze(lifecycle)

    def _recover_target(self, w: World) -> World:
        if w.target_disk is not None and w.target_disk[1] < self.rules.granted:
            return w._replace(target=self._restarted(w.target_disk))  # the disk still has what the first move wrote
        return super()._recover_target(w)

    def check(self, w: World) -> None:
        super().check(w)
        if _may_commit(w.third):
            raise Broken("two owners: a replica that the second move does not concern")
        if w.third_disk is not None and w.third_disk[0] is State.OWNED:
            raise Broken("two owners on disk: a replica that the second move does not concern")


def ends_of_the_first(rules: Rules) -> list[World]:
    """Explores the first move, and returns its end states.

    Two end states count as one if they differ only in fields that a second move does not read.
    """
    found: dict[World, None] = {}

    def end(w: World) -> None:
        kept = (
            Model(rules)
            .start()
            ._replace(
                outcome=w.outcome,
                granted=w.granted,
                source=w.source,
                source_disk=w.source_disk,
                target=w.target,
                target_disk=w.target_disk,
            )
        )
        found[kept] = None

    explore(Model(rules), on_end=end)
    return list(found)


def explore_two(first: Rules, second: Rules, stale_max: int) -> Explored:
    """Explores every second move after every end state of a first move, and returns the totals. Raises Found."""
    states = transitions = ends = 0
    outcomes: dict[str, int] = {}
    leftovers: dict[str, int] = {}
    for end in ends_of_the_first(first):
        for to in ("A", "C") if end.outcome == "owned" else ("B", "C"):
            explored = explore(SecondMove(second, end, to, stale_max))
            states, transitions, ends = (
                states + explored.states,
                transitions + explored.transitions,
                ends + explored.ends,
            )
            for total, part in ((outcomes, explored.outcomes), (leftovers, explored.leftovers)):
                for name, count in part.items():
                    total[name] = total.get(name, 0) + count
    return Explored(states, transitions, ends, outcomes, leftovers)


__all__ = ["LOST", "SecondMove", "ends_of_the_first", "explore_two"]
