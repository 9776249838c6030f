"""State of one version of an operator under the next version, through the harness on both backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow import BatchOperator, Context, Namespace, Operator, state
from stateflow.errors import OperatorFailed, SchemaMismatch
from stateflow.partition.layout import Session
from stateflow.partition.positions import MIGRATION
from stateflow.state.evolution import DeployedStates, Evolution, coder_named
from stateflow.testing import OperatorHarness


@pytest.fixture(params=["memory", "rocksdb"])
def start(request: pytest.FixtureRequest) -> Callable[[type[Operator], list[str]], OperatorHarness]:
    """Returns a function that makes a harness and sends one batch with these keys."""

    def make(cls: type[Operator], keys: list[str]) -> OperatorHarness:
        harness = OperatorHarness(cls, partitions=2, backend=request.param)
        harness.send([{"k": key} for key in keys])
        return harness

    return make


def upgraded(harness: OperatorHarness, cls: type[Operator], send: str = "zz") -> OperatorHarness:
    snapshot = harness.checkpoint()
    harness.close()
    made = OperatorHarness.restore(cls, snapshot)
    made.send([{"k": f"{send}{number}"} for number in range(8)])  # opens every partition
    return made


def stored_tags(harness: OperatorHarness) -> set[bytes]:
    return {entry[1:9] for store in harness._stores for entry, _ in store.scan(b"c")}


class Named(Operator):
    """Gives all versions of an operator one name."""

    key = "k"
    output = "k string"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__name__ = "Op"


class V1(Named):
    n = state.value(int, default=0)
    sizes = state.map(str, int)
    steps = state.list(int)
    pair = state.value(tuple[str, int])
    most = state.reducing(int, max, ttl=3600)
    going = state.set(str)

    def process(self, row: Any, ctx: Context) -> None:
        self.n.value += 7
        self.sizes["x"] = 3
        self.steps += [1, 2]
        self.pair.value = ("a", 1)
        self.most.add(5)
        self.going.add("here")
        ctx.state(V1.sizes, Namespace.named("w"))["in w"] = 4


class V2(Named):
    n = state.value(float, default=0.0)
    sizes = state.map(str, Decimal)
    steps = state.list(float)
    pair = state.value(tuple[str, float])
    most = state.reducing(float, max, ttl=3600)
    added = state.counter()

    def process(self, row: Any, ctx: Context) -> None:
        self.added.add()


def test_numbers_widen_states_come_and_go(start: Any) -> None:
    harness = upgraded(start(V1, ["a", "b"]), V2)
    for key in "ab":
        now = harness.state(key)
        assert (now.n.value, now.sizes, list(now.steps)) == (7.0, {"x": Decimal(3)}, [1.0, 2.0])
        assert (type(now.n.value), now.pair.value, now.most.value, now.added.value) == (float, ("a", 1.0), 5.0, 0)
    assert stored_tags(harness) == {each.tag for each in vars(V2).values() if hasattr(each, "tag")}
    harness.advance_processing_time(3600)
    assert harness.state("a").most.value is None
    again = upgraded(harness, V2, "yy")
    assert again.state("a").n.value == 7.0
    again.close()


def test_a_number_that_a_float_cannot_hold_is_refused(start: Any) -> None:
    class Big(Named):
        n = state.value(int, default=0)

        def process(self, row: Any, ctx: Context) -> None:
            self.n.value = 2**60 + 1

    class Wide(Named):
        n = state.value(float, default=0.0)

        def process(self, row: Any, ctx: Context) -> None: ...

    with pytest.raises(
        SchemaMismatch, match=r"'n' holds 1152921504606846977, which does not fit float64.*state_version"
    ):
        upgraded(start(Big, list("abcdefgh")), Wide)


@dataclasses.dataclass
class Money:
    cents: int
    currency: str = "EUR"


class Kept(Named):
    amounts = state.map(str, Money)
    total = state.value(str)
    seen = state.set(int)

    def process(self, row: Any, ctx: Context) -> None:
        self.amounts["a"] = Money(250)
        self.amounts["b"] = Money(50, "USD")
        self.total.value = "300"
        self.seen.update([1, 2])


class Migrated(Named):
    state_version = 2
    amounts = state.map(str, float)
    total = state.value(int, default=0, ttl=timedelta(hours=1))
    seen = state.set(int)

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        assert old_version == 1
        for name, money in old.amounts.items():
            self.amounts[f"{name}-{money['currency']}"] = money["cents"] / 100
        self.total.value = int(old.total)
        assert self.seen == old.seen
        self.seen.discard(1)

    def process(self, row: Any, ctx: Context) -> None:
        if row.k == "fail":
            raise ValueError("no")


def test_migrate_state_gets_every_key_once(start: Any) -> None:
    harness = upgraded(start(Kept, ["a", "b", "c"]), Migrated)
    for key in "abc":
        now = harness.state(key)
        assert (now.amounts, now.total.value, now.seen) == ({"a-EUR": 2.5, "b-USD": 0.5}, 300, {2})
    assert harness.state("d").total.value == 0
    assert stored_tags(harness) == {each.tag for each in vars(Migrated).values() if hasattr(each, "tag")}
    again = upgraded(harness, Migrated, "yy")
    assert again.state("a").total.value == 300
    again.advance_processing_time(3600)
    again.send([{"k": "a"}])
    assert again.state("a").total.value == 0
    again.close()


def test_what_nobody_migrates_is_refused_and_stays(start: Any) -> None:
    class Silent(Named):
        total = state.value(int)

        def process(self, row: Any, ctx: Context) -> None: ...

    class Same(Migrated):
        state_version = 1

    for cls in (Silent, Same):
        harness = start(Kept, ["a"])
        snapshot = harness.checkpoint()
        with pytest.raises(SchemaMismatch, match=r"stored as .* but declared as"):
            upgraded(harness, cls)
        assert OperatorHarness.restore(Kept, snapshot).state("a").total.value == "300"


def test_an_older_operator_is_refused(start: Any) -> None:
    class Older(Named):
        def process(self, row: Any, ctx: Context) -> None: ...

    with pytest.raises(SchemaMismatch, match=r"has version 2, which is newer than .* version 1 .*run the newer"):
        upgraded(start(Migrated, list("abcdefgh")), Older)


def test_a_failing_migration_leaves_the_old_state(start: Any) -> None:
    class Failing(Migrated):
        def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
            self.total.value = 1
            raise KeyError("gone")

    harness = start(Kept, ["a"])
    snapshot = harness.checkpoint()
    harness.close()
    failing = OperatorHarness.restore(Failing, snapshot)
    for _ in range(2):
        with pytest.raises(OperatorFailed, match=r"migrate_state\(\) raised KeyError: 'gone' .*key='a'"):
            failing.send([{"k": "a"}])
    assert OperatorHarness.restore(Kept, failing.checkpoint()).state("a").total.value == "300"


def test_a_client_that_comes_behind_a_failed_migration_does_not_record_it_as_done(start: Any) -> None:
    """A client that opens a source after a failed migration does not record the migration as done.

    Its commit used to carry the new schema, above the old cells: the mended version began empty.
    """

    class Failing(Migrated):
        def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
            raise KeyError("gone")

    harness = start(Kept, ["a"])
    snapshot = harness.checkpoint()
    harness.close()
    failing = OperatorHarness.restore(Failing, snapshot)
    with pytest.raises(OperatorFailed):
        failing.send([{"k": "a"}])
    for host in failing._hosts:
        host.open_source("another", Session(1, "client"))
    assert upgraded(failing, Migrated).state("a").total.value == 300


def test_a_changed_state_with_namespaces_is_not_lost(start: Any) -> None:
    class Other(Named):
        state_version = 2
        sizes = state.map(str, bytes)

        def migrate_state(self, old_version: int, old: SimpleNamespace) -> None: ...
        def process(self, row: Any, ctx: Context) -> None: ...

    with pytest.raises(SchemaMismatch, match="'sizes' changes, but migrate_state cannot read its data in namespaces"):
        upgraded(start(V1, list("abcdefgh")), Other)


def test_a_migration_is_one_change_set() -> None:
    harness = OperatorHarness(Kept, partitions=1)
    harness.send([{"k": "a"}])
    made = OperatorHarness.restore(Migrated, harness.checkpoint())
    seen: list[tuple[int, bytes]] = []
    made._hosts[0]._committer._on_commit = lambda sequence, encode: seen.append((sequence, encode()))
    with pytest.raises(OperatorFailed):
        made.send([{"k": "fail"}])
    assert [sequence for sequence, _ in seen] == [2]
    assert MIGRATION.encode() in seen[0][1]
    assert made.state("a").total.value == 300


class Narrow(Named):
    price = state.value(str)
    total = state.value(int, default=0)
    by_tag = state.map(str, int)
    steps = state.list(int)

    def process(self, row: Any, ctx: Context) -> None:
        self.price.value = "1.5"
        self.total.value = 1
        self.by_tag |= {"a": 1, "b": 2}
        self.steps += [1, 2]
        ctx.state(Narrow.by_tag, Namespace.named("w"))["in w"] = 4


class Wider(Named):
    """An operator that migrates one state and only widens the others. The migration may overwrite those as well."""

    state_version = 2
    price = state.value(float, default=0.0)
    total = state.value(float, default=0.0)
    by_tag = state.map(str, float)
    steps = state.list(float)

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        self.price.value = float(old.price)
        assert self.total.value == old.total
        assert self.by_tag == old.by_tag
        if self.price.value == 1.5:
            self.by_tag["a"] += 0.5
            self.by_tag["c"] = 3.0
            del self.by_tag["b"]
            self.steps.clear()
            self.steps.append(9.0)

    def process(self, row: Any, ctx: Context) -> None: ...


def test_what_is_only_wider_is_kept_beside_what_migrates(start: Any) -> None:
    harness = upgraded(start(Narrow, ["a", "b"]), Wider)
    for key in "ab":
        now = harness.state(key)
        assert (now.price.value, now.total.value) == (1.5, 1.0)
        assert (now.by_tag, len(now.by_tag), list(now.steps)) == ({"a": 1.5, "c": 3.0}, 2, [9.0])
        assert type(now.total.value) is float
    assert stored_tags(harness) == {each.tag for each in vars(Wider).values() if hasattr(each, "tag")}
    again = upgraded(harness, Wider, "yy")
    assert again.state("a").by_tag == {"a": 1.5, "c": 3.0}
    again.close()


def test_what_migrate_state_clears_stays_cleared(start: Any) -> None:
    class Cleared(Wider):
        def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
            self.total.clear()
            self.by_tag.clear()

    now = upgraded(start(Narrow, ["a"]), Cleared).state("a")
    assert (now.price.value, now.total.value, dict(now.by_tag), list(now.steps)) == (0.0, 0.0, {}, [1.0, 2.0])


class Kinds(Named):
    items = state.value(list[int])
    by_name = state.map(str, dict[str, int])
    kept = state.value(int | None)

    def process(self, row: Any, ctx: Context) -> None:
        self.items.value = [1, 2]
        self.by_name["a"] = {"x": 1}
        self.by_name["b"] = {"y": 2}
        self.kept.value = 5


class OtherKinds(Named):
    """An operator whose states are other types under the same coders."""

    state_version = 2
    items = state.value(dict[int, int])
    by_name = state.map(str, list[str])
    kept = state.value(int | str | None)

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        assert (self.items.value, self.by_name, self.kept.value) == (None, {}, 5)
        self.items.value = dict.fromkeys(old.items, 0)
        self.by_name["a"] = list(old.by_name["a"])

    def process(self, row: Any, ctx: Context) -> None:
        self.kept.value = "more"


def test_types_that_their_coders_do_not_tell_apart_are_migrated(start: Any) -> None:
    harness = upgraded(start(Kinds, ["a", "b"]), OtherKinds)
    for key in "ab":
        now = harness.state(key)
        assert (now.items.value, now.by_name, now.kept.value) == ({1: 0, 2: 0}, {"a": ["x"]}, 5)
    again = upgraded(harness, OtherKinds, "yy")
    assert again.state("a").items.value == {1: 0, 2: 0}
    again.close()


def test_types_that_their_coders_do_not_tell_apart_are_refused_unmigrated(start: Any) -> None:
    class Unmigrated(Named):
        by_name = state.map(str, list[str])

        def process(self, row: Any, ctx: Context) -> None: ...

    expected = r"'by_name' is stored as map\(utf8, dict\[str, int\]\) but declared as map\(utf8, list\[str\]\)"
    with pytest.raises(SchemaMismatch, match=expected):
        upgraded(start(Kinds, list("abcdefgh")), Unmigrated)


def test_a_dropped_state_is_gone_from_partitions_that_never_saw_it_dropped(start: Any) -> None:
    class Without(Named):
        n = state.counter()

        def process(self, row: Any, ctx: Context) -> None: ...

    class Again(Kinds):
        def process(self, row: Any, ctx: Context) -> None: ...

    snapshot = start(Kinds, list("abcdefgh")).checkpoint()
    unvisited = OperatorHarness.restore(Without, snapshot).checkpoint()
    again = upgraded(OperatorHarness.restore(Again, unvisited), Again)
    assert {again.state(key).items.value for key in "abcdefgh"} == {None}
    assert {len(again.state(key).by_name) for key in "abcdefgh"} == {0}
    assert not stored_tags(again)
    again.close()


class ColumnsV1(BatchOperator):
    key = "k"
    output = "k string"
    n = state.value(int)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        self.n.put_many(batch["k"], pa.array([len(batch)] * len(batch)))


class ColumnsV2(BatchOperator):
    key = "k"
    output = "k string"
    state_version = 2
    n = state.value(str)

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        self.n.value = f"was {old.n}"

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        self.n.get_many(batch["k"])


def test_batch_operators_migrate_too(start: Any) -> None:
    ColumnsV2.__name__ = ColumnsV1.__name__
    harness = upgraded(start(ColumnsV1, ["a"]), ColumnsV2)
    assert harness.state("a").n.value == "was 1"
    harness.close()


@pytest.mark.parametrize(
    "type_",
    [int, str, Decimal, Money, tuple[int, float], tuple[str, tuple[int, ...]], tuple[str, ...], list[Any], dict],
)
def test_coders_are_found_by_their_stored_name(type_: Any) -> None:
    name = state.coder_for(type_).name
    found = coder_named(name)
    assert found is not None
    assert found.name == name


def test_a_coder_of_ones_own_is_not_found() -> None:
    assert coder_named("mine") is None
    assert coder_named("tuple[int64,mine]") is None


SEEN = state.map(str, list[int], name="seen")
SIZE = state.value(list[int], name="size")


class Tagged(Named):
    """An operator that makes states at run time, which its next version declares under the same names."""

    def process(self, row: Any, ctx: Context) -> None:
        ctx.state(SEEN)["a"] = [1]
        ctx.state(SIZE).value = [2]


class Declared(Named):
    state_version = 2
    seen = state.map(str, list[float])
    size = state.value(dict)

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        self.size.value = dict.fromkeys(old.size, "migrated")

    def process(self, row: Any, ctx: Context) -> None: ...


def descriptions(harness: OperatorHarness) -> set[bytes]:
    return {entry[1:9] for store in harness._stores for entry, _ in store.scan(b"r")}


def test_a_tag_that_is_declared_as_a_state_is_evolved(start: Any) -> None:
    harness = upgraded(start(Tagged, ["a", "b"]), Declared)
    for key in "ab":
        now = harness.state(key)
        assert (repr(now.seen["a"]), now.size.value) == ("[1.0]", {2: "migrated"})
    assert not descriptions(harness)

    class Without(Named):
        state_version = 3

        def process(self, row: Any, ctx: Context) -> None: ...

    again = upgraded(harness, Without)
    assert not stored_tags(again)
    again.close()


def test_a_tag_that_is_declared_as_another_type_is_refused_unmigrated(start: Any) -> None:
    class Unmigrated(Named):
        size = state.value(dict)

        def process(self, row: Any, ctx: Context) -> None: ...

    expected = r"'size' is stored as value\(list\[int\]\) but declared as value\(dict\)"
    with pytest.raises(SchemaMismatch, match=expected):
        upgraded(start(Tagged, list("abcdefgh")), Unmigrated)


def test_a_tag_made_after_a_state_of_its_name_was_dropped_is_kept() -> None:
    described = SIZE.describe()
    deployed = DeployedStates(frozenset({"size"}), {"size": 1})
    evolution = Evolution("Op", [], 1, {"size": SIZE}, 1, False, deployed, [described])
    assert not evolution.needed
    assert Evolution("Op", [described], 1, {"size": SIZE}, 1, False, deployed).needed  # stored before the drop
