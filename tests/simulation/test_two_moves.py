"""No reachable state of a second move breaks an invariant, though requests of the first move arrive late."""

from __future__ import annotations

import pytest

from stateflow.partition.lifecycle import Lifecycle, State
from tests.simulation.explore import SHRANK, Found, documented
from tests.simulation.one_move import Rules
from tests.simulation.two_moves import ends_of_the_first, explore_two

FIRST = Rules(faults_together=1, commits=0)


def test_no_reachable_state_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    explored = explore_two(FIRST, Rules(faults_together=0, commits=1), stale_max=2)
    with capsys.disabled():
        print(f"\n  {explored}")
    assert explored.states == documented("two moves, three replicas, two late requests"), SHRANK
    assert explored.outcomes["owned"] > 0
    assert explored.outcomes["aborted"] > 0


def test_the_first_move_ends_in_many_ways() -> None:
    ends = ends_of_the_first(FIRST)
    assert {end.outcome for end in ends} == {"owned", "aborted"}
    assert {end.granted for end in ends} == {True, False}
    assert any(end.target is not None and end.target[0] is State.WARMING for end in ends)


class TakesOldSeals(Lifecycle):
    """A replica accepts a seal a second time, even if a later move has superseded it."""

    def prepare(self, move_id: str, source_epoch: int) -> None:
        if self.state in (State.SEALED, State.ABSENT):
            self.epoch = min(self.epoch, source_epoch)
        Lifecycle.prepare(self, move_id, source_epoch)


class FencesForOldGrants(Lifecycle):
    """An owner obeys every fence: also one that grants an old epoch, and one of a cancelled move."""

    def fence(self, move_id: str, epoch: int, successor: object) -> object:  # type: ignore[override]
        if self.state is State.OWNED:
            self.cancelled, epoch = frozenset(), max(epoch, self.epoch + 1)
        return Lifecycle.fence(self, move_id, epoch, successor)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", [TakesOldSeals, FencesForOldGrants], ids=["seal accepted twice", "old grants"])
def test_a_broken_variant_is_found(broken: type[Lifecycle]) -> None:
    with pytest.raises(Found) as found:
        explore_two(FIRST, Rules(lifecycle=broken, faults_together=0, commits=1), stale_max=2)
    print(found.value)
