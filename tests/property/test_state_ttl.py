"""States with a ttl, lists, reducing states and namespaces against plain Python objects that note when they expire."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stateflow import state
from stateflow.changes import Mutations
from stateflow.state import CachePool, KeyedState, Namespace, declarations_of, scan_entries
from stateflow.state.cells import split_address
from tests.sizes import sized

TTL = 100
#: a read with less than this left before expiry is written down
LATE = 90
TTL_OF: dict[str, Any] = {"ttl": timedelta(microseconds=TTL)}
KEPT: dict[str, Any] = {**TTL_OF, "ttl_refresh": "read_write"}


class Store:
    def __init__(self) -> None:
        self.cells: dict[bytes, bytes] = {}

    def get(self, cell: bytes) -> bytes | None:
        return self.cells.get(cell)

    def scan(self, prefix: bytes) -> Any:
        return iter(sorted(item for item in self.cells.items() if item[0].startswith(prefix)))

    def scan_from(self, start: bytes, end: bytes) -> Any:
        return iter(sorted(item for item in self.cells.items() if start <= item[0] < end))

    def apply(self, mutations: Mutations) -> None:
        for start, end in mutations.clears:
            for cell in [cell for cell in self.cells if start <= cell < end]:
                del self.cells[cell]
        for cell in mutations.deletes:
            del self.cells[cell]
        self.cells.update(mutations.puts)


class OldStore(Store):
    scan_from = None  # type: ignore[assignment]


class Op:
    v = state.value(int, default=7, **TTL_OF)
    vr = state.value(list, **KEPT)
    vd = state.value(list, default=[0], **TTL_OF)
    vi = state.value(int, default=0, **KEPT)
    n = state.counter(**TTL_OF)
    r = state.reducing(int, max)
    rl = state.reducing(list, lambda one, other: one + other, **KEPT)
    m = state.map(str, int, **TTL_OF)
    mr = state.map(str, list, **KEPT)
    s = state.set(float, **TTL_OF)
    sr = state.set(int, **KEPT)
    li = state.list(int, **TTL_OF)
    lr = state.list(list, **KEPT)
    plain = state.list(int)
    e = state.map(str, int, ttl_domain="event", **TTL_OF)


STATES: dict[str, Any] = declarations_of(Op)
TAGS: dict[str, Any] = {"t": state.map(str, int, name="t", **TTL_OF), "u": state.value(str, name="u")}
ALL: dict[str, Any] = {**STATES, **TAGS}
VALUES, MAPS, SETS = ["v", "vr", "vd", "vi", "n", "r", "rl", "u"], ["m", "mr", "e", "t"], ["s", "sr"]
LISTS = ["li", "lr", "plain"]
REFRESHED = {"vr", "vi", "rl", "mr", "sr", "lr"}
MUTABLE = {"vr", "vd", "rl", "mr", "lr"}
UNSET: dict[str, Any] = {"v": 7, "n": 0, "vi": 0, "vd": [0]}

KEYS = st.sampled_from(["a", "a", "a", "b"])
NAMESPACES = st.sampled_from([b"", b"", b"", Namespace.window(0, 10)])
NAMES = st.sampled_from(["p", "q", "r", "s"])
INTS = st.integers(0, 3)


def of(name: str, value: int) -> Any:
    """Makes a value for a state."""
    return [value] if name in MUTABLE else str(value) if name == "u" else value


class Timed(RuleBasedStateMachine):
    @initialize(
        cached=st.sampled_from([0, 1, 100]),
        entries=st.sampled_from([0, 3, 1000]),
        cache_bytes=st.sampled_from([None, 0, 3000]),
        event=st.sampled_from([None, 0]),
        old=st.booleans(),
    )
    def start(self, cached: int, entries: int, cache_bytes: int | None, event: int | None, old: bool) -> None:
        self.sizes: Any = {
            "cached_keys": cached,
            "cached_entries": entries,
            "cache": None if cache_bytes is None else CachePool(cache_bytes),
        }
        self.store = OldStore() if old else Store()
        self.now, self.event = 1_000, event
        #: (key, namespace, state) → [[value, expiry], …] by entry: a list for lists, else a dict
        self.want: dict[Any, Any] = {}
        self.committed: dict[Any, Any] = {}
        self.key, self.space = "a", b""
        self.open()

    def open(self) -> None:
        self.keyed = KeyedState("op", STATES, self.store, **self.sizes)
        self.keyed.set_time(self.now, self.event)
        self.op: Any = Op()

    # --- the two sides ---

    def real(self, name: str) -> Any:
        if not self.space and name in STATES and self.now % 2:
            self.keyed.bind(self.op, self.key)
            return getattr(self.op, name)
        return self.keyed.at(self.key, self.space, ALL[name])

    def model(self, name: str) -> Any:
        return self.want.setdefault((self.key, self.space, name), [] if name in LISTS else {})

    def time_of(self, name: str) -> int | None:
        return self.event if name == "e" else self.now

    def entry(self, name: str, value: Any) -> list[Any]:
        """Makes the entry that a write stores."""
        now = self.time_of(name)
        return [value, None if ALL[name].ttl is None or now is None else now + TTL]

    def read(self, name: str, entry: list[Any]) -> Any:
        """Reads an entry, and refreshes its expiry where the state asks for it."""
        if name in REFRESHED and entry[1] - self.now < LATE:
            entry[1] = self.now + TTL
        return entry[0]

    def purge(self) -> None:
        for (_, _, name), held in self.want.items():
            now = self.time_of(name)
            if now is None:
                continue
            if name in LISTS:
                held[:] = [each for each in held if each[1] is None or each[1] > now]
            else:
                for key in [key for key, each in held.items() if each[1] is not None and each[1] <= now]:
                    del held[key]

    # --- keys and namespaces ---

    @rule(key=KEYS, space=NAMESPACES)
    def go(self, key: str, space: bytes) -> None:
        self.key, self.space = key, space

    # --- values ---

    @rule(name=st.sampled_from(VALUES))
    def look(self, name: str) -> None:
        held = self.model(name)
        want = self.read(name, held[0]) if held else UNSET.get(name)
        assert self.real(name).value == want

    @rule(name=st.sampled_from(["v", "vr", "vd", "vi", "n", "u"]), x=INTS)
    def assign(self, name: str, x: int) -> None:
        self.real(name).value = of(name, x)
        self.model(name)[0] = self.entry(name, of(name, x))

    @rule(x=INTS)
    def count(self, x: int) -> None:
        held = self.model("n")
        self.real("n").add(x)
        self.model("n")[0] = self.entry("n", (held[0][0] if held else 0) + x)

    @rule(x=INTS)
    def reduce(self, x: int) -> None:
        for name, join in (("r", max), ("rl", lambda one, other: one + other)):
            self.real(name).add(of(name, x))
            held = self.model(name)
            held[0] = self.entry(name, join(held[0][0], of(name, x)) if held else of(name, x))

    @rule(x=INTS)
    def append_in_place(self, x: int) -> None:
        for name in ("vr", "vd"):
            held = self.model(name)
            if held or name in UNSET:
                self.real(name).value.append(x)
                held[0] = self.entry(name, [*(held[0][0] if held else UNSET[name]), x])

    @rule(x=INTS)
    def default_again(self, x: int) -> None:
        """Changes a state's default in place, before and after it expires."""
        self.clear("vd")
        self.append_in_place(x)
        self.tick(100)
        self.append_in_place(x)

    @rule(name=st.sampled_from(sorted(ALL)))
    def clear(self, name: str) -> None:
        self.real(name).clear()
        self.model(name).clear()

    # --- maps ---

    @rule(name=st.sampled_from(MAPS), k=NAMES, x=INTS)
    def put(self, name: str, k: str, x: int) -> None:
        self.real(name)[k] = of(name, x)
        self.model(name)[k] = self.entry(name, of(name, x))

    @rule(name=st.sampled_from(MAPS), k=NAMES)
    def get(self, name: str, k: str) -> None:
        held = self.model(name)
        assert self.real(name).get(k) == (self.read(name, held[k]) if k in held else None)
        assert (k in self.real(name)) == (k in held)

    @rule(name=st.sampled_from(MAPS), k=NAMES)
    def remove(self, name: str, k: str) -> None:
        held = self.model(name)
        gone = held.pop(k, [None])[0]
        assert self.real(name).pop(k, None) == gone

    @rule(k=NAMES, x=INTS)
    def append_to_entry(self, k: str, x: int) -> None:
        held = self.model("mr")
        self.real("mr").setdefault(k, []).append(x)
        held[k] = self.entry("mr", [*(held[k][0] if k in held else []), x])

    @rule(name=st.sampled_from(MAPS))
    def walk(self, name: str) -> None:
        held = self.model(name)
        want = {k: self.read(name, held[k]) for k in sorted(held)}
        assert list(self.real(name).items()) == list(want.items())
        assert self.real(name) == want

    @rule(name=st.sampled_from(MAPS + SETS + LISTS))
    def measure(self, name: str) -> None:
        assert len(self.real(name)) == len(self.model(name))

    # --- sets ---

    @rule(name=st.sampled_from(SETS), x=INTS)
    def add(self, name: str, x: int) -> None:
        self.real(name).add(x)
        self.model(name)[x] = self.entry(name, None)

    @rule(name=st.sampled_from(SETS), x=INTS)
    def ask(self, name: str, x: int) -> None:
        held = self.model(name)
        assert (x in self.real(name)) == (x in held)
        if x in held:
            self.read(name, held[x])

    @rule(name=st.sampled_from(SETS), x=INTS)
    def discard(self, name: str, x: int) -> None:
        self.real(name).discard(x)
        self.model(name).pop(x, None)

    @rule(name=st.sampled_from(SETS))
    def members(self, name: str) -> None:
        held = self.model(name)
        for each in held.values():
            self.read(name, each)
        assert list(self.real(name)) == sorted(held)

    # --- lists ---

    @rule(name=st.sampled_from(LISTS), x=INTS)
    def append(self, name: str, x: int) -> None:
        self.real(name).append(of(name, x))
        self.model(name).append(self.entry(name, of(name, x)))

    @rule(name=st.sampled_from(LISTS), at=st.integers(0, 4), x=INTS)
    def insert(self, name: str, at: int, x: int) -> None:
        held = self.model(name)
        self.real(name).insert(at, of(name, x))
        if 0 < at < len(held):  # elements that shift count as written
            held[at:] = [self.entry(name, value) for value, _ in held[at:]]
        held.insert(at, self.entry(name, of(name, x)))

    @rule(name=st.sampled_from(LISTS), at=st.integers(-3, 3), x=INTS)
    def assign_element(self, name: str, at: int, x: int) -> None:
        held = self.model(name)
        if -len(held) <= at < len(held):
            self.real(name)[at] = of(name, x)
            held[at] = self.entry(name, of(name, x))

    @rule(name=st.sampled_from(LISTS), at=st.integers(-3, 3))
    def element(self, name: str, at: int) -> None:
        held = self.model(name)
        if -len(held) <= at < len(held):
            assert self.real(name)[at] == self.read(name, held[at])

    @rule(name=st.sampled_from(LISTS), at=st.integers(-3, 3))
    def pop(self, name: str, at: int) -> None:
        held = self.model(name)
        if -len(held) <= at < len(held):
            assert self.real(name).pop(at) == held.pop(at)[0]

    @rule(name=st.sampled_from(LISTS))
    def elements(self, name: str) -> None:
        want = [self.read(name, each) for each in self.model(name)]
        assert list(self.real(name)) == want
        assert self.real(name) == want

    # --- batches ---

    @rule()
    def commit(self) -> None:
        mutations = self.keyed.collect()
        assert self.keyed.collect() == mutations
        if not mutations.clears:
            assert all(self.store.cells.get(cell) != data for cell, data in mutations.puts)
        self.store.apply(mutations)
        self.keyed.mark_clean()
        self.committed = copy.deepcopy(self.want)

    @rule(by=st.sampled_from([1, 10, 11, 50, 89, 99, 100, 130]))
    def tick(self, by: int) -> None:
        self.commit()
        self.now += by
        if self.event is not None:
            self.event += by // 2
        self.keyed.set_time(self.now, self.event)
        self.purge()

    @rule()
    def rollback(self) -> None:
        self.keyed.rollback()
        self.want = copy.deepcopy(self.committed)
        self.purge()

    @rule()
    def invalidate(self) -> None:
        self.keyed.invalidate()
        self.want = copy.deepcopy(self.committed)
        self.purge()

    @rule()
    def reopen(self) -> None:
        self.commit()
        self.open()

    @rule(limit=st.integers(0, 9), alone=st.booleans())
    def sweep(self, limit: int, alone: bool) -> None:
        if alone:
            self.commit()
        mutations = self.keyed.expired(limit)
        if not alone:
            mutations = self.keyed.collect()
        else:
            dropped = [cell for cell in mutations.deletes if cell[:1] == b"c"]
            assert len({(cell[1:9], *split_address(cell)[:2]) for cell in dropped}) <= limit, "objects, not entries"
        self.store.apply(mutations)
        self.keyed.mark_clean()
        self.committed = copy.deepcopy(self.want)

    @rule()
    def clear_namespace(self) -> None:
        self.keyed.clear_namespace(self.key, self.space)
        for key, space, name in self.want:
            if (key, space) == (self.key, self.space):
                self.want[key, space, name].clear()

    @rule(x=INTS, again=st.booleans())
    def clear_what_nobody_knows(self, x: int, again: bool) -> None:
        """Clears a namespace that holds cells of a tag that this process has not met."""
        self.put("t", "p", x)
        self.assign("u", x)
        self.reopen()
        self.clear_namespace()
        if again:
            self.put("t", "p", x)
            self.put("t", "q", x)
            self.assign("u", x)
            self.commit()

    @invariant()
    def this_place_is_as_expected(self) -> None:
        if hasattr(self, "keyed"):
            held = self.model("v")
            assert self.real("v").value == (held[0][0] if held else 7)
            assert len(self.real("m")) == len(self.model("m"))

    def teardown(self) -> None:
        if not hasattr(self, "keyed"):
            return
        self.commit()
        self.now += 1
        self.open()
        self.purge()
        for name, declaration in ALL.items():
            times = {"processing_us": self.now, "event_us": self.event}
            stored: dict[Any, Any] = {}
            for each in scan_entries(declaration, self.store, **times):
                where = 0 if each.entry is None else each.entry
                stored.setdefault((each.key, bytes(each.namespace), name), {})[where] = [each.value, each.expiry_us]
            want = {place: held for place, held in self.want.items() if place[2] == name and held}
            assert stored == {
                (key, bytes(space), _): dict(enumerate(held)) if name in LISTS else held
                for (key, space, _), held in want.items()
            }
        for _ in range(len(self.store.cells) // 7 + 1):
            self.store.apply(self.keyed.expired(7))
            self.keyed.mark_clean()
        live = sum(len(held) for held in self.want.values())
        assert live == len([cell for cell in self.store.cells if cell[:1] == b"c"])
        collections = [held for (_, _, name), held in self.want.items() if name in MAPS + SETS + LISTS and held]
        assert len(collections) == len([cell for cell in self.store.cells if cell[:1] == b"n"])


TestTimed = Timed.TestCase
TestTimed.settings = settings(max_examples=sized(500), stateful_step_count=50)
