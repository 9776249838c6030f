from __future__ import annotations

import operator

import pytest

from stateflow import state
from stateflow.errors import DeclarationError, EncodeError
from stateflow.state import TrackedCounter, TrackedReducing, TrackedValue
from tests.unit.state.bench import Bench


class Op:
    top = state.reducing(float, max)
    words = state.reducing(list, operator.add)
    seen = state.reducing(set, operator.ior)
    n = state.counter()


def test_what_was_added_is_reduced() -> None:
    bench = Bench(Op)
    assert (bench.op.top.value, bench.op.n.value) == (None, 0)
    for number in (3, 1, 4):
        bench.op.top.add(number)
        bench.op.words.add([number])
        bench.op.seen.add({number})
        bench.op.n.value += 1
        bench = bench.reopened()
    bench.op.n.add(2)
    bench.op.n.add()
    assert (bench.op.top.value, bench.op.words.value, bench.op.n.value) == (4.0, [3, 1, 4], 6)
    assert bench.op.seen.value == {1, 3, 4}
    bench.keyed.rollback()
    assert bench.op.n.value == 3
    for name in ("top", "words", "seen", "n"):
        getattr(bench.op, name).clear()
    assert (bench.op.top.value, bench.op.n.value) == (None, 0)
    assert len(bench.commit().deletes) == 4
    assert not bench.store.cells


def test_none_does_not_clear_what_was_reduced() -> None:
    class Extended:
        words = state.reducing(list, list.extend)  # type: ignore[arg-type, var-annotated]
        last = state.reducing(int | None, lambda so_far, new: new)  # type: ignore[call-overload]

    bench = Bench(Extended)
    with pytest.raises(EncodeError, match=r"NoneType does not fit list .*state=words"):
        bench.op.words.add(None)
    bench.op.words.add(["a"])
    with pytest.raises(EncodeError, match=r"NoneType does not fit list .*state=words"):
        bench.op.words.add(["b"])
    bench.op.last.add(1)
    bench.op.last.add(None)
    assert bench.op.last.value is None


def test_a_value_is_read_only() -> None:
    with pytest.raises(AttributeError):
        Bench(Op).op.top.value = 1


def test_a_counter_has_64_bits() -> None:
    bench = Bench(Op)
    bench.op.n.value = 2**63 - 1
    bench.commit()
    bench.op.n.add()
    with pytest.raises(EncodeError, match="state=n"):
        bench.keyed.collect()


def test_standalone() -> None:
    counter, most = TrackedCounter(), TrackedReducing(max)
    counter.value += 1
    counter.add(2)
    most.add(1)
    most.add(5)
    assert (counter.value, counter.changes(), most.changes()) == (3, {"put": 3}, {"put": 5})
    assert (repr(counter), repr(most)) == ("TrackedCounter(3)", "TrackedReducing(5)")
    counter.clear()
    most.clear()
    assert (counter.value, most.value) == (0, None)


def test_declarations() -> None:
    assert (Op.top.kind, Op.n.kind) == ("reducing", "counter")  # type: ignore[attr-defined]
    with pytest.raises(DeclarationError):
        state.reducing(int, 5)  # type: ignore[arg-type]


# --- a state is not its value ---------------------------------------------------------------------------


class Forgetful:
    value = state.value(int, default=0)
    mutable = state.value(list[int], default=[])
    expiring = state.value(int, default=0, ttl=60)
    top = state.reducing(float, max)
    n = state.counter()


@pytest.mark.parametrize("name", ["value", "mutable", "expiring", "top", "n"])
def test_a_state_whose_value_is_meant_is_refused(name: str) -> None:
    bench = Bench(Forgetful)
    tracked = getattr(bench.op, name)
    with pytest.raises(TypeError, match=f"^the state '{name}' is neither true nor false: test its .value$"):
        bool(tracked)
    for other, called in ((0, "an int"), (None, "None"), ([], "a list"), ("x", "a str")):
        for compare in (operator.eq, operator.ne):
            with pytest.raises(TypeError, match=f"^the state '{name}' is compared with {called}: compare its .value$"):
                compare(tracked, other)
            with pytest.raises(TypeError, match=r"compare its \.value"):
                compare(other, tracked)
    assert not bench.commit()


def test_states_are_equal_if_they_are_the_same() -> None:
    op = Bench(Forgetful).op
    assert op.n == op.n
    assert op.n != op.value
    assert op.value in [op.top, op.value]
    assert {op.n: 1, op.value: 2}[op.n] == 1
    assert TrackedValue(1) != TrackedValue(1)
    with pytest.raises(TypeError, match=r"^a TrackedCounter is compared with an int: compare its \.value$"):
        assert TrackedCounter(1) == 1
    with pytest.raises(TypeError, match=r"^a TrackedValue is neither true nor false: test its \.value$"):
        assert TrackedValue(1)
