"""Hostile input at every decoder, RPC, page and client.

``doors``: every reader of bytes from elsewhere, each with sound inputs. ``engine``: mutates sound inputs, guided by the
code that they reach (atheris), one process for each door. ``calls`` and ``pages``: hostile requests to the RPCs and the
HTTP pages of real processes. ``answers``: clients, and what hostile ``servers`` answer them. ``python -m tests.fuzz``
runs all of it.

``cases`` holds every input of a door that was ever a finding, which the tests read again. They also do a small part of
the rest, against servers of their own process. A finding elsewhere has a unit test.
"""
