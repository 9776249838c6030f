"""P1: cost of tracked state compared with plain Python, on disk and in memory.

* ``hot``: rate of changes of a tracked value and of an entry of a tracked map, compared with the same loop over a dict.
* ``entry``: bytes that are written when one entry of a map changes, by the size of the map.
* ``vectorised``: rate of a batch operator that counts and sums by key, compared with that of a row operator. The states
  of both are compared with sums by NumPy.
* ``large``: peak resident memory of a process whose operator has more state than fits into memory.

The final states are compared. Outputs are not: there are none, or they are not read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.operators import CountSum, CountSumColumns
from benchmarks.record import REPOSITORY, Correctness, Record, Target, ratio, spread
from stateflow import Operator, state
from stateflow.partition.positions import Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.state import KeyedState, declarations_of
from stateflow.storage import MemoryStore, RocksEngine
from stateflow.types import PartitionId

PARTS = ("hot", "entry", "vectorised", "large")
HOT_KEYS = 100
MAP_SIZES = (100, 10_000, 1_000_000)
VECTOR_KEYS = (1_000, 100_000)
VECTOR_PARTITIONS, VECTOR_ROWS = 8, 100_000
LARGE_GB, LARGE_GB_QUICK = 5.0, 0.5
LARGE_TIMEOUT_S = 1_800


class Hot(Operator):
    key = "k"
    output = "k string"
    n = state.value(int, default=0)
    by_name = state.map(str, int)


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    if unknown := sorted(set(only or ()) - set(PARTS)):
        raise SystemExit(f"invalid_argument: no part {unknown[0]!r}: choose {', '.join(PARTS)}")
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    equal: list[bool] = []
    failures: list[str] = []
    for part in PARTS:
        if only and part not in only:
            continue
        print(f"{part} …", file=sys.stderr, flush=True)
        found, aims, same = globals()[f"measure_{part}"](quick, seed)
        figures[part] = found
        targets += aims
        equal.append(same)
        if "error" in found:
            failures.append(f"{part}: {found['error']}")
    return Record(
        experiment=experiment,
        figures=figures,
        targets=targets,
        correctness=Correctness(None, None, None, all(equal), inapplicable=("lost", "duplicated", "late")),
        settings={"quick": quick, "map_sizes": MAP_SIZES, "vector_rows": VECTOR_ROWS, "vector_keys": VECTOR_KEYS},
        seed=seed,
        failures=failures,
    )


def _per_s(work: Callable[[], None], rows: int) -> float:
    began = time.perf_counter()
    work()
    return rows / (time.perf_counter() - began)


# -- hot ----------------------------------------------------------------------------------------------------


def measure_hot(quick: bool, seed: int) -> tuple[dict[str, Any], list[Target], bool]:
    """Measures the rates of accesses to a dict and to tracked state, in loops that differ in nothing else.

    ``record`` also binds the operator to another key at every step, as each row does.
    """
    rounds, rows = (5, 100_000) if quick else (9, 300_000)
    keys = [f"k{number}" for number in np.random.default_rng(seed).integers(0, HOT_KEYS, rows)]
    keyed = KeyedState("Hot", declarations_of(Hot), store := MemoryStore())
    operator = Hot()
    plain, one = dict.fromkeys(keys, 0), {"n": 0}
    by_record = dict.fromkeys(keys, 0)
    keyed.bind(operator, "one")
    operator.by_name.update(plain)

    def commit() -> None:
        store.apply(keyed.collect())
        keyed.mark_clean()

    def plain_value() -> None:
        for _ in keys:
            one["n"] += 1

    def value() -> None:
        for _ in keys:
            operator.n.value += 1
        commit()

    def plain_entry() -> None:
        for key in keys:
            plain[key] += 1

    def entry() -> None:
        by_name = operator.by_name
        for key in keys:
            by_name[key] += 1
        commit()

    def plain_record() -> None:
        for key in keys:
            by_record[key] += 1

    def record() -> None:
        bind = keyed.bind
        for key in keys:
            bind(operator, key)
            operator.n.value += 1
        commit()
        bind(operator, "one")

    commit()
    pairs = {"value": (plain_value, value), "map entry": (plain_entry, entry), "record": (plain_record, record)}
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in pairs}
    for _ in range(rounds):
        for name, works in pairs.items():
            for rates, work in zip(taken[name], works, strict=True):
                rates.append(_per_s(work, rows))
    same = operator.n.value == one["n"] and operator.by_name == plain
    same &= all(keyed.peek(key).n.value == count for key, count in by_record.items())
    figures = {name: {"dict": spread(dicts), "tracked": spread(tracked)} for name, (dicts, tracked) in taken.items()}
    ratios = {name: ratio(each["dict"]["median"], each["tracked"]["median"]) for name, each in figures.items()}
    targets = [Target(f"dict loop / tracked {name}", ratios[name], 5.0, "at_most") for name in ("value", "map entry")]
    return {"per_s": figures, "ratios": ratios}, targets, same


# -- one entry of a large map -------------------------------------------------------------------------------


def measure_entry(quick: bool, seed: int) -> tuple[dict[str, Any], list[Target], bool]:
    written: dict[str, int] = {}
    same = True
    for size in MAP_SIZES:
        store = MemoryStore()
        keyed = KeyedState("Hot", declarations_of(Hot), store)
        operator = Hot()
        keyed.bind(operator, "k")
        operator.by_name.update((f"{number:09d}", number) for number in range(size))
        store.apply(keyed.collect())
        keyed.mark_clean()
        keyed.invalidate()
        keyed.bind(operator, "k")
        operator.by_name[f"{size // 2:09d}"] = -1
        changes = keyed.collect()
        store.apply(changes)
        keyed.mark_clean()
        written[str(size)] = sum(len(key) + len(value) for key, value in changes.puts) + sum(map(len, changes.deletes))
        same &= not changes.clears and keyed.peek("k").by_name[f"{size // 2:09d}"] == -1
        same &= len(keyed.peek("k").by_name) == size
    largest = ratio(written[str(MAP_SIZES[-1])], written[str(MAP_SIZES[0])])
    return {"bytes": written}, [Target("bytes at 10^6 entries / at 10^2", largest, 1.0, "at_most")], same


# -- columns against rows -----------------------------------------------------------------------------------


def measure_vectorised(quick: bool, seed: int) -> tuple[dict[str, Any], list[Target], bool]:
    batches = 8 if quick else 20
    figures: dict[str, Any] = {}
    targets = []
    same = True
    for keys in VECTOR_KEYS:
        rates, contents = {}, {}
        for name, operator in (("rows", CountSum), ("columns", CountSumColumns)):
            with tempfile.TemporaryDirectory(prefix="stateflow-p1-") as directory:
                rates[name], contents[name] = _direct(operator, keys, batches, seed, Path(directory))
        same &= contents["rows"] == contents["columns"] == _sums(keys, batches, seed)
        faster = ratio(rates["columns"]["median"], rates["rows"]["median"])
        figures[str(keys)] = {"rows_per_s": rates, "ratio": faster}
        targets.append(Target(f"vectorised / per record @{keys} keys", faster, 5.0))
    return figures, targets, same


def _inputs(keys: int, batches: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yields (keys, values) for each batch. Values are multiples of a quarter, so sums are exact in any order."""
    numbers = np.random.default_rng(seed)
    for _ in range(batches):
        yield numbers.integers(0, keys, VECTOR_ROWS), numbers.integers(-4_000, 4_000, VECTOR_ROWS) / 4


