"""Simulate many seeds, or print the trace of one: ``python -m tests.simulation.sim``."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.sim.run import simulate
from tests.simulation.sim.world import Counts

SHARD = 50
COLLECT_EVERY = 10


def run_seeds(seeds: Iterable[int]) -> tuple[Counts, list[tuple[int, str, list[str]]]]:
    """Simulates seeds. Returns their total counts, and (seed, failure, trace) of each seed that failed."""
    total, failed = Counts(), []
    gc.collect()  # first frees the worlds of the previous shard, which freezing would otherwise keep for ever
    gc.freeze()
    for seed in seeds:
        world = simulate(seed)
        if seed % COLLECT_EVERY == 0:
            gc.collect()
        total.add(world.counts)
        if world.failure is not None:
            failed.append((seed, repr(world.failure), world.trace))
    return total, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--seed", type=int, help="simulate only this seed, and print its trace")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        world = simulate(arguments.seed)
        print("\n".join(world.trace))
        print(world.counts)
        print(f"trace {world.digest()}")
        print(f"violation: {world.failure!r}" if world.failure else "no violation")
        return 1 if world.failure else 0
    started = time.perf_counter()
    last = arguments.first + arguments.seeds
    # small shards for few seeds, so that every process gets some
    size = max(1, min(SHARD, arguments.seeds // (2 * arguments.processes)))
    shards = [range(at, min(at + size, last)) for at in range(arguments.first, last, size)]
    total, failed = Counts(), []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for counts, failures in pool.map(run_seeds, shards):
            total.add(counts)
            for seed, why, trace in failures:
                failed.append(seed)
                print("\n".join([f"seed {seed}: {why}", *("  " + line for line in trace[-40:])]))
                print(f"reproduce: python -m tests.simulation.sim --seed {seed}", flush=True)
    elapsed = time.perf_counter() - started
    for name in total.__dataclass_fields__:
        print(f"{name:16} {getattr(total, name):,.0f}")
    print(f"{'violations':16} {len(failed)}" + (f"  seeds {failed[:20]}" if failed else ""))
    print(f"{'seeds_per_s':16} {total.seeds / elapsed:.1f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
