"""Stored values as numpy arrays: the values of a coder side by side, encoded and compared many at a time.

A *lane* is one array. int, float and bool values have one lane, a fixed tuple of ints and floats one per item, and
values without a fixed width one lane of Python objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateflow.errors import DeclarationError, EncodeError
from stateflow.state import coders
from stateflow.state.cells import HEADER
from stateflow.state.coder import Coder
from stateflow.state.numeric import exact_float

Array = npt.NDArray[Any]
_BIAS: Final = np.uint64(1 << 63)
_ARROW_TYPES: dict[type[Coder[Any]], pa.DataType] = {
    coders.Int64: pa.int64(),
    coders.Float64: pa.float64(),
    coders.Bool: pa.bool_(),
    coders.Utf8: pa.string(),
    coders.Bytes: pa.binary(),
    coders.Timestamp: pa.timestamp("us", tz="UTC"),
    coders.Date: pa.date32(),
}


def _arrow_type(coder: Coder[Any]) -> pa.DataType | None:
    """Returns the Arrow type of a coder's values; None: Arrow infers it from the values."""
    if not isinstance(coder, coders.Tuple):
        return _ARROW_TYPES.get(type(coder))
    types = [_arrow_type(item) for item in coder.items]
    if None in types:
        return None
    return pa.list_(types[0]) if coder.arity is None else pa.struct([(f"_{n}", each) for n, each in enumerate(types)])


class Lanes(ABC):
    """Layout of the values of one coder."""

    dtypes: tuple[Any, ...]

    @abstractmethod
    def of_arrow(self, values: pa.Array) -> list[Array]:
        """Returns one array per lane, with arbitrary items where ``values`` is null. Raises EncodeError,
        ArrowException."""

    @abstractmethod
    def to_arrow(self, lanes: list[Array], null: Array) -> pa.Array: ...

    @abstractmethod
    def of_value(self, value: Any) -> tuple[Any, ...]:
        """Returns the items of one decoded value, one per lane."""

    def single(self, value: Any) -> list[Array]:
        """Returns lanes of length 1, with one decoded value."""
        lanes = [np.empty(1, dtype) for dtype in self.dtypes]
        for lane, item in zip(lanes, self.of_value(value), strict=True):
            lane[0] = item
        return lanes

    @abstractmethod
    def cells(self, lanes: list[Array]) -> list[bytes]:
        """Returns stored values with headers. Raises EncodeError with the ``index`` of the value in its ``where``."""

    def differ(self, before: list[Array], now: list[Array]) -> Array:
        """Returns for each row whether its stored bytes differ before and now."""
        found: Array = np.zeros(len(now[0]), np.bool_)
        for old, new in zip(before, now, strict=True):
            # bit by bit: NaN is NaN, and 0.0 is not -0.0
            found |= old.view(f"u{old.dtype.itemsize}") != new.view(f"u{new.dtype.itemsize}")
        return found


