"""Calls an operator's methods for one partition, and reports their exceptions as the operator's errors.

The texts of such errors are bounded in length for any exception, even if the exception's own ``str`` fails.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa

from stateflow.errors import OperatorFailed, OperatorStuck, StateflowError
from stateflow.metrics.own import Metrics, OwnFigures
from stateflow.operator.operator import (
    BatchOperator,
    Context,
    Operator,
    key_columns,
    output_schema,
    side_schemas,
    timer_method_lacked,
    windows_of,
)
from stateflow.operator.output import OutputReader, OutputWriter, copied, join_output
from stateflow.operator.rows import DecodedRows
from stateflow.operator.timers import WINDOW, Domain, Timer, TimerColumns, Timers, to_datetime
from stateflow.operator.watchdog import Interrupted, frames_of
from stateflow.state import ColumnStates, KeyedState
from stateflow.state.keys import kinds_of
from stateflow.types import PartitionId

TEXT_MAX = 1_000
FRAMES_SHOWN = 6
MEND = "fix the operator or the row; the batch was not applied"
MEND_STUCK = "fix the operator or the row, or raise STATEFLOW_REPLICA_BATCH_TIMEOUT_S"
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 500

# -- Texts of failures -----------------------------------------------------------------------------------------------


def is_ours(error: BaseException) -> bool:
    """Tells whether the operator raised the error. Only Ctrl-C in the main thread is not its error."""
    return not (isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread())


def failure(method: str, error: BaseException, remedy: str, **where: Any) -> OperatorFailed:
    """Makes the error to report for an exception from an operator's method; OperatorStuck for Interrupted.

    Args:
        method: the method as shown in the error, such as ``process()``.
        where: operator, partition, cause, and further objects that locate the error, which are shown by their ``repr``.
    """
    plain = ("operator", "partition", "cause")
    place = {name: value if name in plain else shown(value) for name, value in where.items()}
    if isinstance(error, Interrupted):
        return OperatorStuck(
            f"{method} did not return in time and was interrupted",
            remedy=f"{MEND_STUCK}; the batch was not applied",
            traceback=trace_of(error),
            **place,
        )
    return OperatorFailed(
        f"{method} raised {type(error).__name__}: {text_of(error)}", remedy=remedy, traceback=trace_of(error), **place
    )


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Interrupted:
        raise
    except BaseException as worse:  # noqa: BLE001 - its own ``str`` fails
        return f"(its message cannot be read: {type(worse).__name__})"
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}… ({len(text)} characters)"


def shown(value: Any) -> str | None:
    """Returns a value's ``repr``, bounded in length, or a note that ``repr`` fails. None stays None."""
    if value is None:
        return None
    try:
        return _REPR.repr(value)
    except Interrupted:
        raise
    except BaseException as worse:  # noqa: BLE001 - as above
        return f"(cannot be shown: {type(worse).__name__})"


def trace_of(error: BaseException) -> str:
    """Formats the traceback: the operator's frames, innermost last, and the error."""
    return "\n" + frames_of(error, FRAMES_SHOWN)[: 4 * TEXT_MAX] + f"{type(error).__name__}: {text_of(error)}"


# -- Calls of an operator --------------------------------------------------------------------------------------------


class Produced(NamedTuple):
    """The output of a batch on one partition.

    Attributes:
        rows: rows of the main output that are still to be encoded; empty if there are ``columns``.
        columns: message of the whole main output, if some of it was produced as columns; otherwise empty.
        side: tag → message of the side output.
    """

    rows: list[Any]
    columns: bytes
    side: dict[str, bytes]


