"""Standalone TrackedMap and TrackedSet against dict and set: results, errors, net changes."""

from __future__ import annotations

import copy
import operator
from datetime import UTC, timedelta, timezone
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.state import (
    Decimal,
    Float64,
    Int64,
    TrackedMap,
    TrackedSet,
    TrackedValue,
    Utf8,
    coder_for,
    decode_row_key,
    encode_row_key,
)
from tests.sizes import sized

NAMES = st.sampled_from(["a", "b", "c", "d"])
VALUES = st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2)


def outcome(call: Any) -> Any:
    try:
        return call()
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        return type(error)


def same_shape(got: Any) -> Any:
    """Converts tracked maps and sets to plain dicts and sets."""
    if isinstance(got, TrackedMap | TrackedSet):
        return got.copy()
    return got


MAP_CALLS: list[Any] = [
    lambda m, k, v: m[k],
    lambda m, k, v: m.__setitem__(k, copy.copy(v)),
    lambda m, k, v: m.__delitem__(k),
    lambda m, k, v: m.get(k, v),
    lambda m, k, v: m.pop(k),
    lambda m, k, v: m.pop(k, v),
    lambda m, k, v: m.setdefault(k, copy.copy(v)),
    lambda m, k, v: m.update({k: copy.copy(v)}),
    lambda m, k, v: m.update([(k, copy.copy(v))], z=1),
    lambda m, k, v: m.update(v),
    lambda m, k, v: m.clear(),
    lambda m, k, v: k in m,
    lambda m, k, v: [] in m,
    lambda m, k, v: m[k].append(7),
    lambda m, k, v: m.items() & {(k, 1): 0}.keys() if all(isinstance(x, int) for x in m.values()) else None,
    lambda m, k, v: m.keys() - {k},
    lambda m, k, v: dict(m | {k: v}),
    lambda m, k, v: {k: v} | m,
    lambda m, k, v: m | [(k, v)],
    lambda m, k, v: operator.ior(m, [(k, copy.copy(v))]),
    lambda m, k, v: m == {k: v},
    lambda m, k, v: {k: v} == m,
    lambda m, k, v: len(m),
    lambda m, k, v: [m.__setitem__(k + k, v) for _ in m],
    lambda m, k, v: [m.__setitem__(x, copy.copy(v)) for x in m],
    lambda m, k, v: hash(m),
    lambda m, k, v: copy.deepcopy(m),
]


@settings(max_examples=sized(300))
@given(
    start=st.dictionaries(NAMES, VALUES),
    calls=st.lists(st.tuples(st.sampled_from(MAP_CALLS), NAMES, VALUES), max_size=15),
)
def test_map_does_what_dict_does(start: dict[str, Any], calls: list[Any]) -> None:
    real, want = TrackedMap(copy.deepcopy(start)), copy.deepcopy(start)
    for call, key, value in calls:
        got, wanted = outcome(partial(call, real, key, value)), outcome(partial(call, want, key, value))
        assert same_shape(got) == same_shape(wanted)
        assert real == want
        assert repr(real) == repr(dict(sorted(want.items())))
        assert [*reversed(real.values())] == [want[key] for key in sorted(want, reverse=True)]
    assert real.changes() == {
        "put": {key: value for key, value in want.items() if start.get(key) != value},
        "deleted": sorted(start.keys() - want.keys()),
    }
    real.mark_clean()
    assert real.changes() == {"put": {}, "deleted": []}


SET_CALLS: list[Any] = [
    lambda s, x, other: s.add(x),
    lambda s, x, other: s.remove(x),
    lambda s, x, other: s.discard(x),
    lambda s, x, other: x in s,
    lambda s, x, other: [] in s,
    lambda s, x, other: s.add([]),
    lambda s, x, other: s.discard({x}),
    lambda s, x, other: s.clear(),
    lambda s, x, other: s.update(other, [x]),
    lambda s, x, other: s.difference_update(other),
    lambda s, x, other: s.difference_update(s),
    lambda s, x, other: s.intersection_update(other, {x}),
    lambda s, x, other: s.symmetric_difference_update(other),
    lambda s, x, other: s.symmetric_difference_update(s),
    lambda s, x, other: s.union(other, [x]),
    lambda s, x, other: s.intersection(other),
    lambda s, x, other: s.difference(other, [x]),
    lambda s, x, other: s.symmetric_difference(other),
    lambda s, x, other: s.isdisjoint(other),
    lambda s, x, other: s.issubset(other),
    lambda s, x, other: s.issuperset(other),
    lambda s, x, other: [s.discard(y) for y in s],
    lambda s, x, other: hash(s),
    lambda s, x, other: operator.ior(s, list(other)),
    *(
        lambda s, x, other, op=op, flip=flip: op(set(other), s) if flip else op(s, set(other))
        for op in (
            *(operator.or_, operator.and_, operator.sub, operator.xor),
            *(operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne),
            *(operator.ior, operator.iand, operator.isub, operator.ixor),
        )
        for flip in (False, True)
    ),
    lambda s, x, other: s | [x],
    lambda s, x, other: s < 3,
]
MEMBERS = st.integers(0, 4)


