"""The weight log: manifests, chains, anchors, deltas, snapshots and the stores that hold them."""

from whimbrel.checkpoint.anchor import AnchorPart
from whimbrel.checkpoint.chain import Link, RestorePlan, plan_restore
from whimbrel.checkpoint.host import HostWeights, Patch
from whimbrel.checkpoint.manifest import BatchEntry, Manifest, SnapshotManifest, StepRecord
from whimbrel.checkpoint.reader import LogReader
from whimbrel.checkpoint.snapshot import (
    ArrayShard,
    Snapshot,
    SnapshotPart,
    combine_digests,
    training_digest,
    whole_arrays,
)
from whimbrel.checkpoint.stores import DirectoryStore, Fetch, MemoryStore, Store, store_fetch
from whimbrel.checkpoint.writer import WeightLog, wants_anchor
from whimbrel.delta import Change, DeltaPart

__all__ = [
    "AnchorPart",
    "ArrayShard",
    "BatchEntry",
    "Change",
    "DeltaPart",
    "DirectoryStore",
    "Fetch",
    "HostWeights",
    "Link",
    "LogReader",
    "Manifest",
    "MemoryStore",
    "Patch",
    "RestorePlan",
    "Snapshot",
    "SnapshotManifest",
    "SnapshotPart",
    "StepRecord",
    "Store",
    "WeightLog",
    "combine_digests",
    "plan_restore",
    "store_fetch",
    "training_digest",
    "wants_anchor",
    "whole_arrays",
]
