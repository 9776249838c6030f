"""Packs an operator's module or package, and its requirements, into a bundle that the cluster distributes to its sites.

The same files give the same bytes, and so the same digest.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stateflow.code.bundles import PACKED_MAX, digest_of
from stateflow.code.loading import is_text
from stateflow.durable import listed
from stateflow.errors import BundleRefused
from stateflow.operator.operator import Operator

_DATE = (1980, 1, 1, 0, 0, 0)
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """Operator code for :meth:`.Cluster.deploy`. ``packed``: a zip file. ``digest``: its SHA-256, hexadecimal.

    Example: ``cluster.deploy(Count, bundle=pack(Count, ["geohash>=1"]))``
    """

    packed: bytes
    digest: str


#: packages that replicas already run: a second copy in a bundle would be another program
_OWN = ("stateflow", "reconfig")
#: name of the installed distribution
_DISTRIBUTION = "stateflow-streams"


def comes_along(operator: type[Operator]) -> bool:
    """Tells whether the operator is part of stateflow, and so present wherever stateflow runs."""
    return operator.__module__.partition(".")[0] in _OWN


def pack(operator: type[Operator], requirements: Iterable[str] = (), modules: Iterable[str] = ()) -> Bundle:
    """Packs the top-level module or package that contains the operator, without compiled or hidden files.

    Args:
        requirements: what to install, as pip accepts it: names, with or without versions, or wheel files. Their own
            requirements are included, except those of stateflow, which are present where replicas run.
        modules: further modules and packages, by their top-level names.

    Raises BundleRefused if a module has no Python source, if pip cannot provide the requirements, if one of them has
    compiled code, or if the bundle would be too large.

    Example: ``pack(Count, requirements=["geohash>=1"]).digest``
    """
    files: dict[str, bytes] = {}
    tops = [] if is_text(f"{operator.__module__}:") or operator.__module__ == "__main__" else [operator.__module__]
    for name in dict.fromkeys(each.partition(".")[0] for each in [*tops, *modules]):
        for path, data in _code(name):
            files[f"code/{path}"] = data
    for wheel in _wheels(list(requirements)):
        for path, data in _unpacked(wheel):
            files.setdefault(f"lib/{path}", data)
    packed = _zipped(files)
    if len(packed) > PACKED_MAX:
        raise BundleRefused(
            f"the bundle has {len(packed) >> 20} MB, more than {PACKED_MAX >> 20} MB",
            remedy="install the operator at the sites, and deploy it with --installed",
            operator=operator.__name__,
        )
    return Bundle(packed, digest_of(packed))


def _zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for path, data in sorted(files.items()):
            info = zipfile.ZipInfo(path, _DATE)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o600 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def _code(name: str) -> Iterator[tuple[str, bytes]]:
    if name in _OWN:
        raise BundleRefused(
            f"{name} is already part of every replica", remedy="leave it out, or deploy it with --installed"
        )
    if not name:  # of ./helpers.py
        raise BundleRefused(
            "a path is not the name of a module", remedy="pass the name by which the operator imports it"
        )
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise BundleRefused(
            f"{name} cannot be imported: {error}", remedy="check that it is installed here", module=name
        ) from error
    if hasattr(module, "__path__"):
        for root in map(Path, module.__path__):
            for path in sorted(_files_below(root)):
                yield f"{name}/{path.relative_to(root).as_posix()}", _bytes(path, name)
    elif (file := getattr(module, "__file__", None) or "").endswith(".py"):
        yield f"{name}.py", _bytes(Path(file), name)
    else:
        raise BundleRefused(
            f"{name} is not a module of Python source",
            remedy="install it at the sites, and deploy with --installed",
            module=name,
        )


def _files_below(root: Path) -> Iterator[Path]:
    """Yields the files of a package, also those of linked directories. Raises BundleRefused for a circle of links, and
    for a directory that cannot be read."""
    for name, folders, files in os.walk(root, followlinks=True, onerror=_refuse):
        here, folders[:] = Path(name), [each for each in folders if not _is_left_out(each)]
        above = {each.resolve() for each in (here, *here.parents)}
        for each in folders:
            if (here / each).resolve() in above:
                raise BundleRefused(
                    f"{here / each} leads back to a directory that contains it", remedy="remove the link"
                )
        yield from (path for each in files if not _is_left_out(each) and (path := here / each).is_file())


def _refuse(error: OSError) -> None:
    """Refuses a directory that cannot be read: the bundle would lack its modules."""
    if not isinstance(error, FileNotFoundError):  # a package may name directories that do not exist
        raise BundleRefused(
            f"{error.filename} cannot be read: {error.strerror}", remedy="make it readable, or remove it"
        ) from error


def _bytes(path: Path, module: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BundleRefused(
            f"{path} cannot be read: {error.strerror}", remedy="make it readable, or remove it", module=module
        ) from error


def _is_left_out(part: str) -> bool:
    return part.startswith(".") or part == "__pycache__" or part.endswith((".pyc", ".pyo"))


# -- requirements -----------------------------------------------------------------------------------------


def _wheels(requirements: list[str]) -> Iterator[bytes]:
    """Yields the wheels of the requirements, built by pip."""
    if not requirements:
        return
    there = _brought_along()
    with tempfile.TemporaryDirectory(prefix="stateflow-wheels-") as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "-w", folder]
        try:
            done = subprocess.run(
                [*command, "--", *requirements],
                capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise BundleRefused(
                f"pip did not finish within {_TIMEOUT_S:g} s", remedy="check what it waits for, or pass wheels"
            ) from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise BundleRefused(
                f"pip cannot provide wheels of {' '.join(requirements)}: {said[-1] if said else done.returncode}",
                remedy="check these names and versions, and that pip works here",
            )
        for path in listed(Path(folder), "*.whl"):
            if _plain(path.name.partition("-")[0]) not in there:
                yield path.read_bytes()


def _unpacked(wheel: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        names = archive.namelist()
        about = next((name for name in names if name.endswith(".dist-info/WHEEL")), "")
        name = about.partition(".dist-info")[0] or "a wheel"
        if not about or "Root-Is-Purelib: true" not in archive.read(about).decode(errors="replace"):
            raise BundleRefused(
                f"{name} has compiled code, which a bundle cannot contain: a process can load only one version of it",
                remedy="install it at the sites, and leave it out of the bundle",
                requirement=name,
            )
        for each in names:
            inside = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", each)
            if not each.endswith("/") and ".data/" not in inside and not _is_left_out(inside.rpartition("/")[2]):
                yield inside, archive.read(each)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _brought_along() -> set[str]:
    """Returns the names of stateflow and of all its requirements, which are present wherever stateflow runs.

    Raises BundleRefused if stateflow is on the path but not installed, so that its requirements are unknown.
    """
    found: set[str] = set()
    wanted = [_DISTRIBUTION]
    while wanted:
        name = _plain(wanted.pop())
        if name in found:
            continue
        found.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError as error:
            if name == _DISTRIBUTION:
                raise BundleRefused(
                    f"{name} is not installed here, so its dependencies are unknown",
                    remedy="install it with pip, or pack without requirements",
                ) from error
            continue  # required only on other systems or Python versions
        for each in required:
            if "extra ==" not in each and (match := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", each)):
                wanted.append(match.group())
    return found
