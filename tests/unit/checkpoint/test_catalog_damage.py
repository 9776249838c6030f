"""Damaged, wrongly typed and malicious manifests and blobs: each gives one line of error, and the rest goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import pyarrow as pa
import pytest
import zstandard
from typer.testing import CliRunner

from stateflow.checkpoint import CheckpointStore, Codec, Manifest, Retention, collect
from stateflow.checkpoint.backend import LocalBackend, Stored
from stateflow.checkpoint.catalog import MANIFEST_BYTES_MAX, MANIFESTS, _checksum
from stateflow.cli import checkpoint as checkpoint_commands
from stateflow.cli.app import app
from stateflow.errors import CheckpointCorrupt, CheckpointMissing, StateflowError, Unavailable
from stateflow.operator.arrow import read_table
from stateflow.operator.operator import describe
from stateflow.partition.checkpoints import read_checkpoint
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.contract.backends import P, manifest_of, small
from tests.sizes import SEED
from tests.unit.operators import Count


def sealed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Applies a change to a manifest and gives it a valid checksum."""

    def made(data: bytes) -> bytes:
        values = json.loads(json.loads(data)["body"])
        change(values)
        body = json.dumps(values)
        return json.dumps({"body": body, "checksum": _checksum(body)}).encode()

    return made


def body(text: str) -> Callable[[bytes], bytes]:
    return lambda _: json.dumps({"body": text, "checksum": _checksum(text)}).encode()


def set_(**fields: Any) -> Callable[[bytes], bytes]:
    return sealed(lambda values: values.update(fields))


def in_file(**fields: Any) -> Callable[[bytes], bytes]:
    return sealed(lambda values: values["files"][0].update(fields))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda data: data[: len(data) // 2],
    "no text": lambda _: b"\xff\xfe\x00",
    "a list": lambda _: b"[]",
    "a number": lambda _: b"7",
    "nested deeply": lambda _: b"[" * 200_000,
    "nested deeply within": body("[" * 200_000),
    "nested deeply as a schema": body('{"format": 2, "schema": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "no fields": body("{}"),
    "format of another type": set_(format=[]),
    "format not a number": set_(format="x"),
    "infinite format": body('{"format": 1e999}'),
    "unknown field": set_(more=1),
    "sequence as text": set_(sequence="7"),
    "sequence true": set_(sequence=True),
    "negative epoch": set_(epoch=-1),
    "huge epoch": set_(epoch=1 << 80),
    "positions a list": set_(positions=[1]),
    "position as text": set_(positions={"s": "x"}),
    "files a map": set_(files={}),
    "a file a number": set_(files=[7]),
    "files twice": sealed(lambda values: values["files"].append(values["files"][0])),
    "operator a list": set_(operator=[]),
    "partitions as text": set_(partitions="many"),
    "states of another type": set_(schema=[{"name": 1}]),
    "states a text": set_(schema="x"),
    "key a text": set_(key="k"),
    "file name leads out": in_file(name="../../etc/x"),
    "file name with a zero": in_file(name="a\0b"),
    "file name a number": in_file(name=7),
    "size as text": in_file(size="8"),
    "negative size": in_file(size=-1),
    "digest of another type": in_file(digest=7),
    "blob leads out": in_file(blob="../../../etc/passwd"),
    "blob a list": in_file(blob=[]),
    "watermark as text": set_(watermark_us="now"),
    "another partition": set_(partition=9),
}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(str(tmp_path / "store"), codec=Codec())
    directory = small(tmp_path, a="a")
    for number in (0, 1):
        store.save(manifest_of(directory, partition=PartitionId("Op", number), partitions=2), directory)
    directory = small(tmp_path, a="newer")
    store.save(manifest_of(directory, 1, 2, PartitionId("Op", 0), partitions=2), directory, savepoint="s1")
    store.save(manifest_of(directory, 1, 2, PartitionId("Op", 1), partitions=2), directory, savepoint="s1")
    return store


def newest_of(store: CheckpointStore) -> Path:
    return Path(store.url) / store.catalog.checkpoints(PartitionId("Op", 0))[0].name


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.stdout + ("" if "--json" in arguments else result.stderr)


#: damages that the gate tests, chosen anew with each commit's seed
IN_TURN = Random(SEED).sample(sorted(DAMAGES), 12)


@pytest.mark.parametrize(
    "damage", [pytest.param(each, marks=() if each in IN_TURN else pytest.mark.thorough) for each in DAMAGES]
)
def test_a_damaged_manifest_is_one_line_and_the_rest_goes_on(store: CheckpointStore, damage: str) -> None:
    path = newest_of(store)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    url = ("--checkpoints", store.url)
    passed_over: list[StateflowError] = []
    assert [each.sequence for each in store.newest(PartitionId("Op", 0), passed_over)] == [1]
    assert [type(error) for error in passed_over] == [CheckpointCorrupt]
    assert len(str(passed_over[0])) < 600
    status, text = said("checkpoint", "list", *url, "--json")
    answer = json.loads(text.splitlines()[-1])
    assert (status, len(answer["checkpoints"]), len(answer["unreadable"])) == (1, 2, 1)
    status, text = said("checkpoint", "verify", *url, "--json")
    answer = json.loads(text.splitlines()[-1])
    assert (status, answer["sound"], len(answer["checkpoints"]), len(answer["unreadable"])) == (1, False, 2, 1)
    assert said("checkpoint", "list", *url)[1].count("checkpoint_corrupt") == 1
    report = collect(store, Retention(keep=1))
    assert report.unreadable
    assert (report.blobs_deleted, bool(report.held_up)) == (0, True)
    status, text = said("state", "scan", "Op", "n", "--from", store.url)
    assert (status, text.strip().count("\n")) == (1, 0)
    assert text.startswith("checkpoint_corrupt: "), "an older one is not read without saying so"


def test_a_damaged_savepoint_and_the_rest_is_verified(store: CheckpointStore) -> None:
    path = Path(store.url) / store.catalog.savepoints("s1")[0].name
    path.write_bytes(b"{")
    status, text = said("checkpoint", "verify", "--savepoint", "s1", "--checkpoints", store.url, "--json")
    answer = json.loads(text.splitlines()[-1])
    assert (status, len(answer["checkpoints"]), len(answer["unreadable"])) == (1, 1, 1)


def test_a_manifest_that_is_too_large_is_not_read(store: CheckpointStore) -> None:
    path = newest_of(store)
    with path.open("r+b") as file:
        file.truncate(MANIFEST_BYTES_MAX + 1)
    passed_over: list[StateflowError] = []
    assert [each.sequence for each in store.newest(PartitionId("Op", 0), passed_over)] == [1]
    assert "the manifest is too large" in str(passed_over[0])


def test_a_partition_without_a_checkpoint_is_missed(store: CheckpointStore) -> None:
    for found in store.catalog.checkpoints(PartitionId("Op", 1)):
        store.objects.delete(found.name)
    assert {each.partition for each in store.catalog.checkpoints()} == {PartitionId("Op", 0)}
    for command in ("list", "verify"):
        status, text = said("checkpoint", command, "--checkpoints", store.url, "--json")
        answer = json.loads(text.splitlines()[-1])
        assert status == 1
        assert [error["code"] for error in answer["unreadable"]] == ["checkpoint_missing"]
        assert answer["unreadable"][0]["where"]["partition"] == "Op/1"
    assert said("checkpoint", "verify", "--checkpoints", store.url)[1].count("the partition has no checkpoint") == 1


def counted(tmp_path: Path, partitions: int) -> tuple[CheckpointStore, ReplicaNode]:
    store = CheckpointStore(str(tmp_path / "counted"), codec=Codec())
    node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path / "a", ReplicaSettings())
    node.create(describe(Count, partitions, "Op"), range(partitions), 1)
    for partition in node.owned():
        node.checkpointer.take(partition, store)
    return store, node


