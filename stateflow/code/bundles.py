"""Bundles of operator code, loaded so that several versions of a module can live in one process.

A bundle is a zip file, identified by the SHA-256 of its bytes. Its folder ``code/`` has the operator's module or
package, and ``lib/`` has the requirements. Only modules of the bundle search these two folders, before the installed
packages. In Python, the modules of a bundle belong to a package that is named after the bundle's digest. So two
versions of one module are two modules, and each has its own contents.

A module of a bundle uses import statements as usual: its ``__import__`` searches the bundle first. An explicit call of
``importlib`` searches only the installed packages.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import io
import lzma
import shutil
import struct
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from stateflow.errors import BundleDamaged, BundleMissing
from stateflow.private import keep_private

#: limits of a bundle: bytes of the zip file, bytes of its unpacked files, number of files
PACKED_MAX = 64 << 20
UNPACKED_MAX = 512 << 20
FILES_MAX = 50_000
#: folders of a bundle that are searched for modules and packages
PLACES = ("code", "lib")
#: a bundle's package is named by this prefix and the first ``_PART`` characters of the digest
PACKAGE = "stateflow_bundle_"
_PART = 24


def digest_of(packed: bytes) -> str:
    """Returns the SHA-256 of a bundle, in hexadecimal."""
    return hashlib.sha256(packed).hexdigest()


def check(packed: bytes, digest: str) -> None:
    """Checks that a bundle has the given digest, and that all its files can be read. Raises BundleDamaged."""
    found = _files(packed, digest)
    with _reading(digest), zipfile.ZipFile(io.BytesIO(packed)) as archive:
        for info in found:
            with archive.open(info) as file:
                while file.read(1 << 20):
                    pass


@contextmanager
def _reading(digest: str) -> Iterator[None]:
    try:
        yield
    # errors of zipfile for an inconsistent directory, an unknown compression method, a password
    except (zipfile.BadZipFile, zlib.error, struct.error, LookupError, ValueError, ArithmeticError, EOFError) as error:
        raise _damaged(f"it cannot be read ({error})", digest) from error
    except (RuntimeError, lzma.LZMAError, OSError) as error:
        raise _damaged(f"it cannot be unpacked ({error})", digest) from error


def _damaged(what: str, digest: str) -> BundleDamaged:
    return BundleDamaged(f"a bundle is damaged: {what}", remedy="deploy the operator again", bundle=digest)


def _files(packed: bytes, digest: str) -> list[zipfile.ZipInfo]:
    """Lists the files of a bundle.

    Raises BundleDamaged for a wrong digest, for a file outside the folders ``PLACES``, and for a bundle that is too
    large.
    """
    if digest_of(packed) != digest:
        raise _damaged("its digest is not the deployed one", digest)
    with _reading(digest), zipfile.ZipFile(io.BytesIO(packed)) as archive:
        found = [info for info in archive.infolist() if not info.is_dir()]
    for info in found:
        path = PurePosixPath(info.filename)
        if (
            not path.parts
            or path.is_absolute()
            or ".." in path.parts
            or path.parts[0] not in PLACES
            or "\\" in info.filename
        ):
            raise _damaged(f"it has a file outside its directories, {info.filename!r}", digest)
    if len(found) > FILES_MAX or sum(info.file_size for info in found) > UNPACKED_MAX:
        raise BundleDamaged(
            f"a bundle has more than {FILES_MAX} files or {UNPACKED_MAX >> 20} MB",
            remedy="install large dependencies at the sites",
            bundle=digest,
        )
    return found


class BundleStore:
    """The bundles in a data directory. Each process that loads a stored bundle checks and unpacks it again.

    Thread-safe. All methods raise OSError.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mutex = threading.Lock()
        self._open: dict[str, Path] = {}

    def has(self, digest: str) -> bool:
        """Tells whether a bundle is stored. Removes a damaged bundle, and returns False for it."""
        with self._mutex:
            return digest in self._open or self._packed(digest) is not None

    def keep(self, digest: str, packed: bytes) -> None:
        """Checks a bundle and stores it. Raises BundleDamaged."""
        check(packed, digest)
        with self._mutex:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            keep_private(self._root)
            part = self._root / f"{digest}.zip.part"
            part.write_bytes(packed)
            part.replace(self._root / f"{digest}.zip")

    def opened(self, digest: str) -> Path:
        """Unpacks a bundle if this process has not done so, and returns its folder. Raises BundleMissing."""
        with self._mutex:
            if digest not in self._open:
                packed = self._packed(digest)
                if packed is None:
                    raise BundleMissing(
                        "this process has not fetched the operator's bundle yet",
                        remedy="wait until it is fetched from the controller",
                        bundle=digest,
                    )
                place = self._root / digest
                shutil.rmtree(place, ignore_errors=True)
                with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                    for info in _files(packed, digest):
                        archive.extract(info, place)
                self._open[digest] = place
            return self._open[digest]

    def keep_only(self, digests: set[str]) -> None:
        """Removes all bundles except those in ``digests``, and those that this process has loaded."""
        with self._mutex:
            for path in self._root.glob("*") if self._root.exists() else ():
                if path.name.partition(".")[0] not in digests | self._open.keys():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _packed(self, digest: str) -> bytes | None:
        path = self._root / f"{digest}.zip"
        try:
            packed = path.read_bytes()
            _files(packed, digest)
        except FileNotFoundError:
            return None
        except BundleDamaged:
            path.unlink()
            return None
        return packed


