"""Settings of Spark sessions that stateflow makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.spark.session import LOG_ON_LOCAL_DISK, local_slots, quick_settings


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local-cluster[2,1,1024]"])
def test_what_runs_here_has_its_log_on_this_disk(master: str) -> None:
    assert quick_settings(master).items() >= LOG_ON_LOCAL_DISK.items()


@pytest.mark.parametrize("master", ["spark://there:7077", "yarn", "k8s://https://there"])
def test_a_cluster_keeps_what_spark_does_by_itself(master: str) -> None:
    """A cluster keeps Spark's own settings, as its checkpoints are not on this disk."""
    settings = quick_settings(master)
    assert settings
    assert not settings.keys() & LOG_ON_LOCAL_DISK.keys()


@pytest.mark.parametrize(
    ("master", "cpus", "slots"),
    [
        *(("local", None, 1), ("local[4]", None, 4), ("local[4, 10]", "1", 4), ("local[5]", "2", 2)),
        *(("local[*]", None, 8), ("local-cluster[2,1,1024]", None, None), ("yarn", None, None)),
    ],
)
def test_tasks_that_a_local_master_runs_at_once(master: str, cpus: str | None, slots: int | None) -> None:
    values = {"spark.master": master, "spark.task.cpus": cpus}
    machine = SimpleNamespace(getRuntime=lambda: SimpleNamespace(availableProcessors=lambda: 8))
    jvm = SimpleNamespace(java=SimpleNamespace(lang=SimpleNamespace(Runtime=machine)))
    spark: Any = SimpleNamespace(
        conf=SimpleNamespace(get=lambda key, default: values[key] or default), sparkContext=SimpleNamespace(_jvm=jvm)
    )
    assert local_slots(spark) == slots
