"""Commands on the wire: the authority of the sender is checked before a handler begins."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import grpc.aio

from stateflow.rpc.control import command_of


def commanded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a handler, unary or streaming, that only the controller this replica obeys may call.

    Belongs inside ``unary`` or ``streaming``, which report the refusal to the caller.
    """
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
            self.node.authority.check(command_of(request))
            async for message in method(self, request, context):
                yield message

        return stream

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self.node.authority.check(command_of(request))
        return await method(self, request, context)

    return handler
