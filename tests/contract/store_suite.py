"""Contract of PartitionStore. The test class of each backend inherits it and creates the stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stateflow.changes import Mutations
from stateflow.storage import PartitionStore
from stateflow.storage.store import prefix_end
from tests.sizes import sized

keys = st.binary(max_size=3) | st.binary(min_size=1, max_size=3).map(lambda b: b"\xff" * len(b))
bounds = st.tuples(keys, keys).map(lambda pair: (min(pair), max(pair)))
mutations = st.builds(
    Mutations,
    puts=st.lists(st.tuples(keys, st.binary(max_size=4)), max_size=5),
    deletes=st.lists(keys, max_size=3),
    clears=st.lists(bounds, max_size=2),
)
steps = st.lists(
    st.tuples(st.just("apply"), mutations, st.booleans())
    | st.tuples(st.just("scan"), keys)
    | st.tuples(st.just("scan_from"), bounds)
    | st.just(("flush",))
    | st.just(("reopen",)),
    max_size=12,
)


def apply_to_dict(model: dict[bytes, bytes], change: Mutations) -> None:
    """Applies a change to the model, a dict: first clears, then deletes, then puts."""
    for start, end in change.clears:
        for key in [key for key in model if start <= key < end]:
            del model[key]
    for key in change.deletes:
        model.pop(key, None)
    for key, value in change.puts:
        model[key] = value


class StoreContract(ABC):
    @abstractmethod
    def make(self, directory: Path) -> PartitionStore:
        """Creates an empty store in ``directory``, which does not exist yet."""

    @abstractmethod
    def open(self, directory: Path) -> PartitionStore:
        """Opens a directory that ``PartitionStore.snapshot`` created."""

    @contextmanager
    def new(self, tmp_path: Path) -> Iterator[PartitionStore]:
        store = self.make(tmp_path / f"store-{len(list(tmp_path.iterdir()))}")
        try:
            yield store
        finally:
            store.close()

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[PartitionStore]:
        with self.new(tmp_path) as store:
            yield store

    # -- reading and writing ------------------------------------------------------------------------------

    def test_empty(self, store: PartitionStore) -> None:
        assert store.get(b"k") is None
        assert list(store.scan(b"")) == []

    def test_put_get_overwrite_delete(self, store: PartitionStore) -> None:
        store.apply(Mutations(puts=[(b"k", b"1"), (b"", b"empty key"), (b"e", b"")]))
        assert (store.get(b"k"), store.get(b""), store.get(b"e")) == (b"1", b"empty key", b"")
        store.apply(Mutations(puts=[(b"k", b"2")], deletes=[b"e", b"never there"]))
        assert (store.get(b"k"), store.get(b"e")) == (b"2", None)

    def test_within_one_batch_clears_come_first_then_deletes_then_puts(self, store: PartitionStore) -> None:
        store.apply(Mutations(puts=[(b"a", b"old"), (b"b", b"old"), (b"c", b"old"), (b"d", b"old")]))
        store.apply(Mutations(puts=[(b"a", b"new"), (b"b", b"new")], deletes=[b"b", b"c"], clears=[(b"a", b"c")]))
        assert list(store.scan(b"")) == [(b"a", b"new"), (b"b", b"new"), (b"d", b"old")]

    def test_of_two_puts_of_one_key_the_last_counts(self, store: PartitionStore) -> None:
        store.apply(Mutations(puts=[(b"k", b"1"), (b"k", b"2")]))
        assert store.get(b"k") == b"2"

    def test_a_clear_is_half_open(self, store: PartitionStore) -> None:
        store.apply(Mutations(puts=[(key, b"x") for key in (b"a", b"b", b"b\x00", b"c", b"c\x00")]))
        store.apply(Mutations(clears=[(b"b", b"c")]))
        assert [key for key, _ in store.scan(b"")] == [b"a", b"c", b"c\x00"]
        store.apply(Mutations(clears=[(b"a", b"a")]))
        assert store.get(b"a") == b"x"

    def test_cleared_keys_can_be_put_again_later(self, store: PartitionStore) -> None:
        store.apply(Mutations(puts=[(b"a", b"1")]))
        store.apply(Mutations(clears=[(b"a", b"b")]))
        store.apply(Mutations(puts=[(b"a", b"2")]))
        assert list(store.scan(b"a")) == [(b"a", b"2")]

    def test_nothing_is_a_batch_too(self, store: PartitionStore) -> None:
        store.apply(Mutations())
        store.apply(Mutations(), sync=True)
        assert list(store.scan(b"")) == []

    def test_sync_writes_are_writes(self, store: PartitionStore) -> None:
        store.apply(Mutations(puts=[(b"k", b"1")]), sync=True)
        store.apply(Mutations(deletes=[b"k"], puts=[(b"l", b"2")]), sync=True)
        assert list(store.scan(b"")) == [(b"l", b"2")]

    def test_entries_are_counted_without_reading_them(self, store: PartitionStore) -> None:
        assert store.entries() == 0
        store.apply(Mutations(puts=[(b"%04d" % n, b"x") for n in range(1000)]))
        store.flush()
        assert store.entries() == 1000
        store.apply(Mutations(deletes=[b"%04d" % n for n in range(600)]))
        store.flush()
        assert store.entries() == 400

    # -- scanning -----------------------------------------------------------------------------------------

    def test_scan_is_in_byte_order(self, store: PartitionStore) -> None:
        unordered = [b"b", b"\xff", b"a\x00", b"a", b"\x00", b"ab", b"a\xff", b"\x7f", b"\x80", b""]
        store.apply(Mutations(puts=[(key, key) for key in unordered]))
        assert [key for key, _ in store.scan(b"")] == sorted(unordered)

    @pytest.mark.parametrize(
        ("prefix", "found"),
        [
            (b"a", [b"a", b"a\x00", b"a\xff", b"a\xff\xff"]),
            (b"a\xff", [b"a\xff", b"a\xff\xff"]),
            (b"\xff", [b"\xff", b"\xff\x00", b"\xff\xff", b"\xff\xff\xff"]),
            (b"\xff\xff", [b"\xff\xff", b"\xff\xff\xff"]),
            (b"\xff\xff\xff\xff", []),
            (b"\xfe\xff", [b"\xfe\xff", b"\xfe\xff\x01"]),
            (b"b", [b"b"]),
            (b"c", []),
        ],
    )
    def test_scan_of_a_prefix(self, store: PartitionStore, prefix: bytes, found: list[bytes]) -> None:
        everything = [
            *(b"a", b"a\x00", b"a\xff", b"a\xff\xff", b"b", b"\xfe\xff", b"\xfe\xff\x01"),
            *(b"\xff", b"\xff\x00", b"\xff\xff", b"\xff\xff\xff", b"\x00"),
        ]
        store.apply(Mutations(puts=[(key, b"v" + key) for key in everything]))
        assert list(store.scan(prefix)) == [(key, b"v" + key) for key in found]

    @pytest.mark.parametrize("count", [4095, 4096, 4097, 8192, 9000])
    def test_scan_of_many_entries(self, store: PartitionStore, count: int) -> None:
        """A scan over several pages neither loses nor repeats an entry. The counts are around the size of a page."""
        store.apply(Mutations(puts=[(b"p%06d" % n, b"%d" % n) for n in range(count)] + [(b"q", b""), (b"o", b"")]))
        assert list(store.scan(b"p")) == [(b"p%06d" % n, b"%d" % n) for n in range(count)]

    def test_a_scan_sees_one_moment(self, store: PartitionStore) -> None:
        """A scan does not see writes that are made while it runs, between two of its pages."""
        count = 10_000
        store.apply(Mutations(puts=[(b"%06d" % n, b"old") for n in range(count)]))
        entries = store.scan(b"")
        seen = [next(entries) for _ in range(10)]
        store.apply(Mutations(puts=[(b"%06d" % n, b"new") for n in range(0, count, 2)] + [(b"zz", b"new")]))
        store.apply(Mutations(clears=[(b"%06d" % 5000, b"%06d" % 7000)]))
        store.flush()
        seen += entries
        assert seen == [(b"%06d" % n, b"old") for n in range(count)]
        assert len(list(store.scan(b""))) == count - 2000 + 1

    def test_scans_may_overlap_and_be_given_up(self, store: PartitionStore) -> None:
        store.apply(Mutations(puts=[(b"%06d" % n, b"") for n in range(5000)]))
        one, two = store.scan(b""), store.scan(b"")
        assert next(one) == next(two)
        del one
        assert len(list(two)) == 4999

    # -- snapshots ----------------------------------------------------------------------------------------

    def test_a_snapshot_opens_as_it_was(self, store: PartitionStore, tmp_path: Path) -> None:
        store.apply(Mutations(puts=[(b"a", b"1"), (b"b", b"2")]))
        store.snapshot(tmp_path / "deep" / "snapshot")
        store.apply(Mutations(puts=[(b"a", b"changed"), (b"c", b"3")], deletes=[b"b"]))
        copy = self.open(tmp_path / "deep" / "snapshot")
        assert list(copy.scan(b"")) == [(b"a", b"1"), (b"b", b"2")]
        copy.apply(Mutations(puts=[(b"a", b"of the copy")]))
        assert store.get(b"a") == b"changed"
        copy.close()

    def test_a_snapshot_does_not_go_over_another(self, store: PartitionStore, tmp_path: Path) -> None:
        store.snapshot(tmp_path / "snapshot")
        with pytest.raises(Exception):  # noqa: B017 - whatever the backend raises
            store.snapshot(tmp_path / "snapshot")

    def test_a_snapshot_of_nothing(self, store: PartitionStore, tmp_path: Path) -> None:
        store.snapshot(tmp_path / "snapshot")
        copy = self.open(tmp_path / "snapshot")
        assert list(copy.scan(b"")) == []
        copy.close()

    def test_snapshots_of_snapshots(self, store: PartitionStore, tmp_path: Path) -> None:
        for generation in range(3):
            store.apply(Mutations(puts=[(b"%d" % generation, b"")]))
            store.flush()
            store.snapshot(tmp_path / f"s{generation}")
        for generation in range(3):
            copy = self.open(tmp_path / f"s{generation}")
            assert [key for key, _ in copy.scan(b"")] == [b"%d" % n for n in range(generation + 1)]
            copy.close()

    # -- against a dict -----------------------------------------------------------------------------------

    @given(script=steps)
    @settings(max_examples=sized(240), suppress_health_check=list(HealthCheck))
    def test_it_does_what_a_dict_does(self, script: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
        tmp_path = tmp_path_factory.mktemp("store")
        store = self.make(tmp_path / "store")
        model: dict[bytes, bytes] = {}
        for number, step in enumerate(script):
            match step:
                case "apply", change, sync:
                    store.apply(change, sync=sync)
                    apply_to_dict(model, change)
                case "scan", prefix:
                    expected = [(key, model[key]) for key in sorted(model) if key.startswith(prefix)]
                    assert list(store.scan(prefix)) == expected
                    assert store.get(prefix) == model.get(prefix)
                case "scan_from", (start, end):
                    expected = [(key, model[key]) for key in sorted(model) if start <= key < end]
                    assert list(store.scan_from(start, end)) == expected
                case ("flush",):
                    store.flush()
                case ("reopen",):
                    store.snapshot(tmp_path / f"s{number}")
                    store.close()
                    store = self.open(tmp_path / f"s{number}")
        assert list(store.scan(b"")) == sorted(model.items())
        store.close()


@given(keys | st.binary(max_size=6), keys | st.binary(max_size=6))
def prefix_end_is_exact(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    assert key.startswith(prefix) == (prefix <= key and (end is None or key < end))
