"""Runs one door: ``python -m tests.fuzz.engine DOOR RUNS SEED CORPUS FOUND``. Ends with 0 where nothing was found.

atheris makes inputs from sound ones, and keeps those that reach code which no input has reached before (Zalewski, AFL
2013; libFuzzer). It writes findings into ``FOUND``, which include hangs and inputs that take too much memory.
"""

from __future__ import annotations

import faulthandler
import hashlib
import sys
from pathlib import Path

import atheris

#: limits of one input
HANGS_AFTER_S = 20
MEMORY_MAX_MB = 1500
LENGTH_MAX = 8192

with atheris.instrument_imports(include=["stateflow", "reconfig", "msgpack"], enable_loader_override=False):
    from tests.fuzz.doors import DOORS


def main(door: str, runs: int, seed: int, corpus: Path, found: Path) -> None:
    entered = DOORS[door]
    corpus.mkdir(parents=True, exist_ok=True)
    for data in [*entered.sound(), *entered.cases(), *entered.corpus()]:
        (corpus / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
    faulthandler.enable()
    arguments = [
        *(sys.argv[0], str(corpus), f"-runs={runs}", f"-seed={seed}", f"-max_len={LENGTH_MAX}", "-len_control=0"),
        *(f"-timeout={HANGS_AFTER_S}", f"-rss_limit_mb={MEMORY_MAX_MB}", f"-artifact_prefix={found}"),
        *("-print_final_stats=1", "-verbosity=1", "-reduce_inputs=0"),
    ]
    atheris.Setup(arguments, entered)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
