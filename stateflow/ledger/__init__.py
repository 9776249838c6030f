"""The ledger: the append-only record, in SQL, of all decisions and their outcomes.

Three classes show the same records: ``Ledger`` as items that are processed in steps, ``StateManager`` as stages of
pipelines, and ``Board`` as batches of work with their entities and jobs.
"""

from stateflow.ledger.board import Board
from stateflow.ledger.database import Holder, LeaderLease
from stateflow.ledger.ledger import Ledger
from stateflow.ledger.manager import (
    AzureSQLServerStateManager,
    MySQLStateManager,
    PostgreSQLStateManager,
    SqLiteStateManager,
    SQLServerStateManager,
    StateManager,
    state_manager_from_yaml,
)
from stateflow.ledger.records import App, Entry, Fault, Item, Record, RecordState

__all__ = [
    "App",
    "AzureSQLServerStateManager",
    "Board",
    "Entry",
    "Fault",
    "Holder",
    "Item",
    "LeaderLease",
    "Ledger",
    "MySQLStateManager",
    "PostgreSQLStateManager",
    "Record",
    "RecordState",
    "SQLServerStateManager",
    "SqLiteStateManager",
    "StateManager",
    "state_manager_from_yaml",
]
