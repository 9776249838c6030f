"""Code that operators came in, kept beside the records that name it: whoever leads has it.

In parts, for no database takes any length in one statement. What it is, its digest says; it has no term, and whoever
puts it twice changes nothing but its age: the record that will name it is about to come.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, delete, func, insert, select, update

from stateflow.ledger.schema import BUNDLE, now_us


def put(connection: Connection, digest: str, number: int, count: int, body: bytes) -> None:
    """A part of it, ``number`` from 0, unless it is there."""
    where = (BUNDLE.c.digest == digest) & (BUNDLE.c.number == number)
    if connection.execute(update(BUNDLE).where(where).values(stored_us=now_us())).rowcount == 0:
        values = {"digest": digest, "number": number, "count": count, "body": body}
        connection.execute(insert(BUNDLE).values(stored_us=now_us(), **values))


def part(connection: Connection, digest: str, number: int) -> tuple[bytes, int] | None:
    """(a part of it, how many there are)."""
    where = (BUNDLE.c.digest == digest) & (BUNDLE.c.number == number)
    row = connection.execute(select(BUNDLE.c.body, BUNDLE.c.count).where(where)).first()
    return None if row is None else (bytes(row[0]), int(row[1]))


def drop_others(connection: Connection, digests: Collection[str], older_than_us: int) -> int:
    """All but these, where they were stored so long ago. Returns how many parts."""
    known = connection.execute(
        select(BUNDLE.c.digest, func.max(BUNDLE.c.stored_us), now_us()).group_by(BUNDLE.c.digest)
    ).all()
    gone = [digest for digest, stored, now in known if digest not in digests and now - stored >= older_than_us]
    if not gone:
        return 0
    return int(connection.execute(delete(BUNDLE).where(BUNDLE.c.digest.in_(gone))).rowcount)
