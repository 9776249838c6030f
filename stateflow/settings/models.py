"""The models: one for each section of the file, or for the part of it that one process has alone.

An empty string means not set: the description says what holds then. Descriptions are the texts of docs/settings.md and
of ``--print-config``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from stateflow.errors import InvalidArgument
from stateflow.settings.base import NO_TOKEN, Flag, Settings


def _of(prefix: str) -> SettingsConfigDict:
    """Returns the configuration of a model.

    Args:
        prefix: prefix of its variables. An empty variable counts as not set.
    """
    return SettingsConfigDict(env_prefix=prefix, env_ignore_empty=True, frozen=True, populate_by_name=True)


class ConnectionSettings(Settings):
    """Settings of every process and client; Spark executors take them from their environment. They are paths of files,
    and at most one secret, which is never shown."""

    section: ClassVar[str] = "connection"
    model_config = _of("STATEFLOW_")

    controller: Annotated[str, Flag("--controller")] = Field(
        default="",
        description="host:port of the controller, or a:7070,b:7070; empty: that of a program whose cluster runs in this"
        " directory, else 127.0.0.1:7070",
    )
    tls_ca: str = Field(default="", description="PEM: the authorities whose certificates are taken")
    tls_cert: str = Field(default="", description="PEM: this process's certificate")
    tls_key: str = Field(default="", description="PEM: its key, which nobody else can read")
    tls_crl: str = Field(default="", description="PEM: certificates that were revoked; servers read it")
    token: SecretStr = Field(default=NO_TOKEN, description="of a client: in place of the three files")
    token_file: str = Field(default="", description="a file with it, which nobody else can read")
    insecure: Annotated[bool, Flag("--insecure")] = Field(default=False, description="plain text may go over a network")
    http_proxy: bool = Field(
        default=False,
        description="members are reached through the proxy that http_proxy or https_proxy of the environment names, but"
        " for those of no_proxy; else directly",
    )

    def model_post_init(self, _: Any) -> None:
        """Checks that the settings fit together. Raises InvalidArgument."""
        who = {"token": self.token.get_secret_value(), "token_file": self.token_file, "tls_cert": self.tls_cert}
        said = [self.said_as(name) for name, value in who.items() if value]
        if len(said) > 1:
            raise InvalidArgument(
                f"it is said twice who this is: {' and '.join(said)} are set", remedy="leave one of them out"
            )
        if self.by_token:
            return  # a token holds its authority's certificate, and revocation lists are for servers
        given = {
            "STATEFLOW_TLS_CA": self.tls_ca,
            "STATEFLOW_TLS_CERT": self.tls_cert,
            "STATEFLOW_TLS_KEY": self.tls_key,
        }
        missing = [name for name, value in given.items() if not value]
        if missing and (len(missing) < len(given) or self.tls_crl):
            raise InvalidArgument(
                f"TLS is set up in part: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
                remedy=f"set {', '.join(given)}, or none of them",
            )

    @property
    def by_token(self) -> bool:
        return bool(self.token.get_secret_value() or self.token_file)

    @property
    def tls(self) -> bool:
        return bool(self.tls_cert) or self.by_token


class ServerSettings(Settings):
    """Limits of every process that others call."""

    section: ClassVar[str] = "server"
    model_config = _of("STATEFLOW_SERVER_")

    calls_max: int = Field(default=4096, ge=16, description="under way at a time, streams included, of all callers")
    calls_per_caller_max: int = Field(
        default=1024, ge=4, description="… of one: a certificate's name; in plain text a host"
    )


class LogSettings(Settings):
    """Logs of every process of a cluster."""

    section: ClassVar[str] = "log"
    model_config = _of("STATEFLOW_LOG_")

    format: Literal["text", "json"] = Field(
        default="text", description="text, or json: one object a line, for collectors"
    )
    verbose: Annotated[bool, Flag("--verbose")] = Field(
        default=False, description="what is of use in looking for errors, too"
    )


class LedgerSettings(Settings):
    """The ledger of controllers, and of the commands that read one."""

    section: ClassVar[str] = "ledger"
    model_config = _of("STATEFLOW_LEDGER_")

    url: Annotated[str, Flag("--ledger")] = Field(
        default="",
        validation_alias="STATEFLOW_LEDGER",
        description="SQLAlchemy URL, or @FILE that holds it; empty: a file of this user's",
    )


class CheckpointSettings(Settings):
    """The checkpoint store of replicas, agents, and the commands that read checkpoints."""

    section: ClassVar[str] = "checkpoint"
    model_config = _of("STATEFLOW_CHECKPOINT_")

    store: Annotated[str, Flag("--checkpoints")] = Field(
        default="",
        validation_alias="STATEFLOW_CHECKPOINTS",
        description="directory or fsspec URL, or @FILE that holds it; empty: there are no checkpoints",
    )
    key: SecretStr = Field(
        default=NO_TOKEN, description="64 hexadecimal digits: they are encrypted with it; empty: they are not"
    )


class CodeSettings(Settings):
    """The key that controllers share with the clients that deploy operators."""

    section: ClassVar[str] = "code"
    model_config = _of("STATEFLOW_CODE_")

    key: SecretStr = Field(
        default=NO_TOKEN,
        description="controllers take the code of operators from who has the same; empty: from the same user",
    )


class CheckedSettings(Settings):
    """Settings of a process that can check its invariants as it runs."""

    debug_validate: bool = Field(
        default=False,
        validation_alias="STATEFLOW_DEBUG_VALIDATE",
        description="what always holds is looked at after each change, see `stateflow.validating`; slow",
    )


class ControllerProcess(Settings):
    """Addresses of a controller, and whether it coordinates jobs."""

    section: ClassVar[str] = "controller"
    model_config = _of("STATEFLOW_CONTROLLER_")

    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:7070", min_length=1, description="host:port; port 0 takes a free one"
    )
    advertise: Annotated[str, Flag("--advertise")] = Field(
        default="", description="host:port that others reach it at; empty: where it listens"
    )
    metrics: Annotated[str, Flag("--metrics")] = Field(
        default="", description="host:port of /metrics for Prometheus; empty: nowhere"
    )
    dashboard: Annotated[str, Flag("--dashboard")] = Field(
        default="", description="host:port of the live page, on this machine; empty: nowhere"
    )
    jobs: Annotated[bool, Flag("--jobs")] = Field(
        default=True, description="it coordinates jobs; false: they wait for another"
    )


class DashboardProcess(Settings):
    """Addresses and certificate of a live page that has a process of its own."""

    section: ClassVar[str] = "dashboard"
    model_config = _of("STATEFLOW_DASHBOARD_")

    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:7071", min_length=1, description="host:port of the page; port 0 takes a free one"
    )
    cert: Annotated[str, Flag("--cert")] = Field(default="", description="PEM: a certificate that browsers take")
    key: Annotated[str, Flag("--key")] = Field(default="", description="PEM: its key")


class ControllerSettings(CheckedSettings):
    """Intervals, limits and policies of a controller."""

    section: ClassVar[str] = "controller"
    model_config = _of("STATEFLOW_CONTROLLER_")

    heartbeat_interval_s: float = Field(
        default=1.0, gt=0, description="replicas are expected to tell of themselves so often"
    )
    heartbeats_missed_max: int = Field(default=5, ge=1, description="one that misses so many is taken for silent")
    rpc_timeout_s: float = Field(
        default=10.0, gt=0, description="a replica that does not answer for so long is asked again"
    )
    retry_interval_s: float = Field(default=0.25, gt=0, description="what failed is tried again after so long")
    name: str = Field(default="", description="by which it is known; empty: its address")
    site: Annotated[str, Flag("--site")] = Field(
        default="", description="where it is: jobs may want to be coordinated there"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description='to be chosen by; {"jobs": "no"}: it coordinates no jobs'
    )
    concurrent_moves: int = Field(default=4, ge=1, description="partitions that move at a time")
    moves_per_node: int = Field(default=0, ge=0, description="… of them with one node as source or target; 0: no limit")
    moves_per_link: int = Field(default=0, ge=0, description="… of them between two sites; 0: no limit")
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
    verify_interval_s: float = Field(
        default=604_800.0,
        ge=0,
        description="so often every partition is read whole, and compared with its standby; 0: never",
    )
    takeover_retry_s: float = Field(
        default=5.0, gt=0, description="a take-over that failed is tried again after so long"
    )
    auto_rebalance: Annotated[bool, Flag("--auto-rebalance")] = Field(
        default=False, description="a replica that joins is given its share by itself"
    )
    auto_rebalance_after_s: float = Field(
        default=5.0, ge=0, description="when it has been there for so long, and nothing has moved meanwhile"
    )
    spawn_worker_bytes: int = Field(
        default=256 << 20, ge=0, description="memory that a worker is taken to need at an agent where nothing was said"
    )
    spawn_disk_bytes: int = Field(default=1 << 30, ge=0, description="disk that a new replica is to find free")
    restore_patience_s: float = Field(
        default=60.0, gt=0, description="a restore waits so long for a target that went away when the owner had stopped"
    )


class ReplicaProcess(Settings):
    """Place, addresses and size of a replica."""

    section: ClassVar[str] = "replica"
    model_config = _of("STATEFLOW_REPLICA_")

    site: Annotated[str, Flag("--site")] = Field(default="", description="the place it is at; it must be said")
    data_dir: Annotated[str, Flag("--data-dir")] = Field(
        default="", description="its state; one replica, one directory; it must be said"
    )
    name: Annotated[str, Flag("--name")] = Field(
        default="", description="to be kept over restarts; empty: the site and the name of this host"
    )
    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:0", min_length=1, description="host:port; port 0 takes a free one"
    )
    advertise: Annotated[str, Flag("--advertise")] = Field(
        default="", description="host:port that others reach it at; empty: where it listens"
    )
    weight: Annotated[int, Flag("--weight")] = Field(
        default=1, ge=1, description="its share of partitions relative to others, for each of its workers"
    )
    workers: Annotated[int, Flag("--workers")] = Field(
        default=1, ge=1, le=256, description="processes: each has some of its partitions, and a core"
    )
    checkpoint_cache: Annotated[str, Flag("--checkpoint-cache")] = Field(
        default="", description="directory for a copy near by, shared by this machine's replicas; empty: none"
    )
    metrics: Annotated[str, Flag("--metrics")] = Field(
        default="",
        description="host:port of /metrics for Prometheus; with workers the first of their ports; empty: nowhere",
    )


class ReplicaSettings(CheckedSettings):
    """Caches, intervals, limits and timeouts of a replica."""

    section: ClassVar[str] = "replica"
    model_config = _of("STATEFLOW_REPLICA_")

    block_cache_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="of blocks of files that RocksDB keeps in memory, of all partitions together",
    )
    write_buffer_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="of what RocksDB has not written into files yet, of all partitions together",
    )
    cached_keys: int = Field(default=262_144, ge=1, description="hot keys kept decoded, per partition")
    cache_bytes: int = Field(default=1 << 30, ge=0, description="decoded state of all partitions together, about")
    value_bytes_max: int = Field(default=64 << 20, ge=1, description="an encoded value, entry or element")
    checkpoint_interval_s: Annotated[float, Flag("--checkpoint-interval")] = Field(
        default=60.0, ge=0, description="between periodic checkpoints; 0 switches them off"
    )
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
    checkpoint_compression: str = Field(
        default="none", pattern="^(none|zstd)$", description="of their files: none or zstd"
    )
    checkpoint_timeout_s: float = Field(default=60.0, gt=0, description="a store silent for so long has failed")
    checkpoint_cache_bytes: int = Field(default=8 << 30, ge=1, description="of the site's cache, where there is one")
    verify_bytes_per_s: int = Field(
        default=32 << 20, ge=0, description="of state that `stateflow verify` reads here; 0: no limit"
    )
    heartbeat_interval_s: float = Field(
        default=1.0, gt=0, description="it tells the controller so often how it is, and what it has"
    )
    batch_timeout_s: float = Field(
        default=300.0, ge=0, description="an operator that is longer at one partition's batch is interrupted; 0: never"
    )
    stop_timeout_s: float = Field(default=10.0, gt=0, description="the process ends so long after SIGTERM at most")
    acknowledge: str = Field(
        default="wal",
        pattern="^(wal|fsync|standby)$",
        description="a batch is answered when it is in the log (wal: survives SIGKILL), on disk (fsync: survives loss"
        " of power), or on a standby's, too (standby)",
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
    chunk_bytes: int = Field(default=1 << 20, ge=4096, le=3 << 20, description="of one message of a transfer")
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
    room_bytes: int = Field(
        default=0, ge=0, description="files of partitions may take so much, of each worker's; 0: what the disk has"
    )


class AgentProcess(Settings):
    """Place, addresses and resources of an agent. Its replicas have the agent's file and environment; the agent tells
    them their names and addresses."""

    section: ClassVar[str] = "agent"
    model_config = _of("STATEFLOW_AGENT_")

    site: Annotated[str, Flag("--site")] = Field(default="", description="the place it is at; it must be said")
    data_dir: Annotated[str, Flag("--data-dir")] = Field(
        default="", description="its own and its replicas'; one agent, one directory; it must be said"
    )
    name: Annotated[str, Flag("--name")] = Field(
        default="", description="to be kept over restarts; empty: the site and the name of this host"
    )
    labels: Annotated[dict[str, str], Flag("--label")] = Field(default_factory=dict, description="to be chosen by")
    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:0",
        min_length=1,
        description="host:port; port 0 takes a free one. Its replicas listen at ports of this host",
    )
    advertise: Annotated[str, Flag("--advertise")] = Field(
        default="", description="host that others reach it and its replicas at; empty: that of listen"
    )
    metrics: Annotated[str, Flag("--metrics")] = Field(
        default="",
        description="host:port of /metrics and /sd; replicas have other ports of this host; empty: nowhere",
    )
    cores: Annotated[int, Flag("--cores")] = Field(
        default=0, ge=0, description="that replicas may have; 0: all of the machine"
    )
    memory: Annotated[str, Flag("--memory")] = Field(
        default="", description="that replicas may have, e.g. 4GiB; empty: all of the machine"
    )


class ClientSettings(Settings):
    """Settings of clients that call a controller: commands, programs, Spark."""

    section: ClassVar[str] = "client"
    model_config = _of("STATEFLOW_CLIENT_")

    connect_timeout_s: float = Field(
        default=5.0, ge=0, description="a controller that nobody listens at, or that does not lead, is waited for"
    )


class EmbeddedSettings(Settings):
    """The cluster of a program that names none."""

    section: ClassVar[str] = "embedded"
    model_config = _of("STATEFLOW_EMBEDDED_")

    directory: str = Field(default="stateflow-data", min_length=1, description="what it knows and has")
    replicas: int = Field(default=0, ge=0, le=64, description="when it is made; 0: one for each core")


class RouterSettings(Settings):
    """Settings of clients that send rows: stream clients and tasks of Spark."""

    section: ClassVar[str] = "router"
    model_config = _of("STATEFLOW_ROUTER_")

    unavailable_timeout_s: float = Field(
        default=60.0, ge=0, description="a batch waits so long for partitions that nobody serves"
    )
    backoff_initial_s: float = Field(default=0.02, gt=0, description="before it is sent again for the first time")
    backoff_max_s: float = Field(default=0.25, gt=0, description="… and each further time, at most")
    stall_s: float = Field(default=2.0, gt=0, description="without an answer for so long, owners are asked for")
    rewind_buffer_bytes: int = Field(
        default=64 << 20,
        ge=0,
        description="acknowledged rows that a StreamClient keeps, to send them again after a loss",
    )
    chunk_bytes: int = Field(default=1 << 20, ge=4096, le=3 << 20, description="of one message of a batch")
    site: str = Field(default="", description="where the rows it sends come from; empty: it does not say")


class NatsSettings(Settings):
    """The JetStream source: the server of the demo, and the credentials of clients. These are a user and a password, a
    token, or a file; or nothing."""

    section: ClassVar[str] = "nats"
    model_config = _of("STATEFLOW_NATS_")

    url: Annotated[str, Flag("--nats")] = Field(
        default="nats://127.0.0.1:4222", min_length=1, description="of `stateflow demo --source jetstream`"
    )
    user: str = Field(default="", description="with its password")
    password: SecretStr = Field(default=NO_TOKEN, description="of the user")
    token: SecretStr = Field(default=NO_TOKEN, description="in place of both")
    creds: str = Field(default="", description="file of credentials (JWT and seed)")
