"""Contents of `stateflow --help`: commands in the order in which people need them, and one line about each.

A command that is in no panel is shown with the tools. A command within a group needs no line here when its docstring
begins with a short line.
"""

from __future__ import annotations

PANELS: dict[str, tuple[str, ...]] = {
    "Begin": ("init", "examples", "doctor", "demo", "run"),
    "Operators": ("deploy", "status", "dashboard", "partitions", "state", "source", "operator", "upgrade", "undeploy"),
    "Moving": ("migrate", "rebalance", "autopilot", "drain", "standby", "takeover", "reconfig"),
    "Keeping": ("checkpoint", "savepoint", "verify", "replace", "adopt"),
    "Fleet": ("nodes", "agent", "spawn", "stop", "restart", "logs", "forget", "maintenance", "job", "batch"),
    "Ledger": ("ledger", "stages"),
    "Processes": ("controller", "replica", "health"),
    "Tools": ("generate", "certs", "token", "spark"),
}
OTHERS = "Tools"
#: by command; each command in the program's help has a line, as the help imports no command
BRIEFLY: dict[str, str] = {
    "status": "What runs where.",
    "partitions": "Each partition's owner, epoch and standbys.",
    "state": "Read state, of a live cluster or of a checkpoint.",
    "source": "Sources of an operator: queries, batch runs, stream clients.",
    "reconfig": "Reconfigurations: what moved, moves and failed.",
    "checkpoint": "Take, list, prove, restore and collect checkpoints.",
    "savepoint": "Checkpoints with a name, kept until they are deleted.",
    "logs": "Show what a replica of an agent logged.",
    "job": "Work that begins by itself, once or on a schedule.",
    "batch": "Batches of work: how far they are, their entities and jobs.",
    "ledger": "Items and their records: what was decided and done.",
    "replica": "Run a replica: an operator process at a site.",
    "certs": "Certificates for TLS, from an authority of your own.",
    "token": "Tokens of some hours, for people and Spark jobs.",
    "spark": "Spark queries: their executors and checkpoints.",
    "init": "Write a small project that runs at once.",
    "examples": "List the examples for `stateflow init --example`.",
    "dashboard": "Serve the live page of a cluster.",
    "doctor": "Check whether everything is here that it needs.",
    "demo": "Run the whole story on this machine. Takes a minute.",
    "run": "Run a declared pipeline: a source, operators, a sink.",
    "deploy": "Deploy an operator: its code goes to the sites.",
    "operator": "Versions of operators, as they were deployed.",
    "upgrade": "Serve by a version that was deployed before.",
    "undeploy": "Take an operator out of the cluster, and delete its state.",
    "migrate": "Move partitions while the pipeline runs.",
    "rebalance": "Bring every replica to its share of partitions.",
    "autopilot": "Have partitions follow their rows and their load.",
    "drain": "Move everything away from a replica, to stop it.",
    "standby": "Keep copies that follow, to take over when owners die.",
    "takeover": "Give partitions of an owner that is gone to others.",
    "verify": "Have every owner read its partitions whole.",
    "replace": "Give the name of a replica that is lost to a new one.",
    "adopt": "Take what replicas have into a ledger that knows nothing.",
    "nodes": "List replicas, their room, and the links between sites.",
    "agent": "Run an agent, which starts and stops replicas; list agents.",
    "spawn": "Start replicas by an agent.",
    "stop": "Stop a replica by its agent. Its state stays where it is.",
    "restart": "Start a replica anew by its agent, or all, node by node.",
    "forget": "Forget a replica that has ended.",
    "maintenance": "Nodes that are given nothing for a while.",
    "stages": "What moved from which source to which sink.",
    "controller": "Run a controller: members, assignment, moves, the ledger.",
    "health": "Ask a process whether it is well, as a probe does.",
    "generate": "Write files for systemd, Docker, Kubernetes, Prometheus.",
    "ledger init": "Make a ledger in an empty database, or upgrade an older one.",
    "ledger resolve": "Say that what blocks an item was dealt with.",
    "ledger verify": "Check every record and everything derived from them.",
    "stages current": "Show a job's newest stage, and why it stopped.",
    "batch info": "Show one batch: how far it is, and when it will end.",
    "batch jobs": "List its jobs, by status, in the order of their making.",
    "batch pause": "Have who runs it stop behind what is in hand.",
    "batch cancel": "Call it off: what has not begun of it does not.",
    "checkpoint init": "Make a checkpoint store, or say which one it is.",
    "checkpoint all": "Take a checkpoint of every partition, node by node.",
    "checkpoint verify": "Read every blob, prove its hash, and look at every cell.",
    "checkpoint restore": "Put partitions back to a checkpoint.",
    "checkpoint gc": "Drop old checkpoints, and blobs that nobody needs.",
    "savepoint export": "Copy a savepoint, whole, into another store.",
    "savepoint delete": "Delete a savepoint.",
    "source list": "List sources: newest batch, its age, the watermark.",
    "source retire": "Drop a source's stored output and its watermark.",
    "source drop-output": "Let a query go on that cannot read a stored output.",
    "spark package": "Write stateflow as a zip, for `spark-submit --py-files`.",
    "spark rewind": "Put a stopped query back to a batch. Nothing is deleted.",
    "reconfig summary": "Sum them up: by state, their moves, bytes and pauses.",
    "reconfig edit": "Have more or fewer of its moves go on at a time.",
    "reconfig resolve": "Give up moves that stand behind their fence.",
    "job create": "Have something done by itself, each time once.",
    "job result": "What came of a run, or what it waits for.",
    "certs init": "Make an authority: a key that stays here, and a certificate.",
    "certs issue": "Write a certificate and key for one process or person.",
    "certs renew": "Write another certificate for the same name and role.",
    "certs revoke": "Have servers refuse certificates from now on.",
    "batch retry": "Have what failed wait once more.",
    "certs list": "List certificates, and until when they are valid.",
    "job list": "List jobs, when they are due, and their last run.",
    "job resume": "Begin runs again from now on.",
    "job pause": "Begin no more runs until it is resumed.",
    "maintenance end": "End the maintenance of a node.",
    "operator versions": "List versions as they were deployed.",
    "stages trace": "List every stage that data of one id went through.",
    "stages last": "Show the newest stage that pulled an entity.",
    "token show": "Show whose token it is, and until when.",
    "token issue": "Print a token, or write it to a file.",
}


def panel_of(command: str) -> str:
    return next((panel for panel, names in PANELS.items() if command in names), OTHERS)


def in_order(commands: list[str]) -> list[str]:
    """Sorts commands by their place in the panels, the others last."""
    place = {name: at for at, name in enumerate(name for names in PANELS.values() for name in names)}
    return sorted(commands, key=lambda name: place.get(name, len(place)))
