"""What a store holds of a run, from the store alone, and whether it is whole."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.checkpoint import names
from whimbrel.checkpoint.anchor import checked
from whimbrel.checkpoint.chain import Link
from whimbrel.checkpoint.host import HostWeights
from whimbrel.checkpoint.reader import LogReader, store_reader
from whimbrel.checkpoint.stores import Store
from whimbrel.errors import ChainGap, NotFound


@dataclass(frozen=True, slots=True)
class Description:
    """A run's log as the store tells it."""

    run_id: str
    head: str
    head_version: int
    versions: list[Link]
    """On the head's chain, oldest first, as far back as the store holds manifests."""
    anchors: dict[int, str]
    """Version to manifest digest, side anchors included."""
    snapshots: dict[int, str]
    uncommitted: int
    """Manifests of attempts that are on no committed chain."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify_chain` read again and found whole; anything else raised."""

    run_id: str
    version: int
    manifest: str
    anchor_version: int
    deltas: int
    chunks: int
    nbytes: int
    state_digest: str
    snapshot_version: int
    """Of the newest snapshot at or before the version; -1 without one."""
    payloads: int
    """Payload chunks of the steps since that snapshot that are there and whole."""
    payloads_missing: list[str]
    """Those that are not in this store: the weights are whole, a replay would need them from elsewhere."""


def committed_head(store: Store, run_id: str) -> tuple[int, str]:
    """Version and manifest digest of the newest commit that the store records.

    Raises:
        NotFound: it records none.
    """
    commits = store.list(names.folder(run_id, "commits"))
    if not commits:
        raise NotFound(f"The store records no committed version of {run_id}.", hint="Is it the right store and run?")
    data = store.read(commits[-1])
    return names.parse_commit(commits[-1]), (data or b"").decode(errors="replace")


def committed_digest(store: Store, run_id: str, version: int) -> str:
    """Manifest digest of a version whose commit the store records; also of one that the chain no longer reaches.

    Raises:
        NotFound: it records none.
    """
    data = store.read(names.commit(run_id, version))
    if data is None:
        raise NotFound(f"The store records no commit of version {version} of {run_id}.")
    return data.decode(errors="replace")


def find_version(store: Store, run_id: str, version: int | None = None, head: str = "") -> Link:
    """The committed manifest of a version (default: the head's).

    Args:
        head: digest of the head's manifest, where etcd knows a newer one than the store records.

    Raises:
        NotFound: the chain does not have this version. ChainGap, Corrupt, Conflict.
    """
    reader = store_reader(store, run_id)
    head = head or committed_head(store, run_id)[1]
    newest = reader.manifest(head)
    if version is None or version == newest.version:
        return head, newest
    links = reader.history(head, version - 1) if 0 <= version < newest.version else []
    if not links:
        raise NotFound(f"{run_id} has no committed version {version}; its head is {newest.version}.")
    return links[0]


def describe(store: Store, run_id: str, head: str = "") -> Description:
    """List a run's versions, anchors and snapshots. Trusts only the chain of parents from a committed head.

    Raises:
        NotFound: the store records no commit of the run. MissingChunk, Corrupt, Conflict.
    """
    reader = store_reader(store, run_id)
    head = head or committed_head(store, run_id)[1]
    links = held_history(reader, head)
    on_chain = {digest for digest, _ in links}
    anchors = {manifest.version: digest for digest, manifest in links if manifest.kind == "anchor"}
    attempts = {names.parse_attempt(name)[1] for name in store.list(names.folder(run_id, "versions"))}
    commits = map(store.read, store.list(names.folder(run_id, "commits")))
    stray = len(attempts - on_chain - {(data or b"").decode(errors="replace") for data in commits})
    anchors |= {
        version: digest
        for version, digest in _recorded(store, run_id, "anchors")
        if reader.manifest(digest).beside in on_chain
    }
    snapshots = {
        version: digest
        for version, digest in _recorded(store, run_id, "snapshots")
        if reader.snapshot_manifest(digest).version_digest in on_chain
    }
    return Description(run_id, head, links[-1][1].version, links, anchors, snapshots, stray)


def _recorded(store: Store, run_id: str, kind: names.Kind) -> list[tuple[int, str]]:
    """Version and digest of the manifests that named records name and that are there."""
    found = map(names.parse_attempt, store.list(names.folder(run_id, kind)))
    return [(version, digest) for version, digest in found if store.size(digest) is not None]


def held_history(reader: LogReader, head: str, after: int = -1) -> list[Link]:
    """The head's chain from `after + 1` on, as far back as it is held. Raises ChainGap if not even the head's manifest is."""
    oldest = after + 1
    while True:
        try:
            return reader.history(head, oldest - 1)
        except ChainGap as gap:
            missing = gap.details.get("missing_version")
            if not isinstance(missing, int) or missing < oldest:
                raise
            oldest = missing + 1


def verify_chain(store: Store, run_id: str, version: int | None = None, head: str = "") -> Verification:
    """Read everything again that restores a version, and prove the result by its state digest.

    Raises:
        NotFound, ChainGap, MissingChunk, Corrupt, DigestMismatch, Conflict: what is wrong, and where.
    """
    digest, manifest = find_version(store, run_id, version, head)
    reader = store_reader(store, run_id)
    host = HostWeights(run_id)
    plan = reader.restore(host, digest)
    host.scrub()
    chunks = [each for _, step in plan.steps for each in step.chunk_digests()]
    _, first = plan.steps[0]
    reader.files(first)
    newest = reader.newest_snapshot(store, digest)
    snapshot_version = reader.snapshot_manifest(newest).version if newest else -1
    payloads = list(dict.fromkeys(_payloads(held_history(reader, digest, snapshot_version))))
    missing = [each for each in payloads if store.size(each) is None]
    for each in payloads:
        if each not in missing:
            checked({each: store.get(each)}, each)
    return Verification(
        run_id=run_id,
        version=manifest.version,
        manifest=digest,
        anchor_version=first.version,
        deltas=len(plan.steps) - 1,
        chunks=len(set(chunks)),
        nbytes=plan.nbytes,
        state_digest=manifest.state_digest,
        snapshot_version=snapshot_version,
        payloads=len(payloads) - len(missing),
        payloads_missing=missing,
    )


def _payloads(links: list[Link]) -> list[str]:
    return [entry.payload for _, each in links if each.step for entry in each.step.batch if entry.payload]
