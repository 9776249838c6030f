"""What each release left on disk and in its ledger, kept for ever: ``<release>.tar.gz``, with what is in it.

``python -m tests.formats`` makes the one of the release that runs it, once, when that is given out.
"""
