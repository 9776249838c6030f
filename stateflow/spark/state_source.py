"""Data source ``spark.read.format("stateflow")``, with which executors read state.

Each Spark partition covers the partitions that one replica owns, or one partition of a checkpoint. Filters on ``key``
and ``partition`` are pushed down: executors read only the partitions that may contain the wanted keys, and replicas
send only those keys. Filters on windows are left to Spark, because the address of a session window's cells does not
contain the window's bounds. Spark refuses sources that accept filters unless
``spark.sql.python.filterPushdown.enabled`` is true, so :func:`~stateflow.spark.session.register_state` sets it.

With the option ``since`` the source reads the changes between two savepoints of a store. With the option ``describe``
it reads a description of the readable states or of the partitions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, In, InputPartition

from stateflow.checkpoint import CheckpointStore
from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import BadCertificate, InvalidArgument, UnknownState
from stateflow.local.embedded import embedded
from stateflow.operator.arrow import read_table
from stateflow.partition.checkpoints import manifests_of, read_checkpoint, readable_states
from stateflow.partition.entries import ReadableStates, is_exact, joined, several_kinds
from stateflow.partitioner import partition_of
from stateflow.rpc.clients import ControllerClient
from stateflow.security.plain import own_token, use_token
from stateflow.spark.session import arrow_schema

#: columns of descriptions
_STATES = pa.schema(
    [
        ("operator", pa.string()),
        ("state", pa.string()),
        ("kind", pa.string()),
        ("declared", pa.string()),  # JSON, as stored with the state
        ("key_columns", pa.list_(pa.string())),
    ]
)
_PARTITIONS = pa.schema(
    [
        ("operator", pa.string()),
        ("partition", pa.int32()),
        ("owner", pa.string()),  # of a checkpoint: the replica that took it
        ("epoch", pa.int64()),
        ("sequence", pa.int64()),
        ("taken", pa.timestamp("us", tz="UTC")),
        ("bytes", pa.int64()),
    ]
)
DESCRIBED = {"states": _STATES, "partitions": _PARTITIONS}


class StateOptions(BaseModel):
    """Options of the source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operator: str = Field(description="name of the operator")
    state: str | None = Field(default=None, description="name of the state's attribute or tag")
    cluster: str | None = Field(default=None, description="host:port of the controller, or of several")
    directory: str | None = Field(
        default=None, description="directory of a program's own cluster that runs on the driver's machine"
    )
    checkpoint: str | None = Field(default=None, description="URL of a checkpoint store, read without a cluster")
    savepoint: str = Field(default="", description="savepoint in the checkpoint store; default: the newest checkpoints")
    since: str = Field(default="", description="older savepoint in the store; reads the changes made after it")
    describe: Literal["", "states", "partitions"] = Field(
        default="", description="reads a description of the states or partitions instead of entries"
    )

    @classmethod
    def of(cls, options: Mapping[str, str]) -> StateOptions:
        """Validates the options. Raises InvalidArgument, which names the option, if one is not valid."""
        try:
            return cls.model_validate({key: options[key] for key in options})
        except ValidationError as error:
            first = error.errors()[0]
            what = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(first["type"])
            option = repr(first["loc"][0]) if first["loc"] else ""
            said = first["msg"].removeprefix("Value error, ")
            raise InvalidArgument(
                f"the option {option} {what or 'is invalid: ' + said}" if option else said,
                remedy=f"use the options of the source stateflow: {', '.join(cls.model_fields)}",
            ) from None

    @model_validator(mode="after")
    def _agree(self) -> StateOptions:
        if sum(each is not None for each in (self.cluster, self.directory, self.checkpoint)) > 1:
            raise ValueError("pass only one of cluster, directory and checkpoint")
        if (self.savepoint or self.since) and self.checkpoint is None:
            raise ValueError("savepoint= and since= need a checkpoint store: pass checkpoint=")
        if (self.state is None) == (not self.describe):
            raise ValueError("pass either state or describe (states or partitions)")
        if self.since and self.describe:
            raise ValueError("since= needs a state")
        return self

    def address(self) -> str:
        return self.cluster or embedded(self.directory, create=False).address

    def store(self) -> CheckpointStore:
        assert self.checkpoint is not None
        return CheckpointStore(self.checkpoint, create=False)


