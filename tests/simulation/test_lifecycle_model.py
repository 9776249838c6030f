"""No reachable state of one move breaks an invariant, though processes end and answers are late, lost or early.

The state machines are the real ones, and ``one_move.py`` describes the model around them. ``Model.check`` holds the
invariants of every state, ``Model.check_end`` those of an end state. ``explore`` also proves that an end can be reached
from every state by steps that must happen at some time. The broken variants below show that the exploration finds
mistakes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from reconfig.decisions import migration as m
from reconfig.decisions.migration import Instruction, Move, Phase
from stateflow.errors import MoveAborted
from stateflow.partition.lifecycle import FenceAnswer, Lifecycle, State, Verdict
from stateflow.transitions import Ignored, Row, Table, Transition
from stateflow.types import ReplicaInfo
from tests.simulation.explore import SHRANK, Explored, Found, documented, explore
from tests.simulation.one_move import EPOCH, Model, Rules


@pytest.mark.parametrize(
    "rules",
    [
        Rules(faults_together=0, commits=2),
        Rules(faults_together=1, commits=2),
        pytest.param(Rules(faults_together=2, commits=1, orphans_survive=True), marks=pytest.mark.thorough),
        pytest.param(Rules(faults_together=3, commits=0, faults=(2,) * 7), marks=pytest.mark.thorough),
        pytest.param(Rules(faults_together=3, commits=1), marks=pytest.mark.thorough),
    ],
    ids=[
        "no fault",
        "one fault, two batches",
        "two faults, requests outlive processes",
        "three faults, the same one twice",
        "three faults",
    ],
)
def test_no_reachable_state_is_wrong(
    rules: Rules, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    explored = explore(Model(rules))
    with capsys.disabled():
        print(f"\n  {explored}")
    assert explored.states == documented(f"one move, {request.node.callspec.id}"), SHRANK
    assert explored.outcomes["owned"] > 0
    assert rules.faults_together == 0 or explored.outcomes["aborted"] > 0


TERMS = Rules(faults=(0, 0, 4, 0, 0, 0, 0), faults_together=4, commits=1)


def test_terms_that_end_fail_no_move(capsys: pytest.CaptureFixture[str]) -> None:
    """No move fails because terms end, at whichever points of the move and however many."""
    explored = explore(Model(TERMS))
    with capsys.disabled():
        print(f"\n  {explored}")
    assert explored.states > 3_000, "the model shrank: less is checked than before"
    assert set(explored.outcomes) == {"owned"}


# -- broken on purpose --------------------------------------------------------------------------------------


class CancelIgnoresSeal(Lifecycle):
    def cancel(self, move_id: str) -> bool:
        if self.state is State.SEALED and self.move_id == move_id:
            self.state, self.epoch, self.move_id, self.successor = State.OWNED, EPOCH, "", None
            return True
        return Lifecycle.cancel(self, move_id)


class CancelForgets(Lifecycle):
    """A source forgets that it cancelled a move, and obeys the move's late fence."""

    def cancel(self, move_id: str) -> bool:
        possible = Lifecycle.cancel(self, move_id)
        self.cancelled = frozenset()
        return possible


class ServesWhenSealed(Lifecycle):
    def begin(self, epoch: int) -> Verdict:
        if self.state is State.SEALED and not self.running:
            self.running = True
            return Verdict.SERVE
        return Lifecycle.begin(self, epoch)


class SealsOverABatch(Lifecycle):
    """A source seals while a batch still runs."""

    def fence(self, move_id: str, epoch: int, successor: ReplicaInfo) -> FenceAnswer:
        answer = Lifecycle.fence(self, move_id, epoch, successor)
        return FenceAnswer.SEAL_NOW if answer is FenceAnswer.SEAL_AFTER_BATCH else answer

    def sealed(self) -> None:
        running, self.running = self.running, False
        Lifecycle.sealed(self)
        self.running = running


def but(*rows: Row[Phase, Move]) -> Table[Phase, Move, m.Says]:
    """Returns the move's table with these rows before its own."""
    return replace(m.TABLE, rows=(*rows, *m.TABLE.rows))


ABORT = (m.CANCEL_SOURCE, m.ABANDON_TARGET, m.RECORD_ABORTED)


def _give_up(move: Move, _: m.Event) -> None:
    move.error = MoveAborted("it is given up")


class SilenceMeansNo(Move):
    """A move assumes that a source that does not answer has not sealed."""

    table = but(Transition(Phase.FENCED, m.SourceUnknown, Phase.ABORTED, ABORT, effect=_give_up))


class GivesUpAfterTheSeal(Move):
    table = but(Transition(Phase.FENCED, m.TargetFailed, Phase.ABORTED, ABORT, effect=_give_up))


