"""Rows of a batch by partition: a selection of them, replacements, and messages of bounded size."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from stateflow.operator.arrow import read_batch
from stateflow.rpc.apply import BatchRows
from tests.applying import rows_of

SCHEMA = pa.schema([("v", pa.int64()), ("text", pa.string())])


def made(rows: dict[int, list[int]]) -> BatchRows:
    return rows_of(
        {p: pa.record_batch([pa.array(v, pa.int64()), ["." * x for x in v]], schema=SCHEMA) for p, v in rows.items()},
        SCHEMA.serialize().to_pybytes(),
    )


def values(rows: BatchRows) -> dict[int, list[int]]:
    whole = [] if rows.rows is None else rows.rows["v"].to_pylist()
    bounds = [0, *rows.ends]
    return {p: whole[start:stop] for p, start, stop in zip(rows, bounds, rows.ends, strict=False)}


def random_rows(random: Random) -> dict[int, list[int]]:
    chosen = random.sample(range(20), random.randrange(1, 12))
    return {p: [random.randrange(50) for _ in range(random.choice((0, 1, 1, 3, 20)))] for p in sorted(chosen)}


def test_some_of_them_are_those_and_no_others() -> None:
    random = Random(5)
    for _ in range(100):
        rows = random_rows(random)
        chosen = random.sample(list(rows), random.randrange(len(rows) + 1))
        some = made(rows).only(chosen)
        assert values(some) == {p: rows[p] for p in sorted(chosen)}
        assert some == made({p: rows[p] for p in sorted(chosen)}), "known again, whatever they were taken from"
        assert some.size <= made(rows).size, "the others are not kept with them"


def test_what_comes_later_takes_the_place_of_what_was_there() -> None:
    random = Random(6)
    for _ in range(100):
        old, new = random_rows(random), random_rows(random)
        merged = made(old).merged(made(new))
        assert merged is not None
        assert values(merged) == dict(sorted({**old, **new}.items()))


def test_rows_of_two_schemas_are_not_put_together() -> None:
    other = rows_of({1: pa.record_batch([[1]], names=["other"])})
    assert made({0: [1], 1: [2]}).merged(other) is None
    assert made({1: [2]}).merged(other) is other


@pytest.mark.parametrize("bytes_max", [64, 300, 5_000])
def test_messages_are_bounded_and_hold_all_of_it(bytes_max: int) -> None:
    random = Random(7)
    for _ in range(50):
        rows = random_rows(random)
        batch = made(rows)
        found: dict[int, list[int]] = {}
        for frame in batch.frames(bytes_max):
            read = read_batch(frame.message, SCHEMA)["v"].to_pylist()
            assert len(read) == sum(frame.counts)
            assert len(frame.partitions) == 1 or batch.only(frame.partitions).size <= bytes_max + len(batch.schema) + 16
            for partition, count in zip(frame.partitions, frame.counts, strict=True):
                found[partition], read = read[:count], read[count:]
        assert found == rows
        assert list(found) == sorted(found)


def test_what_was_sent_is_told_from_anything_else() -> None:
    several = [made({0: [1], 1: [2]}), made({0: [1, 2], 1: []}), made({0: [1], 2: [2]}), made({0: [1], 1: [3]})]
    several += [BatchRows.visit([0, 1]), BatchRows.visit([0])]
    assert len({each.digest for each in several}) == len(several)
    assert made({0: [1], 1: [2]}) == several[0]
