"""A place for a trainer to run in a test: real etcd, real store on disk, and a controller that always has a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.trainer.batches import BatchFetcher
from agents.trainer.loop import TrainerLoop
from agents.trainer.place import ChunkSources, Incidents
from agents.trainer.ranks import Ranks
from agents.trainer.restore import Restorer, Trained
from tests.trainer.support import make_group, pack_group
from whimbrel import wire
from whimbrel.checkpoint import DirectoryStore, KeptStore, Store
from whimbrel.coordination import BlockingEtcd, keys
from whimbrel.errors import Unreachable
from whimbrel.spec import RunSpec
from whimbrel.wire.cluster import Head, Ownership
from whimbrel.wire.work import BatchReply, BatchRequest, Caller, Phase

RUN = "run_test"


class FakeController:
    """Gives the batch of any step, stores its payloads like a rollout would, and notes what it is told."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.incidents: list[tuple[str, str]] = []
        self.asked: list[int] = []
        self.missing: list[list[str]] = []
        self.away = False
        self.lose: set[str] = set()
        """Groups whose payload nobody holds, until they were reported missing."""

    def batch(self, request: BatchRequest) -> BatchReply:
        if self.away:
            raise Unreachable("The controller is away.")
        self.asked.append(request.step)
        self.missing.append(request.missing)
        self.lose -= set(request.missing)
        entries = []
        for place in range(2):
            entry, data = pack_group(make_group(request.step, place))
            if entry.group_id not in self.lose:
                self._store.put(entry.payload, data)
            entries.append(entry)
        return BatchReply(ready=True, groups=entries)

    def incident(self, kind: str, message: str, **_details: object) -> None:
        if self.away:
            raise Unreachable("The controller is away.")
        self.incidents.append((kind, message))


class FakePlace:
    """What a WorkerContext offers, for one rank. `on_check` is called between units of work."""

    def __init__(
        self, root: Path, etcd: BlockingEtcd, spec: RunSpec, epoch: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.spec, self.run_id, self.worker, self.epoch = spec, RUN, "trainer", epoch
        self.rank, self.world_size = rank, world_size
        self.home = self.cache = root
        self.store = root / "store"
        self.caller = Caller(run_id=RUN, worker="trainer", epoch=epoch)
        self.paused = False
        self.etcd = etcd
        self.controller: Any = FakeController(DirectoryStore(self.store))
        self.notes: list[tuple[str, int | None, str | None]] = []
        self.gauges: dict[str, float] = {}
        self.ticks = 0
        self.on_check: Callable[[], None] = lambda: None

    def check(self) -> None:
        self.on_check()

    def progress(
        self,
        phase: Phase,
        *,
        version: int | None = None,
        note: str | None = None,
        counters: dict[str, float] | None = None,
        gauges: dict[str, float] | None = None,
    ) -> None:
        self.notes.append((phase, version, note))
        self.gauges.update(gauges or {})

    def tick(self) -> None:
        self.ticks += 1

    def sources(self) -> list[str]:
        return []


def own_trainer(etcd: BlockingEtcd, start: int = 1) -> int:
    """Give the trainer's part away anew; returns the epoch."""
    record = Ownership(run_id=RUN, worker="trainer", role="trainer", node_id="n", state="running", start=start)
    return etcd.put(keys.owner(RUN, "trainer"), wire.encode_json(record))


def read_head(etcd: BlockingEtcd) -> Head | None:
    found = etcd.get(keys.head(RUN))
    return wire.decode_json(found.value, Head) if found else None


def restore(place: FakePlace, ranks: Ranks | None = None, store: Store | None = None) -> Trained:
    """What a starting trainer does."""
    ranks = ranks or Ranks()
    incidents = Incidents(place.controller, speaks=ranks.first)
    chunks = ChunkSources(store or DirectoryStore(place.store))
    return Restorer(place, ranks, chunks, incidents, lambda model, _home, _tell: Path(model)).run()


def train(place: FakePlace, ranks: Ranks | None = None, store: Store | None = None) -> Trained:
    """A whole trainer process: restore, then the loop."""
    ranks = ranks or Ranks()
    trained = restore(place, ranks, store)
    incidents = Incidents(place.controller, speaks=ranks.first)
    fetcher = None
    if ranks.first:
        chunks = ChunkSources(store or DirectoryStore(place.store))
        fetcher = BatchFetcher(place.controller, place.caller, chunks, incidents, trained.stepper.policy.vocabulary)
    try:
        heal = store.heal if isinstance(store, KeptStore) else tuple
        TrainerLoop(place, ranks, trained, fetcher, incidents, heal).run()
    finally:
        if fetcher is not None:
            fetcher.close()
    return trained
