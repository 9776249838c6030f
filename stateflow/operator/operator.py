"""Operators as users write them: classes with a key, an output schema, states, and ``process``."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast

import pyarrow as pa

from stateflow.code.bundles import BundleStore, package_of
from stateflow.code.loading import check_digest, digest_of, find, is_text, place_of
from stateflow.errors import DeclarationError, InvalidArgument, OperatorNotImportable, StateflowError
from stateflow.metrics.own import Metrics, OwnFigures
from stateflow.operator.arrow import schema_of
from stateflow.operator.rows import columns_of
from stateflow.operator.timers import Timer, TimerColumns, Timers, Windows, check_timer_name, is_of_sessions
from stateflow.partitioner import check_partitions
from stateflow.state import (
    ColumnStates,
    Declaration,
    KeyedState,
    Namespace,
    TrackedList,
    TrackedMap,
    TrackedReducing,
    TrackedSet,
    ValueColumn,
    declarations_of,
)
from stateflow.state.arrays import taken
from stateflow.state.columns import whole
from stateflow.types import OperatorSpec, check_name

DEFAULT_PARTITIONS = 128
T = TypeVar("T")
_CHANGES = {
    "value": "self.{0}.value = …",
    "map": "self.{0}[key] = …, or self.{0}.clear() and self.{0}.update(…)",
    "set": "self.{0}.add(…), or self.{0}.clear() and self.{0}.update(…)",
    "list": "self.{0}.append(…), or self.{0}[:] = …",
    "reducing": "self.{0}.add(…)",
    "counter": "self.{0}.value += …",
}
#: namespace of an operator's own states
GLOBAL = Namespace()


class Context:
    """Time, timers, metrics and side outputs, for use in an operator's methods.

    Attributes:
        key: key of the current row or timer; None outside of them.
        partition: number of this instance's partition.
        timestamp: the row's event time, when the operator names an ``event_time`` column.
        watermark: time before which no more rows are expected; None before the first watermark. A batch's watermark
            takes effect after its rows: ``process`` reads the watermark of the previous batch, ``on_watermark`` and
            timers read the new one.

    Example: ``ctx.set_timer(ctx.timestamp + timedelta(hours=1), name="quiet", domain="event")``
    """

    __slots__ = (
        *("_ended", "_figures", "_freeze", "_in_batches", "_metrics", "_side", "_states", "_timers", "_unheard"),
        *("key", "logger", "partition", "timestamp", "watermark"),
    )

    def __init__(
        self,
        operator: str,
        partition: int,
        timers: Timers,
        states: KeyedState | None = None,
        figures: Callable[[], Metrics] | None = None,
    ) -> None:
        self.key: Any = None
        self.partition = partition
        self.timestamp: Any = None
        self.watermark: datetime | None = None
        self.logger = logging.getLogger(f"stateflow.operator.{operator}")
        self._timers = timers
        self._states = states
        self._side: dict[str, list[Any]] = {}
        self._freeze: Mapping[str, Callable[[Any], Any]] = {}  # tag → function that copies what might change later
        self._figures = figures or (lambda: Metrics(OwnFigures(), operator, None))
        self._metrics: Metrics | None = None
        self._ended: dict[Namespace, bool] = {}  # windows that the current timer ended → whether they have states
        self._in_batches = True  # False: in ``open`` and ``close``
        self._unheard = ""  # name of the timer method that the operator lacks; empty: it has the method

    @property
    def metrics(self) -> Metrics:
        """The operator's own counters, gauges and histograms, which its replica's ``/metrics`` shows.

        Changes made during a batch take effect when the batch is applied.
        """
        if self._metrics is None:
            self._metrics = self._figures()
        return self._metrics

    def set_timer(self, at: datetime | int, *, name: str = "", domain: str = "event") -> None:
        """Sets a timer, for which ``on_timer`` is called with this key once ``at`` has passed.

        A timer of this key with the same name is replaced.

        Args:
            at: an aware datetime, or microseconds since 1970.
            domain: ``event`` for a timer that fires when the watermark passes ``at``, or ``processing`` for one that
                fires with the first batch after that time, whether that batch has rows or not.

        Raises InvalidArgument for an unknown domain or an invalid time, if there is no current row or timer, and if the
        operator has no ``on_timer``.
        """
        key, named = self._current(), check_timer_name(name)
        self._check_heard()
        self._timers.set(key, named, at, domain)

    def delete_timer(self, *, name: str = "", domain: str = "event") -> None:
        """Deletes the key's timer of that name, if there is one."""
        self._timers.delete(self._current(), check_timer_name(name), domain)

    def set_timers(self, keys: pa.Array, at: Any, *, name: str = "", domain: str = "event") -> None:
        """Sets a timer for each of these keys, in a batch operator; ``on_timers`` is called when they are due. See
        :meth:`set_timer`.

        Args:
            keys: array of keys, as for state columns.
            at: one time for all keys, as for :meth:`set_timer`; or an Arrow array as long as ``keys``, of timestamps
                with a time zone or of microseconds since 1970.

        Raises InvalidArgument for an unknown domain, an invalid time, a key of another partition, and an operator
        without ``on_timers``, and in ``open`` and ``close``; NullKey; EncodeError for keys that are not of the key
        columns and their types.
        """
        self._check_in_batch()
        named = check_timer_name(name)
        self._check_heard()
        times = whole(at) if isinstance(at, pa.Array | pa.ChunkedArray) else at
        self._timers.set_many(whole(keys), named, times, domain)

    def delete_timers(self, keys: pa.Array, *, name: str = "", domain: str = "event") -> None:
        """Deletes the timer of that name of each of these keys; see :meth:`delete_timer`."""
        self._check_in_batch()
        self._timers.delete_many(whole(keys), check_timer_name(name), domain)

    def _set_timer(self, at_us: int, name: str) -> None:
        """Sets a window helper's timer, in event time."""
        self._check_heard()
        self._timers.set(self._current(), name, at_us, "event")

    def _check_in_batch(self) -> None:
        if not self._in_batches:
            raise InvalidArgument(
                "timers are set and deleted outside of a batch", remedy="call this in process_batch() or on_timers()"
            )

    def _check_heard(self) -> None:
        """Checks that the operator has a method for timers. Without one, every batch would fail when the timer is
        due."""
        if self._unheard:
            raise InvalidArgument(
                f"a timer is set, but the operator has no {self._unheard}()",
                remedy=f"define {self._unheard}(self, …) to handle it, or set no timer",
            )

    def _delete_timer(self, name: str) -> None:
        self._timers.delete(self._current(), name, "event")

    def emit(self, tag: str, row: Any) -> None:
        """Adds a row to the side output ``tag``. Raises InvalidArgument if ``side_outputs`` does not declare it."""
        try:
            emitted, freeze = self._side[tag], self._freeze[tag]
        except KeyError:
            raise InvalidArgument(
                f"there is no side output {tag!r}", remedy='declare it: side_outputs = {"tag": "column type, …"}'
            ) from None
        emitted.append(freeze(row))

    def state(self, tag: T, namespace: Namespace = GLOBAL) -> T:
        """Returns the current key's state for a tag, such as ``state.counter(name="n")``, in a namespace.

        Give each tag a name of its own. Raises DeclarationError for a tag without a name, and for one that is declared
        with other types, default or ttl elsewhere in the program; SchemaMismatch if it is stored with other types; and
        InvalidArgument without a current key and in a batch operator.
        """
        key = self._current()
        return cast(T, self._keyed().at(key, namespace, tag))

    def clear_state(self, namespace: Namespace) -> None:
        """Empties every state of the current key in a namespace. Open sessions of a session helper stay open."""
        self._keyed().clear_namespace(self._current(), namespace, None if namespace else is_of_sessions)

    def _clear_ended(self) -> None:
        """Empties the windows that the current timer ended in a loop that did not continue after them."""
        for namespace, filled in self._ended.items():
            if filled:
                self.clear_state(namespace)

    def _keyed(self) -> KeyedState:
        if self._states is None:
            raise InvalidArgument(
                "a batch operator has no keyed state", remedy="use an operator with process(row, ctx)"
            )
        return self._states

    def _current(self) -> Any:
        if self.key is None:
            raise InvalidArgument("there is no current key", remedy="call this in process() or on_timer()")
        return self.key


