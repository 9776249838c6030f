"""Clusters of this machine: mistakes that they refuse, and forked processes. No processes are started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stateflow.errors import InvalidArgument
from stateflow.local.cluster import Certificates, LocalCluster


def test_an_authority_whose_making_was_cut_off_is_completed(tmp_path: Path) -> None:
    """The cluster could never start again: only the key was there, and no authority was found."""
    Certificates(tmp_path)
    (tmp_path / "authority" / "ca.pem").unlink()
    assert Certificates(tmp_path).issue("edge-0", "node", "h")


def test_a_replica_and_a_controller_have_names_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="a replica and a controller would both be named controller-1"):
        LocalCluster(sites={"controller": 2}, controllers=2, data_dir=tmp_path)
    LocalCluster(sites={"controller": 2}, controllers=1, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"partitions": "4"}, "invalid number of partitions: '4'"),
        ({"partitions": 2.5}, "invalid number of partitions: 2.5"),
        ({"controllers": "2"}, "invalid number of controllers: '2'"),
        ({"controllers": 1.0}, "invalid number of controllers: 1.0"),
        ({"workers": "2"}, "invalid number of workers: '2'"),
        ({"workers": 257}, "invalid number of workers: 257"),
        ({"checkpoint_interval_s": "60"}, "invalid checkpoint_interval_s: '60'"),
        ({"checkpoint_interval_s": float("nan")}, "invalid checkpoint_interval_s: nan"),
        ({"deploy_to": "local"}, "deploy_to='local' are not sites"),
        ({"deploy_to": ("mars",)}, "are not sites of this cluster"),
        ({"deploy_to": 5}, "deploy_to=5 are not sites"),
        ({"sites": {5: 1}}, "5 is not a valid site name"),
        ({"data_dir": 5}, "data_dir=5 is not a path"),
        ({"data_dir": ""}, "data_dir='' is not a path"),
    ],
    ids=str,
)
def test_arguments_that_are_not_valid_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        LocalCluster(**arguments)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("name", ["file/x", "file", "a" * 300, "a\0b"], ids=["below", "file", "long", "null"])
def test_a_data_directory_that_cannot_be_used_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tls: bool
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(LocalCluster, "_start", lambda _: pytest.fail("it was started"))
    with pytest.raises(InvalidArgument, match="the data directory cannot be used"):
        LocalCluster(data_dir=tmp_path / name, tls=tls).start()


class Running:
    running = True


def test_a_cluster_that_runs_is_not_started_again(tmp_path: Path) -> None:
    cluster: Any = LocalCluster(data_dir=tmp_path)
    cluster.processes = {"controller": Running()}
    with pytest.raises(InvalidArgument, match="started already"), cluster:
        raise AssertionError("it was started")


def test_certificates_of_a_cluster_that_was_stopped_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCluster, "_start", lambda _: None)
    cluster = LocalCluster(tls=True)
    for _ in range(2):
        with cluster:
            assert isinstance(cluster.certificates, Certificates)
            assert Path(os.environ["STATEFLOW_TLS_CERT"]).is_relative_to(cluster.data_dir)
        assert not cluster.data_dir.exists()


def test_a_forked_process_does_not_stop_its_parents_cluster() -> None:
    cluster = LocalCluster()
    child = os.fork()
    if child == 0:
        cluster.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert cluster.data_dir.exists()
    cluster.stop()
    assert not cluster.data_dir.exists()
