"""State as a data source of Spark: which token its reads use, without Spark."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, In, Not
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import BadCertificate, NotAllowed, SchemaMismatch, UnknownState
from stateflow.rpc import replica_pb2
from stateflow.security.authority import Authority, write_private
from stateflow.security.certificates import PREFIX, certificate_of, decoded_token
from stateflow.security.plain import own_token, use_token
from stateflow.security.roles import RULES, Identity, Role, check_call, check_request
from stateflow.spark import register_state, state_source
from stateflow.spark.credentials import Credentials
from stateflow.spark.session import PUSH_DOWN
from stateflow.spark.state_source import Portion, StateOptions, StateReader, StateSource

WHERE = {"operator": "Tally", "cluster": "ctl:7070"}
CONTROLLER, REPLICA = "/stateflow.rpc.ControllerService/", "/stateflow.rpc.ReplicaService/"


class Session:
    """A session as far as registering a source looks at it."""

    def __init__(self) -> None:
        self.dataSource = self.conf = self
        self.registered = b""
        self.settings: dict[str, str] = {}

    def register(self, source: Any) -> None:
        self.registered = cloudpickle.dumps(source)

    def set(self, name: str, value: str) -> None:
        self.settings[name] = value


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The token of this process, in a file that its environment names; its role is the fixture's parameter."""
    who = Identity.of(getattr(request, "param", "data"), "me")
    text, _ = Authority.init(tmp_path / "authority", "test").token(who, timedelta(hours=1))
    write_private(tmp_path / "token", text.encode())
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"STATEFLOW_TLS_{name}", raising=False)
    monkeypatch.setenv("STATEFLOW_TOKEN_FILE", str(tmp_path / "token"))
    return text


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process one that plans reads for Spark: it has no token of its own."""
    yield lambda: monkeypatch.delenv("STATEFLOW_TOKEN_FILE", raising=False)
    use_token("")


def contains(what: bytes, token: str) -> bool:
    """Tells whether a part of the token occurs."""
    return any(token[at : at + 32].encode() in what for at in range(0, len(token) - 32, 32))


@pytest.mark.parametrize("token", ["data", "read"], indirect=True)
def test_reads_have_the_token_of_the_process_that_registered_the_source(token: str, worker: Any) -> None:
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    assert session.settings == {PUSH_DOWN: "true"}
    worker()
    assert own_token() == ""
    source = pickle.loads(session.registered)(WHERE | {"state": "n"})
    reader = pickle.loads(cloudpickle.dumps(source)).reader(None)
    assert reader.token == token
    assert own_token() == token, "the worker asks the controller with it"
    shown = f"{source!r} {reader!r} {type(source)!r} {source.name()}"
    assert not contains(shown.encode(), token)


def test_a_source_without_a_token_does_not_use_that_of_another_source(token: str, worker: Any) -> None:
    worker()
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    use_token(token)  # of a source that the worker has planned a read of before
    source = pickle.loads(session.registered)(WHERE | {"state": "n"})
    assert source.reader(None).token == ""


def test_a_checkpoint_is_read_without_a_token(token: str, worker: Any) -> None:
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    source = pickle.loads(session.registered)({"operator": "Tally", "state": "n", "checkpoint": "store"})
    assert contains(cloudpickle.dumps(source), token)
    reader = source.reader(None)
    assert reader.token == ""
    assert not contains(cloudpickle.dumps((source, reader)), token), "Spark sends both of them to executors"


# -- Filters that Spark passes on --------------------------------------------------------------------------------------


def pushed(*filters: Filter) -> StateReader:
    reader = StateReader(StateOptions.of(WHERE | {"state": "n"}), None, "")
    assert reader.pushFilters([*filters]) == [*filters], "Spark applies them again"
    return reader


def test_keys_that_nothing_is_stored_under_are_not_asked_for() -> None:
    """Partitions and replicas refuse such keys, but to Spark they are values like others."""
    for key in (math.nan, math.inf, -math.inf, None):
        assert pushed(EqualTo(("key",), key)).keys == ()
        assert pushed(In(("key",), (1.5, key))).keys == (1.5,)


def test_keys_that_are_stored_as_one_are_read_once() -> None:
    assert pushed(In(("key",), (0.0, 1.5, -0.0))).keys == (0.0, 1.5)
    assert pushed(In(("key",), (1, 2)), EqualTo(("key",), 2)).keys == (2,)
    assert pushed(EqualTo(("key",), {"a": 1})).keys == ({"a": 1},), "a key of several columns"


def test_only_filters_that_all_rows_must_pass_limit_what_is_read() -> None:
    others = [Not(EqualTo(("key",), 1)), EqualNullSafe(("key",), 1), EqualTo(("key", "a"), 1), EqualTo(("value",), 1)]
    assert pushed(*others).keys is None
    reader = pushed(EqualTo(("partition",), 1), In(("partition",), (1, 2, None)))
    assert (reader.keys, reader.numbers) == (None, {1})


# -- Keys of several types ---------------------------------------------------------------------------------------------


STORED = {"operator": "Tally", "state": "n", "checkpoint": "store", "savepoint": "new"}


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Keys of each partition of a checkpoint; the first partition has none."""
    stored: list[list[Any]] = [[]]

    def page(number: int) -> bytes:
        keys = stored[number]
        values, numbers = pa.array([1] * len(keys), pa.int64()), pa.array([number] * len(keys), pa.int32())
        table = pa.table({"key": keys, "map_key": [None] * len(keys), "value": values, "partition": numbers})
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()

    monkeypatch.setattr(state_source, "_of_any", lambda options: map(page, range(len(stored))))
    monkeypatch.setattr(state_source, "_pages", lambda options, partitions, keys: map(page, partitions))
    return stored


