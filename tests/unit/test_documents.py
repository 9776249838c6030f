"""YAML files that nest or repeat too much, and files that are not YAML."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from stateflow.documents import read_document
from stateflow.errors import InvalidArgument, OutOfMemory, Unavailable
from stateflow.rpc.faults import unexpected
from stateflow.spark.pipeline import load_pipeline

NESTED = "a: " + "[" * 20_000 + "]" * 20_000
LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (NESTED.encode(), "is not valid YAML: sections are nested deeper than 50"),
        (LAUGHS.encode(), "is not valid YAML: its anchors expand to more than 100,000 values"),
        (b"name: x\nsource: &s\n  format: *s\n", "is not valid YAML: an anchor contains itself"),
        (b"name: " + b"y" * 12_000_000, "is larger than 1 MiB"),
        (b"name: x\n\tsource: 1\n", "is not valid YAML: found character '\\t'"),
        (b"name: x\nname: y\n", "is not valid YAML: duplicate key 'name'"),
        (bytes(range(256)), "is not valid YAML: it is not UTF-8"),
        (b"\0\0", "is not valid YAML: unacceptable character"),
        (b"name: 2020-99-99\n", "is not valid YAML: month must be in 1..12"),
        (b"name: " + b"9" * 5000, "is not valid YAML: Exceeds the limit"),
        (b"? [a, b]\n: 1\n", "is not valid YAML: found unhashable key"),
        (b"", "declares no pipeline"),
    ],
)
def test_a_pipeline_file_that_is_none(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "p.yml").write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        load_pipeline(tmp_path / "p.yml", {}, {})
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_anchors_and_merges_that_people_write_are_read(tmp_path: Path) -> None:
    file = tmp_path / "p.yml"
    file.write_text("base: &base {a: 1, b: [x, y]}\none: {<<: *base, a: 2}\ntwo: *base\n")
    assert read_document(file) == {
        "base": {"a": 1, "b": ["x", "y"]},
        "one": {"a": 2, "b": ["x", "y"]},
        "two": {"a": 1, "b": ["x", "y"]},
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), OutOfMemory),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OutOfMemory),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), Unavailable),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), Unavailable),
    ],
)
def test_what_the_environment_did_is_no_fault_of_stateflow(error: BaseException, kind: type) -> None:
    meant = unexpected(error)
    assert type(meant) is kind
    assert "bug in stateflow" not in str(meant)