def _sums(keys: int, batches: int, seed: int) -> dict[int, tuple[int, float]]:
    """Returns key → (count, sum) of the values of all batches, for the sample of keys, without stateflow."""
    counts, sums = np.zeros(keys, np.int64), np.zeros(keys)
    for k, v in _inputs(keys, batches, seed):
        counts += np.bincount(k, minlength=keys)
        sums += np.bincount(k, weights=v, minlength=keys)
    return {key: (int(counts[key]), float(sums[key])) for key in _sample(keys)}


def _sample(keys: int) -> range:
    return range(0, keys, 97)


def _direct(
    operator: type[Operator], keys: int, batches: int, seed: int, directory: Path
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Runs an operator on RocksDB. Returns (spread of the rows a second, sample of the final state).

    Only the batches of the second half count.
    """
    engine = RocksEngine()
    stores = [engine.open(directory / str(number), create=True) for number in range(VECTOR_PARTITIONS)]
    hosts = [PartitionProcessor(operator, PartitionId("p1", number), store, 1) for number, store in enumerate(stores)]
    rates = []
    for number, (k, v) in enumerate(_inputs(keys, batches, seed)):
        whole = pa.record_batch({"k": k, "v": v})
        schema = whole.schema.serialize().to_pybytes()
        parts = [whole.filter(pa.array(k % VECTOR_PARTITIONS == p)).serialize().to_pybytes() for p in range(len(hosts))]

        def apply(number: int = number, schema: bytes = schema, parts: list[bytes] = parts) -> None:
            for host, rows in zip(hosts, parts, strict=True):
                host.apply(Batch("s", number), schema, rows, 0)

        rates.append(_per_s(apply, VECTOR_ROWS))
    content = {key: tuple(hosts[key % len(hosts)].state.peek(key).figures.value) for key in _sample(keys)}
    for store in stores:
        store.close()
    return spread(rates[batches // 2 :]), content


# -- more state than memory ---------------------------------------------------------------------------------


def measure_large(quick: bool, seed: int) -> tuple[dict[str, Any], list[Target], bool]:
    size_gb = LARGE_GB_QUICK if quick else LARGE_GB
    with tempfile.TemporaryDirectory(prefix="stateflow-p1-") as directory:
        command = [sys.executable, "-m", "benchmarks.state_large", directory, str(size_gb), str(seed)]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LARGE_TIMEOUT_S, check=False
        )
    if done.returncode:
        error = " | ".join(done.stderr.strip().splitlines()[-3:])
        return {"error": error}, [Target("peak resident GB", None, 1.0, "at_most")], False
    figures = json.loads(done.stdout)
    return (
        figures,
        [Target(f"peak resident GB with {size_gb:g} GB of state", figures["peak_gb"], 1.0, "at_most")],
        figures["equal"],
    )
