"""Tables and progress of moves, as people see them."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from stateflow.cli import agents, checkpoint, jobs, moving, show
from stateflow.cli.output import console
from stateflow.client import ClusterStatus, MoveReport, OperatorStatus, Reconfiguration, ReplicaStatus
from stateflow.errors import BudgetUnreachable, NameTaken, StateflowError, StateMissing, Unavailable
from stateflow.reports import (
    AgentReport,
    ChildReport,
    JobReport,
    LackOfRoom,
    LeftPartition,
    Placement,
    ProposedMove,
    RestoredPartition,
)
from stateflow.status import LeaderReport, LinkReport, RefusedReplica, UnservedPartitions

WHY = StateMissing("a came without them", remedy="start a with [its] directory", operator="Op", partitions="1-2")
STATUS = ClusterStatus(
    replicas=(
        ReplicaStatus("a", "cloud", "a:1", 1, True, 0.4, 3),
        ReplicaStatus("b", "edge", "b:1", 1, False, 12.0, 1),
        ReplicaStatus("c", "edge", "c:1", 1, False, -1.0, 0, opening=True),
        ReplicaStatus("d", "edge", "d:1", 1, False, 9.0, 0, stopped=True),
    ),
    operators=(
        OperatorStatus(
            "Op", "m:Op", 4, 7, ("a", "a", "a", "b"), (1,) * 4, (UnservedPartitions("Op", (1, 2), "a", WHY),)
        ),
    ),
    reconfigurations=(),
    refused=(RefusedReplica("d", "d:1", "0f", NameTaken("[red]taken[/red] :warning: [/]"), 1.0),),
)


def shown(renderable: Any, **options: Any) -> str:
    with console.capture() as capture:
        console.print(renderable, **options)
    return capture.get()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)


def lines(text: str, first: str) -> list[str]:
    return [line for line in text.splitlines() if line.split()[:1] == [first]]


def test_each_column_is_below_its_name() -> None:
    text = shown(show.status(STATUS))
    head, row = lines(text, "replica")[0], lines(text, "c")[0]
    for name, value in (("replica", "c"), ("site", "edge"), ("address", "c:1"), ("state", "opening")):
        assert row[head.index(name) :].startswith(value)
    for name, value in (("heard", "never"), ("partitions", "0")):
        assert row[: head.index(name) + len(name)].endswith(value)


def test_partitions_that_nobody_serves_are_red_and_say_why() -> None:
    """A partition that no replica serves is red, with the reason.

    A replica that answers may have lost what it should have.
    """
    text = shown(show.status(STATUS))
    assert [line.split() for line in lines(text, "unserved")] == [["unserved", "2", "1-2"]]
    assert [line.split() for line in lines(text, "a")[1:]] == [["a", "1", "0"]]
    assert lines(text, "a")[0].rstrip().endswith("3, 2 not served")
    assert str(WHY) in text
    colourful = Console(force_terminal=True, color_system="standard", width=200, markup=False)
    with colourful.capture() as capture:
        colourful.print(show.status(STATUS))
    (line,) = [line for line in capture.get().splitlines() if "unserved" in line]
    assert "\x1b[1;31m" in line


def test_a_replica_without_a_share_is_said_with_the_command() -> None:
    here = [ReplicaStatus(name, "cloud", f"{name}:1", 1, True, 0.4, partitions) for name, partitions in two_and("c")]
    operator = OperatorStatus("Op", "m:Op", 4, 7, ("a", "a", "b", "b"), (1,) * 4)
    status = ClusterStatus(replicas=tuple(here), operators=(operator,), reconfigurations=())
    said = "c owns no partitions: `stateflow rebalance` assigns a share"
    assert said in shown(show.status(status))
    both = dataclasses.replace(status, replicas=(*here, ReplicaStatus("d", "cloud", "d:1", 1, True, 0.4, 0)))
    assert "c, d own no partitions" in shown(show.status(both))
    for other in (
        dataclasses.replace(status, replicas=tuple(here[:2])),
        dataclasses.replace(status, replicas=(*here[:2], dataclasses.replace(here[2], alive=False))),
        dataclasses.replace(status, replicas=(*here[:2], dataclasses.replace(here[2], weight=0))),
        dataclasses.replace(status, replicas=(dataclasses.replace(here[0], alive=False), *here[1:])),
        dataclasses.replace(status, reconfigurations=(Reconfiguration("r", "Op", "RUNNING", (), 0.0),)),
        dataclasses.replace(status, operators=(dataclasses.replace(operator, partitions=2, owners=("a", "b")),)),
    ):
        assert "own" not in shown(show.status(other)).replace("owner", "")


LONG = "edge-with-a-rather-long-name"


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(90, []), (74, []), (60, ["address"]), (45, ["address", "heard"]), (36, ["address", "heard", "site"])],
)
def test_a_narrow_table_of_replicas_keeps_their_names_and_states(width: int, left_out: list[str]) -> None:
    long = [ReplicaStatus(f"{LONG}-{n}", LONG, "127.0.0.1:40101", 1, n > 0, 0.4, 3, version=f"0.{n}") for n in range(2)]
    text = shown(show.replicas(long, {}), width=width)
    (head,) = lines(text, "replica")
    columns = ["replica", "site", "address", "state", "heard", "partitions"]
    assert head.split() == [name for name in columns if name not in left_out]
    assert "alive" in text
    assert "silent" in text
    words = "".join(line[: head.index(head.split()[1])].strip() for line in text.splitlines() if line[:1] == " ")
    assert f"{LONG}-0{LONG}-1" in words
    said = " ".join(text.split())
    assert ("too narrow to show: " in said) == bool(left_out)
    assert said.endswith(f"too narrow to show: {', '.join(left_out)}" if left_out else f"0.1: {LONG}-1")
    assert "stateflow releases: 0.0:" in said


class Read:
    """Reads a status as often as it has answers, and then is interrupted by the user."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: ClusterStatus | StateflowError) -> None:
        self.answers = list(answers)
        monkeypatch.setattr(show, "sleep", lambda _: None)

    def __call__(self) -> ClusterStatus:
        if not self.answers:
            raise KeyboardInterrupt
        answer = self.answers.pop(0)
        if isinstance(answer, StateflowError):
            raise answer
        return answer


