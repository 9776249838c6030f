"""numpy arrays in state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from stateflow import state
from stateflow.errors import DecodeError, EncodeError
from stateflow.state import coder_for
from tests.unit.state.bench import Bench


@dataclasses.dataclass
class Model:
    weights: npt.NDArray[np.float64]
    layers: list[Any]


class Op:
    vector = state.value(np.ndarray)
    models = state.map(str, Model)
    deep = state.list(dict)


def test_arrays_change_in_place_at_any_depth() -> None:
    bench = Bench(Op)
    bench.op.vector.value = np.zeros(3)
    bench.op.models["a"] = Model(np.arange(4.0), [{"x": [np.array([1, 2], np.int32)]}])
    bench.op.deep.append({"x": np.array(["a", "bc"])})
    bench.commit()
    bench.op.vector.value[1] = 5
    bench.op.models["a"].weights *= 2
    bench.op.models["a"].layers[0]["x"][0][1] = 9
    bench.op.deep[0]["x"][0] = "z"
    assert len(bench.commit().puts) == 3
    again = bench.reopened()
    assert again.op.vector.value.tolist() == [0, 5, 0]
    assert again.op.models["a"].weights.tolist() == [0, 2, 4, 6]
    array = again.op.models["a"].layers[0]["x"][0]
    assert (array.tolist(), array.dtype) == ([1, 9], np.int32)
    assert again.op.deep[0]["x"].tolist() == ["z", "bc"]
    assert again.commit().puts == []


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.array(7.5),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["2013-01-01"], "datetime64[us]"),
        np.array([1, 2], ">i4"),
    ],
)
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    coder = coder_for(np.ndarray)
    back = coder.decode(coder.encode(array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_numpy_scalars_become_pythons() -> None:
    coder = coder_for(dict[str, Any])
    got = coder.decode(coder.encode({"a": np.int64(3), "b": np.float32(0.5), "c": np.float64(2.5)}))
    assert got == {"a": 3, "b": 0.5, "c": 2.5}
    assert [type(value) for value in got.values()] == [int, float, float]


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(EncodeError, match="dtype object has no stored form"):
        coder_for(np.ndarray).encode(np.array([object()]))
    with pytest.raises(DecodeError):
        coder_for(np.ndarray).decode(coder_for(np.ndarray).encode(np.zeros(3))[:-1])
