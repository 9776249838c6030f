"""Writes projects for ``stateflow init``. The files of the default project are in ``files``."""