class StateSource(DataSource):
    """Spark's data source, see :func:`stateflow.spark.register_state`.

    Spark plans each read in a separate Python worker on the driver's machine, with the environment of the JVM instead
    of the caller's.

    Attributes:
        token: token of the caller; if empty, the worker uses the credentials in its own environment.
        issuer: directory of the caller's own authority; empty if the caller has none. The worker that plans a read gets
            a token for the read from this authority, and only this token goes to executors.
        key_type: type of the first stored key; None if no key is stored, or the caller has set a schema.
    """

    token = ""
    issuer = ""
    key_type: pa.DataType | None = None

    @classmethod
    def bound(cls, token: str = "", issuer: str = "") -> type[StateSource]:
        """Returns the source with the caller's token. Spark pickles the token with the class, so no plan shows it."""
        return type(cls.__name__, (cls,), {"token": token, "issuer": issuer})

    @classmethod
    def name(cls) -> str:
        return "stateflow"

    def schema(self) -> Any:
        from pyspark.sql.pandas.types import from_arrow_schema

        options = self._begun()
        if options.describe:
            return from_arrow_schema(DESCRIBED[options.describe], prefer_timestamp_ntz=True)
        first = _first(options)
        self.key_type = first.schema.field("key").type if first.num_rows else None
        return from_arrow_schema(_schema(options, first.schema), prefer_timestamp_ntz=True)

    def reader(self, schema: Any) -> StateReader:
        options = self._begun()
        # Spark also sends this object to executors, so it must lose the caller's token; the reader has the token for
        # executors
        self.__class__ = StateSource
        if options.checkpoint is not None:
            return StateReader(options, schema, "", self.key_type)
        options = options.model_copy(update={"cluster": options.address(), "directory": None})
        return StateReader(options, schema, own_token(), self.key_type)

    def _begun(self) -> StateOptions:
        """Validates the options, and makes this worker use the token that the read needs.

        A read of a checkpoint needs no token. Raises InvalidArgument, BadCertificate.
        """
        options, token = StateOptions.of(self.options), self.token
        if options.checkpoint is not None:
            token = ""
        elif self.issuer:
            from stateflow.spark.credentials import read_token

            asks_replicas = options.describe != "partitions"  # that description is the controller's alone
            token = read_token(Path(self.issuer), options.operator, state=asks_replicas)
        _use(token)
        return options


def _use(token: str) -> None:
    """Sets the token of this worker. With an empty token, the worker uses its own environment.

    Raises BadCertificate if the token has expired.
    """
    use_token(token)
    if not token:
        return
    from stateflow.security.certificates import certificate_of, decoded_token, utc

    found = certificate_of(decoded_token(token).cert)
    if utc(SYSTEM_CLOCK) > found.not_after:
        raise BadCertificate(
            f"the token of {found.identity} for this read expired at {found.not_after:%Y-%m-%d %H:%M:%S} UTC",
            remedy="load the DataFrame again; if that fails too, call register_state with a newer token first",
        )


def _schema(options: StateOptions, found: pa.Schema) -> pa.Schema:
    """Returns the source's schema, made from that of the first stored entries.

    Types are those of the state's declaration. The type of the key is that of the first stored key, or text if no key
    is stored.
    """
    fields = [pa.field(each.name, pa.string()) if pa.types.is_null(each.type) else each for each in found]
    if options.since:
        *entry, value, partition = fields
        change = pa.field("change", pa.string())
        fields = [*entry, change, pa.field("before", value.type), value, partition]
    return pa.schema(fields)


def _first(options: StateOptions) -> pa.Table:
    """Returns some entries of the first partition that has entries; if none has, of the savepoint ``since``.

    If there are no entries, returns an empty table with the declared types.
    """
    empty: list[pa.Table] = []
    for page in _of_any(options):
        table = read_table(page)
        if table.num_rows:
            return table
        empty.append(table)
    if options.since:  # its entries were deleted since
        with contextlib.suppress(UnknownState):  # it had none then
            empty.append(_first(options.model_copy(update={"savepoint": options.since, "since": ""})))
    return joined(empty)


def _of_any(options: StateOptions) -> Iterator[bytes]:
    """Yields the first page of each partition of a cluster, or all pages of a checkpoint."""
    assert options.state is not None
    if options.checkpoint is not None:
        yield from read_checkpoint(options.store(), options.operator, options.state, savepoint=options.savepoint)
    else:
        yield from Cluster(options.address()).scan_state(options.operator, options.state, whole=False)


def _pages(options: StateOptions, partitions: Collection[int] | None, keys: Sequence[Any]) -> Iterator[bytes]:
    """Yields pages of entries as Arrow IPC streams.

    Args:
        partitions: partitions to read; None reads all.
        keys: keys to read from a cluster; empty reads all. From a checkpoint, all keys are always read.
    """
    assert options.state is not None
    if options.checkpoint is not None:
        yield from read_checkpoint(
            options.store(), options.operator, options.state, savepoint=options.savepoint, partitions=partitions
        )
        return
    cluster = Cluster(options.address())
    for key in keys or (None,):
        yield from cluster.scan_state(options.operator, options.state, key, partitions=partitions)


