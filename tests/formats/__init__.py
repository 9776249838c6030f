"""Disks and ledgers that each release left, kept for ever: ``<release>.tar.gz``, with the cluster's state as JSON.

``python -m tests.formats`` makes the archive of the running release, once, when it is published.
"""
