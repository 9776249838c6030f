"""What a user writes: a class with a key, an output schema, states, and ``process``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast

import pyarrow as pa

from stateflow.errors import DeclarationError, InvalidArgument, OperatorNotImportable
from stateflow.partitioner import check_partitions
from stateflow.runtime.ddl import parse_ddl
from stateflow.runtime.timers import Timer, Timers
from stateflow.state import (
    ColumnStates,
    KeyedState,
    Namespace,
    TrackedList,
    TrackedMap,
    TrackedReducing,
    TrackedSet,
    declarations_of,
)
from stateflow.types import OperatorSpec, check_name

DEFAULT_PARTITIONS = 128
T = TypeVar("T")
#: where an operator's own states are
GLOBAL = Namespace()
#: modules loaded from a file, not from a package, are called this and the file's path
_FILE_MODULE = "stateflow file "


class Context:
    """What an operator may know and do beside its row and its state.

    Attributes:
        key: of the row or timer in hand; None outside of them.
        partition: number of this instance's partition.
        timestamp: the row's event time, when the operator names an ``event_time`` column.
        watermark: no row older than this is expected any more; None before the first.
    """

    __slots__ = ("_side", "_states", "_timers", "key", "logger", "partition", "timestamp", "watermark")

    def __init__(self, operator: str, partition: int, timers: Timers, states: KeyedState | None = None) -> None:
        self.key: Any = None
        self.partition = partition
        self.timestamp: Any = None
        self.watermark: datetime | None = None
        self.logger = logging.getLogger(f"stateflow.operator.{operator}")
        self._timers = timers
        self._states = states
        self._side: dict[str, list[Any]] = {}

    def set_timer(self, at: datetime | int, *, name: str = "", domain: str = "event") -> None:
        """Have ``on_timer`` called for this key once ``at`` has passed; replaces the key's timer of that name.

        Args:
            at: an aware datetime, or microseconds since 1970.
            domain: ``event``: when the watermark passes it; ``processing``: with the first batch after that time,
                with rows or without.

        Raises InvalidArgument for another domain or an odd time, and outside of a row or timer.
        """
        self._timers.set(self._current(), name, at, domain)

    def delete_timer(self, *, name: str = "", domain: str = "event") -> None:
        """Forget the key's timer of that name; no error when there is none."""
        self._timers.delete(self._current(), name, domain)

    def emit(self, tag: str, row: Any) -> None:
        """Put a row into the side output ``tag`` of the operator's ``side_outputs``. Raises InvalidArgument."""
        try:
            self._side[tag].append(row)
        except KeyError:
            raise InvalidArgument(
                f"there is no side output {tag!r}", remedy='declare it: side_outputs = {"tag": "column type, …"}'
            ) from None

    def state(self, tag: T, namespace: Namespace = GLOBAL) -> T:
        """The current key's state for a tag, ``state.counter(name="n")`` for example, in a namespace.

        Tags of one name that differ in kind or type share nothing. Raises DeclarationError for a tag without a name,
        InvalidArgument without a current key and in a batch operator.
        """
        key = self._current()
        return cast(T, self._keyed().at(key, namespace, tag))

    def clear_state(self, namespace: Namespace) -> None:
        """Empty every state of the current key in a namespace."""
        self._keyed().clear_namespace(self._current(), namespace)

    def _keyed(self) -> KeyedState:
        if self._states is None:
            raise InvalidArgument("a batch operator has no keyed state", remedy="use process(row, ctx) for it")
        return self._states

    def _current(self) -> Any:
        if self.key is None:
            raise InvalidArgument("there is no current key", remedy="use it in process() or on_timer()")
        return self.key


