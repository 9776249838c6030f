"""Checkpoints: a manifest and content-addressed blobs in any fsspec store."""

from stateflow.checkpoint.cache import SiteCache
from stateflow.checkpoint.codec import Codec
from stateflow.checkpoint.collecting import Collected, Retention, collect
from stateflow.checkpoint.manifest import Manifest, ManifestFile
from stateflow.checkpoint.store import CheckpointStore, Saved

__all__ = [
    "CheckpointStore",
    "Codec",
    "Collected",
    "Manifest",
    "ManifestFile",
    "Retention",
    "Saved",
    "SiteCache",
    "collect",
]
