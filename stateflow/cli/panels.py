"""Contents of `stateflow --help`: commands in the order in which people need them, and one line about each.

A command that is in no panel is shown with the tools. A command within a group needs no line here when its docstring
begins with a short line.
"""

from __future__ import annotations

PANELS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "examples", "doctor", "demo", "run"),
    "Operators": ("deploy", "status", "dashboard", "partitions", "state", "source", "operator", "upgrade", "undeploy"),
    "Moving": ("migrate", "rebalance", "autopilot", "drain", "standby", "takeover", "reconfig"),
    "Recovery": ("checkpoint", "savepoint", "verify", "replace", "adopt"),
    "Fleet": ("nodes", "agent", "spawn", "stop", "restart", "logs", "forget", "maintenance", "job", "batch"),
    "Ledger": ("ledger", "stages"),
    "Processes": ("controller", "replica", "health"),
    "Tools": ("generate", "certs", "token", "spark"),
}
OTHERS = "Tools"
#: by command; each command in the program's help has a line, as the help imports no command
BRIEFLY: dict[str, str] = {
    "status": "Show what runs where.",
    "partitions": "List each partition's owner, epoch and standbys.",
    "state": "Read state, of a live cluster or of a checkpoint.",
    "source": "Sources of an operator: queries, batch runs, stream clients.",
    "reconfig": "Show and control reconfigurations and their moves.",
    "checkpoint": "Take, list, verify, restore and collect checkpoints.",
    "savepoint": "Named checkpoints, kept until they are deleted.",
    "logs": "Show the log of a replica that an agent runs.",
    "job": "Jobs that the cluster starts once or on a schedule.",
    "batch": "Batches of work: their progress, entities and jobs.",
    "ledger": "The ledger: items and their records.",
    "replica": "Run a replica: an operator process at a site.",
    "certs": "TLS certificates from your own authority.",
    "token": "Short-lived tokens for people and Spark jobs.",
    "spark": "Spark queries: their executors and checkpoints.",
    "init": "Write a small project that runs at once.",
    "examples": "List the examples for `stateflow init --example`.",
    "dashboard": "Serve the live page of a cluster.",
    "doctor": "Check whether everything that stateflow needs is here.",
    "demo": "Run the full demonstration here. Takes a minute.",
    "run": "Run a declared pipeline: a source, operators, a sink.",
    "deploy": "Deploy an operator, with its code, to the sites.",
    "operator": "Deployed versions of operators.",
    "upgrade": "Switch an operator to a version deployed before.",
    "undeploy": "Remove an operator from the cluster, and its state.",
    "migrate": "Move partitions while the pipeline runs.",
    "rebalance": "Bring every replica to its share of partitions.",
    "autopilot": "Let partitions follow their rows and their load.",
    "drain": "Move all partitions away from a replica.",
    "standby": "Keep standby copies, which take over when owners die.",
    "takeover": "Take over partitions whose owner is gone for good.",
    "verify": "Let every owner read and check its partitions.",
    "replace": "Give a lost replica's name to a new data directory.",
    "adopt": "Record what replicas have in a new ledger.",
    "nodes": "List replicas, their room, and the links between sites.",
    "agent": "Run an agent, which starts and stops replicas; list agents.",
    "spawn": "Start replicas through an agent.",
    "stop": "Stop a replica through its agent. Its state stays.",
    "restart": "Restart a replica through its agent, or all of them.",
    "forget": "Forget a replica that has ended.",
    "maintenance": "Nodes in maintenance, which get no partitions.",
    "stages": "Pipeline stages: what moved from where to where.",
    "controller": "Run a controller: members, assignment, moves, the ledger.",
    "health": "Probe whether a process is alive or ready.",
    "generate": "Write files for systemd, Docker, Kubernetes, Prometheus.",
    "ledger init": "Make a ledger in an empty database, or upgrade an older one.",
    "ledger resolve": "Record that what blocks an item was dealt with.",
    "ledger verify": "Check every record and everything derived from them.",
    "stages current": "Show a job's newest stage, and why it stopped.",
    "batch info": "Show the progress of one batch, and when it will end.",
    "batch jobs": "List jobs by status, in the order of their creation.",
    "batch pause": "Pause a batch after the entity in progress.",
    "batch cancel": "Cancel a batch: work that has not begun does not begin.",
    "checkpoint init": "Create a checkpoint store, or show its id.",
    "checkpoint all": "Take a checkpoint of every partition, node by node.",
    "checkpoint verify": "Read every blob, and check hashes, digest and cells.",
    "checkpoint restore": "Put partitions back to a checkpoint.",
    "checkpoint gc": "Drop old checkpoints and unreferenced blobs.",
    "savepoint export": "Copy a savepoint, whole, into another store.",
    "savepoint delete": "Delete a savepoint.",
    "source list": "List sources: newest batch, its age, the watermark.",
    "source retire": "Drop a source's stored output and its watermark.",
    "source drop-output": "Unblock a query that cannot read a stored output.",
    "spark package": "Write stateflow as a zip, for `spark-submit --py-files`.",
    "spark rewind": "Put a stopped query back to a batch; deletes nothing.",
    "reconfig summary": "Sum up reconfigurations: states, moves, bytes, pauses.",
    "reconfig edit": "Change how many of its moves run at a time.",
    "reconfig resolve": "Give up fenced moves that cannot complete.",
    "job create": "Create a job, which runs once or on a schedule.",
    "job result": "Show the outcome of a run, or what it waits for.",
    "certs init": "Create an authority: its key and certificate.",
    "certs issue": "Write a certificate and key for one process or person.",
    "certs renew": "Write a new certificate for the same name and role.",
    "certs revoke": "Revoke certificates, so that servers refuse them.",
    "batch retry": "Put failed entities back to waiting.",
    "certs list": "List certificates and their expiry.",
    "job list": "List jobs, when they are due, and their last run.",
    "job resume": "Resume a job: begin runs again from now on.",
    "job pause": "Pause a job: begin no runs until it is resumed.",
    "maintenance end": "End the maintenance of a node.",
    "operator versions": "List an operator's versions in order of deployment.",
    "stages trace": "List the stages that a correlation id went through.",
    "stages last": "Show the newest stage that pulled an entity.",
    "token show": "Show whose token it is, and until when it is valid.",
    "token issue": "Print a token, or write it to a file.",
}


def panel_of(command: str) -> str:
    return next((panel for panel, names in PANELS.items() if command in names), OTHERS)


def in_order(commands: list[str]) -> list[str]:
    """Sorts commands by their place in the panels, the others last."""
    place = {name: at for at, name in enumerate(name for names in PANELS.values() for name in names)}
    return sorted(commands, key=lambda name: place.get(name, len(place)))
