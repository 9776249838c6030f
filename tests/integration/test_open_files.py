"""The usual limit of 1,024 open files, on real processes."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stateflow.errors import StateflowError, TooFewFiles
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, check_owners, eventually, outputs

pytestmark = [
    pytest.mark.processes,
    pytest.mark.alone,
    pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not here"),
]
PARTITIONS = 128
LIMIT = 1024


class Limited(LocalCluster):
    limit = ""

    def _within(self, name: str) -> Sequence[str]:
        return ["prlimit", f"--nofile={self.limit}"]


@pytest.fixture(scope="module", params=["soft", "hard"])
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    local = Limited(
        Tally,
        sites={"cloud": 1},
        partitions=PARTITIONS,
        data_dir=tmp_path_factory.mktemp("limited"),
        checkpoint_interval_s=0,
    )
    local.limit = f"{LIMIT}:{LIMIT if request.param == 'hard' else hard}"
    with local:
        yield local


def _open_files(local: Limited) -> int:
    return len(list(Path(f"/proc/{local.processes['cloud-0'].pid}/fd").iterdir()))


def test_the_default_number_of_partitions_is_served_and_comes_back(limited: Limited) -> None:
    stream, model = limited.stream("Tally", source="s"), Model()
    rows = [{"k": f"k{number}", "v": number} for number in range(1000)]
    for _ in range(2):  # each leaves a sorted file in every partition
        assert outputs(stream.send(rows)) == model.apply(rows)
        limited.cluster.checkpoint()
    before = _open_files(limited)
    limited.kill("cloud-0")
    limited.restart("cloud-0")
    eventually(lambda: {r.alive for r in limited.cluster.status().replicas} == {True}, "it is back")
    assert outputs(stream.send(rows)) == model.apply(rows)
    model.check(limited.cluster)
    check_owners(limited)
    if limited.limit == f"{LIMIT}:{LIMIT}":
        assert max(before, _open_files(limited)) < LIMIT - 32, "there is room for connections"


def test_what_cannot_be_opened_is_refused_before_it_is_created(limited: Limited) -> None:
    if limited.limit != f"{LIMIT}:{LIMIT}":
        pytest.skip("the system allows more here")
    with pytest.raises(TooFewFiles) as caught:
        limited.cluster.deploy(Tally, 2000, name="Many")
    line = str(caught.value)
    assert line.startswith(f"too_few_files: {PARTITIONS + 2000} partitions need about "), line
    assert f"open files, the limit is {LIMIT}" in line
    assert "ulimit -n" in line
    assert not list(limited.data_dir.glob("cloud-0/operators/Many/p*"))
    limited.stream("Tally", source="alive").send([{"k": "k1", "v": 1}])  # and it serves
    limited.cluster.deploy(Tally, 4, name="Many")  # nothing of it stayed behind
    limited.stream("Many", source="s").send([{"k": "k1", "v": 1}])


def test_a_replica_that_may_open_too_few_says_so_when_it_starts(limited: Limited) -> None:
    limited.kill("cloud-0")
    usual, limited.limit = limited.limit, "256:256"
    process = limited.processes["cloud-0"]
    process._within = limited._within("cloud-0")
    try:
        process.start()
        with pytest.raises(StateflowError, match=r"partitions need about \d+ open files, the limit is 256"):
            process.wait_ready()
    finally:
        limited.limit = usual
        process._within = limited._within("cloud-0")
        limited.restart("cloud-0")
    assert "Traceback" not in (limited.data_dir / "cloud-0.log").read_text()
