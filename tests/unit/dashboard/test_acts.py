"""Acts on the dashboard, as they reach the client's API."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.dashboard.acts import Access, Acts, Lookup, Move, Named, Sweep, read_body
from stateflow.errors import InvalidArgument, NotAllowed
from stateflow.reports import Placement
from stateflow.security.roles import Identity, Role
from stateflow.types import MoveOptions

ANYBODY = Access(None, None)
READER = Access(Identity(Role.ADMIN, "page"), Identity(Role.READ, "grafana"))


class FakeCluster:
    """A cluster that remembers the calls it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def operator(self, name: str) -> Any:
        states = [{"name": "flights", "kind": "value"}, {"name": "<b>", "kind": "map"}]
        return SimpleNamespace(partitions=16, key=("tailnum",), state_schema=json.dumps(states))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            if name.startswith("would_") or name == "propose":
                return Placement((), 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
            made = SimpleNamespace(
                id="r1",
                report=SimpleNamespace(batch="sweep/s1"),
                state="CANCELLED",
                cancel=lambda: self.cancelled(name),
            )
            return [made] if name in ("drain", "rebalance", "place") else made

        return call


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def acts(cluster: FakeCluster) -> Acts:
    board = SimpleNamespace(move_batch=lambda *arguments: cluster.calls.append(("move_batch", *arguments)))
    return Acts(cluster, SimpleNamespace(board=board))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"no json", "the request cannot be read"),
        (b'{"do": "undeploy"}', "do cannot be read"),
        (b'{"do": "drain", "more": 1}', "more cannot be read"),
        (b'{"do": "drain", "to": 7}', "to cannot be read"),
        (b'{"do": "drain", "to": "%s"}' % (b"x" * 2000), "to cannot be read"),
    ],
)
def test_what_is_no_request_of_the_page_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        read_body(Move, data)


def test_each_move_is_planned_and_begun_by_its_own_call(acts: Acts, cluster: FakeCluster) -> None:
    for move in (
        Move(do="migrate", operator="Op", partitions="0-1", to="edge", max_pause_ms=50.0),
        Move(do="drain", to="edge-0"),
        Move(do="rebalance", policies=["ring"]),
        Move(do="rebalance", operator="Op", policies=["locality", "load"]),
    ):
        acts.plan(ANYBODY, move)
        assert acts.begin(ANYBODY, move) == {"begun": ["r1"]}
    budget = MoveOptions(max_pause_ms=50.0)
    assert cluster.calls == [
        ("would_migrate", "Op", [0, 1], "edge"),
        ("migrate", "Op", [0, 1], "edge", budget),
        ("would_drain", "edge-0"),
        ("drain", "edge-0", MoveOptions()),
        ("would_rebalance", ""),
        ("rebalance", "", MoveOptions()),
        ("propose", "locality", "load", "Op"),
        ("place", "locality", "load", "Op", MoveOptions()),
    ]


@pytest.mark.parametrize(
    ("name", "change", "call"),
    [
        ("reconfiguration/r1", "pause", ("pause", "r1")),
        ("reconfiguration/r1", "resume", ("resume", "r1")),
        ("reconfiguration/r1", "cancel", ("cancel", "r1")),
        ("reconfiguration/r1", "retry", ("retry", "r1")),
        ("restores/x1", "cancel", ("cancel_restore", "x1")),
        ("4b1f", "pause", ("move_batch", "4b1f", "PAUSED", "")),
        ("4b1f", "resume", ("move_batch", "4b1f", "IN_PROGRESS", "")),
        ("4b1f", "cancel", ("move_batch", "4b1f", "CANCELLED", "")),
    ],
)
def test_a_batch_is_changed_by_whom_it_is_of(
    acts: Acts, cluster: FakeCluster, name: str, change: Any, call: tuple[Any, ...]
) -> None:
    acts.change_batch(ANYBODY, Named(name=name, change=change))
    assert cluster.calls == [call]


def test_who_changes_a_batch_on_the_board_is_its_author(acts: Acts, cluster: FakeCluster) -> None:
    alice = Access(Identity(Role.ADMIN, "page"), Identity(Role.OPERATE, "alice"))
    acts.change_batch(alice, Named(name="4b1f", change="pause"))
    assert cluster.calls == [("move_batch", "4b1f", "PAUSED", "operate/alice via stateflow dashboard")]


def test_a_sweep_is_cancelled_at_the_controller(acts: Acts, cluster: FakeCluster) -> None:
    acts.change_batch(ANYBODY, Named(name="sweep/s1", change="cancel"))
    assert cluster.calls == [("sweep", "s1"), ("cancelled", "sweep")]
    with pytest.raises(InvalidArgument):
        acts.change_batch(ANYBODY, Named(name="sweep/s1", change="pause"))


def test_jobs_and_sweeps(acts: Acts, cluster: FakeCluster) -> None:
    assert acts.change_job(ANYBODY, Named(name="nightly", change="run")) == {"run": "r1"}
    acts.change_job(ANYBODY, Named(name="nightly", change="pause"))
    assert acts.sweep(ANYBODY, Sweep(chore="verify")) == {"batch": "sweep/s1"}
    assert cluster.calls == [("run_job", "nightly"), ("change_job", "nightly", "pause"), ("verify_all", "")]
    with pytest.raises(InvalidArgument):
        acts.change_job(ANYBODY, Named(name="nightly", change="cancel"))


def test_who_only_reads_changes_nothing(acts: Acts, cluster: FakeCluster) -> None:
    acts.plan(READER, Move(do="drain", to="a"))
    asked = list(cluster.calls)
    for do in (
        lambda: acts.begin(READER, Move(do="drain", to="a")),
        lambda: acts.begin(READER, Move(do="rebalance", policies=["load"])),
        lambda: acts.change_batch(READER, Named(name="reconfiguration/r1", change="pause")),
        lambda: acts.change_batch(READER, Named(name="4b1f", change="cancel")),
        lambda: acts.change_batch(READER, Named(name="restores/x", change="cancel")),
        lambda: acts.change_job(READER, Named(name="nightly", change="run")),
        lambda: acts.sweep(READER, Sweep(chore="checkpoint")),
        lambda: acts.look_up(READER, Lookup(operator="Op", state="n", key="a")),
    ):
        with pytest.raises(NotAllowed):
            do()
    assert cluster.calls == asked


def test_states_are_said_by_name(acts: Acts) -> None:
    found = acts.states(ANYBODY, "Op")
    assert found == {
        "key": ["tailnum"],
        "states": [{"name": "flights", "kind": "value"}, {"name": "<b>", "kind": "map"}],
    }
