"""The commit: one etcd transaction that makes a published version the head, or proves that it must not be (laws 1 and 4)."""

from __future__ import annotations

from typing import Protocol

from whimbrel import wire
from whimbrel.clock import SystemClock, rfc3339
from whimbrel.coordination import Compare, KeyValue, Put, TxnResult, keys
from whimbrel.errors import Conflict, Fenced
from whimbrel.wire.cluster import Head


class HeadStore(Protocol):
    """The part of etcd that a commit needs; `BlockingEtcd` is one."""

    def get(self, key: str) -> KeyValue | None: ...
    def txn(self, compares: list[Compare], operations: list[Put]) -> TxnResult: ...


class HeadCommitter:
    """Moves `heads/RUN`. Used by rank 0 of the one trainer that owns the run."""

    def __init__(self, etcd: HeadStore, run_id: str, worker: str, epoch: int) -> None:
        self._etcd = etcd
        self._run_id = run_id
        self._epoch = epoch
        self._head_key = keys.head(run_id)
        self._owner_key = keys.owner(run_id, worker)
        self._revision = 0
        """The head's mod_revision as last seen; 0 when there was none."""

    def read(self) -> Head | None:
        """The committed head, which the next commit must follow. Raises Unreachable, Fenced."""
        self._check_owner()
        found = self._etcd.get(self._head_key)
        self._revision = found.mod_revision if found else 0
        return wire.decode_json(found.value, Head) if found else None

    def commit(self, version: int, manifest: str) -> None:
        """Make `manifest` the head if this epoch still owns the trainer and the head is the one last seen.

        After Unreachable the outcome is unknown; calling again with the same arguments finds out and completes it: the
        transaction cannot take effect twice, because it compares the revision that the first one would have changed.

        Raises:
            Unreachable: etcd did not answer. Fenced: another epoch owns the trainer.
            Conflict: the head moved though the owner did not.
        """
        head = Head(
            run_id=self._run_id,
            version=version,
            manifest=manifest,
            epoch=self._epoch,
            committed_at=rfc3339(SystemClock().wall()),
        )
        unmoved = Compare(self._head_key, "mod" if self._revision else "create", self._revision)
        owned = Compare(self._owner_key, "mod", self._epoch)
        result = self._etcd.txn([owned, unmoved], [Put(self._head_key, wire.encode_json(head))])
        if result.succeeded:
            self._revision = result.revision
        else:
            self._settle(version, manifest)

    def _settle(self, version: int, manifest: str) -> None:
        """The transaction was refused: because an earlier attempt of it had worked, or because somebody else moved."""
        found = self._etcd.get(self._head_key)
        head = wire.decode_json(found.value, Head) if found else None
        if found and head and (head.manifest, head.epoch) == (manifest, self._epoch):
            self._revision = found.mod_revision
            return
        self._check_owner()
        where = f"at version {head.version} of epoch {head.epoch}" if head else "gone"
        raise Conflict(
            f"Version {version} of {self._run_id} cannot be committed: the head is {where}, which this trainer never saw.",
            hint="Was etcd restored from an older state? The trainer starts again from the head.",
        )

    def _check_owner(self) -> None:
        owner = self._etcd.get(self._owner_key)
        if owner is None or owner.mod_revision != self._epoch:
            newer = owner.mod_revision if owner else "none"
            raise Fenced(
                f"The trainer of {self._run_id} has epoch {newer} now; this process has {self._epoch} and stops."
            )
