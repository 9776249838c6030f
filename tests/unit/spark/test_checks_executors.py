"""Checks of executors before the first row, without Spark."""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import InsecureRefused, OperatorNotImportable, Unavailable
from stateflow.security.plain import use_token
from stateflow.spark import checks
from stateflow.spark.checks import Miss, Trying, check_executors, check_reached, not_importable, own_host, unreached
from stateflow.types import ReplicaInfo

CONTROLLER = "ctl:7070"
#: reserved for documentation: no host has it
NOWHERE = "192.0.2.7:7071"


class Remote:
    """A session whose executors fail with ``said``, are not to be asked, or are this process."""

    def __init__(self, master: str, said: str = "", python: str = sys.executable, cores: int = 2) -> None:
        self.sparkContext = self
        self.pythonExec, self.defaultParallelism = python, cores
        self.master, self.applicationId = master, f"{master} of {said} with {python}"
        self.said, self.asked = said, list[Trying]()
        self.tasks = list[int]()

    def range(self, start: int, end: int, step: int, tasks: int) -> Remote:
        self.tasks.append(tasks)
        return self

    def mapInArrow(self, trying: Trying, columns: str) -> Remote:
        assert [each.split() for each in columns.split(", ")] == [
            [name, "string"] for name in ("host", "address", "why", "fault")
        ]
        self.asked.append(trying)
        return self

    def collect(self) -> list[Any]:
        if self.said:
            raise RuntimeError(self.said)
        rows = [row for batch in self.asked[-1](iter(())) for row in batch.to_pylist()]
        return [SimpleNamespace(**row) for row in rows]


@pytest.fixture(autouse=True)
def nobody_was_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checks, "_ASKED", {})
    yield
    use_token("")


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def check(session: Remote, controller: str, *owners: str) -> None:
    infos = [ReplicaInfo(f"edge-{number}", "edge", address) for number, address in enumerate(owners)]
    check_executors(session, controller, infos)  # type: ignore[arg-type]


def test_executors_without_the_package_are_told_apart_from_other_failures() -> None:
    lacking = Remote("spark://m:7077", "Job aborted\nModuleNotFoundError: No module named 'stateflow'\n\tat org.apache")
    with pytest.raises(Exception, match=r"^operator_not_importable: .*'stateflow': install .*stateflow spark package"):
        check(lacking, CONTROLLER)
    with pytest.raises(RuntimeError, match="out of memory"):
        check(Remote("yarn", "out of memory"), CONTROLLER)
    assert not_importable("ValueError: no") is None


def test_executors_are_asked_once_and_only_where_they_are_others(listening: str) -> None:
    fine = Remote("local-cluster[2,1,1024]")
    for _ in range(3):
        check(fine, listening, listening)
    assert len(fine.asked) == 1
    here = Remote("local[2]", "never asked")
    check(here, CONTROLLER, NOWHERE)
    assert here.asked == []


def test_they_are_asked_again_about_what_is_new_only(listening: str, nobody: str) -> None:
    session = Remote("spark://m:7077")
    check(session, listening, listening)
    check(session, listening, nobody)
    check(session, listening, nobody, listening)
    assert [trying.addresses for trying in session.asked] == [(listening,), (listening, nobody)]


@pytest.mark.parametrize(("cores", "tasks"), [(0, 1), (1, 1), (6, 6), (4000, 16)])
def test_each_slot_is_asked_where_they_are_not_too_many(listening: str, cores: int, tasks: int) -> None:
    session = Remote("yarn", cores=cores)
    check(session, listening)
    assert session.tasks == [tasks]


def test_a_local_session_whose_workers_are_another_python_is_asked_too(tmp_path: Path) -> None:
    other = tmp_path / "python3"  # as in a virtual environment that is not activated
    other.symlink_to(sys.executable)
    lacking = Remote("local[2]", "ModuleNotFoundError: No module named 'msgpack'", str(other))
    with pytest.raises(OperatorNotImportable, match=r"'msgpack': install.*PYSPARK_PYTHON"):
        check(lacking, CONTROLLER)


def test_executors_that_may_not_send_plain_text_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATEFLOW_INSECURE", raising=False)
    with pytest.raises(
        InsecureRefused, match=rf"^insecure: ctl:7070 is not on this machine.*host={socket.gethostname()}"
    ):
        check(Remote("yarn"), CONTROLLER)


# -- addresses ------------------------------------------------------------------------------------------------

REPLICAS = {"10.0.0.1:1": "cloud-0", "127.0.0.1:2": "edge-0"}


