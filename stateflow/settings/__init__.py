"""Settings: frozen data, read once. Each setting has a key in a section of the file, and an environment variable.

Units are in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_bytes`` bytes.
"""

from __future__ import annotations

from stateflow.settings.base import CONFIG, NO_TOKEN, Settings, configured_by
from stateflow.settings.models import (
    AgentProcess,
    CheckedSettings,
    CheckpointSettings,
    ClientSettings,
    CodeSettings,
    ConnectionSettings,
    ControllerProcess,
    ControllerSettings,
    DashboardProcess,
    EmbeddedSettings,
    LedgerSettings,
    LogSettings,
    NatsSettings,
    ReplicaProcess,
    ReplicaSettings,
    RouterSettings,
    ServerSettings,
)

__all__ = [
    "CONFIG",
    "NO_TOKEN",
    "AgentProcess",
    "CheckedSettings",
    "CheckpointSettings",
    "ClientSettings",
    "CodeSettings",
    "ConnectionSettings",
    "ControllerProcess",
    "ControllerSettings",
    "DashboardProcess",
    "EmbeddedSettings",
    "LedgerSettings",
    "LogSettings",
    "NatsSettings",
    "ReplicaProcess",
    "ReplicaSettings",
    "RouterSettings",
    "ServerSettings",
    "Settings",
    "configured_by",
]