# -- importing --------------------------------------------------------------------------------------------


def package_of(digest: str, place: Path) -> str:
    """Returns the name of the package for a bundle that is unpacked at ``place``, and creates the package if needed.

    ``importlib`` imports module ``NAME`` of the bundle as ``PACKAGE.NAME``.
    """
    name = PACKAGE + digest[:_PART]
    if name not in sys.modules:
        package = ModuleType(name, f"Code of the bundle {digest}.")
        package.__path__ = [str(place / each) for each in PLACES if (place / each).is_dir()]
        package.__builtins__ = _builtins(name, package.__path__)  # type: ignore[attr-defined]
        sys.modules[name] = package
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    return name


def builtins_of(package: str) -> dict[str, Any]:
    """Returns the ``__builtins__`` for modules of a bundle.

    Args:
        package: name of the bundle's package, as returned by :func:`package_of`.
    """
    found: dict[str, Any] = vars(sys.modules[package])["__builtins__"]
    return found


class _Finder(MetaPathFinder):
    """Finds the modules of bundles for Python's import system."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PACKAGE) or path is None:
            return None
        portions: list[str] = []
        for entry in path:
            spec = FileFinder(entry, (_Loader, SOURCE_SUFFIXES)).find_spec(fullname)
            if spec is not None and spec.loader is not None:
                return spec
            portions += [] if spec is None else spec.submodule_search_locations or []
        if not portions:
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = portions
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = builtins_of(module.__name__.partition(".")[0])
        super().exec_module(module)

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Writes no bytecode next to the unpacked files."""


def _builtins(package: str, places: Sequence[str]) -> dict[str, Any]:
    names = {each.name.partition(".")[0] for place in places for each in Path(place).iterdir()}

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or top not in names:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        found = importlib.import_module(f"{package}.{name}")
        if not fromlist:
            return sys.modules[f"{package}.{top}"]
        wanted = getattr(found, "__all__", ()) if "*" in fromlist else fromlist
        for each in wanted if hasattr(found, "__path__") else ():
            if not hasattr(found, each):
                _try_import(f"{found.__name__}.{each}")
        return found

    return {**vars(builtins), "__import__": import_}


def _try_import(name: str) -> None:
    """Imports a module if it exists. Otherwise does nothing: the import statement itself then raises an error."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
