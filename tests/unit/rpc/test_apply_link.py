"""A stream that threads share: opened when wanted, given up when silent, and one call's error disturbs no other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stateflow.errors import StateflowError, Unavailable
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.apply import Link

LONG_S = 30.0


class Server:
    """A stream's other end, which takes requests in a thread, as gRPC does."""

    def __init__(self, requests: Iterator[rpb.ApplyRequest]) -> None:
        self.came: queue.SimpleQueue[rpb.ApplyRequest | None] = queue.SimpleQueue()
        self.responses: queue.SimpleQueue[rpb.ApplyResponse | None] = queue.SimpleQueue()
        self.cancelled = False
        threading.Thread(target=self._take, args=(requests,), daemon=True).start()

    def _take(self, requests: Iterator[rpb.ApplyRequest]) -> None:
        for request in requests:
            self.came.put(request)
        self.came.put(None)
        self.responses.put(None)

    def __iter__(self) -> Iterator[rpb.ApplyResponse]:
        return iter(self.responses.get, None)

    def cancel(self) -> None:
        self.cancelled = True
        self.responses.put(None)

    def take(self) -> Any:
        return self.came.get(timeout=LONG_S)

    def say(self, call: int, last: bool = True) -> None:
        self.responses.put(rpb.ApplyResponse(call=call, last=last))


class Heard:
    def __init__(self) -> None:
        self.said: queue.SimpleQueue[rpb.ApplyResponse | StateflowError] = queue.SimpleQueue()

    def came(self, response: rpb.ApplyResponse) -> None:
        self.said.put(response)

    def broke(self, error: StateflowError) -> None:
        self.said.put(error)

    def next(self) -> Any:
        return self.said.get(timeout=LONG_S)


def requests(count: int = 1) -> Iterator[rpb.ApplyRequest]:
    for number in range(count):
        yield rpb.ApplyRequest(last=number == count - 1)


class Linked:
    def __init__(self, idle_s: float = LONG_S) -> None:
        self.servers: list[Server] = []
        self.link = Link("there:1", self.begin, idle_s=idle_s)

    def begin(self, of: Iterator[rpb.ApplyRequest]) -> Server:
        self.servers.append(Server(of))
        return self.servers[-1]

    def call(self, count: int = 1) -> Heard:
        heard = Heard()
        self.link.call(requests(count), heard)
        return heard


def test_calls_are_sent_in_the_order_of_their_numbers_whichever_thread_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linked = Linked()
    linked.call()
    (server,) = linked.servers
    assert server.take().call == 1
    stream = linked.link._stream
    assert stream is not None
    begun = stream._begun

    class Interrupted:
        """A queue before whose second call another thread begins one, if nothing keeps it from doing so."""

        def put(self, item: Any) -> None:
            if item[0] == 2 and not stream._lock.locked():
                other = threading.Thread(target=linked.call)
                other.start()
                other.join(LONG_S)
            begun.put(item)

    monkeypatch.setattr(stream, "_begun", Interrupted())
    linked.call()
    monkeypatch.setattr(stream, "_begun", begun)
    linked.call()
    assert [server.take().call, server.take().call] == [2, 3]


def test_calls_share_a_stream_and_end_in_any_order() -> None:
    linked = Linked()
    first, second = linked.call(), linked.call()
    (server,) = linked.servers
    assert [server.take().call, server.take().call] == [1, 2]
    server.say(2)
    assert second.next().call == 2
    server.say(1)
    assert first.next().call == 1


def test_a_large_call_lets_others_pass() -> None:
    linked = Linked()
    endless = threading.Event()

    def large() -> Iterator[rpb.ApplyRequest]:
        yield rpb.ApplyRequest()
        while not endless.is_set():
            yield rpb.ApplyRequest()
        yield rpb.ApplyRequest(last=True)

    linked.link.call(large(), Heard())
    (server,) = linked.servers
    server.take()
    linked.call()
    while server.take().call != 2:
        pass
    endless.set()


