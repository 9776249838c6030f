"""CPython's own tests of dict, set and list against the tracked types: standing alone, and as state on both stores.

Differences stated in docs/state.md are listed below with their reasons, and those tests must fail. Skipped where the
interpreter came without its tests.
"""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stateflow.changes import Mutations
from stateflow.state import Coder, TrackedList, TrackedMap, TrackedSet, decode_row_key, encode_row_key
from stateflow.state.cells import row_part
from stateflow.state.coders import Int64
from stateflow.state.collection import Collection
from stateflow.state.tracked import StateSpec
from stateflow.storage import MemoryStore, PartitionStore, RocksEngine

mapping_tests = pytest.importorskip("test.mapping_tests", reason="this interpreter came without its tests")
list_tests = pytest.importorskip("test.list_tests", reason="this interpreter came without its tests")
test_set = pytest.importorskip("test.test_set", reason="this interpreter came without its tests")

_PLAIN = frozenset({str, int, float, bool, bytes})
_OBJECTS: list[Any] = []


class _Value(Coder[Any]):
    """Encodes a value as a row key, or as the number of an object in this process."""

    name = "anything"
    deterministic = True
    mutable = False

    def encode(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return b"k" + encode_row_key(value)
        return b"o" + self._number(value).to_bytes(4, "big")

    def _number(self, value: Any) -> int:
        _OBJECTS.append(value)
        return len(_OBJECTS) - 1

    def decode(self, data: bytes) -> Any:
        return decode_row_key(data[1:]) if data[:1] == b"k" else _OBJECTS[int.from_bytes(data[1:], "big")]


class _Key(_Value):
    """Encodes equal objects as one number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def _number(self, value: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = super()._number(value)
        return self._numbers[value]


_ROWS = itertools.count()


class Stored(Collection[Any]):
    """A collection that begins as a state read from a store."""

    __slots__ = ()
    store: ClassVar[PartitionStore]
    places: ClassVar[type[Coder[Any]]] = _Key

    def _start_standalone(self) -> None:
        self._spec = StateSpec("op", "s", _Value(), tag=b"12345678", key_coder=self.places(), reader=self.store)
        self._row = row_part(encode_row_key(next(_ROWS)))
        self._dirty = False
        self._reset()

    def mark_clean(self) -> None:
        mutations = Mutations()
        self._collect(mutations)
        self.store.apply(mutations)
        self._forget()
        self._spec.log.clear()


class StoredMap(Stored, TrackedMap[Any, Any]):
    __slots__ = ()


class StoredSet(Stored, TrackedSet[Any]):
    __slots__ = ()


class StoredList(Stored, TrackedList[Any]):
    __slots__ = ()
    places = Int64


NO_PICKLE = "nothing is ever pickled: copy() first"
#: kind → test → why it must fail
DIFFERENT: dict[str, dict[str, str]] = {
    "map": {"test_copy": "copy() gives a plain dict"},
    "list": {"test_pickle": NO_PICKLE},
    "set": {
        "test_pickling": NO_PICKLE,
        "test_iterator_pickling": NO_PICKLE,
        "test_weakref": "a tracked object takes no weak references",
        "test_cyclical_repr": "it expects the class's name around the members; they are written as a set's",
        "test_do_not_rehash_dict_keys": "how often members are hashed is not promised",
    },
}
#: class of CPython's tests, its name for the type, kind
SUITES: list[tuple[Any, str, str]] = [
    (mapping_tests.TestHashMappingProtocol, "type2test", "map"),
    (list_tests.CommonTest, "type2test", "list"),
    (test_set.TestSet, "thetype", "set"),
]
ALONE: dict[str, type] = {"map": TrackedMap, "set": TrackedSet, "list": TrackedList}
STORED: dict[str, type] = {"map": StoredMap, "set": StoredSet, "list": StoredList}


def on_store(backend: str) -> dict[str, type]:
    if backend == "memory":
        store: PartitionStore = MemoryStore()
    else:
        directory = tempfile.mkdtemp(prefix="stateflow-cpython-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        store = RocksEngine(8 << 20, 8 << 20).open(Path(directory) / "0", create=True)
    return {kind: type(cls.__name__, (cls,), {"store": store, "__slots__": ()}) for kind, cls in STORED.items()}


def suites() -> Iterator[type]:
    for where, types in (("Alone", ALONE), ("Memory", on_store("memory")), ("RocksDb", on_store("rocksdb"))):
        for base, attribute, kind in SUITES:
            own = {attribute: types[kind], "basetype": set, "__module__": __name__}
            different = {test: unittest.expectedFailure(getattr(base, test)) for test in DIFFERENT[kind]}
            yield type(f"Test{where}{kind.title()}", (base,), {**own, **different})


globals().update({suite.__name__: suite for suite in suites()})