@pytest.mark.parametrize(
    ("first", "others", "kinds"),
    [("5", 5, "string; int64"), (1, True, "int64; bool"), (1, 2.0, "int64; double"), (1, "x", "int64; string")],
)
def test_keys_of_several_types_are_refused(first: Any, others: Any, kinds: str, partitions: list[list[Any]]) -> None:
    """Two different keys would look the same in one column."""
    partitions += [[first], [first, first], [others]]
    source = StateSource(STORED)
    schema = source.schema()  # Spark asks for it, and then pickles the source and its reader
    reader = pickle.loads(cloudpickle.dumps(pickle.loads(cloudpickle.dumps(source)).reader(schema)))
    assert [row["key"] for row in rows_of(reader, 0, 1, 2)] == [first] * 3
    with pytest.raises(SchemaMismatch, match=f"keys of several types are stored: {kinds} .operator=Tally.: read "):
        rows_of(reader, 3)


def rows_of(reader: StateReader, *partitions: int) -> list[dict[str, Any]]:
    return [row for batch in reader.read(Portion(partitions, (), "n")) for row in batch.to_pylist()]


def test_a_schema_of_the_caller_sets_the_type_of_keys(partitions: list[list[Any]]) -> None:
    partitions += [["5"], [5]]
    schema = StructType().add("key", StringType()).add("map_key", StringType())
    reader = StateSource(STORED).reader(schema.add("value", LongType()).add("partition", IntegerType()))
    assert [row["key"] for row in rows_of(reader, 1, 2)] == ["5", "5"]


def test_keys_that_are_stored_after_the_read_was_planned_are_text(partitions: list[list[Any]]) -> None:
    source = StateSource(STORED)
    reader = source.reader(source.schema())
    partitions += [[5]]
    assert [row["key"] for row in rows_of(reader, 0, 1)] == ["5"]


# -- Changes between two savepoints ------------------------------------------------------------------------------------


