"""Checks executors, DataFrames and their columns, so that errors are found before the first batch.

:func:`check_executors` checks that executors on other machines have this package, are allowed to call the cluster, and
can reach it. It checks each address once in an application, by a job with one short task for each executor slot (at
most 16). A replica may be down for a moment, and tasks would wait for it. So the check fails only if an executor twice
in a row cannot reach an address that this program reaches.

The other checks read the schema, the plan and the session of a DataFrame, and ask replicas for a stored key.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import (
    InvalidArgument,
    OperatorNotImportable,
    SchemaMismatch,
    StateflowError,
    Unavailable,
    UnknownState,
    from_wire,
)
from stateflow.operator.arrow import python_zone, read_table
from stateflow.operator.operator import Operator
from stateflow.rpc.clients import ControllerClient, ReplicaClient, addresses_of
from stateflow.security.plain import check_dialled, host_of, tls_files, use_token
from stateflow.spark.session import (
    LOCAL,
    REAL_TIME,
    SPECULATION,
    analyzed_plan,
    default_parallelism,
    is_connect,
    real_time_settings,
    require,
    speculates,
)
from stateflow.state import declarations_of
from stateflow.types import LABEL, ReplicaInfo

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession


log = logging.getLogger(__name__)
#: time limit for one address, in seconds; an address that is not tried within this time counts as reached
TRY_S = 3.0
#: number of addresses tried at a time
_AT_A_TIME = 64
#: most executor slots that are asked; each tries all addresses
_TASKS_MAX = 16
_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): .+")
#: application, or session of Spark Connect → addresses that its executors have been checked for
_ASKED: dict[str, set[str]] = {}
#: columns that identify a row of Kafka
KAFKA = ("topic", "partition", "offset")
#: the first of these settings of real-time mode may be larger than required, and the second smaller; all other settings
#: must have the required value
_AT_LEAST, _AT_MOST = "spark.python.udf.pipelined.queueDepth", "spark.sql.execution.pandas.udf.buffer.size"
#: beginnings of the names of plan nodes that spread or reorder the rows of one source partition
_SPREADING = (
    *("Repartition", "Rebalance", "Aggregate", "Join", "Sort", "Window", "Deduplicate", "Distinct", "Union"),
    *("GlobalLimit", "FlatMapGroups", "TransformWithState"),
)
#: name of a node in the text of a plan, in which characters that draw the tree precede the node of a line
_SHOWN_NODE = re.compile(r"^[^A-Za-z\n]*([A-Za-z]+)", re.MULTILINE)
#: prefix of the names of columns that are added to the input
RESERVED_COLUMNS = "__stateflow_"
#: Spark's name for the error that it raises if a pipeline's query function asks about a DataFrame
_IN_QUERY_FUNCTION = "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION"
#: type of a key column → test of the type of stored keys, as replicas show them
_STORED: dict[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), pa.types.is_integer),
    **dict.fromkeys(("float", "double"), pa.types.is_floating),
    "string": pa.types.is_string,
    "binary": pa.types.is_binary,
    "boolean": pa.types.is_boolean,
    "date": pa.types.is_date,
    "timestamp": pa.types.is_timestamp,
}


# -- Executors, as the driver asks them ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Miss:
    """An address that an executor does not reach.

    Attributes:
        host: the executor's host.
        address: address that it does not reach.
        why: the operating system's reason.
    """

    host: str
    address: str
    why: str


Ask = Callable[[Sequence[str]], list[Miss]]
#: addresses → address → reason, for each address that this program does not reach
Here = Callable[[Collection[str]], Mapping[str, str]]


def check_executors(spark: SparkSession, controller: str, owners: Iterable[ReplicaInfo], token: str = "") -> None:
    """Checks that Spark's Python workers can run an operator's tasks.

    Workers on this machine are checked only if they run another Python environment than this process.

    Args:
        controller: address of the controller, or addresses of several, as for ``apply_operator``.
        owners: owners of the operator's partitions.
        token: token that tasks get.

    Raises OperatorNotImportable if workers lack this package, Unavailable if they do not reach the controller or a
    replica that this program reaches, and InsecureRefused or BadCertificate if they are not allowed to call.
    """
    if is_connect(spark):
        of = spark.session_id
    else:
        context = spark.sparkContext
        here, of = context.master.startswith("local"), context.applicationId
        if here and not context.master.startswith("local-cluster") and _same_environment(context.pythonExec):
            return
    names = {owner.address: owner.name for owner in owners}
    controllers = addresses_of(controller)
    new = {*controllers, *names} - _ASKED.setdefault(of, set())
    if not new:
        return

    def ask(addresses: Sequence[str]) -> list[Miss]:
        return _asked(spark, Trying(tuple(addresses), token))

    check_reached(ask, unreached, controllers, {address: names[address] for address in new if address in names})
    _ASKED[of] |= new


def check_reached(ask: Ask, here: Here, controllers: Sequence[str], replicas: Mapping[str, str]) -> None:
    """Checks that executors reach the controllers and replicas that this program reaches.

    Args:
        ask: returns the addresses that executors do not reach.
        here: returns the addresses that this program does not reach.
        controllers: addresses of the controllers.
        replicas: address → name.

    Raises Unavailable if executors cannot reach a replica, or any controller, that this program reaches.
    """
    misses = ask(list(dict.fromkeys([*controllers, *replicas])))
    # ask twice, because an address may have become reachable or unreachable between asking executors and trying here
    if _blocked(misses, here, controllers, replicas):
        misses = ask([*controllers, *sorted({miss.address for miss in misses} & set(replicas))])
        if blocked := _blocked(misses, here, controllers, replicas):
            raise _refusal(blocked, replicas)


def _blocked(misses: Sequence[Miss], here: Here, controllers: Sequence[str], replicas: Mapping[str, str]) -> list[Miss]:
    """Returns the misses that concern an address that this program reaches.

    A host that reaches one of the controllers need not reach the others.
    """
    if not misses:
        return []
    gone = here({miss.address for miss in misses})
    found = [miss for miss in misses if miss.address not in gone]
    answering = {address for address in controllers if address not in gone}
    by_host: dict[str, set[str]] = {}
    for miss in found:
        by_host.setdefault(miss.host, set()).add(miss.address)
    return [miss for miss in found if miss.address in replicas or answering <= by_host[miss.host]]


def _refusal(blocked: Sequence[Miss], replicas: Mapping[str, str]) -> Unavailable:
    first = blocked[0]
    name = replicas.get(first.address)
    others = len({miss.address for miss in blocked}) - 1
    return Unavailable(
        f"executors on {first.host} cannot reach {name or 'the controller'} at {first.address}, "
        f"but this program can: {first.why}",
        remedy=f"start {'the replica' if name else 'the controller'} with --advertise and a name or address that the "
        "executors' machines can reach, and open its port to them",
        host=first.host,
        replica=name,
        address=first.address,
        others=others or None,
    )


def _asked(spark: SparkSession, trying: Trying) -> list[Miss]:
    tasks = max(1, min(_TASKS_MAX, default_parallelism(spark)))
    try:
        rows = spark.range(0, tasks, 1, tasks).mapInArrow(trying, Trying.columns).collect()
    except Exception as error:
        refused = not_importable(str(error))
        if refused is None:
            raise
        raise refused from None
    for row in rows:
        if row.fault:
            fault = from_wire(json.loads(row.fault))
            fault.located(host=row.host)
            raise fault
    return sorted({Miss(row.host, row.address, row.why) for row in rows}, key=lambda miss: (miss.host, miss.address))


def _same_environment(python: str) -> bool:
    """Tells whether the interpreter ``python`` belongs to the Python environment of this process.

    The paths are not resolved, because links in different virtual environments may lead to the same interpreter.
    """
    found = shutil.which(python)
    return found is not None and Path(found).absolute().parent == Path(sys.executable).parent


def not_importable(said: str) -> OperatorNotImportable | None:
    missing = _MISSING.findall(said)
    if not missing:
        return None
    return OperatorNotImportable(
        f"the executors' Python lacks what the operator's tasks need: {missing[-1]}",
        remedy="install stateflow-streams[spark] on the executors, or ship it when Spark is started: spark-submit "
        "--py-files with a zip of `stateflow spark package`, or --archives with an environment; select another Python "
        "with PYSPARK_PYTHON=… or --conf spark.pyspark.python=… (a setting of a running session has no effect)",
    )


# -- Executors, as they answer ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trying:
    """Function for ``mapInArrow`` that checks one executor.

    It yields a row for each address that the executor does not reach, or a single row with the error if the executor is
    not allowed to call the cluster.

    This class is pickled by name, so that a worker must import the same modules as for an operator's task.
    """

    addresses: tuple[str, ...]
    token: str = field(default="", repr=False)
    columns = "host string, address string, why string, fault string"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import stateflow.spark.task as _  # noqa: F401 - importing it is the check

        for _batch in batches:
            pass
        host = own_host(self.addresses)
        try:
            self._check_may_call()
            rows = [(host, address, why, "") for address, why in unreached(self.addresses).items()]
        except StateflowError as error:
            rows = [(host, "", "", json.dumps(error.to_wire()))]
        names = ["host", "address", "why", "fault"]
        values = list(zip(*rows, strict=True)) or [()] * len(names)
        columns = [pa.array(column, pa.string()) for column in values]
        yield pa.RecordBatch.from_arrays(columns, names=names)

    def _check_may_call(self) -> None:
        use_token(self.token)
        files = tls_files()
        if files is not None:
            files.current()
            return
        for address in self.addresses:
            check_dialled(address)


def own_host(towards: Iterable[str]) -> str:
    """Returns this machine's name, followed by its IP address if one of the addresses in ``towards`` can be resolved.

    The IP address is that of the network interface on the route to the first address that can be resolved.
    """
    name = socket.gethostname()
    for address in towards:
        try:
            family, *_, at = socket.getaddrinfo(*_parts(address), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as way:  # nothing is sent
                way.connect(at)
                return f"{name} ({way.getsockname()[0]})"
        except OSError:
            continue
    return name


def unreached(addresses: Collection[str], timeout_s: float = TRY_S) -> dict[str, str]:
    """Returns address → reason for each address to which this machine cannot connect.

    The call takes at most twice ``timeout_s``, even if a name server does not answer.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    for address in addresses:
        waiting.put(address)
    said: dict[str, str] = {}
    over_at = SYSTEM_CLOCK.monotonic() + 2 * timeout_s

    def work() -> None:
        while SYSTEM_CLOCK.monotonic() < over_at - timeout_s:
            try:
                address = waiting.get_nowait()
            except Empty:
                return
            said[address] = f"no answer within {timeout_s:g} s"
            said[address] = _tried(address, timeout_s)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_A_TIME, len(addresses)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, over_at - SYSTEM_CLOCK.monotonic()))
    return {address: why for address, why in list(said.items()) if why}


