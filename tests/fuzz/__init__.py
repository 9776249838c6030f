"""Hostile input at every decoder and every RPC.

``doors``: every reader of bytes from elsewhere, each with sound inputs. ``engine``: mutates sound inputs, guided by the
code that they reach (atheris), one process for each door. ``calls``: hostile requests to the RPCs of real processes.
``python -m tests.fuzz`` runs all of it; ``cases`` holds every input that was ever a finding, which the tests read
again.
"""
