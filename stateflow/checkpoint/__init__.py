"""Checkpoints: a manifest and content-addressed blobs in any fsspec store."""

from stateflow.checkpoint.store import CheckpointStore, Manifest, ManifestFile, Saved

__all__ = ["CheckpointStore", "Manifest", "ManifestFile", "Saved"]