def _tried(address: str, timeout_s: float) -> str:
    """Returns the reason why an address is not reached, or an empty text if it is reached."""
    try:
        with socket.create_connection(_parts(address), timeout_s):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _parts(address: str) -> tuple[str, int]:
    return host_of(address), int(address.rpartition(":")[2])


# -- DataFrames and their columns ------------------------------------------------------------------------------------


def check_frame(frame: Any) -> None:
    """Checks that ``frame`` is a DataFrame of a running session. Raises InvalidArgument."""
    session = getattr(frame, "sparkSession", None)
    if is_connect(frame):
        _check_may_ask(frame)
    if session is None or not hasattr(frame, "isStreaming"):
        raise InvalidArgument(f"{type(frame).__name__} is not a DataFrame", remedy="pass a PySpark DataFrame")
    check_running(session)


def _check_may_ask(frame: Any) -> None:
    """Checks that the caller is not a query function of a declarative pipeline. Raises InvalidArgument."""
    try:
        _ = frame.isStreaming
    except Exception as error:
        if _IN_QUERY_FUNCTION not in str(error):
            raise
        raise InvalidArgument(
            "Spark does not analyse DataFrames within a pipeline's query function",
            remedy="apply the operator at module level, and return its result from the query function",
        ) from None


def check_running(spark: SparkSession) -> None:
    """Checks that the session was not stopped. Raises InvalidArgument."""
    if spark.is_stopped if is_connect(spark) else spark.sparkContext._jsc is None:
        raise InvalidArgument(
            "the Spark session was stopped", remedy="create a new session, and the DataFrame again in that session"
        )