class _Numbers(Lanes):
    """Numbers, one per lane. ``kinds``: a letter of ``_DTYPES`` for each lane."""

    def __init__(self, kinds: str) -> None:
        self._kinds = kinds
        self.dtypes = tuple(np.dtype(_DTYPES[kind]) for kind in kinds)

    def of_arrow(self, values: pa.Array) -> list[Array]:
        return [_numbers(values, self._kinds[0])]

    def to_arrow(self, lanes: list[Array], null: Array) -> pa.Array:
        return pa.array(lanes[0], mask=null)

    def of_value(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def cells(self, lanes: list[Array]) -> list[bytes]:
        width = len(HEADER) + sum(dtype.itemsize for dtype in self.dtypes)
        table = np.empty((len(lanes[0]), width), np.uint8)
        table[:, : len(HEADER)] = np.frombuffer(HEADER, np.uint8)
        start = len(HEADER)
        for kind, lane in zip(self._kinds, lanes, strict=True):
            encoded = _FORMS[kind](lane).view(np.uint8).reshape(len(lane), -1)
            table[:, start : start + encoded.shape[1]] = encoded
            start += encoded.shape[1]
        cells: list[bytes] = table.view(f"V{width}").ravel().tolist()
        return cells


#: b: bool, i: int as Int64 encodes it, q and d: int and float as struct encodes them
_DTYPES = {"b": "bool", "i": "int64", "q": "int64", "d": "float64"}
_FORMS: dict[str, Callable[[Array], Array]] = {
    "b": lambda lane: lane,
    "i": lambda lane: (lane.view(np.uint64) ^ _BIAS).astype(">u8"),
    "q": lambda lane: lane.astype(">i8"),
    "d": lambda lane: lane.astype(">f8"),
}


def _numbers(values: pa.Array, kind: str) -> Array:
    """Returns an Arrow array as numpy. Raises EncodeError for other kinds of numbers, ArrowException for those that do
    not fit."""
    type_ = values.type
    fits = {"b": pa.types.is_boolean, "i": pa.types.is_integer, "q": pa.types.is_integer}
    if kind == "d":
        if not (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
            raise EncodeError(f"values of Arrow type {type_} do not fit coder float64")
    elif not fits[kind](type_):
        raise EncodeError(f"values of Arrow type {type_} do not fit coder {'bool' if kind == 'b' else 'int64'}")
    if kind == "d" and pa.types.is_integer(type_):
        return _exact_floats(values)
    whole = values.cast({"b": pa.bool_(), "d": pa.float64()}.get(kind, pa.int64()))
    if whole.null_count:
        whole = whole.fill_null(False if kind == "b" else 0)
    found: Array = whole.to_numpy(zero_copy_only=False)
    return found


def _exact_floats(values: pa.Array) -> Array:
    """Converts integers to floats like :func:`~stateflow.state.numeric.exact_float`. Raises EncodeError."""
    whole: Array = (values.fill_null(0) if values.null_count else values).to_numpy(zero_copy_only=False)
    found: Array = whole.astype(np.float64)
    over = found >= 2.0 ** (np.iinfo(whole.dtype).bits - (whole.dtype.kind == "i"))
    wrong = over | (np.where(over, 0, found).astype(whole.dtype) != whole)
    if wrong.any():
        exact_float(int(whole[wrong][0]))  # raises the error
    return found


class _Structs(_Numbers):
    """A fixed tuple as an Arrow struct with the fields ``_0``, ``_1``, …"""

    def of_arrow(self, values: pa.Array) -> list[Array]:
        if not pa.types.is_struct(values.type) or values.type.num_fields != len(self.dtypes):
            raise EncodeError(f"values of Arrow type {values.type} are not structs of {len(self.dtypes)} fields")
        fields = values.flatten()
        for field in fields:
            if field.null_count > values.null_count:
                raise EncodeError("a field is null where its struct is not")
        return [_numbers(field, kind) for field, kind in zip(fields, self._kinds, strict=True)]

    def to_arrow(self, lanes: list[Array], null: Array) -> pa.Array:
        names = [f"_{number}" for number in range(len(lanes))]
        return pa.StructArray.from_arrays([pa.array(lane) for lane in lanes], names=names, mask=pa.array(null))

    def of_value(self, value: Any) -> tuple[Any, ...]:
        return tuple(value)


def _same(value: Any) -> Any:
    return value


def _from_arrow(coder: Coder[Any]) -> Callable[[Any], Any]:
    """Returns a function that makes tuples of what ``to_pylist`` returns for them.

    That is a dict for a struct, and a list for a tuple of any length; all other values stay as they are.
    """
    if not isinstance(coder, coders.Tuple):
        return _same
    items = list(map(_from_arrow, coder.items))
    if coder.arity is None:
        return lambda value: tuple(map(items[0], value)) if isinstance(value, list) else value

    def of_struct(value: Any) -> Any:
        if not isinstance(value, dict) or len(value) != len(items):
            return value
        return tuple([item(each) for item, each in zip(items, value.values(), strict=True)])

    return of_struct


def _to_arrow(coder: Coder[Any]) -> Callable[[Any], Any]:
    if not isinstance(coder, coders.Tuple):
        return _same
    items = list(map(_to_arrow, coder.items))
    if coder.arity is None:
        return lambda value: None if value is None else list(map(items[0], value))

    def as_struct(value: Any) -> Any:
        if value is None:
            return None
        return {f"_{place}": item(each) for place, (item, each) in enumerate(zip(items, value, strict=True))}

    return as_struct


class _Objects(Lanes):
    dtypes = (np.dtype(object),)

    def __init__(self, coder: Coder[Any], bytes_max: int) -> None:
        self._coder = coder
        self._bytes_max = bytes_max
        self._type = _arrow_type(coder)
        self._from_arrow, self._to_arrow = _from_arrow(coder), _to_arrow(coder)

    def of_arrow(self, values: pa.Array) -> list[Array]:
        lane = np.empty(len(values), object)
        for index, value in enumerate(map(self._from_arrow, values.to_pylist())):
            lane[index] = value  # one by one: numpy would turn tuples into a second dimension
        for value in lane:
            if value is not None and type(value) is not self._coder.exact:
                self._coder.encode(value)
        return [lane]

    def to_arrow(self, lanes: list[Array], null: Array) -> pa.Array:
        values = lanes[0].copy()
        values[null] = None
        return pa.array(list(map(self._to_arrow, values.tolist())), type=self._type)

    def of_value(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def cells(self, lanes: list[Array]) -> list[bytes]:
        found = []
        for index, value in enumerate(lanes[0]):
            try:
                payload = self._coder.encode(value)
            except EncodeError as error:
                error.where["index"] = index
                raise
            if len(payload) > self._bytes_max:
                raise EncodeError(
                    f"a value takes {len(payload)} bytes, at most {self._bytes_max} are allowed", index=index
                )
            found.append(HEADER + payload)
        return found

    def differ(self, before: list[Array], now: list[Array]) -> Array:
        encode = self._coder.encode

        def differs(old: Any, new: Any) -> bool:
            return old is not new and encode(old) != encode(new)

        return np.fromiter(map(differs, before[0], now[0]), np.bool_, len(now[0]))


def lanes_of(coder: Coder[Any], bytes_max: int) -> Lanes:
    """Returns the lanes for a coder. Raises DeclarationError for a coder whose values can change in place."""
    kinds = {coders.Int64: "i", coders.Float64: "d", coders.Bool: "b"}
    if type(coder) in kinds:
        return _Numbers(kinds[type(coder)])
    if isinstance(coder, coders.Tuple) and coder.name.startswith("packed "):
        return _Structs("".join("q" if isinstance(item, coders.Int64) else "d" for item in coder.items))
    if coder.mutable:
        raise DeclarationError(f"values of coder {coder.name} can change in place")
    return _Objects(coder, bytes_max)
