"""The models of settings: one for each section of the file, or for the part of a section that one process reads.

An empty string means that a setting is not set; the description states the effect. Descriptions are the texts of
docs/settings.md and of ``--print-config``.
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
        prefix: prefix of the model's environment variables. An empty variable counts as not set.
    """
    return SettingsConfigDict(env_prefix=prefix, env_ignore_empty=True, frozen=True, populate_by_name=True)


class ConnectionSettings(Settings):
    """Settings with which every process and client connects. Spark executors read them from their environment. The
    token is the only secret among them, and is never displayed."""

    section: ClassVar[str] = "connection"
    model_config = _of("STATEFLOW_")

    controller: Annotated[str, Flag("--controller")] = Field(
        default="",
        description="host:port of the controller, or of several, as in a:7070,b:7070; empty: the controller that a"
        " program runs in this directory, else 127.0.0.1:7070",
    )
    tls_ca: str = Field(default="", description="PEM file of the trusted certificate authorities")
    tls_cert: str = Field(default="", description="PEM file of this process's certificate")
    tls_key: str = Field(
        default="", description="PEM file of the certificate's private key, not readable by other users"
    )
    tls_crl: str = Field(default="", description="PEM file of the revocation list, read by servers")
    token: SecretStr = Field(default=NO_TOKEN, description="token of a client, in place of CA, certificate and key")
    token_file: str = Field(default="", description="file that holds the token, not readable by other users")
    insecure: Annotated[bool, Flag("--insecure")] = Field(
        default=False, description="whether plain text may be sent over a network"
    )
    http_proxy: bool = Field(
        default=False,
        description="whether members are reached through the proxy that the environment variable http_proxy or"
        " https_proxy names, except hosts in no_proxy; false: directly",
    )

    def model_post_init(self, _: Any) -> None:
        """Checks that the settings fit together. Raises InvalidArgument."""
        who = {"token": self.token.get_secret_value(), "token_file": self.token_file, "tls_cert": self.tls_cert}
        said = [self.said_as(name) for name, value in who.items() if value]
        if len(said) > 1:
            raise InvalidArgument(
                f"more than one identity is configured: {' and '.join(said)} are set", remedy="set only one of them"
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
                f"TLS is only partly configured: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
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

    calls_max: int = Field(
        default=4096, ge=16, description="maximum number of concurrent calls of all callers, streams included"
    )
    calls_per_caller_max: int = Field(
        default=1024,
        ge=4,
        description="maximum number of concurrent calls of one caller, which is identified by the name in its"
        " certificate, or without TLS by its host",
    )
    connections_max: int = Field(
        default=4096,
        ge=16,
        description="maximum number of connections to the process's RPCs, from all hosts; each is an open file",
    )
    page_connections_max: int = Field(
        default=64,
        ge=4,
        description="maximum number of connections to each of the process's web pages, metrics and dashboard",
    )


class LogSettings(Settings):
    """Logs of every process of a cluster."""

    section: ClassVar[str] = "log"
    model_config = _of("STATEFLOW_LOG_")

    format: Literal["text", "json"] = Field(
        default="text", description="format of log lines: text, or json with one object per line, for collectors"
    )
    verbose: Annotated[bool, Flag("--verbose")] = Field(default=False, description="whether debug messages are logged")


class LedgerSettings(Settings):
    """The ledger of controllers, and of the commands that read one."""

    section: ClassVar[str] = "ledger"
    model_config = _of("STATEFLOW_LEDGER_")

    url: Annotated[str, Flag("--ledger")] = Field(
        default="",
        validation_alias="STATEFLOW_LEDGER",
        description="SQLAlchemy URL of the ledger, or @FILE that holds it; empty: a file of the current user",
    )


class CheckpointSettings(Settings):
    """The checkpoint store of replicas, agents, and the commands that read checkpoints."""

    section: ClassVar[str] = "checkpoint"
    model_config = _of("STATEFLOW_CHECKPOINT_")

    store: Annotated[str, Flag("--checkpoints")] = Field(
        default="",
        validation_alias="STATEFLOW_CHECKPOINTS",
        description="directory or fsspec URL of the checkpoint store, or @FILE that holds it; empty: no checkpoints",
    )
    key: SecretStr = Field(
        default=NO_TOKEN, description="encryption key of checkpoints, 64 hexadecimal digits; empty: no encryption"
    )


class CodeSettings(Settings):
    """The key that controllers share with the clients that deploy operators."""

    section: ClassVar[str] = "code"
    model_config = _of("STATEFLOW_CODE_")

    key: SecretStr = Field(
        default=NO_TOKEN,
        description="key that signs the code of operators; controllers refuse code that is signed with another key;"
        " empty: the current user's key file",
    )


class CheckedSettings(Settings):
    """Settings of a process that can check its invariants as it runs."""

    debug_validate: bool = Field(
        default=False,
        validation_alias="STATEFLOW_DEBUG_VALIDATE",
        description="whether invariants are checked after each change, see `stateflow.transitions`; slow",
    )


class ControllerProcess(Settings):
    """Addresses of a controller, and whether it coordinates jobs."""

    section: ClassVar[str] = "controller"
    model_config = _of("STATEFLOW_CONTROLLER_")

    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:7070", min_length=1, description="host:port to listen on; port 0: any free port"
    )
    advertise: Annotated[str, Flag("--advertise")] = Field(
        default="", description="host:port at which others reach the controller; empty: the listen address"
    )
    metrics: Annotated[str, Flag("--metrics")] = Field(
        default="", description="host:port of the page /metrics for Prometheus; empty: none"
    )
    dashboard: Annotated[str, Flag("--dashboard")] = Field(
        default="", description="host:port of the live page, on this machine; empty: none"
    )
    jobs: Annotated[bool, Flag("--jobs")] = Field(
        default=True, description="whether the controller coordinates jobs; false: jobs wait for another controller"
    )


