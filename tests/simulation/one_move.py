"""A model of one move, small enough that all its states can be explored.

The state machines are the real ones: ``reconfig.decisions.migration.Move`` at the controller, ``Lifecycle`` at source
and target. The model adds the rest of the system: calls that are lost, late or answered after their caller has ended,
the stream of a transfer, the change log, durable state, and processes that end and restart.

The model has no clock. Everything that may happen next is a transition, so a time-out may come at any point. A state
is one immutable tuple, so that the exploration recognises the states it has already seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from reconfig.decisions import migration as m
from reconfig.decisions.budget import Measured
from reconfig.decisions.migration import Instruction, Move, Phase
from stateflow.errors import InvariantBroken, StateflowError, Unavailable
from stateflow.partition.lifecycle import FenceAnswer, Lifecycle, State, Verdict
from stateflow.types import PartitionId, ReplicaInfo

P = PartitionId("Op", 0)
TARGET = ReplicaInfo("target", "edge", "target:1")
MOVE = "m1"
EPOCH, GRANTED = 1, 2
LOST = Unavailable("no answer")
MEASURED = Measured(0, 0.0, 0.0, 0.0)

Cycle = tuple[Any, ...]  # Lifecycle's fields
Durable = tuple[State, int] | None  # ownership on disk


class World(NamedTuple):
    # the controller; move is None while the controller is down, and after the move has ended
    move: tuple[Any, ...] | None
    todo: tuple[Instruction, ...]
    notes: tuple[str, ...]  # the controller's events to itself: records that are written
    running: bool
    # calls to the source: (kind, stage). stage: sent, waiting (for the running batch), answered …, or orphan (a
    # request whose caller no longer waits)
    calls: tuple[tuple[str, str], ...]
    # stages of the prepare calls to the target: sent or orphan
    prepares: tuple[str, ...]
    stream: tuple[bool, tuple[str, ...]] | None  # (whether a base was reported, reports under way)
    letters: tuple[str, ...]  # requests that get no answer: abandon, release; "late abandon" is of an earlier term
    # the ledger
    granted: bool
    outcome: str
    # source
    source: Cycle | None  # None: the process is down
    source_disk: Durable
    log: str  # none, live, sealed
    source_data: int
    # target
    target: Cycle | None
    target_disk: Durable
    transfer: tuple[str, int]  # (stage: none, snapshot or following; number of commits copied)
    target_data: int
    # budgets
    commits: int
    acknowledged: int
    faults: tuple[int, ...]
    # remains of an earlier move; see two_moves.py
    third: Cycle | None = None
    third_disk: Durable = None
    stale: tuple[str, ...] = ()
    #: 0 while the earlier target follows the earlier source again, -1 otherwise
    stale_pull: int = -1


FAULTS = ("source ends", "target ends", "controller ends", "call lost", "stream lost", "transfer lost", "cancelled")


@dataclass(slots=True)
class Rules:
    """Limits of the exploration, and rules that tests break on purpose to see that the exploration finds the error."""

    lifecycle: type[Lifecycle] = Lifecycle
    move: type[Move] = Move
    commits: int = 1
    faults: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 1)
    faults_together: int = 2
    orphans_survive: bool = False  # a request in flight is delivered even if its receiver restarts meanwhile
    durable_first: bool = True
    unfence_on_timeout: bool = False
    fence_needs_follower: bool = True
    resume: Callable[[Move], list[Instruction]] = lambda move: move.handle(m.Begin())
    move_id: str = MOVE
    epoch: int = EPOCH
    granted: int = GRANTED
    successor: ReplicaInfo = TARGET


class Broken(AssertionError):
    pass


# -- machines as values -------------------------------------------------------------------------------------

_CYCLE = ("state", "epoch", "move_id", "successor", "granted", "running", "cancelled")
_MOVE = (
    "phase",
    "granting",
    "granted",
    "sealed",
    "cancelling",
    "target_up",
    "rounds",
    "predicted_pause_ms",
    "digest",
    "error",
)


def freeze(lifecycle: Lifecycle) -> Cycle:
    return tuple([getattr(lifecycle, name) for name in _CYCLE])


def freeze_move(move: Move) -> tuple[Any, ...]:
    *rest, error = [getattr(move, name) for name in _MOVE]
    return (*rest, error and error.code)


class Model:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def start(self) -> World:
        source = self.rules.lifecycle(P)
        source.create(self.rules.epoch)
        move = self.rules.move(self.rules.epoch, self.rules.granted)
        todo = tuple(move.handle(m.Begin()))
        return World(
            freeze_move(move),
            todo,
            (),
            True,
            (),
            (),
            None,
            (),
            False,
            "",
            freeze(source),
            (State.OWNED, self.rules.epoch),
            "none",
            0,
            freeze(self.rules.lifecycle(P)),
            None,
            ("none", 0),
            0,
            0,
            0,
            self.rules.faults,
        )

    def thaw(self, cycle: Cycle) -> Lifecycle:
        return self.rules.lifecycle(P, *cycle)

    def thaw_move(self, frozen: tuple[Any, ...]) -> Move:
        move = self.rules.move(self.rules.epoch, self.rules.granted)
        for name, value in zip(_MOVE, frozen, strict=True):
            setattr(move, name, value)
        move.error = LOST if frozen[-1] else None
        return move

    # -- everything that can happen next ------------------------------------------------------------------

    def steps(self, w: World) -> Iterator[tuple[str, World, bool]]:
        """Yields every possible next step: (its description, the world after it, whether it must happen at some time).

        Faults and the arrival of batches need not happen.
        """
        yield from self._controller(w)
        yield from self._calls(w)
        yield from self._target(w)
        yield from self._transfer(w)
        yield from self._batches(w)
        yield from self._faults(w)

    # -- controller ---------------------------------------------------------------------------------------

    def _controller(self, w: World) -> Iterator[tuple[str, World, bool]]:
        if not w.running:
            yield "controller comes back", self._resume(w), True
            return
        if w.move is None:
            return
        if w.todo:
            yield f"controller: {w.todo[0]}", self._carry_out(w), True
            return
        if w.move[0] in m.TERMINAL:  # the runner ends, and no one waits for answers any more
            orphans = tuple(sorted("orphan" for _ in w.prepares))
            yield "move ends", self._forget_calls(w)._replace(move=None, stream=None, prepares=orphans), True
            return
        for note in w.notes:
            left = _without(w.notes, note)
            event: m.Event = m.GrantRecorded() if note == "granted" else m.OwnedRecorded()
            yield f"note: {note}", self._handle(w._replace(notes=left), event), True
        for call in dict.fromkeys(w.calls):
            kind, stage = call
            if stage.startswith("answered"):
                answer = stage.partition(" ")[2]
                event = {
                    "sealed": m.SourceSealed(),
                    "refused": m.FenceRefused(LOST),
                    "cancelled": m.SourceCancelled(),
                    "unknown": m.SourceUnknown(),
                }[answer]
                calls = _without(w.calls, call)
                yield f"{kind} answered: {answer}", self._handle(w._replace(calls=calls), event), True
        if w.stream is not None and w.stream[1]:
            yield f"report: {w.stream[1][0]}", self._report(w), True

    def _report(self, w: World) -> World:
        assert w.stream is not None
        warm, (first, *rest) = w.stream
        if first == "caught up":
            w = w._replace(stream=(True, tuple(rest)))
            if not warm:
                w = self._handle(w, m.BaseReady())
            return self._handle(w, m.CaughtUp(MEASURED))
        w = w._replace(stream=None)
        return self._handle(w, m.TargetOwned(self.rules.granted, "") if first == "owned" else m.TargetFailed(LOST))

    def _handle(self, w: World, event: m.Event) -> World:
        assert w.move is not None
        move = self.thaw_move(w.move)
        instructions = move.handle(event)
        _validate(move)
        return w._replace(move=freeze_move(move), todo=w.todo + tuple(instructions))

    def _carry_out(self, w: World) -> World:
        instruction, *rest = w.todo
        w = w._replace(todo=tuple(rest))
        assert w.move is not None
        if isinstance(instruction, m.Retry):
            instruction = instruction.instruction
        match instruction:
            case m.Prepare():
                return w._replace(prepares=_with(w.prepares, "sent"))
            case m.RecordGrant():
                if w.granted:
                    raise Broken("granted twice")
                return w._replace(granted=True, notes=_with(w.notes, "granted"))
            case m.Fence():
                if not w.granted:
                    raise Broken("the source hears of a grant that is not in the ledger")
                return w._replace(calls=_with(w.calls, ("fence", "sent")))
            case m.CancelSource(_, tidies):
                return w._replace(calls=_with(w.calls, ("cancel", "orphan" if tidies else "sent")))
            case m.AbandonTarget():
                return w._replace(letters=_with(w.letters, "abandon"))
            case m.RecordOwned():
                return w._replace(outcome="owned", notes=_with(w.notes, "owned"))
            case m.RecordAborted():
                return w._replace(outcome="aborted")
            case m.Release():
                return w._replace(letters=_with(w.letters, "release"))
            case _:
                return w

    @staticmethod
    def _forget_calls(w: World) -> World:
        """Forgets the caller's calls; those under way may arrive all the same."""
        calls = tuple(sorted((kind, "orphan") for kind, stage in w.calls if stage in ("sent", "orphan")))
        return w._replace(calls=calls)

    def _resume(self, w: World) -> World:
        w = w._replace(running=True, letters=tuple(f"late {x}" if x == "abandon" else x for x in w.letters))
        if w.outcome:
            return w
        move = self.rules.move(self.rules.epoch, self.rules.granted, granted=w.granted)
        first = self.rules.resume(move)
        return w._replace(move=freeze_move(move), todo=tuple(first))

    # -- calls that reach the source ----------------------------------------------------------------------

    def _calls(self, w: World) -> Iterator[tuple[str, World, bool]]:
        for call in dict.fromkeys(w.calls):
            kind, stage = call
            if stage not in ("sent", "orphan", "waiting"):
                continue
            left = _without(w.calls, call)
            if stage == "orphan":
                yield f"late {kind} is lost", w._replace(calls=left), True
            if w.source is None:
                if stage != "orphan":
                    calls = _with(left, (kind, "answered unknown"))
                    yield f"{kind} finds nobody", w._replace(calls=calls), True
                continue
            lifecycle = self.thaw(w.source)
            if stage == "waiting":
                if lifecycle.state is State.SEALED:
                    yield "fence waited", w._replace(calls=_with(left, (kind, "answered sealed"))), True
                elif lifecycle.state is not State.FENCING:
                    yield "fence waited", w._replace(calls=_with(left, (kind, "answered refused"))), True
                continue
            after, answer = self._fence(w, lifecycle) if kind == "fence" else self._cancel(w, lifecycle)
            if after is None:
                continue  # it waits for a lock
            if stage == "sent":
                left = _with(left, (kind, answer if answer == "waiting" else f"answered {answer}"))
            yield f"{'late ' if stage == 'orphan' else ''}{kind}: {answer}", after._replace(calls=left), True

    def _fence(self, w: World, lifecycle: Lifecycle) -> tuple[World | None, str]:
        if self.rules.fence_needs_follower and lifecycle.state is State.OWNED and w.log == "none":
            return w, "refused"
        try:
            answer = lifecycle.fence(self.rules.move_id, self.rules.granted, self.rules.successor)
        except StateflowError:
            return w, "refused"
        w = w._replace(source=freeze(lifecycle))
        if answer is FenceAnswer.SEAL_NOW:
            return self._seal(w), "sealed"
        return w, "waiting" if answer is FenceAnswer.SEAL_AFTER_BATCH else "sealed"

    def _seal(self, w: World) -> World:
        assert w.source is not None
        lifecycle = self.thaw(w.source)
        lifecycle.sealed()
        disk = (State.SEALED, lifecycle.epoch) if self.rules.durable_first else w.source_disk
        log = "sealed" if w.log != "none" else w.log
        return w._replace(source=freeze(lifecycle), source_disk=disk, log=log)

    def _cancel(self, w: World, lifecycle: Lifecycle) -> tuple[World | None, str]:
        if lifecycle.running:
            return None, ""  # a cancellation needs the lock that the batch holds
        if not lifecycle.cancel(self.rules.move_id):
            return w, "sealed"
        disk = (State.OWNED, self.rules.epoch) if lifecycle.state is State.OWNED else w.source_disk
        return w._replace(source=freeze(lifecycle), source_disk=disk, log="none"), "cancelled"

    # -- calls that reach the target ----------------------------------------------------------------------

    def _target(self, w: World) -> Iterator[tuple[str, World, bool]]:
        for stage in dict.fromkeys(w.prepares):
            left = _without(w.prepares, stage)
            if stage == "orphan":
                yield "late prepare is lost", w._replace(prepares=left), True
            if w.target is None:
                if stage == "sent":
                    yield (
                        "prepare finds nobody",
                        self._to_stream(w._replace(prepares=left, stream=(False, ())), "failed"),
                        True,
                    )
                continue
            yield f"prepare arrives ({stage})", self._prepare(w._replace(prepares=left), stage == "sent"), True
        for letter in dict.fromkeys(w.letters):
            left_letters = _without(w.letters, letter)
            yield f"{letter} is lost", w._replace(letters=left_letters), True
            if letter == "release" and w.source is not None:
                yield "release", w._replace(letters=left_letters, log="none"), True
            if letter in ("abandon", "late abandon") and w.target is not None and not w.target[5]:
                lifecycle = self.thaw(w.target)
                lifecycle.cancel(self.rules.move_id)
                after = w._replace(letters=left_letters, target=freeze(lifecycle))
                yield letter, self._pull_ends(after) if lifecycle.state is State.WARMING else after, True

    def _prepare(self, w: World, listens: bool) -> World:
        assert w.target is not None
        if listens:  # the request is of the newest term, and from here on the target refuses those of earlier terms
            w = w._replace(stream=(False, ()), letters=tuple(x for x in w.letters if x != "late abandon"))
        lifecycle = self.thaw(w.target)
        if lifecycle.state is State.OWNED:
            return self._to_stream(w, "owned") if listens else w
        if w.transfer[0] != "none":
            return w  # the request joins the running transfer
        try:
            lifecycle.prepare(self.rules.move_id, self.rules.epoch)
        except StateflowError:
            return self._to_stream(w, "failed") if listens else w
        return w._replace(target=freeze(lifecycle), transfer=("snapshot", 0))

    @staticmethod
    def _to_stream(w: World, report: str) -> World:
        return w if w.stream is None else w._replace(stream=(w.stream[0], (*w.stream[1], report)))

    def _pull_ends(self, w: World) -> World:
        """Ends a broken transfer: the target gives the partition up and reports the failure, if a stream is open."""
        assert w.target is not None
        lifecycle = self.thaw(w.target)
        lifecycle.abandon(self.rules.move_id)
        return self._to_stream(w._replace(target=freeze(lifecycle), transfer=("none", 0)), "failed")

    # -- the transfer -------------------------------------------------------------------------------------

    def _transfer(self, w: World) -> Iterator[tuple[str, World, bool]]:
        stage, copied = w.transfer
        if stage == "none" or w.target is None:
            return
        if w.source is None or (stage == "following" and w.log == "none"):
            yield "transfer breaks", self._pull_ends(w), True
            return
        if stage == "snapshot":
            source = self.thaw(w.source)
            if source.running:
                return  # the snapshot waits for the batch
            sealed = source.state is State.SEALED and source.move_id == self.rules.move_id
            if sealed or (source.state is State.OWNED and self.rules.move_id not in source.cancelled):
                log = "sealed" if sealed else "live"
                yield "snapshot", w._replace(log=log, transfer=("following", w.source_data)), True
            else:
                yield "snapshot refused", self._pull_ends(w), True
            return
        if copied < w.source_data:
            yield "change set", w._replace(transfer=(stage, copied + 1)), True
        elif w.log == "sealed":
            lifecycle = self.thaw(w.target)
            lifecycle.own(self.rules.move_id, self.rules.granted)
            disk = (State.OWNED, self.rules.granted) if self.rules.durable_first else w.target_disk
            after = w._replace(target=freeze(lifecycle), target_disk=disk, target_data=copied, transfer=("none", 0))
            yield "target owns", self._to_stream(after, "owned"), True
        elif w.stream is not None and "caught up" not in w.stream[1] and _waits_for_the_target(w):
            yield "caught up", self._to_stream(w, "caught up"), True

    # -- batches ------------------------------------------------------------------------------------------

    def _batches(self, w: World) -> Iterator[tuple[str, World, bool]]:
        for who in ("source", "target"):
            cycle = getattr(w, who)
            if cycle is None:
                continue
            lifecycle = self.thaw(cycle)
            if lifecycle.running:
                yield f"{who} commits", self._commit(w, who, lifecycle), True
            elif w.commits < self.rules.commits:
                try:
                    verdict = lifecycle.begin(self.rules.epoch if who == "source" else self.rules.granted)
                except StateflowError:
                    continue
                if verdict is Verdict.SERVE:
                    yield f"{who} begins a batch", w._replace(commits=w.commits + 1, **{who: freeze(lifecycle)}), False

    def _commit(self, w: World, who: str, lifecycle: Lifecycle) -> World:
        if who == "source" and w.source_disk != (State.OWNED, self.rules.epoch):
            raise Broken("a commit on a sealed store")
        seal = lifecycle.finish()
        w = w._replace(acknowledged=w.acknowledged + 1, **{who: freeze(lifecycle)})
        if who == "source":
            w = w._replace(source_data=w.source_data + 1)
            return self._seal(w) if seal else w
        return w._replace(target_data=w.target_data + 1)

    # -- faults -------------------------------------------------------------------------------------------

    def _faults(self, w: World) -> Iterator[tuple[str, World, bool]]:
        if w.source is None:
            yield "source comes back", self._recover_source(w), True
        if w.target is None:
            yield "target comes back", self._recover_target(w), True
        if self.rules.unfence_on_timeout and w.source is not None and w.source[0] is State.SEALED:
            lifecycle = self.thaw(w.source)
            lifecycle.state, lifecycle.epoch = State.OWNED, self.rules.epoch
            yield (
                "source un-fences",
                w._replace(source=freeze(lifecycle), source_disk=(State.OWNED, self.rules.epoch)),
                False,
            )
        if sum(self.rules.faults) - sum(w.faults) >= self.rules.faults_together:
            return
        for number, name in enumerate(FAULTS):
            if not w.faults[number]:
                continue
            spent = w._replace(faults=tuple(left - (i == number) for i, left in enumerate(w.faults)))
            for after in self._fault(spent, name):
                yield name, after, False

    def _fault(self, w: World, name: str) -> Iterator[World]:
        match name:
            case "source ends" if w.source is not None:
                calls = [
                    (kind, "answered unknown") if stage in ("sent", "waiting") else (kind, stage)
                    for kind, stage in w.calls
                    if stage != "orphan" or self.rules.orphans_survive
                ]
                late = [(kind, "orphan") for kind, stage in w.calls if stage == "sent" and self.rules.orphans_survive]
                letters = w.letters if self.rules.orphans_survive else tuple(x for x in w.letters if x != "release")
                began = w.commits - bool(w.source[5])  # the client sends an unfinished batch again
                yield w._replace(
                    source=None, log="none", calls=tuple(sorted(calls + late)), letters=letters, commits=began
                )
            case "target ends" if w.target is not None:
                began = w.commits - bool(w.target[5])
                prepares, letters = w.prepares, w.letters
                if not self.rules.orphans_survive:
                    prepares = tuple(x for x in prepares if x != "orphan")
                    letters = tuple(x for x in letters if x == "release")
                after = w._replace(target=None, transfer=("none", 0), prepares=prepares, letters=letters, commits=began)
                # reports that the target had sent may be lost, or may arrive
                yield after if after.stream is None else after._replace(stream=(after.stream[0], ("failed",)))
                if after.stream is not None and after.stream[1]:
                    yield self._to_stream(after, "failed")
            case "controller ends" if w.running:
                orphans = tuple(sorted("orphan" for _ in w.prepares))
                yield self._forget_calls(w)._replace(
                    running=False, move=None, todo=(), notes=(), stream=None, prepares=orphans
                )
            case "call lost":
                for call in dict.fromkeys(w.calls):
                    kind, stage = call
                    if stage == "orphan" or stage == "answered unknown":
                        continue
                    lost = _with(_without(w.calls, call), (kind, "answered unknown"))
                    yield w._replace(calls=lost)
                    if stage == "sent":  # the caller gives up; the request arrives later
                        yield w._replace(calls=_with(lost, (kind, "orphan")))
            case "stream lost":
                if w.stream is not None:
                    yield w._replace(stream=(w.stream[0], ("failed",)))
                elif "sent" in w.prepares:
                    left = _with(_without(w.prepares, "sent"), "orphan")
                    yield w._replace(prepares=left, stream=(False, ("failed",)))
            case "transfer lost" if w.transfer[0] != "none":
                yield self._pull_ends(w)
            case "cancelled" if w.move is not None and not w.todo and w.move[0] not in m.TERMINAL:
                yield self._handle(w, m.Cancel())

    def _recover_source(self, w: World) -> World:
        lifecycle = self.rules.lifecycle(P)
        assert w.source_disk is not None
        state, epoch = w.source_disk
        sealed = state is State.SEALED
        lifecycle.recover(state, epoch, self.rules.move_id if sealed else "", self.rules.successor if sealed else None)
        return w._replace(source=freeze(lifecycle))

    def _recover_target(self, w: World) -> World:
        lifecycle = self.rules.lifecycle(P)
        if w.target_disk is not None:
            lifecycle.recover(*w.target_disk, self.rules.move_id)
        return w._replace(target=freeze(lifecycle))

    # -- what must hold -----------------------------------------------------------------------------------

    def check(self, w: World) -> None:
        """Checks the invariants of every state. Raises Broken."""
        for cycle in (w.source, w.target):
            if cycle is not None:
                _validate(self.thaw(cycle))
        if _may_commit(w.source) and _may_commit(w.target):
            raise Broken("two owners that can commit")
        source_durable = w.source_disk is not None and w.source_disk[0] is State.OWNED
        target_durable = w.target_disk is not None and w.target_disk[0] is State.OWNED
        if source_durable and target_durable:
            raise Broken("two owners on disk")
        if _may_commit(w.source) and w.source_data != w.acknowledged:
            raise Broken("the source serves without something that was acknowledged")
        if _may_commit(w.target) and w.target_data != w.acknowledged:
            raise Broken("the target serves without something that was acknowledged")
        if w.outcome == "aborted" and (not source_durable or target_durable):
            raise Broken("a move that was rolled back sealed all the same")
        if w.outcome == "owned" and not target_durable:
            raise Broken("the ledger says that the target owns, the target's disk does not")
        if (target_durable or not source_durable) and not w.granted:
            raise Broken("sealed without a grant in the ledger")
        if target_durable and w.target_disk != (State.OWNED, self.rules.granted):
            raise Broken("owned at an epoch that was not granted")

    def check_end(self, w: World) -> None:
        """Checks the invariants of a state in which nothing more has to happen. Raises Broken."""
        if not w.outcome:
            raise Broken("the move never ends")
        owners = [who for who in ("source", "target") if getattr(w, who)[0] is State.OWNED]
        expected = ["target"] if w.outcome == "owned" else ["source"]
        if owners != expected:
            raise Broken(f"{w.outcome}, and owned by {owners or 'nobody'}")
        assert w.target is not None
        if w.target[0] is State.WARMING and not (w.transfer[0] == "following" and w.log == "live"):
            raise Broken("the target warms for a transfer that is over, and refuses every later move")


def _validate(machine: Move | Lifecycle) -> None:
    try:
        machine.validate()
    except InvariantBroken as error:
        raise Broken(error.what) from error


def _may_commit(cycle: Cycle | None) -> bool:
    return cycle is not None and (cycle[0] is State.OWNED or bool(cycle[5]))


def _waits_for_the_target(w: World) -> bool:
    return w.move is not None and w.move[0] in (Phase.WARMING, Phase.CATCHING_UP)


def _with(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    return tuple(sorted((*items, item)))


def _without(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    at = items.index(item)
    return items[:at] + items[at + 1 :]
