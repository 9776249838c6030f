"""The table of faults, with the tests that cause each of them on real processes under load.

``python -m tests.chaos`` runs all these tests and writes docs/chaos.md. A test compares that page with this table.
"""

from __future__ import annotations

from dataclasses import dataclass

_INTEGRATION = "tests/integration/"


@dataclass(frozen=True, slots=True)
class Row:
    """One fault.

    Attributes:
        fault: the fault itself, in words.
        seen: what users and clients notice.
        lost: which acknowledged data is lost.
        recovers: how the system recovers.
        tests: ids of the tests, below tests/integration.
        alone: whether no other fault may be caused at the same time, as a test of the row is marked ``alone``.
    """

    fault: str
    seen: str
    lost: str
    recovers: str
    tests: tuple[str, ...]
    alone: bool = False

    @property
    def ids(self) -> list[str]:
        return [_INTEGRATION + each for each in self.tests]


NOTHING = "nothing"
ROWS = (
    Row(
        "SIGKILL of a replica, with a standby, and of one without",
        "batches wait for lease and margin, or for the process to come back",
        NOTHING,
        "the standby takes over; else the owner is waited for, or a checkpoint restored and the rest asked for again",
        (
            "test_failover.py::test_a_standby_takes_over_and_every_acknowledged_batch_is_there",
            "test_failover.py::test_what_a_checkpoint_lacks_is_asked_for_again",
            "test_failover.py::test_without_standby_and_checkpoint_a_partition_waits_for_its_owner",
        ),
    ),
    Row(
        "SIGKILL of the controller, and of the leader of three",
        "moves go on when one leads again; batches go on meanwhile",
        NOTHING,
        "another controller leads, or the same one when it is back",
        ("test_controllers.py", "test_three_controllers.py"),
    ),
    Row(
        "SIGSTOP of an owner for longer than its lease, then SIGCONT",
        "batches wait, then go to who took over",
        NOTHING,
        "what was stopped finds its lease lapsed, and serves nothing until it has registered",
        ("test_failover.py::test_an_owner_that_was_stopped_and_goes_on_does_no_harm",),
    ),
    Row(
        "a full disk: at start, while it serves, of a checkpoint store, of SQLite",
        "`disk_full`, one line; the batch fails",
        NOTHING,
        "when there is room the batch is sent again",
        (
            "test_full_disk.py",
            "test_checkpoint_faults.py::test_a_full_store_keeps_what_it_has_and_says_what_to_do",
            "test_ledger_outage.py::test_the_disk_of_sqlite_is_full_for_a_while",
        ),
        alone=True,
    ),
    Row(
        "a disk that is read-only at start, and one that becomes read-only under open files",
        "at start `invalid_argument: the data directory cannot be used: Read-only file system`; later `disk_refused`",
        NOTHING,
        "start it again when it can be written; later by itself, when the batch is sent again",
        (
            "test_full_disk.py::test_a_disk_that_may_not_be_written_is_one_line",
            "test_full_disk.py::test_a_disk_that_becomes_read_only_loses_nothing_and_serves_again",
        ),
        alone=True,
    ),
    Row(
        "a slow disk: syncs take tens of milliseconds",
        "a pause budget that the disk does not allow is refused; cut-overs wait for a quiet moment",
        NOTHING,
        "by itself",
        ("test_slow_disk.py",),
        alone=True,
    ),
    Row(
        "flipped bits and missing files: SST, WAL, MANIFEST, CURRENT, commit log",
        "`… is not served from …, which is quarantined`; `commit_log_damaged`",
        "nothing where a standby or checkpoint has it; else what came after the newest checkpoint, and it is said",
        "each costs its own partition, which is taken over",
        ("test_damaged_files.py",),
    ),
    Row(
        "flipped bits in any object of a checkpoint store",
        "`checkpoint_corrupt`; an older checkpoint is restored, and the report says so",
        NOTHING,
        "by the next checkpoint",
        (
            "test_checkpoint_faults.py::test_a_flipped_bit_in_any_object",
            "test_checkpoints.py::test_restoring_falls_back_past_what_is_damaged_and_says_so",
        ),
    ),
    Row(
        "clocks hours apart, and clocks that jump by hours",
        "nothing",
        NOTHING,
        "leases are by each process's own monotonic clock",
        ("test_three_controllers.py",),
    ),
    Row(
        "a link that carries one direction only, between a replica and the controller",
        "batches wait for at most lease and margin",
        NOTHING,
        "the replica's lease lapses whichever direction is gone, and a standby takes over; it is back when it heals",
        ("test_one_way.py",),
    ),
    Row(
        "half-open connections, links that are cut, slow and silent ones",
        "transfers go on where they broke off; streams that are silent for long end",
        NOTHING,
        "by itself",
        ("test_links.py",),
        alone=True,
    ),
    Row(
        "a site cut off from every controller",
        "with `failover=manual` it serves on; else its partitions fail over",
        NOTHING,
        "by itself when the link is back",
        ("test_alone.py",),
    ),
    Row(
        "the controller's name cannot be looked up, or leads elsewhere",
        "`unavailable` in the replica's log, again and again",
        NOTHING,
        "by itself when the name is right; what serves goes on serving while its connection lasts",
        ("test_names_of_hosts.py",),
    ),
    Row(
        "out of file handles",
        "`too_few_files`, before anything is created",
        NOTHING,
        "raise the limit",
        ("test_open_files.py",),
        alone=True,
    ),
    Row(
        "an operator that raises, exits, or takes all memory that its process may have",
        "the batch fails, with what it raised",
        NOTHING,
        "other operators and partitions of that replica go on. If the system kills the process: as for SIGKILL",
        (
            "test_stuck_operators.py::test_whatever_an_operator_does_fails_its_batch_and_nothing_else",
            "test_stuck_operators.py::test_an_operator_that_takes_all_memory_fails_its_batch_and_nothing_else",
        ),
    ),
    Row(
        "an operator that never returns, also one that catches every interruption; SIGTERM meanwhile",
        "`operator_stuck` after `STATEFLOW_REPLICA_BATCH_TIMEOUT_S`",
        NOTHING,
        "its partition is refused, and can be moved away as it was; others go on; the process ends in bounded time",
        (
            "test_stuck_operators.py::test_an_operator_that_cannot_be_interrupted_costs_its_partition_and_nothing_else",
            "test_stuck_operators.py::test_a_partition_whose_operator_is_stuck_moves_away_as_it_was",
            "test_stuck_operators.py::test_sigterm_ends_a_replica_whose_operators_never_come_back",
        ),
    ),
    Row(
        "the ledger away for a minute: PostgreSQL stopped, SQLite locked",
        "nothing is decided meanwhile",
        NOTHING,
        "by itself",
        (
            "test_ledger_outage.py::test_postgres_is_stopped_for_a_minute",
            "test_ledger_outage.py::test_sqlite_is_locked_for_a_minute",
        ),
    ),
    Row(
        "the ledger's disk is lost",
        "`foreign_ledger`, and what to do",
        "nothing that a replica has",
        "`stateflow adopt` rebuilds it from what replicas know",
        ("test_lost_ledger.py",),
    ),
    Row(
        "the checkpoint store is not mounted, for longer than it keeps checkpoints, or another one is",
        "`checkpoint_store_missing`; the stream goes on",
        NOTHING,
        "by the next checkpoint when it is mounted, however long that takes",
        ("test_checkpoint_safety.py",),
    ),
    Row(
        "a replica's disk is lost",
        "its partitions are taken over; the name is free after `stateflow replace`",
        "what no standby and no checkpoint has, and it is asked for again",
        "from standby or checkpoint",
        ("test_checkpoints.py::test_a_lost_data_directory_is_restored_unasked_and_again_by_command",),
    ),
    Row(
        "a gateway is killed six times while owners freeze and die",
        "rows are stored, and go on in order",
        NOTHING,
        "by itself",
        ("test_forwarding.py",),
    ),
    Row(
        "strangers: commands without a session, batches that never end, code without the key",
        "`invalid_argument`, `not_allowed`; for them alone",
        NOTHING,
        "nothing was begun",
        ("test_strangers.py",),
    ),
)
