"""Layers: interceptors that wrap every handler of a server, one around the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from stateflow.errors import InvalidArgument, ReleaseMismatch
from stateflow.release import FIRST, Release, check_release, release_of
from stateflow.rpc.wire import abort

Context: TypeAlias = grpc.aio.ServicerContext
#: a handler of one request and one answer; of one request and a stream; of two streams, which writes responses itself
Unary = Callable[[Any, Context], Awaitable[Any]]
Many = Callable[[Any, Context], AsyncIterator[Any]]
Both = Callable[[AsyncIterator[Any], Context], Awaitable[Any]]


class Layer(grpc.aio.ServerInterceptor):
    """An interceptor that wraps each method's handler once, at its first call."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    @abstractmethod
    def unary(self, method: str, inner: Unary) -> Unary: ...

    @abstractmethod
    def many(self, method: str, inner: Many) -> Many: ...

    @abstractmethod
    def both(self, method: str, inner: Both) -> Both: ...

    def leaves(self, method: str) -> bool:
        """Tells whether the layer leaves this method unwrapped."""
        return False

    def read_by(self, read: Any) -> Any:
        """Returns the function that parses requests."""
        return read

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or self.leaves(details.method):  # None: there is no such method, and gRPC tells the caller
            return handler
        if details.method not in self._wrapped:
            self._wrapped[details.method] = self._wrap(handler, details.method)
        return self._wrapped[details.method]

    def _wrap(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        coded = self.read_by(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self.unary(method, handler.unary_unary), *coded)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self.many(method, handler.unary_stream), *coded)
        return grpc.stream_stream_rpc_method_handler(self.both(method, handler.stream_stream), *coded)


def _release_of(context: Context) -> Release:
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent":
            return release_of(value if isinstance(value, str) else "")
    return FIRST


class _Unreadable:
    def __init__(self, error: Exception) -> None:
        self.refusal = InvalidArgument(
            f"the request cannot be read: {error}", remedy="check who sends it, and its version"
        )


class Understood(Layer):
    """Refuses callers of a release too far away, and requests that cannot be parsed.

    Unparsable requests are refused like any other invalid one; gRPC alone would say ``unknown``, and no more. This
    layer comes first, for the others look at the contents of requests.
    """

    def read_by(self, read: Any) -> Any:
        if read is None:  # the method takes raw bytes
            return None

        def reading(data: bytes) -> Any:
            try:
                return read(data)
            except DecodeError as error:
                return _Unreadable(error)

        return reading

    def unary(self, method: str, inner: Unary) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            await _understand(request, context)
            return await inner(request, context)

        return call

    def many(self, method: str, inner: Many) -> Many:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            await _understand(request, context)
            async for message in inner(request, context):
                yield message

        return call

    def both(self, method: str, inner: Both) -> Both:
        async def call(requests: AsyncIterator[Any], context: Context) -> None:
            await _understand(None, context)
            refusal: InvalidArgument | None = None

            async def readable() -> AsyncIterator[Any]:
                nonlocal refusal
                async for request in requests:
                    if type(request) is _Unreadable:
                        refusal = request.refusal
                        raise refusal
                    yield request

            try:
                await inner(readable(), context)
            except InvalidArgument as error:
                if error is not refusal:
                    raise
                await abort(context, error)

        return call


async def _understand(request: Any, context: Context) -> None:
    """Ends the call if the release is too far away or the request is unparsable."""
    try:
        check_release(_release_of(context))
    except ReleaseMismatch as error:
        await abort(context, error)
    if type(request) is _Unreadable:
        await abort(context, request.refusal)