class Executors:
    """Executors that report the next of ``misses`` each time they are asked.

    ``gone``: addresses not reached from here either.
    """

    def __init__(self, *misses: Sequence[Miss], gone: Collection[str] = ()) -> None:
        self.misses, self.gone = list(misses), set(gone)
        self.asked: list[list[str]] = []

    def ask(self, addresses: Sequence[str]) -> list[Miss]:
        self.asked.append(list(addresses))
        return [miss for miss in self.misses.pop(0) if miss.address in addresses]

    def here(self, addresses: Collection[str]) -> dict[str, str]:
        return {address: "Connection refused" for address in addresses if address in self.gone}

    def check(self, controllers: Sequence[str] = (CONTROLLER,)) -> None:
        check_reached(self.ask, self.here, controllers, REPLICAS)


def miss(address: str, host: str = "worker-1") -> Miss:
    return Miss(host, address, "Connection refused")


def test_who_is_reached_is_asked_once() -> None:
    checks = Executors([])
    checks.check()
    assert checks.asked == [[CONTROLLER, *REPLICAS]]


def test_a_replica_that_this_program_reaches_and_an_executor_does_not() -> None:
    wrong = miss("127.0.0.1:2")
    checks = Executors([wrong], [wrong])
    with pytest.raises(Unavailable) as caught:
        checks.check()
    assert str(caught.value) == (
        "unavailable: executors on worker-1 cannot reach edge-0 at 127.0.0.1:2, but this program can: Connection "
        "refused (host=worker-1 replica=edge-0 address=127.0.0.1:2): start the replica with --advertise and a name or "
        "address that the executors' machines can reach, and open its port to them"
    )
    assert checks.asked[1] == [CONTROLLER, "127.0.0.1:2"], "asked again"


def test_all_of_them_are_counted() -> None:
    both = [miss(address) for address in REPLICAS]
    with pytest.raises(Unavailable, match=r"cloud-0 at .*others=1"):
        Executors(both, both).check()


def test_a_replica_that_is_down_is_left_to_be_waited_for() -> None:
    checks = Executors([miss("10.0.0.1:1")], gone=["10.0.0.1:1"])
    checks.check()
    assert len(checks.asked) == 1


def test_a_replica_that_came_back_between_the_two_looks_is_not_refused() -> None:
    checks = Executors([miss("10.0.0.1:1")], [])
    checks.check()
    assert len(checks.asked) == 2


def test_one_controller_is_enough() -> None:
    a, b = "a:7070", "b:7070"
    apart = [miss(a, "worker-1"), miss(b, "worker-2")]
    Executors(apart, apart).check([a, b])
    with pytest.raises(Unavailable, match=r"executors on worker-2 cannot reach the controller at a:7070"):
        Executors(both := [miss(a, "worker-2"), miss(b, "worker-2")], both, gone=[b]).check([a, b])
    everywhere = [miss(a), miss(b)]
    with pytest.raises(
        Unavailable, match=r"the controller at a:7070.*others=1\): start the controller with --advertise"
    ):
        Executors(everywhere, everywhere).check([a, b])


# -- what runs there ------------------------------------------------------------------------------------------


def test_what_is_not_reached_and_why(listening: str, nobody: str) -> None:
    name = "nobody.invalid:7071"
    found = unreached([listening, nobody, name])
    assert set(found) == {nobody, name}
    assert found[nobody] == "Connection refused"
    assert found[name]


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    over = threading.Event()

    def hangs(*_: object) -> str:
        over.wait(60)
        return ""

    monkeypatch.setattr(checks, "_tried", hangs)
    try:
        assert unreached(["a:1"], 0.5) == {"a:1": "no answer within 0.5 s"}
        assert len(unreached([f"a:{port}" for port in range(100)], 0.5)) <= 64, "who is not begun counts as reached"
    finally:
        over.set()


def test_ipv6_is_tried_as_it_is_written() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        assert unreached([f"[::1]:{server.getsockname()[1]}"]) == {}


def test_where_it_runs() -> None:
    assert own_host(["127.0.0.1:1"]) == f"{socket.gethostname()} (127.0.0.1)"
    assert own_host(["nobody.invalid:1", "127.0.0.1:1"]) == f"{socket.gethostname()} (127.0.0.1)"
    assert own_host([]) == socket.gethostname()


def test_no_row_where_all_is_well(listening: str) -> None:
    [batch] = Trying((listening,))(iter([pa.RecordBatch.from_pydict({"id": [0]})]))
    assert batch.num_rows == 0
    assert "secret" not in repr(Trying((), token="secret"))
