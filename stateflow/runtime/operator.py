"""What a user writes: a class with a key, an output schema, states, and ``process``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from stateflow.errors import DeclarationError, OperatorNotImportable
from stateflow.partitioner import check_partitions
from stateflow.runtime.ddl import parse_ddl
from stateflow.state import KeyedState, declarations_of
from stateflow.types import OperatorSpec, check_name

DEFAULT_PARTITIONS = 128
#: modules loaded from a file, not from a package, are called this and the file's path
_FILE_MODULE = "stateflow file "


class Context:
    """What ``process`` may know beside the row: the key, the partition, and a logger."""

    __slots__ = ("key", "logger", "partition")

    def __init__(self, operator: str, partition: int) -> None:
        self.key: Any = None
        self.partition = partition
        self.logger = logging.getLogger(f"stateflow.operator.{operator}")


class Operator:
    """Base class of keyed, stateful operators.

    Class attributes:
        key: name of the key column, or a tuple of names.
        output: schema of the rows ``process`` produces, as Spark DDL or a :class:`pyarrow.Schema`.

    One instance serves one partition. Before ``process(row, ctx)`` its states are bound to the row's key.
    Attributes set in ``open`` are per instance and not part of the state.
    """

    key: ClassVar[str | tuple[str, ...]]
    output: ClassVar[str | pa.Schema]

    def open(self, ctx: Context) -> None:
        """Called once before the first row this instance sees. ``ctx.key`` is None."""

    def process(self, row: Any, ctx: Context) -> Iterable[Any] | None:
        """Called for each row, a named tuple of the input columns, in order per key.

        Yields (or returns a list of) output rows as tuples or dicts, or returns None. An exception fails the
        batch of this partition and leaves its state as it was before the batch.
        """
        raise NotImplementedError

    def close(self, ctx: Context) -> None:
        """Called when the partition leaves this replica or the replica stops in good order."""


def key_columns(cls: type[Operator]) -> tuple[str, ...]:
    """Raises DeclarationError when the operator names no key."""
    key = getattr(cls, "key", None)
    columns = (key,) if isinstance(key, str) else key
    if not isinstance(columns, tuple) or not columns or not all(isinstance(c, str) and c for c in columns):
        raise DeclarationError(
            "the operator names no key",
            remedy='set key = "column" or a tuple of columns',
            operator=cls.__name__,
        )
    return columns


def output_schema(cls: type[Operator]) -> pa.Schema:
    """Raises DeclarationError when ``output`` is missing or cannot be read."""
    output = getattr(cls, "output", None)
    if isinstance(output, pa.Schema):
        return output
    if isinstance(output, str):
        return parse_ddl(output)
    raise DeclarationError(
        "the operator declares no output schema", remedy='set output = "name type, …"', operator=cls.__name__
    )


def describe(cls: type[Operator], partitions: int = DEFAULT_PARTITIONS, name: str | None = None) -> OperatorSpec:
    """Everything others must know of an operator; checks its declaration on the way."""
    if not (isinstance(cls, type) and issubclass(cls, Operator)):
        raise DeclarationError(f"{cls!r} is not an operator", remedy="derive it from stateflow.Operator")
    if cls.process is Operator.process:
        raise DeclarationError("the operator has no process(row, ctx)", remedy="write it", operator=cls.__name__)
    operator = check_name("operator", name or cls.__name__)
    state = KeyedState(operator, declarations_of(cls), _EMPTY)
    return OperatorSpec(
        name=operator,
        target=target_of(cls),
        partitions=check_partitions(partitions),
        key=key_columns(cls),
        output_schema=output_schema(cls).serialize().to_pybytes(),
        state_schema=json.dumps(state.schema(), sort_keys=True),
    )


class _Empty:
    def get(self, cell: bytes) -> bytes | None:
        return None

    def scan(self, prefix: bytes) -> Any:
        return iter(())


_EMPTY = _Empty()


def target_of(cls: type) -> str:
    """Where replicas find the class: ``module:Class``, or ``/path/file.py:Class`` for a script's own class.

    Raises OperatorNotImportable for classes that live in no file (a REPL or notebook cell) or inside a function.
    """
    if "<locals>" in cls.__qualname__:
        raise OperatorNotImportable(
            f"{cls.__qualname__} is defined inside a function", remedy="move the class to module level"
        )
    if cls.__module__.startswith(_FILE_MODULE):
        return f"{sys.modules[cls.__module__].__file__}:{cls.__qualname__}"
    if cls.__module__ != "__main__":
        return f"{cls.__module__}:{cls.__qualname__}"
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:  # started with python -m package.module
        return f"{spec.name}:{cls.__qualname__}"
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise OperatorNotImportable(
            f"{cls.__qualname__} lives in no file, so that replicas cannot load it",
            remedy="put the class into a .py file and import it",
        )
    return f"{Path(file).resolve()}:{cls.__qualname__}"


def load(target: str) -> type[Operator]:
    """Inverse of :func:`target_of`. Raises OperatorNotImportable with the import's own error."""
    module_name, _, qualname = target.rpartition(":")
    if not module_name or not qualname:
        raise OperatorNotImportable(
            f"{target!r} is not an operator's place", remedy="write package.module:Class or file.py:Class"
        )
    try:
        if module_name.endswith(".py"):
            loaded: Any = _load_file(Path(module_name))
        else:
            loaded = importlib.import_module(module_name)
        for part in qualname.split("."):
            loaded = getattr(loaded, part)
    except (Exception, SystemExit) as error:  # a script that exits must not take the replica with it
        raise OperatorNotImportable(
            f"{type(error).__name__}: {error}",
            remedy="install the code where this process runs, or start it in a directory that has it",
            target=target,
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Operator)):
        raise OperatorNotImportable(f"{target} is not an Operator class", remedy="name a class derived from it")
    return loaded


def _load_file(path: Path) -> Any:
    name = f"{_FILE_MODULE}{path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
