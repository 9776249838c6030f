"""partition_of agrees with Spark to the bit; otherwise a key's state would be sought in the wrong partition."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import EncodeError, InvalidArgument, NullKey, UnsupportedKeyType
from stateflow.partitioner import PARTITIONS_MAX, check_partitions, partition_of, spark_xxhash64

UTC = dt.UTC
# (columns, xxhash64(…), pmod(xxhash64(…), 128), pmod(xxhash64(…), 7)) as Apache Spark 4.3.0 computed them
SPARK: list[tuple[tuple[Any, ...], int, int, int]] = [
    (("",), -7444071767201028348, 4, 3),
    (("a",), -8582455328737087284, 76, 3),
    (("N14228",), 2818031054348419725, 13, 4),
    (("Zürich ✈ 😀",), -7392579826339521185, 95, 6),
    (("0123456789abcdef" * 5,), 6610667476800945950, 30, 0),
    ((0,), -5252525462095825812, 108, 4),
    ((1,), -7001672635703045582, 50, 5),
    ((-1,), 3858142552250413010, 82, 3),
    ((-(1 << 63),), -8619748838626508300, 116, 3),
    (((1 << 63) - 1,), -3246596055638297850, 6, 2),
    ((42,), -6876166290308861218, 94, 6),
    ((True,), -6698625589789238999, 41, 2),
    ((False,), 3614696996920510707, 115, 3),
    ((0.0,), -5252525462095825812, 108, 4),
    ((-0.0,), -5252525462095825812, 108, 4),
    ((1.5,), 7738255526519901366, 54, 4),
    ((-2.25e300,), 8039477025629276935, 7, 1),
    ((math.inf,), 5810986238603807492, 4, 0),
    ((-math.inf,), 5326262080505358431, 95, 5),
    ((b"",), -7444071767201028348, 4, 3),
    ((b"\x00\xff\x10",), 5415089035989094387, 115, 2),
    ((dt.date(1970, 1, 1),), 3614696996920510707, 115, 3),
    ((dt.date(2013, 1, 1),), 1349268229983960169, 105, 2),
    ((dt.date(1582, 10, 15),), 368781402421712356, 100, 6),
    ((dt.date(1, 1, 1),), 6773727150484150602, 74, 4),
    ((dt.datetime(1970, 1, 1, tzinfo=UTC),), -5252525462095825812, 108, 4),
    ((dt.datetime(2013, 1, 1, 5, 17, 0, 123456, UTC),), 6018529094554468181, 85, 4),
    ((dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),), 3858142552250413010, 82, 3),
    ((dt.datetime(1, 1, 1, tzinfo=UTC),), 4148024589635468106, 74, 5),
    (("UA", 1545), -3096318248440197094, 26, 1),
    (("a", "b"), -7357372313250070212, 60, 4),
    (("ab", ""), 5498262472637046317, 45, 2),
    (("JFK", dt.date(2013, 6, 30), 7), -804945762771289682, 46, 3),
    ((True, 1.5, b"\x01", dt.datetime(2013, 1, 1, 5, 17, tzinfo=UTC)), 6016850205497203620, 36, 2),
]


@pytest.mark.parametrize(("columns", "hashed", "of_128", "of_7"), SPARK)
def test_equals_spark(columns: tuple[Any, ...], hashed: int, of_128: int, of_7: int) -> None:
    assert spark_xxhash64(*columns) == hashed
    assert (partition_of(columns, 128), partition_of(columns, 7)) == (of_128, of_7)


def test_a_key_of_one_column_may_come_without_its_tuple() -> None:
    assert partition_of("N14228", 128) == partition_of(("N14228",), 128) == 13


def test_a_time_zone_does_not_matter_the_moment_does() -> None:
    utc = dt.datetime(2013, 7, 1, 4, tzinfo=UTC)
    assert spark_xxhash64(utc) == spark_xxhash64(utc.astimezone(dt.timezone(dt.timedelta(hours=-4))))


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (None, NullKey),
        (("a", None), NullKey),
        (1 << 63, UnsupportedKeyType),
        (-(1 << 63) - 1, UnsupportedKeyType),
        (math.nan, UnsupportedKeyType),
        (dt.datetime(2013, 1, 1), UnsupportedKeyType),
        (["a"], UnsupportedKeyType),
        (1j, UnsupportedKeyType),
        (object(), UnsupportedKeyType),
    ],
)
def test_keys_that_cannot_be(key: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        partition_of(key, 8)


columns = (
    st.text()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.binary()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.dates()
    | st.datetimes(timezones=st.just(UTC))
)


@given(st.tuples(columns) | st.tuples(columns, columns), st.integers(1, PARTITIONS_MAX))
def test_in_range_and_the_same_every_time(key: tuple[Any, ...], partitions: int) -> None:
    partition = partition_of(key, partitions)
    assert 0 <= partition < partitions
    assert partition == partition_of(key, partitions) == spark_xxhash64(*key) % partitions
    assert -(1 << 63) <= spark_xxhash64(*key) < 1 << 63


def test_keys_spread_over_all_partitions() -> None:
    counts = [0] * 16
    for number in range(4096):
        counts[partition_of(f"N{number}", 16)] += 1
    assert min(counts) > 180  # 256 expected
    assert max(counts) < 340


def test_partition_counts() -> None:
    assert check_partitions(1) == 1
    assert check_partitions(PARTITIONS_MAX) == PARTITIONS_MAX == 65_536
    for count in (0, -1, PARTITIONS_MAX + 1):
        with pytest.raises(InvalidArgument):
            check_partitions(count)


def test_text_that_is_none_is_said() -> None:
    with pytest.raises(EncodeError, match="surrogates not allowed"):
        partition_of("\ud800", 8)
