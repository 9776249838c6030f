"""Figures of processes, for whoever monitors them.

``figures``: all there are, by name. Each process makes its own when it is asked for, of what it knows anyway: nothing
is counted for it that was not. ``own``: those that operators have besides, which count as batches do. ``page``: says
all of them as Prometheus reads them.
"""
