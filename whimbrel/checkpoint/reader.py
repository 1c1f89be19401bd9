"""Reading the log: manifests, plans, host copies, snapshots, from any source of bytes. Trusts only what a head leads to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from whimbrel import limits
from whimbrel.checkpoint import names
from whimbrel.checkpoint.anchor import WeightsFile, checked, read_file
from whimbrel.checkpoint.chain import Link, RestorePlan, plan_restore
from whimbrel.checkpoint.host import HostWeights, Patch
from whimbrel.checkpoint.manifest import (
    WEIGHTS_FILE,
    Manifest,
    SnapshotManifest,
    check_child,
    check_run,
    decode_record,
)
from whimbrel.checkpoint.snapshot import Snapshot, read_snapshot
from whimbrel.checkpoint.stores import Fetch, Store, store_fetch
from whimbrel.errors import ChainGap, Corrupt, MissingChunk


class LogReader:
    """Reads one run's log through `fetch`; remembers the manifests that it has verified.

    Args:
        anchors: digest to version of anchors beside committed versions, where they are known otherwise than from the
            deltas after them; see `store_reader`. They are hints: one that is not on the chain is not used.
    """

    def __init__(self, fetch: Fetch, run_id: str, anchors: Mapping[str, int] | None = None) -> None:
        self.fetch = fetch
        self.run_id = run_id
        self._hints = dict(anchors or {})
        self._manifests: dict[str, Manifest] = {}

    def manifest(self, digest: str) -> Manifest:
        """A verified manifest of this run. Raises MissingChunk, Corrupt, Conflict (another run's)."""
        if digest not in self._manifests:
            manifest = decode_record(digest, checked(self.fetch([digest]), digest), Manifest)
            check_run(self.run_id, manifest, digest)
            self._manifests[digest] = manifest
        return self._manifests[digest]

    def plan(self, head: str, have: str = "") -> RestorePlan:
        """The cheapest way to a committed version.

        Args:
            head: digest of its manifest.
            have: `HostWeights.manifest_digest`, or empty.

        Raises:
            ChainGap: something between is held by no source; the message names it. Corrupt, Conflict.
        """
        return plan_restore(head, self._read_back(head, have), have)

    def history(self, head: str, after: int = -1) -> list[Link]:
        """The manifests of the versions `after + 1 … head` in order, each checked to follow the one before.

        Raises:
            ChainGap: one is held by no source. Corrupt, Conflict.
        """
        links: list[Link] = []
        at = head
        while at:
            manifest = self._link(at, links)
            if manifest.version <= after:
                break
            links.append((at, manifest))
            # The parent of the first one wanted need not be held any more: it is named, and not read.
            at = manifest.parent if manifest.version - 1 > after else ""
        return links[::-1]

    def restore(self, host: HostWeights, head: str, *, on_patch: Callable[[Patch], None] | None = None) -> RestorePlan:
        """Bring a host copy to a committed version; it stays at the last version that was verified if anything fails.

        Args:
            on_patch: called with each verified patch before the host copy takes it.

        Raises:
            ChainGap, MissingChunk, Corrupt, DigestMismatch, Conflict.
        """
        plan = self.plan(head, host.manifest_digest)
        for digest, manifest in plan.steps:
            if manifest.kind == "anchor":
                host.load_anchor(digest, manifest, self.fetch)
            else:
                patch = host.prepare(digest, manifest, self.fetch(manifest.chunk_digests()))
                if on_patch is not None:
                    on_patch(patch)
                host.commit(patch)
        return plan

    def anchor_of(self, head: str) -> Link:
        """The newest anchor that a version's manifest names, or its own. Raises ChainGap, Corrupt, Conflict."""
        manifest = self._link(head, [])
        if manifest.kind == "anchor":
            return head, manifest
        return manifest.anchor, self._link(manifest.anchor, [(head, manifest)])

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        """The auxiliary files of an anchor by name. Raises MissingChunk, Corrupt."""
        return {record.name: read_file(self.fetch, record) for record in manifest.files if record.name != WEIGHTS_FILE}

    def snapshot(self, digest: str) -> Snapshot:
        """A training state, verified. Raises MissingChunk, Corrupt, DigestMismatch, Conflict."""
        return read_snapshot(self.fetch, self.snapshot_manifest(digest))

    def snapshot_manifest(self, digest: str) -> SnapshotManifest:
        """A snapshot's manifest, verified. Raises MissingChunk, Corrupt, Conflict."""
        record = decode_record(digest, checked(self.fetch([digest]), digest), SnapshotManifest)
        check_run(self.run_id, record, digest)
        return record

    def newest_snapshot(self, store: Store, head: str) -> str:
        """Digest of the newest snapshot on the chain of a committed version, or empty.

        Side records count only if the version that they name is one of the chain: an attempt that was never committed is not.
        """
        manifest = self._link(head, [])
        return self._newest_beside(store, "snapshots", head, manifest.snapshot_version) or manifest.snapshot

    def newest_anchor(self, store: Store, head: str) -> str:
        """Digest of the newest anchor on the chain of a committed version, side records included as above."""
        manifest = self._link(head, [])
        if manifest.kind == "anchor":
            return head
        return self._newest_beside(store, "anchors", head, manifest.anchor_version) or manifest.anchor

    def _newest_beside(self, store: Store, kind: Literal["anchors", "snapshots"], head: str, above: int) -> str:
        """The newest record of the kind on the chain at a version above `above`, or empty."""
        newest = self._link(head, []).version
        listed = map(names.parse_attempt, store.list(names.folder(self.run_id, kind)))
        found = sorted((each for each in listed if above < each[0] <= newest and store.size(each[1])), reverse=True)
        if not found:
            return ""
        chain = {digest for digest, _ in self.history(head, found[-1][0] - 1)}
        for _, digest in found:
            of = self.manifest(digest).beside if kind == "anchors" else self.snapshot_manifest(digest).version_digest
            if of in chain:
                return digest
        return ""

    def export(self, head: str, directory: str | os.PathLike[str]) -> None:
        """Write a version as an ordinary model folder: model.safetensors and the auxiliary files of its anchor.

        Raises:
            ChainGap, MissingChunk, Corrupt, DigestMismatch; FileExistsError if the folder exists.
        """
        host = HostWeights(self.run_id)
        self.restore(host, head)
        target = Path(directory)
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _, anchor = self.anchor_of(head)
        for name, data in self.files(anchor).items():
            if "/" in name or name.startswith("."):
                raise Corrupt(f"{name!r} cannot be a file of an anchor.")
            (partial / name).write_bytes(data)
        _write_weights(partial / WEIGHTS_FILE, host)
        if target.exists():
            shutil.rmtree(partial)
            raise FileExistsError(f"{target} exists already")
        partial.rename(target)

    def _link(self, digest: str, newer: list[Link]) -> Manifest:
        """The manifest of `digest`, checked to be the parent of the last of `newer`."""
        try:
            manifest = self.manifest(digest)
        except MissingChunk as error:
            newest = newer[-1][1].version if newer else 0
            of = f"version {newest - 1}, which version {newest} follows" if newer else "the head"
            raise ChainGap(
                f"The manifest {digest} of {of} is held by no source.",
                missing=digest,
                missing_version=newest - 1,
            ) from error
        if newer and newer[-1][1].parent == digest:
            check_child(digest, manifest, newer[-1][1])
        return manifest

    def _read_back(self, head: str, have: str) -> dict[str, Manifest]:
        """Manifests from the head back to what is held or, if that is cheaper or nothing is held, to an anchor."""
        known: dict[str, Manifest] = {}
        anchors = dict(self._hints)
        budget = -1
        spent = 0
        at = head
        while at and at != have and not 0 <= budget <= spent:
            manifest = self._read(at, known)
            if manifest is None:
                break
            spent += manifest.payload_bytes
            for anchor in [key for key, version in anchors.items() if version == manifest.version and key not in known]:
                # Named by a newer delta or a hint: read only when the walk has come to its version.
                side = self._read(anchor, known)
                if side is not None and side.beside == at:
                    budget = spent - manifest.payload_bytes + side.payload_bytes if have else 0
            if manifest.kind == "anchor":
                break
            anchors[manifest.anchor] = manifest.anchor_version
            at = manifest.parent
        return known

    def _read(self, digest: str, known: dict[str, Manifest]) -> Manifest | None:
        try:
            known[digest] = self.manifest(digest)
        except MissingChunk:
            return None
        return known[digest]


def store_reader(store: Store, run_id: str) -> LogReader:
    """A reader of a store's log that knows the side anchors that the store lists."""
    listed = [names.parse_attempt(name) for name in store.list(names.folder(run_id, "anchors"))]
    return LogReader(store_fetch(store), run_id, {digest: version for version, digest in listed})


def _write_weights(path: Path, host: HostWeights) -> None:
    file = WeightsFile(host.layout)
    with path.open("wb") as out:
        out.write(file.header)
        for name in sorted(host.tensors, key=file.data_start):
            data = host.tensors[name].view(np.uint8).data
            for at in range(0, len(data), limits.CHUNK_TARGET_BYTES):
                out.write(data[at : at + limits.CHUNK_TARGET_BYTES])
        out.flush()
        os.fsync(out.fileno())
