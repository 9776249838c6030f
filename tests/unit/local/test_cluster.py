"""Clusters of this machine: mistakes that they refuse, and forked processes. No processes are started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stateflow.errors import InvalidArgument
from stateflow.local.cluster import Certificates, LocalCluster


def test_a_replica_and_a_controller_have_names_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="a replica and a controller would both be named controller-1"):
        LocalCluster(sites={"controller": 2}, controllers=2, data_dir=tmp_path)
    LocalCluster(sites={"controller": 2}, controllers=1, data_dir=tmp_path)


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