class DashboardProcess(Settings):
    """Addresses and certificate of a live page that runs as its own process."""

    section: ClassVar[str] = "dashboard"
    model_config = _of("STATEFLOW_DASHBOARD_")

    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:7071", min_length=1, description="host:port of the page; port 0: any free port"
    )
    cert: Annotated[str, Flag("--cert")] = Field(
        default="", description="PEM file of the page's certificate, which browsers trust"
    )
    key: Annotated[str, Flag("--key")] = Field(default="", description="PEM file of the certificate's private key")


class ControllerSettings(CheckedSettings):
    """Intervals, limits and policies of a controller."""

    section: ClassVar[str] = "controller"
    model_config = _of("STATEFLOW_CONTROLLER_")

    heartbeat_interval_s: float = Field(
        default=1.0, ge=0.001, description="interval at which heartbeats of replicas are expected, in seconds"
    )
    heartbeats_missed_max: int = Field(
        default=5, ge=1, description="number of missed heartbeats after which a replica counts as silent"
    )
    rpc_timeout_s: float = Field(
        default=10.0, gt=0, description="timeout of a call to a replica, after which it is repeated, in seconds"
    )
    retry_interval_s: float = Field(default=0.25, gt=0, description="delay before a failed step is retried, in seconds")
    name: str = Field(default="", description="name of the controller; empty: its address")
    site: Annotated[str, Flag("--site")] = Field(
        default="", description="site of the controller, for jobs that ask for a controller at a site"
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="labels of the controller, for jobs that ask for a controller with a label; with"
        ' {"jobs": "no"} it coordinates no jobs',
    )
    concurrent_moves: int = Field(default=4, ge=1, description="maximum number of partitions that move at a time")
    moves_per_node: int = Field(
        default=0,
        ge=0,
        description="maximum number of concurrent moves with the same node as source or target; 0: no limit",
    )
    moves_per_link: int = Field(
        default=0, ge=0, description="maximum number of concurrent moves between the same two sites; 0: no limit"
    )
    patience_s: float = Field(
        default=30.0,
        gt=0,
        description="time for which a move may wait for a pause within its budget before it is refused, in seconds",
    )
    lease_s: float = Field(
        default=10.0,
        gt=0,
        description="lease of a replica: time for which it serves after it last heard from the controller, in seconds",
    )
    lease_margin: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="allowance for clock drift, as a share of a lease, by which a takeover waits longer than the lease",
    )
    opening_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="maximum wait for a replica that has restarted and is opening its partitions, in seconds; 0: no"
        " longer than its lease",
    )
    cold_start_wait_s: float = Field(
        default=60.0,
        ge=0,
        description="time after a cold start for which partitions of a replica that has not registered yet are not"
        " taken over from checkpoints, in seconds; 0: no longer than its lease",
    )
    hold_s: float = Field(
        default=10.0,
        gt=0,
        description="leader lease: time for which a controller leads after its last renewal in the ledger, in seconds",
    )
    notice_gone: bool = Field(
        default=True,
        description="whether to take over at once from a leader on this machine if its process has ended, without"
        " waiting for its leader lease to lapse",
    )
    follow_interval_s: float = Field(
        default=0.5,
        gt=0,
        description="interval at which a controller that does not lead reads the ledger, besides on each query, in"
        " seconds",
    )
    verify_interval_s: float = Field(
        default=604_800.0,
        ge=0,
        description="interval at which every partition is read completely and compared with its standby, in seconds;"
        " 0: never",
    )
    takeover_retry_s: float = Field(
        default=5.0, gt=0, description="delay before the first retry of a failed takeover, in seconds"
    )
    auto_rebalance: Annotated[bool, Flag("--auto-rebalance")] = Field(
        default=False, description="whether a replica that joins is given its share of partitions automatically"
    )
    auto_rebalance_after_s: float = Field(
        default=5.0,
        ge=0,
        description="time for which a replica must have been present, and no partition moved, before it is given its"
        " share, in seconds",
    )
    spawn_worker_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="memory that an agent sets aside for each worker of a replica without a memory limit, in bytes",
    )
    spawn_disk_bytes: int = Field(
        default=1 << 30, ge=0, description="free disk space that a new replica requires, in bytes"
    )
    restore_patience_s: float = Field(
        default=60.0,
        gt=0,
        description="time for which a restore waits for a target that is lost after the owner has stopped, in seconds",
    )