class Operator:
    """Base class of keyed, stateful operators.

    Attributes:
        key: name of the key column, or a tuple of names.
        output: schema of the rows that ``process`` produces, as Spark DDL or a :class:`pyarrow.Schema`.
        side_outputs: schema of each side output by its tag, see :meth:`Context.emit`.
        event_time: name of the column that becomes ``ctx.timestamp``.
        state_version: version of the stored state; a higher version than the stored one calls :meth:`migrate_state`.

    One instance serves one partition. Before ``process(row, ctx)`` its states are bound to the row's key. Attributes
    that are set in ``open`` belong to the instance and are not part of the state.

    >>> from stateflow import state
    >>> class Count(Operator):
    ...     key, output, n = "k", "k string, n long", state.value(int, default=0)
    ...
    ...     def process(self, row, ctx):
    ...         self.n.value += 1
    ...         yield row.k, self.n.value
    """

    key: ClassVar[str | tuple[str, ...]]
    output: ClassVar[str | pa.Schema]
    side_outputs: ClassVar[Mapping[str, str | pa.Schema]] = {}
    event_time: ClassVar[str | None] = None
    state_version: ClassVar[int] = 1

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses an assignment to a state with AttributeError, because the assigned value would belong to no key and
        would not be stored."""
        state = getattr(type(self), name, None)
        if isinstance(state, Declaration):
            if value is state:  # a dataclass assigns the defaults of its fields
                return
            # a set's |= and a list's += end by assigning the changed object
            if name not in self.__dict__ or value is not self.__dict__[name]:
                how = _CHANGES[state.kind].format(name)
                raise AttributeError(f"self.{name} is a state and cannot be assigned: use {how}")
        super().__setattr__(name, value)

    def open(self, ctx: Context) -> None:
        """Called once before the first row of this instance. ``ctx.key`` is None."""

    def process(self, row: Any, ctx: Context) -> Iterable[Any] | None:
        """Called for each row, a :class:`~stateflow.operator.rows.Row` of the input columns, in order per key.

        Yields (or returns a list of) output rows as tuples or dicts, or returns None. An exception fails the
        batch of this partition and leaves its state as it was before the batch.
        """
        raise NotImplementedError

    def init_state(self, row: Any, ctx: Context) -> None:
        """Called for each row of ``initial_state=``, before any other row, with the states bound to its key.

        By default each column with the name of a state fills that state: a value is assigned, a map updated (from a
        dict or a list of pairs), a set updated, a list extended; null adds nothing. Raises InvalidArgument if no column
        has the name of a state, and for a column that is neither a state's nor part of the key.
        """
        for name in _states_among(type(self), columns_of(row)):
            given = row[name]
            if given is not None:
                _fill(getattr(self, name), given, declarations_of(type(self))[name])

    def on_timer(self, timer: Timer, ctx: Context) -> Iterable[Any] | None:
        """Called once for each timer that is due, with the states bound to its key; produces rows as ``process``."""
        raise NotImplementedError

    def on_watermark(self, watermark: datetime, ctx: Context) -> Iterable[Any] | None:
        """Called when the partition's watermark has advanced, before timers that are then due. ``ctx.key`` is None."""

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        """Called once for each stored key, with its states bound, when the stored ``state_version`` is older.

        Args:
            old: the plain values (dict, set, list, …) of the key's states as they were stored, by stored name; None or
                empty if nothing is stored; a record is a dict of its fields.

        States with an unchanged declaration keep their data; all other states are empty. The states of a partition are
        migrated in memory, in one commit.
        """
        raise NotImplementedError

    def close(self, ctx: Context) -> None:
        """Called when this instance is released.

        An instance is released when its partition moves away, is taken over, undeployed, restored or reopened, or has
        data that cannot be read any more; when new code is deployed, or when the trial of new code on the stored state
        ends; and when the replica shuts down cleanly. The method is not called after a crash, or after a batch of the
        partition that was interrupted or given up.
        """


