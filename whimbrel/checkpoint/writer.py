"""Writing the log. Payloads first, manifest last, named record after; the commit itself is the caller's etcd transaction.

Nothing here becomes visible by being written: a version exists once a committed head leads to its manifest. An attempt that was
never committed leaves objects that no chain names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from whimbrel import limits
from whimbrel.checkpoint import names
from whimbrel.checkpoint.anchor import AnchorPart, join_anchor_parts, write_anchor_part, write_file
from whimbrel.checkpoint.manifest import (
    WEIGHTS_FILE,
    Manifest,
    SnapshotManifest,
    StepRecord,
    check_run,
    decode_record,
    encode_record,
    total_bytes,
)
from whimbrel.checkpoint.reader import LogReader
from whimbrel.checkpoint.retention import discard_chunks
from whimbrel.checkpoint.snapshot import (
    ArrayShard,
    SnapshotPart,
    combine_digests,
    join_snapshot_parts,
    write_snapshot_part,
)
from whimbrel.checkpoint.stores import Store, store_fetch
from whimbrel.checkpoint.stores.noted import NotedStore
from whimbrel.clock import Clock, SystemClock, rfc3339
from whimbrel.delta import DeltaPart, EncodedDelta, Layout, Piece, add_digests, digest_hex, encode_delta
from whimbrel.errors import Conflict, MissingChunk, UsageError

_WRITERS: Final = 4
"""Chunks that are made durable at once while encoding goes on: the wait for the disk is longer than the work."""


class WeightLog:
    """One epoch's writer of a run's log. Ranks share nothing but the store; rank 0 joins their parts."""

    def __init__(self, store: Store, run_id: str, epoch: int, clock: Clock | None = None) -> None:
        self.store = store
        self.run_id = run_id
        self.epoch = epoch
        self._clock = clock or SystemClock()
        self._anchor = ""
        self._snapshot = ""
        self._adopted = False
        self._attempt = NotedStore(store)

    # -- any rank ------------------------------------------------------------------------------------------------------

    def write_delta(self, layout: Layout, base: Sequence[Piece], new: Sequence[Piece]) -> EncodedDelta:
        """Encode this rank's pieces and store each chunk as it is found; `.part` goes to rank 0.

        `base` is not advanced: call `whimbrel.delta.advance(base, encoded)` after the commit.

        Raises:
            UsageError: pieces that do not fit the layout or each other. StorageFull.
        """
        with ThreadPoolExecutor(_WRITERS, "store") as pool:
            stored: list[Future[None]] = []
            delta = encode_delta(
                layout,
                base,
                new,
                lambda chunk: stored.append(pool.submit(self.store.put, chunk.info.digest, chunk.data)),
            )
            for each in stored:
                each.result()
        return delta

    def write_anchor(self, layout: Layout, pieces: Sequence[Piece]) -> AnchorPart:
        """Store this rank's pieces as part of a complete copy. Raises UsageError, StorageFull."""
        self._attempt = NotedStore(self.store)
        return write_anchor_part(self._attempt, layout, pieces)

    def write_snapshot(self, shards: Sequence[ArrayShard]) -> SnapshotPart:
        """Store this rank's part of the training state. Raises UsageError, StorageFull."""
        self._attempt = NotedStore(self.store)
        return write_snapshot_part(self._attempt, shards)

    def discard(self) -> None:
        """Delete what this rank's last `write_anchor` or `write_snapshot` stored: no manifest will name it.

        Raises:
            MissingChunk, Corrupt, Conflict: what other runs of the store name cannot be read; nothing was deleted.
        """
        discard_chunks(self.store, self.run_id, self._attempt.fresh)
        self._attempt = NotedStore(self.store)

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def publish_delta(
        self,
        layout: Layout,
        parent: Manifest,
        parent_digest: str,
        parts: Sequence[DeltaPart],
        step: StepRecord,
        *,
        anchor: str = "",
        snapshot: str = "",
        metrics: Mapping[str, float] | None = None,
    ) -> tuple[str, Manifest]:
        """Write the manifest of `parent.version + 1`; durable on return, and still to be committed.

        Args:
            parts: one of each rank, in any order.
            anchor: digest of an anchor newer than the parent's; default: the newest that was written by this epoch, or, at
                its first publication, that the store lists for the parent's chain.
            snapshot: likewise.

        Returns:
            Digest and manifest.

        Raises:
            UsageError: the parts do not cover the layout, or the step is not the parent's next.
            Conflict: the parent is of another run or layout. StorageFull.
        """
        check_run(self.run_id, parent, parent_digest)
        if parent.layout_digest != layout.digest:
            raise Conflict(f"Version {parent.version} has another layout of tensors than the one to be published.")
        covered = sum(part.covered for part in parts)
        if covered != layout.elements:
            raise UsageError(f"The ranks compared {covered} elements where the policy has {layout.elements}.")
        if step.step != parent.version:
            raise UsageError(f"Step {step.step} does not follow version {parent.version}.")
        self._adopt(parent_digest)
        chunks = [info for part in parts for info in part.chunks]
        payload = sum(info.nbytes for info in chunks)
        gained = add_digests(part.digest_change for part in parts)
        snapshot, snapshot_version = self._newest_snapshot(parent, snapshot or self._snapshot)
        manifest = Manifest(
            run_id=self.run_id,
            version=parent.version + 1,
            kind="delta",
            epoch=self.epoch,
            parent=parent_digest,
            layout_digest=layout.digest,
            state_digest=digest_hex(int(parent.state_digest, 16) + gained),
            total=layout.elements,
            changed=sum(part.changed for part in parts),
            payload_bytes=payload,
            chunks=chunks,
            snapshot=snapshot,
            snapshot_version=snapshot_version,
            step=step,
            metrics=dict(metrics or {}),
            created_at=rfc3339(self._clock.wall()),
            **self._newest_anchor(parent, parent_digest, anchor or self._anchor, payload),
        )
        return self._publish(manifest, "versions"), manifest

    def publish_anchor(
        self,
        layout: Layout,
        version: int,
        parts: Sequence[AnchorPart],
        *,
        files: Mapping[str, bytes] | None = None,
        beside: tuple[str, Manifest] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> tuple[str, Manifest]:
        """Write the manifest of a complete copy: version 0, or beside the committed delta of a later version.

        Args:
            files: auxiliary files (config.json, tokenizer, …) by name.
            beside: digest and manifest of the committed delta whose state this is.

        Raises:
            UsageError: incomplete parts, a later version without its delta, or a bad file name.
            Conflict: the copy has another state digest than the delta beside it. StorageFull.
        """
        if (version == 0) == (beside is not None) or (beside is not None and beside[1].version != version):
            raise UsageError("Version 0 is an anchor of its own; a later anchor is written beside its version's delta.")
        state = digest_hex(add_digests(part.digest for part in parts))
        if beside is not None and (beside[1].state_digest, beside[1].layout_digest) != (state, layout.digest):
            raise Conflict(f"The anchor's state {state} is not that of version {version}, {beside[1].state_digest}.")
        records = [join_anchor_parts(self.store, layout, parts)]
        for name, data in sorted((files or {}).items()):
            if name == WEIGHTS_FILE or "/" in name or name.startswith(".") or not name:
                raise UsageError(f"{name!r} cannot be an auxiliary file of an anchor.")
            records.append(write_file(self.store, name, data))
        delta = beside[1] if beside is not None else None
        manifest = Manifest(
            run_id=self.run_id,
            version=version,
            kind="anchor",
            epoch=self.epoch,
            parent=delta.parent if delta else "",
            layout_digest=layout.digest,
            state_digest=state,
            total=layout.elements,
            changed=delta.changed if delta else layout.elements,
            payload_bytes=sum(total_bytes(record.chunks) for record in records),
            chain_bytes=delta.chain_bytes if delta else 0,
            layout=list(layout.tensors),
            files=records,
            anchor=delta.anchor if delta else "",
            anchor_version=delta.anchor_version if delta else 0,
            beside=beside[0] if beside else "",
            step=delta.step if delta else None,
            metrics=dict(metrics or {}),
            created_at=rfc3339(self._clock.wall()),
        )
        digest = self._publish(manifest, "anchors" if beside else "versions")
        self._anchor = digest
        return digest, manifest

    def publish_snapshot(
        self, version_digest: str, manifest: Manifest, parts: Sequence[SnapshotPart], meta: Mapping[str, Any]
    ) -> str:
        """Write the manifest of the training state at a committed version; returns its digest.

        Raises:
            UsageError: the parts do not make up whole arrays.
            Conflict: the step record of the version has another training digest. StorageFull.
        """
        check_run(self.run_id, manifest, version_digest)
        digest = combine_digests(part.digest for part in parts)
        recorded = manifest.step.training_digest if manifest.step else ""
        if recorded not in ("", digest):
            raise Conflict(f"The state has training digest {digest}; version {manifest.version} recorded {recorded}.")
        arrays = join_snapshot_parts(parts)
        record = SnapshotManifest(
            run_id=self.run_id,
            version=manifest.version,
            version_digest=version_digest,
            epoch=self.epoch,
            training_digest=digest,
            payload_bytes=sum(total_bytes(part.chunks) for part in arrays),
            parts=arrays,
            meta=dict(meta),
            created_at=rfc3339(self._clock.wall()),
        )
        self._snapshot = self._publish(record, "snapshots")
        return self._snapshot

    def mark_committed(self, digest: str, manifest: Manifest) -> None:
        """Record in the store that the version's commit has happened, so that the store alone tells the history.

        Raises:
            Conflict: another manifest is recorded for this version. StorageFull.
        """
        name = names.commit(self.run_id, manifest.version)
        if not self.store.create(name, digest.encode()) and self.store.read(name) != digest.encode():
            raise Conflict(f"Version {manifest.version} of {self.run_id} is recorded as another commit than {digest}.")

    def _publish(self, record: Manifest | SnapshotManifest, kind: names.Kind) -> str:
        digest, data = encode_record(record)
        self.store.put(digest, data)
        self.store.create(names.attempt(self.run_id, kind, record.version, digest), b"")
        # A chunk that was there already may have been another run's, and have gone with it before it was named here.
        for each in record.chunk_digests():
            if self.store.size(each) is None:
                raise MissingChunk(
                    f"Chunk {each} of version {record.version} was removed from the store while it was published.",
                    hint="Publish the version again.",
                    digest=each,
                )
        return digest

    def _adopt(self, parent_digest: str) -> None:
        """Once: take over what an earlier epoch wrote beside the chain and named in no delta any more."""
        if self._adopted:
            return
        reader = LogReader(store_fetch(self.store), self.run_id)
        self._anchor = self._anchor or reader.newest_anchor(self.store, parent_digest)
        self._snapshot = self._snapshot or reader.newest_snapshot(self.store, parent_digest)
        self._adopted = True

    def _newest_anchor(self, parent: Manifest, parent_digest: str, wanted: str, payload: int) -> dict[str, Any]:
        """The fields of a delta that name its nearest anchor and what the chain since then weighs."""
        if parent.kind == "anchor":
            inherited = (parent_digest, parent.version, parent.payload_bytes, 0)
        else:
            inherited = (parent.anchor, parent.anchor_version, parent.anchor_bytes, parent.chain_bytes)
        digest, version, nbytes, chain = inherited
        if wanted and wanted != digest:
            side = decode_record(wanted, self.store.get(wanted), Manifest)
            if side.run_id == self.run_id and side.kind == "anchor" and version < side.version <= parent.version:
                # Both chains are counted from one older anchor, so their difference is the chain since the new one.
                shared = side.anchor == digest
                chain = chain - side.chain_bytes if shared else chain
                digest, version, nbytes = wanted, side.version, side.payload_bytes
        return {"anchor": digest, "anchor_version": version, "anchor_bytes": nbytes, "chain_bytes": chain + payload}

    def _newest_snapshot(self, parent: Manifest, wanted: str) -> tuple[str, int]:
        if wanted and wanted != parent.snapshot:
            record = decode_record(wanted, self.store.get(wanted), SnapshotManifest)
            if record.run_id == self.run_id and parent.snapshot_version < record.version <= parent.version:
                return wanted, record.version
        return parent.snapshot, parent.snapshot_version


def wants_anchor(manifest: Manifest) -> bool:
    """Whether the deltas since the last anchor outweigh a full copy."""
    if manifest.kind == "anchor":
        return False
    return manifest.chain_bytes > limits.ANCHOR_CHAIN_RATIO * manifest.anchor_bytes
