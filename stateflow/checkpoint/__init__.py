"""Checkpoints: a manifest and content-addressed blobs in any fsspec store."""

from stateflow.checkpoint.backend import SiteCache
from stateflow.checkpoint.catalog import Known, Manifest, ManifestFile
from stateflow.checkpoint.codec import Codec
from stateflow.checkpoint.collecting import Collected, Retention, collect
from stateflow.checkpoint.store import Adoption, CheckpointStore, Saved

__all__ = [
    "Adoption",
    "CheckpointStore",
    "Codec",
    "Collected",
    "Known",
    "Manifest",
    "ManifestFile",
    "Retention",
    "Saved",
    "SiteCache",
    "collect",
]
