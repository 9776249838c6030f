"""Code of an operator's class: located in its program, signed by the client that deploys it, and loaded on a replica.

A class of an importable module is named ``package.module:Class``, and each process imports it. Any other class is sent
as text: a class of a script, of ``python -c``, of a notebook or a REPL, or of a file named as ``file.py:Class``. The
text is only the part of the program that the class needs (:mod:`stateflow.code.excerpt`): no script is ever run to
load a class from it. The text must have the announced SHA-256, and becomes one module per text.

Replicas run operators that are sent as text or in a bundle, so a controller that accepted any code would let everyone
who reaches its port run code on the replicas. Therefore only holders of the controller's code key can deploy such code:
the controller requires an HMAC (RFC 2104, SHA-256) of the code, made with that key. The key is in a file of the user
who runs the controller. The first client that needs the file makes it, so a single machine needs no setup. Otherwise
the key is in ``STATEFLOW_CODE_KEY``, with the same value for the controller and all deploying clients. The key itself
is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import linecache
import os
import re
import secrets
import stat
import sys
import tokenize
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from stateflow.code.bundles import builtins_of
from stateflow.code.excerpt import excerpt, written
from stateflow.code.program import running
from stateflow.errors import CodeRefused, InvalidArgument, OperatorNotImportable
from stateflow.private import keep_private, state_directory
from stateflow.settings import CodeSettings
from stateflow.types import SOURCE_MAX, OperatorSpec

VARIABLE = "STATEFLOW_CODE_KEY"
#: least number of characters of a key in the environment variable
LENGTH_MIN = 16
_REMEDY = (
    f"deploy it as the user who runs the controller, or give both the same {VARIABLE}; or install the operator on the "
    "replicas and name it package.module:Class"
)
#: name of a module made from text: this prefix and the text's digest
_MODULE = "stateflow code "
#: line by which an excerpt imports a name of stateflow that the program got by ``import *``
_FORMER = re.compile(r"^from (stateflow\.[\w.]+) import (?=(\w+) as )", re.MULTILINE)
#: words that name the operator that is being loaded in this context; empty: none
_inside: ContextVar[str] = ContextVar("inside", default="")
#: environment variable that names the replica inside which a process and its children run
INSIDE = "STATEFLOW_INSIDE"

# -- Authentication of deployed code ---------------------------------------------------------------------------------


def signed(spec: OperatorSpec) -> OperatorSpec:
    """Returns the spec with the HMAC of its text or bundle. A spec without text and bundle is returned unchanged.

    Raises InvalidArgument if the key cannot be stored or read.
    """
    if not (spec.source or spec.bundle):
        return spec
    return replace(spec, source_mac=_mac(_key(make=True), spec))


def check_signed(spec: OperatorSpec) -> None:
    """Checks that the text or bundle of a spec was signed with this process's key. Raises CodeRefused."""
    if not (spec.source or spec.bundle):
        return
    key = _key(make=False)
    if not key:
        raise CodeRefused(
            "the controller has no code key, and accepts no code without one", remedy=_REMEDY, operator=spec.name
        )
    if not hmac.compare_digest(_mac(key, spec), spec.source_mac):
        raise CodeRefused("the code is not signed with the controller's key", remedy=_REMEDY, operator=spec.name)


def _mac(key: bytes, spec: OperatorSpec) -> str:
    said = f"{spec.bundle}\0{spec.source}" if spec.bundle else spec.source
    return hmac.new(key, said.encode(), "sha256").hexdigest()


def _key(*, make: bool) -> bytes:
    """Returns the code key of the environment or of this user's file; empty: there is no key.

    Raises InvalidArgument for a key that is too short or cannot be read.

    Args:
        make: True creates the file if there is no key.
    """
    given = CodeSettings().key.get_secret_value()
    if given:
        if len(given) < LENGTH_MIN:
            raise InvalidArgument(f"{VARIABLE} is too short", remedy=f"use {LENGTH_MIN} characters or more")
        return given.encode()
    try:
        path = state_directory() / "code.key"
        if make and not path.exists():
            _make(path)
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
    except OSError as error:
        raise InvalidArgument(f"the code key cannot be read or created: {error}", remedy=f"set {VARIABLE}") from error
    return b""


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):  # another process made a key at the same time, and its key is used
            path.hardlink_to(own)
    finally:
        own.unlink()


