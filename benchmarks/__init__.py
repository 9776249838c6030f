"""Benchmarks of what the framework costs and gains, each against an alternative measured in the same run.

``python -m benchmarks NAME [--experiment ID] [--quick] --json`` prints one JSON object; see ``record.py``.
"""
