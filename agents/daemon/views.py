"""What etcd says this node shall run, read from two views; what cannot be read is never taken for an order to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from agents.daemon.assignments import Key, Owned, Owners, SpecFacts
from whimbrel import ids, limits, wire
from whimbrel.coordination import KeyValue, PrefixView, keys
from whimbrel.errors import Corrupt
from whimbrel.limits import NODE_RANKS_MAX
from whimbrel.log import get_logger
from whimbrel.wire.cluster import Ownership

log = get_logger("agent")


class OwnersView:
    """The owners and specs prefixes, kept current."""

    def __init__(self, endpoints: Sequence[str], wake: Callable[[], None]) -> None:
        self.unreadable: set[Key] = set()
        """Workers whose key in etcd cannot be read; filled by `owners`."""
        self._owners = PrefixView(endpoints, keys.OWNERS)
        self._specs = PrefixView(endpoints, keys.SPECS)
        self._read: dict[str, tuple[int, SpecFacts]] = {}
        for view in (self._owners, self._specs):
            view.on_change.append(wake)

    async def start(self) -> None:
        await self._owners.start()
        await self._specs.start()

    async def close(self) -> None:
        await self._owners.close()
        await self._specs.close()

    def fresh(self) -> bool:
        """Whether the owners were proven current a moment ago: after an outage, or after this process was stopped and
        went on, an old picture is no reason to start anything."""
        heard_at = self.heard_at()
        return self._owners.healthy and heard_at is not None and time.monotonic() - heard_at < limits.OWNERS_FRESH_S

    @property
    def ended(self) -> bool:
        """Whether a view no longer follows etcd; then this agent would never learn of anything again."""
        return self._owners.ended or self._specs.ended

    def heard_at(self) -> float | None:
        """Monotonic time at which the owners were last proven current; None before the first time."""
        return self._owners.last_confirmed or None

    def owners(self) -> Owners:
        """Every owner that can be read."""
        entries: dict[Key, Owned] = {}
        unreadable: set[Key] = set()
        for item in self._owners.items.values():
            key = _key(item)
            owned = _owned(item, key)
            if owned is None:
                unreadable.add(key)
            else:
                entries[key] = owned
        for key in unreadable - self.unreadable:
            log.error("an owner in etcd cannot be read; its worker is left as it is", key="/".join(key))
        self.unreadable = unreadable
        return Owners(entries, self._owners.revision)

    def specs(self) -> Mapping[str, SpecFacts]:
        """What is needed of every run's spec; read once per revision of its key."""
        read: dict[str, tuple[int, SpecFacts]] = {}
        for name, item in self._specs.items.items():
            run_id = name.removeprefix(keys.SPECS)
            known = self._read.get(run_id)
            if known is not None and known[0] == item.mod_revision:
                read[run_id] = known
            elif (facts := _spec_facts(item.value)) is not None:
                read[run_id] = item.mod_revision, facts
        self._read = read
        return {run_id: facts for run_id, (_, facts) in read.items()}


def _key(item: KeyValue) -> Key:
    run_id, _, worker = item.key.removeprefix(keys.OWNERS).partition("/")
    return run_id, worker


def _owned(item: KeyValue, key: Key) -> Owned | None:
    try:
        ownership = wire.decode_json(item.value, Ownership)
    except Corrupt:
        return None
    named_well = ids.is_id(ownership.run_id, "run") and ids.is_name(ownership.worker)
    if not named_well or (ownership.run_id, ownership.worker) != key:
        return None
    return Owned(ownership, item.mod_revision)


def _spec_facts(value: bytes) -> SpecFacts | None:
    """Only the number of ranks is the agent's business; a spec of a newer release may hold what this one does not know."""
    try:
        ranks = msgspec.json.decode(value)["roles"]["trainer"]["ranks"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None
    if not isinstance(ranks, int) or not 1 <= ranks <= NODE_RANKS_MAX:
        return None
    return SpecFacts(trainer_ranks=ranks, spec_json=value.decode("utf-8"))