AWAY = Unavailable("no controller [b]answers[/b]", remedy="see whether it runs")


@pytest.mark.parametrize("terminal", [None, "dumb"])
def test_what_cannot_be_drawn_on_gets_one_status_after_the_other(
    terminal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    environ = {"TERM": terminal} if terminal else {}
    monkeypatch.setattr(show, "console", Console(file=file, width=100, _environ=environ, force_terminal=bool(terminal)))
    with pytest.raises(KeyboardInterrupt):
        show.watch_status(Read(monkeypatch, STATUS, STATUS, STATUS))
    assert file.getvalue().count("Replicas") == 3


def test_a_watched_status_outlasts_a_controller_that_is_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(show, "console", Console(file=file, width=100, markup=False))
    with pytest.raises(KeyboardInterrupt):
        show.watch_status(Read(monkeypatch, STATUS, AWAY, STATUS))
    first, away, after = file.getvalue().split("Replicas")[1:]
    assert str(AWAY) in " ".join(first.split()), "above the last status"
    assert str(AWAY) not in " ".join((away + after).split())
    with pytest.raises(Unavailable):
        show.watch_status(Read(monkeypatch, AWAY))
    with pytest.raises(NameTaken):
        show.watch_status(Read(monkeypatch, STATUS, NameTaken("no")))


def two_and(name: str) -> list[tuple[str, int]]:
    return [("a", 2), ("b", 2), (name, 0)]


def test_prose_from_elsewhere_is_shown_as_it_is() -> None:
    """Text from elsewhere is shown unchanged, neither as markup nor as an emoji."""
    assert "name_taken: [red]taken[/red] :warning: [/]" in shown(show.status(STATUS))
    assert shown("[bold]x[/] :warning:", highlight=False) == "[bold]x[/] :warning:\n"


# -- moves --------------------------------------------------------------------------------------------------


MOVE = MoveReport(
    "m-3", 3, "a", "b", "CATCHING_UP", "warm-up", bytes_warm=4 << 20, bytes_delta=1024, lag_bytes=512, rounds=2,
    predicted_pause_ms=31.25, margin_ms=22.0,
)  # fmt: skip


def standing(max_pause_ms: float = 0.0, **changes: Any) -> str:
    return show.standing(dataclasses.replace(MOVE, **changes), max_pause_ms)


def test_how_a_move_stands() -> None:
    assert standing(state="WAITING") == "3: a → b  WAITING      for other moves to end"
    assert standing(state="WARMING", base_bytes=8 << 20) == "3: a → b  WARMING      4.0 MiB of 8.0 MiB at the target"
    assert standing(state="WARMING") == "3: a → b  WARMING"
    start = "3: a → b  CATCHING_UP  4.0 MiB sent, 512 B behind; "
    assert standing(rounds=0) == start + "pause not predicted yet"
    assert standing() == start + "pause 31.2 ms predicted"
    assert standing(50) == start + "pause 31.2 ms predicted + 22.0 ms margin > 50 ms allowed"
    assert standing(60) == start + "pause 31.2 ms predicted + 22.0 ms margin ≤ 60 ms allowed"
    assert standing(50, predicted_pause_ms=math.inf) == start + "changes arrive faster than they can be sent"
    assert standing(state="COMPLETED", pause_ms=9.5) == "3: a → b  COMPLETED    4.0 MiB sent, 9.5 ms paused"
    assert standing(state="ABORTED", fault=BudgetUnreachable("a …")).endswith("ABORTED      budget_unreachable")


MOVED = dataclasses.replace(
    MOVE, source="edge-frankfurt-0", target="cloud-0~1", state="COMPLETED", bytes_warm=120 << 20, bytes_reused=80 << 20,
    bytes_delta=3 << 20, pause_ms=109.5, duration_s=12.25,
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (200, []),
        (110, ["rounds", "reused"]),
        (80, ["rounds", "reused", "delta", "predicted", "warm"]),
        (70, ["rounds", "reused", "delta", "predicted", "warm", "took"]),
    ],
)
def test_a_narrow_table_of_moves_says_what_moved_where_and_what_it_leaves_out(width: int, left_out: list[str]) -> None:
    moved = MOVED, dataclasses.replace(MOVED, partition=12, state="ABORTED", fault=BudgetUnreachable("a …"))
    text = shown(show.moves(moved), width=width)
    (head,), (row,), (aborted,) = (lines(text, first) for first in ("partition", "3", "12"))
    columns = ["partition", "from", "to", "state", "warm", "reused", "delta", "rounds", "predicted", "pause", "took"]
    assert head.split() == [name for name in columns if name not in left_out]
    for value in ("edge-frankfurt-0", "cloud-0~1", "COMPLETED", "109.5 ms"):
        assert value in row
    assert "ABORTED" in aborted
    assert max(map(len, [head, row, aborted])) <= width
    assert (f"too narrow to show: {', '.join(left_out)}\n" in text) == bool(left_out)


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("list", ["3f9a0c1b2d4e", "DelayByAircraft", "COMPLETED", "109.5 ms"]),
        ("slowest", ["3f9a0c1b2d4e", "edge-frankfurt-0", "cloud-0~1", "109.5 ms"]),
        ("details 3f9a0c1b2d4e", ["edge-frankfurt-0", "cloud-0~1", "COMPLETED", "109.5 ms"]),
    ],
)
def test_lists_of_reconfigurations_at_80_columns(
    command: str, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Reconfiguration(
        "3f9a0c1b2d4e", "DelayByAircraft", "COMPLETED", (MOVED,), 0.0, "rebalance", "warm-up", 1_700_000_000_000_000
    )

    class Cluster:
        def __init__(self, _: str) -> None: ...
        def reconfigurations(self, _: int = 0) -> list[Reconfiguration]:
            return [done]

        def reconfiguration(self, _: str) -> Reconfiguration:
            return done

    monkeypatch.setattr(moving, "Cluster", Cluster)
    monkeypatch.setattr(console, "_width", 80)
    said = CliRunner().invoke(moving.reconfig_commands, command.split()).stdout
    (row,) = (line for line in said.splitlines() if "109.5 ms" in line)
    assert [value for value in kept if value not in row] == []
    assert max(map(len, said.splitlines())) <= 80


def test_a_narrow_table_keeps_its_styles() -> None:
    table = show.new_table("a", "b", spare=("b",))
    table.add_row("x", "y" * 80, style="bold red")
    colourful = Console(force_terminal=True, color_system="standard", width=40)
    with colourful.capture() as capture:
        colourful.print(table)
    assert "\x1b[1;31mx" in capture.get()
    assert "y" not in capture.get()


def test_the_sites_of_a_confined_operator_are_said() -> None:
    (confined, *_) = (dataclasses.replace(each, sites=("cloud", "edge")) for each in STATUS.operators)
    status = dataclasses.replace(STATUS, operators=(confined,))
    assert "only at cloud, edge" in shown(show.status(status))
    assert "only at" not in shown(show.status(STATUS))
    assert status.to_dict()["operators"][0]["sites"] == ("cloud", "edge")


def test_who_is_elsewhere_than_an_operator_may_be_lacks_no_share() -> None:
    here = [ReplicaStatus(name, "cloud", f"{name}:1", 1, True, 0.4, n) for name, n in (("a", 2), ("b", 2))]
    edge = ReplicaStatus("e", "edge", "e:1", 1, True, 0.4, 0)
    operator = OperatorStatus("Op", "m:Op", 4, 7, ("a", "a", "b", "b"), (1,) * 4, sites=("cloud",))
    status = ClusterStatus(replicas=(*here, edge), operators=(operator,), reconfigurations=())
    assert status.without_share() == []
    assert dataclasses.replace(status, operators=(dataclasses.replace(operator, sites=()),)).without_share() == ["e"]


# -- nodes --------------------------------------------------------------------------------------------------


def node(*workers: tuple[bool, float, int], opening: int = -1) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(
            f"n~{i}" if i else "n", "edge", f"127.0.0.1:4377{i}", 1, alive, heard, owned, opening=i == opening
        )
        for i, (alive, heard, owned) in enumerate(workers)
    ]