@dataclass
class Portion(InputPartition):
    """Partitions that one Spark task reads.

    Attributes:
        partitions: numbers of the partitions.
        keys: keys to read; empty reads all.
        state: attribute or exact name of the state, by which each partition can find it.
    """

    partitions: tuple[int, ...]
    keys: tuple[Any, ...] = ()
    state: str = ""


@dataclass
class StateReader(DataSourceReader):
    """Reader of the source.

    Attributes:
        options: options of the source.
        schema: Spark's schema.
        token: token for executors; empty if they need none.
        key_type: see :class:`StateSource`.
        keys: keys in pushed-down filters; None if no filter names keys.
        numbers: partition numbers in pushed-down filters; None if no filter names partitions.
    """

    options: StateOptions
    schema: Any
    token: str = field(repr=False)
    key_type: pa.DataType | None = None
    keys: tuple[Any, ...] | None = None
    numbers: frozenset[int] | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Records filters on key and partition, which limit what is read. Returns all filters, because Spark must apply
        them again."""
        if not self.options.describe:
            for each in filters:
                match each:
                    case EqualTo(attribute=("key",), value=value):
                        self._want_keys((value,))
                    case In(attribute=("key",), value=values):
                        self._want_keys(tuple(values))
                    case EqualTo(attribute=("partition",), value=number):
                        self._want_partitions({number})
                    case In(attribute=("partition",), value=numbers):
                        self._want_partitions(set(numbers))
        return filters

    def _want_keys(self, keys: tuple[Any, ...]) -> None:
        if not any(isinstance(key, dict) for key in keys):
            # nothing is stored under null, NaN or infinity, and 0.0 and -0.0 are one key
            finite = (key for key in keys if not isinstance(key, float) or math.isfinite(key))
            keys = tuple(dict.fromkeys(key for key in finite if key is not None))
        self.keys = keys if self.keys is None else tuple(key for key in self.keys if key in keys)

    def _want_partitions(self, numbers: set[int]) -> None:
        self.numbers = frozenset(numbers if self.numbers is None else self.numbers & numbers)

    def partitions(self) -> Sequence[InputPartition]:
        _use(self.token)
        if self.options.describe:
            return [Portion(())]
        if self.options.checkpoint is not None:
            manifests = manifests_of(self.options.store(), self.options.operator, self.options.savepoint)
            self._check_since({each.partitions for each in manifests})
            count = max((each.partitions for each in manifests), default=0)
            places = [[each.partition] for each in manifests]
        else:
            owners = ControllerClient(self.options.address()).deployment(self.options.operator).owners
            count, by_owner = len(owners), dict[str, list[int]]()
            for number, owner in enumerate(owners):
                by_owner.setdefault(owner.name, []).append(number)
            places = [*by_owner.values()]
        state = self._exact_state() if places else ""
        by_partition = _by_partition(self._keys_as_stored(), count)
        found = []
        for numbers in places:
            wanted = [
                number
                for number in numbers
                if (self.numbers is None or number in self.numbers) and (by_partition is None or number in by_partition)
            ]
            if wanted:
                keys = () if by_partition is None else tuple(key for n in wanted for key in by_partition[n])
                found.append(Portion(tuple(wanted), keys, state))
        return found or [Portion(())]

    def _exact_state(self) -> str:
        """Returns the name by which each partition can find the state, so that tasks need not ask all partitions."""
        options, state = self.options, self.options.state
        assert state is not None
        if is_exact(state) or "window_start" not in self.schema.names:
            return state
        if options.checkpoint is not None:
            states = readable_states(manifests_of(options.store(), options.operator, options.savepoint))
        else:
            states = Cluster(options.address()).readable_states(options.operator)
        return states.exact(state, options.operator)

    def _check_since(self, counts: set[int]) -> None:
        """Checks that both savepoints have the same number of partitions. Raises InvalidArgument."""
        if self.options.since:
            before = manifests_of(self.options.store(), self.options.operator, self.options.since)
            if {each.partitions for each in before} != counts:
                raise InvalidArgument(
                    "the two savepoints have different numbers of partitions and cannot be compared",
                    remedy="read each savepoint without since=, and compare the two DataFrames with Spark",
                )

    def _keys_as_stored(self) -> tuple[Any, ...] | None:
        """Returns the keys to read, or None to read all keys.

        A filter's keys are not used if their type differs from that of stored keys, because Spark compares the two
        after a conversion.
        """
        from pyspark.sql.pandas.types import from_arrow_type

        if self.keys is None:
            return None
        stored = _first(self.options).schema.field("key").type
        if pa.types.is_null(stored) or from_arrow_type(stored) != self.schema["key"].dataType:
            return None
        return self.keys

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Portion)
        _use(self.token)
        schema = arrow_schema(self.schema)
        if self.options.describe:
            yield from _described(self.options).cast(schema).to_batches()
            return
        if not partition.partitions:
            return
        options = self.options.model_copy(update={"state": partition.state})
        if options.since:
            for number in partition.partitions:
                yield from _changes(options, number, schema, self.key_type)
            return
        for table in _tables(options, partition.partitions, partition.keys, self.key_type):
            yield from table.cast(schema).to_batches()


def _by_partition(keys: Sequence[Any] | None, count: int) -> dict[int, list[Any]] | None:
    """Groups keys by their partition.

    Returns None if ``keys`` is None, there are no partitions, or a key is composite, such as a struct.
    """
    if keys is None or not count:
        return None
    found: dict[int, list[Any]] = {}
    for key in keys:
        if isinstance(key, (tuple, list, dict)):
            return None
        found.setdefault(partition_of(key, count), []).append(key)
    return found


def _changes(
    options: StateOptions, number: int, schema: pa.Schema, key_type: pa.DataType | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the changes of one partition's entries between two savepoints: insert, update or delete.

    The older savepoint's entries stay in memory, in Arrow's form. The newer ones are read page by page.
    """
    pages: list[pa.Table] = []
    places: dict[bytes, tuple[int, int]] = {}  # entry → its page and row in the older savepoint
    for table in _tables(options.model_copy(update={"savepoint": options.since}), (number,), (), key_type):
        places |= {entry: (len(pages), row) for row, entry in enumerate(map(_entry, table.to_pylist()))}
        pages.append(table)
    for table in _tables(options, (number,), (), key_type):
        rows: list[dict[str, Any]] = []
        for now in table.to_pylist():
            place = places.pop(_entry(now), None)
            if place is None:
                rows.append(now | {"change": "insert", "before": None})
                continue
            page, row = place
            before = pages[page]["value"][row].as_py()
            if repr(before) != repr(now["value"]):  # NaN equals NaN, and 0.0 does not equal -0.0
                rows.append(now | {"change": "update", "before": before})
        yield from pa.Table.from_pylist(rows, schema).to_batches()
    deleted: dict[int, list[int]] = {}
    for page, row in places.values():
        deleted.setdefault(page, []).append(row)
    for page, gone in deleted.items():
        found = pages[page].take(pa.array(gone)).to_pylist()
        rows = [was | {"change": "delete", "before": was["value"], "value": None} for was in found]
        yield from pa.Table.from_pylist(rows, schema).to_batches()


