"""Values encoded and settled together equal values settled one by one: on disk, in memory and in errors."""

from __future__ import annotations

import operator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow import state
from stateflow.errors import StateflowError
from stateflow.state import KeyedState, keyed
from stateflow.state.coders import Int64
from stateflow.state.declare import declarations_of
from stateflow.storage import MemoryStore


class Doubled(Int64):
    """A user's own coder, derived from a built-in one."""

    name = "doubled"

    def encode(self, value: int) -> bytes:
        return super().encode(2 * value)

    def decode(self, data: bytes) -> int:
        return super().decode(data) // 2


class States:
    number = state.value(int)
    zero = state.value(int, default=0)
    real = state.value(float)
    text = state.value(str, default="none")
    blob = state.value(bytes)
    pair = state.value(tuple[int, float], default=(0, 0.0))
    twice = state.value(int, coder=Doubled())
    anything = state.value(list[int], default=[])
    brief = state.value(int, ttl=5)
    count = state.counter()
    most = state.reducing(int, max)
    total = state.reducing(float, operator.add)
    seen = state.map(str, int)


DECLARED = declarations_of(States)
KEYS = st.integers(0, 5)
#: by state: values that fit, and values of another type or beyond a limit
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "number": ([0, 1, -1, 1 << 62, None], [True, 1 << 63, "1", 1.0]),
    "zero": ([0, 1, 2, None], [False, 0.0]),
    "real": ([0.0, -0.0, 1.5, float("nan"), None, 1, 1 << 60], [(1 << 60) + 1, "x"]),
    "text": (["", "a", "none", "ü" * 20, None], ["ü" * 21, "\ud800", b"a"]),
    "blob": ([b"", b"a", b"b" * 40, None, bytearray(b"a")], [b"c" * 41, "a"]),
    "pair": ([(0, 0.0), (1, 2.0), (1, float("inf")), (1, 2), None], [(True, 1.0), (1 << 63, 0.0), (1,), [1, 2.0], ()]),
    "twice": ([0, 1, 2, None], ["x"]),
    "anything": ([[], [1], [1, 2], None], [["x"]]),
    "brief": ([0, 1, None], ["x"]),
}
ADDED: dict[str, tuple[list[Any], list[Any]]] = {
    "count": ([0, 1], [1 << 63]),
    "most": ([0, 1, 2, 3], [1 << 63]),
    "total": ([0.0, 1.5, 1], [(1 << 60) + 1]),
}
NAMES = st.sampled_from(sorted(VALUES | ADDED))


