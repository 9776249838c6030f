"""Packing of operators: what is packed, and what is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.client.packing import comes_along, pack
from stateflow.code.bundles import BundleStore, package_of
from stateflow.demo.operators import DelayByAircraft
from stateflow.errors import BundleRefused
from stateflow.operator.operator import load

OPS = """
from stateflow import Operator
from baskets import shelf
class Held(Operator):
    key, output = "k", "k string"
    def process(self, row, ctx):
        import tiny_requirement
        return {"k": shelf.NAME + tiny_requirement.WORD}
"""


@pytest.fixture
def baskets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    root = tmp_path / "baskets"
    (root / "__pycache__").mkdir(parents=True)
    for name, text in {
        "__init__.py": "", "ops.py": OPS, "shelf.py": "NAME = 'shelf '", "words.txt": "x",
        ".hidden": "x", "__pycache__/ops.pyc": "x",
    }.items():  # fmt: skip
        (root / name).write_text(text)
    (tmp_path / "alone.py").write_text("NAME = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("baskets.ops").Held
    for name in [each for each in sys.modules if each.partition(".")[0] in ("baskets", "alone")]:
        del sys.modules[name]


def wheel(folder: Path, pure: bool = True, name: str = "tiny_requirement") -> Path:
    path = folder / f"{name}-1.0-{'py3-none-any' if pure else 'cp311-cp311-linux_x86_64'}.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "WORD = 'and what it requires'")
        archive.writestr(f"{name}-1.0.data/scripts/run", "")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\nTag: x\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def names(packed: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(packed)).namelist())


def test_a_package_is_packed_whole_and_the_same_twice(baskets: Any) -> None:
    one = pack(baskets)
    assert names(one.packed) == {f"code/baskets/{name}" for name in ("__init__.py", "ops.py", "shelf.py", "words.txt")}
    assert pack(baskets) == one
    more = pack(baskets, modules=["alone"])
    assert names(more.packed) - names(one.packed) == {"code/alone.py"}


def test_a_linked_package_is_packed_and_a_circle_refused(baskets: Any, tmp_path: Path) -> None:
    """A linked directory used to be left out, and batches failed."""
    shared = tmp_path / "shared"
    (shared / "__pycache__").mkdir(parents=True)
    (shared / "__init__.py").write_text("")
    (tmp_path / "baskets" / "helpers").symlink_to(shared)
    assert "code/baskets/helpers/__init__.py" in names(pack(baskets).packed)
    for above in (tmp_path / "baskets", tmp_path, Path("/")):
        (shared / "again").symlink_to(above)
        with pytest.raises(BundleRefused, match="again leads back to a directory that contains it"):
            pack(baskets)
        (shared / "again").unlink()


def test_a_file_that_cannot_be_read_is_named(baskets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(BundleRefused, match=r"baskets/__init__\.py cannot be read: Permission denied"):
        pack(baskets)


def test_what_it_requires_is_packed_and_found(baskets: Any, tmp_path: Path) -> None:
    bundle = pack(baskets, [str(wheel(tmp_path))])
    assert {"lib/tiny_requirement.py", "lib/tiny_requirement-1.0.dist-info/METADATA"} <= names(bundle.packed)
    assert not any("scripts" in name for name in names(bundle.packed))
    store = BundleStore(tmp_path / "store")
    store.keep(bundle.digest, bundle.packed)
    cls = load("baskets.ops:Held", "", package_of(bundle.digest, store.opened(bundle.digest)))
    assert cls().process({}, None) == {"k": "shelf and what it requires"}


# stateflow itself, a package that it requires, and one that such a package requires
@pytest.mark.parametrize("there", ["stateflow_streams", "msgpack", "h11"])
def test_what_is_wherever_replicas_run_is_not_packed(baskets: Any, tmp_path: Path, there: str) -> None:
    both = pack(baskets, [str(wheel(tmp_path)), str(wheel(tmp_path, name=there))])
    assert names(both.packed) == names(pack(baskets, [str(wheel(tmp_path))]).packed)


def test_where_it_is_not_installed_nobody_knows_what_it_brings(
    baskets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", nothing)
    with pytest.raises(BundleRefused, match="stateflow-streams is not installed here"):
        pack(baskets, [str(wheel(tmp_path))])
    assert pack(baskets)


def test_what_cannot_be_packed_is_refused(baskets: Any, tmp_path: Path) -> None:
    with pytest.raises(BundleRefused, match="compiled code"):
        pack(baskets, [str(wheel(tmp_path, pure=False))])
    with pytest.raises(BundleRefused, match="pip cannot provide wheels of"):
        pack(baskets, [str(tmp_path / "none-1.0-py3-none-any.whl")])
    with pytest.raises(BundleRefused, match="cannot be imported"):
        pack(baskets, modules=["nowhere_to_be_found"])
    with pytest.raises(BundleRefused, match="a path is not the name of a module"):
        pack(baskets, modules=["./nowhere.py"])
    with pytest.raises(BundleRefused, match="not a module of Python source"):
        pack(baskets, modules=["math"])
    with pytest.raises(BundleRefused, match="already part of every replica"):
        pack(baskets, modules=["stateflow"])
    (tmp_path / "baskets" / "large.bin").write_bytes(__import__("random").Random(1).randbytes(65 << 20))
    with pytest.raises(BundleRefused, match="65 MB, more than 64 MB"):
        pack(baskets)


def test_what_is_a_part_of_stateflow_is_only_named(baskets: Any) -> None:
    assert comes_along(DelayByAircraft)
    assert not comes_along(baskets)
