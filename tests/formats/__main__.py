"""Makes the archive of what the running release leaves on disk."""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from stateflow import __version__
from stateflow.testing import LocalCluster
from tests.formats.everything import STATES, Everything, rows

SITES = {"cloud": 1, "edge": 1}
PARTITIONS = 4
BATCHES = 6


def state_of(cluster: Any) -> dict[str, list[str]]:
    """Returns the entries of each state as sorted text, which is the same for every release that reads them."""
    found = {}
    for name in STATES:
        table = cluster.read_state("Everything", name)
        entries = zip(*(table.column(each).to_pylist() for each in ("key", "map_key", "value")), strict=True)
        found[name] = sorted(repr(entry) for entry in entries)
    return found


def make(archive: Path) -> None:
    """Makes the archive of a cluster that was killed at work: its logs hold what its databases lack."""
    with tempfile.TemporaryDirectory(prefix="stateflow-formats-") as temporary:
        folder = Path(temporary) / "cluster"
        local = LocalCluster(Everything, sites=SITES, partitions=PARTITIONS, data_dir=folder, checkpoint_interval_s=0)
        local.start()
        stream = local.stream("Everything", source="s")
        for batch in range(BATCHES):
            stream.send(rows(batch))
            if batch == 1:
                local.cluster.checkpoint("Everything")
            if batch == 2:
                for number, owner in list(enumerate(local.cluster.status().operators[0].owners))[:3]:
                    local.migrate("Everything", [number], "cloud" if owner == "edge-0" else "edge").wait()
                local.cluster.savepoint("kept")
            if batch == 3:
                at_checkpoint = state_of(local.cluster)
                local.cluster.checkpoint("Everything")
        state = state_of(local.cluster)
        for process in local.processes.values():
            process.kill()
        (folder / "state.json").write_text(json.dumps({"now": state, "at_checkpoint": at_checkpoint}))
        for log in folder.glob("*.log"):
            log.unlink()
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(folder, "cluster")
    print(f"{archive}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / f"{__version__}.tar.gz")
