"""Code bundles of operators, kept beside the records that name them, so that every leader has them.

A bundle is stored in parts, because databases limit the length of a statement. Its digest identifies it, so writes
carry no term. Putting a part again changes only its age: the record that will name the bundle is about to come.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, delete, func, insert, select, update

from stateflow.ledger.schema import BUNDLE, now_us


def put(connection: Connection, digest: str, number: int, count: int, body: bytes) -> None:
    """Stores a part of a bundle, ``number`` from 0; when the part is there already, only renews its time."""
    where = (BUNDLE.c.digest == digest) & (BUNDLE.c.number == number)
    if connection.execute(update(BUNDLE).where(where).values(stored_us=now_us())).rowcount == 0:
        values = {"digest": digest, "number": number, "count": count, "body": body}
        connection.execute(insert(BUNDLE).values(stored_us=now_us(), **values))


def part(connection: Connection, digest: str, number: int) -> tuple[bytes, int] | None:
    """Returns (body of a part, number of parts of the bundle); None when the part is not stored."""
    where = (BUNDLE.c.digest == digest) & (BUNDLE.c.number == number)
    row = connection.execute(select(BUNDLE.c.body, BUNDLE.c.count).where(where)).first()
    return None if row is None else (bytes(row[0]), int(row[1]))


def drop_others(connection: Connection, digests: Collection[str], older_than_us: int) -> int:
    """Deletes all bundles but these whose newest part is at least that old. Returns how many parts it deleted."""
    known = connection.execute(
        select(BUNDLE.c.digest, func.max(BUNDLE.c.stored_us), now_us()).group_by(BUNDLE.c.digest)
    ).all()
    gone = [digest for digest, stored, now in known if digest not in digests and now - stored >= older_than_us]
    if not gone:
        return 0
    return int(connection.execute(delete(BUNDLE).where(BUNDLE.c.digest.in_(gone))).rowcount)