def test_a_value_that_stayed_as_it_was_has_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is the same value in both savepoints, and 0.0 and -0.0 are two."""
    savepoints = {"old": [1.5, math.nan, 0.0, 2.5], "new": [1.5, math.nan, -0.0, 3.5]}

    def pages(options: StateOptions, *_: object) -> Iterator[bytes]:
        values = savepoints[options.savepoint]
        columns = {"key": ["a", "b", "c", "d"], "value": values, "partition": [0] * len(values)}
        table = pa.table(columns)
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as stream:
            stream.write_table(table)
        yield sink.getvalue().to_pybytes()

    monkeypatch.setattr(state_source, "_pages", pages)
    where = {"operator": "Tally", "state": "n", "checkpoint": "store", "savepoint": "new", "since": "old"}
    names = {"key": pa.string(), "change": pa.string(), "before": pa.float64(), "value": pa.float64()}
    found = state_source._changes(StateOptions.of(where), 0, pa.schema(names))
    rows = [row for batch in found for row in batch.to_pylist()]
    assert [(row["key"], row["change"], row["before"], str(row["value"])) for row in rows] == [
        ("c", "update", 0.0, "-0.0"),
        ("d", "update", 2.5, "3.5"),
    ]


def test_changes_come_while_the_newer_savepoint_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task had all entries of both savepoints in memory as Python objects, and all changes."""
    savepoints = {
        "old": [{"a": 1, "gone": 2}, {"b": 3, "kept": 4, "away": 5}],
        "new": [{"a": 10, "more": 6}, {"b": 30, "kept": 4}],
    }
    read: list[str] = []

    def pages(options: StateOptions, *_: object) -> Iterator[bytes]:
        for number, page in enumerate(savepoints[options.savepoint]):
            read.append(f"{options.savepoint} {number}")
            table = pa.table({"key": list(page), "value": list(page.values()), "partition": [0] * len(page)})
            with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as stream:
                stream.write_table(table)
            yield sink.getvalue().to_pybytes()

    monkeypatch.setattr(state_source, "_pages", pages)
    where = {"operator": "Tally", "state": "n", "checkpoint": "store", "savepoint": "new", "since": "old"}
    names = {"key": pa.string(), "change": pa.string(), "before": pa.int64(), "value": pa.int64()}
    changes = iter(state_source._changes(StateOptions.of(where), 0, pa.schema(names)))
    first = next(changes)
    assert read == ["old 0", "old 1", "new 0"]
    assert [tuple(row.values()) for batch in (first, *changes) for row in batch.to_pylist()] == [
        ("a", "update", 1, 10),
        ("more", "insert", None, 6),
        ("b", "update", 3, 30),
        ("gone", "delete", 2, None),
        ("away", "delete", 5, None),
    ]


SINCE = {"operator": "Tally", "state": "n", "checkpoint": "store", "savepoint": "new", "since": "old"}