def steps(wild: bool) -> st.SearchStrategy[Any]:
    def values(name: str, fit: list[Any], unfit: list[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(st.just(name), st.sampled_from(fit + unfit if wild else fit))

    assigned = st.one_of(*[values(name, *each) for name, each in VALUES.items()])
    added = st.one_of(*[values(name, *each) for name, each in ADDED.items()])
    return st.one_of(
        st.tuples(st.just("set"), KEYS, assigned),
        st.tuples(st.just("add"), KEYS, added),
        st.tuples(st.just("read"), KEYS, st.tuples(NAMES, st.none())),
        st.tuples(st.just("clear"), KEYS, st.tuples(NAMES, st.none())),
        st.tuples(st.just("kept"), KEYS, st.tuples(st.sampled_from(sorted(VALUES)), st.integers(0, 3))),
        st.tuples(st.just("append"), KEYS, st.tuples(st.just("anything"), st.integers(0, 3))),
        st.tuples(st.just("entry"), KEYS, st.tuples(st.just("seen"), st.integers(0, 3))),
        # so that many values of one state are written
        st.tuples(
            st.just("all"), st.none(), st.tuples(st.sampled_from(["zero", "pair", "real", "number"]), st.integers(0, 3))
        ),
    )


ENDS = st.sampled_from(["commit", "commit", "rollback", "twice", "reopen"])
BATCHES = st.lists(
    st.sampled_from([False, False, True]).flatmap(lambda wild: st.tuples(st.lists(steps(wild), max_size=20), ENDS)),
    min_size=1,
    max_size=6,
)


class Run:
    """One state, and all that a user sees of it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.seen: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.now_us = 0
        self.open()

    def open(self) -> None:
        self.states = KeyedState("op", DECLARED, self.store, cached_keys=3, max_value_bytes=40)
        self.target: Any = SimpleNamespace()
        self.kept = {}

    def see(self, what: Any) -> None:
        self.seen.append(repr(what))

    def step(self, step: tuple[Any, ...]) -> None:
        what, key, (name, value) = step
        if what == "all":
            for each in range(6):
                self.step(("read", each, (name, None)))
                self.step(("set", each, (name, {"pair": (value, 1.0), "real": value / 2}.get(name, value))))
            return
        self.states.bind(self.target, key)
        tracked = getattr(self.target, name)
        match what:
            case "set":
                tracked.value = deepcopy(value)
            case "add":
                tracked.add(value)
            case "read":
                self.see(tracked.value)
            case "clear":
                tracked.clear()
            case "append":
                if tracked.value is not None:
                    tracked.value.append(value)
            case "entry":
                tracked[str(value)] = value
            case "kept":  # a tracked object kept from another key or an earlier batch
                if (kept := self.kept.get(name)) is not None:
                    self.see(kept.value)
                    kept.value = next(iter({"pair": [(value, 0.5)], "anything": [[value]]}.get(name, [value])))
                self.kept[name] = tracked

    def batch(self, steps: list[Any], end: str) -> None:
        self.now_us += 2_000_000
        self.states.set_time(self.now_us)
        try:
            for step in steps:
                self.step(step)
            if end == "rollback":
                self.states.rollback()
                return
            mutations = self.states.collect()
            if end == "twice":
                mutations = self.states.collect()
        except (StateflowError, TypeError, AttributeError, OverflowError) as error:
            self.see(error)
            self.states.rollback()
            return
        self.see((sorted(mutations.puts), sorted(mutations.deletes), mutations.clears))
        self.store.apply(mutations)
        self.states.mark_clean()
        if end == "reopen":
            self.open()


@given(batches=BATCHES)
def test_together_is_one_by_one(batches: list[Any]) -> None:
    runs = []
    for many in (1, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keyed, "_MANY", many)
            run = Run()
            for steps, end in batches:
                run.batch(steps, end)
            for key in range(6):
                for name, tracked in sorted(vars(run.states.peek(key)).items()):
                    run.see((key, name, dict(tracked) if name == "seen" else tracked.value))
            runs.append(run)
    assert runs[0].seen == runs[1].seen
    assert dict(runs[0].store.scan(b"")) == dict(runs[1].store.scan(b""))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("number", [5, -5, 1 << 62]),
        ("real", [1.5, float("-inf")]),
        ("text", ["a", "ü"]),
        ("blob", [b"a", b""]),
        ("pair", [(1, 1.5), (-1, 2.0)]),
    ],
)
def test_what_fits_goes_together(name: str, values: list[Any]) -> None:
    declaration = DECLARED[name]
    encode = keyed.encoder_of(declaration.coder, 40)
    assert encode is not None
    assert encode(values) == [declaration.coder.encode(value) for value in values]


@pytest.mark.parametrize(
    ("name", "value"),
    [("number", True), ("number", 1 << 63), ("real", 1), ("text", "ü" * 21), ("text", "\ud800"), ("pair", (1, 2))],
)
def test_one_that_does_not_fit_has_all_of_its_state_go_alone(name: str, value: Any) -> None:
    encode = keyed.encoder_of(DECLARED[name].coder, 40)
    fitting = {"number": 1, "real": 1.0, "text": "a", "pair": (1, 1.0)}[name]
    assert encode is not None
    assert encode([fitting, value, fitting]) is None


def test_a_coder_made_from_one_of_ours_encodes_for_itself() -> None:
    assert keyed.encoder_of(Doubled(), 40) is None
