"""Affinity of jobs, as a table: which controller and which nodes a job may use."""

from __future__ import annotations

import pytest

from reconfig.decisions.jobs import Affinity, By, Go, Node, Wait, choose
from stateflow.errors import InvalidArgument

A = Node("a", "edge", {"disk": "ssd"})
B = Node("b", "edge", {"disk": "hdd"})
C = Node("c", "cloud", {"disk": "ssd", "gpu": "1"})
D = Node("gw-0", "cloud", {"disk": "ssd"}, agent="gw")
OFF = Node("off", "lab", {"disk": "ssd", "quiet": "yes", "jobs": "no"})
ALL = (A, B, C, D, OFF)


@pytest.mark.parametrize(
    ("text", "hard", "by", "value", "counts", "fallback_s"),
    [
        ("site edge", True, By.SITE, "edge", (1, 1_000_000), 60.0),
        ("hard node a", True, By.NODE, "a", (1, 1_000_000), 60.0),
        ("soft label disk=ssd:2-4", False, By.LABEL, "disk=ssd", (2, 4), 60.0),
        ("soft:2.5 label gpu:3", False, By.LABEL, "gpu", (3, 1_000_000), 2.5),
        ("label url=host:a", True, By.LABEL, "url=host:a", (1, 1_000_000), 60.0),
        ("label name=two words", True, By.LABEL, "name=two words", (1, 1_000_000), 60.0),
    ],
)
def test_what_is_one(text: str, hard: bool, by: By, value: str, counts: tuple[int, int], fallback_s: float) -> None:
    found = Affinity.parse(text)
    told = found.hard, found.by, found.value, (found.least, found.most), found.fallback_s
    assert told == (hard, by, value, counts, fallback_s)


@pytest.mark.parametrize(
    "text",
    [
        *("", "hard", "edge", "site", "soft: site", "soft:x site edge", "soft:-1 site edge", "soft:nan site edge"),
        *("hard:3 site edge", "firm site edge", "rack 7", "soft:1e99 site edge"),
    ],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an affinity"):
        Affinity.parse(text)


@pytest.mark.parametrize("counts", ["4-2", "0", "0-3"])
def test_more_at_least_than_at_most_is_refused(counts: str) -> None:
    with pytest.raises(InvalidArgument, match="asks for at least"):
        Affinity.parse(f"label disk=ssd:{counts}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("node z", "none of the nodes matches node z"),
        ("site mars", "none of the nodes matches site mars"),
        ("label disk=tape", "none of the nodes matches label disk=tape"),
        ("label color", "none of the nodes matches label color"),
        ("site lab", "that match site lab take no jobs"),
        ("label quiet=yes", "take no jobs"),
        ("node a:2", "matches 1 nodes, but the job asks for at least 2"),
    ],
)
def test_what_nothing_there_can_satisfy_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Affinity.parse(text).check(ALL, "nodes")
    with pytest.raises(InvalidArgument):
        Affinity.parse(f"soft {text}").check(ALL, "nodes")


@pytest.mark.parametrize("text", ["node gw", "node gw-0", "site edge:5", "label disk:2-3", "soft site cloud"])
def test_what_something_there_may_satisfy_is_not(text: str) -> None:
    Affinity.parse(text).check(ALL, "nodes")


@pytest.mark.parametrize(
    ("text", "there", "waited_s", "uses"),
    [
        # none given: all nodes, except those that take no jobs
        ("", (A, B), 0, None),
        ("", (A, OFF), 0, {"a"}),
        ("", (OFF,), 1e6, "none of the nodes that answer takes jobs"),
        # hard: waits as long as it takes
        ("site edge", ALL, 0, {"a", "b"}),
        ("node gw", ALL, 0, {"gw-0"}),
        ("site edge", (C, D), 1e6, "0 of at least 1 nodes that match site edge"),
        ("label disk=ssd", (OFF, B), 1e6, "0 of at least 1"),
        # at least so many, at most so many: the first ones by name
        ("label disk=ssd:2-4", (A, B), 0, "1 of at least 2"),
        ("label disk=ssd:2-4", (A, C), 0, {"a", "c"}),
        ("label disk:1-2", ALL, 0, {"a", "b"}),
        ("label disk:2-3", (D, C, B, A), 0, {"a", "b", "c"}),
        # soft: waits for a while
        ("soft:30 site edge", (C, D), 29, "gives the affinity up in 1 s"),
        ("soft:30 site edge", (C, D), 30, {"c", "gw-0"}),
        ("soft:30 site edge:2-4", (A, C), 30, {"a"}),
        ("soft:30 site mars:1-1", (C, D), 31, {"c"}),
        ("soft:0 site edge", (OFF,), 1e6, "and no other nodes that take jobs answer"),
        ("soft:0 site edge", (), 1e6, "and no other nodes that take jobs answer"),
    ],
)
def test_who_is_used(text: str, there: tuple[Node, ...], waited_s: float, uses: set[str] | str | None) -> None:
    found = choose(Affinity.parse(text) if text else None, there, waited_s)
    if isinstance(uses, str):
        assert isinstance(found, Wait)
        assert uses in found.why
    else:
        assert isinstance(found, Go)
        assert found.nodes == (None if uses is None else frozenset(uses))


def test_who_falls_back_says_so() -> None:
    found = choose(Affinity.parse("soft:1 site edge"), (C,), 2)
    assert isinstance(found, Go)
    assert found.note == "ran without its affinity: 0 of at least 1 nodes that match site edge and take jobs answer"
