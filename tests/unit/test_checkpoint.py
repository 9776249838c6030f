"""The checkpoint store: content-addressed, newest by name, torn and damaged things found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stateflow.changes import Mutations
from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile
from stateflow.errors import CheckpointCorrupt, ExtraMissing, InvalidArgument, StaleCheckpoint
from stateflow.runtime.transfer import FileDigests, base_digest
from stateflow.storage import RocksEngine, RocksStore
from stateflow.types import PartitionId

P = PartitionId("Op", 3)
COUNT = 20_000


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "checkpoints"))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksEngine(8 << 20, 8 << 20).open(tmp_path / "db", create=True)
    store.apply(Mutations(puts=[(b"%06d" % n, b"value %d" % n * 5) for n in range(COUNT)]))
    yield store
    store.close()


def manifest_of(directory: Path, epoch: int = 1, sequence: int = 1, partition: PartitionId = P) -> Manifest:
    files = FileDigests().files(directory)
    return Manifest(
        partition.operator,
        partition.partition,
        epoch,
        sequence,
        base_digest(files, sequence),
        {"s": sequence},
        1_700_000_000_000_000,
        "edge-0",
        tuple(ManifestFile(file.name, file.size, file.digest) for file in files),
    )


def small(tmp_path: Path, **content: str) -> Path:
    """A directory with these files, as a snapshot would be."""
    directory = tmp_path / f"snapshot-{len(list(tmp_path.iterdir()))}"
    directory.mkdir()
    for name, text in content.items():
        (directory / name).write_text(text)
    return directory


def saved(store: CheckpointStore, directory: Path, epoch: int = 1, sequence: int = 1) -> Manifest:
    return store.save(manifest_of(directory, epoch, sequence), directory).manifest


def blobs(store: CheckpointStore) -> dict[str, Path]:
    return {path.name: path for path in Path(store._root).glob("blobs/*/*")}


def test_restore_equals(checkpoints: CheckpointStore, db: RocksStore, tmp_path: Path) -> None:
    db.snapshot(tmp_path / "snapshot")
    content = dict(db.scan(b""))
    manifest = saved(checkpoints, tmp_path / "snapshot", sequence=7)
    db.apply(Mutations(clears=[(b"0", b"9")]))
    (newest,) = checkpoints.newest(P)
    assert newest == manifest
    checkpoints.restore(newest, tmp_path / "restored")
    restored = RocksEngine(8 << 20, 8 << 20).open(tmp_path / "restored")
    assert dict(restored.scan(b"")) == content
    assert len(content) == COUNT
    restored.close()
    files = FileDigests().files(tmp_path / "snapshot")
    assert base_digest(files, 7) == newest.digest, "what was uploaded is what was hashed"


def test_unchanged_files_are_not_uploaded_again(checkpoints: CheckpointStore, db: RocksStore, tmp_path: Path) -> None:
    db.snapshot(tmp_path / "one")
    first = checkpoints.save(manifest_of(tmp_path / "one", sequence=1), tmp_path / "one")
    assert first.bytes_new == first.bytes_total == sum(file.size for file in first.manifest.files)
    sst = {file.digest for file in first.manifest.files if file.name.endswith(".sst")}
    assert sst
    times = {digest: blobs(checkpoints)[digest].stat().st_mtime_ns for digest in sst}
    db.apply(Mutations(puts=[(b"one more", b"x")]))
    db.snapshot(tmp_path / "two")
    second = checkpoints.save(manifest_of(tmp_path / "two", sequence=2), tmp_path / "two")
    assert sst < {file.digest for file in second.manifest.files}
    assert 0 < second.bytes_new < second.bytes_total / 5
    assert second.bytes_total > first.bytes_total * 0.9
    assert {digest: blobs(checkpoints)[digest].stat().st_mtime_ns for digest in sst} == times
    for manifest in checkpoints.newest(P):  # both can be restored
        checkpoints.restore(manifest, tmp_path / f"restored-{manifest.sequence}")


def test_equal_content_of_two_partitions_is_kept_once(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    directory = small(tmp_path, a="same", b="other")
    other = PartitionId("Op", 4)
    saved(checkpoints, directory)
    again = checkpoints.save(manifest_of(directory, partition=other), directory)
    assert again.bytes_new == 0
    assert len(blobs(checkpoints)) == 2
    assert [m.partition for m in checkpoints.newest(other)] == [4]


def test_newest_first_by_epoch_then_sequence(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    orders = [(1, 1), (1, 2), (1, 10), (2, 3), (2, 100), (10, 0), (10, 1)]
    for number, (epoch, sequence) in enumerate(orders):
        saved(checkpoints, small(tmp_path, f=f"{number}"), epoch, sequence)
    assert [manifest.order for manifest in checkpoints.newest(P)] == orders[::-1]
    assert list(checkpoints.newest(PartitionId("Op", 30))) == []
    assert list(checkpoints.newest(PartitionId("Other", 3))) == []


@pytest.mark.parametrize("order", [(2, 5), (2, 4), (1, 99), (1, 5)])
def test_stale_is_refused_and_nothing_is_written(
    checkpoints: CheckpointStore, tmp_path: Path, order: tuple[int, int]
) -> None:
    saved(checkpoints, small(tmp_path, f="new"), 2, 5)
    before = {path for path in Path(checkpoints._root).rglob("*") if path.is_file()}
    with pytest.raises(StaleCheckpoint) as caught:
        saved(checkpoints, small(tmp_path, f="late"), *order)
    assert caught.value.where == {"operator": "Op", "partition": 3}
    assert {path for path in Path(checkpoints._root).rglob("*") if path.is_file()} == before


def test_a_late_upload_never_becomes_the_newest(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """The old owner looked before the new one published, and publishes after: its name is smaller all the same."""
    late = small(tmp_path, f="old owner")
    store = CheckpointStore(checkpoints._root)
    store.newest = lambda partition: iter(())  # type: ignore[method-assign,assignment]
    saved(checkpoints, small(tmp_path, f="new owner"), 3, 1)
    saved(store, late, 2, 900)
    assert next(checkpoints.newest(P)).order == (3, 1)


def manifest_path(store: CheckpointStore) -> Path:
    return max(Path(store._root).glob("manifests/Op/p00003/*.json"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data.replace(b"edge-0", b"edge-1"),
        lambda data: data.replace(b'sequence\\": 2', b'sequence\\": 9'),
        lambda data: b"[]",
        lambda data: b"null",
        lambda data: b"7",
        lambda data: b'{"body": 7, "checksum": "x"}',
        lambda data: b'{"body": null, "checksum": null}',
        lambda data: b"\xff\xfe\x00",
        lambda data: bytes(len(data)),
    ],
)
def test_a_torn_manifest_is_passed_over(checkpoints: CheckpointStore, tmp_path: Path, damage: Any) -> None:
    good = saved(checkpoints, small(tmp_path, f="1"), 1, 1)
    torn = saved(checkpoints, small(tmp_path, f="2"), 1, 2)
    path = manifest_path(checkpoints)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert list(checkpoints.newest(P)) == [good]
    with pytest.raises(CheckpointCorrupt) as caught:
        Manifest.decode(path.read_bytes(), "here")
    assert caught.value.where["place"] == "here"
    again = saved(checkpoints, small(tmp_path, f="2"), 1, 2)
    assert again == torn, "the place of a torn one is free"
    assert list(checkpoints.newest(P)) == [again, good]


def test_a_format_of_a_newer_program_is_passed_over(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    good = saved(checkpoints, small(tmp_path, f="1"), 1, 1)
    saved(checkpoints, small(tmp_path, f="2"), 1, 2)
    path = manifest_path(checkpoints)
    body = json.dumps({**json.loads(json.loads(path.read_bytes())["body"]), "format": 2})
    path.write_text(json.dumps({"body": body, "checksum": xxhash.xxh3_128_hexdigest(body.encode())}))
    assert list(checkpoints.newest(P)) == [good]


def test_a_corrupt_blob_is_found(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    manifest = saved(checkpoints, small(tmp_path, a="aaaa", b="bbbb"))
    bad = next(file for file in manifest.files if file.name == "b")
    blobs(checkpoints)[bad.digest].write_text("bbbx")
    with pytest.raises(CheckpointCorrupt, match="has other content") as caught:
        checkpoints.restore(manifest, tmp_path / "restored")
    assert bad.digest in caught.value.what
    assert caught.value.where == {"operator": "Op", "partition": 3, "epoch": 1, "sequence": 1}


def test_a_missing_blob_is_found(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    manifest = saved(checkpoints, small(tmp_path, a="aaaa"))
    blobs(checkpoints)[manifest.files[0].digest].unlink()
    with pytest.raises(CheckpointCorrupt, match="is missing"):
        checkpoints.restore(manifest, tmp_path / "restored")


def test_a_blob_cut_short_by_a_crash_is_uploaded_again(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    directory = small(tmp_path, a="aaaa")
    manifest = saved(checkpoints, directory, 1, 1)
    blob = blobs(checkpoints)[manifest.files[0].digest]
    blob.write_text("aa")
    assert checkpoints.save(manifest_of(directory, 1, 2), directory).bytes_new == 4
    assert blob.read_text() == "aaaa"


def test_a_manifest_is_published_after_its_blobs(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    directory = small(tmp_path, a="aaaa", b="bbbb")
    manifest = manifest_of(directory)
    (directory / "b").unlink()
    with pytest.raises(FileNotFoundError):
        checkpoints.save(manifest, directory)
    assert list(checkpoints.newest(P)) == []


def test_any_fsspec_url(tmp_path: Path) -> None:
    store = CheckpointStore("memory://stateflow-tests")
    manifest = saved(store, small(tmp_path, a="aaaa"))
    assert list(store.newest(P)) == [manifest]
    store.restore(manifest, tmp_path / "restored")
    assert (tmp_path / "restored" / "a").read_text() == "aaaa"
    with pytest.raises(StaleCheckpoint):
        saved(store, small(tmp_path, a="aaaa"))


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument):
        CheckpointStore(str(tmp_path / "file" / "below"))
    with pytest.raises((InvalidArgument, ExtraMissing)):
        CheckpointStore("nosuchprotocol://bucket/x")


names = st.text("ab", min_size=1, max_size=5)
manifests = st.builds(
    Manifest,
    names,
    st.integers(0, 65_535),
    st.integers(1, 1 << 40),
    st.integers(0, 1 << 50),
    names,
    st.dictionaries(st.text(max_size=5), st.integers(-1, 1 << 60), max_size=3),
    st.integers(0, 1 << 60),
    names,
    st.lists(st.builds(ManifestFile, st.text(max_size=5), st.integers(0, 1 << 40), names), max_size=3).map(tuple),
)


@given(manifests)
def test_manifest_round_trip(manifest: Manifest) -> None:
    assert Manifest.decode(manifest.encode(), "x") == manifest


@given(manifests, st.data())
def test_every_flipped_byte_of_a_manifest_is_noticed(manifest: Manifest, data: st.DataObject) -> None:
    encoded = bytearray(manifest.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert Manifest.decode(bytes(encoded), "x") == manifest  # a flip that JSON does not see, as of a \u escape
    except CheckpointCorrupt:
        pass