def cluster(replicas: list[ReplicaStatus], owners: tuple[str, ...] = ()) -> ClusterStatus:
    operator = OperatorStatus("Op", "m:Op", len(owners), 1, owners, (1,) * len(owners))
    return ClusterStatus(tuple(replicas), (operator,), (), ())


def test_a_worker_without_partitions_is_no_node_without_a_share() -> None:
    here = [*node((True, 0.1, 2), (True, 0.2, 0)), ReplicaStatus("m", "edge", "m:1", 1, True, 0.1, 1)]
    assert "owns no partitions" not in shown(show.status(cluster(here, ("n", "n", "m"))))


def test_a_node_is_as_silent_as_the_worker_that_was_silent_longest() -> None:
    (line,) = lines(shown(show.status(cluster(node((True, 0.1, 1), (False, 14.2, 1))))), "n")
    assert "1 of 2 workers alive" in line
    assert "14.2 s ago" in line
    (line,) = lines(shown(show.status(cluster(node((True, 0.1, 1), (False, -1.0, 1), opening=1)))), "n")
    assert "1 of 2 workers alive, 1 opening" in line


def test_addresses_are_whole_on_a_narrow_terminal() -> None:
    text = shown(show.status(cluster(node((True, 0.1, 8), (False, 14.2, 8))), workers=True), width=80)
    assert "127.0.0.1:43770" in text
    assert "127.0.0.1:43771" in text


