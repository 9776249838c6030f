"""The table in reconfig/decisions/migration.py, row by row, and long stories that pass through several rows."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconfig.decisions import migration as m
from reconfig.decisions.budget import Measured, predicted_pause_ms
from reconfig.decisions.migration import Move, Phase
from reconfig.decisions.plan import Kind
from stateflow.errors import BudgetUnreachable, InvalidTransition, InvariantBroken, MoveAborted, StaleEpoch, Unavailable
from tests.instructions import names
from tests.sizes import sized

SMALL = Measured(lag_bytes=0, change_rate=0.0, bandwidth=1e6, rtt_ms=1.0)
LARGE = Measured(lag_bytes=10**9, change_rate=0.0, bandwidth=1e6, rtt_ms=1.0)
HOPELESS = Measured(lag_bytes=0, change_rate=2e6, bandwidth=1e6, rtt_ms=1.0)
LOST = Unavailable("the target went away")
REFUSED = StaleEpoch("too old")
CANCELLED_THERE = MoveAborted("this move was cancelled here")
OWNED = m.TargetOwned(6, "digest")

EVENTS: list[m.Event] = [
    m.Begin(),
    m.BaseReady(),
    m.CaughtUp(SMALL),
    m.GrantRecorded(),
    m.SourceSealed(),
    m.FenceRefused(REFUSED),
    m.SourceCancelled(),
    m.SourceUnknown(),
    OWNED,
    m.TargetFailed(LOST),
    m.OwnedRecorded(),
    m.Cancel(),
    m.SourceGone(),
    m.GivenUp(),
    m.TargetCancelled(),
    m.TargetUnknown(),
    m.TakenOver(),
]
ABORT = ["CancelSource", "AbandonTarget", "RecordAborted"]


def move(*events: m.Event, **options: Any) -> Move:
    machine = Move(5, 6, **options)
    for event in events:
        machine.handle(event)
    return machine


def photo(machine: Move) -> Move:
    """Copies ``machine`` as it is now, independent of what it does later."""
    return dataclasses.replace(machine, story=machine.story.copy())


START = m.Begin()
TO_CATCHING_UP = (START, m.BaseReady())
TO_GRANTING = (*TO_CATCHING_UP, m.CaughtUp(SMALL))
TO_FENCED = (*TO_GRANTING, m.GrantRecorded())
TO_SEALED = (*TO_FENCED, m.SourceSealed())
TO_OWNED = (*TO_SEALED, OWNED)

WAITING = move()
WARMING = move(START)
CATCHING_UP = move(*TO_CATCHING_UP)
GRANTING = move(*TO_GRANTING)
FENCED = move(*TO_FENCED)
TARGET_LOST = move(*TO_FENCED, m.TargetFailed(LOST))  # the source is asked whether it has sealed
REFUSING = move(*TO_FENCED, m.FenceRefused(REFUSED))
SEALED = move(*TO_SEALED)
OWNING = move(*TO_OWNED)
COMPLETED = move(*TO_OWNED, m.OwnedRecorded())
ABORTED = move(START, m.Cancel())
GRANTED_BEFORE = move(*TO_CATCHING_UP, granted=True)  # by an earlier term, which may have fenced it
GRANTED_WARMING = move(START, granted=True)
CANCELLED_BEFORE = move(*TO_CATCHING_UP, m.Cancel(), granted=True)
COLD = move(START, kind=Kind.COLD)  # the grant is being recorded
SOURCE_GONE = move(*TO_FENCED, m.SourceGone())

STATES = {
    "WAITING": WAITING,
    "WARMING": WARMING,
    "CATCHING_UP": CATCHING_UP,
    "GRANTING": GRANTING,
    "FENCED": FENCED,
    "TARGET_LOST": TARGET_LOST,
    "REFUSING": REFUSING,
    "SEALED": SEALED,
    "OWNING": OWNING,
    "COMPLETED": COMPLETED,
    "ABORTED": ABORTED,
    "GRANTED_BEFORE": GRANTED_BEFORE,
    "GRANTED_WARMING": GRANTED_WARMING,
    "CANCELLED_BEFORE": CANCELLED_BEFORE,
    "COLD": COLD,
    "SOURCE_GONE": SOURCE_GONE,
}
Row = dict[type, tuple[Phase, list[str]]]
_EARLY_ABORT: Row = {
    m.TargetFailed: (Phase.ABORTED, ABORT),
    m.Cancel: (Phase.ABORTED, ABORT),
    m.SourceGone: (Phase.ABORTED, ["AbandonTarget", "RecordAborted"]),
}
_OWN: Row = {m.TargetOwned: (Phase.OWNED, ["RecordOwned"])}
_LATE_EVENTS = (m.Cancel, m.BaseReady, m.CaughtUp, m.GrantRecorded, m.TakenOver)
_LATE: Row = {event: (Phase.FENCED, []) for event in _LATE_EVENTS}
_BEFORE_SEAL: Row = {
    **_OWN,
    **_LATE,
    m.SourceGone: (Phase.FENCED, ["CancelTarget"]),
    m.GivenUp: (Phase.FENCED, ["CancelTarget"]),
    m.FenceRefused: (Phase.FENCED, ["CancelSource"]),
    m.SourceCancelled: (Phase.ABORTED, ["AbandonTarget", "RecordAborted"]),
}
_CANCELLING: Row = {
    **_BEFORE_SEAL,
    m.SourceUnknown: (Phase.FENCED, ["Retry(CancelSource)"]),
    m.SourceSealed: (Phase.FENCED, ["Prepare"]),
    m.TargetFailed: (Phase.FENCED, []),
}
_GRANTED: Row = {
    **_OWN,
    m.TargetFailed: (Phase.FENCED, ["CancelSource"]),
    m.Cancel: (Phase.FENCED, ["CancelSource"]),
    m.SourceGone: (Phase.FENCED, ["CancelTarget"]),
    m.GivenUp: (Phase.FENCED, ["CancelTarget"]),
}
# State → event → phase afterwards, instructions. An event that is not listed raises InvalidTransition and changes
# nothing.
TABLE: dict[str, Row] = {
    "WAITING": {**_EARLY_ABORT, **_OWN, m.Begin: (Phase.WARMING, ["Prepare"])},
    "WARMING": {
        **_EARLY_ABORT,
        **_OWN,
        m.BaseReady: (Phase.CATCHING_UP, []),
        m.CaughtUp: (Phase.WARMING, []),
    },
    "CATCHING_UP": {
        **_EARLY_ABORT,
        **_OWN,
        m.BaseReady: (Phase.CATCHING_UP, []),
        m.CaughtUp: (Phase.CATCHING_UP, ["RecordGrant"]),
    },
    "GRANTING": {
        **_EARLY_ABORT,
        **_OWN,
        m.BaseReady: (Phase.CATCHING_UP, []),
        m.CaughtUp: (Phase.CATCHING_UP, []),
        m.GrantRecorded: (Phase.FENCED, ["Fence"]),
    },
    "FENCED": {
        **_BEFORE_SEAL,
        m.SourceSealed: (Phase.FENCED, []),
        m.SourceUnknown: (Phase.FENCED, ["Retry(Fence)"]),
        m.TargetFailed: (Phase.FENCED, ["CancelSource"]),
    },
    "TARGET_LOST": _CANCELLING,
    # the transfer goes on: if the source wrote a seal nevertheless, no second one is needed
    "REFUSING": {**_CANCELLING, m.SourceSealed: (Phase.FENCED, [])},
    "SEALED": {
        **_BEFORE_SEAL,
        m.SourceSealed: (Phase.FENCED, []),
        m.SourceCancelled: (Phase.FENCED, []),  # the source cannot take its seal back
        m.SourceUnknown: (Phase.FENCED, ["Retry(Fence)"]),
        m.TargetFailed: (Phase.FENCED, ["Retry(Prepare)"]),
    },
    "OWNING": {
        **{type(event): (Phase.OWNED, []) for event in EVENTS},
        m.OwnedRecorded: (Phase.COMPLETED, ["Release"]),
    },
    "COMPLETED": {type(event): (Phase.COMPLETED, []) for event in EVENTS},
    "ABORTED": {type(event): (Phase.ABORTED, []) for event in EVENTS},
    "GRANTED_BEFORE": {**_GRANTED, m.BaseReady: (Phase.CATCHING_UP, []), m.CaughtUp: (Phase.FENCED, ["Fence"])},
    "GRANTED_WARMING": {**_GRANTED, m.BaseReady: (Phase.CATCHING_UP, []), m.CaughtUp: (Phase.WARMING, [])},
    # the transfer goes on while the source is asked
    "CANCELLED_BEFORE": {**_CANCELLING, m.SourceSealed: (Phase.FENCED, [])},
    "COLD": {
        **_EARLY_ABORT,
        **_OWN,
        m.Begin: (Phase.WAITING, ["RecordGrant"]),
        m.GrantRecorded: (Phase.FENCED, ["Fence"]),
    },
    "SOURCE_GONE": {
        **_BEFORE_SEAL,
        m.SourceGone: (Phase.FENCED, []),
        m.GivenUp: (Phase.FENCED, []),
        m.SourceSealed: (Phase.FENCED, []),
        m.SourceUnknown: (Phase.FENCED, []),
        m.TargetFailed: (Phase.FENCED, []),
        m.TargetUnknown: (Phase.FENCED, ["Retry(CancelTarget)"]),
        m.TargetCancelled: (Phase.ABORTED, ["RecordAborted"]),
    },
}
for impossible in (m.Begin, m.GrantRecorded, m.TargetCancelled, m.TakenOver):
    del TABLE["OWNING"][impossible]
del TABLE["ABORTED"][m.TargetOwned]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_table(state: str, event: m.Event) -> None:
    machine = photo(STATES[state])
    before = photo(machine)
    row = TABLE[state]
    if type(event) not in row:
        with pytest.raises(InvalidTransition) as caught:
            machine.handle(event)
        assert machine == before
        assert before.phase in str(caught.value)
        assert caught.value.where["story"] == " | ".join(before.story)
        return
    phase, instructions = row[type(event)]
    assert names(machine.handle(event)) == instructions
    assert machine.phase is phase
    if before.phase in m.TERMINAL:
        machine.story = before.story
        assert machine == before, "an echo changes nothing"


def test_a_smooth_move() -> None:
    machine = Move(5, 6, max_pause_ms=20.0)
    said = [names(machine.handle(event)) for event in (*TO_OWNED, m.OwnedRecorded())]
    assert said == [
        ["Prepare"],
        [],
        ["RecordGrant"],
        ["Fence"],
        [],
        ["RecordOwned"],
        ["Release"],
    ]
    assert (machine.phase, machine.digest, machine.error) == (Phase.COMPLETED, "digest", None)
    assert (machine.rounds, machine.predicted_pause_ms) == (1, predicted_pause_ms(SMALL))


def test_the_grant_is_in_the_ledger_before_the_source_hears_of_it() -> None:
    machine = move(*TO_CATCHING_UP)
    assert names(machine.handle(m.CaughtUp(SMALL))) == ["RecordGrant"]
    assert machine.phase is Phase.CATCHING_UP
    assert names(machine.handle(m.GrantRecorded())) == ["Fence"]


def test_a_grant_is_asked_for_once() -> None:
    machine = move(*TO_CATCHING_UP)
    said = [names(machine.handle(m.CaughtUp(SMALL))) for _ in range(5)]
    assert said == [["RecordGrant"], [], [], [], []]
    assert machine.rounds == 1


# -- budget -------------------------------------------------------------------------------------------------


def test_no_cut_over_before_the_prediction_fits() -> None:
    machine = move(*TO_CATCHING_UP, max_pause_ms=20.0)
    assert names(machine.handle(m.CaughtUp(LARGE))) == []
    assert names(machine.handle(m.CaughtUp(HOPELESS))) == []
    assert not machine.granting
    assert names(machine.handle(m.CaughtUp(SMALL))) == ["RecordGrant"]
    assert machine.rounds == 3


def test_the_budget_is_inclusive_and_uses_the_fixed_cost_it_was_given() -> None:
    exact = predicted_pause_ms(SMALL, 3.0)
    assert names(move(*TO_CATCHING_UP, max_pause_ms=exact, fixed_ms=3.0).handle(m.CaughtUp(SMALL))) == ["RecordGrant"]
    assert names(move(*TO_CATCHING_UP, max_pause_ms=exact - 0.01, fixed_ms=3.0).handle(m.CaughtUp(SMALL))) == []
    assert names(move(*TO_CATCHING_UP, max_pause_ms=exact, fixed_ms=3.1).handle(m.CaughtUp(SMALL))) == []


@pytest.mark.parametrize("budget", [0.0, 50.0])
def test_a_lag_counts_though_no_bandwidth_was_measured(budget: float) -> None:
    """A base that was there already shows no bandwidth: 500 MB of changes were predicted to cross in no time."""
    behind = Measured(lag_bytes=500_000_000, change_rate=1e7, bandwidth=0.0, rtt_ms=1.0)
    machine = move(*TO_CATCHING_UP, max_pause_ms=budget)
    assert machine.handle(m.CaughtUp(behind, 1.0)) == []
    assert machine.handle(m.CaughtUp(replace(behind, lag_bytes=0), 2.0)) == [m.RecordGrant(6)]


def test_without_a_budget_the_lag_has_its_time_to_become_small() -> None:
    machine = move(*TO_CATCHING_UP)
    assert names(machine.handle(m.CaughtUp(HOPELESS, 4.9))) == []
    assert names(machine.handle(m.CaughtUp(HOPELESS, 5.0))) == ["RecordGrant"], "any prediction fits then"
    assert names(move(*TO_CATCHING_UP).handle(m.CaughtUp(SMALL))) == ["RecordGrant"]


def test_the_margin_counts_against_the_budget_not_in_the_prediction() -> None:
    fits = predicted_pause_ms(SMALL, 3.0)
    machine = move(*TO_CATCHING_UP, max_pause_ms=fits + 2.0, fixed_ms=3.0, margin_ms=2.1)
    assert names(machine.handle(m.CaughtUp(SMALL))) == []
    assert machine.predicted_pause_ms == fits
    machine.margin_ms = 2.0
    assert names(machine.handle(m.CaughtUp(SMALL))) == ["RecordGrant"]


def test_a_stall_that_was_just_seen_may_come_again() -> None:
    """A recent stall counts as the margin if it is longer than the learnt one."""
    fits = predicted_pause_ms(SMALL, 3.0)
    machine = move(*TO_CATCHING_UP, max_pause_ms=fits + 20.0, fixed_ms=3.0, margin_ms=10.0, patience_s=8.0)
    assert names(machine.handle(m.CaughtUp(replace(SMALL, stall_ms=20.1)))) == []
    assert machine.margin_now_ms == 20.1
    assert names(machine.handle(m.CaughtUp(replace(SMALL, stall_ms=9.0)))) == ["RecordGrant"]
    assert machine.margin_now_ms == 10.0


def test_neither_margin_nor_prediction_is_given_up_while_a_move_waits() -> None:
    fits = predicted_pause_ms(SMALL, 3.0)
    machine = move(*TO_CATCHING_UP, max_pause_ms=fits + 1.0, fixed_ms=3.0, margin_ms=1.1, patience_s=8.0)
    assert names(machine.handle(m.CaughtUp(SMALL, 7.9))) == []
    assert names(machine.handle(m.CaughtUp(SMALL, 8.0))) == ABORT


def test_patience_ends() -> None:
    """Patience is counted in seconds, not in reports."""
    machine = move(*TO_CATCHING_UP, max_pause_ms=20.0, patience_s=3.0)
    assert [names(machine.handle(m.CaughtUp(LARGE, waited))) for waited in (0.5, 2.9, 3.0)] == [[], [], ABORT]
    assert machine.phase is Phase.ABORTED
    assert isinstance(machine.error, BudgetUnreachable)
    assert "20 ms are allowed" in machine.error.what
    assert machine.error.where["lag_bytes"] == 10**9
    assert names(machine.handle(m.CaughtUp(SMALL))) == []


def test_the_last_report_may_still_fit() -> None:
    machine = move(*TO_CATCHING_UP, max_pause_ms=20.0, patience_s=3.0)
    assert names(machine.handle(m.CaughtUp(LARGE, 2.9))) == []
    assert names(machine.handle(m.CaughtUp(SMALL, 3.0))) == ["RecordGrant"]


@pytest.mark.parametrize(
    ("measured", "remedy"), [(LARGE, "fewer changes"), (SMALL, "learnt from moves")], ids=["changes", "margin"]
)
def test_the_remedy_is_for_what_kept_it_out(measured: Measured, remedy: str) -> None:
    machine = move(*TO_CATCHING_UP, max_pause_ms=20.0, patience_s=1.0, margin_ms=15.0)
    assert names(machine.handle(m.CaughtUp(measured, 1.0))) == ABORT
    assert machine.error is not None
    assert remedy in machine.error.remedy


def test_an_infinite_prediction_is_said_in_words_people_can_read() -> None:
    machine = move(*TO_CATCHING_UP, max_pause_ms=20.0, patience_s=1.0)
    machine.handle(m.CaughtUp(HOPELESS, 1.0))
    assert str(machine.error).startswith("budget_unreachable: a pause of inf ms is predicted")


# -- aborts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [(), (START,), TO_CATCHING_UP, TO_GRANTING], ids=len)
@pytest.mark.parametrize("last", [m.Cancel(), m.TargetFailed(LOST)], ids=lambda e: type(e).__name__)
def test_before_the_fence_everything_rolls_back(events: tuple[m.Event, ...], last: m.Event) -> None:
    machine = move(*events)
    assert names(machine.handle(last)) == ABORT
    assert machine.phase is Phase.ABORTED
    assert machine.error is LOST if isinstance(last, m.TargetFailed) else isinstance(machine.error, MoveAborted)
    assert names(machine.handle(m.GrantRecorded())) == [], "the grant that was under way is void"


def test_a_refused_fence_is_made_certain_before_the_move_is_aborted() -> None:
    machine = move(*TO_FENCED)
    assert names(machine.handle(m.FenceRefused(REFUSED))) == ["CancelSource"]
    assert machine.phase is Phase.FENCED
    assert names(machine.handle(m.SourceUnknown())) == ["Retry(CancelSource)"]
    assert names(machine.handle(m.SourceCancelled())) == ["AbandonTarget", "RecordAborted"]
    assert machine.error is REFUSED


def test_silence_of_the_source_decides_nothing() -> None:
    machine = move(*TO_FENCED)
    for _ in range(50):
        assert names(machine.handle(m.SourceUnknown())) == ["Retry(Fence)"]
    assert machine.phase is Phase.FENCED
    machine.handle(m.TargetFailed(LOST))
    for _ in range(50):
        assert names(machine.handle(m.SourceUnknown())) == ["Retry(CancelSource)"]
    assert machine.phase is Phase.FENCED


def test_a_target_lost_before_the_seal_rolls_back() -> None:
    machine = move(*TO_FENCED)
    assert names(machine.handle(m.TargetFailed(LOST))) == ["CancelSource"]
    assert names(machine.handle(m.SourceCancelled())) == ["AbandonTarget", "RecordAborted"]
    assert machine.error is LOST


def test_a_target_lost_after_the_seal_is_prepared_until_it_owns() -> None:
    machine = move(*TO_SEALED)
    for _ in range(10):
        assert names(machine.handle(m.TargetFailed(LOST))) == ["Retry(Prepare)"]
    assert names(machine.handle(OWNED)) == ["RecordOwned"]


def test_a_target_lost_while_the_source_sealed_goes_forward() -> None:
    machine = move(*TO_FENCED)
    assert names(machine.handle(m.TargetFailed(LOST))) == ["CancelSource"]
    assert names(machine.handle(m.SourceSealed())) == ["Prepare"], "the seal was first"
    assert names(machine.handle(m.SourceSealed())) == [], "the fence's own answer, later"
    assert names(machine.handle(m.TargetFailed(LOST))) == ["Retry(Prepare)"]


def test_a_cancel_past_the_fence_comes_too_late() -> None:
    machine = move(*TO_FENCED)
    assert names(machine.handle(m.Cancel())) == []
    assert not machine.cancelling
    machine.handle(m.SourceSealed())
    assert names(machine.handle(m.Cancel())) == []
    assert names(machine.handle(OWNED)) == ["RecordOwned"]


def test_ownership_wins_over_a_cancellation_under_way() -> None:
    machine = move(*TO_FENCED, m.TargetFailed(LOST))
    assert names(machine.handle(OWNED)) == ["RecordOwned"]
    assert machine.sealed
    assert names(machine.handle(m.SourceSealed())) == []
    assert names(machine.handle(m.OwnedRecorded())) == ["Release"]


# -- cold moves: fenced first, copied then ------------------------------------------------------------------


def test_a_cold_move_copies_behind_its_fence() -> None:
    machine = Move(5, 6, kind=Kind.COLD)
    events = (START, m.GrantRecorded(), m.SourceSealed(), m.BaseReady(), m.CaughtUp(LARGE), OWNED, m.OwnedRecorded())
    assert [names(machine.handle(event)) for event in events] == [
        ["RecordGrant"],
        ["Fence"],
        ["Prepare"],
        [],
        [],
        ["RecordOwned"],
        ["Release"],
    ]


# -- standbys -----------------------------------------------------------------------------------------------


def test_a_standby_follows_until_it_is_cancelled() -> None:
    machine = move(*TO_CATCHING_UP, kind=Kind.STANDBY)
    assert [names(machine.handle(m.CaughtUp(SMALL, waited))) for waited in (0.0, 100.0)] == [[], []]
    assert names(machine.handle(m.Cancel())) == ABORT


def test_a_standby_whose_copy_takes_over_leaves_the_copy_alone() -> None:
    machine = move(*TO_CATCHING_UP, kind=Kind.STANDBY)
    assert names(machine.handle(m.TakenOver())) == ["RecordAborted"]


def test_a_standby_whose_copy_is_owned_by_a_move_ends() -> None:
    machine = move(*TO_CATCHING_UP, kind=Kind.STANDBY)
    assert names(machine.handle(m.TargetOwned(7, "d"))) == ["CancelSource", "RecordAborted"]
    assert isinstance(machine.error, MoveAborted)
    assert names(machine.handle(m.TargetOwned(7, "d"))) == []


# -- a source that is gone ----------------------------------------------------------------------------------


def test_a_source_that_is_gone_leaves_the_word_to_the_target() -> None:
    machine = move(*TO_FENCED, m.SourceUnknown())
    assert names(machine.handle(m.SourceGone())) == ["CancelTarget"]
    assert names(machine.handle(m.SourceUnknown())) == [], "nobody asks it any more"
    assert names(machine.handle(m.TargetUnknown())) == ["Retry(CancelTarget)"]
    assert names(machine.handle(m.TargetCancelled())) == ["RecordAborted"]
    assert isinstance(machine.error, Unavailable)


def test_whoever_is_asked_for_its_promise_is_asked_for_nothing_else() -> None:
    """A target that is asked for its promise is not asked to copy.

    A copy that began after the promise could own nevertheless, at a target that was restarted in between.
    """
    machine = move(*TO_FENCED, m.TargetFailed(LOST), m.SourceGone())
    assert names(machine.handle(m.SourceSealed())) == [], "its answer, which was late"
    assert names(machine.handle(m.TargetCancelled())) == ["RecordAborted"]


def test_a_source_that_is_gone_after_its_seal_had_arrived() -> None:
    machine = move(*TO_FENCED, m.SourceGone())
    assert names(machine.handle(OWNED)) == ["RecordOwned"]
    assert names(machine.handle(m.TargetUnknown())) == []


def test_ownership_at_an_epoch_that_was_not_granted_is_a_fault() -> None:
    machine = move(*TO_SEALED)
    with pytest.raises(
        InvalidTransition, match=r"owns at epoch 7, 6 was granted.*a bug in stateflow, please report it"
    ):
        machine.handle(m.TargetOwned(7, ""))
    assert machine.phase is Phase.FENCED


def test_an_ownership_told_twice_is_recorded_once() -> None:
    machine = move(*TO_OWNED)
    assert names(machine.handle(m.TargetOwned(6, ""))) == []
    assert machine.digest == "digest"


def test_a_target_that_promised_never_to_own_ends_a_sealed_move() -> None:
    machine = move(*TO_SEALED)
    assert names(machine.handle(m.TargetFailed(CANCELLED_THERE))) == ["RecordAborted"]
    assert machine.phase is Phase.ABORTED
    assert machine.error is CANCELLED_THERE


# -- after a restart of the controller ----------------------------------------------------------------------


def test_what_was_granted_before_is_copied_and_fenced_by_that_grant() -> None:
    machine = Move(5, 6, granted=True)
    events = (START, m.BaseReady(), m.CaughtUp(SMALL), m.SourceSealed(), OWNED, m.OwnedRecorded())
    assert [names(machine.handle(event)) for event in events] == [
        ["Prepare"],
        [],
        ["Fence"],
        [],
        ["RecordOwned"],
        ["Release"],
    ]
    assert (machine.phase, machine.error) == (Phase.COMPLETED, None)


@pytest.mark.parametrize("events", [(START,), TO_CATCHING_UP], ids=len)
def test_what_was_granted_before_may_have_sealed_and_own(events: tuple[m.Event, ...]) -> None:
    machine = move(*events, granted=True)
    assert names(machine.handle(OWNED)) == ["RecordOwned"], "there is nothing to fence any more"


def test_what_was_granted_before_is_fenced_when_its_prediction_fits_now() -> None:
    """A move granted by an earlier term is fenced when its prediction fits now.

    The prediction at its grant is not a promise.
    """
    machine = move(*TO_CATCHING_UP, max_pause_ms=20.0, patience_s=3.0, granted=True)
    assert [names(machine.handle(m.CaughtUp(LARGE, waited))) for waited in (0.0, 2.9)] == [[], []]
    assert machine.phase is Phase.CATCHING_UP
    fence = m.Fence(6, cold=False, pause_ms=predicted_pause_ms(SMALL), max_pause_ms=20.0)
    assert machine.handle(m.CaughtUp(SMALL, 3.0)) == [fence]


def test_what_was_granted_before_and_keeps_no_budget_asks_its_source() -> None:
    machine = move(*TO_CATCHING_UP, max_pause_ms=20.0, patience_s=3.0, granted=True)
    assert names(machine.handle(m.CaughtUp(LARGE, 3.0))) == ["CancelSource"]
    assert names(machine.handle(m.SourceCancelled())) == ["AbandonTarget", "RecordAborted"]
    assert isinstance(machine.error, BudgetUnreachable)


@pytest.mark.parametrize("last", [m.Cancel(), m.TargetFailed(LOST)], ids=lambda e: type(e).__name__)
def test_what_was_granted_before_goes_back_by_its_sources_word(last: m.Event) -> None:
    machine = move(START, last, granted=True)
    assert names(machine.handle(m.SourceUnknown())) == ["Retry(CancelSource)"]
    assert names(machine.handle(m.SourceCancelled())) == ["AbandonTarget", "RecordAborted"]
    assert machine.error is LOST if isinstance(last, m.TargetFailed) else isinstance(machine.error, MoveAborted)


def test_what_was_granted_before_and_sealed_goes_forward() -> None:
    machine = move(START, m.TargetFailed(LOST), granted=True)
    assert names(machine.handle(m.SourceSealed())) == ["Prepare"], "the target may know nothing of it any more"
    assert names(machine.handle(m.BaseReady())) == []
    assert names(machine.handle(m.CaughtUp(HOPELESS))) == [], "no budget is asked of what is sealed"
    assert names(machine.handle(m.TargetFailed(LOST))) == ["Retry(Prepare)"]
    assert names(machine.handle(m.TargetOwned(6, ""))) == ["RecordOwned"]
    assert names(machine.handle(m.OwnedRecorded())) == ["Release"]


@pytest.mark.parametrize("gone", [m.SourceGone(), m.GivenUp()], ids=lambda e: type(e).__name__)
def test_what_was_granted_before_ends_without_its_source_by_its_targets_word(gone: m.Event) -> None:
    machine = move(START, gone, granted=True)
    assert names(machine.handle(m.TargetFailed(LOST))) == []
    assert names(machine.handle(m.TargetCancelled())) == ["RecordAborted"]


def test_a_cold_move_that_was_granted_before_is_fenced_again() -> None:
    machine = Move(5, 6, kind=Kind.COLD, granted=True)
    assert machine.handle(START) == [m.Fence(6, cold=True, pause_ms=0.0, max_pause_ms=0.0)]
    assert names(machine.handle(m.SourceSealed())) == ["Prepare"]


def test_a_move_is_stuck_at_most_from_its_grant_until_it_is_owned() -> None:
    assert {name for name, machine in STATES.items() if machine.fenced} == {
        "FENCED",
        "TARGET_LOST",
        "REFUSING",
        "SEALED",
        "GRANTED_BEFORE",
        "GRANTED_WARMING",
        "CANCELLED_BEFORE",
        "SOURCE_GONE",
    }


# -- what instructions carry --------------------------------------------------------------------------------


def test_a_fence_carries_epoch_prediction_and_budget() -> None:
    machine = move(*TO_GRANTING, max_pause_ms=20.0)
    fence = m.Fence(6, cold=False, pause_ms=predicted_pause_ms(SMALL), max_pause_ms=20.0)
    assert machine.handle(m.GrantRecorded()) == [fence]
    assert machine.handle(m.SourceUnknown()) == [m.Retry(fence)]


def test_the_fence_of_a_cold_move_is_said_to_be_one() -> None:
    machine = Move(5, 6, kind=Kind.COLD)
    assert machine.handle(START) == [m.RecordGrant(6)]
    assert machine.handle(m.GrantRecorded()) == [m.Fence(6, cold=True, pause_ms=0.0, max_pause_ms=0.0)]
    assert move(*TO_CATCHING_UP).handle(m.CaughtUp(SMALL)) == [m.RecordGrant(6)]


def test_a_prediction_that_is_no_figure_is_not_sent() -> None:
    machine = move(*TO_CATCHING_UP, m.CaughtUp(HOPELESS, 5.0))
    assert machine.handle(m.GrantRecorded()) == [m.Fence(6, cold=False, pause_ms=0.0, max_pause_ms=0.0)]


def test_a_cancellation_says_whether_anything_depends_on_its_answer() -> None:
    machine = move(*TO_FENCED)
    assert machine.handle(m.TargetFailed(LOST)) == [m.CancelSource(5, tidies=False)]
    tidied, _, recorded = move(START).handle(m.TargetFailed(LOST))
    assert tidied == m.CancelSource(5, tidies=True)
    assert isinstance(recorded, m.RecordAborted)
    assert recorded.error is LOST


def test_an_ownership_is_recorded_with_epoch_and_digest() -> None:
    assert move(*TO_SEALED).handle(OWNED) == [m.RecordOwned(6, "digest")]
    assert move(*TO_OWNED).handle(m.OwnedRecorded()) == [m.Release(6)]


# -- what always holds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "wrong", "words"),
    [
        (FENCED, {"granted_epoch": 5}, "the granted epoch is newer"),
        (ABORTED, {"error": None}, "has an error"),
        (OWNING, {"sealed": False}, "has sealed"),
        (OWNING, {"kind": Kind.STANDBY}, "is not a standby"),
        (FENCED, {"granted": False}, "has a recorded grant"),
        (FENCED, {"granting": True}, "no longer requested"),
        (WARMING, {"cancelling": True}, "before the fence"),
    ],
)
def test_a_state_that_no_history_leads_to_is_named(machine: Move, wrong: dict[str, Any], words: str) -> None:
    machine.validate()
    with pytest.raises(InvariantBroken, match=words):
        replace(machine, **wrong).validate()


# -- any history --------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.sampled_from(
            [
                *EVENTS,
                m.CaughtUp(LARGE, 60.0),
                m.CaughtUp(HOPELESS),
                m.TargetOwned(7, ""),
                m.TargetFailed(CANCELLED_THERE),
            ]
        ),
        max_size=30,
    ),
    st.sampled_from([0.0, 20.0]),
    st.booleans(),
    st.sampled_from(Kind),
)
@settings(max_examples=sized(1600))
def test_invariants_over_any_history(events: list[m.Event], budget: float, before: bool, kind: Kind) -> None:
    granted_before = before and kind is not Kind.STANDBY
    machine = Move(5, 6, budget, kind=kind, granted=granted_before)
    ended = owned = False
    for event in events:
        before = photo(machine)
        try:
            said = names(machine.handle(event))
        except InvalidTransition:
            assert machine == before
            continue
        assert not (ended and said), "nothing is done after the end"
        machine.validate()
        assert "Fence" not in said or (machine.granted and (granted_before or isinstance(event, m.GrantRecorded)))
        assert not (granted_before and "RecordGrant" in said), "one grant is enough"
        assert ("RecordAborted" in said) == (machine.phase is Phase.ABORTED and not ended)
        owned = owned or machine.phase is Phase.OWNED
        if machine.phase is Phase.ABORTED:
            assert machine.error is not None
            assert not owned, "a target that owns is never rolled back"
            assert ended or not granted_before or before.phase is Phase.FENCED, "an earlier term may have fenced it"
            if before.phase is Phase.FENCED:
                if before.source_gone:
                    assert isinstance(event, m.SourceCancelled | m.TargetCancelled)
                elif before.sealed:
                    assert event == m.TargetFailed(CANCELLED_THERE), "the target promised, and neither can own"
                else:
                    assert isinstance(event, m.SourceCancelled), "only the source's word rolls a fenced move back"
                if isinstance(event, m.SourceCancelled):
                    assert not before.sealed, "past the seal a source cannot serve again"
        ended = machine.phase in m.TERMINAL
