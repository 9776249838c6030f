"""Tells whether the unreadable end of a RocksDB write-ahead log is a write that was cut off, or damage.

A process that is killed in the middle of a write leaves the beginning of a record, and nothing after it. That write was
never acknowledged. RocksDB cannot tell this from a damaged length, which makes a record seem to reach beyond the end of
the file: it would drop that record and all that follow. The functions here look at the bytes that follow. Pure.

Format: blocks of 32 KiB; records of ``crc32c u32 | length u16 | type u8 | payload``, split where a block ends into
first, middle and last; a payload begins with the sequence of its first entry, u64, and the number of entries, u32. All
little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

BLOCK = 32 << 10
_HEADER = struct.Struct("<IHB")
_BATCH = struct.Struct("<QI")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
#: maximum of entries between the last whole record and one that still counts as a later record
AHEAD_MAX = 1 << 32


def cut_off(logs: Sequence[bytes]) -> bool:
    """Returns whether all that cannot be read in a database's logs is the end of a write that was cut off.

    False when whole records follow, or when the unreadable record is whole itself but for its length.

    Args:
        logs: contents of all logs of the database, in order.
    """
    expected: int | None = None
    torn = False
    for data in logs:
        first, after, end = _walk(data)
        if torn and first is not None and first != expected:
            return False  # a later log continues after the missing record
        expected = after if after is not None else expected
        torn = end < len(data)
        if torn and _goes_on(data, end, expected or 0):
            return False
    return True


def _walk(data: bytes) -> tuple[int | None, int | None, int]:
    """Returns (sequence of the first record, sequence after the last whole record, offset of that record's end)."""
    first = after = None
    end = 0
    begun: tuple[int, int] | None = None
    for at, length, kind in _records(data):
        if kind in (FULL, FIRST) and length >= _BATCH.size:
            begun = _BATCH.unpack_from(data, at + _HEADER.size)
        if kind in (FULL, LAST) and begun is not None:
            first = begun[0] if first is None else first
            after, begun = sum(begun), None
        if kind not in (FIRST, MIDDLE):
            end = at + _HEADER.size + length
    return first, after, end


def _records(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields (offset, length, type) of records according to their headers, as long as these make sense."""
    at = 0
    while True:
        left = BLOCK - at % BLOCK
        if left < _HEADER.size:
            at += left
            continue
        if at + _HEADER.size > len(data):
            return
        _, length, kind = _HEADER.unpack_from(data, at)
        if not kind or _HEADER.size + length > left or at + _HEADER.size + length > len(data):
            return
        yield at, length, kind
        at += _HEADER.size + length


def _goes_on(data: bytes, end: int, expected: int) -> bool:
    """Returns whether a whole record follows ``end``: the one there, if only its length is damaged, or a later one."""
    if len(data) - end > _HEADER.size and _is_whole(data, end, len(data) - end - _HEADER.size):
        return True
    for at in range(end + 1, len(data) - _HEADER.size - _BATCH.size + 1):
        kind = data[at + 6]
        if kind not in (FULL, FIRST):
            continue
        length = _HEADER.unpack_from(data, at)[1]
        fits = _HEADER.size + length <= min(BLOCK - at % BLOCK, len(data) - at)
        sequence = _BATCH.unpack_from(data, at + _HEADER.size)[0]
        if fits and expected <= sequence < expected + AHEAD_MAX and _is_whole(data, at, length):
            return True
    return False


def _is_whole(data: bytes, at: int, length: int) -> bool:
    stored: int = _HEADER.unpack_from(data, at)[0]
    return stored == _masked(_crc32c(data[at + 6 : at + _HEADER.size + length]))


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def _crc32c(data: bytes) -> int:
    """CRC-32C in Python: slow, but called for a few records only."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
