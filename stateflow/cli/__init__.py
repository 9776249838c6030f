"""The ``stateflow`` command."""

from stateflow.cli.app import main

__all__ = ["main"]
