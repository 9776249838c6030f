"""The suite's own promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.suite import _stop

TIDY = """
import sys, time
from pathlib import Path
try:
    print("begun", flush=True)
    time.sleep(600)
finally:
    Path(sys.argv[1]).touch()
"""


def test_an_experiment_that_takes_too_long_takes_its_processes_with_it(tmp_path: Path) -> None:
    tidied = tmp_path / "tidied"
    process = subprocess.Popen(
        [sys.executable, "-c", TIDY, str(tidied)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    _stop(process)
    process.communicate()
    assert process.returncode != 0
    assert tidied.exists()
