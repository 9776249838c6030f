"""Contract of the ledger's bundles, which hold the code of operators."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import update

from stateflow.ledger import Ledger
from stateflow.ledger.records import BUNDLE
from stateflow.types import BUNDLE_PART

ONE, TWO = "1" * 64, "2" * 64
ANY = timedelta(0)


class BundlesContract:
    def test_a_part_is_there_when_it_was_put(self, fresh: Ledger) -> None:
        parts = [bytes([number]) * BUNDLE_PART for number in range(3)]
        for number in (2, 0):
            fresh.put_bundle_part(ONE, number, 3, parts[number])
        assert fresh.bundle_part(ONE, 1) is None
        fresh.put_bundle_part(ONE, 1, 3, parts[1])
        assert [fresh.bundle_part(ONE, number) for number in range(3)] == [(part, 3) for part in parts]
        assert fresh.bundle_part(TWO, 0) is None

    def test_a_part_that_is_there_stays(self, fresh: Ledger) -> None:
        fresh.put_bundle_part(ONE, 0, 1, b"\0\xff first")
        fresh.put_bundle_part(ONE, 0, 1, b"another")
        assert fresh.bundle_part(ONE, 0) == (b"\0\xff first", 1)

    def test_what_nobody_names_goes_when_it_is_old(self, fresh: Ledger) -> None:
        for digest, parts in ((ONE, 2), (TWO, 1)):
            for number in range(parts):
                fresh.put_bundle_part(digest, number, parts, b"x")
        assert fresh.drop_other_bundles({ONE}, timedelta(hours=1)) == 0
        assert fresh.drop_other_bundles({ONE, TWO}, ANY) == 0
        assert fresh.drop_other_bundles({TWO}, ANY) == 2
        assert [fresh.bundle_part(each, 0) for each in (ONE, TWO)] == [None, (b"x", 1)]
        assert fresh.drop_other_bundles(set(), ANY) == 1

    def test_what_is_put_again_is_not_old(self, fresh: Ledger) -> None:
        for number in range(2):
            fresh.put_bundle_part(ONE, number, 2, b"x")
        older = update(BUNDLE).values(stored_us=BUNDLE.c.stored_us - 2 * 3600 * 10**6)
        fresh.database.write(lambda connection: connection.execute(older))
        fresh.put_bundle_part(ONE, 0, 2, b"x")
        assert fresh.drop_other_bundles(set(), timedelta(hours=1)) == 0