def _tables(
    options: StateOptions, partitions: Collection[int], keys: Sequence[Any], key_type: pa.DataType | None
) -> Iterator[pa.Table]:
    """Yields entries, page by page. Raises SchemaMismatch if their keys have another type than ``key_type``."""
    for table in map(read_table, _pages(options, partitions, keys)):
        found = table.schema.field("key").type
        if key_type is not None and table.num_rows and found != key_type:
            raise several_kinds(options.operator, str(key_type), str(found))
        yield table


def _entry(row: Mapping[str, Any]) -> bytes:
    """Returns a digest of the key, window and map key of an entry."""
    name = repr([row[name] for name in row if name not in ("value", "partition")])
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _described(options: StateOptions) -> pa.Table:
    """Returns a description of a cluster, from its controller and replicas, or of a store, from its manifests."""
    rows: list[dict[str, Any]] = []
    states, key = ReadableStates({}, {}), tuple[str, ...]()
    if options.checkpoint is not None:
        manifests = manifests_of(options.store(), options.operator, options.savepoint)
        if manifests:
            attributes, key = {each["name"]: each for each in manifests[0].schema}, manifests[0].key
            states = ReadableStates.of(attributes, [tag for each in manifests for tag in each.tags])
        rows = [
            {
                "operator": each.operator,
                "partition": each.partition,
                "owner": each.replica,
                "epoch": each.epoch,
                "sequence": each.sequence,
                "taken": datetime.fromtimestamp(each.created_us / 1e6, UTC),
                "bytes": each.size,
            }
            for each in manifests
        ]
    else:
        deployment = ControllerClient(options.address()).deployment(options.operator)
        key = deployment.spec.key
        if options.describe == "states":
            states = Cluster(options.address()).readable_states(options.operator)
        rows = [
            {"operator": options.operator, "partition": number, "owner": owner.name, "epoch": epoch}
            for number, (owner, epoch) in enumerate(zip(deployment.owners, deployment.epochs, strict=True))
        ]
    if options.describe == "states":
        rows = [
            {
                "operator": options.operator,
                "state": name,
                "kind": each.get("kind"),
                "declared": json.dumps(each, sort_keys=True),
                "key_columns": list(key),
            }
            for name, each in states.by_name().items()
        ]
    return pa.Table.from_pylist(rows, DESCRIBED[options.describe])
