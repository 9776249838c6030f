"""Benchmarks of the framework. Most compare it with an alternative that is measured in the same run.

``python -m benchmarks NAME [--experiment ID] [--quick] --json`` prints one JSON object; see ``record.py``.
"""