def test_what_is_refused_is_not_sent_to_its_end() -> None:
    linked = Linked()
    sent = threading.Event()

    def waits() -> Iterator[rpb.ApplyRequest]:
        yield rpb.ApplyRequest()
        assert sent.wait(LONG_S)
        yield rpb.ApplyRequest()
        raise AssertionError("nobody wants more of it")

    heard = Heard()
    linked.link.call(waits(), heard)
    (server,) = linked.servers
    server.take()
    server.say(1)
    assert heard.next().last
    sent.set()
    other = linked.call()
    while server.take().call != 2:
        pass
    server.say(2)
    assert other.next().call == 2
    assert heard.said.empty()


def test_a_stream_that_cannot_be_opened_leaves_the_link_usable() -> None:
    linked = Linked()
    begin, linked.link._begin = linked.link._begin, lambda _: (_ for _ in ()).throw(RuntimeError("can't start"))
    assert "can't start" in str(linked.call().next())
    linked.link._begin = begin
    heard = linked.call()
    linked.servers[0].say(linked.servers[0].take().call)
    assert heard.next().last


def test_where_threads_are_too_few_the_batch_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error counted as one of the rows, and a client with an outbox put them aside as refused."""

    class Refused(threading.Thread):
        def start(self) -> None:
            if self.name.startswith("answers of"):
                raise RuntimeError("can't start new thread")
            super().start()

    linked = Linked()
    with monkeypatch.context() as few:
        few.setattr(threading, "Thread", Refused)
        error = linked.call().next()
    assert isinstance(error, Unavailable), error
    assert linked.servers[0].cancelled
    linked.call()
    assert linked.servers[1].take().call == 1


def test_rows_that_cannot_be_sent_fail_their_call_alone() -> None:
    linked = Linked()
    good, bad = linked.call(), Heard()
    linked.link.call(_failing(), bad)
    assert "ZeroDivisionError" in str(bad.next())
    linked.servers[0].say(1)
    assert good.next().last


def test_a_call_whose_rest_cannot_be_sent_ends_at_the_replica_too() -> None:
    """The replica waited for the rest as long as the stream, and counted the call as one of its batches."""

    def breaks() -> Iterator[rpb.ApplyRequest]:
        yield rpb.ApplyRequest()
        raise MemoryError

    linked, heard = Linked(), Heard()
    linked.link.call(breaks(), heard)
    assert isinstance(heard.next(), StateflowError)
    linked.call()
    assert [(each.call, each.last) for each in (linked.servers[0].take() for _ in range(3))] == [
        (1, False),
        (1, True),
        (2, True),
    ]


def _failing() -> Iterator[rpb.ApplyRequest]:
    yield rpb.ApplyRequest(call=1 // 0)


def test_the_end_of_a_stream_ends_its_calls_and_the_next_gets_another() -> None:
    linked = Linked()
    heard = linked.call()
    linked.servers[0].responses.put(None)
    assert isinstance(heard.next(), Unavailable)
    again = linked.call()
    linked.servers[1].say(1)
    assert again.next().last


def test_a_silent_stream_is_replaced_and_one_that_is_not_is_kept() -> None:
    linked = Linked()
    heard = linked.call()
    since = linked.link.heard_at
    assert since is not None
    linked.link.give_up(since - 1)
    assert not linked.servers[0].cancelled, "something came since"
    linked.link.give_up(since)
    assert linked.servers[0].cancelled
    assert isinstance(heard.next(), Unavailable)
    again = linked.call()
    linked.servers[1].say(1)
    assert again.next().last


def test_a_stream_without_calls_is_closed() -> None:
    linked = Linked(idle_s=0.01)
    heard = linked.call()
    server = linked.servers[-1]  # the first server, unless it was closed before the call came
    assert server.take().call == 1
    server.say(1)
    assert heard.next().last
    assert server.take() is None
    again = linked.call()
    linked.servers[-1].say(1)
    assert again.next().last
    assert heard.said.empty()


@pytest.mark.parametrize("call", [0, 99])
def test_what_nobody_waits_for_is_a_sign_of_life_only(call: int) -> None:
    linked = Linked()
    heard = linked.call()
    linked.servers[0].say(call)
    linked.servers[0].say(1)
    assert heard.next().call == 1
