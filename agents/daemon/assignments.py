"""What shall run on this node, against what runs here: pure, level-triggered, the same answer to the same picture.

No I/O, clock or randomness. Every action is safe to repeat: the picture after half of them gives the other half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from whimbrel.wire.cluster import Ownership, Role

Key = tuple[str, str]
"""(run id, worker name)"""


@dataclass(frozen=True)
class Owned:
    """One `owners/RUN/WORKER` key."""

    ownership: Ownership
    epoch: int
    """The key's mod_revision."""


@dataclass(frozen=True)
class Owners:
    """The owners prefix as last listed or watched."""

    entries: Mapping[Key, Owned]
    revision: int
    """The store's revision at that moment."""


@dataclass(frozen=True)
class Local:
    """One epoch of a worker that this node runs, ran, or has ended."""

    run_id: str
    worker: str
    epoch: int
    state: Literal["running", "stopping", "exited"]
    killing: bool = False
    """Whether a stop in progress has already come to SIGKILL."""

    @property
    def key(self) -> Key:
        return self.run_id, self.worker


@dataclass(frozen=True)
class Start:
    """Start this epoch: nothing of the worker lives here, and this epoch never ran here."""

    run_id: str
    worker: str
    epoch: int
    role: Role
    ranks: int
    start: int
    spec_json: str
    reason: str


@dataclass(frozen=True)
class Stop:
    """End this epoch's processes: politely first, or at once when it was replaced and may write nothing more."""

    run_id: str
    worker: str
    epoch: int
    polite: bool
    reason: str


@dataclass(frozen=True)
class Hold:
    """Do nothing with this worker, and say why: the picture is not to be trusted or not complete."""

    run_id: str
    worker: str
    epoch: int
    reason: str


Action = Start | Stop | Hold


@dataclass(frozen=True)
class SpecFacts:
    """What an agent needs of a run's spec."""

    trainer_ranks: int
    spec_json: str


def decide(node_id: str, owners: Owners, specs: Mapping[str, SpecFacts], local: Iterable[Local]) -> list[Action]:
    """Actions that bring this node to what the owners' keys say, stops before starts, in order of name."""
    locals_ = sorted(local, key=lambda entry: (entry.key, entry.epoch))
    stops = [action for entry in locals_ if (action := _fate(node_id, owners, entry)) is not None]
    starts: list[Action] = []
    for key in sorted(owners.entries):
        of_worker = [entry for entry in locals_ if entry.key == key]
        action = _beginning(node_id, owners.entries[key], specs, of_worker)
        if action is not None:
            starts.append(action)
    return [*stops, *starts]


def _fate(node_id: str, owners: Owners, entry: Local) -> Stop | Hold | None:
    """What becomes of an epoch that lives here; None: it goes on, or nothing is left to do."""
    if entry.state == "exited":
        return None
    owned = owners.entries.get(entry.key)
    if owners.revision < entry.epoch or (owned is not None and owned.epoch < entry.epoch):
        return Hold(
            entry.run_id,
            entry.worker,
            entry.epoch,
            f"etcd knows less than it did when epoch {entry.epoch} began (it is at {owners.revision}): "
            "restored from an older copy? The worker goes on until somebody writes its ownership anew",
        )
    if owned is None:
        return _stop(entry, polite=True, reason="its ownership was deleted")
    if owned.epoch == entry.epoch and owned.ownership.node_id == node_id and owned.ownership.state == "running":
        return None
    if owned.ownership.state == "stopped":
        return _stop(entry, polite=True, reason=owned.ownership.reason or "the run stops it")
    if owned.ownership.node_id != node_id:
        return _stop(entry, polite=False, reason=f"node {owned.ownership.node_id} owns it now (epoch {owned.epoch})")
    return _stop(entry, polite=False, reason=f"epoch {owned.epoch} replaces it")


def _stop(entry: Local, *, polite: bool, reason: str) -> Stop | None:
    if entry.state == "stopping" and (polite or entry.killing):
        return None  # under way, and as hard as it needs to be
    return Stop(entry.run_id, entry.worker, entry.epoch, polite, reason)


def _beginning(
    node_id: str, owned: Owned, specs: Mapping[str, SpecFacts], of_worker: list[Local]
) -> Start | Hold | None:
    """Whether an ownership starts something here now."""
    ownership, epoch = owned.ownership, owned.epoch
    if ownership.node_id != node_id or ownership.state != "running":
        return None
    if any(entry.epoch == epoch for entry in of_worker):
        return None  # runs, or ran: an epoch starts once
    if any(entry.state != "exited" for entry in of_worker):
        return None  # an older one still lives; its end wakes the loop
    newest = max((entry.epoch for entry in of_worker), default=0)
    if newest > epoch:
        return Hold(
            ownership.run_id, ownership.worker, epoch, f"epoch {newest} of it already ran here: etcd went back in time"
        )
    facts = specs.get(ownership.run_id)
    if facts is None:
        return Hold(ownership.run_id, ownership.worker, epoch, "the run's spec is not in etcd yet")
    return Start(
        run_id=ownership.run_id,
        worker=ownership.worker,
        epoch=epoch,
        role=ownership.role,
        ranks=facts.trainer_ranks if ownership.role == "trainer" else 1,
        start=ownership.start,
        spec_json=facts.spec_json,
        reason=ownership.reason,
    )
