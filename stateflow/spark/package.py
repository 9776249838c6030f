"""Packs this package as a zip that Spark sends to executors: modules only, each with its compiled code.

A Python worker that found only the text would compile it each time the worker begins.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import py_compile
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stateflow.errors import InvalidArgument
from stateflow.release import VERSION

#: packages that processes on executors import
_PACKAGES = ("stateflow", "reconfig")
_DISTRIBUTION = "stateflow-streams"
#: files written for users, which are no modules of the package
_NOT_MODULES = ("stateflow/project/files/", "stateflow/examples/")
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Written:
    """A zip that was written.

    ``python``: the version whose compiled code it has; other versions compile the text. ``requires``: requirements that
    are not in the zip, in pip's form.
    """

    file: Path
    version: str
    python: str
    modules: int
    requires: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "file": str(self.file)}


def package(out: Path) -> Written:
    """Writes the zip. Raises InvalidArgument where it cannot be written, or this package is in a zip itself."""
    modules = 0
    try:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text, code in _modules():
                archive.writestr(zipfile.ZipInfo(name, _DATE), text, zipfile.ZIP_DEFLATED)
                archive.writestr(zipfile.ZipInfo(f"{name}c", _DATE), code, zipfile.ZIP_DEFLATED)
                modules += 1
    except OSError as error:
        raise InvalidArgument(f"{out} cannot be written: {error.strerror}", remedy="name another file") from error
    python = ".".join(map(str, sys.version_info[:2]))
    return Written(out, VERSION, python, modules, _requires())


def _modules() -> Iterator[tuple[str, bytes, bytes]]:
    """Yields (path in the zip, text, compiled code) of each module.

    The compiled code holds no time of its source file, so Python does not look for that file.
    """
    with tempfile.TemporaryDirectory(prefix="stateflow-package-") as folder:
        compiled = Path(folder) / "compiled"
        for package in _PACKAGES:
            root = _root(package)
            for path in sorted(root.rglob("*.py")):
                name = f"{package}/{path.relative_to(root).as_posix()}"
                if not name.startswith(_NOT_MODULES):
                    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
                    py_compile.compile(str(path), str(compiled), name, doraise=True, invalidation_mode=unchecked)
                    yield name, path.read_bytes(), compiled.read_bytes()


def _root(package: str) -> Path:
    found = importlib.util.find_spec(package)
    root = None if found is None or found.origin is None else Path(found.origin).parent
    if root is None or not root.is_dir():
        raise InvalidArgument(
            f"{package} is not installed as plain files",
            remedy="build the zip where it is: pip install stateflow-streams",
        )
    return root


def _requires() -> tuple[str, ...]:
    """Requirements of the distribution and its extra ``spark``; empty where it is on the path but not installed."""
    try:
        required = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = []
    for each in required:
        wanted, _, marker = each.partition(";")
        if "extra" not in marker or re.search(r"""extra\s*==\s*["']spark["']""", marker):
            found.append(wanted.strip())
    return tuple(found)
