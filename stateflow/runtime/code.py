"""Locating an operator's class, and loading it on a replica.

A class of an importable module is named ``package.module:Class``, and each process imports it. Any other class is sent
as text: a class of a script, of ``python -c``, of a notebook or a REPL, or of a file named as ``file.py:Class``. The
text is only the part of the program that the class needs (:mod:`stateflow.runtime.excerpt`): no script is ever run to
load a class from it. The text must have the announced SHA-256, and becomes one module per text.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import linecache
import os
import stat
import sys
import tokenize
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from stateflow.errors import InvalidArgument, OperatorNotImportable
from stateflow.runtime.bundles import builtins_of
from stateflow.runtime.excerpt import excerpt, written
from stateflow.runtime.program import running
from stateflow.types import SOURCE_MAX

#: name of a module made from text: this prefix and the text's digest
_MODULE = "stateflow code "
#: the operator that is being loaded in this context; empty: none
_inside: ContextVar[str] = ContextVar("inside", default="")
#: environment variable that says the same of a whole process and its children, such as a replica
INSIDE = "STATEFLOW_INSIDE"


def place_of(cls: type) -> tuple[str, str]:
    """Returns (target, text) by which :func:`find` finds the class again; the text is empty for a class of a module.

    Raises OperatorNotImportable for a class inside a function, and where the text is missing or too long.
    """
    name = cls.__qualname__
    if "<locals>" in name:
        raise OperatorNotImportable(f"{name} is defined inside a function", remedy="move the class to module level")
    if cls.__module__.startswith(_MODULE):
        made = sys.modules[cls.__module__]
        return f"{made.__file__}:{name}", made.__source__
    if cls.__module__ != "__main__":
        return f"{cls.__module__}:{name}", ""
    place, program, values = running(name)
    return f"{place}:{name}", _checked(excerpt(program, name, values), name)


def find(target: str, text: str = "", package: str = "") -> Any:
    """Loads an object by its target and text, the inverse of :func:`place_of`. The object may be anything.

    Raises OperatorNotImportable with the error that loading raised.

    Args:
        package: package of the bundle with the code, see :mod:`stateflow.runtime.bundles`; empty: no bundle.
    """
    place, _, qualname = target.rpartition(":")
    if not place or not qualname:
        raise OperatorNotImportable(
            f"{target!r} does not name an operator", remedy="write package.module:Class or file.py:Class"
        )
    try:
        with _loading(target):
            if text:
                found: Any = _module(place, text, package)
            elif place.startswith("<"):
                raise ImportError("its program was not a file, and its source is missing")
            elif is_text(target):
                found = _module(place, _text_of_file(Path(place).resolve(), qualname))
            else:
                found = importlib.import_module(f"{package}.{place}" if package else place)
        for part in qualname.split("."):
            found = getattr(found, part)
    except OperatorNotImportable as error:
        error.located(target=target)
        raise
    except (Exception, SystemExit) as error:  # a module that exits must not take the replica with it
        raise OperatorNotImportable(
            f"{type(error).__name__}: {error}",
            remedy=_remedy(error, f"{package}.{place}" if package else place),
            target=target,
            process=f"{Path(sys.argv[0]).name or 'python'} {os.getpid()}",
            directory=_here(),
            python=sys.executable,
        ) from error
    return found


def _remedy(error: BaseException, place: str) -> str:
    """Names what is missing: the operator, a module that its code imports, or the named file."""
    if isinstance(error, ModuleNotFoundError) and error.name and not f"{place}.".startswith(f"{error.name}."):
        return f"install {error.name}, which the operator's code imports, in this process's environment"
    if isinstance(error, FileNotFoundError) and place.endswith(".py"):
        return "name an existing file, relative to this process's working directory"
    if place.endswith(".py") or place.startswith("<"):
        return "fix the operator's code, which fails when loaded"
    return "install the code in this process's environment, or start the process in a directory that has it"


def _here() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return None


def is_text(target: str) -> bool:
    """Tells whether the class of this target is loaded from text, not imported."""
    place = target.rpartition(":")[0]
    return place.endswith(".py") or place.startswith("<")


def digest_of(text: str) -> str:
    """SHA-256, hexadecimal; empty for no text."""
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def check_digest(text: str, digest: str) -> None:
    """Checks that a text has the announced digest. Raises OperatorNotImportable."""
    if digest_of(text) != digest:
        raise OperatorNotImportable("the operator's source does not have the deployed digest", remedy="deploy it again")


@contextlib.contextmanager
def _loading(target: str) -> Iterator[None]:
    token = _inside.set(f"{target}, which is being loaded")
    try:
        yield
    finally:
        _inside.reset(token)


def check_outside(what: str) -> None:
    """Checks that this is not called while an operator's code is loaded or inside a replica. Raises InvalidArgument.

    A replica that imports a script, or whose operator calls one, would otherwise start a cluster, whose replicas import
    the script again, and so on.
    """
    inside = _inside.get() or os.environ.get(INSIDE, "")
    if inside:
        raise InvalidArgument(
            f"{what} cannot be started inside {inside}",
            remedy='guard what only the program itself does with `if __name__ == "__main__":`',
        )


def _checked(text: str, name: str) -> str:
    size = len(text.encode())
    if size > SOURCE_MAX:
        raise OperatorNotImportable(
            f"{name} and what it uses are {size} bytes of source, the limit is {SOURCE_MAX}",
            remedy="load data in open() from a file on the replicas, or install the operator as a package",
        )
    return text


def _text_of_file(path: Path, qualname: str) -> str:
    _check_whose(path)
    with tokenize.open(path) as file:  # honours the file's encoding line
        return _checked(excerpt(written([file.read()]), qualname), qualname)


def _check_whose(path: Path) -> None:
    """Refuses a file that other users of this machine can write. Raises PermissionError."""
    found = path.stat()
    if found.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{path} is world-writable: remove that permission (chmod o-w)")
    if os.geteuid() and found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user: chown it, or install the operator as a package")


def _module(place: str, text: str, package: str = "") -> ModuleType:
    """Returns the module of a text, one per text and bundle: a class that is loaded twice is the same class."""
    digest = digest_of(text)
    name = _MODULE + digest + package
    if name in sys.modules:
        return sys.modules[name]
    shown = f"<{Path(place).name.strip('<>')} {digest[:8]}>"
    module = ModuleType(name)
    module.__file__ = place
    module.__source__ = text  # type: ignore[attr-defined]
    if package:
        module.__dict__["__builtins__"] = builtins_of(package)
    linecache.cache[shown] = len(text), None, text.splitlines(keepends=True), shown  # tracebacks show its lines
    sys.modules[name] = module
    try:
        exec(compile(text, shown, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - deployed code
    except BaseException:
        del sys.modules[name]
        raise
    return module
