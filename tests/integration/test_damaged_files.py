"""Missing or damaged files of one partition or one operator: no other one is affected, and the log says so."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.partitioner import partition_of
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import check_owners, eventually, flip_byte, read

pytestmark = pytest.mark.processes
Damage = Callable[[Path], None]


def remove(pattern: str) -> Damage:
    return lambda copy: _one(copy, pattern).unlink()


def empty(pattern: str) -> Damage:
    return lambda copy: _one(copy, pattern).write_bytes(b"")


def flip(pattern: str, at: float) -> Damage:
    return lambda copy: flip_byte(_one(copy, pattern), at)


def length_of_a_record(copy: Path) -> None:
    """Damages the length in the log's second record, which then seems to reach beyond the end."""
    file = _one(copy, "*.log")
    data = bytearray(file.read_bytes())
    second = 7 + int.from_bytes(data[4:6], "little")
    data[second + 5] ^= 0xFF
    file.write_bytes(data)


def _one(copy: Path, pattern: str) -> Path:
    return max(copy.glob(pattern), key=lambda path: path.stat().st_size)


#: name, damage, and whether it costs its partition nothing
DAMAGES: list[tuple[str, Damage, bool]] = [
    ("CURRENT is missing", remove("CURRENT"), False),
    ("CURRENT is empty", empty("CURRENT"), False),
    ("the manifest is missing", remove("MANIFEST-*"), False),
    ("the manifest is empty", empty("MANIFEST-*"), False),
    ("the manifest is damaged", flip("MANIFEST-*", 0.5), False),
    ("the log is damaged in its middle", flip("*.log", 0.5), False),
    ("a length in the log is damaged", length_of_a_record, False),
    ("the log is missing", remove("*.log"), False),
    ("a sorted file is missing", remove("*.sst"), False),
    ("a sorted file is empty", empty("*.sst"), False),
    ("a sorted file is damaged at its end", flip("*.sst", 0.9999), False),
    ("a sorted file is damaged", flip("*.sst", 0.02), False),
    ("the identity is missing", remove("IDENTITY"), True),
    ("the identity is empty", empty("IDENTITY"), True),
    ("the options are missing", remove("OPTIONS-*"), True),
    ("nothing", lambda _: None, True),
]
PARTITIONS = len(DAMAGES)
KEYS: list[str] = []
for candidate in (f"k{number}" for number in range(10_000)):  # four keys of each partition
    if Counter(partition_of(key, PARTITIONS) for key in KEYS)[partition_of(candidate, PARTITIONS)] < 4:
        KEYS.append(candidate)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STATEFLOW_CONTROLLER_LEASE_S", "4")
        environment.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
        data = tmp_path_factory.mktemp("damage")
        local = LocalCluster(Tally, sites={"cloud": 1}, partitions=PARTITIONS, data_dir=data, checkpoint_interval_s=0)
        with local:
            yield local


def _copy(local: LocalCluster, partition: int) -> Path:
    home = local.data_dir / "cloud-0" / "operators" / "Tally" / f"p{partition:05d}"
    (copy,) = [path for path in home.iterdir() if path.is_dir() and path.name != "received"]
    return copy


def _log(local: LocalCluster) -> str:
    return (local.data_dir / "cloud-0.log").read_text()


def _n(local: LocalCluster) -> dict[int, set[int]]:
    """Returns how often the keys of each partition were counted, by partition."""
    found: dict[int, set[int]] = {number: set() for number in range(PARTITIONS)}
    for (key, _), n in read(local.cluster, "Tally", "n").items():
        found[partition_of(key, PARTITIONS)].add(n)
    return found


def _taken_over(local: LocalCluster) -> set[int]:
    done = [each for each in local.cluster.reconfigurations() if each.kind == "failover" and each.state == "COMPLETED"]
    return {move.partition for each in done for move in each.moves}


def test_each_costs_its_own_partition_and_nothing_is_quietly_less(cluster: LocalCluster) -> None:
    local, stream = cluster, cluster.stream("Tally", source="s")
    rows: list[dict[str, Any]] = [{"k": key, "v": 1} for key in KEYS]
    for _ in range(3):
        stream.send(rows)
    local.cluster.checkpoint()  # at 3; what comes later is in the log only
    for _ in range(5):
        stream.send(rows)
    local.kill("cloud-0")
    for number, (_, damage, _) in enumerate(DAMAGES):
        damage(_copy(local, number))
    local.restart("cloud-0")
    lost = {number for number, (_, _, harmless) in enumerate(DAMAGES) if not harmless}

    eventually(lambda: _taken_over(local) >= lost, "what was damaged is taken over")
    found = eventually(lambda: _n(local), "all can be read")
    assert found == {number: {3} if number in lost else {8} for number in range(PARTITIONS)}
    check_owners(local)
    stream.send(rows)  # the client also sends again what is missing
    assert _n(local) == {number: {9} for number in range(PARTITIONS)}

    log = _log(local)
    assert "Traceback" not in log
    for number in lost:
        lines = [line for line in log.splitlines() if f"Tally/{number} is not served from" in line]
        assert len(lines) == 1, (number, lines)
        kept = local.data_dir / "cloud-0" / "evidence" / "Tally" / f"p{number:05d}"
        assert [path.name for path in kept.iterdir()] == ["created-1-1"]
    assert not list((local.data_dir / "cloud-0" / "evidence" / "Tally").glob(f"p{PARTITIONS - 1:05d}"))


