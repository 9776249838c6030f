"""Code that reaches the sites in bundles: versions beside each other, upgrades forward and back, damaged bundles."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from stateflow.client.packing import Bundle, pack
from stateflow.errors import BundleDamaged, BundleMissing, OperatorNotImportable, VersionUnknown
from stateflow.local.process import Process
from stateflow.testing import LocalCluster
from tests.integration.support import command, eventually
from tests.unit.client.test_packing import wheel

pytestmark = pytest.mark.processes
PARTITIONS = 6
OPS = """
from stateflow import Operator, state
from market import prices

class Priced(Operator):
    key, output = "k", "k string, n long, price long, word string"
    n = state.value(int, default=0)

    def process(self, row, ctx):
        from market.prices import PRICE
        import tiny_requirement
        self.n.value += 1
        yield row.k, self.n.value, PRICE, tiny_requirement.WORD
"""


class Sites(LocalCluster):
    """Replicas that have none of the operator's code; ``edge-0`` has a module that ``cloud-0`` lacks."""

    alone: str = ""

    def _process(self, name: str, arguments: list[str]) -> Process:
        process = super()._process(name, arguments)
        if name == "edge-0":
            process._python_path = [self.alone, *process._python_path]
        return process


class Code:
    """Versions of the package ``market``, which only this process has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def version(self, price: int, more: str = "") -> tuple[Any, Bundle]:
        package = self.folder / "market"
        package.mkdir(exist_ok=True)
        for name, source in {"__init__": "", "prices": f"PRICE = {price}\n{more}", "ops": OPS}.items():
            (package / f"{name}.py").write_text(textwrap.dedent(source))
        self.forget()
        importlib.invalidate_caches()
        operator = importlib.import_module("market.ops").Priced
        return operator, pack(operator, [str(wheel(self.folder))])

    @staticmethod
    def forget() -> None:
        for name in [each for each in sys.modules if each.partition(".")[0] == "market"]:
            del sys.modules[name]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Code]:
    folder = tmp_path / "code"
    folder.mkdir()
    # bytecode is known by the second of its source, which two versions may share
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("STATEFLOW_CODE_KEY", "a key that both of them have")
    yield Code(folder)
    Code.forget()


@pytest.fixture
def sites(tmp_path: Path, code: Code, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "only_at_the_edge.py").write_text("")
    cluster = Sites(sites={"cloud": 1, "edge": 1}, data_dir=tmp_path / "cluster", checkpoint_interval_s=0)
    cluster.alone = str(tmp_path / "alone")
    with cluster:
        monkeypatch.syspath_prepend(str(code.folder))  # the replicas have started with the former path
        yield cluster


class Shop:
    def __init__(self, sites: Sites, operator: str = "Priced") -> None:
        self.sites, self.operator, self.sent = sites, operator, 0

    def prices(self) -> set[int]:
        """Sends a row of each of some keys, which cover all partitions, and returns the prices.

        Checks that each key was counted once more.
        """
        self.sent += 1
        rows = [{"k": f"k{n}"} for n in range(40)]
        with self.sites.stream(self.operator, source=f"s{self.sent}") as stream:
            outputs = stream.send(rows)
        assert {row["n"] for row in outputs} == {self.sent}
        assert {row["word"] for row in outputs} == {"and what it requires"}
        return {row["price"] for row in outputs}


def test_code_goes_forward_and_back_and_state_stays(sites: Sites, code: Code) -> None:
    cluster, shop = sites.cluster, Shop(sites)
    operator, one = code.version(1)
    cluster.deploy(operator, PARTITIONS, bundle=one)
    assert shop.prices() == {1}
    operator, two = code.version(2)
    cluster.deploy(operator, PARTITIONS, bundle=two)
    assert shop.prices() == {2}
    cluster.deploy(operator, PARTITIONS, name="Other", bundle=one)
    assert Shop(sites, "Other").prices() == {1}, "two versions of a module in one process"
    assert shop.prices() == {2}
    assert [each.bundle for each in cluster.versions("Priced")] == [one.digest, two.digest]
    assert cluster.upgrade("Priced", 1).number == 3
    assert shop.prices() == {1}
    with pytest.raises(VersionUnknown, match="the versions are 1 to 3"):
        cluster.upgrade("Priced", 7)
    for name in ("cloud-0", "edge-0"):
        sites.kill(name)
        sites.restart(name)
    sites.kill("controller")
    sites.restart("controller")
    assert shop.prices() == {1}
    assert [each.number for each in cluster.versions("Priced")] == [1, 2, 3]
    (move,) = [sites.migrate("Priced", [p for p, owner in enumerate(owners(sites)) if owner == "edge-0"], "cloud")]
    assert move.wait().state == "COMPLETED"
    assert shop.prices() == {1}


def owners(sites: Sites) -> list[str]:
    return list(next(each for each in sites.cluster.status().operators if each.name == "Priced").owners)


def test_a_bundle_that_is_not_what_was_deployed_is_not_loaded(sites: Sites, code: Code) -> None:
    cluster, shop = sites.cluster, Shop(sites)
    operator, one = code.version(1)
    cluster.deploy(operator, PARTITIONS, bundle=one)
    assert shop.prices() == {1}
    # damaged at a replica: the replica fetches the bundle again
    kept = sites.data_dir / "edge-0" / "bundles" / f"{one.digest}.zip"
    sites.kill("edge-0")
    packed = kept.read_bytes()
    kept.write_bytes(packed[:200] + bytes([packed[200] ^ 1]) + packed[201:])
    sites.restart("edge-0")
    assert shop.prices() == {1}
    assert kept.read_bytes() == packed
    # damaged in the ledger: no replica takes the bundle
    operator, two = code.version(2)
    cluster._client.put_bundle(two.digest, two.packed)
    flip(sites, two.digest)
    with pytest.raises(BundleDamaged, match="its digest is not the deployed one"):
        cluster.deploy(operator, PARTITIONS, bundle=two)
    with pytest.raises(BundleMissing, match="lacks the bundle"):
        cluster.deploy(operator, PARTITIONS, bundle=Bundle(b"", "1" * 64))
    assert shop.prices() == {1}
    assert len(cluster.versions("Priced")) == 1


def flip(sites: Sites, digest: str) -> None:
    engine = create_engine(sites.ledger)
    with engine.begin() as connection:
        where = {"digest": digest}
        (body,) = connection.execute(text("SELECT body FROM ledger_bundle WHERE digest = :digest"), where).one()
        body = body[:-100] + bytes([body[-100] ^ 1]) + body[-99:]
        connection.execute(text("UPDATE ledger_bundle SET body = :body WHERE digest = :digest"), where | {"body": body})
    engine.dispose()


def test_what_cannot_be_imported_at_one_site_of_two_is_deployed_at_none(sites: Sites, code: Code) -> None:
    cluster, shop = sites.cluster, Shop(sites)
    operator, one = code.version(1)
    cluster.deploy(operator, PARTITIONS, bundle=one)
    sys.path.append(sites.alone)  # the module is here, too
    try:
        operator, two = code.version(2, "import only_at_the_edge")
    finally:
        sys.path.remove(sites.alone)
        sys.modules.pop("only_at_the_edge")
    with pytest.raises(OperatorNotImportable, match="only_at_the_edge") as refused:
        cluster.deploy(operator, PARTITIONS, bundle=two)
    assert "cloud-0" in str(refused.value)
    assert shop.prices() == {1}
    assert len(cluster.versions("Priced")) == 1


def test_as_commands(sites: Sites, code: Code) -> None:
    def said(*arguments: str) -> str:
        done = command(*arguments, "--controller", sites.address)
        assert done.exit_code == 0, done.output
        return done.stdout

    shop = Shop(sites)
    for price in (1, 2):
        code.version(price)
        require = str(wheel(code.folder))
        said("deploy", "market.ops:Priced", "--partitions", str(PARTITIONS), "--require", require)
        assert shop.prices() == {price}
    assert "as version 3" in said("upgrade", "Priced", "--to", "1")
    assert shop.prices() == {1}
    versions = json.loads(said("operator", "versions", "Priced", "--json"))["versions"]
    assert versions[0]["bundle"] == versions[2]["bundle"] != versions[1]["bundle"]
    assert said("operator", "versions", "Priced").count("bundle ") == 3
    said("undeploy", "Priced", "--delete-state")
    eventually(lambda: not sites.cluster.status().operators, "it is gone")