@pytest.mark.parametrize(
    "keys", [[1, 2], [True, False], [2.5], ["a"], [date(2013, 1, 1)], [{"a": 1, "b": "x"}]], ids=str
)
def test_when_every_entry_is_gone_keys_have_the_type_that_they_had(
    keys: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys were text where the newer savepoint has none, and a deletion of another key failed."""
    savepoints: dict[str, list[list[Any]]] = {"old": [[], keys], "new": [[], []]}

    def page(number: int, keys: list[Any]) -> bytes:
        known = pa.array([None] * len(keys), pa.int64() if keys else pa.null())  # a tag that was not used has no types
        table = pa.table({"key": keys, "map_key": known, "value": known, "partition": [number] * len(keys)})
        table = table.set_column(3, "partition", table["partition"].cast(pa.int32()))
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()

    def pages(options: StateOptions, numbers: Iterable[int] = (0, 1), _: object = ()) -> Iterator[bytes]:
        return (page(number, savepoints[options.savepoint][number]) for number in numbers)

    monkeypatch.setattr(state_source, "_of_any", pages)
    monkeypatch.setattr(state_source, "_pages", pages)
    source = StateSource(SINCE)
    schema = source.schema()
    assert [each.dataType.simpleString() for each in schema][1:] == ["bigint", "string", "bigint", "bigint", "int"]
    reader = source.reader(schema)
    assert [(row["key"], row["change"]) for row in rows_of(reader, 0, 1)] == [(key, "delete") for key in keys]
    savepoints["old"][0] = ["text" if keys != ["a"] else 1]
    with pytest.raises(SchemaMismatch, match="keys of several types are stored"):
        rows_of(reader, 0)


def test_changes_since_a_savepoint_that_lacks_the_state_are_none_where_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pages(options: StateOptions) -> Iterator[bytes]:
        if options.savepoint == "old":
            raise UnknownState("the state is not known", remedy="-")
        return iter(())

    monkeypatch.setattr(state_source, "_of_any", pages)
    assert [each.dataType.simpleString() for each in StateSource(SINCE).schema()] == ["string"] * 5 + ["int"]


# -- A driver that is an administrator of a cluster inside Spark ------------------------------------------------------


@pytest.fixture
def credentials(tmp_path: Path) -> Iterator[Credentials]:
    """Credentials of a cluster inside Spark, of which this process is an administrator."""
    made = Credentials(tmp_path / "certificates", "127.0.0.1", "spark-abc123", 1)
    made.begin()
    yield made
    made.end()
    use_token("")


def planned(registered: bytes, **options: str) -> StateReader:
    """Returns the reader that a worker plans, as an executor unpickles it; the worker has no token of its own."""
    with pytest.MonkeyPatch.context() as its:
        its.delenv("STATEFLOW_TOKEN_FILE", raising=False)
        source = pickle.loads(registered)(WHERE | options)
        reader: StateReader = pickle.loads(cloudpickle.dumps(source.reader(None)))
    return reader


def identity_of(token: str) -> Identity:
    found = certificate_of(decoded_token(token).cert).identity
    assert found is not None
    return found


def may_call(method: str, who: Identity) -> bool:
    try:
        check_call(method, who)
    except NotAllowed:
        return False
    return True


def test_what_travels_to_executors_reads_the_state_of_one_operator_and_operates_nothing(
    credentials: Credentials,
) -> None:
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    token = credentials.token_file.read_text()
    assert not contains(session.registered, token)
    assert PREFIX.encode() not in session.registered, "the class has no token at all"
    who = identity_of(planned(session.registered, state="n").token)
    assert (who.role, who.operators) == (Role.QUERY, ("Tally",))
    scan = REPLICA + "Scan"
    check_request(check_call(scan, who), scan, who, replica_pb2.ScanRequest(operator="Tally"))
    with pytest.raises(NotAllowed, match="query/spark may not reach the operator 'Other'"):
        check_request(check_call(scan, who), scan, who, replica_pb2.ScanRequest(operator="Other"))
    looks = {"GetDeployment", "ListVersions", "Positions", "Sources", "Inspect", "Scan", "Check"}
    assert {method.rpartition("/")[2] for method in RULES if may_call(method, who)} == looks
    for call in ("Migrate", "Drain", "Checkpoint", "RestartReplica", "Deploy", "Restore"):
        with pytest.raises(NotAllowed, match=f"query/spark may not call {call} "):
            check_call(CONTROLLER + call, who)


@pytest.mark.parametrize(("describe", "role"), [("states", Role.QUERY), ("partitions", Role.READ)])
def test_a_description_is_read_with_the_token_that_its_calls_need(
    describe: str, role: Role, credentials: Credentials
) -> None:
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    who = identity_of(planned(session.registered, describe=describe).token)
    assert who.role == role
    assert may_call(REPLICA + "Scan", who) == (describe == "states")


def test_a_read_after_the_cluster_was_stopped_says_what_to_do(credentials: Credentials, tmp_path: Path) -> None:
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    (tmp_path / "certificates").rename(tmp_path / "gone")
    with pytest.raises(BadCertificate, match=r"no token for this read: .*after another start_cluster call register_"):
        planned(session.registered, state="n")


def test_a_token_that_expired_meanwhile_is_said_where_it_is_used(tmp_path: Path, worker: Any) -> None:
    earlier = ManualClock(SYSTEM_CLOCK.now_us() - 3600 * 10**6)
    authority = Authority.init(tmp_path / "authority", "test", earlier)
    token, _ = authority.token(Identity.of("data", "me"), timedelta(minutes=59))
    reader = StateReader(StateOptions.of(WHERE | {"state": "n"}), None, token)
    said = r"the token of data/me for this read expired at .* UTC: load the DataFrame again; .* a newer token"
    with pytest.raises(BadCertificate, match=said):
        reader.partitions()
    with pytest.raises(BadCertificate, match=said):
        next(reader.read(Portion((0,))))