def test_workers_that_are_refused_for_one_reason_are_said_once() -> None:
    error = NameTaken("the name belongs to another data directory", remedy="stop one", replica="n")
    refused = tuple(RefusedReplica(name, f"{name}:1", "d", error, 1.0) for name in ("n", "n~1"))
    text = shown(show.status(dataclasses.replace(cluster([]), refused=refused)))
    assert text.count("another data directory") == 1
    assert "n (2 workers)" in text


def test_nodes_have_room_where_it_is_known_and_links_what_was_measured() -> None:
    here = [ReplicaStatus(name, "edge", f"{name}:1", 1, True, 0.4, 1, room_bytes=room) for name, room in two_rooms()]
    text = shown(show.replicas(here, {}, of_nodes=True), width=120)
    assert "3.0 GiB" in lines(text, "a")[0]
    assert "GiB" not in lines(text, "b")[0]
    text = shown(show.links([LinkReport("edge", "cloud", 40.25, None), LinkReport("cloud", "edge", None, 2 << 20)]))
    assert "40.2 ms" in text
    assert "2.0 MiB/s" in text


def two_rooms() -> list[tuple[str, int | None]]:
    return [("a", 3 << 30), ("b", None)]


def test_a_dry_run_says_what_stays_and_what_has_no_room() -> None:
    left, lack = LeftPartition("Op", 7, "edge has no room for it"), LackOfRoom(("a", "b"), 1 << 20, 3 << 20)
    text = shown(show.placement(Placement((), 1, 1, 1, 1, 1, 1, left=(left,), lacking=(lack,))), width=120)
    assert "no_room: a, b: 1.0 MiB free for state, 3.0 MiB would be added: refused" in text
    assert "edge has no room for it" in text
    assert "everything is where" not in text


def test_a_dry_run_in_json_has_objects(capsys: pytest.CaptureFixture[str]) -> None:
    """Moves, partitions that stay, and what lacks room used to be texts of Python."""
    move, left = ProposedMove("Op", 3, "a", "b", "share", 100), LeftPartition("Op", 7, "no room")
    lack = LackOfRoom(("a", "b"), 1, 3)
    show.proposed(Placement((move,), 1, 1, 1, math.inf, 1, 1, left=(left,), lacking=(lack,)), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["moves"], said["left"]) == ([move.to_dict()], [left.to_dict()])
    assert said["lacking"] == [{"replicas": ["a", "b"], "free_bytes": 1, "coming_bytes": 3}]
    assert said["uneven_bytes_after"] is None