def test_reading_never_leaves_out_a_partition_silently(tmp_path: Path) -> None:
    store, node = counted(tmp_path, 3)
    node.close()
    assert [read_table(page).num_rows for page in read_checkpoint(store, "Op", "n", cls=Count)] == [0, 0, 0]
    (gone,) = store.catalog.checkpoints(PartitionId("Op", 1))
    store.objects.delete(gone.name)
    with pytest.raises(CheckpointMissing, match="no checkpoint") as caught:
        list(read_checkpoint(store, "Op", "n", cls=Count))
    assert caught.value.where["partition"] == PartitionId("Op", 1)
    lacking: list[StateflowError] = []
    list(read_checkpoint(store, "Op", "n", cls=Count, lacking=lacking.append))
    assert [type(error) for error in lacking] == [CheckpointMissing]
    refused = 0
    for number in range(12):
        try:
            list(read_checkpoint(store, "Op", "n", cls=Count, key=f"key {number}"))
        except CheckpointMissing:
            refused += 1
    assert 0 < refused < 12, "keys of the partition that is missing"


def test_a_partition_whose_newest_checkpoint_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """A partition is left out rather than read from an older checkpoint: the result would mix states of two moments."""
    store, node = counted(tmp_path, 3)
    rows = pa.RecordBatch.from_pylist([{"k": "a", "v": 1}])
    apply_to(
        node,
        PartitionId("Op", 0),
        1,
        Batch("s", 0),
        rows.schema.serialize().to_pybytes(),
        rows.serialize().to_pybytes(),
    )
    node.checkpointer.take(PartitionId("Op", 0), store)
    node.close()
    newest, _ = store.catalog.checkpoints(PartitionId("Op", 0))
    (Path(store.url) / newest.name).write_bytes(b"torn")
    lacking: list[StateflowError] = []
    pages = list(read_checkpoint(store, "Op", "n", cls=Count, lacking=lacking.append))
    assert [type(error) for error in lacking] == [CheckpointCorrupt]
    assert len(pages) == 2


