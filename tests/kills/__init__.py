"""Spark pipelines of real processes, killed again and again while partitions move: state and sink are those of a run
nobody disturbed.

``harness``: a run, its kills and its moves, whatever Spark runs in. ``files``: what goes in and has to come out, of
those that read files. ``ways`` and ``real_time``: the ways of running Spark, each with the processes of its own that
are killed, too. ``programs``: such a process. tests/integration/test_spark_kills.py runs them.
"""
