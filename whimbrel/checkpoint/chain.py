"""Which manifests lead to a version: pure planning over manifests that were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whimbrel.checkpoint.manifest import Manifest, check_child
from whimbrel.errors import ChainGap, Conflict

Link = tuple[str, Manifest]
"""A manifest with its digest."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What to load, in order: perhaps an anchor first, then deltas. Empty if the version is held already."""

    head: str
    steps: tuple[Link, ...]

    @property
    def nbytes(self) -> int:
        """Payload to fetch."""
        return sum(manifest.payload_bytes for _, manifest in self.steps)


def plan_restore(head: str, known: Mapping[str, Manifest], have: str = "") -> RestorePlan:
    """The cheapest way to the version whose manifest is `head`.

    Args:
        head: digest of a committed manifest.
        known: manifests by digest, as far as they could be read.
        have: digest of the committed manifest whose state is held, or empty.

    Raises:
        ChainGap: no anchor and deltas among `known` lead there; names what is missing.
        Conflict: a manifest does not follow the one that it names as its parent.
    """
    plans: list[RestorePlan] = []
    deltas: list[Link] = []
    at = head
    while True:
        if at == have:
            plans.append(RestorePlan(head, tuple(reversed(deltas))))
            break
        manifest = known.get(at)
        if manifest is None:
            break
        if deltas:
            check_child(at, manifest, deltas[-1][1])
        plans += [RestorePlan(head, (anchor, *reversed(deltas))) for anchor in _anchors_at(at, manifest, known)]
        if manifest.kind == "anchor":
            break
        deltas.append((at, manifest))
        at = manifest.parent
    if not plans:
        raise _gap(head, known, at, deltas)
    return min(plans, key=lambda plan: (plan.nbytes, len(plan.steps)))


def _anchors_at(digest: str, manifest: Manifest, known: Mapping[str, Manifest]) -> list[Link]:
    """Complete copies of the version of this manifest."""
    if manifest.kind == "anchor":
        return [(digest, manifest)]
    beside = [(key, each) for key, each in known.items() if each.kind == "anchor" and each.beside == digest]
    for key, each in beside:
        if (each.version, each.state_digest, each.run_id) != (manifest.version, manifest.state_digest, manifest.run_id):
            raise Conflict(f"The anchor {key} claims to be version {manifest.version} but has another state.")
    return beside


def _gap(head: str, known: Mapping[str, Manifest], missing: str, deltas: list[Link]) -> ChainGap:
    if not deltas:
        return ChainGap(f"The manifest {head or '(none)'} of the head is held by no source.", missing=head)
    newest, oldest = deltas[0][1].version, deltas[-1][1].version
    anchor = deltas[-1][1].anchor_version
    return ChainGap(
        f"Version {newest} cannot be restored: version {oldest - 1} (manifest {missing}) is held by no source, "
        f"and no anchor between {anchor} and {newest} is.",
        hint="Ask a node that still holds it, or restore the store from its backup.",
        missing=missing,
        missing_version=oldest - 1,
    )
