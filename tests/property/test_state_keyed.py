"""KeyedState against plain Python variables, with commits, rollbacks, eviction and reopening in between."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from backends import Backend
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stateflow import state
from stateflow.state import KeyedState, declarations_of, scan_state
from tests.sizes import sized


class Op:
    n = state.value(int, default=0)
    f = state.value(float)
    log = state.value(list, default=[1])
    m = state.map(str, int)
    mm = state.map(int, list)
    s = state.set(float)


STATES = declarations_of(Op)


def fresh() -> SimpleNamespace:
    return SimpleNamespace(n=0, f=None, log=[1], m={}, mm={}, s=set())


# few keys, so that they recur
KEYS = st.sampled_from(["a", "b"]) | st.sampled_from(["a", "b", "c", 1, True, 1.0, (1, "a"), (True, "a")])
TEXT = st.sampled_from(["", "a", "b", "ab", "\x00", "é"])
INTS = st.integers(-3, 3)
MEMBERS = st.one_of(INTS, st.sampled_from([-1.5, 0.5, 2.0**60]))
ODD = st.sampled_from([None, "x", 1.0, True, (1,), -2.0, b"a"])


def outcome(call: Any) -> Any:
    """Returns a call's result, or the class of its error."""
    try:
        return call()
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        return type(error)


