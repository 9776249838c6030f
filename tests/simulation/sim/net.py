"""A double of gRPC over a simulated network, whose links are slow and may be cut and healed.

Messages of one call keep their order in each direction, as over one connection, but different calls overtake each
other. A unary request may arrive twice. A cut link holds messages back. Some time after a cut, the client gets
``UNAVAILABLE`` and the server's work is cancelled; the two do not notice at the same time. A request that was held back
may arrive after the heal although its sender has given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from tests.simulation.sim.loop import Handle, Process, SimLoop

DUPLICATED = 0.02
LATE = 0.3  # of the requests whose sender gave up during a cut, the share that arrives after the heal
LATENCY_S = 0.004


class Link:
    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.cut = False
        self.held: list[tuple[Call, Handle]] = []


class Network:
    def __init__(self, loop: SimLoop) -> None:
        self.loop, self.random = loop, loop.random
        self.servers: dict[str, tuple[Process, dict[str, Any]]] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.calls: dict[Call, None] = {}
        self.log: Callable[[str], None] = lambda _: None

    # -- links --------------------------------------------------------------------------------------------

    def link(self, one: str, two: str) -> Link:
        key = (one, two) if one < two else (two, one)
        link = self.links.get(key)
        if link is None:
            link = self.links[key] = Link(LATENCY_S * self.random.choice((0.1, 1, 1, 5)))
        return link

    def cut(self, one: str, two: str) -> None:
        link = self.link(one, two)
        if link.cut:
            return
        link.cut = True
        for call in list(self.calls):
            if call.link is link:
                self.sever(call)

    def heal(self, one: str, two: str) -> None:
        link = self.link(one, two)
        if not link.cut:
            return
        link.cut = False
        held, link.held = link.held, []
        for call, handle in held:
            if not call.given_up or (not call.begun and self.random.random() < LATE):
                self._arrive(link, call, handle)
            else:
                self.loop.at(self.loop.now + link.latency_s, None, call.cancel_server)

    def heal_all(self) -> None:
        for one, two in list(self.links):
            self.heal(one, two)

    def sever(self, call: Call) -> None:
        """Makes each end of a call notice the cut after a random time, if the link is still cut by then."""
        patience = self.random.choice((0.3, 3.0, 15.0))
        self.loop.at(self.loop.now + self.random.random() * patience, call.client, call.lost)
        self.loop.at(self.loop.now + self.random.random() * patience, None, call.server_lost)

    def _arrive(self, link: Link, call: Call, handle: Handle) -> None:
        delay = link.latency_s * (0.5 + self.random.expovariate(1.0))
        when = call.last = [max(self.loop.now + delay, *call.last)] * 2  # messages that were held keep their order
        call.late_until = when[0]
        self.loop.at(when[0], handle.process, handle.callback, *handle.args)

    def post(self, call: Call, back: bool, process: Process | None, work: Callable[..., None], *args: Any) -> None:
        """Sends one message of a call, behind the earlier ones in its direction.

        Args:
            back: whether the message goes from the server to the client.
            process: the process in which ``work`` runs when the message arrives.
        """
        link = call.link
        when = self.loop.now + link.latency_s * (0.5 + self.random.expovariate(1.0))
        when = call.last[back] = max(when, call.last[back])
        handle = Handle(work, args, None, process)
        self.loop.at(when, None, self._deliver, link, call, handle)

    def _deliver(self, link: Link, call: Call, handle: Handle) -> None:
        if link.cut:
            link.held.append((call, handle))
        elif self.loop.now < call.late_until:  # sent before the heal; it must not overtake a held message
            self._arrive(link, call, handle)
        else:
            self.loop.ready.append(handle)

    # -- processes ----------------------------------------------------------------------------------------

    def serve(self, process: Process, methods: dict[str, Any]) -> None:
        self.servers[process.name] = process, methods

    def ended(self, process: Process) -> None:
        """Breaks the connections of a process that has ended; each peer notices after a random delay."""
        for call in list(self.calls):
            if call.client is process:
                call.given_up = True
                self.loop.at(self.loop.now + self.random.random(), None, call.cancel_server)
                del self.calls[call]
            elif call.server is process:
                delay = self.random.expovariate(1 / 0.05)
                self.loop.at(self.loop.now + delay, call.client, call.fail, grpc.StatusCode.UNAVAILABLE, "reset")

    def reachable(self, client: Process, name: str) -> bool:
        server = self.servers.get(name)
        return server is not None and server[0].alive and not self.link(client.name, name).cut

    def connect(self, address: str) -> Channel:
        assert self.loop.process is not None
        return Channel(self, self.loop.process, address)


class Call:
    """One RPC, with its client's and its server's end.

    The client awaits the call if it has one response, and otherwise iterates over it. For a stream of requests, the
    client calls ``write`` for each request.
    """

    def __init__(
        self,
        net: Network,
        client: Process,
        name: str,
        path: str,
        requests: list[bytes],
        decode: Callable[[bytes], Any],
        timeout: float | None,
        encode: Callable[[Any], bytes] = bytes,
        metadata: Any = (),
    ) -> None:
        self.net, self.client, self.name, self.path, self.decode = net, client, name, path, decode
        self.metadata, self.trailing = metadata, ()
        self.link = net.link(client.name, name)
        self.last = [0.0, 0.0]
        self.late_until = 0.0
        self.server: Process | None = None
        self.task: asyncio.Task[None] | None = None
        self.begun = self.over = self.given_up = False
        self._encode = encode
        self._came: deque[bytes] = deque()  # stream of requests, at the server
        self._more: asyncio.Future[None] | None = None
        self._got: deque[Any] = deque()
        self._end: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        net.calls[self] = None
        method = path.rpartition("/")[2]
        if self.link.cut:
            net.sever(self)
        net.post(self, False, None, self._reach, requests, False)
        if net.random.random() < DUPLICATED and method in _UNARY:
            again = Handle(self._reach, (requests, True), None, None)
            net.loop.at(net.loop.now + net.random.expovariate(1 / 0.5), None, net._deliver, self.link, self, again)
        if timeout is not None:
            net.loop.call_later(timeout, self._give_up)

    # -- server's end -------------------------------------------------------------------------------------

    def _reach(self, requests: list[bytes], duplicate: bool) -> None:
        net = self.net
        found = net.servers.get(self.name)
        if found is None or not found[0].alive:
            if not duplicate:
                net.post(self, True, self.client, self.fail, grpc.StatusCode.UNAVAILABLE, "refused")
            return
        process, methods = found
        net.log(f"{self.client.name} → {self.name} {self.path.rpartition('/')[2]}{' again' if duplicate else ''}")
        task_of = self if not duplicate else None
        if task_of is not None:
            self.begun, self.server = True, process
        loop = net.loop
        if process.stopped:
            process.backlog.append(Handle(self._begin, (process, methods, requests, task_of), None, process))
            return
        before, loop.process = loop.process, process
        self._begin(process, methods, requests, task_of)
        loop.process = before

    def _begin(self, process: Process, methods: dict[str, Any], requests: list[bytes], task_of: Call | None) -> None:
        task = self.net.loop.create_task(self._serve(methods[self.path], requests, task_of))
        if task_of is not None:
            self.task = task

    async def _serve(self, handler: Any, requests: list[bytes], call: Call | None) -> None:
        context = Context(self, call is not None)
        encode = handler.response_serializer
        status: tuple[Any, str, Any] = (grpc.StatusCode.OK, "", ())
        try:
            if handler.unary_unary is not None:
                reply = await handler.unary_unary(handler.request_deserializer(requests[0]), context)
                context.send(encode(reply))
            elif handler.unary_stream is not None:
                async for reply in handler.unary_stream(handler.request_deserializer(requests[0]), context):
                    context.send(encode(reply))
            else:
                context.encode = encode
                assert call is not None
                await handler.stream_stream(call._requests(handler.request_deserializer), context)
        except grpc.aio.AbortError:
            status = context.status
        except Exception as error:  # noqa: BLE001 - as gRPC does
            status = (grpc.StatusCode.UNKNOWN, repr(error), ())
        if call is not None:
            self.net.post(self, True, self.client, self._finished, *status)

    async def _requests(self, decode: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """Yields the requests as they arrive. The stream never ends by itself; the server's task is cancelled."""
        while True:
            while self._came:
                yield decode(self._came.popleft())
            self._more = self.net.loop.create_future()
            await self._more

    def _comes(self, message: bytes) -> None:
        self._came.append(message)
        if self.server is not None:
            self.net.loop.ready.append(Handle(self._say_more, (), None, self.server))

    def _say_more(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def cancel_server(self) -> None:
        """Cancels the server's work for this call, in the server's process."""
        if self.task is not None and self.server is not None and self.server.alive and not self.task.done():
            loop = self.net.loop
            before, loop.process = loop.process, self.server
            self.task.cancel()
            loop.process = before

    def server_lost(self) -> None:
        if self.link.cut and self.begun and not self.over:
            self.cancel_server()
            self.net.post(self, True, self.client, self.fail, grpc.StatusCode.UNAVAILABLE, "reset")

    # -- client's end -------------------------------------------------------------------------------------

    def write(self, request: Any) -> None:
        if not self.over:
            self.net.post(self, False, None, self._comes, self._encode(request))

    def arrived(self, message: bytes) -> None:
        if not self.over:
            self._got.append(message)
            self._wake()

    def _finished(self, code: Any, details: str, metadata: Any) -> None:
        if code is grpc.StatusCode.OK:
            self._close(None)
        else:
            self.fail(code, details, metadata)

    def fail(self, code: Any, details: str, metadata: Any = ()) -> None:
        self._close(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details))

    def lost(self) -> None:
        if self.link.cut and not self.over:
            self.given_up = True
            self.fail(grpc.StatusCode.UNAVAILABLE, "connection lost")

    def _give_up(self) -> None:
        if not self.over:
            self.given_up = True
            self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline")
            self.net.post(self, False, None, self.cancel_server)

    def cancel(self) -> None:
        if not self.over:
            self.given_up = True
            self._close(asyncio.CancelledError())
            self.net.post(self, False, None, self.cancel_server)

    def _close(self, error: BaseException | None) -> None:
        if not self.over:
            self.over, self._end = True, error
            self.net.calls.pop(self, None)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> Any:
        while not self._got:
            if self.over:
                if self._end is not None:
                    raise self._end
                return grpc.aio.EOF
            self._waiter = self.net.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.decode(self._got.popleft())

    async def _answer(self) -> Any:
        reply = await self.read()
        while not self.over:  # the status decides whether the call succeeded, as in gRPC
            self._waiter = self.net.loop.create_future()
            await self._waiter
        if self._end is not None:
            raise self._end
        if reply is grpc.aio.EOF:  # the response was lost: the link was cut, and healed before the status was sent
            self._end = grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "connection lost"
            )
            raise self._end
        return reply

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


