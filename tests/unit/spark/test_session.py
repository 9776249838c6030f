"""Settings of Spark sessions that stateflow makes."""

from __future__ import annotations

import pytest

from stateflow.spark.session import LOG_ON_LOCAL_DISK, quick_settings


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local-cluster[2,1,1024]"])
def test_what_runs_here_has_its_log_on_this_disk(master: str) -> None:
    assert quick_settings(master).items() >= LOG_ON_LOCAL_DISK.items()


@pytest.mark.parametrize("master", ["spark://there:7077", "yarn", "k8s://https://there"])
def test_a_cluster_keeps_what_spark_does_by_itself(master: str) -> None:
    """A cluster keeps Spark's own settings, as its checkpoints are not on this disk."""
    settings = quick_settings(master)
    assert settings
    assert not settings.keys() & LOG_ON_LOCAL_DISK.keys()
