"""Encodes and settles what a batch wrote: many values of one state at a time, where the result is the same.

Encoding a value by itself costs a call, an exception handler and a check of its type. Where all values of a state are
of the very types that its coder stores, they are encoded together, and stay as they are once they are on disk. An
object
that needs more care (it was cleared, never read, or its value is of another type) is encoded by itself, in the order in
which the objects were written, so that it fails as it would alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, Final

from stateflow.changes import Mutations
from stateflow.state import coders
from stateflow.state.coder import Coder
from stateflow.state.spec import UNREAD, StateSpec

#: returns the payloads of values; None: encode them one by one
EncodeMany = Callable[[list[Any]], Sequence[bytes] | None]

#: fewer values are encoded as fast one by one
_MANY: Final = 4
_pack_int, _pack_float = struct.Struct(">Q").pack, struct.Struct(">d").pack
_bias = (1 << 63).__add__


def _all(values: list[Any], kind: type) -> bool:
    return set(map(type, values)) == {kind}


def _ints(values: list[Any]) -> list[bytes] | None:
    try:
        return list(map(_pack_int, map(_bias, values))) if _all(values, int) else None
    except struct.error:
        return None


def _floats(values: list[Any]) -> list[bytes] | None:
    return list(map(_pack_float, values)) if _all(values, float) else None


def _texts(values: list[Any]) -> list[bytes] | None:
    try:
        return list(map(str.encode, values)) if _all(values, str) else None
    except UnicodeEncodeError:
        return None


def _blobs(values: list[Any]) -> list[bytes] | None:
    return values if _all(values, bytes) else None


def _tuples(pack: Callable[..., bytes], kinds: list[type | None]) -> EncodeMany:
    def encode(values: list[Any]) -> list[bytes] | None:
        if not _all(values, tuple):
            return None
        try:
            columns = zip(*values, strict=True)
            alike = all(set(map(type, items)) == {kind} for items, kind in zip(columns, kinds, strict=True))
            return list(starmap(pack, values)) if alike else None
        except (struct.error, ValueError):
            return None

    return encode


_MANY_AT_ONCE: Final[dict[type[Coder[Any]], EncodeMany]] = {
    coders.Int64: _ints,
    coders.Float64: _floats,
    coders.Utf8: _texts,
    coders.Bytes: _blobs,
}


def encoder_of(coder: Coder[Any], max_bytes: int) -> EncodeMany | None:
    """Returns a function that encodes many values of a coder; None: there is none.

    The function returns None if an encoded value is longer than ``max_bytes``. A subclass of a coder may encode in its
    own way, so that there is none for it.
    """
    if type(coder) is coders.Tuple:
        return None if coder.packed is None else _tuples(coder.packed.pack, [item.exact for item in coder.items])
    encode = _MANY_AT_ONCE.get(type(coder))
    if encode is None or coder.fixed_width:
        return encode

    def bounded(values: list[Any]) -> Sequence[bytes] | None:
        payloads = encode(values)
        return None if payloads is None or max(map(len, payloads)) > max_bytes else payloads

    return bounded


class Settling:
    """One ``collect``, up to its ``mark_clean``.

    Args:
        written: tracked objects, in the order in which they were written; must not change until ``saved``.
        into: receives their net change.

    Raises the error of the first object that cannot be encoded.
    """

    __slots__ = ("_alone", "_together")

    def __init__(self, written: Sequence[Any], into: Mutations) -> None:
        self._alone = written
        self._together: list[tuple[list[Any], Sequence[bytes]]] = []
        if len(written) >= _MANY:
            self._find_together(written)
        for tracked in self._alone:
            tracked._collect(into)
        for together, payloads in self._together:
            spec = together[0]._spec
            head, header = spec.cell_head, spec.header
            into.puts += [
                (head + tracked._row, header + payload)
                for tracked, payload in zip(together, payloads, strict=True)
                if tracked._stored != payload
            ]

    def _find_together(self, written: Sequence[Any]) -> None:
        found: dict[StateSpec, list[Any]] = {}
        several: list[Any] = []
        of: StateSpec | None = None
        for tracked in written:
            spec = tracked._spec
            if spec is not of:
                several = found.setdefault(spec, [])
                of = spec
            if spec.encode_many is None or tracked._implicit:
                continue
            if tracked._stored is not UNREAD and tracked._now is not None:
                several.append(tracked)
        for spec, several in found.items():
            if len(several) >= _MANY and spec.encode_many is not None:
                payloads = spec.encode_many([tracked._now for tracked in several])
                if payloads is not None:
                    self._together.append((several, payloads))
        if sum([len(payloads) for _, payloads in self._together]) == len(written):
            self._alone = ()
        elif self._together:
            specs = {several[0]._spec for several, _ in self._together}
            self._alone = [each for each in written if each._spec not in specs or not _is_plain(each)]

    def saved(self) -> None:
        """Marks all objects clean: the change that was found is in the store now."""
        for tracked in self._alone:
            tracked._saved()
        for together, payloads in self._together:
            for tracked, payload in zip(together, payloads, strict=True):
                tracked._dirty = False
                tracked._stored = payload


def _is_plain(tracked: Any) -> bool:
    """Returns whether an object of a state with ``encode_many`` was read before it was written and is neither cleared
    nor None."""
    return not tracked._implicit and tracked._stored is not UNREAD and tracked._now is not None
