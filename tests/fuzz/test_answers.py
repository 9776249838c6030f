"""Clients end with a result or an error of one line, whatever servers answer, and what they may not do is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.errors import StateflowError, Unavailable
from stateflow.rpc.clients import ReplicaClient
from tests.fuzz import answers, servers
from tests.fuzz.answers import CLIENTS, World, run
from tests.sizes import SEED, THOROUGH, sized

#: the gate draws what it has drawn before
FIRST = SEED if THOROUGH else 1


#: uses of each client, of which the gate does a sixteenth
USES = {
    answers.a_stream: 240,
    answers.a_forwarder: 80,
    answers.a_task: 320,
    answers.a_transfer: 160,
    answers.a_store: 480,
    answers.an_agent: 320,
    answers.a_membership: 32,
}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_client_is_served_by_hostile_servers(client: answers.Client, tmp_path: Path) -> None:
    outcome = run(sized(USES.get(client, 1600)), FIRST, tmp_path, [client])
    assert outcome.wrong == []
    assert outcome.said


@pytest.mark.parametrize("client", [answers.a_transfer, answers.a_store], ids=lambda client: client.__name__)
def test_sound_answers_are_read(client: answers.Client, tmp_path: Path) -> None:
    outcome = run(4, 1, tmp_path, [client], wrong=1e-9)
    assert outcome.wrong == []
    assert outcome.said == {f"{client.__name__} read": 4}


def fails(world: World) -> None:
    raise KeyError("planted")


def writes_elsewhere(world: World) -> None:
    (world.home.parent / "elsewhere").write_text("planted")


def never_leaves(world: World) -> None:
    world.server.endless.append("Sources")


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (fails, "KeyError: 'planted'"),
        (writes_elsewhere, "it was written: "),
        (never_leaves, "did not leave a list without end"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_client_may_not_do_is_seen(use: answers.Client, found: str, tmp_path: Path) -> None:
    (problem,) = run(1, 1, tmp_path, [use]).wrong
    assert found in problem


def test_an_error_of_several_lines_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateflowError, "__str__", lambda _: "one\ntwo")

    def refused(world: World) -> None:
        raise Unavailable("x", remedy="none")

    (problem,) = run(1, 1, tmp_path, [refused]).wrong
    assert problem == r"refused: not said in one line: 'one\ntwo'"


def test_a_client_that_does_not_end_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ENDS_WITHIN_S", 0.01)

    def waits(world: World) -> None:
        world.server._lock.acquire()
        world.server._lock.acquire()

    (problem,) = run(1, 1, tmp_path, [waits]).wrong
    assert "waits does not end" in problem
    assert "_lock.acquire()" in problem


def test_a_list_without_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is drawn, as the server would draw it now and then."""
    monkeypatch.setattr(servers, "ENDLESS_SHARE", 1.0)
    drawn = []

    def reads(world: World) -> None:
        client = ReplicaClient(world.address)
        uses = [
            lambda: list(client.scan("Tally", "n", [0])),
            lambda: list(client.outputs("Tally", "s", [0], 1)),
            lambda: client.sources("Tally", [0]),
            lambda: answers.COMMANDS["reconfigurations"](answers.Cluster(world.address)),
        ]
        drawn.append(len(drawn))
        uses[drawn[-1] % len(uses)]()

    outcome = run(16, 1, tmp_path, [reads], wrong=1.0)
    assert outcome.wrong == []
    assert outcome.said == {"reads unavailable": 16}
