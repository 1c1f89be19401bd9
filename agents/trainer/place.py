"""What the trainer needs of its surroundings, as protocols, and the incidents that it reports to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from whimbrel.checkpoint import Store
from whimbrel.checkpoint.stores import chunk_name
from whimbrel.checkpoint.stores.base import StoreAround
from whimbrel.errors import Corrupt, MissingChunk, Unreachable
from whimbrel.limits import INCIDENTS_HELD
from whimbrel.log import get_logger
from whimbrel.spec import RunSpec
from whimbrel.wire.work import BatchReply, BatchRequest, Caller, Phase

log = get_logger("trainer")


class Controller(Protocol):
    """The part of the controller that a trainer speaks with."""

    def batch(self, request: BatchRequest) -> BatchReply: ...
    def incident(self, kind: str, message: str, **details: str | int | float | bool) -> None: ...


class Place(Protocol):
    """Where a trainer runs; `agents.worker.WorkerContext` is one."""

    spec: RunSpec
    run_id: str
    worker: str
    epoch: int
    rank: int
    world_size: int
    home: Path
    store: Path
    cache: Path
    caller: Caller
    paused: bool
    etcd: Any
    controller: Any

    def check(self) -> None: ...
    def progress(
        self,
        phase: Phase,
        *,
        version: int | None = None,
        note: str | None = None,
        counters: dict[str, float] | None = None,
        gauges: dict[str, float] | None = None,
    ) -> None:
        """Say what is being done; counters are added to running totals, gauges replace."""
        ...

    def tick(self) -> None:
        """Say that a long piece of work moves: without this, it would be taken for a hang and started anew for ever."""
        ...

    def sources(self) -> list[str]: ...


class TickingStore(StoreAround):
    """A store; each chunk that was read, written or removed is a sign that the work on many of them moves."""

    def __init__(self, store: Store, tick: Callable[[], None]) -> None:
        super().__init__(store)
        self._tick = tick

    def put(self, digest: str, data: bytes) -> None:
        super().put(digest, data)
        self._tick()

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        data = super().get(digest, offset, length)
        self._tick()
        return data

    def delete(self, name: str) -> None:
        super().delete(name)
        self._tick()


class Incidents:
    """Reports incidents; keeps them while the controller is away. Only rank 0 speaks."""

    def __init__(self, controller: Controller, *, speaks: bool) -> None:
        self._controller = controller
        self._speaks = speaks
        self._held: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=INCIDENTS_HELD)

    def report(self, kind: str, message: str, **details: str | int | float | bool) -> None:
        """Say it in the log and to the controller. Raises Fenced."""
        log.warning(message, kind=kind, **details)
        if self._speaks:
            self._held.append((kind, message, details))
            self.send()

    def send(self) -> None:
        """Hand over what is held, in order; stop when the controller does not answer. Raises Fenced."""
        while self._held:
            kind, message, details = self._held[0]
            try:
                self._controller.incident(kind, message, **details)
            except Unreachable:
                return
            self._held.popleft()


class Peers(Protocol):
    """Chunks from other machines; `ChunkClient` is one."""

    def fetch(self, digests: Sequence[str], sources: Sequence[str]) -> Mapping[str, bytes]: ...


class ChunkSources:
    """Chunks by digest: from the own store, else from other nodes, and then kept in the own store."""

    def __init__(self, store: Store, peers: Peers | None = None, sources: Callable[[], list[str]] = list) -> None:
        self.store = store
        self._peers = peers
        self._sources = sources

    def fetch(self, digests: Sequence[str]) -> dict[str, bytes]:
        """All of them, verified by their digests.

        Raises:
            MissingChunk: one is nowhere, or only damaged. Unreachable: no source answers. StorageFull.
        """
        return {digest: self._fetch(digest) for digest in digests}

    def _fetch(self, digest: str) -> bytes:
        damaged = False
        if self.store.size(digest) is not None:
            try:
                return self.store.get(digest)
            except Corrupt:
                damaged = True
        addresses = self._sources()
        if self._peers is None or not addresses:
            found = "damaged" if damaged else "not"
            raise MissingChunk(f"Chunk {digest} is {found} in the store, and no other node can be asked for it.")
        data = self._peers.fetch([digest], addresses)[digest]
        if damaged:
            self.store.delete(chunk_name(digest))
        # Durable here before a manifest names it: the step record must be replayable from this store.
        self.store.put(digest, data)
        return data