class ReplicaProcess(Settings):
    """Place, addresses and size of a replica."""

    section: ClassVar[str] = "replica"
    model_config = _of("STATEFLOW_REPLICA_")

    site: Annotated[str, Flag("--site")] = Field(default="", description="site of the replica; required")
    data_dir: Annotated[str, Flag("--data-dir")] = Field(
        default="", description="directory of the replica's state, shared with no other replica; required"
    )
    name: Annotated[str, Flag("--name")] = Field(
        default="", description="name of the replica, kept over restarts; empty: made of its site and host name"
    )
    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:0", min_length=1, description="host:port to listen on; port 0: any free port"
    )
    advertise: Annotated[str, Flag("--advertise")] = Field(
        default="", description="host:port at which others reach the replica; empty: the listen address"
    )
    weight: Annotated[int, Flag("--weight")] = Field(
        default=1, ge=1, le=1000, description="share of partitions relative to other replicas, for each worker"
    )
    workers: Annotated[int, Flag("--workers")] = Field(
        default=1, ge=1, le=256, description="number of worker processes, each with a part of the partitions and a core"
    )
    checkpoint_cache: Annotated[str, Flag("--checkpoint-cache")] = Field(
        default="", description="directory of a checkpoint cache, shared by the replicas of this machine; empty: none"
    )
    metrics: Annotated[str, Flag("--metrics")] = Field(
        default="",
        description="host:port of the page /metrics for Prometheus; further workers use the ports that follow;"
        " empty: none",
    )


