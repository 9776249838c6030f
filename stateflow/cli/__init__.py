"""The ``stateflow`` command."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command that ``sys.argv`` contains. Ctrl-C ends it with status 130, also while its modules load."""
    try:
        from stateflow.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
