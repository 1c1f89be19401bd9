"""Records of the log: manifests, step records, snapshot manifests. Deterministic bytes, named by their content digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from whimbrel import limits
from whimbrel.delta import ChunkInfo, TensorSpec, content_digest
from whimbrel.errors import Conflict, Corrupt, LimitReached

FORMAT: Final = 1
WEIGHTS_FILE: Final = "model.safetensors"

Record = TypeVar("Record", bound=msgspec.Struct)


class BatchEntry(msgspec.Struct, frozen=True, array_like=True):
    """One prompt group of a step's batch."""

    group_id: str
    payload: str
    """Digest of the payload chunk: tokens, log-probs, version spans, rewards."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What took version `step` to `step + 1`: with a snapshot at `step` it reproduces the step bit for bit."""

    step: int
    batch: list[BatchEntry] = []
    """In training order."""
    hyperparameters: dict[str, Any] = {}
    rng: dict[str, Any] = {}
    """State of the random generators before the step."""
    cursor: int = 0
    """Position in the run's data after the step."""
    training_digest: str = ""
    """Of the full training state after the step, 16 hex digits; the same for every world size."""
    world_size: int = 1
    metrics: dict[str, float] = {}


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """A range of a file or array as stored bytes."""

    digest: str
    nbytes: int


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A file of an anchor: its chunks in order are its bytes."""

    name: str
    nbytes: int
    chunks: list[ChunkRef]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The signed-for description of one version."""

    format: int = FORMAT
    run_id: str
    version: int
    kind: Literal["anchor", "delta"]
    epoch: int
    """Fencing epoch of the trainer that wrote it."""
    parent: str = ""
    """Digest of the manifest of `version - 1`; empty at version 0."""
    layout_digest: str
    state_digest: str
    total: int
    """Elements of the layout."""
    changed: int
    """Elements that differ from the parent."""
    payload_bytes: int
    """Stored bytes of the chunks or files."""
    chain_bytes: int = 0
    """Payload of the deltas since the anchor, this one included."""
    chunks: list[ChunkInfo] = []
    """Of a delta."""
    layout: list[TensorSpec] = []
    """Of an anchor."""
    files: list[FileRecord] = []
    """Of an anchor: model.safetensors first, then auxiliary files."""
    anchor: str = ""
    """Of a delta: digest of the newest anchor's manifest at or below the parent."""
    anchor_version: int = 0
    anchor_bytes: int = 0
    snapshot: str = ""
    """Digest of the newest snapshot manifest known when this was written."""
    snapshot_version: int = -1
    beside: str = ""
    """Of an anchor written beside a committed delta of the same version: that delta's digest."""
    step: StepRecord | None = None
    metrics: dict[str, float] = {}
    created_at: str = ""

    def chunk_digests(self) -> list[str]:
        """All chunks that are needed to apply a delta or load an anchor, auxiliary files included; each once."""
        refs = [info.digest for info in self.chunks] + [ref.digest for file in self.files for ref in file.chunks]
        return list(dict.fromkeys(refs))


class ArrayPart(msgspec.Struct, frozen=True, array_like=True):
    """The flat range [start, start + elements) of a named array of the training state."""

    key: str
    dtype: str
    """numpy's name in little-endian form, e.g. `<f4`."""
    shape: tuple[int, ...]
    """Of the whole array."""
    start: int
    elements: int
    chunks: list[ChunkRef]


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The full training state at a committed version."""

    format: int = FORMAT
    run_id: str
    version: int
    version_digest: str
    """Digest of the manifest that was committed for the version."""
    epoch: int
    training_digest: str
    payload_bytes: int
    parts: list[ArrayPart]
    meta: dict[str, Any] = {}
    created_at: str = ""

    def chunk_digests(self) -> list[str]:
        """All chunks of the arrays; each once."""
        return list(dict.fromkeys(ref.digest for part in self.parts for ref in part.chunks))


def encode_record(record: msgspec.Struct) -> tuple[str, bytes]:
    """Digest and bytes of a manifest; equal records have equal bytes.

    Raises:
        LimitReached: the record is larger than MANIFEST_MAX_BYTES.
    """
    data = msgspec.msgpack.encode(record, order="deterministic")
    if len(data) > limits.MANIFEST_MAX_BYTES:
        raise LimitReached(f"A manifest of {len(data)} bytes exceeds MANIFEST_MAX_BYTES = {limits.MANIFEST_MAX_BYTES}.")
    return content_digest(data), data


def decode_record(digest: str, data: bytes, kind: type[Record]) -> Record:
    """A record from hostile bytes.

    Raises:
        Corrupt: the bytes do not match the digest, or are no such record.
    """
    if content_digest(data) != digest:
        raise Corrupt(f"Manifest {digest} does not match its digest.", hint="It is fetched again from another source.")
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{digest} is no {kind.__name__}: {error}.") from error
    if getattr(record, "format", FORMAT) != FORMAT:
        raise Corrupt(
            f"{kind.__name__} {digest} has format {getattr(record, 'format', None)}; this release reads {FORMAT}.",
            hint="Was it written by a newer release?",
        )
    return record


def check_run(run_id: str, record: Manifest | SnapshotManifest, digest: str) -> None:
    """Refuse a record of another run.

    Raises:
        Conflict: it names another run.
    """
    if record.run_id != run_id:
        raise Conflict(
            f"Manifest {digest} belongs to run {record.run_id}, not to {run_id}.",
            hint="Is the store or the head of another run configured?",
        )


def check_child(parent_digest: str, parent: Manifest, child: Manifest) -> None:
    """Refuse a delta that does not follow its parent.

    Raises:
        Conflict: another run, version, layout or lineage than the parent's.
    """
    check_run(parent.run_id, child, "of the next version")
    if child.parent != parent_digest or child.version != parent.version + 1:
        raise Conflict(
            f"Version {child.version} names {child.parent or 'no parent'} as its parent; "
            f"version {parent.version} here is {parent_digest}."
        )
    if child.layout_digest != parent.layout_digest:
        raise Conflict(f"Version {child.version} has another layout of tensors than version {parent.version}.")


def total_bytes(refs: Sequence[ChunkRef]) -> int:
    """Stored bytes of these chunks."""
    return sum(ref.nbytes for ref in refs)
