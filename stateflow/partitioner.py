"""Computes the partition of a key, ``pmod(xxhash64(key…), P)``, exactly as Spark SQL does.

Spark hashes one column after the other, starts with seed 42, uses each hash as the seed of the next column, and skips
nulls (org.apache.spark.sql.catalyst.expressions.XxHash64). Here every integral type of Spark is hashed as a 64-bit
long; :func:`stateflow.spark.apply_operator` casts shorter ones before it hashes, so that Python, which has only
``int``, and the JVM agree.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from typing import Any, SupportsIndex

import xxhash

from stateflow.errors import EncodeError, InvalidArgument, NullKey, UnsupportedKeyType
from stateflow.types import PARTITIONS_MAX, shown

SPARK_SEED = 42
_LONG = struct.Struct("<q").pack
_INT = struct.Struct("<i").pack
_DOUBLE = struct.Struct("<d").pack
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


def _column_bytes(value: Any) -> bytes:
    """Returns the bytes that Spark feeds to XXH64 for one column."""
    match value:
        case str():
            return value.encode("utf-8")
        case bool():
            return _INT(int(value))
        case int():
            return _LONG(value)
        case bytes():
            return value
        case float():
            if math.isnan(value):
                raise UnsupportedKeyType("NaN cannot be a key", remedy="filter out such rows before the operator")
            return _DOUBLE(value + 0.0)  # -0.0 + 0.0 is 0.0, as in Spark
        case dt.datetime():
            if value.tzinfo is None:
                raise UnsupportedKeyType("a timestamp key needs a time zone", remedy="use aware datetimes")
            return _LONG((value - _EPOCH) // _MICROSECOND)
        case dt.date():
            return _INT(value.toordinal() - _EPOCH_DAY)
        case None:
            raise NullKey("a key column is null", remedy="filter out such rows, or coalesce the column to a value")
        case _:
            raise UnsupportedKeyType(
                f"a value of type {type(value).__name__} cannot be a key",
                remedy="use string, integer, binary, boolean, double, date or timestamp columns",
            )


def spark_xxhash64(*columns: Any) -> int:
    """Returns the signed 64-bit hash that Spark SQL ``xxhash64(columns…)`` computes. Ints are hashed as longs.

    Raises NullKey for None, UnsupportedKeyType for other types or ints beyond 64 bits, and EncodeError for text with
    half a surrogate pair.
    """
    seed = SPARK_SEED
    for column in columns:
        try:
            seed = xxhash.xxh64_intdigest(_column_bytes(column), seed)
        except UnicodeEncodeError as error:
            raise EncodeError(
                f"a key is not valid text: {error.reason}",
                remedy="use a binary key for bytes that are not UTF-8",
                key=shown(column),
            ) from None
        except struct.error:
            raise UnsupportedKeyType(
                "an integer key does not fit 64 bits", remedy="use a string or binary key", key=column
            ) from None
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def partition_of(key: Any, partitions: int) -> int:
    """Returns the partition of a key in ``range(partitions)``; a tuple is a multi-column key."""
    columns = key if isinstance(key, tuple) else (key,)
    return spark_xxhash64(*columns) % partitions


def check_belongs(partition: int, partitions: int, key: Any) -> None:
    """Checks that a key belongs to a partition, because state stored in a wrong partition would never be found.

    Raises InvalidArgument.
    """
    found = partition_of(key, partitions)
    if found != partition:
        raise InvalidArgument(
            f"the key was sent to the wrong partition, it belongs to partition {found} of {partitions}",
            remedy="route rows by stateflow.partitioner.partition_of, or send them with StreamClient or Spark",
            key=shown(key),
            partition=partition,
        )


def check_partitions(partitions: int) -> int:
    if not isinstance(partitions, SupportsIndex) or not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidArgument(
            f"invalid number of partitions: {partitions!r}", remedy=f"use 1 to {PARTITIONS_MAX}; 128 is the default"
        )
    return partitions
