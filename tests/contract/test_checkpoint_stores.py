"""Checkpoint stores of every kind keep one contract. For S3, a real S3 protocol server runs on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from stateflow.checkpoint.backend import Backend, FsspecBackend, open_backend
from tests.contract.checkpoint_leases_suite import LeasesContract
from tests.contract.checkpoint_suite import CheckpointContract

NUMBERS = itertools.count()


class TestDirectory(CheckpointContract, LeasesContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return open_backend(str(tmp_path / "store"))


class TestMemory(CheckpointContract, LeasesContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return open_backend(f"memory://stateflow-tests-{next(NUMBERS)}")


class TestFsspecDirectory(CheckpointContract, LeasesContract):
    """Runs the contract on a file system that stateflow reaches only through fsspec."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(fsspec.filesystem("file"), str(tmp_path / "store"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.thorough
class TestS3(CheckpointContract, LeasesContract):
    stride = 7

    @pytest.fixture
    def backend(self, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
        import boto3

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3", endpoint_url=s3_server).create_bucket(Bucket="checkpoints")
        return open_backend(f"s3://checkpoints/run-{next(NUMBERS)}", endpoint_url=s3_server)