def _read(path: Path) -> bytes:
    if path.stat().st_uid != os.geteuid():  # its owner could run code as this user
        raise PermissionError(f"{path} belongs to another user")
    keep_private(path)
    return path.read_bytes()


# -- Locating and loading --------------------------------------------------------------------------------------------


def place_of(cls: type) -> tuple[str, str]:
    """Returns (target, text), from which :func:`find` loads the class. The text is empty for a class of a module.

    Raises OperatorNotImportable for a class inside a function, and if the text is missing or too long.
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
    """Loads the object that :func:`place_of` described by target and text. It may be any object, not only an operator.

    Raises OperatorNotImportable with the error that loading raised.

    Args:
        text: text of the object and of all that it uses; empty: the target is imported, or its file is read.
        package: package of the bundle with the code, see :mod:`stateflow.code.bundles`; empty: no bundle.
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
    """Returns the remedy for an error of loading.

    It depends on what is missing: a module that the operator's code imports, the named file, or the operator itself.
    """
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
    """Returns the SHA-256 of a text, in hexadecimal; empty for an empty text."""
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def check_digest(text: str, digest: str) -> None:
    """Checks that a text has the announced digest. Raises OperatorNotImportable."""
    if digest_of(text) != digest:
        raise OperatorNotImportable(
            "the operator's source code does not have the deployed digest", remedy="deploy it again"
        )


@contextlib.contextmanager
def _loading(target: str) -> Iterator[None]:
    token = _inside.set(f"{target}, which is being loaded")
    try:
        yield
    finally:
        _inside.reset(token)


def check_outside(what: str) -> None:
    """Checks that the caller is neither inside a replica nor in code of an operator that is being loaded.

    Otherwise a replica that imports a script, or an operator that calls one, would start a cluster, and the replicas of
    that cluster would import the script again, and so on. Raises InvalidArgument.

    Args:
        what: what the caller is about to start, for the error.
    """
    inside = _inside.get() or os.environ.get(INSIDE, "")
    if inside:
        raise InvalidArgument(
            f"{what} cannot be started inside {inside}",
            remedy='put code that only the program itself should run under `if __name__ == "__main__":`',
        )


def _checked(text: str, name: str) -> str:
    size = len(text.encode())
    if size > SOURCE_MAX:
        raise OperatorNotImportable(
            f"{name} and what it uses are {size} bytes of source code, the limit is {SOURCE_MAX}",
            remedy="load data in open() from a file on the replicas, or install the operator as a package",
        )
    return text


def _text_of_file(path: Path, qualname: str) -> str:
    _check_whose(path)
    with tokenize.open(path) as file:  # honours the file's encoding line
        return _checked(excerpt(written([file.read()]), qualname), qualname)


def _check_whose(path: Path) -> None:
    """Checks that no other user can write to a file, and that this user or root owns it. Raises PermissionError."""
    found = path.stat()
    if found.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{path} is world-writable: remove that permission (chmod o-w)")
    if os.geteuid() and found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user: chown it, or install the operator as a package")


def _module(place: str, text: str, package: str = "") -> ModuleType:
    """Returns the module of a text, and runs the text if there is no module of it yet.

    Each pair of text and bundle has one module, so a class that is loaded twice is the same class.
    """
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
        exec(compile(_for_today(text), shown, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - deployed code
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _for_today(text: str) -> str:
    """Returns a text that imports all public names of stateflow from ``stateflow``.

    Excerpts that release 0.1 made import such names from modules that no longer exist.
    """
    return _FORMER.sub(lambda found: "from stateflow import " if _is_former(*found.groups()) else found[0], text)


def _is_former(module: str, name: str) -> bool:
    if name not in sys.modules["stateflow"].__all__:
        return False
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True
