"""gRPC servers of this process."""

from __future__ import annotations

import grpc.aio

from stateflow.rpc.admission import Admission
from stateflow.rpc.layers import Understood
from stateflow.rpc.limits import CallLimits
from stateflow.rpc.wire import OPTIONS
from stateflow.security.connections import tls_files
from stateflow.settings import ServerSettings


def new_server(limits: CallLimits | None = None) -> grpc.aio.Server:
    """Creates a server that checks each call before its handler runs.

    The checks, in order: the caller's release, and whether the request can be parsed; the caller's identity, only with
    TLS, as plain text does not tell callers apart; how many of its calls are under way. Raises BadCertificate,
    InvalidArgument.

    Args:
        limits: the call limits, if the process reports them; None: new ones.
    """
    settings, files = ServerSettings(), tls_files()
    admission = [] if files is None else [Admission(files)]
    return grpc.aio.server(
        interceptors=[Understood(), *admission, limits or CallLimits(settings)],
        options=OPTIONS,
        maximum_concurrent_rpcs=settings.calls_max,
    )