class OperatorInstance:
    """Calls an operator's methods for one partition. Not thread-safe.

    Raises OperatorFailed for exceptions of the operator, except for StateflowErrors, which are raised unchanged.

    Args:
        watermark_us: current watermark of the partition; None: there is none yet.
        figures: collects the metrics that operators of this process define.
    """

    def __init__(
        self,
        cls: type[Operator],
        partition: PartitionId,
        state: KeyedState | ColumnStates,
        timers: Timers,
        watermark_us: int | None,
        figures: OwnFigures,
    ) -> None:
        self.state = state
        self.takes_batches = issubclass(cls, BatchOperator)
        self._partition, self._timers = partition, timers
        self._event_time, self._key = cls.event_time, key_columns(cls)
        side = side_schemas(cls)
        self._writer = OutputWriter(output_schema(cls), partition.operator)
        self._side_writers = {tag: OutputWriter(schema, partition.operator, tag) for tag, schema in side.items()}
        self._freeze = self._writer.freeze
        self._outputs = OutputReader(output_schema(cls), side)
        keyed = state if isinstance(state, KeyedState) else None
        metrics = partial(Metrics, figures, partition.operator, cls)
        self._ctx = Context(partition.operator, partition.partition, timers, keyed, metrics)
        self._ctx._freeze = {tag: writer.freeze for tag, writer in self._side_writers.items()}
        self._ctx._unheard = timer_method_lacked(cls)
        self.show_watermark(watermark_us)
        #: whether the operator overrides ``on_watermark``
        self.hears_watermarks = cls.on_watermark is not Operator.on_watermark
        self.operator = self._made(cls)

    def _made(self, cls: type[Operator]) -> Operator:
        try:
            return cls()
        except StateflowError as error:
            error.located(cause="open")
            raise
        except BaseException as error:
            if not is_ours(error):
                raise
            remedy = "fix the operator; no batch was applied"
            raise self._failed("__init__", error, remedy, cause="open") from error

    def attach(self) -> None:
        """Sets the partition's states as attributes of the operator, if it is a batch operator."""
        if isinstance(self.state, ColumnStates):
            self.state.attach(self.operator)

    def open(self) -> None:
        """Opens the operator. Its states are attached afterwards, because what ``open`` wrote would be undone with the
        first batch if that fails."""
        self._ctx._in_batches = False
        try:
            self.operator.open(self._ctx)
        except StateflowError as error:
            error.located(cause="open")
            raise
        except BaseException as error:
            if not is_ours(error):
                raise
            raise self._failed("open", error, "fix the operator; no batch was applied", cause="open") from error
        self._ctx._in_batches = True
        self.attach()

    def count(self) -> None:
        """Publishes the operator's counts of the batch, after the batch was applied. An error is only logged, because
        the batch is committed."""
        if self._ctx._metrics is None:
            return
        try:
            self._ctx._metrics.count()
        except Exception:
            self._ctx.logger.exception("metrics of a batch of partition %s were not counted", self._partition)

    def forget(self) -> None:
        """Discards the operator's counts of the batch, because the batch was not applied."""
        if self._ctx._metrics is not None:
            self._ctx._metrics.forget()

    # -- a batch ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a batch, with no output emitted yet."""
        self._ctx._side = {tag: [] for tag in self._side_writers}
        self._columns: list[pa.RecordBatch] = []

    def process(self, arrived: DecodedRows, outputs: list[Any], initial: bool) -> int:
        """Processes rows one by one, in order. Returns their number."""
        assert isinstance(self.state, KeyedState)
        operator, ctx, state = self.operator, self._ctx, self.state
        attributes, process = operator.__dict__, operator.init_state if initial else operator.process
        append, freeze = outputs.append, self._freeze
        timestamp = None if initial else arrived.reader.getter(self._event_time)
        keys: list[Any] = []
        key: Any = None
        row: Any = None
        try:
            keys, rows = arrived.read()
            for key, bundle, row in zip(keys, state.bundles(keys), rows, strict=True):
                attributes.update(state.bundle_of(key) if bundle is None else bundle)
                ctx.key = key
                if timestamp is not None:
                    ctx.timestamp = timestamp(row)
                produced = process(row, ctx)
                if produced is None:
                    continue
                # each row is frozen before the next is produced, because the operator may then change its objects
                if freeze is copied:
                    for each in produced:  # quicker than a call per row
                        append(each if each.__class__ is tuple else copied(each))
                else:
                    outputs.extend(map(freeze, produced))
        except StateflowError as error:
            error.located(**self._here(key))
            raise
        except BaseException as error:  # any exception, sys.exit() and asyncio's cancellation included
            if not is_ours(error):
                raise
            raise self._failed(process.__name__, error, key=key, row=row) from error
        finally:
            ctx.key = ctx.timestamp = None
            state.unbind(operator)
        return len(keys)

    def process_batch(self, arrived: DecodedRows, initial: bool) -> int:
        """Processes all rows at once. Returns their number."""
        assert isinstance(self.operator, BatchOperator)
        batch = arrived.columns()
        process = self.operator.init_batch if initial else self.operator.process_batch
        self._produce(process, batch, lambda: batch.slice(0, 1).to_pylist())
        return len(batch)

    def _produce(self, method: Callable[[Any, Context], Any], argument: Any, row: Callable[[], Any]) -> None:
        """Calls a batch operator's method and keeps the columns that it returns.

        Args:
            row: returns the part of the input that an error shows.
        """
        self._keep_columns()
        try:
            produced = method(argument, self._ctx)
        except StateflowError as error:
            error.located(**self._here(None))
            raise
        except BaseException as error:
            if not is_ours(error):
                raise
            raise self._failed(method.__name__, error, row=row()) from error
        if produced is not None:
            self._columns.append(self._writer.columns(produced, method.__name__))

    def _keep_columns(self) -> None:
        """Copies the columns of the last call, because the operator may reuse their buffers in its next call."""
        if self._columns:
            last = self._columns[-1]
            self._columns[-1] = pa.ipc.read_record_batch(last.serialize(), last.schema)

    def on_watermark(self, watermark_us: int, outputs: list[Any]) -> None:
        self._keep_columns()
        self.show_watermark(watermark_us)
        assert self._ctx.watermark is not None
        self._call("on_watermark", self.operator.on_watermark, self._ctx.watermark, outputs)

    def show_watermark(self, watermark_us: int | None) -> None:
        self._ctx.watermark = None if watermark_us is None else to_datetime(watermark_us)

    def check_timers(self) -> Iterator[None]:
        """Checks that the operator handles the stored timers, which an earlier version of it may have set. Yields after
        each timer. Raises OperatorFailed, SchemaMismatch."""
        helpers = windows_of(type(self.operator)).values()
        for name in self._timers.stored_names():
            self._check_heard()
            for helper in helpers:
                helper.check_timer(name)
            yield

    def _check_heard(self) -> None:
        """Checks that the operator handles timers, because a timer is stored. Raises OperatorFailed."""
        if lacks := self._ctx._unheard:
            name = self._partition.operator
            raise OperatorFailed(
                f"timers are stored, which an earlier version set, but the operator has no {lacks}()",
                remedy=f"deploy a version with {lacks}(self, …) that handles them, or roll back: `stateflow operator "
                f"versions {name}` and `stateflow upgrade {name} --to VERSION`",
                operator=name,
                partition=self._partition.partition,
            )

    def fire(self, domain: Domain, until_us: int, outputs: list[Any]) -> None:
        """Fires the timers of a domain that are due at ``until_us``."""
        if isinstance(self.operator, BatchOperator):
            while due := list(self._timers.due(domain, until_us)):
                self._check_heard()
                # a partition that has had no rows since it was opened knows its keys from its timers
                self._timers.keys.kinds = self._timers.keys.kinds or kinds_of(due[0].key)
                self._produce(self.operator.on_timers, TimerColumns.of(due, self._key), lambda: due[0])
            return
        for timer in self._timers.due(domain, until_us):
            self._check_heard()
            assert isinstance(self.state, KeyedState)
            self.state.bind(self.operator, timer.key)
            self._ctx.key = timer.key
            try:
                self._call("on_timer", self.operator.on_timer, timer, outputs)
                if timer.name.startswith(WINDOW):
                    self._call("on_timer", self._end_window, timer, outputs)
            finally:
                self._ctx._ended = {}
                self._ctx.key = None
                self.state.unbind(self.operator)

    def _end_window(self, timer: Timer, ctx: Context) -> None:
        """Ends the window of a timer, if ``on_timer`` did not loop over ``ended``, and empties it."""
        if not ctx._ended:
            for helper in windows_of(type(self.operator)).values():
                for _ in helper.ended(timer, ctx):
                    pass
        ctx._clear_ended()

    def produced(self, outputs: list[Any]) -> Produced:
        """Returns the whole output of the batch. Columns in the operator's own buffers are encoded at once, because the
        operator may reuse them in its next call. Raises OutputMismatch."""
        side = {tag: self._side_writers[tag].write(emitted) for tag, emitted in self._ctx._side.items() if emitted}
        if self._columns:
            return Produced([], self._writer.write(outputs, self._columns), side)
        return Produced(self._writer.settled(outputs), b"", side)

    @property
    def writer(self) -> OutputWriter:
        """Writer of the main output."""
        return self._writer

    def join(self, earlier: bytes, produced: Produced, rows: bytes) -> bytes:
        """Appends the output of a batch to ``earlier`` output of the same batch, see :mod:`stateflow.operator.output`.

        Args:
            rows: the encoded rows of ``produced``.
        """
        return self._outputs.join(earlier, join_output(rows or produced.columns, produced.side))

    # -- apart from batches -------------------------------------------------------------------------------

    def migrate_state(self, version: int, key: Any, old: SimpleNamespace) -> None:
        """Calls the operator's ``migrate_state`` for a key, after the caller bound the new states to the operator.

        Args:
            version: version of the old states.
        """
        operator, name = self.operator, self._partition.operator
        remedy = (
            f"fix migrate_state() and deploy again, or roll back: `stateflow operator versions {name}` and "
            f"`stateflow upgrade {name} --to VERSION`; no state of this partition was changed"
        )
        self._ctx.key = key
        try:
            self._call("migrate_state", lambda old, _: operator.migrate_state(version, old), old, [], remedy)
        finally:
            self._ctx.key = None

    def let_go(self, aside: Callable[[Callable[[], None]], None]) -> None:
        """Releases the operator.

        Args:
            aside: called with a function that closes the operator, if the operator has ``close`` or ``__del__``.
                ``aside`` runs that function where no batch waits for it.
        """
        operator, ctx, name = self.operator, self._ctx, self._partition
        self.operator = Operator()
        ctx._in_batches = False
        if isinstance(self.state, ColumnStates):
            self.state.detach(operator)

        def close() -> None:
            nonlocal operator
            try:
                operator.close(ctx)
            except BaseException as error:  # no caller could handle it
                if not is_ours(error):
                    raise
                ctx.logger.exception("close() of the operator of partition %s failed", name)
            self.count()
            del operator  # so that its __del__, if there is one, runs here

        if type(operator).close is not Operator.close or hasattr(operator, "__del__"):
            aside(close)

    def _call(
        self,
        name: str,
        method: Callable[[Any, Context], Any],
        argument: Any,
        outputs: list[Any],
        remedy: str = MEND,
    ) -> None:
        try:
            produced = method(argument, self._ctx)
            if produced is not None:
                outputs.extend(map(self._freeze, produced))
        except StateflowError as error:
            error.located(**self._here(self._ctx.key))
            raise
        except BaseException as error:
            if not is_ours(error):
                raise
            raise self._failed(name, error, remedy, key=self._ctx.key, row=argument) from error

    def _here(self, key: Any) -> dict[str, Any]:
        return {"operator": self._partition.operator, "partition": self._partition.partition, "key": shown(key)}

    def _failed(
        self,
        method: str,
        error: BaseException,
        remedy: str = MEND,
        **where: Any,
    ) -> OperatorFailed:
        place = {"operator": self._partition.operator, "partition": self._partition.partition}
        return failure(f"{method}()", error, remedy, **place, **where)