@settings(max_examples=sized(300))
@given(
    start=st.sets(MEMBERS),
    calls=st.lists(st.tuples(st.sampled_from(SET_CALLS), MEMBERS, st.frozensets(MEMBERS)), max_size=15),
)
def test_set_does_what_set_does(start: set[int], calls: list[Any]) -> None:
    real, want = TrackedSet(start), set(start)
    for call, member, other in calls:
        got = outcome(partial(call, real, member, other))
        assert got is real or not isinstance(got, TrackedSet)
        assert same_shape(got) == outcome(partial(call, want, member, other))
        assert real == want
        assert list(real) == sorted(want)
        assert eval(repr(real)) == want
    assert real.changes() == {"added": want - start, "removed": start - want}
    real.mark_clean()
    assert real.changes() == {"added": set(), "removed": set()}


@given(start=VALUES, values=st.lists(VALUES))
def test_value_is_a_variable(start: Any, values: list[Any]) -> None:
    real = TrackedValue(copy.deepcopy(start))
    for value in values:
        real.value = value
        assert real.value is value
    last = values[-1] if values else start
    assert real.changes() == ({} if last == start else {"put": last})


FINITE = st.floats(allow_nan=False, allow_infinity=False)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
WHOLE = st.integers(-(2**63), 2**63 - 1)
SIMPLE_KEYS = st.one_of(
    *(WHOLE, st.text(), st.binary(), st.booleans(), FINITE, DECIMALS, st.uuids(), st.dates(), st.datetimes()),
    st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-5))])).filter(lambda at: 2 < at.year < 9998),
)
ROW_KEYS = st.recursive(SIMPLE_KEYS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


@settings(max_examples=sized(300))
@given(ROW_KEYS)
def test_row_keys_round_trip(key: Any) -> None:
    back = decode_row_key(encode_row_key(key))
    assert back == key
    assert type(back) is type(key)
    assert encode_row_key(back) == encode_row_key(key)


@settings(max_examples=sized(300))
@given(ROW_KEYS, ROW_KEYS)
def test_row_keys_collide_only_when_they_are_the_same(one: Any, other: Any) -> None:
    if encode_row_key(one) == encode_row_key(other):
        assert one == other
        assert type(one) is type(other)


def in_order(coder: Any, one: Any, other: Any) -> bool:
    first, second = coder.encode_key(one), coder.encode_key(other)
    return ((one < other) == (first < second)) and ((one == other) == (first == second))


@given(WHOLE, WHOLE)
def test_int_keys_are_ordered(one: int, other: int) -> None:
    assert in_order(Int64(), one, other)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_float_keys_are_ordered(one: float, other: float) -> None:
    assert in_order(Float64(), one, other)


@given(DECIMALS, DECIMALS)
def test_decimal_keys_are_ordered(one: Any, other: Any) -> None:
    assert in_order(Decimal(), one, other)


@given(st.text(), st.text())
def test_text_keys_are_ordered(one: str, other: str) -> None:
    assert in_order(Utf8(), one, other)


PAIRS = st.tuples(st.text("\x00\x01\xff", max_size=3), st.integers(-300, 300))


@given(PAIRS, PAIRS)
def test_tuple_keys_are_ordered_and_come_back(one: Any, other: Any) -> None:
    coder = coder_for(tuple[str, int])
    assert in_order(coder, one, other)
    assert coder.decode_key(coder.encode_key(one)) == one


RUNS = st.lists(st.binary(max_size=3)).map(tuple)


@given(RUNS, RUNS)
def test_tuples_of_any_length_are_ordered(one: Any, other: Any) -> None:
    coder = coder_for(tuple[bytes, ...])
    assert in_order(coder, one, other)
    assert coder.decode_key(coder.encode_key(one)) == one


PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), FINITE, st.text(), st.binary(), st.uuids(), st.dates(), DECIMALS
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3),
        st.sets(st.text() | st.tuples(st.integers(), st.text()), max_size=3),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_data_round_trips_with_its_types(value: Any) -> None:
    coder = coder_for(Any)
    data = coder.encode(value)
    back = coder.decode(data)
    assert back == value
    assert type(back) is type(value)
    assert coder.encode(back) == data
