"""Copy committed versions from the log into the database, in order. The log is the truth; this can always be done again."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping, Sequence

from orchestrator.db import Ledger, VersionRepository
from orchestrator.db.ledger import Commit
from whimbrel.checkpoint import DirectoryStore, LogReader, Manifest
from whimbrel.clock import Clock
from whimbrel.errors import Corrupt, MissingChunk
from whimbrel.limits import VERSIONS_PER_PASS_MAX
from whimbrel.log import get_logger
from whimbrel.transport import ChunkClient
from whimbrel.wire.cluster import Head

log = get_logger("mirror")


class LogFetch:
    """Manifests from the shared store, or, where this controller has none, from the nodes' chunk servers."""

    def __init__(self, store: DirectoryStore, client: ChunkClient) -> None:
        self.sources: Sequence[str] = ()
        self._store = store
        self._client = client

    def __call__(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        """Bytes by digest. Raises MissingChunk when nobody has one."""
        found: dict[str, bytes] = {}
        missing: list[str] = []
        for digest in digests:
            try:
                found[digest] = self._store.get(digest)
            except (MissingChunk, Corrupt):
                missing.append(digest)
        if missing:
            if not self.sources:
                raise MissingChunk(f"The store does not hold {missing[0]}, and no node is registered to ask.")
            found |= self._client.fetch(missing, self.sources)
        return found

    def close(self) -> None:
        """Close the connections to nodes."""
        self._client.close()


class Mirror:
    """Brings `versions` up to each run's head."""

    def __init__(self, fetch: LogFetch, ledger: Ledger, versions: VersionRepository, clock: Clock) -> None:
        self._fetch = fetch
        self._ledger = ledger
        self._versions = versions
        self._clock = clock
        self._snapshots: dict[str, str] = {}
        self._full_bytes: dict[str, int] = {}

    async def catch_up(self, epoch: int, head: Head, mirrored_version: int) -> int:
        """Record the versions after `mirrored_version` up to the head, in bounded passes; returns the newest recorded.

        Raises:
            MissingChunk, Corrupt: a manifest cannot be had now; nothing after it was recorded.
            Fenced, Unreachable: as every write of a leader.
        """
        reader = LogReader(self._fetch, head.run_id)
        chain = await asyncio.to_thread(_walk_back, reader, head.manifest, mirrored_version)
        for digest, manifest in chain[:VERSIONS_PER_PASS_MAX]:
            full_bytes = await asyncio.to_thread(self._full_size, reader, manifest)
            await self._ledger.mirror_commit(_commit(digest, manifest, full_bytes, self._clock.wall()), leader=epoch)
            await self._note_snapshot(epoch, manifest)
            mirrored_version = manifest.version
        return mirrored_version

    async def _note_snapshot(self, epoch: int, manifest: Manifest) -> None:
        """A snapshot is written after its version was committed; a later manifest is the first to name it."""
        if manifest.snapshot and self._snapshots.get(manifest.run_id) != manifest.snapshot:
            if manifest.snapshot_version <= manifest.version:
                await self._versions.mark_snapshot(
                    manifest.run_id, manifest.snapshot_version, manifest.snapshot, leader=epoch
                )
            self._snapshots[manifest.run_id] = manifest.snapshot

    def _full_size(self, reader: LogReader, manifest: Manifest) -> int:
        """Bytes of a full copy of the version: those of its anchor."""
        if manifest.kind == "anchor":
            return manifest.payload_bytes
        if manifest.anchor not in self._full_bytes:
            self._full_bytes[manifest.anchor] = reader.manifest(manifest.anchor).payload_bytes
        return self._full_bytes[manifest.anchor]


def _walk_back(reader: LogReader, head: str, mirrored_version: int) -> list[tuple[str, Manifest]]:
    """The manifests after the mirrored version, oldest first."""
    chain: list[tuple[str, Manifest]] = []
    digest = head
    while digest:
        manifest = reader.manifest(digest)
        if manifest.version <= mirrored_version:
            break
        chain.append((digest, manifest))
        digest = manifest.parent
    return chain[::-1]


def _commit(digest: str, manifest: Manifest, full_bytes: int, now: dt.datetime) -> Commit:
    step = manifest.step
    metrics = dict(manifest.metrics)
    if step is not None:
        metrics |= step.metrics
    return Commit(
        run_id=manifest.run_id,
        version=manifest.version,
        manifest=digest,
        parent=manifest.parent,
        kind=manifest.kind,
        epoch=manifest.epoch,
        groups=tuple((entry.group_id, entry.payload) for entry in step.batch) if step is not None else (),
        payload_bytes=manifest.payload_bytes,
        full_bytes=full_bytes,
        changed=manifest.changed,
        total=manifest.total,
        anchor=manifest.anchor or (digest if manifest.kind == "anchor" else ""),
        snapshot=manifest.snapshot if manifest.snapshot_version == manifest.version else "",
        state_digest=manifest.state_digest,
        step_seconds=metrics.get("step_seconds"),
        metrics=metrics,
        committed_at=_parsed(manifest.created_at, now),
    )


def _parsed(text: str, otherwise: dt.datetime) -> dt.datetime:
    return dt.datetime.fromisoformat(text) if text else otherwise
