"""Checks, before the first row, that executors on other machines have this package, may call and reach the cluster.

A job of one short task for each executor slot checks them, once for an application.

If a replica does not answer for the moment, tasks wait for it when rows come. So the check refuses an address only if
this program reaches it and an executor does not, in two attempts.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import pyarrow as pa

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import OperatorNotImportable, StateflowError, Unavailable, from_wire
from stateflow.rpc.controllers import addresses_of
from stateflow.security.connections import tls_files, use_token
from stateflow.security.plain import check_dialled, host_of
from stateflow.spark.connect import default_parallelism, is_connect
from stateflow.types import ReplicaInfo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: seconds for one address, and the number of addresses tried at a time; an address whose turn does not come within the
#: first of these periods counts as reached
TRY_S = 3.0
_AT_A_TIME = 64
#: most executor slots that are asked; each tries all addresses
_TASKS_MAX = 16
_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): .+")
#: application, or session of Spark Connect → addresses that its executors were asked about
_ASKED: dict[str, set[str]] = {}


@dataclass(frozen=True, slots=True)
class Miss:
    """An address that an executor does not reach.

    ``host``: the executor's. ``why``: the operating system's reason.
    """

    host: str
    address: str
    why: str


Ask = Callable[[Sequence[str]], list[Miss]]
#: addresses → those that this program does not reach
Here = Callable[[Collection[str]], Mapping[str, str]]


def check_executors(spark: SparkSession, controller: str, owners: Iterable[ReplicaInfo], token: str = "") -> None:
    """Checks that Spark's Python workers can run an operator's tasks.

    Raises OperatorNotImportable where they lack this package, Unavailable where they do not reach the controller or one
    of the replicas that this program reaches, InsecureRefused or BadCertificate where they may not call. Workers on
    this machine are asked only if they run another Python than this one.

    Args:
        controller: as for ``apply_operator``.
        owners: owners of the operator's partitions.
        token: the token that tasks are given.
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
        ask: returns what executors do not reach.
        here: returns what this program does not reach.
        controllers: addresses of the controllers.
        replicas: address → name.

    Raises Unavailable.
    """
    misses = ask(list(dict.fromkeys([*controllers, *replicas])))
    # ask twice: an address may have come or gone between the two looks
    if _blocked(misses, here, controllers, replicas):
        misses = ask([*controllers, *sorted({miss.address for miss in misses} & set(replicas))])
        if blocked := _blocked(misses, here, controllers, replicas):
            raise _refusal(blocked, replicas)


def _blocked(misses: Sequence[Miss], here: Here, controllers: Sequence[str], replicas: Mapping[str, str]) -> list[Miss]:
    """Returns the misses of addresses that this program reaches. One controller is enough for each host."""
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
        remedy=f"start {'the replica' if name else 'it'} with --advertise and a name or address that the executors' "
        "machines can reach, and open its port to them",
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
    """Tells whether ``python`` is in the same environment as this process's.

    The paths are not resolved: in virtual environments they lead to the same interpreter.
    """
    found = shutil.which(python)
    return found is not None and Path(found).absolute().parent == Path(sys.executable).parent


def not_importable(said: str) -> OperatorNotImportable | None:
    missing = _MISSING.findall(said)
    if not missing:
        return None
    return OperatorNotImportable(
        f"the executors' Python lacks what the operator's tasks need: {missing[-1]}",
        remedy="install stateflow-streams[spark] there, or ship it when Spark is started: spark-submit "
        "--py-files with a zip of `stateflow spark package`, or --archives with an environment; select another Python "
        "with PYSPARK_PYTHON=… or --conf spark.pyspark.python=… (a session's own setting comes too late)",
    )


# -- on executors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trying:
    """Check that ``mapInArrow`` runs in each executor.

    Yields a row for each address that is not reached from there, or one row for a fault that keeps the executor from
    calling. Pickled by name, so that a worker that runs it has imported what an operator's task imports.
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
    """Returns this machine's name, and its address on the way to the first of ``towards`` that resolves."""
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
    """Returns address → reason for each address to which no connection can be made from here.

    Takes at most twice ``timeout_s``, even if a name server does not answer.
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
    """Returns why an address is not reached; empty if it is."""
    try:
        with socket.create_connection(_parts(address), timeout_s):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _parts(address: str) -> tuple[str, int]:
    return host_of(address), int(address.rpartition(":")[2])