class Keyed(RuleBasedStateMachine):
    backend: str

    @initialize(cached=st.sampled_from([0, 1, 2, 100]), entries=st.sampled_from([0, 3, 1000]))
    def start(self, cached: int, entries: int) -> None:
        self.sizes = {"cached_keys": cached, "cached_entries": entries}
        self.store = Backend(self.backend)
        self.keyed = KeyedState("op", STATES, self.store, **self.sizes)
        self.op = Op()
        #: by (type of key, key), as Python treats 1, 1.0 and True as one key
        self.now: dict[Any, tuple[Any, SimpleNamespace]] = {}
        self.committed: dict[Any, tuple[Any, SimpleNamespace]] = {}
        self.held: list[tuple[Any, SimpleNamespace]] = []
        self.bind("a")

    def model(self, key: Any) -> SimpleNamespace:
        return self.now.setdefault(repr(key), (key, fresh()))[1]

    def bind(self, key: Any) -> None:
        self.key = key
        self.keyed.bind(self.op, key)
        self.real: Any = self.op
        self.want = self.model(key)

    @rule(key=KEYS)
    def bind_key(self, key: Any) -> None:
        self.bind(key)

    @rule()
    def hold(self) -> None:
        """Keeps the tracked objects of this key, as a user may."""
        self.held = [*self.held, (self.key, SimpleNamespace(**{name: getattr(self.real, name) for name in STATES}))][
            -3:
        ]

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 2))
    def use_held(self, which: int) -> None:
        key, self.real = self.held[which % len(self.held)]
        self.key, self.want = key, self.model(key)

    # --- values ---

    @rule(x=INTS)
    def add_n(self, x: int) -> None:
        self.real.n.value += x
        self.want.n += x

    @rule(x=st.one_of(st.none(), INTS, st.just(0.5)))
    def set_f(self, x: Any) -> None:
        self.real.f.value = x
        self.want.f = x

    @rule(x=INTS)
    def set_n_blindly(self, x: int) -> None:
        self.real.n.value = x
        self.want.n = x

    @rule()
    def clear_values(self) -> None:
        self.real.n.clear()
        self.real.log.clear()
        self.want.n, self.want.log = 0, [1]

    @rule(x=INTS)
    def append_log(self, x: int) -> None:
        self.real.log.value.append(x)
        self.want.log.append(x)

    @rule()
    def pop_log(self) -> None:
        assert outcome(self.real.log.value.pop) == outcome(self.want.log.pop)

    @rule(x=st.lists(INTS, max_size=2))
    def set_log(self, x: list[int]) -> None:
        self.real.log.value = list(x)
        self.want.log = list(x)

    # --- map of ints ---

    @rule(k=TEXT, v=INTS)
    def put(self, k: str, v: int) -> None:
        self.real.m[k] = v
        self.want.m[k] = v

    @rule(k=TEXT | ODD)
    def read(self, k: Any) -> None:
        for ask in (lambda m: m[k], lambda m: m.get(k, 7), lambda m: k in m):
            assert outcome(lambda ask=ask: ask(self.real.m)) == outcome(lambda ask=ask: ask(self.want.m))

    @rule(k=TEXT | ODD)
    def remove(self, k: Any) -> None:
        assert outcome(lambda: self.real.m.__delitem__(k)) == outcome(lambda: self.want.m.__delitem__(k))

    @rule(k=TEXT, v=INTS)
    def put_and_remove(self, k: str, v: int) -> None:
        self.put(k, v)
        self.remove(k)

    @rule(new=st.dictionaries(TEXT, INTS, max_size=3))
    def update(self, new: dict[str, int]) -> None:
        self.real.m |= new
        self.want.m |= new

    @rule(again=st.booleans(), new=st.dictionaries(TEXT, INTS, max_size=2))
    def clear_map(self, again: bool, new: dict[str, int]) -> None:
        new = dict(self.want.m) | new if again else new
        self.real.m.clear()
        self.real.m.update(new)
        self.want.m = new

    @rule()
    def popitem(self) -> None:
        if self.want.m:
            k = max(self.want.m, key=str.encode)
            assert self.real.m.popitem() == (k, self.want.m.pop(k))
        else:
            assert outcome(self.real.m.popitem) is KeyError

    @rule()
    def iterate(self) -> None:
        keys = sorted(self.want.m, key=str.encode)
        assert list(self.real.m) == keys
        assert list(reversed(self.real.m.items())) == [(k, self.want.m[k]) for k in reversed(keys)]
        assert list(self.real.m.values()) == [self.want.m[k] for k in keys]

    @rule()
    def measure(self) -> None:
        assert len(self.real.m) == len(self.want.m)
        assert bool(self.real.s) == bool(self.want.s)

    # --- map of lists ---

    @rule(k=INTS | st.just(1.0), v=INTS)
    def append(self, k: Any, v: int) -> None:
        if k not in self.want.mm and isinstance(k, float):
            return  # a new key must be an int; test_tracked_map tests the refusal
        self.real.mm.setdefault(k, []).append(v)
        self.want.mm.setdefault(k, []).append(v)

    @rule(k=INTS)
    def take_back(self, k: int) -> None:
        for lists in (self.real.mm, self.want.mm):
            if lists.get(k):
                lists[k].pop()

    @rule(k=INTS | ODD)
    def pop(self, k: Any) -> None:
        assert outcome(lambda: self.real.mm.pop(k)) == outcome(lambda: self.want.mm.pop(k))

    @rule()
    def append_to_all(self) -> None:
        for value in self.real.mm.values():
            value.append(9)
        for value in self.want.mm.values():
            value.append(9)

    @rule()
    def alias(self) -> None:
        """One object is stored under two keys: from then on there are two independent copies."""
        shared: list[int] = [5]
        self.real.mm[1] = self.real.mm[2] = shared
        self.want.mm[1], self.want.mm[2] = [5], [5]
        self.commit()
        shared.append(6)

    # --- set ---

    @rule(x=MEMBERS)
    def add(self, x: Any) -> None:
        self.real.s.add(x)
        self.want.s.add(x)

    @rule(x=MEMBERS | ODD)
    def drop(self, x: Any) -> None:
        assert (x in self.real.s) == (x in self.want.s)
        assert outcome(lambda: self.real.s.remove(x)) == outcome(lambda: self.want.s.remove(x))

    @rule(other=st.sets(MEMBERS, max_size=3), how=st.sampled_from(["__ior__", "__iand__", "__isub__", "__ixor__"]))
    def combine(self, other: set[Any], how: str) -> None:
        getattr(self.real.s, how)(other)
        getattr(self.want.s, how)(other)

    @rule(other=st.sets(MEMBERS, max_size=3))
    def compare(self, other: set[Any]) -> None:
        assert self.real.s == self.want.s
        assert list(self.real.s) == sorted(self.want.s)
        assert (self.real.s <= other) == (self.want.s <= other)
        assert self.real.s & other == self.want.s & other

    @rule()
    def clear_set(self) -> None:
        self.real.s.clear()
        self.want.s.clear()

    # --- batches ---

    @rule()
    def collect_twice(self) -> None:
        first = self.keyed.collect()
        assert self.keyed.collect() == first

    @rule()
    def commit(self) -> None:
        mutations = self.keyed.collect()
        if not mutations.clears:
            # a put that changes nothing is no net effect
            assert all(self.store.get(cell) != data for cell, data in mutations.puts)
        assert all(self.store.get(cell) is not None for cell in mutations.deletes)
        assert len({cell for cell, _ in mutations.puts} | set(mutations.deletes)) == len(mutations.puts) + len(
            mutations.deletes
        )
        self.store.apply(mutations)
        self.keyed.mark_clean()
        self.committed = copy.deepcopy(self.now)
        self.bind(self.key)

    @rule()
    def rollback(self) -> None:
        self.keyed.rollback()
        self.now = copy.deepcopy(self.committed)
        self.bind(self.key)

    @rule()
    def invalidate(self) -> None:
        self.keyed.invalidate()
        self.now = copy.deepcopy(self.committed)
        self.bind(self.key)

    @rule()
    def reopen(self) -> None:
        self.keyed = KeyedState("op", STATES, self.store, **self.sizes)
        self.held = []
        self.now = copy.deepcopy(self.committed)
        self.bind(self.key)

    @rule()
    def checkpoint_and_restore(self) -> None:
        self.store.checkpoint_and_restore()
        self.reopen()

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule(new=st.dictionaries(TEXT, INTS, min_size=2), gone=st.lists(TEXT, max_size=2), lists=st.sets(INTS))
    def change_a_cold_map(self, new: dict[str, int], gone: list[str], lists: set[int]) -> None:
        """Changes entries before anything has loaded the others."""
        self.update(new)
        for key in lists:
            self.append(key, 0)
        self.commit()
        self.reopen()
        for name in gone:
            self.remove(name)
        for key in sorted(lists)[:1]:
            self.pop(key)

    @rule()
    def roll_back_to_nothing_new(self) -> None:
        self.rollback()
        assert not self.keyed.collect()

    @invariant()
    def this_key_is_as_expected(self) -> None:
        if hasattr(self, "want"):
            assert self.real.n.value == self.want.n
            assert len(self.real.mm) == len(self.want.mm)

    def teardown(self) -> None:
        if not hasattr(self, "keyed"):
            return
        self.commit()
        last = KeyedState("op", STATES, self.store)
        for key, want in self.committed.values():
            real = last.peek(key)
            assert (real.n.value, real.f.value, real.log.value) == (want.n, want.f, want.log)
            assert (real.m, real.mm, real.s) == (want.m, want.mm, want.s)
            assert not last.collect()
        stored = sorted(((repr(k), e, v) for k, e, v in scan_state(STATES["m"], self.store)), key=repr)
        assert stored == sorted(
            ((repr(key), e, v) for key, want in self.committed.values() for e, v in want.m.items()), key=repr
        )
        self.store.destroy()


class OnMemory(Keyed):
    backend = "memory"


class OnRocksDb(Keyed):
    backend = "rocksdb"


# 25,000 steps in memory, 10,000 on RocksDB
TestOnMemory = OnMemory.TestCase
TestOnMemory.settings = settings(max_examples=sized(500), stateful_step_count=50)
TestOnRocksDb = OnRocksDb.TestCase
TestOnRocksDb.settings = settings(max_examples=sized(200), stateful_step_count=50)
