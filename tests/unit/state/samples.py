"""States of every kind with every coder, and what the fixtures in ``fixtures/`` hold of them.

``python -m tests.unit.state.samples`` writes the fixture of the present format; a released format keeps its file.
"""

from __future__ import annotations

import dataclasses
import operator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgpack

from stateflow import state
from stateflow.state import KeyedState, Namespace, declarations_of
from tests.unit.state.dict_store import DictStore

FIXTURE = Path(__file__).parent / "fixtures" / "format-1.msgpack"
#: time of the batch that wrote the fixture, and of the one that reads it
WRITTEN_US, READ_US = 1_600_000_000_000_000, 1_600_000_005_000_000


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: int = 0


AT = datetime(2020, 2, 29, 12, 30, 15, 250_000, tzinfo=UTC)
#: declared type → samples; those of key types in order
KEYS: dict[str, tuple[Any, list[Any]]] = {
    "int64": (int, [-(2**63), -1, 0, 1, 2**63 - 1]),
    "float64": (float, [float("-inf"), -1.5, 0.0, 1e-300, 2.5]),
    "bool": (bool, [False, True]),
    "utf8": (str, ["", "a", "a\x00b", "é", "\U0001f600"]),
    "bytes": (bytes, [b"", b"\x00", b"a", b"\xff\xff"]),
    "timestamp": (datetime, [datetime(1969, 12, 31, tzinfo=UTC), AT]),
    "date": (date, [date(1, 1, 1), date(2020, 2, 29)]),
    "decimal": (Decimal, [Decimal("-12.5"), Decimal(0), Decimal("0.001"), Decimal("1E+30")]),
    "uuid": (UUID, [UUID(int=1), UUID(int=2**128 - 1)]),
    "tuple": (tuple[str, int], [("", -1), ("a", 1), ("a", 2), ("a\x00", 0)]),
    "tuples": (tuple[bytes, ...], [(), (b"",), (b"", b"\x00"), (b"a",)]),
}
PLAIN = [None, True, 1, -(2**70), 1.5, "a", b"b", [1], {"a": {1: 2}}, (1, "x"), {1, 2}, frozenset({"a"})]
PLAIN += [AT, datetime(2020, 1, 1), date(2020, 1, 1), Decimal("1.50"), UUID(int=5), bytearray(b"c")]
VALUES: dict[str, tuple[Any, list[Any]]] = {
    **KEYS,
    "msgpack": (list, [PLAIN, []]),
    "struct": (Point, [Point(1.5, 2), Point(-0.5)]),
    "structs": (dict[str, Point], [{"a": Point(2.5)}, {}]),
}
ROW_KEYS: list[Any] = [
    "N1",
    7,
    b"y",
    True,
    date(2020, 1, 1),
    AT,
    datetime(2020, 1, 1),
    1.5,
    Decimal("2.5"),
    UUID(int=3),
]
ROW_KEYS += [("N1", 2, (1.5, "x")), "", "long" * 50]


def every_state() -> type:
    states: dict[str, Any] = {}
    for name, (type_, _) in VALUES.items():
        states[f"value_{name}"] = state.value(type_)
        states[f"list_{name}"] = state.list(type_)
        states[f"map_to_{name}"] = state.map(str, type_)
    for name, (type_, _) in KEYS.items():
        states[f"map_{name}"] = state.map(type_, int)
        states[f"set_{name}"] = state.set(type_)
    states["top"] = state.reducing(int, max)
    states["words"] = state.reducing(list, operator.add)
    states["count"] = state.counter()
    for domain in ("processing", "event"):
        states[f"brief_{domain}"] = state.map(str, int, ttl=10, ttl_domain=domain)  # type: ignore[arg-type]
    states["brief_list"] = state.list(int, ttl=10)
    states["brief_value"] = state.value(str, ttl=4)
    states["slid"] = state.list(int)
    return type("Every", (), {name: _named(declaration, name) for name, declaration in states.items()})


def _named(declaration: Any, name: str) -> Any:
    declaration.name = name
    return declaration


TAG: Any = state.counter(name="tag")
WINDOW = Namespace.window(WRITTEN_US, READ_US)
EVERY = every_state()


def fill(op: Any) -> None:
    for name, (_, samples) in VALUES.items():
        getattr(op, f"value_{name}").value = samples[-1]
        getattr(op, f"list_{name}").extend(samples)
        getattr(op, f"map_to_{name}").update(zip("abcdefgh", samples, strict=False))
    for name, (_, samples) in KEYS.items():
        getattr(op, f"map_{name}").update({key: number for number, key in enumerate(samples)})
        getattr(op, f"set_{name}").update(samples)
    for number in (3, 5, 4):
        op.top.add(number)
        op.words.add([number])
        op.count.add(number)
    op.brief_processing.update(a=1, b=2)
    op.brief_event["a"] = 1
    op.brief_list += [1, 2]
    op.brief_value.value = "gone when read"
    op.slid += range(10)


def check(op: Any) -> None:
    """Asserts what is there at READ_US, after :func:`fill` and the little that :func:`write` adds at WRITTEN_US."""
    for name, (_, samples) in VALUES.items():
        assert repr(getattr(op, f"value_{name}").value) == repr(samples[-1]), name
        assert repr(getattr(op, f"list_{name}")) == repr(samples), name
        assert repr(getattr(op, f"map_to_{name}")) == repr(dict(zip("abcdefgh", samples, strict=False))), name
    for name, (_, samples) in KEYS.items():
        assert list(getattr(op, f"map_{name}").items()) == [(key, number) for number, key in enumerate(samples)], name
        assert list(getattr(op, f"set_{name}")) == samples, name
    assert (op.top.value, op.words.value, op.count.value) == (5, [3, 5, 4], 12)
    assert (op.brief_processing, op.brief_event, op.brief_list) == ({"a": 1, "b": 2}, {"a": 1}, [1, 2])
    assert op.brief_value.value is None
    assert op.slid == [3, 4, 5, 6, 7, 8, 9, 10]


def write() -> dict[bytes, bytes]:
    """Writes the fixture's states, and returns their cells."""
    store, op = DictStore(), EVERY()
    keyed = KeyedState("Every", declarations_of(EVERY), store)
    keyed.set_time(WRITTEN_US)
    keyed.bind(op, "N1")
    fill(op)
    for number, key in enumerate(ROW_KEYS):
        keyed.bind(op, key)
        op.value_int64.value = number
    keyed.at("N1", WINDOW, TAG).add(7)
    store.apply(keyed.collect())
    keyed.mark_clean()
    keyed.bind(op, "N1")
    op.value_int64.value = KEYS["int64"][1][-1]
    del op.slid[:3]
    op.slid.append(10)
    store.apply(keyed.collect())
    return dict(sorted(store.cells.items()))


if __name__ == "__main__":
    FIXTURE.write_bytes(msgpack.packb(write()))