class Context:
    """A double of a ServicerContext."""

    def __init__(self, call: Call, heard: bool) -> None:
        self._call, self._heard = call, heard
        self.status: tuple[Any, str, Any] = (grpc.StatusCode.UNKNOWN, "", ())
        self.encode: Callable[[Any], bytes] = bytes

    def peer(self) -> str:
        """Returns a name of the peer, another one for each call, as if each call had its own connection."""
        return f"simulated:{id(self._call)}"

    def send(self, message: bytes) -> None:
        if self._heard:
            self._call.net.post(self._call, True, self._call.client, self._call.arrived, message)

    async def write(self, message: Any) -> None:
        self.send(self.encode(message))

    def set_trailing_metadata(self, metadata: Any) -> None:
        if self._heard:
            self._call.trailing = metadata

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = (code, details, trailing_metadata)
        raise grpc.aio.AbortError


class Channel:
    def __init__(self, net: Network, client: Process, address: str) -> None:
        self._net, self._client, self._name = net, client, address.partition(":")[0]

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = ()) -> Call:
            requests = [request_serializer(request)]
            return Call(
                *(self._net, self._client, self._name, path, requests, response_deserializer, timeout),
                metadata=metadata,
            )

        return start

    unary_stream = unary_unary

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start() -> Call:
            return Call(self._net, self._client, self._name, path, [], response_deserializer, None, request_serializer)

        return start

    async def channel_ready(self) -> None:
        while not self._net.reachable(self._client, self._name):
            await asyncio.sleep(0.05 + 0.2 * self._net.random.random())

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Methods:
    """A double of a gRPC server that collects the methods which a servicer registers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


_UNARY = frozenset({"Create", "Fence", "Cancel", "Release", "Snapshot", "Inspect", "Register", "Heartbeat", "Migrate"})
