"""Spark pipelines of real processes, killed again and again while partitions move.

State and sink must equal those of an undisturbed run.

``harness``: a run, its kills and its moves, however Spark runs. ``files``: input and expected output of the ways that
read files. ``ways`` and ``real_time``: the ways of running Spark, each with further processes of its own to kill.
``programs``: such a process. tests/integration/test_spark_kills.py runs them.
"""