def test_what_inflates_is_not_inflated(tmp_path: Path) -> None:
    """Some kilobytes that decompress to 400 MB: no more than the declared size is written."""
    store = CheckpointStore(str(tmp_path / "store"), codec=Codec("zstd"))
    directory = small(tmp_path, a="small")
    manifest = store.save(manifest_of(directory), directory).manifest
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(400_000_000))
    assert len(bomb) < 50_000
    (Path(store.url) / "blobs" / manifest.files[0].blob).write_bytes(bomb)
    with pytest.raises(CheckpointCorrupt, match="does not match its size and digest"):
        store.restore(manifest, tmp_path / "restored")
    assert (tmp_path / "restored" / "a").stat().st_size <= manifest.files[0].size


def test_what_there_is_no_room_for_is_not_fetched(tmp_path: Path) -> None:
    from dataclasses import replace

    store = CheckpointStore(str(tmp_path / "store"))
    directory = small(tmp_path, a="small")
    manifest = store.save(manifest_of(directory), directory).manifest
    huge = replace(manifest, files=(replace(manifest.files[0], size=1 << 60),))
    with pytest.raises(Unavailable, match=f"has {1 << 60} bytes"):
        store.restore(huge, tmp_path / "restored")
    assert not list((tmp_path / "restored").iterdir())


def test_a_sound_manifest_is_read(store: CheckpointStore) -> None:
    path = newest_of(store)
    assert path.is_relative_to(Path(store.url) / MANIFESTS)
    whole = path.read_bytes()
    assert isinstance(Manifest.decode(set_(watermark_us=None)(whole), "x"), Manifest)
    assert isinstance(Manifest.decode(set_(positions={"s": -1})(whole), "x"), Manifest)
    assert P.operator == "Op"


class Mending(LocalBackend):
    """A backend that replaces the damaged blob by a sound one right after the ``at``-th read of it."""

    def __init__(self, root: Path, blob: str, content: bytes, at: int) -> None:
        super().__init__(root)
        self._name, self._content, self._left = f"blobs/{blob}", content, at

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        super().download(name, file, expected)
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                (self.root / name).unlink()
                (self.root / name).write_bytes(self._content)


@pytest.mark.parametrize("at", [1, 2], ids=["after it was proved", "while it is read once more"])
def test_a_blob_that_was_mended_meanwhile_is_not_dropped(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    (file,) = next(store.newest(PartitionId("Op", 0))).files
    path = Path(store.url) / "blobs" / file.blob
    whole = path.read_bytes()
    path.write_bytes(b"NEWER")
    mending = Mending(Path(store.url), file.blob, whole, at)
    monkeypatch.setattr(checkpoint_commands, "opened", lambda url: CheckpointStore(url, codec=Codec(), backend=mending))
    status, out = said("checkpoint", "verify", "--checkpoints", store.url, "--drop-damaged", "--json")
    assert (status, json.loads(out)["damaged_blobs"], json.loads(out)["dropped_blobs"]) == (1, [file.blob], [])
    assert path.read_bytes() == whole


def test_what_is_damaged_is_dropped_and_what_is_missing_is_said(store: CheckpointStore) -> None:
    damaged, missing = (next(iter(list(store.newest(PartitionId("Op", 0)))[age].files)).blob for age in (0, 1))
    (Path(store.url) / "blobs" / damaged).write_bytes(b"x")
    (Path(store.url) / "blobs" / missing).unlink()
    status, out = said("checkpoint", "verify", "--checkpoints", store.url, "--all", "--drop-damaged", "--json")
    answer = json.loads(out)
    assert (status, answer["damaged_blobs"], answer["dropped_blobs"]) == (1, [damaged], [damaged])
    assert [each["missing"] for each in answer["checkpoints"]] == [[], [missing]] * 2
    assert not (Path(store.url) / "blobs" / damaged).exists()


class Listing(LocalBackend):
    """A store that lists what is not there, too."""

    names: tuple[str, ...] = ()

    def list(self, prefix: str) -> list[Stored]:
        return [*super().list(prefix), *(Stored(name, 5, 0) for name in self.names)]


NAMED = "000000000001-0000000000000009.json"


@pytest.mark.parametrize(
    "name",
    [
        f"manifests/../../x/p00000/{NAMED}",
        f"manifests/Op/../Op/p00000/{NAMED}",
        f"x/manifests/Op/p00000/{NAMED}",
        f"manifests/\x1b[2J/p00000/{NAMED}",
        f"manifests/{'x' * 200}/p00000/{NAMED}",
        f"manifests/Op/p{'9' * 5000}/{NAMED}",
        f"manifests/Op/p00000/{NAMED[:-5]}-{'9' * 5000}.json",
        "savepoints/../Op/p00000.json",
        "savepoints/s/../../p00000.json",
        f"savepoints/s/Op/p{'9' * 5000}.json",
        "savepoints/a\nb/Op/p00000.json",
    ],
    ids=lambda name: ascii(name[:50]),
)
def test_a_name_that_no_replica_writes_is_no_checkpoint(store: CheckpointStore, name: str) -> None:
    """A number of thousands of digits used to end in a ValueError, and a path could lead out of the store."""
    sound = [*store.catalog.checkpoints(), *store.catalog.savepoints()]
    backend = Listing(Path(store.url))
    backend.names = (name,)
    other = CheckpointStore("x://y", backend=backend)
    assert [*other.catalog.checkpoints(), *other.catalog.savepoints()] == sound
