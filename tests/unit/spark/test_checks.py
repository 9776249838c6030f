"""Checks before the first batch, without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.errors import DeclarationError, InvalidArgument, KeyColumnMissing, StateflowError
from stateflow.spark import apply_operator, read_state
from stateflow.spark.apply import _hashable, _time_column
from stateflow.spark.checks import check_columns, check_order, site_column
from stateflow.testing import LocalCluster
from tests.unit.operators import Count


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
        (Frame(None), Count, "127.0.0.1:1", "^invalid_argument: the Spark session was stopped: create a new one"),
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
        "apply the operator outside of it, at module level, and return the result"
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