class FencesBeforeItIsRecorded(Move):
    table = but(
        Ignored(Phase.CATCHING_UP, m.CaughtUp, (), when=m.GRANTING),
        Transition(
            Phase.CATCHING_UP,
            m.CaughtUp,
            Phase.FENCED,
            (m.FENCE, m.RECORD_GRANT),
            when=m.FITS,
            effect=lambda move, _: setattr(move, "granted", True),
        ),
    )


class ForgetsToRetry(Move):
    table = but(Ignored(Phase.FENCED, m.SourceUnknown, (), when=m.CANCELLING))


class CancelsAnytime(Move):
    """A user's cancel after the fence aborts the move at once."""

    table = but(Transition(Phase.FENCED, m.Cancel, Phase.ABORTED, ABORT, effect=_give_up))


class AssumesUnsealed(Move):
    """A move that was granted in an earlier term aborts when its copy fails, as if the source had not sealed."""

    table = but(Transition(m.COPYING, m.TargetFailed, Phase.ABORTED, ABORT, effect=_give_up))


class CancelsWhatWasGranted(Move):
    """A user's cancel aborts at once a move that was granted in an earlier term."""

    table = but(Transition(m.COPYING, m.Cancel, Phase.ABORTED, ABORT, when=m.GRANTED, effect=_give_up))


class GrantsAgain(Move):
    """A move that was granted in an earlier term asks for its grant again."""

    table = but(
        Transition(
            Phase.CATCHING_UP,
            m.CaughtUp,
            None,
            (m.RECORD_GRANT,),
            when=m.GRANTED_FITS,
            effect=lambda move, _: setattr(move, "granted", False),
        )
    )


class NeverFencesAgain(Move):
    """A move that was granted in an earlier term assumes that the source was fenced, too."""

    table = but(Transition(Phase.CATCHING_UP, m.CaughtUp, Phase.FENCED, (), when=m.GRANTED_FITS))


def rolls_back(move: Move) -> list[Instruction]:
    """Resumes a move after a restart as an earlier version did: a granted move is rolled back."""
    if not move.granted:
        return move.handle(m.Begin())
    return move.handle(m.TargetFailed(MoveAborted("restarted")))


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (Rules(unfence_on_timeout=True), "two owners"),
        (Rules(lifecycle=CancelIgnoresSeal), "two owners"),
        pytest.param(
            Rules(lifecycle=CancelForgets, fence_needs_follower=False, faults_together=3),
            "rolled back sealed all the same",
            marks=pytest.mark.thorough,
        ),
        (Rules(lifecycle=ServesWhenSealed), "a batch runs only while the partition is OWNED or FENCING"),
        (Rules(lifecycle=SealsOverABatch), "a batch runs only while the partition is OWNED or FENCING"),
        (Rules(durable_first=False), "the target's disk does not"),
        (Rules(move=SilenceMeansNo), "rolled back sealed all the same"),
        (Rules(move=GivesUpAfterTheSeal), "rolled back sealed all the same"),
        (Rules(move=CancelsAnytime), "rolled back sealed all the same"),
        (Rules(move=FencesBeforeItIsRecorded), "not in the ledger"),
        (Rules(move=ForgetsToRetry), "the move never ends"),
        (Rules(move=AssumesUnsealed), "rolled back sealed all the same"),
        (Rules(move=CancelsWhatWasGranted), "rolled back sealed all the same"),
        (Rules(move=GrantsAgain), "granted twice"),
        (Rules(move=NeverFencesAgain), "the move never ends"),
    ],
    ids=[
        "un-fence on time-out",
        "cancel ignores a seal",
        "cancel forgets",
        "serves when sealed",
        "seals over a batch",
        "said before durable",
        "silence means no",
        "gives up after the seal",
        "cancels at any time",
        "fences before it is recorded",
        "forgets to retry",
        "assumes unsealed",
        "cancels what was granted",
        "grants again",
        "never fences again",
    ],
)
def test_a_broken_variant_is_found(rules: Rules, why: str) -> None:
    with pytest.raises(Found) as found:
        explore(Model(rules))
    assert why in found.value.why
    assert len(found.value.trace) < 30, "the shortest story that shows it"


def test_a_granted_move_that_is_rolled_back_is_found() -> None:
    assert explore(Model(replace(TERMS, resume=rolls_back))).outcomes["aborted"] > 0


def test_an_explored_world_is_the_same_every_time() -> None:
    rules = Rules(faults_together=1)
    first, second = explore(Model(rules)), explore(Model(rules))
    assert isinstance(first, Explored)
    assert first == second
