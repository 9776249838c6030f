"""The append-only record of what was decided and done."""

from stateflow.ledger.ledger import App, Ledger, Record, RecordState

__all__ = ["App", "Ledger", "Record", "RecordState"]
