"""Checks before the first batch, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import (
    DeclarationError,
    InvalidArgument,
    KeyColumnMissing,
    LeaseLost,
    Moved,
    NotAllowed,
    NotOwner,
    StateDamaged,
    StateflowError,
    Unavailable,
)
from stateflow.spark import apply_operator, checks, read_state
from stateflow.spark.apply import _hashable, _time_column
from stateflow.spark.checks import check_columns, check_order, check_real_time, site_column
from stateflow.spark.session import REAL_TIME, real_time_settings
from stateflow.testing import LocalCluster
from tests.unit.operators import Count
from tests.versions import needs


class Frame:
    """A DataFrame as far as checks look at it. ``jvm``: None if its session was stopped."""

    isStreaming = False
    master = "yarn"

    def __init__(self, jvm: object) -> None:
        self.sparkSession = self.sparkContext = self
        self._jsc = jvm


@pytest.mark.parametrize(
    ("frame", "operator", "cluster", "said"),
    [
        (Frame(None), Count, "127.0.0.1:1", "^invalid_argument: the Spark session was stopped: create a new session"),
        ([1, 2], Count, "127.0.0.1:1", "^invalid_argument: list is not a DataFrame"),
        (
            Frame("jvm"),
            Count(),
            "127.0.0.1:1",
            r"^bad_declaration: Count\(\) is an instance .*: pass the class .*: Count$",
        ),
        (Frame("jvm"), dict, "127.0.0.1:1", "is not an operator"),
        (Frame("jvm"), Count, LocalCluster(sites={"a": 1}), "is not a running cluster: pass .* a started LocalCluster"),
        (Frame("jvm"), Count, "", "'' is not a running cluster"),
        (Frame("jvm"), Count, None, r"runs on this machine, but Spark's tasks do not \(master yarn\)"),
    ],
)
def test_what_is_passed_by_mistake(frame: Any, operator: Any, cluster: Any, said: str) -> None:
    with pytest.raises(StateflowError, match=said) as caught:
        apply_operator(frame, operator, cluster=cluster)
    assert len(str(caught.value).splitlines()) == 1


def test_spark_answers_no_question_within_a_query_function_of_a_pipeline() -> None:
    """A frame of Spark Connect answers no question within a query function of a declarative pipeline."""

    class Asked:
        @property
        def isStreaming(self) -> bool:
            raise RuntimeError("[ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION] Operations that trigger analysis")

    Asked.__module__ = "pyspark.sql.connect.dataframe"
    with pytest.raises(InvalidArgument) as caught:
        apply_operator(Asked(), Count, cluster="127.0.0.1:1")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "invalid_argument: Spark does not analyse DataFrames within a pipeline's query function: "
        "apply the operator at module level, and return its result from the query function"
    )


def test_state_is_not_read_with_a_session_that_was_stopped() -> None:
    with pytest.raises(InvalidArgument, match="session was stopped"):
        read_state(Frame(None), cluster="127.0.0.1:1", operator="Tally", state="n")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        (["cloud"], r"sites=\['cloud'\] does not map sites to replica counts: pass sites=\{'cloud': 1, …\}"),
        ({}, "no site given"),
        ({"cloud": 0}, "replicas: 0 at cloud"),
        ({"cloud": "1"}, "replicas: '1' at cloud"),
        ({"a site": 1}, "is not a valid site"),
    ],
)
def test_sites_that_cannot_be(sites: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        LocalCluster(sites=sites)


def test_a_cluster_of_what_is_no_operator() -> None:
    with pytest.raises(DeclarationError, match="pass the class itself: Count"):
        LocalCluster(Count())  # type: ignore[arg-type]


def test_the_column_that_says_where_rows_come_from() -> None:
    from pyspark.sql import types as t

    schema = t.StructType([t.StructField("site", t.StringType()), t.StructField("n", t.LongType())])
    frame: Any = SimpleNamespace(schema=schema, columns=schema.names)
    assert site_column(frame, "site") == "site"
    assert site_column(frame, None) == ""
    with pytest.raises(InvalidArgument, match=r"'where' cannot be .*: the input has site, n: name a string column"):
        site_column(frame, "where")
    with pytest.raises(InvalidArgument, match=r"'n' cannot be .*: it is bigint: name a string column of the input"):
        site_column(frame, "n")


def frame_of(schema: Any, zone: str = "UTC") -> Any:
    conf = SimpleNamespace(get={"spark.sql.session.timeZone": zone}.__getitem__)
    return SimpleNamespace(schema=schema, columns=schema.names, sparkSession=SimpleNamespace(conf=conf))


def test_times_in_a_zone_that_python_has_not_are_refused() -> None:
    from pyspark.sql import types as t

    times = t.StructType().add("k", "string").add("at", t.ArrayType(t.StructType().add("t", "timestamp")))
    for zone in ("GMT+2", "PST", "UTC+02:00", "Europe/Berlin"):
        check_columns(frame_of(times, zone))
    with pytest.raises(
        InvalidArgument, match=r"does not know the time zone '\+02:00:30' \(column=at\): .*session\.timeZone"
    ):
        check_columns(frame_of(times, "+02:00:30"))
    check_columns(frame_of(t.StructType().add("k", "string").add("at", "timestamp_ntz"), "+02:00:30"))


def test_types_that_do_not_reach_operators_are_refused() -> None:
    from pyspark.sql import types as t

    inner = t.StructType().add("interval year", "string").add("interval month to month", "integer")
    check_columns(frame_of(t.StructType().add("interval year", "integer").add("s", t.ArrayType(inner))))
    months = t.StructType().add("s", t.ArrayType(t.StructType().add("m", t.YearMonthIntervalType())))
    with pytest.raises(
        InvalidArgument, match="the column 's' is array<struct<m:interval year to month>>, which cannot be"
    ):
        check_columns(frame_of(months))
    with pytest.raises(
        InvalidArgument, match=r"the column 'v' is variant, .*: variants are not supported yet: cast it"
    ):
        check_columns(frame_of(t.StructType().add("v", t.VariantType())))
    twice = t.StructType().add("s", t.StructType([t.StructField("a", t.LongType()), t.StructField("a", t.LongType())]))
    with pytest.raises(
        InvalidArgument, match="the column 's' contains a struct with several fields named 'a': cast it"
    ):
        check_columns(frame_of(twice))


def test_a_column_that_is_meant_must_be_there_once() -> None:
    from pyspark.sql import types as t

    fields = [t.StructField(name, t.StringType()) for name in ("k", "x", "x", "a.b", "c`d")]
    frame = frame_of(t.StructType(fields))
    check_columns(frame)
    check_order(frame, "a.b", by_arrow=True)
    for refused in (
        lambda: check_order(frame, "x", by_arrow=True),
        lambda: site_column(frame, "x"),
        lambda: _time_column(frame, "x"),
    ):
        with pytest.raises(InvalidArgument, match=r"2 columns are named 'x', so .* is ambiguous: rename the others"):
            refused()
    with pytest.raises(KeyColumnMissing, match="several input columns are named 'x', so the key is ambiguous"):
        _hashable(frame, "x", "Op")


@pytest.mark.parametrize(
    ("kind", "by_arrow", "by_spark"),
    [
        *((kind, True, True) for kind in ("LongType", "StringType", "BinaryType", "BooleanType", "DateType")),
        *((kind, True, True) for kind in ("TimestampType", "DecimalType", "DayTimeIntervalType", "struct LongType")),
        *((kind, False, True) for kind in ("array LongType", "struct array LongType")),
        *((kind, False, False) for kind in ("map LongType", "VariantType", "array map LongType")),
    ],
)
def test_rows_are_ordered_by_what_can_be_ordered(kind: str, by_arrow: bool, by_spark: bool) -> None:
    from pyspark.sql import types as t

    *around, name = kind.split()
    made: Any = getattr(t, name)()
    for outer in reversed(around):
        made = {
            "array": t.ArrayType,
            "struct": lambda inner: t.StructType().add("a", inner),
            "map": lambda inner: t.MapType(t.StringType(), inner),
        }[outer](made)
    frame = frame_of(t.StructType().add("o", made))
    for taken, arrow in ((by_arrow, True), (by_spark, False)):
        if taken:
            check_order(frame, "o", by_arrow=arrow)
        else:
            with pytest.raises(
                InvalidArgument, match=r"rows cannot be ordered by the column 'o' of type .*: order by a"
            ):
                check_order(frame, "o", by_arrow=arrow)
    with pytest.raises(InvalidArgument, match="there is no column 'p' to order by: use o"):
        check_order(frame, "p", by_arrow=True)


def live(columns: str, **settings: str | None) -> Any:
    """A streaming frame with these columns, in a session with the settings of real-time mode but for ``settings``."""
    from pyspark.sql import types as t

    schema = t.StructType()
    for name in columns.split():
        schema.add(name, "integer" if name == "partition" else "long" if name in ("offset", "off") else "string")
    values = {**real_time_settings(), **settings}
    spark = SimpleNamespace(conf=SimpleNamespace(get=lambda key, default: values.get(key) or default), version="4.3.0")
    return SimpleNamespace(schema=schema, columns=schema.names, sparkSession=spark, isStreaming=True)


@pytest.fixture
def unshuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_shuffle_in", lambda df: None)


@needs(REAL_TIME)
@pytest.mark.usefixtures("unshuffled")
def test_rows_of_kafka_are_identified_by_topic_partition_and_offset() -> None:
    assert check_real_time(live("k topic partition offset"), None) == ("topic", "partition", "offset")
    assert check_real_time(live("k partition offset"), ("partition", "offset")) == ("partition", "offset")
    assert check_real_time(live("k topic partition off"), ("partition", "off")) == ("partition", "off")
    with pytest.raises(InvalidArgument, match=r"by source partition and offset, which this input lacks: .*topic"):
        check_real_time(live("k partition offset"), None)
    with pytest.raises(
        InvalidArgument, match=r"cannot tell apart equal partition numbers of different topics: .*\(\"topic\", "
    ):
        check_real_time(live("k topic partition offset"), ("partition", "offset"))


@needs(REAL_TIME)
@pytest.mark.usefixtures("unshuffled")
def test_a_source_partition_that_is_no_single_value_is_refused_before_the_query_starts() -> None:
    """Python cannot look such values up, so each task would fail."""
    from pyspark.sql import types as t

    frame = live("k offset")
    frame.schema.add("place", t.StructType().add("part", "long"))
    with pytest.raises(InvalidArgument, match=r"'place' is struct<part:bigint>, which cannot name a source partition"):
        check_real_time(frame, ("place", "offset"))


class Node:
    """A node of a plan, or what leads to it."""

    def __init__(self, name: str, *children: Node) -> None:
        self._name, self._children = name, children
        self._jdf = self

    def nodeName(self) -> str:
        return self._name

    def size(self) -> int:
        return len(self._children)

    def apply(self, number: int) -> Node:
        return self._children[number]

    def analyzed(self) -> Node:
        return self

    queryExecution = children = analyzed


@pytest.mark.parametrize(
    ("name", "spreads"),
    [
        *((name, False) for name in ("Project", "Filter", "SubqueryAlias", "EventTimeWatermark", "Generate")),
        *((name, True) for name in ("RepartitionById", "Deduplicate", "DeduplicateWithinWatermark", "Union")),
        *((name, True) for name in ("Distinct", "FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState")),
        *((name, True) for name in ("TransformWithState", "TransformWithStateInPySpark", "GlobalLimit")),
    ],
)
def test_what_spreads_the_rows_of_a_source_partition(name: str, spreads: bool) -> None:
    frame: Any = Node("Project", Node(name, Node("StreamingRelationV2")))
    assert checks._shuffle_in(frame) == (name if spreads else None)


@needs(REAL_TIME)
@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize(
    ("master", "speculation", "warned"),
    [
        ("yarn", "true", 1),
        ("spark://m:7077", " TRUE", 1),
        ("yarn", "false", 0),
        ("yarn", None, 0),
        ("local[4]", "true", 0),
    ],
)
def test_second_attempts_in_real_time_are_warned_of(
    master: str, speculation: str | None, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"spark.master": master, "spark.speculation": speculation}
    check_real_time(live("topic partition offset", **settings), None)
    assert caplog.text.count("spark.speculation=true: in real-time mode a second attempt") == warned


@needs(REAL_TIME)
@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize("key", real_time_settings())
def test_each_missing_setting_of_real_time_is_named(key: str) -> None:
    wanted = real_time_settings()[key]
    with pytest.raises(InvalidArgument) as caught:
        check_real_time(live("topic partition offset", **{key: None}), None)
    assert f"lacks settings that real-time mode needs: {key}={wanted}: create it with" in str(caught.value)


@needs(REAL_TIME)
@pytest.mark.usefixtures("unshuffled")
@pytest.mark.parametrize(
    ("key", "serves", "lacks"),
    [
        ("spark.python.udf.pipelined.queueDepth", ("1000", "2000"), ("999", "0", "many")),
        ("spark.sql.execution.pandas.udf.buffer.size", ("64", "1"), ("65", "65536", "0")),
        ("spark.sql.execution.arrow.maxRecordsPerBatch", ("1",), ("2", "0", "-1")),
        ("spark.python.udf.pipelined.enabled", ("true", "TRUE", " true"), ("false", "1")),
    ],
)
def test_a_setting_is_compared_by_what_it_is_for(key: str, serves: tuple[str, ...], lacks: tuple[str, ...]) -> None:
    for value in serves:
        check_real_time(live("topic partition offset", **{key: value}), None)
    for value in lacks:
        with pytest.raises(InvalidArgument, match=f"needs: {key}="):
            check_real_time(live("topic partition offset", **{key: value}), None)


@pytest.mark.parametrize("kind", [NotOwner, Unavailable, Moved, LeaseLost, StateDamaged, NotAllowed])
def test_the_type_of_stored_keys_is_read_from_another_replica_if_one_cannot_answer(
    kind: type[StateflowError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query was refused at once because a partition was just changing its owner."""

    class Replica:
        def __init__(self, address: str) -> None:
            self.address = address

        def scan(self, *_: Any) -> Iterator[bytes]:
            if self.address == "a:1":
                raise kind("not now", remedy="wait")
            sink = pa.BufferOutputStream()
            table = pa.table({"key": ["k"]})
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            yield sink.getvalue().to_pybytes()

    monkeypatch.setattr(checks, "ReplicaClient", Replica)
    if kind.retryable:
        assert checks._stored_key({"a:1": [0], "b:1": [1]}, Count, "Count") == pa.string()
    else:
        with pytest.raises(kind):
            checks._stored_key({"a:1": [0], "b:1": [1]}, Count, "Count")
