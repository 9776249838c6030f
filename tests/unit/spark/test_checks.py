"""What is refused before the first batch, without Spark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stateflow.errors import DeclarationError, InvalidArgument, OperatorNotImportable, StateflowError
from stateflow.spark import apply_operator, read_state
from stateflow.spark.checks import check_executors, not_importable
from stateflow.testing import LocalCluster
from tests.unit.operators import Count


def test_spark_connect_is_refused() -> None:
    remote = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})()
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: this is Spark Connect.*classic session"):
        apply_operator(remote, Count, cluster="127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="this is Spark Connect"):
        read_state(remote, cluster="127.0.0.1:1", operator="Tally", state="n")


class Frame:
    """A DataFrame as far as it is looked at first. ``jvm``: None: its session was stopped."""

    isStreaming = False

    def __init__(self, jvm: object) -> None:
        self.sparkSession = self.sparkContext = self
        self._jsc = jvm


@pytest.mark.parametrize(
    ("frame", "operator", "cluster", "said"),
    [
        (Frame(None), Count, "127.0.0.1:1", "^invalid_argument: the Spark session was stopped: make another"),
        ([1, 2], Count, "127.0.0.1:1", "^invalid_argument: list is no DataFrame"),
        (
            Frame("jvm"),
            Count(),
            "127.0.0.1:1",
            r"^bad_declaration: Count\(\) is an instance .*: pass the class .*: Count$",
        ),
        (Frame("jvm"), dict, "127.0.0.1:1", "is not an operator"),
        (Frame("jvm"), Count, LocalCluster(sites={"a": 1}), "is no running cluster: pass .* a started LocalCluster"),
        (Frame("jvm"), Count, None, "None is no running cluster"),
    ],
)
def test_what_is_passed_by_mistake(frame: Any, operator: Any, cluster: Any, said: str) -> None:
    with pytest.raises(StateflowError, match=said) as caught:
        apply_operator(frame, operator, cluster=cluster)
    assert len(str(caught.value).splitlines()) == 1


def test_state_is_not_read_with_a_session_that_was_stopped() -> None:
    with pytest.raises(InvalidArgument, match="session was stopped"):
        read_state(Frame(None), cluster="127.0.0.1:1", operator="Tally", state="n")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        (["cloud"], r"sites=\['cloud'\] does not say how many replicas: write sites=\{'cloud': 1, …\}"),
        ({}, "no site has a replica"),
        ({"cloud": 0}, "0 replicas at cloud"),
        ({"cloud": "1"}, "'1' replicas at cloud"),
        ({"a site": 1}, "is not a valid site"),
    ],
)
def test_sites_that_cannot_be(sites: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        LocalCluster(sites=sites)


def test_a_cluster_of_what_is_no_operator() -> None:
    with pytest.raises(DeclarationError, match="pass the class itself: Count"):
        LocalCluster(Count())  # type: ignore[arg-type]


class Remote:
    """A session whose executors fail with this message, or are not to be asked."""

    def __init__(self, master: str, said: str = "", python: str = sys.executable) -> None:
        self.sparkContext = self
        self.pythonExec = python
        self.master, self.applicationId = master, f"app of {said}"
        self.said, self.asked = said, 0

    def parallelize(self, *_: object) -> Remote:
        self.asked += 1
        return self

    def map(self, *_: object) -> Remote:
        return self

    def collect(self) -> None:
        if self.said:
            raise RuntimeError(self.said)


def test_executors_without_the_package_are_told_apart_from_other_failures() -> None:
    lacking = Remote("spark://m:7077", "Job aborted\nModuleNotFoundError: No module named 'stateflow'\n\tat org.apache")
    with pytest.raises(Exception, match=r"^operator_not_importable: .*'stateflow': install"):
        check_executors(lacking)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of memory"):
        check_executors(Remote("yarn", "out of memory"))  # type: ignore[arg-type]
    assert not_importable("ValueError: no") is None


def test_executors_are_asked_once_and_only_where_they_are_others() -> None:
    fine = Remote("local-cluster[2,1,1024]")
    for _ in range(3):
        check_executors(fine)  # type: ignore[arg-type]
    assert fine.asked == 1
    here = Remote("local[2]", "never asked")
    check_executors(here)  # type: ignore[arg-type]
    assert here.asked == 0


def test_a_local_session_whose_workers_are_another_python_is_asked_too(tmp_path: Path) -> None:
    other = tmp_path / "python3"  # as a virtual environment has it that is not activated
    other.symlink_to(sys.executable)
    lacking = Remote("local[2]", "ModuleNotFoundError: No module named 'msgpack'", str(other))
    with pytest.raises(OperatorNotImportable, match=r"'msgpack': install.*PYSPARK_PYTHON"):
        check_executors(lacking)  # type: ignore[arg-type]