def test_damage_that_only_a_batch_meets_takes_its_partition_elsewhere(cluster: LocalCluster) -> None:
    local, stream = cluster, cluster.stream("Tally", source="reads")
    number = PARTITIONS - 1
    keys = [key for key in (f"many{n}" for n in range(40_000)) if partition_of(key, PARTITIONS) == number]
    stream.send([{"k": key, "v": 1} for key in keys])
    local.cluster.checkpoint()
    stream.send([{"k": key, "v": 1} for key in keys])
    before = _taken_over(local)
    assert number not in before
    local.kill("cloud-0")
    flip("*.sst", 0.6)(_copy(local, number))
    local.restart("cloud-0")
    check_owners(local)  # the damage does not show yet
    stream.send([{"k": key, "v": 1} for key in keys])  # and again what the checkpoint lacks
    assert _taken_over(local) - before == {number}
    assert {n for (key, _), n in read(local.cluster, "Tally", "n").items() if key in set(keys)} == {3}
    assert f"Tally/{number} is not served from" in _log(local)
    assert "Traceback" not in _log(local)


def _newer(file: Path) -> None:
    file.write_text(file.read_text().replace("{", '{"invented_later": 1, ', 1))


DESCRIPTIONS: dict[str, Damage] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "damaged": lambda file: file.write_bytes(file.read_bytes()[:40] + b"\xff\x00" + file.read_bytes()[42:]),
    "of a newer version": _newer,
}


@pytest.mark.parametrize("what", DESCRIPTIONS)
def test_an_operators_description_that_cannot_be_read_costs_nothing(cluster: LocalCluster, what: str) -> None:
    local, stream = cluster, cluster.stream("Tally", source=f"described {what}".replace(" ", "-"))
    stream.send([{"k": key, "v": 1} for key in KEYS])
    before = _n(local), _taken_over(local)
    said = len(_log(local))
    local.kill("cloud-0")
    file = local.data_dir / "cloud-0" / "operators" / "Tally" / "operator.json"
    DESCRIPTIONS[what](file)
    local.restart("cloud-0")
    eventually(lambda: _n(local) == before[0], "everything is there")
    assert _taken_over(local) == before[1]
    stream.send([{"k": key, "v": 1} for key in KEYS])
    lines = [line for line in _log(local)[said:].splitlines() if "Tally: description" in line]
    assert len(lines) == 1, lines
    assert "Traceback" not in _log(local)[said:]
    assert file.exists(), "it has it again from the controller"


def test_with_a_commit_log_what_databases_have_logged_may_be_damaged_and_it_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEDGE", "fsync")
    local = LocalCluster(Tally, sites={"cloud": 1}, partitions=2, data_dir=tmp_path, checkpoint_interval_s=0)
    with local:
        stream = local.stream("Tally", source="s")
        rows: list[dict[str, Any]] = [{"k": f"k{number}", "v": 1} for number in range(20)]
        for _ in range(8):
            stream.send(rows)
        local.kill("cloud-0")
        flip("*.log", 0.5)(_copy(local, 0))
        length_of_a_record(_copy(local, 1))
        local.restart("cloud-0")
        stream.send(rows)
        assert set(read(local.cluster, "Tally", "n").values()) == {9}
        assert not (tmp_path / "cloud-0" / "evidence").exists()
        assert len([line for line in _log(local).splitlines() if "commits recovered from the commit log" in line]) == 2
        stream.send(rows)
        local.kill("cloud-0")

        commits = tmp_path / "cloud-0" / "commits"
        before = {path: path.read_bytes() for path in commits.iterdir()}
        flip("*.commits", 0.3)(commits)
        arguments = ["replica", "--site", "cloud", "--name", "cloud-0", "--data-dir", str(tmp_path / "cloud-0")]
        done = subprocess.run(
            [sys.executable, "-m", "stateflow", *arguments, "--controller", local.address],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("commit_log_damaged: the commit log is damaged: frame "), line
        assert "follows it (segment=" in line
        for path, data in before.items():
            path.write_bytes(data)
        local.restart("cloud-0")
        assert set(read(local.cluster, "Tally", "n").values()) == {10}
