"""``/metrics`` of real processes: Prometheus' own parser reads it, and each figure is a declared one."""

from __future__ import annotations

import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stateflow.client.figures import ClientFigures
from stateflow.errors import OperatorFailed
from stateflow.local.process import Process
from stateflow.metrics.figures import AGENT, CALLS, CLIENT, COMMON, CONTROLLER, LIMITS, REPLICA, Figure
from stateflow.metrics.own import PREFIX
from stateflow.testing import LocalCluster
from tests.integration.operators import Alarmed, Tally
from tests.integration.support import eventually, rows_of

pytestmark = pytest.mark.processes
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Measured(LocalCluster):
    def _process(self, name: str, arguments: list[str]) -> Process:
        return super()._process(name, [*arguments, "--metrics", "127.0.0.1:0", "--verbose"])

    def page(self, name: str) -> str:
        log = (self.data_dir / f"{name}.log").read_text()
        (address,) = set(re.findall(r"metrics at (https?://\S+/metrics)", log)[-1:])
        return str(address)

    def text(self, name: str) -> str:
        with urllib.request.urlopen(self.page(name), timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    def figures(self, name: str) -> Samples:
        return samples(self.text(name))


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("metrics")
    with Measured(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=folder) as started:
        yield started


def test_what_happened_is_in_it(local: Measured) -> None:
    with local.stream("Tally", source="s") as stream:
        for batch in range(5):
            stream.send(rows_of("k", batch))
        local.migrate("Tally", [0, 1, 2, 3], "edge").wait()
        stream.send(rows_of("k", 5))
    local.cluster.checkpoint("Tally")
    tally = (("operator", "Tally"),)
    edge, cloud = local.figures("edge-0"), local.figures("cloud-0")
    assert edge["stateflow_rows_total", tally] + cloud["stateflow_rows_total", tally] == 6 * 40
    assert edge["stateflow_partitions", (*tally, ("state", "OWNED"))] == 4
    assert edge["stateflow_batch_seconds_count", tally] >= 1
    assert (
        edge["stateflow_batch_seconds_bucket", (("le", "+Inf"), *tally)] == edge["stateflow_batch_seconds_count", tally]
    )
    assert 0 < edge["stateflow_lease_seconds", ()] < 60
    assert edge["stateflow_state_bytes", tally] > 0
    assert edge["stateflow_state_entries", tally] > 0
    assert edge["stateflow_checkpoint_rounds_total", ()] >= 1
    assert edge["process_resident_memory_bytes", ()] > 1e6
    controller = local.figures("controller")
    assert controller["stateflow_leads", ()] == 1
    assert controller["stateflow_replicas", (("state", "alive"),)] == 2
    assert controller["stateflow_replica_partitions", (("replica", "edge-0"),)] == 4
    moved = controller["stateflow_moves_total", (("kind", "migrate"), ("state", "COMPLETED"))]
    assert moved == controller["stateflow_move_pause_seconds_count", (("kind", "migrate"),)] > 0
    assert controller["stateflow_partitions_unserved", tally] == 0


def test_all_that_is_said_is_declared_and_the_other_way_round(local: Measured) -> None:
    shared = *COMMON, *CALLS, *LIMITS
    for name, declared in (("controller", (*shared, *CONTROLLER)), ("edge-0", (*shared, *REPLICA))):
        check_declared(local.text(name), declared)


def check_declared(text: str, declared: Sequence[Figure]) -> None:
    """Checks that all declared figures are there, and no others except those of operators."""
    families = {f.name: f for f in text_string_to_metric_families(text)}
    ours = {
        key: family for key, family in families.items() if key.startswith("stateflow_") and not key.startswith(PREFIX)
    }
    assert set(ours) == {each.name.removesuffix("_total") for each in declared}
    for each in declared:
        family = ours[each.name.removesuffix("_total")]
        assert family.documentation == each.what
        assert family.type == each.kind
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(each.labels), each.name


def test_an_agent_says_how_its_replicas_stand_and_where_their_figures_are(local: Measured) -> None:
    place = ["--data-dir", str(local.data_dir / "finder"), "--controller", local.address, "--cores", "4"]
    local._process("finder", ["agent", "--site", "far", "--name", "finder", *place])
    agent = local.processes["finder"]
    agent.start()
    agent.wait_ready()
    eventually(lambda: any(each.name == "finder" and each.alive for each in local.cluster.agents()), "it registers")
    check_declared(local.text("finder"), (*COMMON, *AGENT, *CALLS, *LIMITS))
    figures = local.figures("finder")
    assert figures["stateflow_agent_cores", (("of", "all"),)] == 4
    assert figures["stateflow_agent_cores", (("of", "workers"),)] == 0
    assert ("stateflow_agent_replicas", (("state", "running"),)) not in figures
    since = ("stateflow_agent_controller_seconds", ())
    assert 0 <= local.figures("finder")[since] < 60
    page = local.page("finder")

    def targets() -> dict[str, str]:
        """Addresses of ``/metrics`` by replica; the agent's own is under an empty name."""
        with urllib.request.urlopen(page.replace("/metrics", "/sd"), timeout=20) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            found = json.load(answer)
        assert all(each["labels"].items() >= {"agent": "finder", "site": "far"}.items() for each in found)
        return {each["labels"].get("replica", ""): f"http://{each['targets'][0]}/metrics" for each in found}

    def runs(name: str, found: dict[str, str]) -> bool:
        """Tells whether that replica answers at its address."""
        with urllib.request.urlopen(found[name], timeout=20) as answer:
            labels = [dict(key) for figure, key in samples(answer.read().decode()) if figure == "stateflow_info"]
        return [(each["process"], each["name"]) for each in labels] == [("replica", name)]

    assert targets() == {"": page}
    local.cluster.spawn("finder", count=1).wait()
    local.cluster.spawn("finder", count=1, workers=2).wait()
    found = targets()
    assert set(found) == {"", "finder-0", "finder-1", "finder-1~1"}
    assert len(set(found.values())) == 4
    assert all(runs(name, found) for name in found if name)
    (worker,) = (each for each in psutil.Process(agent.pid).children(recursive=True) if said_worker(each) == "1")
    worker.kill()
    worker.wait(60)  # otherwise the killed worker may be the one that answers
    eventually(lambda: answers(found["finder-1~1"]), "a worker that is begun again serves them where it did")
    assert runs("finder-1~1", found)
    assert targets() == found
    local.cluster.stop_replica("finder-0", force=True).wait()
    local.cluster.stop_replica("finder-1", force=True).wait()
    assert targets() == {"": page}
    local.cluster.restart_replica("finder-0").wait()
    assert runs("finder-0", targets())
    local.cluster.stop_replica("finder-0", force=True).wait()
    agent.stop()


def said_worker(process: psutil.Process) -> str:
    """Returns the number of a node's worker, as its command line says; empty: not a worker."""
    line = process.cmdline()
    return line[line.index("--worker") + 1] if "--worker" in line else ""


def answers(page: str) -> bool:
    try:
        urllib.request.urlopen(page, timeout=20).close()
    except OSError:
        return False
    return True


def test_a_program_says_what_it_sent(local: Measured) -> None:
    registry = CollectorRegistry()
    registry.register(ClientFigures())
    tally = (("operator", "Tally"),)
    before = samples(generate_latest(registry).decode()).get(("stateflow_client_rows_total", tally), 0.0)
    with local.stream("Tally", source="program") as stream:
        stream.send(rows_of("program", 0))
        with pytest.raises(OperatorFailed):
            stream.send([{"k": "program", "v": -1}])
    text = generate_latest(registry).decode()
    check_declared(text, CLIENT)
    found = samples(text)
    assert found["stateflow_client_rows_total", tally] == before + 40
    assert found["stateflow_client_batches_failed_total", tally] >= 1
    assert found["stateflow_client_batches_running", tally] == 0


def test_operators_have_figures_of_their_own(local: Measured) -> None:
    local.cluster.deploy(Alarmed, partitions=2, sites=["edge"])
    rows = [{"k": str(n), "v": n} for n in range(30)]
    with local.stream("Alarmed", source="s") as stream:
        stream.send(rows, sequence=0)
        stream.send(rows, sequence=0)
        with pytest.raises(OperatorFailed):
            stream.send([{"k": "1", "v": 1}, {"k": "1", "v": -1}], sequence=1)
    found = local.figures("edge-0")
    alarmed = ("operator", "Alarmed")
    for kind in ("even", "odd"):
        assert found["stateflow_operator_alarms_total", (("kind", kind), alarmed)] == 15, "a repeated batch counts once"
    buckets = {le: found["stateflow_operator_value_bucket", (("le", le), alarmed)] for le in ("10.0", "100.0", "+Inf")}
    assert buckets == {"10.0": 11, "100.0": 30, "+Inf": 30}
    assert found["stateflow_operator_value_sum", (alarmed,)] == sum(range(30))
    assert found["stateflow_operator_newest", (alarmed,)] in range(30)
    families = {f.name: f for f in text_string_to_metric_families(local.text("edge-0"))}
    assert families["stateflow_operator_alarms"].documentation == "that were raised"
    local.cluster.undeploy("Alarmed", delete_state=True)


def test_a_replica_that_is_silent_shows(local: Measured) -> None:
    local.freeze("cloud-0")
    try:
        eventually(
            lambda: local.figures("controller").get(("stateflow_replicas", (("state", "silent"),))) == 1,
            "it is silent",
            60,
        )
        assert local.figures("controller")["stateflow_replica_heartbeat_seconds", (("replica", "cloud-0"),)] > 1
    finally:
        local.thaw("cloud-0")


def test_beyond_this_machine_it_wants_a_certificate(tmp_path: Path) -> None:
    with Measured(Tally, sites={"edge": 1}, partitions=2, data_dir=tmp_path / "c", tls=True) as secure:
        page = secure.page("edge-0")
        assert page.startswith("https://")
        anybody = ssl.create_default_context(cafile=os.environ["STATEFLOW_TLS_CA"])
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            urllib.request.urlopen(page, timeout=10, context=anybody)
        anybody.load_cert_chain(os.environ["STATEFLOW_TLS_CERT"], os.environ["STATEFLOW_TLS_KEY"])
        with urllib.request.urlopen(page, timeout=10, context=anybody) as answer:
            assert (
                samples(answer.read().decode())["stateflow_partitions", (("operator", "Tally"), ("state", "OWNED"))]
                == 2
            )
