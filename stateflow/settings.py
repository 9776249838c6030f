"""Settings are frozen data, read once; every field can come from the environment as ``STATEFLOW_<NAME>``.

Units are in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_bytes`` bytes.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from stateflow.errors import InvalidArgument


class Settings(BaseSettings):
    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = f"{self.model_config['env_prefix']}{first['loc'][0]}".upper()
            raise InvalidArgument(
                f"{name} cannot be {str(first['input'])[:80]!r}: {first['msg']}",
                remedy="correct it in the environment, or leave it out for the default",
            ) from error


class ReplicaSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="STATEFLOW_REPLICA_", frozen=True)

    block_cache_bytes: int = Field(default=256 << 20, ge=1 << 20)
    write_buffer_bytes: int = Field(default=256 << 20, ge=1 << 20)
    cached_keys: int = Field(default=262_144, ge=1, description="hot keys kept decoded, per partition")
    checkpoint_interval_s: float = Field(default=60.0, ge=0, description="0 switches periodic checkpoints off")
    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    acknowledge: str = Field(default="wal", pattern="^(wal|fsync)$")
    change_log_bytes_max: int = Field(
        default=256 << 20, ge=1 << 20, description="per follower; beyond it the base is sent again"
    )
    chunk_bytes: int = Field(default=1 << 20, ge=4096, le=3 << 20)
    hold_timeout_s: float = Field(
        default=30.0, gt=0, description="how long an early request waits for a move to end here"
    )
    transfer_timeout_s: float = Field(default=60.0, gt=0, description="a move's stream silent for so long is broken")


class ControllerSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="STATEFLOW_CONTROLLER_", frozen=True)

    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    heartbeats_missed_max: int = Field(default=5, ge=1)
    rpc_timeout_s: float = Field(default=10.0, gt=0)
    retry_interval_s: float = Field(default=0.25, gt=0)
    concurrent_moves: int = Field(default=4, ge=1)


class RouterSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="STATEFLOW_ROUTER_", frozen=True)

    unavailable_timeout_s: float = Field(default=60.0, ge=0)
    backoff_initial_s: float = Field(default=0.02, gt=0)
    backoff_max_s: float = Field(default=1.0, gt=0)
    connect_timeout_s: float = Field(default=5.0, gt=0)
    chunk_bytes: int = Field(default=1 << 20, ge=4096, le=3 << 20)