class BatchOperator(Operator):
    """An operator that processes all rows of a partition's batch at once, in Arrow columns.

    States are read and written for many keys at a time. For a value state, ``self.n.get_many(keys)`` returns an Arrow
    array in the order of ``keys``, and ``self.n.put_many(keys, values)`` stores one. A map is a
    :class:`~stateflow.state.columns.MapColumn`, a set a ``SetColumn``, a counter or reducing state an ``AddedColumn``.
    ``ctx.set_timers(keys, at)`` sets timers. Methods that need a current key (``ctx.set_timer``, ``ctx.state``) are not
    available.

    >>> import pyarrow.compute as pc
    >>> from stateflow import state
    >>> class Total(BatchOperator):
    ...     key, output, n = "k", "k string, n long", state.value(int, default=0)
    ...
    ...     def process_batch(self, batch, ctx):
    ...         totals = pc.add(self.n.get_many(batch["k"]), 1)
    ...         self.n.put_many(batch["k"], totals)
    ...         return pa.table({"k": batch["k"], "n": totals})
    """

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.RecordBatch | pa.Table | None:
        """Called with all rows of one batch for this partition. Returns output columns by name, or None."""
        raise NotImplementedError

    def process(self, row: Any, ctx: Context) -> None:
        raise NotImplementedError("a batch operator does not process single rows")

    def on_timers(self, timers: TimerColumns, ctx: Context) -> pa.RecordBatch | pa.Table | None:
        """Called with all timers of one domain that are due, in order of time; produces columns as ``process_batch``.

        If the method sets timers that are also due, it is called again with these timers.
        """
        raise NotImplementedError

    def init_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        """Called with the rows of ``initial_state=``. By default each column with the name of a state fills that state.

        Raises InvalidArgument if no column has the name of a state, and for a column that is neither a state's nor part
        of the key.
        """
        states = declarations_of(type(self))
        names = _states_among(type(self), tuple(batch.schema.names))
        columns = key_columns(type(self))
        keys = batch[columns[0]]
        if len(columns) > 1:
            keys = pa.StructArray.from_arrays([batch[column] for column in columns], names=columns)
        for name in names:
            column = getattr(self, name)
            if isinstance(column, ValueColumn):
                column.put_many(keys, batch[name])
                continue
            for tracked, given in zip(column.each(keys), batch[name].to_pylist(), strict=True):
                if given is not None:
                    _fill(tracked, given, states[name])


