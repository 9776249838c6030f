"""A server of this process, for whatever it serves."""

from __future__ import annotations

import grpc.aio

from stateflow.rpc.admission import Admission
from stateflow.rpc.layers import Understood
from stateflow.rpc.limits import CallLimits
from stateflow.rpc.wire import OPTIONS
from stateflow.security.connections import tls_files
from stateflow.settings import ServerSettings


def new_server(limits: CallLimits | None = None) -> grpc.aio.Server:
    """Looked at, in this order: of what release a caller is, and whether what it sends can be read; who it is, where
    there is TLS, as in plain text nobody is told apart; how much of its is under way. Raises BadCertificate,
    InvalidArgument.

    Args: limits: of calls, where somebody asks how many there are.
    """
    settings, files = ServerSettings(), tls_files()
    admission = [] if files is None else [Admission(files)]
    return grpc.aio.server(
        interceptors=[Understood(), *admission, limits or CallLimits(settings)],
        options=OPTIONS,
        maximum_concurrent_rpcs=settings.calls_max,
    )
