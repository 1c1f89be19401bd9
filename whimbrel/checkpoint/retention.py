"""Which objects of a run may go: plan (pure) → persist → execute.

Kept are the newest SNAPSHOTS_KEPT snapshots, the chain from an anchor at or before the oldest of them to the head,
every later anchor, and the payloads of the steps since that snapshot. Whatever else a version at or below the head left
behind may go, once no kept manifest names it.

Run it where the log is written, between two publications: a chunk that is being written for a version to come is named
by no manifest yet. What other runs of the store name is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from whimbrel import limits
from whimbrel.checkpoint import names
from whimbrel.checkpoint.chain import Link
from whimbrel.checkpoint.inspect import held_history
from whimbrel.checkpoint.manifest import Manifest, SnapshotManifest
from whimbrel.checkpoint.orphans import sweep_orphans
from whimbrel.checkpoint.reader import LogReader
from whimbrel.checkpoint.stores import CHUNKS, Store, chunk_name, store_fetch
from whimbrel.errors import Corrupt


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a store holds of a run."""

    run_id: str
    chain: list[Link]
    """The committed head's chain, oldest first, as far back as it is held."""
    attempts: Mapping[str, Manifest]
    """All other manifests of versions and side anchors by digest, committed or not."""
    snapshots: Mapping[str, SnapshotManifest]
    records: Mapping[str, str]
    """Named object to the manifest digest that it names."""
    shared: frozenset[str] = frozenset()
    """Manifests, chunks and payloads that other runs of the store name: equal bytes are stored once."""


class RetentionPlan(msgspec.Struct, frozen=True):
    """Objects to delete, in this order: chunks, manifests, named records. A crash between leaves what the next plan finds."""

    head_version: int
    kept_from: int
    """The oldest version that can still be restored."""
    names: list[str]


def plan_retention(
    held: Holdings, kept: int = limits.SNAPSHOTS_KEPT, pinned: Collection[int] = frozenset()
) -> RetentionPlan:
    """What may be deleted. Pure; deletes nothing while fewer than `kept` snapshots exist.

    Args:
        pinned: committed anchors of these versions stay as well, e.g. version 0 as the reference of a KL penalty.
    """
    head_version = held.chain[-1][1].version
    on_chain = {digest for digest, _ in held.chain}
    snapshots = sorted(
        (item for item in held.snapshots.items() if item[1].version_digest in on_chain),
        key=lambda item: item[1].version,
    )
    floor = snapshots[-kept][1].version if len(snapshots) >= kept else 0
    anchors = [link for link in held.chain if link[1].kind == "anchor"]
    anchors += [item for item in held.attempts.items() if item[1].kind == "anchor" and item[1].beside in on_chain]
    # A reader that cannot list finds an anchor only through the deltas after it: the chain may begin at no other.
    named = on_chain | {manifest.anchor for _, manifest in held.chain}
    usable = [manifest.version for digest, manifest in anchors if manifest.version <= floor and digest in named]
    if floor == 0 or not usable:
        return RetentionPlan(head_version, held.chain[0][1].version, [])
    start = max(usable)
    keep: dict[str, Manifest | SnapshotManifest] = {
        digest: manifest for digest, manifest in [*held.chain, *anchors] if manifest.version >= start
    }
    keep |= {digest: manifest for digest, manifest in held.attempts.items() if manifest.version > head_version}
    keep |= {
        digest: snapshot
        for digest, snapshot in held.snapshots.items()
        if (snapshot.version_digest in on_chain and snapshot.version >= floor) or snapshot.version > head_version
    }
    pins = {held.records.get(names.commit(held.run_id, version)) for version in pinned}
    keep |= {digest: manifest for digest, manifest in [*held.chain, *held.attempts.items()] if digest in pins}
    everything = [*held.chain, *held.attempts.items(), *held.snapshots.items()]
    drop = [(digest, manifest) for digest, manifest in everything if digest not in keep]
    needed = {each for manifest in keep.values() for each in _needs(manifest, floor)} | keep.keys() | held.shared
    chunks = {each for _, manifest in everything for each in _needs(manifest, 0)} - needed
    manifests = {digest for digest, _ in drop} - needed
    records = sorted(name for name, digest in held.records.items() if digest not in keep)
    objects = [chunk_name(each) for each in [*sorted(chunks - manifests), *sorted(manifests)]]
    return RetentionPlan(head_version, start, [*objects, *records])