def check_key(df: DataFrame, operator: type[Operator], name: str, controller: ControllerClient) -> None:
    """Checks that stored keys have the type of the key column. Raises SchemaMismatch, because keys of different types
    never match.

    Only operators with one key column are checked, by the type of one stored key. Replicas that cannot answer now are
    skipped.
    """
    owners = controller.deployment(name).owners
    key = operator.key if isinstance(operator.key, str) else operator.key[0] if len(operator.key) == 1 else None
    if key is None or key not in df.columns:
        return
    kind = df.schema[key].dataType.simpleString()
    by_owner: dict[str, list[int]] = {}
    for partition, owner in enumerate(owners):
        by_owner.setdefault(owner.address, []).append(partition)
    stored = _stored_key(by_owner, operator, name)
    if stored is not None and kind in _STORED and not _STORED[kind](stored):
        raise SchemaMismatch(
            f"the key column {key!r} is {kind}, but stored keys are {stored}",
            remedy="cast the column to that type, or deploy the operator under another name and pass name=",
            operator=name,
        )


def check_columns(df: DataFrame) -> None:
    """Checks that the columns can be passed to Python.

    Raises InvalidArgument if Python's Arrow lacks the type of a column, a column has a reserved name, a struct has
    several fields of one name, or a column contains timestamps and Python lacks the session's time zone.
    """
    from pyspark.sql import types as t

    refused = {
        t.YearMonthIntervalType: "drop it, or cast it, e.g. to a number of months",
        t.VariantType: "variants are not supported yet: cast it to string, or extract what is needed with variant_get",
    }
    for column in df.schema:
        if column.name.lower().startswith(RESERVED_COLUMNS):
            raise InvalidArgument(f"the column name {column.name!r} is reserved", remedy="rename it: withColumnRenamed")
        inner = list(types_in(column.dataType))
        for kind in inner:
            if (remedy := refused.get(type(kind))) is not None:
                raise InvalidArgument(
                    f"the column {column.name!r} is {column.dataType.simpleString()}, which cannot be passed to Python",
                    remedy=remedy,
                )
            names = kind.names if isinstance(kind, t.StructType) else []
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise InvalidArgument(
                    f"the column {column.name!r} contains a struct with several fields named {twice!r}",
                    remedy="cast it to a struct with distinct field names",
                )
        if any(isinstance(kind, t.TimestampType) for kind in inner):
            try:
                python_zone(df.sparkSession.conf.get("spark.sql.session.timeZone") or "UTC")
            except InvalidArgument as error:
                error.located(column=column.name)
                raise


