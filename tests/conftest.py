"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# a deadline is an assertion about how fast this machine is just now
settings.register_profile("stateflow", deadline=None)
settings.load_profile("stateflow")