def apply_retention(
    store: Store,
    run_id: str,
    head: str,
    kept: int = limits.SNAPSHOTS_KEPT,
    pinned: Collection[int] = frozenset(),
) -> RetentionPlan:
    """Plan, persist, execute; finishes first what an earlier call was interrupted in, and sweeps orphans at the end.

    Args:
        head: digest of the committed head's manifest.
        pinned: see `plan_retention`; `committed_digest` finds such a version again.

    Raises:
        ChainGap, MissingChunk, Corrupt, Conflict: the log cannot be read; nothing was deleted. StorageFull.
    """
    held = read_holdings(store, run_id, head)
    plan = plan_retention(held, kept, pinned)
    # Payloads of steps before the oldest snapshot are still named by the manifests that are kept, though gone long since.
    plan = msgspec.structs.replace(plan, names=[name for name in plan.names if _exists(store, name)])
    allowed = set(plan.names)
    for name in store.list(_plans(run_id)):
        # A plan of earlier is carried out only as far as the log of now still agrees: it may need again what went then.
        _execute(store, name, [each for each in _read_plan(store, name).names if each in allowed])
    if plan.names:
        name = f"{_plans(run_id)}{plan.head_version:012d}"
        store.create(name, msgspec.json.encode(plan))
        _execute(store, name, plan.names)
    sweep_orphans(store, run_id, _named(held))
    return plan


def discard_chunks(store: Store, run_id: str, digests: Collection[str]) -> None:
    """Delete chunks that an attempt of this run stored and no manifest of it names, unless another run names them.

    Retention finds only what is named: without this, an attempt that failed for want of room would keep all there was.

    Raises:
        MissingChunk, Corrupt, Conflict: what other runs name cannot be read; nothing was deleted.
    """
    if digests:
        for each in sorted(set(digests) - set(_shared(store, run_id))):
            store.delete(chunk_name(each))


def read_holdings(store: Store, run_id: str, head: str) -> Holdings:
    """All manifests of a run that the store holds. Raises ChainGap, MissingChunk, Corrupt, Conflict."""
    reader = LogReader(store_fetch(store), run_id)
    chain = held_history(reader, head)
    on_chain = {digest for digest, _ in chain}
    records: dict[str, str] = {}
    attempts: dict[str, Manifest] = {}
    snapshots: dict[str, SnapshotManifest] = {}
    for kind in ("versions", "anchors", "snapshots"):
        for name in store.list(names.folder(run_id, kind)):
            digest = names.parse_attempt(name)[1]
            records[name] = digest
            if digest in on_chain or store.size(digest) is None:
                continue
            if kind == "snapshots":
                snapshots[digest] = reader.snapshot_manifest(digest)
            else:
                attempts[digest] = reader.manifest(digest)
    for name in store.list(names.folder(run_id, "commits")):
        if names.parse_commit(name) <= chain[-1][1].version:
            records[name] = (store.read(name) or b"").decode(errors="replace")
    return Holdings(run_id, chain, attempts, snapshots, records, frozenset(_shared(store, run_id)))


def _shared(store: Store, run_id: str) -> Iterator[str]:
    """What the other runs of the store name."""
    for name in store.list("runs/"):
        run, kind = name.split("/")[1:3]
        if run == run_id or kind not in ("versions", "anchors", "snapshots"):
            continue
        digest = names.parse_attempt(name)[1]
        if store.size(digest) is not None:
            reader = LogReader(store_fetch(store), run)
            yield digest
            yield from _needs(reader.snapshot_manifest(digest) if kind == "snapshots" else reader.manifest(digest), 0)


def _needs(manifest: Manifest | SnapshotManifest, floor: int) -> Iterator[str]:
    """Chunks that a manifest needs, with the payloads of a step from `floor` on."""
    yield from manifest.chunk_digests()
    if isinstance(manifest, Manifest) and manifest.step is not None and manifest.step.step >= floor:
        yield from (entry.payload for entry in manifest.step.batch if entry.payload)


def _named(held: Holdings) -> set[str]:
    """Every digest that a manifest of the store's runs names, and these manifests' own."""
    everything = [*held.chain, *held.attempts.items(), *held.snapshots.items()]
    chunks = {each for _, manifest in everything for each in _needs(manifest, 0)}
    return chunks | {digest for digest, _ in everything} | held.shared


def _exists(store: Store, name: str) -> bool:
    return not name.startswith(CHUNKS) or store.size(name.rpartition("/")[2]) is not None


def _plans(run_id: str) -> str:
    return f"runs/{run_id}/retention/"


def _read_plan(store: Store, name: str) -> RetentionPlan:
    try:
        return msgspec.json.decode(store.read(name) or b"", type=RetentionPlan)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"The retention plan {name} cannot be read: {error}.", hint="Delete it: it is made anew."
        ) from error


def _execute(store: Store, plan_name: str, objects: list[str]) -> None:
    for each in objects:
        store.delete(each)
    store.delete(plan_name)
