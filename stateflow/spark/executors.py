"""What executors on other machines lack, said before the first row: this package, the means to call, a way to the
controller and the replicas. They are asked by a job of one short task for each of their slots, once for an application.

A replica that does not answer for the moment is waited for when rows come. So only an address counts that this program
reaches and an executor does not, and still does not when it is asked again.
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

#: of one address, and how many are tried at a time; what was not begun after twice as long counts as reached
TRY_S = 3.0
_AT_A_TIME = 64
#: slots that are asked, at most: each tries all addresses
_TASKS_MAX = 16
_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): .+")
#: by application, or session of Spark Connect: the addresses that its executors were asked about
_ASKED: dict[str, set[str]] = {}


@dataclass(frozen=True, slots=True)
class Miss:
    """``host``: an executor's; ``address``: what is not reached from there; ``why``: as the system says it."""

    host: str
    address: str
    why: str


Ask = Callable[[Sequence[str]], list[Miss]]
#: addresses → those that are not reached from this program
Here = Callable[[Collection[str]], Mapping[str, str]]


def check_executors(spark: SparkSession, controller: str, owners: Iterable[ReplicaInfo], token: str = "") -> None:
    """Raises OperatorNotImportable where Spark's Python workers lack this package, Unavailable where they do not reach
    the controller or one of the replicas that this program reaches, InsecureRefused or BadCertificate where they may
    not call. Workers on this machine are asked only where they are another Python than this.

    Args:
        controller: as for ``apply_operator``.
        owners: of the operator's partitions.
        token: that tasks are handed.
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
    """Args: replicas: address → name. Raises Unavailable."""
    misses = ask(list(dict.fromkeys([*controllers, *replicas])))
    if _blocked(misses, here, controllers, replicas):  # or it came back, or went, between the two looks
        misses = ask([*controllers, *sorted({miss.address for miss in misses} & set(replicas))])
        if blocked := _blocked(misses, here, controllers, replicas):
            raise _refusal(blocked, replicas)


def _blocked(misses: Sequence[Miss], here: Here, controllers: Sequence[str], replicas: Mapping[str, str]) -> list[Miss]:
    """Those of addresses that this program reaches. One controller that a host reaches is enough for it."""
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
        f"executors on {first.host} do not reach {name or 'the controller'} at {first.address}, "
        f"and this program does: {first.why}",
        remedy=f"start {'the replica' if name else 'it'} with --advertise and a name or address that the executors' "
        "machines reach, and let them through to its port",
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
    """Not by what the names resolve to: in virtual environments those are the same interpreter."""
    found = shutil.which(python)
    return found is not None and Path(found).absolute().parent == Path(sys.executable).parent


def not_importable(said: str) -> OperatorNotImportable | None:
    missing = _MISSING.findall(said)
    if not missing:
        return None
    return OperatorNotImportable(
        f"the executors' Python lacks what the operator's tasks need: {missing[-1]}",
        remedy="install stateflow-streams[spark] there, or send it along before Spark is started: spark-submit "
        "--py-files with a zip of `stateflow spark package`, or --archives with an environment; another Python is "
        "named by PYSPARK_PYTHON=… or --conf spark.pyspark.python=… (a session's own setting comes too late)",
    )


# -- on executors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trying:
    """Given to ``mapInArrow``: a row for each address that is not reached from where it runs, or one for a fault that
    keeps it from calling anybody. Sent by its name, so that whoever runs it has imported what an operator's task
    imports."""

    addresses: tuple[str, ...]
    token: str = field(default="", repr=False)
    columns = "host string, address string, why string, fault string"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import stateflow.spark.task as _  # noqa: F401 - importing it is the question

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
    """This machine's name, and the address it has on the way to the first of these."""
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
    """Address → why no connection is made to it from here; those that are reached are left out.

    Within twice ``timeout_s``, whatever a name server does.
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
    """Why it is not reached; empty: it is."""
    try:
        with socket.create_connection(_parts(address), timeout_s):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _parts(address: str) -> tuple[str, int]:
    return host_of(address), int(address.rpartition(":")[2])