def test_who_leads_is_said() -> None:
    text = shown(show.status(dataclasses.replace(STATUS, leader=LeaderReport("ctl-2:4200", 7))))
    assert text.startswith("the controller at ctl-2:4200 leads, in term 7\n")


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_advised_for_a_replica_that_was_stopped(stopped: bool) -> None:
    replicas = tuple(
        ReplicaStatus(name, "edge", f"{name}:1", 1, True, 0.4, count, stopped=stopped and name == "b")
        for name, count in (("a", 4), ("b", 0))
    )
    operators = (OperatorStatus("Op", "m:Op", 4, 7, ("a",) * 4, (1,) * 4),)
    text = shown(show.status(dataclasses.replace(STATUS, replicas=replicas, operators=operators, refused=())))
    assert ("b owns no partitions: `stateflow rebalance`" in text) is not stopped


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0, 1, "Op deployed, version 1"),
        (1, 2, "Op upgraded: version 2 serves from the next batch on, in place of 1"),
        (2, 2, "Op is already deployed: version 2 serves, code unchanged"),
    ],
)
def test_a_first_deployment_an_upgrade_and_no_change_read_differently(before: int, after: int, said: str) -> None:
    with console.capture() as capture:
        show.deployed(STATUS.operators[0], before, after)
    assert capture.get().splitlines()[0] == said


def test_details_have_the_time_when_a_move_began() -> None:
    text = shown(show.moves((dataclasses.replace(MOVED, started_us=1_700_000_000_000_000),), times=True))
    assert "began (UTC)" in text
    assert "2023-11-14 22:13:20" in text


def child(state: str, **more: Any) -> ChildReport:
    return ChildReport("a-0", "running", state, 1, 1, fault=StateMissing("it died", remedy="-"), **more)


@pytest.mark.parametrize(
    ("alive", "state", "said", "why"),
    [
        (True, "RUNNING", "running", False),
        (True, "WAITS", "waiting to restart (2 deaths)", True),
        (False, "RUNNING", "unknown, was running", False),
        (False, "", "unknown", True),
    ],
)
def test_a_replica_of_an_agent_is_as_it_is_now(alive: bool, state: str, said: str, why: bool) -> None:
    replica = child(state, deaths=2)
    agent = AgentReport("a", "edge", "a:1", alive, 40.0, {}, 1, 1, 1, 1, "1", "3", "rlimit", (replica,))
    assert agents._state(replica, agent).plain == said
    assert ("it died" in shown(agents._children([agent]))) is why


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"do": "rebalance", "policies": ("load", "ring")}, "rebalance all operators by load,ring"),
        ({"do": "migrate", "operator": "Op", "partitions": (0, 1, 2, 5), "to": "edge"}, "migrate Op 0-2 5 to edge"),
        ({"do": "drain", "to": "b"}, "drain b"),
        ({"do": "drain", "to": "b", "operator": "Op"}, "drain b of Op"),
        ({"do": "checkpoint", "operator": "Op"}, "checkpoint Op"),
    ],
)
def test_a_job_is_shown_with_all_that_was_asked_for(job: dict[str, Any], said: str) -> None:
    asked = {"operator": "", "policies": (), "partitions": (), "to": "", **job}
    report = JobReport("nightly", "every 1h", paused=False, next_us=0, runs=(), **asked)
    assert jobs._does(report) == said
    with console.capture() as capture:
        jobs._show(report, as_json=False)
    assert f"does: {said}\n" in capture.get()


def test_what_is_the_same_of_all_partitions_is_said_once() -> None:
    def failed(number: int, what: str) -> tuple[str, RestoredPartition]:
        fault = StateMissing(what, remedy="see `stateflow savepoint list`", partition=number)
        return "Op", RestoredPartition(number, "a", fault=fault)

    reports = [failed(number, "there is no savepoint 'x'") for number in (0, 1, 2)] + [failed(3, "another")]
    assert checkpoint._failures(reports) == [
        ("Op/0-2", "state_missing: there is no savepoint 'x': see `stateflow savepoint list`"),
        ("Op/3", "state_missing: another (partition=3): see `stateflow savepoint list`"),
    ]
