"""Health of a process, by gRPC's own protocol (``grpc.health.v1``), which Kubernetes and others speak.

The service ``live`` is served by a process that answers; ``ready``, or no name, by one that can be given work. The two
messages have one field each, so they are written here without a further package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from stateflow.rpc.secure import blocking_channel
from stateflow.rpc.wire import CHANNEL_OPTIONS, remote_error

LIVE, READY = "live", "ready"
#: HealthCheckResponse: field 1, an enum
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
#: tag of a HealthCheckRequest: field 1, a text of at most 127 bytes
_TAG = 0x0A


def _asked(request: bytes) -> str | None:
    """Returns the name of the service; None: the request is malformed."""
    if not request:
        return ""
    if len(request) < 2 or request[0] != _TAG or request[1] != len(request) - 2:
        return None
    return request[2:].decode("utf-8", errors="replace")


def ask_health(address: str, service: str, timeout_s: float) -> bool:
    """Tells whether a process is well. Raises Unavailable where no process answers, or has no such service;
    NotAllowed."""
    asked = service.encode()
    with blocking_channel(address, CHANNEL_OPTIONS) as channel:
        try:
            answer: bytes = channel.unary_unary("/grpc.health.v1.Health/Check")(
                bytes([_TAG, len(asked)]) + asked, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise remote_error(error, address) from error
    return answer == SERVING


def add_health(server: Any, is_ready: Callable[[], bool] = lambda: True) -> None:
    async def check(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        match _asked(request):
            case "live":
                return SERVING
            case "" | "ready":
                return SERVING if is_ready() else NOT_SERVING
            case _:
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service: use live or ready")
                raise AssertionError

    method = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method}),))