def _fill(tracked: Any, given: Any, declared: Declaration) -> None:
    """Puts one value of an initial row into a state.

    Args:
        given: value from an Arrow column of the declared type, or a value that the state accepts.
    """
    value, key = partial(taken, declared.coder), partial(taken, declared.key_coder)
    match tracked:
        case TrackedMap():
            pairs = given.items() if isinstance(given, dict) else given
            tracked.update((key(entry), value(item)) for entry, item in pairs if item is not None)
        case TrackedSet():
            tracked.update(map(key, given))
        case TrackedList():
            tracked.extend(map(value, given))
        case TrackedReducing():
            tracked.add(value(given))
        case _:
            tracked.value = value(given)


def check_initial_columns(cls: type[Operator], columns: tuple[str, ...]) -> None:
    """Checks that each column of the initial rows fills a state or is part of the key, unless the class defines
    ``init_state`` or ``init_batch``. Raises InvalidArgument."""
    own = (
        cls.init_batch is not BatchOperator.init_batch
        if issubclass(cls, BatchOperator)
        else (cls.init_state is not Operator.init_state)
    )
    if not own:
        _states_among(cls, columns)


def _states_among(cls: type[Operator], columns: tuple[str, ...]) -> list[str]:
    """Returns the states that initial rows with ``columns`` fill. Raises InvalidArgument if there are none, and for
    columns that would be lost."""
    states, key = declarations_of(cls), key_columns(cls)
    names = [name for name in states if name in columns]
    if not names:
        raise InvalidArgument(
            f"initial rows have the columns {', '.join(columns)}, none of which names a state",
            remedy=f"name them {', '.join(states) or 'after states'}, or define init_state(row, ctx)",
        )
    for column in columns:
        if column not in states and column not in key:
            raise InvalidArgument(
                f"the column {column!r} of initial rows is neither a state nor the key",
                remedy=f"drop it, rename it to its state ({', '.join(states)}), or define init_state()",
            )
    if len(set(columns)) < len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        raise InvalidArgument(
            f"initial rows have several columns {twice!r}", remedy="rename or drop all but one of them"
        )
    return names


