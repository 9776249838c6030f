"""The lifecycle's table: for every state and every event, what happens, or that nothing does."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.errors import (
    InvalidTransition,
    InvariantBroken,
    MoveAborted,
    MoveConflict,
    NotOwner,
    StaleEpoch,
    StateflowError,
    StateMissing,
)
from stateflow.partition.lifecycle import FenceAnswer, Lifecycle, State, Verdict
from stateflow.types import PartitionId, ReplicaInfo
from tests.sizes import sized

P = PartitionId("Op", 3)
EDGE = ReplicaInfo("edge-0", "edge", "edge:1")
CLOUD = ReplicaInfo("cloud-0", "cloud", "cloud:1")


def absent() -> Lifecycle:
    return Lifecycle(P)


def warming() -> Lifecycle:
    """Makes a lifecycle that is warming for move m1, from a source that owns the partition at epoch 5."""
    lifecycle = absent()
    lifecycle.prepare("m1", 5)
    return lifecycle


def owned() -> Lifecycle:
    """Makes a lifecycle that is owned at epoch 5."""
    lifecycle = absent()
    lifecycle.create(5)
    return lifecycle


def serving() -> Lifecycle:
    """Makes an owned lifecycle with a running batch."""
    lifecycle = owned()
    assert lifecycle.begin(5) is Verdict.SERVE
    return lifecycle


def fencing() -> Lifecycle:
    """Makes a lifecycle that is fencing for move m1 to EDGE at epoch 6, with a running batch."""
    lifecycle = serving()
    assert lifecycle.fence("m1", 6, EDGE) is FenceAnswer.SEAL_AFTER_BATCH
    return lifecycle


def fenced_idle() -> Lifecycle:
    """Makes a fencing lifecycle without a running batch: the instant before the seal is written."""
    lifecycle = owned()
    assert lifecycle.fence("m1", 6, EDGE) is FenceAnswer.SEAL_NOW
    return lifecycle


def sealed() -> Lifecycle:
    lifecycle = fenced_idle()
    lifecycle.sealed()
    return lifecycle


ALL = {f.__name__: f for f in (absent, warming, owned, serving, fencing, fenced_idle, sealed)}
Check = tuple[State, int]  # state and epoch afterwards

EVENTS: dict[str, Callable[[Lifecycle], Any]] = {
    "create": lambda x: x.create(7),
    "prepare m1": lambda x: x.prepare("m1", 6),
    "prepare m2": lambda x: x.prepare("m2", 6),
    "prepare stale": lambda x: x.prepare("m1", 4),
    "own m1": lambda x: x.own("m1", 6),
    "own m2": lambda x: x.own("m2", 6),
    "own stale": lambda x: x.own("m1", 5),
    "abandon m1": lambda x: x.abandon("m1"),
    "abandon m2": lambda x: x.abandon("m2"),
    "begin": lambda x: x.begin(5),
    "begin older": lambda x: x.begin(4),
    "begin newer": lambda x: x.begin(6),
    "finish": lambda x: x.finish(),
    "fence m1": lambda x: x.fence("m1", 6, EDGE),
    "fence m2": lambda x: x.fence("m2", 6, CLOUD),
    "fence stale": lambda x: x.fence("m2", 5, CLOUD),
    "fence far": lambda x: x.fence("m2", 9, CLOUD),
    "sealed": lambda x: x.sealed(),
    "cancel m1": lambda x: x.cancel("m1"),
    "cancel m2": lambda x: x.cancel("m2"),
    "cancel m1 as its source": lambda x: x.cancel("m1", 5),
    "supersede": lambda x: x.supersede(7, CLOUD),
    "supersede stale": lambda x: x.supersede(5, CLOUD),
    "recover owned": lambda x: x.recover(State.OWNED, 5, "m1"),
    "recover sealed": lambda x: x.recover(State.SEALED, 6, "m1", EDGE),
    "recover odd": lambda x: x.recover(State.WARMING, 6),
}
A, W, O, F, S = State.ABSENT, State.WARMING, State.OWNED, State.FENCING, State.SEALED  # noqa: E741
NO = InvalidTransition

# State → event → what it returns or raises, and the state and epoch afterwards where they change. An event that is not
# listed for a state raises InvalidTransition and changes nothing.
TABLE: dict[str, dict[str, tuple[Any, Check | None]]] = {
    "absent": {
        "create": (None, (O, 7)),
        "prepare m1": (None, (W, 6)),
        "prepare m2": (None, (W, 6)),
        "prepare stale": (None, (W, 4)),
        "recover owned": (None, (O, 5)),
        "recover sealed": (None, (S, 6)),
        "begin": (NotOwner, None),
        "begin older": (NotOwner, None),
        "begin newer": (NotOwner, None),
    },
    "warming": {
        "prepare m1": (None, (W, 6)),
        "prepare m2": (MoveConflict, None),
        "prepare stale": (StaleEpoch, None),
        "own m1": (None, (O, 6)),
        "own stale": (StaleEpoch, None),
        "abandon m1": (None, (A, 5)),
        "begin": (NotOwner, None),
        "begin older": (NotOwner, None),
        "begin newer": (Verdict.HOLD, None),
    },
    "owned": {
        "begin": (Verdict.SERVE, (O, 5)),
        "begin older": (Verdict.SERVE, (O, 5)),
        "begin newer": (StaleEpoch, None),
        "fence m1": (FenceAnswer.SEAL_NOW, (F, 5)),
        "fence m2": (FenceAnswer.SEAL_NOW, (F, 5)),
        "fence far": (FenceAnswer.SEAL_NOW, (F, 5)),
        "fence stale": (StaleEpoch, None),
    },
    "serving": {
        "begin": (Verdict.HOLD, None),
        "begin older": (Verdict.HOLD, None),
        "begin newer": (StaleEpoch, None),
        "fence m1": (FenceAnswer.SEAL_AFTER_BATCH, (F, 5)),
        "fence m2": (FenceAnswer.SEAL_AFTER_BATCH, (F, 5)),
        "fence far": (FenceAnswer.SEAL_AFTER_BATCH, (F, 5)),
        "fence stale": (StaleEpoch, None),
    },
    "fencing": {
        "begin": (Verdict.MOVED, None),
        "begin older": (Verdict.MOVED, None),
        "begin newer": (Verdict.MOVED, None),
        "finish": (True, (F, 5)),
        "fence m1": (FenceAnswer.SEAL_AFTER_BATCH, None),
        "cancel m1": (True, (O, 5)),
    },
    "fenced_idle": {
        "begin": (Verdict.MOVED, None),
        "begin older": (Verdict.MOVED, None),
        "begin newer": (Verdict.MOVED, None),
        "finish": (True, None),
        "fence m1": (FenceAnswer.SEAL_NOW, None),
        "sealed": (None, (S, 6)),
        "cancel m1": (True, (O, 5)),
    },
    "sealed": {
        "begin": (Verdict.MOVED, None),
        "begin older": (Verdict.MOVED, None),
        "begin newer": (Verdict.MOVED, None),
        "prepare m1": (None, (W, 6)),
        "prepare m2": (None, (W, 6)),
        "prepare stale": (StaleEpoch, None),
        "fence m1": (FenceAnswer.SEALED_BEFORE, None),
        "cancel m1": (False, None),
    },
}
TABLE["absent"]["cancel m1 as its source"] = (StateMissing, None)
for name in ("fencing", "fenced_idle", "sealed"):
    TABLE[name]["cancel m1 as its source"] = TABLE[name]["cancel m1"]
for name in ("owned", "fenced_idle", "sealed"):
    TABLE[name]["supersede"] = (True, (S, 7))
for name in ("absent", "warming"):
    TABLE[name]["supersede"] = (False, None)
for name, make in ALL.items():
    row, as_it_was = TABLE[name], (make().state, make().epoch)
    for event in ("abandon m1", "abandon m2"):
        row.setdefault(event, (None, None))
    row.setdefault("supersede stale", (False, None))
    for event in ("cancel m1", "cancel m2", "cancel m1 as its source"):
        row.setdefault(event, (True, as_it_was))
    row.setdefault("finish", (False, as_it_was))


@pytest.mark.parametrize("state", ALL)
@pytest.mark.parametrize("event", EVENTS)
def test_table(state: str, event: str) -> None:
    lifecycle = ALL[state]()
    before = copy.copy(lifecycle)
    expected, after = TABLE[state].get(event, (NO, None))
    if isinstance(expected, type) and issubclass(expected, StateflowError):
        with pytest.raises(expected) as caught:
            EVENTS[event](lifecycle)
        assert type(caught.value) is expected
        assert str(caught.value.where["partition"]) == "Op/3"
    else:
        answer = EVENTS[event](lifecycle)
        assert answer == expected
        assert type(answer) is type(expected)
    if after is None:
        assert lifecycle == before, "a refusal changes nothing"
    else:
        assert (lifecycle.state, lifecycle.epoch) == after


def test_an_illegal_event_tells_the_story() -> None:
    with pytest.raises(InvalidTransition) as caught:
        sealed().create(9)
    assert caught.value.where == {"partition": P, "epoch": 6, "move": "m1"}


def test_a_whole_move_out() -> None:
    lifecycle = serving()
    lifecycle.fence("m1", 6, EDGE)
    assert (lifecycle.successor, lifecycle.granted, lifecycle.epoch) == (EDGE, 6, 5)
    assert lifecycle.finish() is True
    lifecycle.sealed()
    assert (lifecycle.state, lifecycle.epoch, lifecycle.successor, lifecycle.move_id) == (S, 6, EDGE, "m1")
    assert lifecycle.begin(5) is Verdict.MOVED


def test_a_seal_waits_for_the_batch_in_hand() -> None:
    lifecycle = fencing()
    with pytest.raises(InvalidTransition):
        lifecycle.sealed()
    lifecycle.finish()
    lifecycle.sealed()


def test_a_batch_in_hand_is_let_go_by_finish() -> None:
    lifecycle = serving()
    assert lifecycle.finish() is False
    assert lifecycle.begin(5) is Verdict.SERVE


def test_a_whole_move_in_and_out_and_in_again() -> None:
    lifecycle = warming()
    assert lifecycle.begin(6) is Verdict.HOLD
    lifecycle.own("m1", 6)
    assert lifecycle.begin(6) is Verdict.SERVE
    lifecycle.finish()
    assert lifecycle.fence("m2", 8, CLOUD) is FenceAnswer.SEAL_NOW
    lifecycle.sealed()
    lifecycle.prepare("m3", 8)
    assert (lifecycle.state, lifecycle.successor) == (W, None)
    lifecycle.own("m3", 9)
    assert lifecycle.begin(9) is Verdict.SERVE


def test_a_partition_does_not_come_back_with_an_old_epoch() -> None:
    lifecycle = sealed()
    with pytest.raises(StaleEpoch):
        lifecycle.prepare("m2", 5)
    lifecycle.prepare("m2", 6)
    with pytest.raises(StaleEpoch):
        lifecycle.own("m2", 6)
    assert lifecycle.state is W


@pytest.mark.parametrize("state", ["absent", "owned", "serving", "fencing", "fenced_idle"])
def test_a_cancelled_move_never_seals_here_however_late_its_fence(state: str) -> None:
    lifecycle = ALL[state]()
    assert lifecycle.cancel("m1") is True
    if state == "absent":
        lifecycle.create(5)
    assert lifecycle.finish() is False, "the fence is lifted: no seal is asked for"
    for _ in range(2):
        with pytest.raises(MoveAborted):
            lifecycle.fence("m1", 6, EDGE)
        assert lifecycle.state is O
    assert lifecycle.begin(5) is Verdict.SERVE
    lifecycle.finish()
    assert lifecycle.fence("m2", 7, CLOUD) is FenceAnswer.SEAL_NOW, "another move may"


@pytest.mark.parametrize("state", ["absent", "sealed"])
def test_a_cancelled_move_never_warms_here_however_late_its_prepare(state: str) -> None:
    """A late prepare of a cancelled move is refused.

    Its target would stay WARMING without a move, and refuse every later one.
    """
    lifecycle = ALL[state]()
    assert lifecycle.cancel("m9") is True
    before = copy.copy(lifecycle)
    with pytest.raises(MoveAborted):
        lifecycle.prepare("m9", 6)
    assert lifecycle == before
    lifecycle.prepare("m10", 6)


def test_cancelling_another_move_leaves_the_fence_alone() -> None:
    lifecycle = fencing()
    assert lifecycle.cancel("m2") is True
    assert (lifecycle.state, lifecycle.move_id) == (F, "m1")
    assert lifecycle.finish() is True


def test_cancel_keeps_the_batch_in_hand() -> None:
    lifecycle = fencing()
    lifecycle.cancel("m1")
    assert lifecycle.begin(5) is Verdict.HOLD
    lifecycle.finish()
    assert lifecycle.begin(5) is Verdict.SERVE


def test_a_second_fence_during_the_first_is_refused() -> None:
    lifecycle = fencing()
    with pytest.raises(InvalidTransition):
        lifecycle.fence("m2", 7, CLOUD)
    assert lifecycle.successor == EDGE


@pytest.mark.parametrize("epoch", [5, 6])
def test_a_create_that_comes_late_does_not_bring_an_old_epoch_back(epoch: int) -> None:
    """A create that arrives after the partition has come and gone is refused: it would make a second owner."""
    lifecycle = sealed()
    lifecycle.prepare("m2", 6)
    lifecycle.abandon("m2")
    assert lifecycle.state is A
    with pytest.raises(StaleEpoch):
        lifecycle.create(epoch)
    assert lifecycle.state is A


def test_recovery_of_each_durable_state() -> None:
    lifecycle = absent()
    lifecycle.recover(State.SEALED, 6, "m1", EDGE)
    assert lifecycle.begin(5) is Verdict.MOVED
    assert lifecycle.successor == EDGE
    assert lifecycle.cancel("m1") is False, "a seal survives restarts"
    assert lifecycle.fence("m1", 6, EDGE) is FenceAnswer.SEALED_BEFORE
    lifecycle = absent()
    lifecycle.recover(State.OWNED, 5, "m1")
    assert lifecycle.begin(5) is Verdict.SERVE


names = st.sampled_from(["m1", "m2"])
epochs = st.integers(1, 6)
calls = st.one_of(
    st.tuples(st.just("create"), epochs),
    st.tuples(st.just("prepare"), names, epochs),
    st.tuples(st.just("own"), names, epochs),
    st.tuples(st.just("abandon"), names),
    st.tuples(st.just("begin"), epochs),
    st.tuples(st.just("finish")),
    st.tuples(st.just("fence"), names, epochs, st.just(EDGE)),
    st.tuples(st.just("sealed")),
    st.tuples(st.just("cancel"), names),
)


@given(st.lists(calls, max_size=25))
@settings(max_examples=sized(1200))
def test_invariants_over_any_history(history: list[tuple[Any, ...]]) -> None:
    """Invariants hold after any events.

    Epochs never fall; a refusal changes nothing; commits happen only while OWNED or FENCING; a cancelled move never
    seals.
    """
    lifecycle = Lifecycle(P)
    cancelled: set[str] = set()
    for name, *arguments in history:
        before = dataclasses.astuple(lifecycle)
        epoch = lifecycle.epoch
        if name == "finish" and not lifecycle.running:
            continue  # the shell pairs begin and finish
        try:
            answer = getattr(lifecycle, name)(*arguments)
        except StateflowError:
            assert dataclasses.astuple(lifecycle) == before
            continue
        assert lifecycle.epoch >= epoch
        lifecycle.validate()
        if name == "cancel" and answer:
            cancelled.add(arguments[0])
        if name == "sealed":
            assert lifecycle.move_id not in cancelled


def test_an_epoch_that_was_given_up_is_nobodys() -> None:
    """An owner by a takeover that the controller gave up is superseded.

    The partition is at the epoch before, elsewhere.
    """
    lifecycle = ALL["owned"]()
    lifecycle.epoch = 9
    assert lifecycle.supersede(5, CLOUD) is False, "an older word"
    assert lifecycle.supersede(5, CLOUD, voided=8) is False, "that is another epoch"
    assert lifecycle.supersede(5, CLOUD, voided=9) is True
    assert (lifecycle.state, lifecycle.epoch, lifecycle.successor) == (State.SEALED, 5, CLOUD)


def test_a_copy_may_follow_an_owner_older_than_an_epoch_that_was_given_up() -> None:
    lifecycle = ALL["sealed"]()
    lifecycle.supersede(9, CLOUD)  # granted to a takeover that was given up later
    with pytest.raises(StaleEpoch):
        lifecycle.prepare("m9", 6, newest_epoch=8)
    lifecycle.prepare("m9", 6, newest_epoch=9)
    assert (lifecycle.state, lifecycle.epoch) == (State.WARMING, 6)


@pytest.mark.parametrize(
    ("state", "wrong", "words"),
    [
        ("sealed", {"running": True}, "only while the partition is OWNED or FENCING"),
        ("fencing", {"granted": 5}, "a fence has a newer epoch"),
        ("fencing", {"cancelled": frozenset({"m1"})}, "not cancelled"),
        ("fencing", {"successor": None}, "and a successor"),
        ("sealed", {"successor": None}, "has a successor"),
        ("warming", {"move_id": ""}, "belongs to a move"),
    ],
)
def test_a_state_that_no_history_leads_to_is_named(state: str, wrong: dict[str, Any], words: str) -> None:
    lifecycle = ALL[state]()
    lifecycle.validate()
    with pytest.raises(InvariantBroken, match=words):
        dataclasses.replace(lifecycle, **wrong).validate()
