"""The live page of a cluster: sites, replicas, partitions, and state that moves between them, in a browser.

``view`` turns a cluster's reports into the data that the page shows, without I/O. ``watching`` asks the cluster, once
for all viewers, and reads the ledger and the checkpoint store. ``acts`` checks what each user may do, and carries out
the users' requests. ``serving`` answers browsers, in a thread of its own. ``static`` is the page itself: modules and
styles as a browser reads them, so that there is no build step.
"""

from stateflow.dashboard.serving import Dashboard, DashboardOptions

__all__ = ["Dashboard", "DashboardOptions"]