class Operator:
    """Base class of keyed, stateful operators.

    Class attributes:
        key: name of the key column, or a tuple of names.
        output: schema of the rows ``process`` produces, as Spark DDL or a :class:`pyarrow.Schema`.
        side_outputs: tag → schema, of what goes to :meth:`Context.emit`.
        event_time: name of the column that becomes ``ctx.timestamp``.
        state_version: raise it when stored state must be migrated; see :meth:`migrate_state`.

    One instance serves one partition. Before ``process(row, ctx)`` its states are bound to the row's key.
    Attributes set in ``open`` are per instance and not part of the state.
    """

    key: ClassVar[str | tuple[str, ...]]
    output: ClassVar[str | pa.Schema]
    side_outputs: ClassVar[Mapping[str, str | pa.Schema]] = {}
    event_time: ClassVar[str | None] = None
    state_version: ClassVar[int] = 1

    def open(self, ctx: Context) -> None:
        """Called once before the first row this instance sees. ``ctx.key`` is None."""

    def process(self, row: Any, ctx: Context) -> Iterable[Any] | None:
        """Called for each row, a named tuple of the input columns, in order per key.

        Yields (or returns a list of) output rows as tuples or dicts, or returns None. An exception fails the
        batch of this partition and leaves its state as it was before the batch.
        """
        raise NotImplementedError

    def init_state(self, row: Any, ctx: Context) -> None:
        """Called for each row of ``initial_state=``, before any other row, with the states bound to its key.

        By default each column named as a state goes into it: a value is assigned, a map updated (from a dict or a list
        of pairs), a set updated, a list extended; null adds nothing. Raises InvalidArgument when there is none such.
        """
        names = [name for name in declarations_of(type(self)) if name in row._fields]
        if not names:
            raise _no_such_columns(type(self), row._fields)
        for name in names:
            given = getattr(row, name)
            if given is not None:
                _fill(getattr(self, name), given)

    def on_timer(self, timer: Timer, ctx: Context) -> Iterable[Any] | None:
        """Called once for each timer that is due, with the states bound to its key; produces rows as ``process``."""
        raise NotImplementedError

    def on_watermark(self, watermark: datetime, ctx: Context) -> Iterable[Any] | None:
        """Called when the partition's watermark has advanced, before the timers it makes due. Has no current key."""

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        """Called once for each stored key, with its states bound, when the stored ``state_version`` is older.

        Args:
            old: the plain values (dict, set, list, …) of the key's states as they were stored, by stored name: None or
                empty where nothing is stored; a record is a dict of its fields.

        States whose declaration is unchanged are as they were, all others empty. The states of a partition are
        migrated in one commit, in memory.
        """
        raise NotImplementedError

    def close(self, ctx: Context) -> None:
        """Called when the partition leaves this replica or the replica stops in good order."""


class BatchOperator(Operator):
    """An operator that processes all rows of a partition's batch at once, in Arrow columns.

    Its states are value states, read and written a column at a time: ``self.n.get_many(keys)`` gives an Arrow array in
    the order of ``keys``, ``self.n.put_many(keys, values)`` stores. Timers need a current key and are not available.
    """

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.RecordBatch | pa.Table | None:
        """Called with the rows of one batch, all of this partition's keys. Returns output columns by name, or None."""
        raise NotImplementedError

    def process(self, row: Any, ctx: Context) -> None:
        raise NotImplementedError("a batch operator is not given rows")

    def init_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        """Called with the rows of ``initial_state=``. By default each column named as a state is put into it.

        Raises InvalidArgument when there is none such.
        """
        states = declarations_of(type(self))
        names = [name for name in states if name in batch.schema.names]
        if not names:
            raise _no_such_columns(type(self), batch.schema.names)
        columns = key_columns(type(self))
        keys = batch[columns[0]]
        if len(columns) > 1:
            keys = pa.StructArray.from_arrays([batch[column] for column in columns], names=columns)
        for name in names:
            getattr(self, name).put_many(keys, batch[name])


def _fill(tracked: Any, given: Any) -> None:
    match tracked:
        case TrackedMap():
            pairs = given.items() if isinstance(given, dict) else given
            tracked.update((key, value) for key, value in pairs if value is not None)
        case TrackedSet():
            tracked.update(given)
        case TrackedList():
            tracked.extend(given)
        case TrackedReducing():
            tracked.add(given)
        case _:
            tracked.value = given


def _no_such_columns(cls: type[Operator], names: Iterable[str]) -> InvalidArgument:
    return InvalidArgument(
        f"initial rows have the columns {', '.join(names)}, none is named as a state",
        remedy=f"name them {', '.join(declarations_of(cls)) or 'so'}, or write init_state(row, ctx)",
    )


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
    return _schema(cls, getattr(cls, "output", None))


def side_schemas(cls: type[Operator]) -> dict[str, pa.Schema]:
    """Schema of each side output. Raises DeclarationError."""
    return {tag: _schema(cls, schema) for tag, schema in cls.side_outputs.items()}


def _schema(cls: type[Operator], output: object) -> pa.Schema:
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
    operator = check_name("operator", name or cls.__name__)
    state: KeyedState | ColumnStates
    if issubclass(cls, BatchOperator):
        missing = "process_batch(batch, ctx)" if cls.process_batch is BatchOperator.process_batch else ""
        state = ColumnStates(operator, declarations_of(cls), _EMPTY)
    else:
        missing = "process(row, ctx)" if cls.process is Operator.process else ""
        state = KeyedState(operator, declarations_of(cls), _EMPTY)
    if missing:
        raise DeclarationError(f"the operator has no {missing}", remedy="write it", operator=cls.__name__)
    return OperatorSpec(
        name=operator,
        target=target_of(cls),
        partitions=check_partitions(partitions),
        key=key_columns(cls),
        output_schema=output_schema(cls).serialize().to_pybytes(),
        state_schema=json.dumps(state.schema(), sort_keys=True),
        side_schemas=tuple((tag, schema.serialize().to_pybytes()) for tag, schema in sorted(side_schemas(cls).items())),
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