class ReplicaSettings(CheckedSettings):
    """Caches, intervals, limits and timeouts of a replica."""

    section: ClassVar[str] = "replica"
    model_config = _of("STATEFLOW_REPLICA_")

    block_cache_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="capacity of RocksDB's block cache, over all partitions, in bytes",
    )
    write_buffer_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="memory that RocksDB may hold unflushed, over all partitions, in bytes",
    )
    cached_keys: int = Field(
        default=262_144, ge=1, description="maximum number of hot keys kept decoded, per partition"
    )
    cache_bytes: int = Field(
        default=1 << 30, ge=0, description="approximate memory for decoded state, over all partitions, in bytes"
    )
    value_bytes_max: int = Field(
        default=64 << 20, ge=1, description="maximum size of an encoded value, entry or element, in bytes"
    )
    checkpoint_interval_s: Annotated[float, Flag("--checkpoint-interval")] = Field(
        default=60.0, ge=0, description="interval between periodic checkpoints, in seconds; 0: no periodic checkpoints"
    )
    checkpoint_bytes_per_s: int = Field(
        default=0, ge=0, description="upload rate limit of periodic checkpoints, in bytes per second; 0: no limit"
    )
    checkpoint_digest_interval_s: float = Field(
        default=3600.0,
        ge=0,
        description="interval at which a partition's periodic checkpoint includes a digest of its state, in seconds",
    )
    checkpoint_keep: int = Field(
        default=3,
        ge=0,
        description="number of newest checkpoints kept of each partition; 0: all are kept until `checkpoint gc`",
    )
    checkpoint_keep_s: float = Field(
        default=3600.0, ge=0, description="age up to which all checkpoints are kept, in seconds"
    )
    checkpoint_tidy_interval_s: float = Field(
        default=900.0,
        gt=0,
        description="interval at which expired checkpoints are dropped and missing ones detected, in seconds",
    )
    checkpoint_compression: str = Field(
        default="none", pattern="^(none|zstd)$", description="compression of checkpoint files: none or zstd"
    )
    checkpoint_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="time without progress after which a call to the checkpoint store fails, in seconds",
    )
    checkpoint_cache_bytes: int = Field(
        default=8 << 30, ge=1, description="maximum size of the checkpoint cache, in bytes"
    )
    verify_bytes_per_s: int = Field(
        default=32 << 20,
        ge=0,
        description="rate limit at which `stateflow verify` reads the replica's state, in bytes per second; 0: no"
        " limit",
    )
    heartbeat_interval_s: float = Field(
        default=1.0,
        gt=0,
        description="interval of heartbeats, which report condition and partitions to the controller, in seconds",
    )
    batch_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="maximum time for which an operator may process one partition's part of a batch before it is"
        " interrupted, in seconds; 0: no limit",
    )
    stop_timeout_s: float = Field(
        default=10.0, gt=0, description="maximum time from SIGTERM to the end of the process, in seconds"
    )
    acknowledge: str = Field(
        default="wal",
        pattern="^(wal|fsync|standby)$",
        description="durability of a batch when it is answered: wal (in the log, survives SIGKILL), fsync (on disk,"
        " survives power loss) or standby (also on a standby's disk)",
    )
    commit_log_bytes_max: int = Field(
        default=128 << 20,
        ge=4096,
        description="maximum size of the log that makes commits durable, in bytes; beyond it commits wait until"
        " databases are synced",
    )
    change_log_bytes_max: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="maximum size of a follower's change log, in bytes; beyond it the base is sent again",
    )
    followers_max: int = Field(
        default=8,
        ge=1,
        description="maximum number of copies, of standbys and of moves, that may follow one partition",
    )
    return_log_bytes_max: int = Field(
        default=4 << 20,
        ge=0,
        description="maximum size of the changes kept for each partition that moved in, in bytes; while they fit, a"
        " move back sends only them",
    )
    chunk_bytes: int = Field(
        default=1 << 20, ge=4096, le=3 << 20, description="size of one message of a transfer, in bytes"
    )
    waiting_bytes_max: int = Field(
        default=512 << 20,
        ge=8 << 20,
        description="memory for rows that have not arrived completely or wait for their partition, over all callers,"
        " in bytes; one caller may use half of it",
    )
    stream_bytes_max: int = Field(
        default=256 << 20,
        ge=1 << 20,
        description="memory for what the streams of all callers have sent and is not taken up, and as much again for"
        " answers that callers have not taken, in bytes; each stream has an equal share, of 64 KiB to 8 MiB",
    )
    hold_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="maximum time for which a request that arrives before its partition waits for the move to end, in"
        " seconds",
    )
    transfer_timeout_s: float = Field(
        default=60.0, gt=0, description="time without progress after which a transfer fails, in seconds"
    )
    resume_timeout_s: float = Field(
        default=5.0, ge=0, description="time for which a transfer with a broken connection is retried, in seconds"
    )
    source_idle_s: float = Field(
        default=7 * 86_400.0,
        ge=0,
        description="time without a batch after which a source is retired, in seconds; 0: silence retires no source",
    )
    watermark_idle_s: float = Field(
        default=86_400.0,
        ge=0,
        description="time without a batch, while other sources send, after which a source no longer holds the"
        " watermark back, in seconds; 0: it always holds it back",
    )
    sources_max: int = Field(
        default=64,
        ge=1,
        description="maximum number of sources per partition; beyond it the longest silent ones are retired",
    )
    sources_retired_max: int = Field(
        default=1000,
        ge=1,
        description="maximum number of retired sources remembered per partition; the oldest are forgotten",
    )
    disk_reserve_bytes: int = Field(
        default=64 << 20, ge=0, description="disk space that a move or restore must leave free, in bytes"
    )
    room_bytes: int = Field(
        default=0,
        ge=0,
        description="maximum size of the partition files of each worker, in bytes; 0: limited by the disk only",
    )


