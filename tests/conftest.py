"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# both are assertions about how fast this machine is just now
settings.register_profile("stateflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stateflow")
