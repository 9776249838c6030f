"""Order of moves, and the limits of batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions.plan import NONE, Limits, Part, next_turns
from stateflow.types import ReplicaInfo


def part(batch: str, source: str = "a", target: str = "b", *, shared: bool = True) -> Part:
    """Makes a part.

    ``a`` and ``c`` are at the site edge, ``b`` and ``d`` in the cloud; ``a/1`` is a worker of node ``a``.
    """
    sites = {"a": "edge", "b": "cloud", "c": "edge", "d": "cloud"}
    infos = [ReplicaInfo(name, sites[name[0]], "h:1") for name in (source, target)]
    return Part.between(batch, *infos, shared=shared)


def test_the_batch_with_the_fewest_under_way_is_next_and_each_in_its_order() -> None:
    waiting = [part("large")] * 5 + [part("small")] * 2
    assert next_turns(waiting, [], {}, Limits(4)) == [0, 5, 1, 6]
    assert next_turns(waiting, [part("small")] * 2, {}, Limits(4)) == [0, 1]
    assert next_turns(waiting, [part("large")] * 4, {}, Limits(4)) == []
    assert next_turns(waiting, [], {}) == [0, 5, 1, 6, 2, 3, 4]


def test_a_limit_of_a_batch_is_its_own() -> None:
    waiting = [part("one")] * 3 + [part("two")] * 3
    assert next_turns(waiting, [part("one")], {"one": Limits(2)}) == [3, 0, 4, 5]


def test_what_a_limit_holds_back_is_passed() -> None:
    waiting = [part("r", "a", "b"), part("r", "a", "d"), part("r", "c", "d")]
    assert next_turns(waiting, [], {"r": Limits(per_node=1)}) == [0, 2]
    assert next_turns(waiting, [], {"r": Limits(per_link=1)}) == [0], "all of them are between the same two sites"
    assert next_turns([part("r", "a", "c"), *waiting], [], {"r": Limits(per_link=1)}) == [0, 1]
    assert next_turns(waiting, [part("q", "c", "b")], {}, Limits(per_node=1)) == [1]


def test_what_shares_no_limit_with_others_is_not_held_back_by_it() -> None:
    waiting = [part("r"), part("s", shared=False)]
    assert next_turns(waiting, [part("q")], {}, Limits(1)) == [1]
    assert next_turns(waiting, [part("q", shared=False)], {}, Limits(1)) == [0, 1]


@given(
    st.lists(
        st.tuples(st.sampled_from("rst"), st.sampled_from("ac"), st.sampled_from("bd"), st.booleans()), max_size=12
    ),
    st.integers(0, 5),
    st.dictionaries(st.sampled_from("rst"), st.builds(Limits, *[st.integers(0, 3)] * 3)),
    st.builds(Limits, *[st.integers(0, 3)] * 3),
)
def test_no_limit_is_exceeded_and_nothing_waits_that_could_begin(
    parts: list[tuple[str, str, str, bool]], begun: int, limits: dict[str, Limits], of_all: Limits
) -> None:
    everything = [part(batch, source, target, shared=shared) for batch, source, target, shared in parts]
    under_way, waiting = everything[:begun], everything[begun:]
    chosen = next_turns(waiting, under_way, limits, of_all)
    assert len(set(chosen)) == len(chosen)

    def fits(some: list[Part], among: Limits) -> bool:
        """Tells whether the last part still fits the limits."""
        last = some[-1]
        return (
            (not among.limit or len(some) <= among.limit)
            and (not among.per_node or all(sum(n in p.nodes for p in some) <= among.per_node for n in last.nodes))
            and (not among.per_link or sum(p.link == last.link for p in some) <= among.per_link)
        )

    def may_begin(now: list[Part], each: Part) -> bool:
        own = [p for p in now if p.batch == each.batch]
        shared = [p for p in now if p.shared]
        return fits([*own, each], limits.get(each.batch, NONE)) and (not each.shared or fits([*shared, each], of_all))

    now = list(under_way)
    for place in chosen:
        assert may_begin(now, waiting[place])
        now.append(waiting[place])
    assert not any(may_begin(now, each) for n, each in enumerate(waiting) if n not in chosen)
