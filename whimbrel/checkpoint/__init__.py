"""The weight log: manifests, chains, anchors, deltas, snapshots and the stores that hold them."""

from whimbrel.checkpoint.anchor import AnchorPart
from whimbrel.checkpoint.chain import Link, RestorePlan, plan_restore
from whimbrel.checkpoint.host import HostWeights, Patch
from whimbrel.checkpoint.inspect import (
    Description,
    Verification,
    committed_digest,
    committed_head,
    describe,
    find_version,
    verify_chain,
)
from whimbrel.checkpoint.manifest import BatchEntry, Manifest, SnapshotManifest, StepRecord
from whimbrel.checkpoint.reader import LogReader, store_reader
from whimbrel.checkpoint.retention import RetentionPlan, apply_retention, plan_retention
from whimbrel.checkpoint.snapshot import (
    ArrayShard,
    Snapshot,
    SnapshotPart,
    combine_digests,
    training_digest,
    whole_arrays,
)
from whimbrel.checkpoint.stores import DirectoryStore, Fetch, KeptStore, MemoryStore, Store, store_fetch
from whimbrel.checkpoint.writer import WeightLog, wants_anchor
from whimbrel.delta import Change, DeltaPart

__all__ = [
    "AnchorPart",
    "ArrayShard",
    "BatchEntry",
    "Change",
    "DeltaPart",
    "Description",
    "DirectoryStore",
    "Fetch",
    "HostWeights",
    "KeptStore",
    "Link",
    "LogReader",
    "Manifest",
    "MemoryStore",
    "Patch",
    "RestorePlan",
    "RetentionPlan",
    "Snapshot",
    "SnapshotManifest",
    "SnapshotPart",
    "StepRecord",
    "Store",
    "Verification",
    "WeightLog",
    "apply_retention",
    "combine_digests",
    "committed_digest",
    "committed_head",
    "describe",
    "find_version",
    "plan_restore",
    "plan_retention",
    "store_fetch",
    "store_reader",
    "training_digest",
    "verify_chain",
    "wants_anchor",
    "whole_arrays",
]