def types_in(kind: Any) -> Iterator[Any]:
    """Yields ``kind`` and all types nested in it."""
    yield kind
    inner = [getattr(kind, name) for name in ("elementType", "keyType", "valueType") if hasattr(kind, name)]
    for each in [*inner, *(each.dataType for each in getattr(kind, "fields", ()))]:
        yield from types_in(each)


def check_once(df: DataFrame, column: str, use: str) -> None:
    """Checks that a column with a special use occurs only once. Raises InvalidArgument."""
    if (times := df.columns.count(column)) > 1:
        raise InvalidArgument(
            f"{times} columns are named {column!r}, so {use} is ambiguous",
            remedy="rename the others: df.toDF(…) names all columns in order",
        )


def check_order(df: DataFrame, column: str | None, *, by_arrow: bool) -> None:
    """Checks that rows can be ordered by a column. Raises InvalidArgument.

    Args:
        by_arrow: True for a micro-batch, whose rows Arrow orders in the tasks; False for a batch DataFrame, whose rows
            Spark orders.
    """
    from pyspark.sql import types as t

    if column is None:
        return
    if column not in df.columns:
        raise InvalidArgument(
            f"there is no column {column!r} to order by", remedy=f"use one of {', '.join(df.columns)}"
        )
    check_once(df, column, "the order of rows")
    kind = df.schema[df.columns.index(column)].dataType
    never: tuple[type[t.DataType], ...] = (t.MapType, t.VariantType, t.CalendarIntervalType, t.UserDefinedType)
    if by_arrow:
        never = (*never, t.ArrayType)
    if any(isinstance(each, never) for each in types_in(kind)):
        raise InvalidArgument(
            f"rows cannot be ordered by the column {column!r} of type {kind.simpleString()}",
            remedy="order by a number, string or timestamp, for example by a field of it",
        )


