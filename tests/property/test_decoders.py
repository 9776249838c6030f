"""Decoders of foreign bytes: any bytes give a value or a StateflowError, and no path outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.changes import ChangeSet, Mutations
from stateflow.checkpoint.catalog import Manifest
from stateflow.errors import CheckpointCorrupt, StateflowError
from stateflow.operator.output import join_output, split_output
from stateflow.partition import layout
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc.faults import error_of
from tests.sizes import sized

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text() | st.integers(0, 9) | st.binary(), inner),
    max_leaves=20,
)
packed = st.binary() | values.map(msgpack.packb)


def headed(*versions: int) -> st.SearchStrategy[bytes]:
    """Draws bytes that begin as a valid message does."""
    rest = st.lists(values, max_size=12)
    return packed | st.builds(lambda version, more: msgpack.packb([version, *more]), st.sampled_from(versions), rest)


def decoded(decode: Callable[[bytes], Any], data: bytes) -> None:
    said = ""
    try:
        decode(data)
    except StateflowError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 1000


@given(packed | st.lists(values, max_size=9).map(lambda rest: msgpack.packb([1, *rest])))
def test_change_sets(data: bytes) -> None:
    decoded(ChangeSet.decode, data)
    decoded(ChangeSet.decode, data + xxhash.xxh64_digest(data))  # any sender can add the checksum


@given(headed(1, 2, 3))
def test_entries_of_a_copy(data: bytes) -> None:
    for decode in (layout.Position.decode, layout.Ownership.decode, layout.Session.decode):
        decoded(decode, data)


@given(headed(1))
def test_outputs(data: bytes) -> None:
    decoded(split_output, data)
    decoded(split_output, b"\x00" + data)


def manifest(**changed: Any) -> bytes:
    sound: dict[str, Any] = {
        "format": 2,
        **{"operator": "Op", "partition": 0, "epoch": 1, "sequence": 1, "digest": "0" * 32, "positions": {}},
        **{"created_us": 0, "replica": "r"},
        "files": [{"name": "CURRENT", "size": 1, "digest": "0" * 32, "blob": ""}],
    }
    body = json.dumps(sound | changed)
    return json.dumps({"body": body, "checksum": xxhash.xxh3_128_hexdigest(body.encode())}).encode()


jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@settings(max_examples=sized(240))
@given(st.binary() | jsons.map(lambda value: json.dumps(value).encode()))
def test_manifests(data: bytes) -> None:
    decoded(lambda each: Manifest.decode(each, "somewhere"), data)


@settings(max_examples=sized(240))
@given(jsons)
def test_files_of_manifests(files: Any) -> None:
    decoded(lambda each: Manifest.decode(each, "somewhere"), manifest(files=files))


@pytest.mark.parametrize(
    "file",
    [
        {"name": "../x", "size": 1, "digest": "0" * 32, "blob": ""},
        {"name": "x", "size": 1, "digest": "../../../etc/passwd", "blob": ""},
        {"name": "x", "size": 1, "digest": "0" * 32, "blob": "../../etc/passwd"},
        {"name": "x", "size": 1, "digest": "0" * 32, "blob": "/etc/passwd"},
    ],
    ids=str,
)
def test_a_manifest_names_no_path(file: dict[str, Any]) -> None:
    assert Manifest.decode(manifest(), "somewhere").files[0].name == "CURRENT"
    with pytest.raises(CheckpointCorrupt):
        Manifest.decode(manifest(files=[file]), "somewhere")


def test_a_manifest_without_bottom() -> None:
    with pytest.raises(CheckpointCorrupt):
        Manifest.decode(b"[" * 1_000_000, "somewhere")


@given(st.dictionaries(st.text(), st.text()), st.text(), st.text())
def test_faults(where: dict[str, str], code: str, what: str) -> None:
    """Keys of ``where`` may also be "self", "what" or "traceback"."""
    for more in ({}, {"self": "x"}, {"what": "x"}, {"remedy": "x"}):
        error = error_of(pb.Fault(code=code, what=what, where=where | more))
        assert str(error).isprintable()


def test_sound_ones_come_through() -> None:
    change_set = ChangeSet("Op", 1, 2, 3, "s", 4, Mutations([(b"a", b"b")], [b"c"], [(b"d", b"e")]))
    assert ChangeSet.decode(change_set.encode()) == change_set
    for entry in (
        layout.Position(3, attempt=layout.Attempt("r", "u", "t", "c"), known=b"x"),
        layout.Ownership("r", "OWNED", 3, "m"),
        layout.Session(5, "id"),
    ):
        assert type(entry).decode(entry.encode()) == entry
    assert split_output(join_output(b"m", {"late": b"x"})) == (b"m", {"late": b"x"})
