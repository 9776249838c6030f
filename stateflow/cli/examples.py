"""Examples that the commands' help ends with, by how they are called; tests parse each."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "controller": (
        "controller --listen 0.0.0.0:7070 --advertise ctl:7070 --ledger sqlite:////var/lib/stateflow/ledger.db",
    ),
    "replica": (
        "replica --site edge-1 --data-dir /var/lib/stateflow --controller ctl:7070",
        "replica --site cloud --name cloud-a --data-dir /var/lib/stateflow --listen 0.0.0.0:7071 --advertise "
        "cloud-a:7071 --checkpoints s3://bucket/checkpoints",
    ),
    "agent list": ("agent list", "agent list --json"),
    "agent forget": ("agent forget edge-1-gw7",),
    "spawn": ("spawn edge-1 --count 3 --memory 2GiB", "spawn edge-1 --workers 4 --label disk=ssd"),
    "stop": ("stop edge-1-gw7-0 --drain",),
    "restart": ("restart edge-1-gw7-0",),
    "logs": ("logs edge-1-gw7-0 --lines 20", "logs edge-1-gw7-0 -f"),
    "generate": (
        "generate systemd --for agent --site edge-1 --controller ctl:7070",
        "generate kubernetes --for replica --site cloud --controller ctl:7070 --count 3 --memory 4Gi --out manifests",
    ),
    "deploy": ("deploy myapp.ops:DelayByAircraft --partitions 128", "deploy ops.py:Count --site cloud --name CountV2"),
    "undeploy": ("undeploy DelayByAircraft --delete-state",),
    "forget": ("forget edge-7",),
    "status": ("status", "status --watch", "status --json"),
    "migrate": (
        "migrate DelayByAircraft 3 5-9 --to edge-1 --max-pause 50ms",
        "migrate DelayByAircraft all --to cloud --max-bandwidth 20MB/s",
    ),
    "rebalance": ("rebalance --max-pause 50ms", "rebalance --policy locality,load --dry-run"),
    "autopilot": ("autopilot --policy locality,load --max-pause 50ms --cool-down 60s", "autopilot --off"),
    "job create": (
        'job create evening --schedule "cron 0 18 * * * Europe/Berlin" --do rebalance --policy locality,load',
        'job create nightly --schedule "every 3600" --do checkpoint',
    ),
    "drain": ("drain edge-1-gw7",),
    "replace": ("replace edge-1-gw7",),
    "adopt": ("adopt --dry-run", "adopt"),
    "standby": ("standby DelayByAircraft 1", "standby DelayByAircraft 0"),
    "partitions": ("partitions DelayByAircraft",),
    "run": ("run pipeline.yml", "run pipeline.yml --set day=2013-01-01 --once"),
    "demo": ("demo", "demo --rows 50000 --out report", "demo --source jetstream --nats nats://127.0.0.1:4222"),
    "reconfig list": ("reconfig list --limit 5",),
    "reconfig info": ("reconfig info 4b1f2c3d9a0e",),
    "reconfig resolve": ("reconfig resolve 4b1f2c3d9a0e --serve-source",),
    "checkpoint restore": (
        "checkpoint restore DelayByAircraft",
        "checkpoint restore DelayByAircraft 3 5-9 --savepoint before-upgrade",
    ),
    "savepoint create": ("savepoint create before-upgrade",),
    "state get": ("state get DelayByAircraft flights N14228",),
    "state scan": ("state scan DelayByAircraft delay_by_dest --limit 10",),
    "state export": ("state export DelayByAircraft delay_by_dest --out delays.parquet",),
    "ledger init": ("ledger init --ledger @/run/secrets/ledger",),
    "ledger tail": ("ledger tail -n 50 -f",),
    "stages current": ("stages current tallies",),
    "stages failed": ("stages failed --job tallies",),
    "batch info": ("batch info 4b1f2c3d9a0e",),
    "source list": ("source list DelayByAircraft",),
    "spark rewind": ("spark rewind checkpoint/ --to-batch 41", "spark rewind checkpoint/ --to-batch 41 --apply"),
}
