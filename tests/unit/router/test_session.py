"""The router's state machine: redirects, refusals, silence, time-outs, and a table that never goes back."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.errors import Moved, NotOwner, OperatorFailed, StateflowError, StateMissing, Unavailable
from stateflow.router.session import BatchSession, Delivery, Refresh, Route, RoutingTable, Send, Wait, table_of
from stateflow.types import ReplicaInfo
from tests.sizes import sized

NOT_OWNER = NotOwner("not here")
DOWN = Unavailable("no answer")
FATAL = OperatorFailed("process() raised")


class Steady(Random):
    """Draws the middle of every range, so that no pause varies."""

    def random(self) -> float:
        return 0.5


STEADY = Steady()


def table(partitions: int = 4) -> RoutingTable:
    """Makes a table with even partitions at ``a`` and odd ones at ``b``, all at epoch 1."""
    return RoutingTable("Op", 1, [Route("ab"[p % 2], "ab"[p % 2], 1) for p in range(partitions)])


def session(partitions: list[int], timeout_s: float = 10.0, random: Random = STEADY) -> BatchSession:
    return BatchSession(table(), partitions, timeout_s, random, backoff_initial_s=0.5, backoff_max_s=2.0)


def moved(owner: str, epoch: int) -> Moved:
    return Moved("it went", owner=owner, address=owner, epoch=str(epoch))


def sends(instructions: list[object]) -> dict[str, tuple[tuple[int, int], ...]]:
    return {each.address: each.parts for each in instructions if isinstance(each, Send)}


def down(s: BatchSession, address: str, parts: list[int], now: float) -> None:
    """Breaks the stream to a replica."""
    for partition in parts:
        if s.awaits(partition, address):
            s.refused(partition, DOWN, now)


def test_one_send_per_replica_with_the_epochs_believed() -> None:
    s = session([0, 1, 2, 3])
    assert sends(s.poll(0.0)) == {"a": ((0, 1), (2, 1)), "b": ((1, 1), (3, 1))}
    assert not s.done
    assert s.poll(1.0) == [], "all are outstanding"


def test_outputs_come_together() -> None:
    s = session([0, 1])
    s.poll(0.0)
    s.answered(0, b"zero", False)
    assert not s.done
    s.answered(1, b"one", True)
    assert s.done
    assert s.result() == {0: b"zero", 1: b"one"}
    assert s.replayed == 1


def test_what_a_delivery_took_is_what_the_busiest_replica_took() -> None:
    s = session([0, 1, 2, 3])
    s.poll(0.0)
    for partition, took in enumerate([(5, 5), (0, 30), (10, 15), (3, 1)]):
        s.answered(partition, b"", False, *took)
    assert s.delivery() == Delivery(dict.fromkeys(range(4), b""), 0, 15, 20), "a: 15 + 20, b: 3 + 31"
    assert session([]).delivery() == Delivery({}, 0, 0, 0)


def test_a_partition_that_moved_counts_where_it_was_answered() -> None:
    s = session([0, 1])
    s.poll(0.0)
    s.answered(1, b"", True)
    s.refused(0, moved("c", 2), 0.0)
    s.poll(0.0)
    s.answered(0, b"", False, 7, 8)
    s.answered(0, b"", False, 70, 80)
    assert s.delivery() == Delivery({0: b"", 1: b""}, 1, 7, 8)


def test_no_partitions_no_work() -> None:
    s = session([])
    assert s.done
    assert s.poll(0.0) == []
    assert s.result() == {}


# -- redirects ----------------------------------------------------------------------------------------------


def test_a_redirect_is_followed_at_once() -> None:
    s = session([0])
    s.poll(0.0)
    s.refused(0, moved("c", 2), 0.0)
    assert sends(s.poll(0.0)) == {"c": ((0, 2),)}
    assert s.table.routes[0] == Route("c", "c", 2)


def test_redirects_in_a_circle_back_off_and_end() -> None:
    s = session([0], timeout_s=5.0)
    now, sent = 0.0, 0
    while not s.done and sent < 100:
        for instruction in s.poll(now):
            match instruction:
                case Send(address):
                    sent += 1
                    s.refused(0, moved("ca"["ca".index(address) ^ 1], 2), now)
                case Refresh():
                    s.refreshed(table())
                case Wait(seconds):
                    now += seconds
    with pytest.raises(Unavailable, match="no owner answered"):
        s.result()
    assert sent < 12


def test_an_old_redirect_does_not_undo_a_newer_one() -> None:
    s = session([0])
    s.poll(0.0)
    s.refused(0, moved("c", 5), 0.0)
    s.poll(0.0)
    s.refused(0, moved("b", 3), 0.0)
    assert s.table.routes[0] == Route("c", "c", 5)


def test_a_redirect_that_tells_of_nothing_newer_has_the_controller_asked() -> None:
    s = session([0])
    s.table.update(0, Route("c", "c", 5))
    s.poll(0.0)
    s.refused(0, moved("b", 3), 0.0)
    assert s.poll(0.0) == [Refresh()]
    s.refreshed(s.table)
    assert s.poll(0.0) == [Wait(0.5)], "and c is not asked again and again"


def test_a_redirect_that_another_batch_followed_already_is_followed_at_once() -> None:
    s = session([0])
    s.poll(0.0)
    s.table.update(0, Route("c", "c", 5))
    s.refused(0, moved("b", 3), 0.0)
    assert sends(s.poll(0.0)) == {"c": ((0, 5),)}


# -- refusals -----------------------------------------------------------------------------------------------


def test_a_refusal_asks_for_the_table_and_backs_off() -> None:
    s = session([0])
    s.poll(0.0)
    s.refused(0, NOT_OWNER, 0.0)
    assert s.poll(0.0) == [Refresh()]
    s.refreshed(s.table)
    assert s.poll(0.0) == [Wait(0.5)]
    assert s.poll(0.4) == [Wait(pytest.approx(0.1))]
    assert set(sends(s.poll(0.5))) == {"a"}


def test_a_new_owner_is_asked_at_once_however_long_the_former_one_was_waited_for() -> None:
    s = session([0, 1], timeout_s=math.inf)
    now = 0.0
    for _ in range(3):
        s.poll(now)
        s.refused(0, NOT_OWNER, now)
        s.refused(1, NOT_OWNER, now)
        s.refreshed(s.table)
        now += 2.0
    s.poll(now)
    s.refused(0, NOT_OWNER, now)
    s.refused(1, NOT_OWNER, now)
    s.refreshed(RoutingTable("Op", 2, [Route("c", "c", 2), *s.table.routes[1:]]))
    sent, wait = s.poll(now)
    assert sends([sent]) == {"c": ((0, 2),)}
    assert wait == Wait(2.0), "the other one has its former owner, and waits"


def test_back_off_doubles_up_to_its_bound() -> None:
    s = session([0], timeout_s=math.inf)
    now, waits = 0.0, []
    for _ in range(6):
        s.poll(now)
        s.refused(0, NOT_OWNER, now)
        s.refreshed(s.table)
        (wait,) = s.poll(now)
        assert isinstance(wait, Wait)
        waits.append(wait.seconds)
        now += wait.seconds
    assert waits == [0.5, 1.0, 2.0, 2.0, 2.0, 2.0]


def pauses(random: Random, times: int) -> list[float]:
    """Returns the pauses of a partition whose owner refuses it again and again."""
    s = session([0], timeout_s=math.inf, random=random)
    now, waits = 0.0, []
    for _ in range(times):
        s.poll(now)
        s.refused(0, NOT_OWNER, now)
        s.refreshed(s.table)
        (wait,) = s.poll(now)
        assert isinstance(wait, Wait)
        waits.append(wait.seconds)
        now = s._waiting[0]
    return waits


@settings(max_examples=sized(400), deadline=None)
@given(st.integers())
def test_pauses_vary_by_a_quarter_and_are_the_same_under_one_seed(seed: int) -> None:
    found = pauses(Random(seed), 6)
    for wait, steady in zip(found, pauses(STEADY, 6), strict=True):
        assert wait == pytest.approx(steady, rel=0.2501)
    assert found == pauses(Random(seed), 6)
    assert len({round(each, 9) for each in found[2:]}) > 1, "also at the bound"


def test_a_fleet_does_not_send_again_in_step() -> None:
    """A thousand clients that lost one replica at the same moment do not come back to it at the same moment."""
    after = Counter(int(pauses(Random(number), 1)[0] * 100) for number in range(1000))
    assert min(after) >= 37
    assert max(after) <= 62
    assert max(after.values()) < 100, "a tenth of them in a hundredth of a second, at most"


def test_partitions_of_one_owner_are_sent_again_together() -> None:
    s = session([0, 2], random=Random(1))
    s.poll(0.0)
    down(s, "a", [0, 2], 0.0)
    s.refreshed(s.table)
    (wait,) = s.poll(0.0)
    assert isinstance(wait, Wait)
    assert wait.seconds != 0.5
    assert sends(s.poll(wait.seconds)) == {"a": ((0, 1), (2, 1))}


def test_a_controller_that_is_down_does_not_stop_the_batch() -> None:
    s = session([0])
    s.poll(0.0)
    s.refused(0, NOT_OWNER, 0.0)
    s.not_refreshed(DOWN)
    assert sends(s.poll(1.0)) == {"a": ((0, 1),)}
    s.answered(0, b"", False)
    assert s.result() == {0: b""}


def test_a_controller_that_refuses_ends_the_batch() -> None:
    s = session([0])
    s.poll(0.0)
    s.refused(0, NOT_OWNER, 0.0)
    s.not_refreshed(FATAL)
    assert s.done
    with pytest.raises(OperatorFailed):
        s.result()


def test_while_some_are_sent_others_that_wait_are_not_forgotten() -> None:
    """A partition that is held at its new owner does not delay the retry of another one."""
    s = session([0, 1])
    s.poll(0.0)
    s.refused(0, NOT_OWNER, 0.0)
    s.refreshed(s.table)
    s.refused(1, moved("c", 2), 0.0)
    said = s.poll(0.0)
    assert sends(said) == {"c": ((1, 2),)}
    assert said[-1] == Wait(0.5)


# -- silence ------------------------------------------------------------------------------------------------


def test_a_broken_stream_concerns_only_those_without_an_answer() -> None:
    s = session([0, 2, 1])
    s.poll(0.0)
    s.answered(0, b"x", False)
    down(s, "a", [0, 2], 0.0)
    assert s.poll(0.0) == [Refresh()]
    s.refreshed(s.table)
    s.answered(1, b"y", False)
    assert s.poll(0.0) == [Wait(0.5)]
    assert sends(s.poll(0.5)) == {"a": ((2, 1),)}
    s.answered(2, b"z", False)
    assert s.result() == {0: b"x", 1: b"y", 2: b"z"}


def test_the_end_of_an_old_stream_does_not_concern_the_new_owner() -> None:
    s = session([0])
    s.poll(0.0)
    s.refused(0, moved("c", 2), 0.0)
    s.poll(0.0)
    down(s, "a", [0], 0.0)
    assert s.poll(0.0) == [], "still outstanding at c"
    s.answered(0, b"x", False)
    assert s.result() == {0: b"x"}


def test_an_answer_that_comes_twice_counts_once() -> None:
    s = session([0, 1])
    s.poll(0.0)
    s.answered(0, b"first", False)
    s.answered(0, b"second", True)
    s.refused(0, FATAL, 0.0)
    s.answered(1, b"", False)
    assert s.result() == {0: b"first", 1: b""}
    assert s.replayed == 0


def test_time_out() -> None:
    s = session([0], timeout_s=3.0)
    now, tries = 0.0, 0
    while not s.done:
        for instruction in s.poll(now):
            match instruction:
                case Send():
                    tries += 1
                    down(s, "a", [0], now)
                case Refresh():
                    s.not_refreshed(DOWN)
                case Wait(seconds):
                    now += seconds
    with pytest.raises(Unavailable) as caught:
        s.result()
    assert 3.0 < now <= 3.0 + 2.0
    assert tries >= 4
    assert "last error: no answer" in caught.value.what
    assert str(caught.value.where["partition"]) == "Op/0"
    assert caught.value.where["owner"] == "a"


def test_a_timeout_of_zero_fails_at_the_second_try() -> None:
    s = session([0], timeout_s=0.0)
    s.poll(0.0)
    down(s, "a", [0], 0.0)
    s.refreshed(s.table)
    assert not s.done
    s.poll(1.0)
    down(s, "a", [0], 1.0)
    assert s.done


# -- errors -------------------------------------------------------------------------------------------------


def test_an_error_waits_for_what_is_outstanding() -> None:
    s = session([0, 1, 2])
    s.poll(0.0)
    s.refused(0, FATAL, 0.0)
    assert not s.done
    assert s.poll(0.0) == [], "nothing more is sent"
    s.refused(1, NOT_OWNER, 0.0)
    assert s.poll(5.0) == []
    assert not s.done
    s.answered(2, b"x", False)
    assert s.done
    with pytest.raises(OperatorFailed) as caught:
        s.result()
    assert caught.value is FATAL
    assert s.outputs == {2: b"x"}


def test_the_first_error_is_the_one_that_is_raised() -> None:
    s = session([0, 1])
    s.poll(0.0)
    s.refused(1, FATAL, 0.0)
    s.refused(0, StateflowError("later"), 0.0)
    with pytest.raises(OperatorFailed):
        s.result()


def test_why_nobody_serves_a_partition_is_what_the_batch_fails_with() -> None:
    """A batch fails with the reason that the controller knows.

    A replica can only say that the partition is not there.
    """
    s = session([0], timeout_s=10.0)
    why = StateMissing("a came without it", remedy="start a with the directory that has it")
    for now in (0.0, 4.0, 8.0, 12.0):
        s.poll(now)
        s.refused(0, NOT_OWNER, now)
        s.refreshed(RoutingTable("Op", 1, s.table.routes, {0: why}))
    with pytest.raises(StateMissing, match=r"a came without it \(waited_s=1\d\): start a with") as caught:
        s.result()
    assert caught.value is why


# -- the table ----------------------------------------------------------------------------------------------


def test_table_of() -> None:
    infos = [ReplicaInfo("a", "s", "a:1"), ReplicaInfo("b", "s", "b:1")]
    assert table_of("Op", 7, infos, [3, 1]) == RoutingTable("Op", 7, [Route("a", "a:1", 3), Route("b", "b:1", 1)])
    with pytest.raises(ValueError, match="zip"):
        table_of("Op", 7, infos, [3])


def test_addresses_are_translated_wherever_owners_are_named() -> None:
    """Addresses are translated, whether the controller names the owner or a replica that has given a partition away."""
    infos = [ReplicaInfo("a", "s", "a:1"), ReplicaInfo("b", "s", "b:1")]
    here = table_of("Op", 1, infos, [1, 1], addresses={"a:1": "nat:7", "c:1": "nat:9"})
    assert here.routes == [Route("a", "nat:7", 1), Route("b", "b:1", 1)]
    s = BatchSession(here, [0, 1], 10.0, STEADY)
    assert set(sends(s.poll(0.0))) == {"nat:7", "b:1"}
    s.refused(1, Moved("it went", owner="c", address="c:1", epoch="2"), 0.1)
    assert sends(s.poll(0.1)) == {"nat:9": ((1, 2),)}
    s.refreshed(table_of("Op", 2, [infos[0], ReplicaInfo("c", "s", "c:1")], [1, 2], addresses=here.addresses))
    assert s.table.routes[1] == Route("c", "nat:9", 2), "the same route: nothing to send again"


def test_a_restarted_owner_may_have_another_address() -> None:
    mine = table(1)
    mine.merge(RoutingTable("Op", 1, [Route("a", "a:2", 1)]))
    assert mine.routes[0].address == "a:2"
    mine.update(0, Route("a", "a:3", 1))
    assert mine.routes[0].address == "a:2", "a redirect of the same epoch says nothing new"


routes = st.builds(Route, st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(1, 5))


@given(
    st.lists(
        st.tuples(st.just("merge"), st.lists(routes, min_size=2, max_size=2), st.integers(0, 5))
        | st.tuples(st.just("update"), st.integers(0, 1), routes),
        max_size=20,
    )
)
def test_the_table_never_goes_back(steps: list[tuple[str, object, object]]) -> None:
    mine = table(2)
    for kind, one, two in steps:
        epochs, version = [route.epoch for route in mine.routes], mine.version
        if kind == "merge":
            mine.merge(RoutingTable("Op", two, one))  # type: ignore[arg-type]
        else:
            mine.update(one, two)  # type: ignore[arg-type]
        assert all(route.epoch >= before for route, before in zip(mine.routes, epochs, strict=True))
        assert mine.version >= version


answers = st.sampled_from(["output", "moved", "not_owner", "down", "fatal", "silent"])


@given(st.lists(st.tuples(st.integers(0, 3), answers), max_size=40), st.booleans())
@settings(max_examples=sized(800))
def test_it_always_ends_and_answers_for_every_partition(script: list[tuple[int, str]], refresh: bool) -> None:
    """A batch ends after any answers in any order, once everything works: with all outputs, or with one error."""
    s = session([0, 1, 2, 3], timeout_s=1e9)
    now = 0.0
    streams: list[Send] = []
    fatal = False
    steps = iter(script)
    for _ in range(400):
        for instruction in s.poll(now):
            match instruction:
                case Send():
                    streams.append(instruction)
                case Refresh():
                    s.refreshed(table()) if refresh else s.not_refreshed(DOWN)
                case Wait(seconds):
                    assert seconds > 0
                    now += seconds
        if s.done:
            break
        outstanding = [(send, p) for send in streams for p, _ in send.parts]
        if not outstanding:
            continue
        which, what = next(steps, (0, "output"))
        send, partition = outstanding[which % len(outstanding)]
        match what:
            case "output":
                s.answered(partition, b"%d" % partition, False)
            case "moved":
                s.refused(partition, moved("d", 3), now)
            case "not_owner":
                s.refused(partition, NOT_OWNER, now)
            case "down":
                down(s, send.address, [p for p, _ in send.parts], now)
                streams.remove(send)
            case "fatal":
                fatal = fatal or partition in s._outstanding
                s.refused(partition, FATAL, now)
        if what in ("output", "moved", "not_owner", "fatal"):
            streams = [
                Send(x.address, tuple(part for part in x.parts if x is not send or part[0] != partition))
                for x in streams
            ]
            streams = [x for x in streams if x.parts]
    assert s.done
    if fatal:
        with pytest.raises(OperatorFailed):
            s.result()
    else:
        assert s.result() == {p: b"%d" % p for p in range(4)}


def test_it_says_what_it_waits_for() -> None:
    batch = session([0, 1])
    batch.poll(0.0)
    assert batch.waits(0.0) is None
    batch.refused(1, Unavailable("nobody there", remedy="r"), 1.0)
    waiting = batch.waits(4.0)
    assert waiting is not None
    assert (waiting.partitions, waiting.partition, waiting.seconds, waiting.error) == (1, 1, 3.0, "nobody there")
    batch.refreshed(table())
    batch.poll(5.0)
    batch.answered(1, b"", False)
    assert batch.waits(6.0) is None


def test_a_replica_that_says_nothing_any_more_fails_the_batch_in_the_end() -> None:
    s = session([0, 1], timeout_s=20.0)
    s.poll(0.0)
    for now in (5.0, 10.0, 15.0):
        s.heard("a", now)
        s.check_silence(now)
    assert s.check_silence(20.0) == {}
    assert not s.done
    assert s.check_silence(20.5) == {"b": 0.0}
    s.answered(0, b"", False)
    assert s.done
    with pytest.raises(Unavailable, match="b received the batch and has been silent for 20 s"):
        s.result()


def test_who_has_little_patience_waits_for_signs_of_life_all_the_same() -> None:
    s = session([0], timeout_s=0.0)
    s.poll(0.0)
    s.check_silence(14.0)
    assert not s.done, "they come every five seconds"


def refused_once_then_worked_on(until: float) -> BatchSession:
    """Makes a batch that is refused at 0.1 s, sent again at 1 s, and worked on with signs of life."""
    s = session([0])
    s.poll(0.0)
    s.refused(0, DOWN, 0.1)
    s.refreshed(table())
    assert sends(s.poll(1.0)) == {"a": ((0, 1),)}
    for now in range(2, int(until) + 1):
        s.heard("a", float(now))
        assert s.check_silence(float(now)) == {}
    return s


@pytest.mark.parametrize("error", [DOWN, moved("b", 2)])
def test_time_in_which_an_owner_works_on_a_batch_is_not_time_without_an_owner(error: StateflowError) -> None:
    """A batch failed at its second refusal if its owner had worked on it for longer than the time-out in between."""
    s = refused_once_then_worked_on(70.0)
    s.refused(0, error, 71.0)
    assert not s.done
    s.refreshed(table())
    s.poll(73.0)
    s.refused(0, DOWN, 79.0)
    assert not s.done, "1 s before and 9 s after the work"
    s.refreshed(table())
    s.poll(81.0)
    s.refused(0, DOWN, 81.0)
    assert s.done
    with pytest.raises(Unavailable, match="no owner answered for 12 s"):
        s.result()


@pytest.mark.parametrize(
    "error", [NotOwner("it did not arrive in time", partition="Op/0"), Unavailable("it is held up", partition="Op/0")]
)
def test_time_in_which_a_replica_waited_itself_is_time_without_an_owner(error: StateflowError) -> None:
    """A replica holds rows that arrive before their partition, and gives signs of life meanwhile."""
    s = refused_once_then_worked_on(30.0)
    s.refused(0, error, 31.0)
    assert s.done


def test_a_part_that_goes_to_another_owner_has_been_worked_on_as_well() -> None:
    s = refused_once_then_worked_on(70.0)
    s.table.update(0, Route("b", "b", 2))
    s.reroute(71.0)
    s.poll(71.0)
    s.refused(0, DOWN, 72.0)
    assert not s.done


def test_a_replica_that_works_and_falls_silent_fails_the_batch_all_the_same() -> None:
    s = refused_once_then_worked_on(70.0)
    assert s.check_silence(85.5) == {"a": 70.0}
    assert s.done


def test_what_is_worked_on_is_not_waited_for() -> None:
    s = refused_once_then_worked_on(1.0)
    assert s.waits(1.5) is not None, "it was sent again, and nobody has said anything"
    s.heard("a", 2.0)
    assert s.waits(2.5) is None
