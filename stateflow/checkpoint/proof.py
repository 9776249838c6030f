"""A digest of decoded state: of every entry of a partition store, in order, independent of the files they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import xxhash

#: takes about a millisecond, which other threads that wait for the interpreter do not feel
ENTRIES_AT_ONCE = 200


def state_digest(
    entries: Iterable[tuple[bytes, bytes]], skip: tuple[bytes, ...], rest: Callable[[], None] = lambda: None
) -> str:
    """Returns the xxh3_128, hexadecimal, of all entries except those whose keys begin with one of ``skip``.

    Args:
        rest: called after each ENTRIES_AT_ONCE, to let others run.
    """
    hasher = xxhash.xxh3_128()
    iterator = iter(entries)
    while some := list(islice(iterator, ENTRIES_AT_ONCE)):
        parts: list[bytes] = []
        for key, value in some:
            if not key.startswith(skip):
                parts += (len(key).to_bytes(4, "big"), key, len(value).to_bytes(4, "big"), value)
        hasher.update(b"".join(parts))
        rest()
    digest: str = hasher.hexdigest()
    return digest
