"""Makes the archives of a release: what it leaves on disk, and its code."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stateflow import __version__
from stateflow.client.packing import pack
from stateflow.testing import LocalCluster
from tests.formats import archive, unpack_code
from tests.formats.everything import STATES, Everything, rows

SITES = {"cloud": 1, "edge": 1}
PARTITIONS = 4
BATCHES = 6
#: batches of the cluster with more: the second one is in its checkpoints, part of the last one in the outbox
MORE_BATCHES = 3
#: environment of the cluster with more
MORE = {
    "STATEFLOW_REPLICA_ACKNOWLEDGE": "fsync",
    "STATEFLOW_REPLICA_CHECKPOINT_COMPRESSION": "zstd",
    "STATEFLOW_CHECKPOINT_KEY": "5f" * 32,
}
#: an operator that only a bundle brings to replicas
PACKED = """
from stateflow import Operator, state

class Packed(Operator):
    key, output = "k", "k string, n long"
    n = state.counter()

    def process(self, row, ctx):
        self.n.add(1)
        yield row.k, self.n.value
"""

# -- What a release leaves -------------------------------------------------------------------------------------------


def state_of(cluster: Any) -> dict[str, list[str]]:
    """Returns the entries of each state as sorted text, which is the same for every release that reads them."""
    found = {}
    for name in STATES:
        table = cluster.read_state("Everything", name)
        entries = zip(*(table.column(each).to_pylist() for each in ("key", "map_key", "value")), strict=True)
        found[name] = sorted(repr(entry) for entry in entries)
    return found


@contextmanager
def _killed(packed: Path, *, without_power: str = "") -> Iterator[LocalCluster]:
    """Yields a cluster, kills it at work, so that its logs hold what its databases lack, and packs what it left.

    ``without_power``: a replica whose databases of Everything lose what was not synced, and whose commit log has it.
    """
    with tempfile.TemporaryDirectory(prefix="stateflow-formats-") as temporary:
        folder = Path(temporary) / "cluster"
        local = LocalCluster(sites=SITES, partitions=PARTITIONS, data_dir=folder, checkpoint_interval_s=0)
        local.start()
        try:
            yield local
        finally:
            for process in local.processes.values():
                process.kill()
        for wal in (folder / without_power / "operators" / "Everything").rglob("*.log") if without_power else ():
            wal.write_bytes(b"")
        for log in folder.glob("*.log"):
            log.unlink()
        with tarfile.open(packed, "w:gz") as opened:
            opened.add(folder, "cluster")
    print(f"{packed}: {packed.stat().st_size:,} bytes")


def make(packed: Path) -> None:
    """Makes ``<release>.tar.gz``."""
    with _killed(packed) as local:
        local.cluster.deploy(Everything, PARTITIONS)
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
        state = {"now": state_of(local.cluster), "at_checkpoint": at_checkpoint}
        (local.data_dir / "state.json").write_text(json.dumps(state))


def make_more(packed: Path) -> None:
    """Makes ``<release>-more.tar.gz``."""
    os.environ |= MORE
    with _killed(packed, without_power="edge-0") as local, tempfile.TemporaryDirectory() as code:
        (Path(code) / "packed_ops.py").write_text(PACKED)
        sys.path.append(code)  # the replicas have started, and do not find it
        operator = importlib.import_module("packed_ops").Packed
        local.cluster.deploy(operator, PARTITIONS, bundle=pack(operator))
        local.stream("Packed", source="p").send([{"k": str(number)} for number in range(20)])
        local.cluster.deploy(Everything, PARTITIONS)
        with local.cluster.forwarding("Everything", "gateway", local.data_dir / "outbox", patience_s=0.5) as gateway:
            for batch in range(MORE_BATCHES):
                if batch == MORE_BATCHES - 1:
                    local.freeze("cloud-0")
                gateway.send(rows(batch))
                if batch == 1:
                    at_checkpoint = state_of(local.cluster)
                    local.cluster.checkpoint("Everything")
            assert gateway.waiting()
        (local.data_dir / "state.json").write_text(json.dumps({"at_checkpoint": at_checkpoint}))


# -- The code of a release -------------------------------------------------------------------------------------------

#: modules that no process of a cluster imports; of all others only the Python files are kept
_LEFT_OUT = ("stateflow/demo/", "stateflow/examples/", "stateflow/project/")
_README = """\
Code of stateflow {release}, for tests whose processes are of two releases. It is that of commit
{commit}: the Python files of `stateflow` and `reconfig`, without the demo,
the examples and the templates of projects. Made by `python -m tests.formats --code`.
"""
_RENAMED = """
No commit of this repository is {release}: this one brought {release} in together with the first changes
after it. It reads and writes the formats of {release}.tar.gz. So that its processes say they
are {release}, two lines of stateflow/release.py are changed: VERSION, and OWN, which is FIRST.
"""


def make_code(packed: Path, commit: str, release: str) -> None:
    """Makes ``<release>-code.tar.gz``."""
    full = subprocess.run(["git", "rev-parse", commit], check=True, capture_output=True, text=True).stdout.strip()
    made = subprocess.run(["git", "archive", full, "stateflow", "reconfig"], check=True, capture_output=True).stdout
    readme = _README.format(release=release, commit=full)
    with tarfile.open(fileobj=io.BytesIO(made)) as whole, tarfile.open(packed, "w:gz") as opened:
        for member in whole:
            if not member.name.endswith(".py") or member.name.startswith(_LEFT_OUT):
                continue
            content = whole.extractfile(member)
            assert content is not None
            text = content.read()
            if member.name == "stateflow/release.py" and f'VERSION = "{release}"'.encode() not in text:
                text = re.sub(rb"(?m)^VERSION = .*$", f'VERSION = "{release}"'.encode(), text)
                text = re.sub(rb"(?m)^OWN = .*$", b"OWN = FIRST", text)
                readme += _RENAMED.format(release=release)
            _add(opened, member.name, text)
        _add(opened, "README", readme.encode())
    print(f"{packed}: {packed.stat().st_size:,} bytes")


def _add(opened: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    opened.addfile(member, io.BytesIO(content))


def _made_by(release: str) -> None:
    """Makes the archives of what a release leaves, with the code in its archive."""
    with tempfile.TemporaryDirectory(prefix="stateflow-code-") as temporary:
        code = unpack_code(release, Path(temporary))
        environment = os.environ | {"PYTHONPATH": str(code)}
        for kind in ("", "more"):
            if not archive(release, kind).exists():
                command = [sys.executable, "-P", "-m", "tests.formats", "--into", str(archive(release, kind))]
                subprocess.run([*command, "--kind", kind], cwd=code, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.formats", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--of", metavar="RELEASE", default=__version__, help="by default the running one")
    parser.add_argument("--code", metavar="COMMIT", help="make the archive of the code of this commit")
    parser.add_argument("--into", metavar="FILE", type=Path, help="make one archive, into this file")
    parser.add_argument("--kind", choices=("", "more"), default="", help="which one")
    said = parser.parse_args()
    if said.code:
        make_code(archive(said.of, "code"), said.code, said.of)
    elif said.into:
        (make_more if said.kind else make)(said.into)
    elif said.of != __version__:
        _made_by(said.of)
    else:
        make(archive(said.of))
        make_more(archive(said.of, "more"))


if __name__ == "__main__":
    main()
