"""Tools for testing operators and clusters.

:class:`OperatorHarness` runs an operator in this process, without a cluster and a JVM but with the same state code as a
replica. :class:`LocalCluster` runs a cluster of real processes on this machine.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from stateflow.changes import ChangeSet, Mutations
from stateflow.client.stream import numbered, rows_given
from stateflow.errors import DeclarationError, InvalidArgument, StateflowError
from stateflow.local.cluster import LocalCluster
from stateflow.metrics.figures import Histogram
from stateflow.metrics.own import OwnFigures
from stateflow.operator.operator import Operator, check_class, check_whole, key_columns, output_schema, side_schemas
from stateflow.operator.output import OutputReader
from stateflow.operator.timers import to_us
from stateflow.partition.positions import INITIAL, Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.partitioner import check_partitions, partition_of
from stateflow.state import DeployedStates, declarations_of
from stateflow.storage import MemoryStore, PartitionStore, RocksEngine
from stateflow.types import OperatorSpec, PartitionId

__all__ = ["LocalCluster", "OperatorHarness"]

SOURCE = "harness"


class OperatorHarness:
    """Runs an operator's partitions on the memory or the RocksDB store.

    Values always pass through their coders: nothing stays decoded from one ``send`` to the next, so that the
    harness cannot hide a serialisation fault.

    Args:
        operator: the class, or an instance of it. As a replica does, the harness makes its own instances.
        backend: ``memory`` or ``rocksdb`` (in a temporary directory, removed by ``close`` or with the harness).
        initial_state: rows for :meth:`Operator.init_state`.

    Raises DeclarationError for an instance with attributes that the harness's own instances would lack.

    Example: ``OperatorHarness(Count, backend="memory").send([{"k": "a"}])``
    """

    def __init__(
        self,
        operator: Operator | type[Operator],
        partitions: int = 8,
        backend: str = "memory",
        initial_state: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        if backend not in ("memory", "rocksdb"):
            raise InvalidArgument(f"there is no backend {backend!r}", remedy="use 'memory' or 'rocksdb'")
        self._cls = operator if isinstance(operator, type) else type(operator)
        check_class(self._cls)
        self._name = self._cls.__name__
        self._partitions = check_partitions(partitions)
        self._backend = backend
        self._engine = RocksEngine(8 << 20, 8 << 20)
        check_whole(self._cls)
        if isinstance(operator, Operator):
            _check_unchanged(operator)
        self._key = key_columns(self._cls)
        self._output = OutputReader(output_schema(self._cls), side_schemas(self._cls))
        self._spec = self._described()
        self._watermark_us: int | None = None
        self._now_us = 0
        #: tag → rows of that side output from the last call
        self.side_outputs: dict[str, list[dict[str, Any]]] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="stateflow-harness-"))
        #: removes the directory, even if the harness is never closed
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._batch = 0
        #: number and content of the last batch, if it failed
        self._failed: tuple[int, tuple[Any, ...]] | None = None
        self._figures = OwnFigures()
        self._changes: dict[int, bytes] = {}
        self._stores: list[PartitionStore] = []
        self._stores = [self._new_store(p) for p in range(partitions)]
        self._hosts = [self._new_host(p) for p in range(partitions)]
        if rows := rows_given(initial_state):
            self._apply(*self._messages(rows), source=INITIAL)

    def _open_hosts(self) -> list[PartitionProcessor]:
        if not self._hosts:
            raise InvalidArgument("the harness is closed", remedy="create a new harness")
        return self._hosts

    def _described(self) -> OperatorSpec:
        """Returns a specification with what the harness needs of the operator: name, partitions, key and states."""
        states = sorted(
            (each.describe() for each in declarations_of(self._cls).values()), key=lambda each: each["name"]
        )
        return OperatorSpec(self._name, "", self._partitions, self._key, b"", json.dumps(states))

    def _new_store(self, partition: int) -> PartitionStore:
        if self._backend == "memory":
            return MemoryStore()
        return self._engine.open(self._directory / str(partition), create=True)

    def _new_host(self, partition: int) -> PartitionProcessor:
        deployed = DeployedStates.of(self._spec.state_schema, self._spec.dropped)
        return PartitionProcessor(
            self._cls,
            PartitionId(self._name, partition),
            self._stores[partition],
            epoch=1,
            on_commit=lambda sequence, encode: self._changes.__setitem__(partition, encode()),
            deployed=lambda: deployed,
            figures=self._figures,
        )

    def send(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Sends one batch. Returns the outputs, grouped by partition and in the order of the rows of each key.

        Rows are converted as by a client without ``schema=``. They may have different columns; a column that a row
        lacks is null.

        Raises OperatorFailed for an exception of ``process``; the state of that partition is then as before, and the
        other partitions have applied the batch. If the next call sends equal rows, it repeats the batch, as a client
        does: partitions that have applied it return their output again and change nothing.

        Raises InvalidArgument for rows that do not fit one schema, KeyColumnMissing, NullKey.
        """
        self._open_hosts()
        self._changes.clear()
        return self._apply(*self._messages(rows_given(rows)))

    def _messages(self, rows: list[Mapping[str, Any]]) -> tuple[bytes, dict[int, bytes]]:
        """Returns (input schema, partition → record batch message)."""
        if not rows:
            return pa.schema([]).serialize().to_pybytes(), {}
        batch, numbers = numbered(self._spec, None, rows)
        by_partition: dict[int, list[int]] = {}
        for index, partition in enumerate(numbers):
            by_partition.setdefault(partition, []).append(index)
        messages = {
            partition: batch.take(pa.array(mine)).serialize().to_pybytes()
            for partition, mine in sorted(by_partition.items())
        }
        return batch.schema.serialize().to_pybytes(), messages

    def advance_watermark(self, watermark: datetime | int) -> list[dict[str, Any]]:
        """Advances the watermark, which asserts that no older rows follow. Returns the output of timers and
        ``on_watermark``."""
        self._open_hosts()
        self._watermark_us = to_us(watermark)
        return self._visit()

    def advance_processing_time(self, seconds: float) -> list[dict[str, Any]]:
        """Advances the clock, which starts at 1970. Returns the output of timers."""
        self._open_hosts()
        if seconds < 0:
            raise InvalidArgument("time does not run backwards", remedy="pass 0 seconds or more")
        if not self._now_us + seconds * 1e6 < 1 << 63:  # also for NaN
            raise InvalidArgument(f"the clock cannot advance by {seconds} s", remedy="pass fewer seconds")
        self._now_us += round(seconds * 1e6)
        return self._visit()

    def _visit(self) -> list[dict[str, Any]]:
        self._changes.clear()
        return self._apply(b"", dict.fromkeys(range(self._partitions), b""))

    def _apply(self, schema: bytes, messages: dict[int, bytes], source: str = SOURCE) -> list[dict[str, Any]]:
        """Applies a batch to all its partitions, then raises the first error. Equal content after a failure is the same
        batch. Both are as with a client of a cluster."""
        content = (schema, messages, self._watermark_us, self._now_us)
        if self._failed is not None and self._failed[1] == content:
            number = self._failed[0]
        else:
            number, self._batch = self._batch, self._batch + 1
        self._failed = (number, content)
        batch = Batch(source, number, sparse=True, watermark_us=self._watermark_us)
        outputs, first = [], None
        for partition, message in messages.items():
            host = self._hosts[partition]
            host.state.invalidate()
            try:
                outputs.append(host.apply(batch, schema, message, self._now_us).output)
            except StateflowError as error:
                first = first or error
        if first is not None:
            raise first
        rows, self.side_outputs = self._output.rows(outputs)
        self._failed = None
        return rows

    def state(self, *key: Any) -> Any:
        """Returns the states of one key, by name: ``h.state("N1").flights.value``.

        Raises InvalidArgument if the key has more or fewer columns than the operator's.
        """
        host = self._open_hosts()[self._partition_of(key)]
        return host.peek(key[0] if len(self._key) == 1 else key, self._now_us)

    def metric(self, name: str, /, **labels: str) -> float | Histogram:
        """Returns the value of an operator's own metric, over all partitions: the number of a counter or gauge, or a
        histogram with ``count``, ``total``, ``bounds`` and ``counts``. Raises InvalidArgument if the metric is not
        known."""
        return self._figures.value(self._name, name, labels)

    def changes(self, *key: Any) -> Mutations:
        """Returns the change set that the last ``send`` wrote to the key's partition.

        Raises InvalidArgument if the key has more or fewer columns than the operator's.
        """
        data = self._changes.get(self._partition_of(key))
        return ChangeSet.decode(data).mutations if data else Mutations()

    def _partition_of(self, key: tuple[Any, ...]) -> int:
        if len(key) != len(self._key):
            raise InvalidArgument(
                f"the key of {self._name} has the columns {', '.join(self._key)}, not {len(key)} values",
                remedy="pass a value for each column",
            )
        return partition_of(key, self._partitions)

    def checkpoint(self, directory: str | Path | None = None) -> Path:
        """Writes a directory from which :meth:`restore` makes a harness. Returns its path. ``close`` does not remove
        it.

        Args:
            directory: a new or empty directory to write to; None: a temporary one, which is removed when the program
                ends.

        Raises InvalidArgument if the directory is not empty.
        """
        self._open_hosts()
        if directory is None:
            target = Path(tempfile.mkdtemp(prefix="stateflow-snapshot-"))
            atexit.register(shutil.rmtree, target, ignore_errors=True)
        else:
            target = Path(directory)
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise InvalidArgument(f"{target} exists and is not an empty directory", remedy="pass a new directory")
            target.mkdir(parents=True, exist_ok=True)
        for partition, store in enumerate(self._stores):
            store.snapshot(target / str(partition))
        states = json.dumps([self._spec.state_schema, self._spec.dropped])
        (target / "harness").write_text(f"{self._backend} {self._partitions} {self._batch} {self._now_us}\n{states}")
        return target

    @classmethod
    def restore(cls, operator: Operator | type[Operator], snapshot: str | Path) -> OperatorHarness:
        snapshot = Path(snapshot)
        run, states = (snapshot / "harness").read_text().splitlines()
        backend, partitions, batch, now_us = run.split()
        schema, dropped = json.loads(states)
        harness = cls(operator, int(partitions), backend)
        before = replace(harness._spec, state_schema=schema, dropped=tuple((name, times) for name, times in dropped))
        harness._spec = harness._spec.after(before)
        for partition, old in enumerate(harness._stores):
            old.close()
            if backend == "memory":
                harness._stores[partition] = MemoryStore.open(snapshot / str(partition))
            else:
                target = harness._directory / f"restored-{partition}"
                shutil.copytree(snapshot / str(partition), target)
                harness._stores[partition] = harness._engine.open(target)
            harness._hosts[partition] = harness._new_host(partition)
        harness._batch, harness._now_us = int(batch), int(now_us)
        return harness

    def close(self) -> None:
        """Closes the stores. The harness cannot be used any more, but for the results of the last call."""
        for host, store in zip(self._hosts, self._stores, strict=True):
            host.close()
            store.close()
        self._hosts, self._stores = [], []
        self._remove()

    def __enter__(self) -> OperatorHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_unchanged(operator: Operator) -> None:
    """Checks that a new instance has all attributes of this one, with the same values. Raises DeclarationError
    otherwise, because the instances that process rows are new ones."""
    cls = type(operator)
    try:
        new = vars(cls())
    except Exception:  # noqa: BLE001 - the harness's own instances report it
        return
    changed = [name for name, value in vars(operator).items() if name not in new or _differs(value, new[name])]
    if changed:
        raise DeclarationError(
            f"attributes are set on an instance of the operator: {', '.join(changed)}; rows are processed by other "
            "instances",
            remedy="pass the class, and set attributes in open(ctx) or on the class",
            operator=cls.__name__,
        )


def _differs(one: object, other: object) -> bool:
    """Tells whether two attributes differ, if their types are ones whose values can be compared."""
    if type(one) is not type(other):
        return True
    try:
        return isinstance(one, bool | int | float | str | bytes | tuple | list | dict | set) and one != other
    except Exception:  # noqa: BLE001 - items compare as they please
        return False