def key_columns(cls: type[Operator]) -> tuple[str, ...]:
    """Returns the names of the key columns. Raises DeclarationError if the operator names no key."""
    key = getattr(cls, "key", None)
    columns = (key,) if isinstance(key, str) else key
    if not isinstance(columns, tuple) or not columns or not all(isinstance(c, str) and c for c in columns):
        raise DeclarationError(
            "the operator declares no key",
            remedy='set key = "column" or a tuple of columns',
            operator=cls.__name__,
        )
    return columns


def output_schema(cls: type[Operator]) -> pa.Schema:
    """Returns the schema of the main output. Raises DeclarationError if ``output`` is missing or cannot be read."""
    return _schema(cls, getattr(cls, "output", None))


def side_schemas(cls: type[Operator]) -> dict[str, pa.Schema]:
    """Returns the schema of each side output by its tag. Raises DeclarationError."""
    return {tag: _schema(cls, schema) for tag, schema in cls.side_outputs.items()}


def _schema(cls: type[Operator], output: object) -> pa.Schema:
    if isinstance(output, str | pa.Schema):
        try:
            return schema_of(output)
        except StateflowError as error:
            error.located(operator=cls.__name__)
            raise
    raise DeclarationError(
        "the operator declares no output schema", remedy='set output = "name type, …"', operator=cls.__name__
    )


def describe(cls: type[Operator], partitions: int = DEFAULT_PARTITIONS, name: str | None = None) -> OperatorSpec:
    """Returns the description of an operator for replicas and clients. Raises DeclarationError and InvalidArgument for
    a wrong declaration."""
    check_class(cls)
    operator = check_name("operator", name or cls.__name__)
    check_whole(cls)
    state = (ColumnStates if issubclass(cls, BatchOperator) else KeyedState)(operator, declarations_of(cls), _EMPTY)
    target, source = place_of(cls)
    return OperatorSpec(
        name=operator,
        target=target,
        partitions=check_partitions(partitions),
        key=key_columns(cls),
        output_schema=output_schema(cls).serialize().to_pybytes(),
        state_schema=json.dumps(state.schema(), sort_keys=True),
        side_schemas=tuple((tag, schema.serialize().to_pybytes()) for tag, schema in sorted(side_schemas(cls).items())),
        source=source,
        source_digest=digest_of(source),
    )


def check_whole(cls: type[Operator]) -> None:
    """Checks an operator's declaration. Raises DeclarationError if the method for its rows is missing, if a state has
    the name of a method, if windows cannot work or would share stored data, or if names of outputs are ambiguous."""
    for attribute in declarations_of(cls):
        if hasattr(BatchOperator if issubclass(cls, BatchOperator) else Operator, attribute):
            raise DeclarationError(
                f"the state {attribute!r} hides the operator's own {attribute!r}",
                remedy=f'give the attribute another name: {attribute}_ = state.…(…, name="{attribute}")',
                operator=cls.__name__,
            )
    if issubclass(cls, BatchOperator):
        missing = "process_batch(batch, ctx)" if cls.process_batch is BatchOperator.process_batch else ""
    else:
        missing = "process(row, ctx)" if cls.process is Operator.process else ""
    if missing:
        raise DeclarationError(f"the operator has no {missing}", remedy="define this method", operator=cls.__name__)
    _check_windows(cls)
    check_outputs(cls)


