"""The verified host copy of one policy version. It is replaced or patched as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.checkpoint.anchor import checked, read_weights
from whimbrel.checkpoint.manifest import Manifest, check_run
from whimbrel.checkpoint.stores import Fetch
from whimbrel.delta import (
    Bits,
    Change,
    DecodedChunk,
    Layout,
    Piece,
    add_digests,
    decode_chunk,
    digest_hex,
    resolve,
    state_digest,
)
from whimbrel.errors import Conflict, Corrupt, DigestMismatch


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """What a delta does to the state that is held: decoded, checked, and proved by the resulting state digest."""

    base: str
    """Digest of the manifest whose state it was made for."""
    digest: str
    manifest: Manifest
    changes: list[Change]
    state_digest: int

    @property
    def version(self) -> int:
        return self.manifest.version


class HostWeights:
    """Bits of every tensor at one committed version, and the proof which one that is.

    `tensors` maps names to flat arrays of bits. They may be read by engines and encoders, and are written only here.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.version = -1
        self.manifest_digest = ""
        """Of the committed manifest whose state is held; empty while none is."""
        self.layout = Layout(())
        self.state_digest = 0
        self.tensors: dict[str, Bits] = {}

    def array(self, name: str) -> Bits:
        """A tensor's bits in its shape; a view. NotFound if the layout has no such tensor."""
        return self.tensors[name].reshape(self.layout.spec(name).shape)

    def pieces(self) -> list[Piece]:
        """The whole state as pieces; views."""
        return [Piece(spec.name, 0, self.tensors[spec.name]) for spec in self.layout.tensors]

    def load_anchor(self, digest: str, manifest: Manifest, fetch: Fetch) -> None:
        """Replace the state by an anchor, after all of it was verified.

        Raises:
            Conflict: no anchor, another run, or another layout than the one held.
            Corrupt, DigestMismatch: chunks or the resulting state are not the recorded ones. MissingChunk.
        """
        check_run(self.run_id, manifest, digest)
        if manifest.kind != "anchor":
            raise Conflict(f"Version {manifest.version} ({digest}) is a delta: it cannot be loaded on its own.")
        if self.manifest_digest and manifest.layout_digest != self.layout.digest:
            raise Conflict(f"The anchor of version {manifest.version} has another layout of tensors than the one held.")
        layout, tensors = read_weights(fetch, manifest)
        state = state_digest(layout, [Piece(name, 0, bits) for name, bits in tensors.items()])
        _check_state(manifest, state)
        self.layout, self.tensors, self.state_digest = layout, tensors, state
        self.version = manifest.version
        self.manifest_digest = manifest.beside or digest

    def prepare(self, digest: str, manifest: Manifest, chunks: Mapping[str, bytes]) -> Patch:
        """Decode and verify a delta against the state that is held; nothing is changed.

        Args:
            digest: of the manifest.
            chunks: bytes by digest; more than needed is no harm.

        Raises:
            Conflict: the delta's base is not the state held: another run, parent, version or layout, or applied already.
            MissingChunk, Corrupt: a chunk is not there or not as it must be.
            DigestMismatch: the result would not be the recorded state.
        """
        self._check_base(digest, manifest)
        changes: list[Change] = []
        decoded: list[DecodedChunk] = []
        gained: list[int] = []
        for info in manifest.chunks:
            chunk = decode_chunk(self.layout, info, checked(chunks, info.digest, info.nbytes))
            found, gain = resolve(self.layout, chunk, self.tensors)
            decoded.append(chunk)
            changes += found
            gained.append(gain)
        _check_disjoint(decoded)
        changed = sum(change.positions.size for change in changes)
        if changed != manifest.changed:
            raise Corrupt(
                f"Version {manifest.version} changes {changed} elements; its manifest says {manifest.changed}."
            )
        state = add_digests([self.state_digest, *gained])
        _check_state(manifest, state)
        return Patch(self.manifest_digest, digest, manifest, changes, state)

    def commit(self, patch: Patch) -> None:
        """Overwrite what the patch changes: O(changed), absolute bits.

        Raises:
            Conflict: the patch was prepared for another state than the one held, e.g. it was committed already.
        """
        if not self.manifest_digest or patch.base != self.manifest_digest:
            raise Conflict(
                f"A patch to version {patch.version} was prepared for {patch.base}, "
                f"but {self.manifest_digest or 'nothing'} is held."
            )
        # Should this be interrupted, the copy belongs to no version, and says so: an anchor must be loaded.
        self.manifest_digest = ""
        for change in patch.changes:
            self.tensors[change.name][change.positions] = change.bits
        self.state_digest = patch.state_digest
        self.version = patch.version
        self.manifest_digest = patch.digest

    def scrub(self) -> None:
        """Recompute the digest of all bits held and compare it with the running one.

        Raises:
            DigestMismatch: memory no longer holds what was verified.
        """
        found = state_digest(self.layout, self.pieces())
        if found != self.state_digest:
            raise DigestMismatch(
                f"The host copy of version {self.version} has state digest {digest_hex(found)} instead of "
                f"{digest_hex(self.state_digest)}.",
                hint="The memory of this machine may be faulty; the copy must be loaded again.",
            )

    def _check_base(self, digest: str, manifest: Manifest) -> None:
        check_run(self.run_id, manifest, digest)
        if manifest.kind != "delta":
            raise Conflict(f"Version {manifest.version} ({digest}) is an anchor: it is loaded, not applied.")
        if not self.manifest_digest or manifest.parent != self.manifest_digest:
            raise Conflict(
                f"Version {manifest.version} applies to {manifest.parent}, but version {self.version} "
                f"({self.manifest_digest or 'nothing'}) is held.",
                hint="A new plan leads from what is held to the head.",
            )
        if manifest.version != self.version + 1 or manifest.layout_digest != self.layout.digest:
            raise Conflict(f"Version {manifest.version} has another layout or version than follows on {self.version}.")


def _check_state(manifest: Manifest, state: int) -> None:
    if digest_hex(state) != manifest.state_digest:
        raise DigestMismatch(
            f"Version {manifest.version} would have state digest {digest_hex(state)}, "
            f"where the log records {manifest.state_digest}."
        )


def _check_disjoint(chunks: list[DecodedChunk]) -> None:
    """No element may be covered by two chunks: each would be resolved against the same base."""
    spans = [(span.tensor, span.start, span.length) for chunk in chunks for span in chunk.spans]
    table: NDArray[Any] = np.array(sorted(spans), np.int64).reshape(-1, 3)
    same = table[1:, 0] == table[:-1, 0]
    if np.any(same & (table[1:, 1] < table[:-1, 1] + table[:-1, 2])):
        raise Corrupt("Two chunks of one manifest cover the same elements.")
