"""Hostile input at every decoder and every RPC.

``doors``: whatever reads bytes from elsewhere, each with what is sound to it. ``engine``: mutates what is sound, guided
by the code that it reaches (atheris), one process for each door. ``calls``: requests that nobody would send, to real
processes. ``python -m tests.fuzz`` runs all of it; ``cases`` holds what was ever found, and the tests read it again.
"""
