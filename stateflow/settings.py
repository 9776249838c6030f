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
            prefix, field = self.model_config["env_prefix"], str(first["loc"][0])
            name = (field if field.startswith("STATEFLOW_") else f"{prefix}{field}").upper()
            raise InvalidArgument(
                f"{name} cannot be {str(first['input'])[:80]!r}: {first['msg']}",
                remedy="correct it in the environment, or leave it out for the default",
            ) from error


class CheckedSettings(Settings):
    """Of a process that decides something."""

    debug_validate: bool = Field(
        default=False,
        validation_alias="STATEFLOW_DEBUG_VALIDATE",
        description="what always holds is looked at after each change, see `stateflow.validating`; slow",
    )


class ReplicaSettings(CheckedSettings):
    model_config = SettingsConfigDict(env_prefix="STATEFLOW_REPLICA_", frozen=True, populate_by_name=True)

    block_cache_bytes: int = Field(default=256 << 20, ge=1 << 20)
    write_buffer_bytes: int = Field(default=256 << 20, ge=1 << 20)
    cached_keys: int = Field(default=262_144, ge=1, description="hot keys kept decoded, per partition")
    cache_bytes: int = Field(default=1 << 30, ge=0, description="decoded state of all partitions together, about")
    value_bytes_max: int = Field(default=64 << 20, ge=1, description="an encoded value, entry or element")
    checkpoint_interval_s: float = Field(default=60.0, ge=0, description="0 switches periodic checkpoints off")
    checkpoint_bytes_per_s: int = Field(default=0, ge=0, description="of periodic ones to their store; 0: no limit")
    checkpoint_digest_interval_s: float = Field(
        default=3600.0, ge=0, description="how often a partition's periodic checkpoint has a digest of its state"
    )
    checkpoint_keep: int = Field(
        default=3, ge=0, description="newest checkpoints of each partition that are kept; 0: all, until `checkpoint gc`"
    )
    checkpoint_keep_s: float = Field(default=3600.0, ge=0, description="and all that are younger")
    checkpoint_tidy_interval_s: float = Field(
        default=900.0,
        gt=0,
        description="how often older ones are dropped, and the others are looked for",
    )
    checkpoint_compression: str = Field(default="none", pattern="^(none|zstd)$")
    checkpoint_timeout_s: float = Field(default=60.0, gt=0, description="a store silent for so long has failed")
    checkpoint_cache_bytes: int = Field(default=8 << 30, ge=1, description="of the site's cache, where there is one")
    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    batch_timeout_s: float = Field(
        default=300.0, ge=0, description="an operator that is longer at one partition's batch is interrupted; 0: never"
    )
    stop_timeout_s: float = Field(default=10.0, gt=0, description="the process ends so long after SIGTERM at most")
    acknowledge: str = Field(
        default="wal", pattern="^(wal|fsync|standby)$", description="standby: only what a standby has durably, too"
    )
    commit_log_bytes_max: int = Field(
        default=128 << 20,
        ge=4096,
        description="of commits in the log that makes them durable; beyond it they wait for databases to be synced",
    )
    change_log_bytes_max: int = Field(
        default=256 << 20, ge=1 << 20, description="per follower; beyond it the base is sent again"
    )
    return_log_bytes_max: int = Field(
        default=4 << 20,
        ge=0,
        description="changes kept per partition that moved in: while they fit, a move back sends nothing else",
    )
    chunk_bytes: int = Field(default=1 << 20, ge=4096, le=3 << 20)
    waiting_bytes_max: int = Field(
        default=512 << 20,
        ge=8 << 20,
        description="of rows that are not whole yet or wait for their partition, all callers together; one has half",
    )
    hold_timeout_s: float = Field(
        default=30.0, gt=0, description="how long an early request waits for a move to end here"
    )
    transfer_timeout_s: float = Field(
        default=60.0, gt=0, description="a transfer that moves nothing for so long is broken"
    )
    resume_timeout_s: float = Field(
        default=5.0, ge=0, description="a transfer whose connection broke is tried again for so long"
    )
    source_idle_s: float = Field(
        default=7 * 86_400.0, ge=0, description="a source without a batch for so long is retired; 0: none is for that"
    )
    watermark_idle_s: float = Field(
        default=86_400.0,
        ge=0,
        description="a source silent for so long, while others send, holds no watermark back; 0: it does for good",
    )
    sources_max: int = Field(
        default=64, ge=1, description="per partition; beyond it those that were silent for longest are retired"
    )
    sources_retired_max: int = Field(default=1000, ge=1, description="per partition; of older ones nothing is kept")
    disk_reserve_bytes: int = Field(default=64 << 20, ge=0, description="a move must leave so much of the disk free")


class ControllerSettings(CheckedSettings):
    model_config = SettingsConfigDict(env_prefix="STATEFLOW_CONTROLLER_", frozen=True, populate_by_name=True)

    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    heartbeats_missed_max: int = Field(default=5, ge=1)
    rpc_timeout_s: float = Field(default=10.0, gt=0)
    retry_interval_s: float = Field(default=0.25, gt=0)
    concurrent_moves: int = Field(default=4, ge=1)
    patience_s: float = Field(default=30.0, gt=0, description="a pause budget out of reach for so long is refused")
    lease_s: float = Field(
        default=10.0, gt=0, description="a replica serves so long after it heard from the controller"
    )
    lease_margin: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="clocks may drift apart by this share of a lease; waited before a take-over",
    )
    opening_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="a replica that comes back is waited for so long while it looks what it has; 0: for its lease only",
    )
    hold_s: float = Field(
        default=10.0, gt=0, description="a controller decides for so long after it renewed its hold on the ledger"
    )
    notice_gone: bool = Field(
        default=True, description="one of this machine whose process has ended is followed at once, not after its hold"
    )
    follow_interval_s: float = Field(
        default=0.5, gt=0, description="one that does not lead reads so often what others decided, and when it is asked"
    )
    takeover_retry_s: float = Field(default=5.0, gt=0)
    auto_rebalance: bool = Field(default=False, description="a replica that joins is given its share by itself")
    auto_rebalance_after_s: float = Field(
        default=60.0, ge=0, description="when it has been there for so long, and nothing has moved meanwhile"
    )
    spawn_worker_bytes: int = Field(
        default=256 << 20, ge=0, description="memory that a worker is taken to need at an agent where nothing was said"
    )
    spawn_disk_bytes: int = Field(default=1 << 30, ge=0, description="disk that a new replica is to find free")
    restore_patience_s: float = Field(
        default=60.0, gt=0, description="a restore waits so long for a target that went away when the owner had stopped"
    )


class ClientSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="STATEFLOW_CLIENT_", frozen=True)

    connect_timeout_s: float = Field(
        default=5.0, ge=0, description="a controller that nobody listens at, or that does not lead, is waited for"
    )


class RouterSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="STATEFLOW_ROUTER_", frozen=True)

    unavailable_timeout_s: float = Field(default=60.0, ge=0)
    backoff_initial_s: float = Field(default=0.02, gt=0)
    backoff_max_s: float = Field(default=1.0, gt=0)
    stall_s: float = Field(default=2.0, gt=0, description="without an answer for so long, owners are asked for")
    rewind_buffer_bytes: int = Field(
        default=64 << 20,
        ge=0,
        description="acknowledged rows that a StreamClient keeps, to send them again after a loss",
    )
    chunk_bytes: int = Field(default=1 << 20, ge=4096, le=3 << 20)
    site: str = Field(default="", description="where the rows it sends come from; empty: it does not say")
