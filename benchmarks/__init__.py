"""What the framework costs and gains, measured against something else in the same run.

``python -m benchmarks NAME [--experiment ID] [--quick] --json`` prints one JSON object; see ``record.py``.
"""
