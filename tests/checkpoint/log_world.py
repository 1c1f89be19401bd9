"""A small policy and a trainer that publishes versions of it, for the tests of the log."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whimbrel.checkpoint import (
    ArrayShard,
    BatchEntry,
    HostWeights,
    Link,
    LogReader,
    MemoryStore,
    StepRecord,
    Store,
    WeightLog,
    store_fetch,
    store_reader,
    whole_arrays,
)
from whimbrel.clock import ManualClock
from whimbrel.delta import Layout, Piece, TensorSpec, advance, bits_dtype, content_digest

RUN = "run_test"
LAYOUT = Layout.of(
    [
        TensorSpec("embed", "BF16", (64, 16)),
        TensorSpec("norm", "F32", (16,)),
        TensorSpec("router", "I64", (3,)),
        TensorSpec("scale", "BF16", ()),
        TensorSpec("none", "F32", (0, 4)),
        TensorSpec("flags", "BOOL", (5,)),
    ]
)


def first_state(seed: int = 0) -> list[Piece]:
    rng = np.random.default_rng(seed)
    return [
        Piece(s.name, 0, rng.integers(0, 2, s.elements).astype(bits_dtype(s.dtype)))
        if s.dtype == "BOOL"
        else Piece(s.name, 0, rng.integers(0, 2**62, s.elements).astype(bits_dtype(s.dtype)))
        for s in LAYOUT.tensors
    ]


def stepped(pieces: list[Piece], seed: int) -> list[Piece]:
    rng = np.random.default_rng(seed)
    new = [Piece(p.name, p.start, p.bits.copy()) for p in pieces]
    for piece in new:
        where = rng.random(piece.bits.size) < 0.05
        piece.bits[where] ^= np.array(1, piece.bits.dtype)
    new[0].bits[seed % new[0].bits.size] += 1
    return new


class Trainer:
    """One epoch of a single-rank trainer; what it commits is recorded where etcd would hold it."""

    def __init__(self, store: Store | None = None, epoch: int = 1, run_id: str = RUN) -> None:
        self.store: Store = MemoryStore() if store is None else store
        self.log = WeightLog(self.store, run_id, epoch, ManualClock())
        self.base = first_state()
        self.states: list[dict[str, np.ndarray]] = []
        self.links: list[Link] = []

    @property
    def head(self) -> str:
        return self.links[-1][0]

    def start(self) -> None:
        """Commit version 0."""
        part = self.log.write_anchor(LAYOUT, self.base)
        self._committed(self.log.publish_anchor(LAYOUT, 0, [part], files={"config.json": b'{"a":1}', "empty": b""}))

    def step(self, before_commit: Callable[[], None] = lambda: None) -> None:
        """Publish and commit the next version."""
        number = len(self.links) - 1
        new = stepped(self.base, 100 + number)
        delta = self.log.write_delta(LAYOUT, self.base, new)
        payload = f"payload of step {number}".encode()
        self.store.put(content_digest(payload), payload)
        record = StepRecord(
            step=number,
            batch=[BatchEntry(f"grp_{number}", content_digest(payload))],
            rng={"torch": b"\0\1"},
            cursor=8 * number,
        )
        link = self.log.publish_delta(LAYOUT, self.links[-1][1], self.head, [delta.part], record)
        before_commit()
        advance(self.base, delta)
        self._committed(link)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def anchor(self) -> Link:
        """Write an anchor beside the head."""
        part = self.log.write_anchor(LAYOUT, self.base)
        files = {"config.json": b'{"a":1}'}
        return self.log.publish_anchor(LAYOUT, self.links[-1][1].version, [part], files=files, beside=self.links[-1])

    def snapshot(self) -> str:
        """Write a snapshot at the head."""
        return self.log.publish_snapshot(
            *self.links[-1], [self.log.write_snapshot(training_state(len(self.links)))], {"step": 1}
        )

    def _committed(self, link: Link) -> None:
        self.links.append(link)
        self.states.append({piece.name: piece.bits.copy() for piece in self.base})
        self.log.mark_committed(*link)


def training_state(seed: int) -> list[ArrayShard]:
    rng = np.random.default_rng(seed)
    moment = rng.normal(size=140).astype(np.float32)
    return whole_arrays(
        {"master": rng.normal(size=(20, 7)).astype(np.float32), "moment": moment, "step": np.array(seed)}
    )


def reader_of(store: Store, run_id: str = RUN) -> LogReader:
    return LogReader(store_fetch(store), run_id)


def restored(store: Store, head: str, run_id: str = RUN) -> HostWeights:
    host = HostWeights(run_id)
    store_reader(store, run_id).restore(host, head)
    return host


def holds(host: HostWeights, state: dict[str, np.ndarray]) -> bool:
    host.scrub()
    return all(np.array_equal(host.tensors[name], bits) for name, bits in state.items())
