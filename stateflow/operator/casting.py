"""Columns given as Arrow, cast to declared types: each value is kept exactly, or refused with its place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from stateflow.operator.exact import RAISED, Misfit, column_of, line_of


def taken(given: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    """Converts an Arrow column to the type of ``field``. Raises Misfit for the first row that does not fit, and
    pyarrow's error if there are too many values for one array."""
    _check_kinds(given.type, field.type, "")
    chunks, before = [], 0
    for chunk in given.chunks:
        try:
            chunks.append(_taken(chunk, field))
        except RAISED as error:
            raise _first_misfit(chunk, field, error, before) from error
        before += len(chunk)
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [pa.array([], field.type)])


def _check_kinds(source: pa.DataType, target: pa.DataType, path: str) -> None:
    """Checks that values of type ``source`` can be values of type ``target`` without changing their meaning. Raises
    Misfit."""
    if t.is_dictionary(source):
        source = source.value_type
    if source == target or t.is_null(source):
        return
    ours = next((are for told, are in _TURNS if told(source)), None)
    if ours is None or not any(told(target) for told in ours):
        raise Misfit(f"is declared {target} but is a column of {source}", path=path)
    if t.is_timestamp(source) and (source.tz is None) != (target.tz is None):
        how = "attach a time zone: pyarrow.compute.assume_timezone" if source.tz is None else "declare timestamp"
        raise Misfit(f"is declared {target} but is a column of {source}", how, path=path)
    if t.is_struct(target):
        names, declared = ([kind.field(n).name for n in range(kind.num_fields)] for kind in (source, target))
        if sorted(names) != sorted(declared):
            odd = ", ".join(sorted(set(names) ^ set(declared)) or sorted(names))
            raise Misfit(f"has other fields than declared: {odd}", path=path)
        for number in range(target.num_fields):
            field = target.field(number)
            _check_kinds(source.field(field.name).type, field.type, f"{path}.{field.name}")
    elif t.is_map(target):
        _check_kinds(source.key_type, target.key_type, f"{path}.key")
        _check_kinds(source.item_type, target.item_type, f"{path}[]")
    elif t.is_nested(target):
        _check_kinds(source.value_type, target.value_type, f"{path}[]")


def _taken(array: pa.Array, field: pa.Field) -> pa.Array:
    array = _cast(array, field.type)
    if _lacks_value(array, field):
        raise ValueError("a value declared NOT NULL is null")
    return array


def _first_misfit(array: pa.Array, field: pa.Field, error: Exception, before: int) -> Misfit:
    """Finds the first row that does not fit. Args: before: number of rows in earlier chunks."""
    begin, end = 0, len(array)
    while end - begin > 1:
        middle = (begin + end) // 2
        try:
            _taken(array.slice(begin, middle - begin), field)
            begin = middle
        except RAISED:
            end = middle
    try:
        column_of(field).array([array[begin].as_py()])
    except Misfit as misfit:  # it also names the place inside the value
        return misfit.within("", before + begin)
    except RAISED:
        pass
    return Misfit(f"is declared {field.type}: {line_of(error)}", row=before + begin)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Casts an array level by level, because each level has its own rule. Args: kind: type that ``_check_kinds``
    allows."""
    if array.type == kind:
        return array
    if t.is_dictionary(array.type):
        return _cast(array.dictionary_decode(), kind)
    if t.is_null(array.type):
        return pa.nulls(len(array), kind)
    if t.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        given = dict(
            zip([array.type.field(n).name for n in range(array.type.num_fields)], array.flatten(), strict=True)
        )
        arrays = [_cast(given[field.name], field.type) for field in fields]
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())
    if t.is_map(kind):
        array = _compact(array)
        keys, items = _cast(array.keys, kind.key_type), _cast(array.items, kind.item_type)
        return pa.MapArray.from_arrays(_ends(array, pa.int32()), keys, items, kind)
    if t.is_nested(kind):
        return _cast_list(array, kind)
    if t.is_decimal(kind) and t.is_integer(array.type):
        return array.cast(pa.decimal128(20, 0)).cast(kind)  # otherwise pyarrow requires digits for any int
    if t.is_float32(kind) and t.is_floating(array.type):
        wide = array.cast(pa.float64())
        narrow, zero = wide.cast(kind), pa.scalar(0.0)
        lost = pc.or_(
            pc.xor(pc.is_inf(wide), pc.is_inf(narrow)),
            pc.xor(pc.equal(wide, zero), pc.equal(narrow, pa.scalar(0.0, kind))),
        )
        if pc.any(lost).as_py():
            raise ValueError("a 32-bit float cannot hold it")
        return narrow
    return array.cast(kind)


def _cast_list(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if t.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_field))
    array = _compact(array)
    large = t.is_large_list(kind)
    plain = (pa.large_list if large else pa.list_)(kind.value_field)
    made = pa.LargeListArray if large else pa.ListArray
    ends = _ends(array, pa.int64() if large else pa.int32())
    found = made.from_arrays(ends, _cast(array.values, kind.value_type), type=plain)
    return found if kind == plain else found.cast(kind)


def _compact(array: pa.Array) -> pa.Array:
    """Copies an array without child values that belong to no element, which may lie before, after and between them."""
    return array.take(pa.array(np.arange(len(array))))


def _ends(array: pa.Array, width: pa.DataType) -> pa.Array:
    """Returns the offsets of lists, null for null lists."""
    there = pa.concat_arrays([array.is_valid(), pa.array([True])])
    return pc.if_else(there, array.offsets.cast(width), pa.scalar(None, width))


def _lacks_value(array: pa.Array, field: pa.Field) -> bool:
    """Tells whether there is a null in a field, or in a field inside it, that is declared NOT NULL."""
    if array.null_count and not field.nullable:
        return True
    kind = field.type
    if not _is_strict(kind):
        return False
    if array.null_count:
        array = array.filter(array.is_valid())
    if t.is_struct(kind):
        inside = zip(array.flatten(), (kind.field(number) for number in range(kind.num_fields)), strict=True)
        return any(_lacks_value(each, of) for each, of in inside)
    if t.is_map(kind):
        array = _compact(array)
        return _lacks_value(array.keys, kind.key_field) or _lacks_value(array.items, kind.item_field)
    return _lacks_value(array.flatten(), kind.value_field)


def _is_strict(kind: pa.DataType) -> bool:
    inside = [kind.field(number) for number in range(kind.num_fields)] if t.is_nested(kind) else []
    return any(not field.nullable or _is_strict(field.type) for field in inside)


_Told = Callable[[pa.DataType], bool]
_TEXTS = (t.is_string, t.is_large_string, t.is_string_view)
_BYTES = (t.is_binary, t.is_large_binary, t.is_fixed_size_binary, t.is_binary_view)
_LISTS = (t.is_list, t.is_large_list, t.is_fixed_size_list)
#: kinds of types that values of a type can be converted to, as long as the value itself loses nothing
_TURNS: tuple[tuple[_Told, tuple[_Told, ...]], ...] = (
    (t.is_integer, (t.is_integer, t.is_floating, t.is_decimal)),
    (t.is_floating, (t.is_floating, t.is_integer)),
    (t.is_decimal, (t.is_decimal, t.is_integer)),
    *((told, _TEXTS) for told in _TEXTS),
    *((told, _BYTES) for told in _BYTES),
    *((told, _LISTS) for told in _LISTS),
    *((told, (told,)) for told in (t.is_date, t.is_timestamp, t.is_time, t.is_duration, t.is_map, t.is_struct)),
)