def site_column(df: DataFrame, column: str | None) -> str:
    """Returns the name of the site column; empty for None.

    Raises InvalidArgument if the column is missing, is not a string, or has a name that is too long or not printable.
    """
    if column is None:
        return ""
    check_once(df, column, "the site")
    kind = df.schema[column].dataType.simpleString() if column in df.columns else None
    if kind is None or kind.partition(" ")[0] != "string" or not LABEL.holds(column):
        what = f"it is {kind}" if kind else f"the input has {', '.join(df.columns)}"
        raise InvalidArgument(
            f"{column!r} cannot be the site column: {what}",
            remedy="name a string column of the input, with at most 256 printable characters in its name",
        )
    return column


def check_real_time(df: DataFrame, position: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the columns that identify a row in real-time mode: source partition columns, then the offset column.

    Raises InvalidArgument if ``position``, the DataFrame, the session's settings or Spark's version do not allow
    real-time mode.
    """
    require(REAL_TIME, df.sparkSession)
    if not df.isStreaming:
        raise InvalidArgument(
            "a batch DataFrame cannot run in real-time mode", remedy="omit real_time=, or use readStream"
        )
    if position is None:
        position = KAFKA
        if not set(KAFKA) <= set(df.columns):
            raise InvalidArgument(
                "real-time mode identifies rows by source partition and offset, which this input lacks",
                remedy='name the columns with position=("partition", "offset"), or keep the columns '
                "topic, partition and offset of a Kafka source",
            )
    names = (position,) if isinstance(position, str) else tuple(position)
    missing = [name for name in names if name not in df.columns]
    if len(names) < 2 or missing:
        raise InvalidArgument(
            f"position={names!r} does not name the columns of source partition and offset",
            remedy=f"name columns of the input, the offset last; the input has {', '.join(df.columns)}",
        )
    for name in names:
        check_once(df, name, "the position")
    if set(KAFKA) <= set(df.columns) and set(names) == {"partition", "offset"}:
        raise InvalidArgument(
            f"position={names!r} cannot tell apart equal partition numbers of different topics",
            remedy='use position=("topic", "partition", "offset"), or drop the column topic if there is only one topic',
        )
    for name in names[:-1]:
        if (kind := df.schema[name].dataType.simpleString()).startswith(("array<", "map<", "struct<")):
            raise InvalidArgument(
                f"the column {name!r} is {kind}, which cannot name a source partition",
                remedy="name the fields with position=, as columns of their own",
            )
    offset = df.schema[names[-1]].dataType.simpleString()
    if offset not in ("tinyint", "smallint", "int", "bigint"):
        raise InvalidArgument(
            f"the column {names[-1]!r} is {offset}, which cannot be an offset",
            remedy="name the offset last, an integer column",
        )
    if node := _shuffle_in(df):
        raise InvalidArgument(
            f"a {node} precedes the operator, so rows do not arrive in offset order",
            remedy="apply the operator directly to the source; select and where may precede it",
        )
    wanted, get = real_time_settings().items(), df.sparkSession.conf.get
    lacking = [f"{key}={value}" for key, value in wanted if not _serves(key, get(key, None) or "", value)]
    if lacking:
        raise InvalidArgument(
            f"the session lacks settings that real-time mode needs: {', '.join(lacking)}",
            remedy="create it with local_session(…, real_time=True) or with real_time_settings()",
        )
    if speculates(df.sparkSession.conf, get("spark.master", "") or ""):
        log.warning(
            "%s=true: in real-time mode a second attempt of a task takes over from the first, which makes the first "
            "attempt and the query fail; set it to false",
            SPECULATION,
        )
    return names


def _serves(key: str, found: str, wanted: str) -> bool:
    """Tells whether the value ``found`` of a setting meets real-time mode's requirement ``wanted``."""
    found = found.strip().lower()
    if key in (_AT_LEAST, _AT_MOST) and found.isdigit() and int(found):
        return int(found) >= int(wanted) if key == _AT_LEAST else int(found) <= int(wanted)
    return found == wanted


def _shuffle_in(df: DataFrame) -> str | None:
    """Returns the name of a plan node that spreads or reorders the rows of one source partition, or None."""
    if is_connect(df):
        frame: Any = df
        spark = frame.sparkSession
        found = _SHOWN_NODE.findall(analyzed_plan(spark, frame._plan.to_proto(spark.client)))
        return next((name for name in found if name.startswith(_SPREADING)), None)
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        node = left.pop()
        name = str(node.nodeName())
        if name.startswith(_SPREADING):
            return name
        children = node.children()
        left += [children.apply(number) for number in range(children.size())]
    return None


def check_initial_keys(rows: DataFrame, df: DataFrame, key: tuple[str, ...], operator: str) -> None:
    """Checks that initial state has keys of the input's types. Raises SchemaMismatch, because keys of different types
    never match."""
    for column in key:
        if column not in rows.columns or column not in df.columns:
            continue  # reported by the code that needs the column
        first, later = (frame.schema[column].dataType.simpleString() for frame in (rows, df))
        if _STORED.get(first) is not _STORED.get(later):
            raise SchemaMismatch(
                f"the key column {column!r} is {first} in initial_state, {later} in the input",
                remedy="cast one of the two columns to the type of the other",
                operator=operator,
            )


def _stored_key(by_owner: dict[str, list[int]], operator: type[Operator], name: str) -> pa.DataType | None:
    for state in declarations_of(operator):
        for address, partitions in by_owner.items():
            pages = ReplicaClient(address).scan(name, state, partitions)
            try:
                tables = (read_table(page) for page in pages)
                table = next((table for table in tables if table.num_rows), None)
            except UnknownState:  # the state is new in this class
                break
            except StateflowError as error:
                if not error.retryable:
                    raise
                continue  # a key of another replica will do
            if table is not None:
                found: pa.DataType = table.schema.field("key").type
                return found
    return None


# -- Slots and retries for replicas ----------------------------------------------------------------------------------

#: Lowest good value of ``spark.task.maxFailures``. Spark counts the failures of a task until the task succeeds, but a
#: replica's task never succeeds. With a lower value, occasional failures of one replica end the job and all replicas.
FAILURES_LOW = 100
THRESHOLD = "spark.speculation.task.duration.threshold"
#: seconds to wait until executors with enough slots have registered
EXECUTORS_S = 60.0
_LOOK_S = 0.5


def check_master(spark: SparkSession, replicas: int, standbys: int) -> None:
    """Checks that a session's master can run replicas as tasks. Waits for executors to register.

    Raises InvalidArgument if the master does not retry failed tasks or has too few slots.
    """
    if replicas < 1 or not 0 <= standbys < replicas:
        raise InvalidArgument(
            f"{replicas} replicas cannot have {standbys} standbys",
            remedy="use one replica or more, and fewer standbys than replicas",
        )
    context = spark.sparkContext
    local = LOCAL.match(context.master)
    failures = int((local["failures"] or 1) if local else context.getConf().get("spark.task.maxFailures", "4") or 4)
    if failures < 2:
        raise InvalidArgument(
            f"the master {context.master} does not retry failed tasks",
            remedy="use e.g. local[4,10], which allows ten failures; on a cluster set "
            "spark.task.maxFailures to 2 or more",
        )
    if failures < FAILURES_LOW and not local:
        log.warning(
            "spark.task.maxFailures=%d: when one replica's task has failed that often, no matter over how long a time, "
            "Spark ends all replicas at once; set it to %d or more",
            failures,
            FAILURES_LOW,
        )
    # without the threshold Spark starts second attempts only when others have succeeded, which replicas never do
    threshold = context.getConf().get(THRESHOLD, "")
    if speculates(context.getConf(), context.master) and threshold:
        log.warning(
            "%s=%s: Spark may start each replica a second time on another host, where it occupies a slot as long as "
            "the cluster runs; remove the setting, or set %s=false",
            THRESHOLD,
            threshold,
            SPECULATION,
        )
    until = SYSTEM_CLOCK.monotonic() + (0 if local else EXECUTORS_S)
    while (slots := slots_of(context)) <= replicas and SYSTEM_CLOCK.monotonic() < until:
        time.sleep(_LOOK_S)  # executors register one by one
    if slots <= replicas:
        raise InvalidArgument(
            f"{replicas} replicas leave no slot for queries: Spark has {slots}",
            remedy="use more executors or cores, or fewer replicas",
        )


def slots_of(spark: SparkContext) -> int:
    """Returns the number of tasks that the registered executors, or a local master, run at once.

    The JVM's count considers cores, ``spark.task.cpus`` and other resources of the executors. Spark's
    ``defaultParallelism`` would be wrong here: it is ``spark.default.parallelism`` if that is set, and otherwise at
    least 2, even before any executor has registered.
    """
    context = spark._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))