class AgentProcess(Settings):
    """Place, addresses and resources of an agent. Its replicas use the agent's settings file and environment; the agent
    gives them their names and addresses."""

    section: ClassVar[str] = "agent"
    model_config = _of("STATEFLOW_AGENT_")

    site: Annotated[str, Flag("--site")] = Field(default="", description="site of the agent; required")
    data_dir: Annotated[str, Flag("--data-dir")] = Field(
        default="",
        description="directory of the state of the agent and its replicas, shared with no other agent; required",
    )
    name: Annotated[str, Flag("--name")] = Field(
        default="", description="name of the agent, kept over restarts; empty: made of its site and host name"
    )
    labels: Annotated[dict[str, str], Flag("--label")] = Field(
        default_factory=dict, description="labels of the agent, for placement"
    )
    listen: Annotated[str, Flag("--listen")] = Field(
        default="127.0.0.1:0",
        min_length=1,
        description="host:port to listen on; port 0: any free port. Its replicas listen at other ports of this host",
    )
    advertise: Annotated[str, Flag("--advertise")] = Field(
        default="", description="host at which others reach the agent and its replicas; empty: the host of listen"
    )
    metrics: Annotated[str, Flag("--metrics")] = Field(
        default="",
        description="host:port of the pages /metrics and /sd; replicas have other ports of this host; empty: none",
    )
    cores: Annotated[int, Flag("--cores")] = Field(
        default=0, ge=0, le=1 << 16, description="number of cores that replicas may use; 0: all of the machine"
    )
    memory: Annotated[str, Flag("--memory")] = Field(
        default="", description="memory that replicas may use, e.g. 4GiB; empty: all of the machine"
    )


class ClientSettings(Settings):
    """Settings of clients that call a controller: commands, programs, Spark."""

    section: ClassVar[str] = "client"
    model_config = _of("STATEFLOW_CLIENT_")

    connect_timeout_s: float = Field(
        default=5.0, ge=0, description="maximum wait for a controller if none listens or none leads, in seconds"
    )


class EmbeddedSettings(Settings):
    """The cluster that a program runs for itself if it names no other."""

    section: ClassVar[str] = "embedded"
    model_config = _of("STATEFLOW_EMBEDDED_")

    directory: str = Field(
        default="stateflow-data", min_length=1, description="directory of the cluster's ledger and state"
    )
    replicas: int = Field(
        default=0, ge=0, le=64, description="number of replicas of a new cluster; 0: one for each core"
    )


class RouterSettings(Settings):
    """Settings of clients that send rows: stream clients and tasks of Spark."""

    section: ClassVar[str] = "router"
    model_config = _of("STATEFLOW_ROUTER_")

    unavailable_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="maximum time for which a batch waits for partitions that no replica serves, in seconds",
    )
    backoff_initial_s: float = Field(
        default=0.02, gt=0, description="delay before a batch is first sent again, in seconds"
    )
    backoff_max_s: float = Field(
        default=0.25, gt=0, description="maximum delay before each further attempt, in seconds"
    )
    stall_s: float = Field(
        default=2.0,
        gt=0,
        description="time without an answer after which the controller is asked for owners, in seconds",
    )
    rewind_buffer_bytes: int = Field(
        default=64 << 20,
        ge=0,
        description="size of the acknowledged rows that a StreamClient keeps to send again after a loss, in bytes",
    )
    chunk_bytes: int = Field(
        default=1 << 20, ge=4096, le=3 << 20, description="size of one message of a batch, in bytes"
    )
    site: str = Field(default="", description="site that the rows come from; empty: unknown")


class NatsSettings(Settings):
    """The JetStream source: the server of the demo, and the credentials of clients. The credentials are a user and a
    password, a token, a file, or nothing."""

    section: ClassVar[str] = "nats"
    model_config = _of("STATEFLOW_NATS_")

    url: Annotated[str, Flag("--nats")] = Field(
        default="nats://127.0.0.1:4222",
        min_length=1,
        description="URL of the server for `stateflow demo --source jetstream`",
    )
    user: str = Field(default="", description="user name, together with password")
    password: SecretStr = Field(default=NO_TOKEN, description="password of the user")
    token: SecretStr = Field(default=NO_TOKEN, description="token, in place of user and password")
    creds: str = Field(default="", description="file of credentials (JWT and seed)")
