"""Stored formats stay readable: the present code over cells that released formats left."""

from __future__ import annotations

import msgpack

from stateflow.state import KeyedState, declarations_of, scan_entries, stored_tags
from tests.unit.state import samples
from tests.unit.state.dict_store import DictStore


def opened(cells: dict[bytes, bytes]) -> KeyedState:
    store = DictStore()
    store.cells = dict(cells)
    keyed = KeyedState("Every", declarations_of(samples.EVERY), store)
    keyed.set_time(samples.READ_US)
    return keyed


FORMAT_1 = msgpack.unpackb(samples.FIXTURE.read_bytes())


def test_format_1_is_read() -> None:
    keyed, op = opened(FORMAT_1), samples.EVERY()
    keyed.bind(op, "N1")
    samples.check(op)
    for number, key in enumerate(samples.ROW_KEYS):
        if key != "N1":
            assert keyed.peek(key).value_int64.value == number
    assert keyed.at("N1", samples.WINDOW, samples.TAG).value == 7
    assert stored_tags(keyed._reader) == {samples.TAG.tag: samples.TAG.describe()}
    changed = keyed.collect()
    assert (len(changed.puts), len(changed.deletes)) == (0, 1)  # brief_value has expired


def test_format_1_is_scanned() -> None:
    keyed = opened(FORMAT_1)
    cells = 0
    for declaration in [*declarations_of(samples.EVERY).values(), samples.TAG]:
        entries = list(scan_entries(declaration, keyed._reader))
        assert entries, declaration
        cells += len(entries)
    assert cells == len([cell for cell in FORMAT_1 if cell[:1] == b"c"])


def test_format_1_is_what_is_written() -> None:
    """The same state has the same bytes; a change of them is a new format, which needs a fixture of its own."""
    assert samples.write() == FORMAT_1