def check_outputs(cls: type[Operator]) -> None:
    """Checks the names of side outputs. Raises DeclarationError for a name that another side output or a column of the
    main output has, because in Spark each of them is a column of the same DataFrame. Case is ignored, as in Spark."""
    seen = {name.lower(): f"the main output's column {name!r}" for name in output_schema(cls).names}
    for tag in side_schemas(cls):
        if not isinstance(tag, str) or not tag:
            raise DeclarationError(
                f"{tag!r} is not a valid side output name", remedy="use a non-empty string", operator=cls.__name__
            )
        if other := seen.get(tag.lower()):
            raise DeclarationError(
                f"the side output {tag!r} has the same name as {other}",
                remedy="rename the side output",
                operator=cls.__name__,
            )
        seen[tag.lower()] = f"the side output {tag!r}"


def timer_method_lacked(cls: type[Operator]) -> str:
    """Returns the name of the method for timers if an operator lacks it; empty: the operator has it."""
    if issubclass(cls, BatchOperator):
        return "on_timers" if cls.on_timers is BatchOperator.on_timers else ""
    return "on_timer" if cls.on_timer is Operator.on_timer else ""


def windows_of(cls: type[Operator]) -> dict[str, Windows]:
    """Returns an operator's window helpers by attribute. Example: ``windows_of(Hourly)["hourly"]``"""
    found = {attribute: inspect.getattr_static(cls, attribute) for attribute in dir(cls)}
    return {attribute: helper for attribute, helper in found.items() if isinstance(helper, Windows)}


def _check_windows(cls: type[Operator]) -> None:
    """Checks the window helpers. Raises DeclarationError for windows of a batch operator or without an event time, and
    if two windows would share stored data."""
    seen: dict[str, str] = {}
    for attribute, helper in windows_of(cls).items():
        if issubclass(cls, BatchOperator):
            raise DeclarationError(
                f"the windows {attribute!r} work row by row, but a batch operator processes many rows at once",
                remedy="derive from Operator, or keep a map keyed by window start and close windows in on_timers",
                operator=cls.__name__,
            )
        if cls.event_time is None:
            raise DeclarationError(
                f"the windows {attribute!r} use event time, but the operator declares no event_time column",
                remedy='set event_time = "column"',
                operator=cls.__name__,
            )
        if seen.setdefault(helper.name, attribute) != attribute:
            raise DeclarationError(
                f"the windows {seen[helper.name]!r} and {attribute!r} are both stored as {helper.name!r}",
                remedy="give one of them its own name=",
                operator=cls.__name__,
            )


class _Empty:
    def get(self, cell: bytes) -> bytes | None:
        return None

    def scan(self, prefix: bytes) -> Any:
        return iter(())


_EMPTY = _Empty()


def class_of(spec: OperatorSpec, bundles: BundleStore) -> type[Operator]:
    """Loads the class that a deployment names.

    If a text or a bundle was deployed, exactly that is loaded, never a file or module of the same name. Raises
    OperatorNotImportable, or its subclass BundleMissing.
    """
    check_digest(spec.source, spec.source_digest)
    if not spec.source and is_text(spec.target):
        raise OperatorNotImportable(
            "the deployment lacks the operator's source code", remedy="deploy it again", target=spec.target
        )
    package = package_of(spec.bundle, bundles.opened(spec.bundle)) if spec.bundle else ""
    return load(spec.target, spec.source, package)


def check_class(given: object) -> None:
    """Checks that ``given`` is an operator class. Raises DeclarationError otherwise, for example for an instance."""
    if isinstance(given, Operator):
        name = type(given).__name__
        raise DeclarationError(f"{name}() is an instance of an operator", remedy=f"pass the class itself: {name}")
    if not (isinstance(given, type) and issubclass(given, Operator)):
        raise DeclarationError(f"{given!r} is not an operator", remedy="derive it from stateflow.Operator")


def load(target: str, source: str = "", package: str = "") -> type[Operator]:
    """Loads the class at ``target``, see :func:`~stateflow.code.loading.find`. Raises OperatorNotImportable, with the
    error of the import."""
    loaded = find(target, source, package)
    if not (isinstance(loaded, type) and issubclass(loaded, Operator)):
        raise OperatorNotImportable(
            f"{target} is not an Operator class", remedy="name a class derived from stateflow.Operator"
        )
    return loaded
