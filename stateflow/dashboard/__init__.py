"""The live page of a cluster: sites, replicas, partitions, and state that moves between them, in a browser.

``view`` turns a cluster's reports into the data that the page shows, without I/O. ``records`` reads the ledger and the
checkpoint store for the page. ``watching`` asks the cluster, once for all viewers; ``acts`` decides who may do what,
and carries out their requests; ``app`` answers browsers, and ``serving`` is the thread in which it runs. ``static`` is
the page itself: modules and styles as a browser reads them, so that there is no build step.
"""

from stateflow.dashboard.serving import Dashboard, DashboardOptions

__all__ = ["Dashboard", "DashboardOptions"]
