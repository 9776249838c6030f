"""The live page of a cluster: sites, replicas, partitions, and state that moves between them, in a browser.

``rates`` and ``view`` say what is shown, of what a cluster reports; ``access`` says who may do what. Both do no I/O.
``watching`` asks the cluster, once for all who look; ``acts`` does what somebody asked for; ``app`` is what is answered
to a browser, ``serving`` the thread that answers. ``static`` is the page itself: modules and styles as a browser reads
them, so that nothing is built.
"""

from stateflow.dashboard.serving import Dashboard, DashboardOptions

__all__ = ["Dashboard", "DashboardOptions"]
