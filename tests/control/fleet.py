"""Nodes in the test's own process: real leases in a real etcd, signs given to the controller directly."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from orchestrator.control import Controller
from whimbrel import wire
from whimbrel.checkpoint import BatchEntry, DirectoryStore, StepRecord, WeightLog
from whimbrel.coordination import Compare, Etcd, LeaseKeeper, Put, keys
from whimbrel.delta import Layout, Piece, TensorSpec, advance
from whimbrel.errors import WhimbrelError
from whimbrel.ids import new_id
from whimbrel.wire.cluster import Head, NodeRecord, Ownership, Resources, WorkerRecord
from whimbrel.wire.work import AgentReport, Caller, Progress, WorkerExit, WorkerStatus

TICK_S = 0.1


@dataclass
class FakeWorker:
    owner: Ownership
    epoch: int
    lease: LeaseKeeper
    state: str = "running"
    exit: WorkerExit | None = None
    phase: str = "working"


@dataclass
class FakeNode:
    """An agent and its workers. `controllers`: whom it speaks to; those that do not serve are skipped."""

    node_id: str
    endpoints: list[str]
    controllers: list[Controller]
    slots: int = 8
    heads: dict[str, int] = field(default_factory=dict)
    workers: dict[tuple[str, str], FakeWorker] = field(default_factory=dict)
    started: list[tuple[str, int]] = field(default_factory=list)
    sequence: int = 0
    incarnation: str = field(default_factory=lambda: new_id("inc"))

    async def __aenter__(self) -> FakeNode:
        record = NodeRecord(
            node_id=self.node_id,
            incarnation=self.incarnation,
            address="127.0.0.1:1",
            resources=Resources(cpus=1, memory_bytes=1, slots=self.slots),
        )
        self._lease = LeaseKeeper(self.endpoints, keys.node(self.node_id), wire.encode_json(record), 6)
        await asyncio.to_thread(self._lease.start)
        self._etcd = Etcd(self.endpoints)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        for worker in self.workers.values():
            await asyncio.to_thread(worker.lease.close)
        await asyncio.to_thread(self._lease.close)
        await self._etcd.close()

    def kill(self, worker: str, code: int | None = 1, cause: str = "") -> None:
        for (_run, name), one in self.workers.items():
            if name == worker:
                one.state, one.exit = "exited", WorkerExit(code=code, cause=cause, log_tail="last words")

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(WhimbrelError):  # etcd or the controller is away: an agent goes on
                await self._obey()
            with contextlib.suppress(WhimbrelError):
                self._speak()
            await asyncio.sleep(TICK_S)

    async def _obey(self) -> None:
        items, _ = await self._etcd.list(keys.OWNERS)
        for item in items:
            owner = wire.decode_json(item.value, Ownership)
            part = (owner.run_id, owner.worker)
            mine = owner.node_id == self.node_id and owner.state == "running"
            have = self.workers.get(part)
            if have is not None and have.epoch < item.mod_revision and have.state != "exited":
                have.state, have.exit = "exited", WorkerExit(code=None, signal="SIGKILL")
            if have is not None and have.state == "exited":
                await asyncio.to_thread(have.lease.close)
            if mine and (have is None or have.epoch < item.mod_revision):
                await self._begin(part, owner, item.mod_revision)

    async def _begin(self, part: tuple[str, str], owner: Ownership, epoch: int) -> None:
        record = WorkerRecord(run_id=part[0], worker=part[1], role=owner.role, epoch=epoch, node_id=self.node_id, pid=1)
        lease = LeaseKeeper(self.endpoints, keys.worker(*part), wire.encode_json(record), 6)
        await asyncio.to_thread(lease.start)
        self.workers[part] = FakeWorker(owner, epoch, lease)
        self.started.append((part[1], epoch))

    def _speak(self) -> None:
        controller = next((one for one in self.controllers if one.serving), None)
        if controller is None:
            return
        self.sequence += 1
        status = [
            WorkerStatus(run_id=run, worker=name, epoch=one.epoch, state=one.state, exit=one.exit, pids=[7])  # type: ignore[arg-type]
            for (run, name), one in self.workers.items()
        ]
        reply = controller.signals.agent_report(
            AgentReport(node_id=self.node_id, incarnation=self.incarnation, sequence=self.sequence, workers=status)
        )
        for part, one in list(self.workers.items()):
            if f"{part[0]}/{part[1]}@{one.epoch}" in reply.forget:
                del self.workers[part]
            elif one.state == "running":
                version = max(self.heads.get(part[0], 0), 0)
                caller = Caller(run_id=part[0], worker=part[1], epoch=one.epoch)
                gauges = {"replayed_steps": 2.0} if part[1] == "trainer" else {}
                controller.signals.progress(
                    Progress(caller=caller, phase="working", phase_age_s=0.0, policy_version=version, gauges=gauges)  # type: ignore[arg-type]
                )


class Log:
    """A trainer's side of the weight log for one run: publishes and commits tiny versions."""

    def __init__(self, store: Path, run_id: str, endpoints: list[str], epoch: int = 1) -> None:
        self._layout = Layout.of([TensorSpec("w", "BF16", (64,))])
        self._bits = np.zeros(64, np.uint16)
        self._log = WeightLog(DirectoryStore(store), run_id, epoch)
        self._etcd = Etcd(endpoints)
        self._run_id, self._epoch = run_id, epoch
        self._parent: tuple[str, object] | None = None
        self.version = -1

    async def commit(self, groups: list[tuple[str, str]] = []) -> None:  # noqa: B006
        if self._parent is None:
            part = self._log.write_anchor(self._layout, [Piece("w", 0, self._bits)])
            digest, manifest = self._log.publish_anchor(self._layout, 0, [part])
        else:
            new = self._bits.copy()
            new[self.version % 64] += 1
            delta = self._log.write_delta(self._layout, [Piece("w", 0, self._bits)], [Piece("w", 0, new)])
            step = StepRecord(
                step=self.version,
                batch=[BatchEntry(group_id, payload) for group_id, payload in groups],
                hyperparameters={},
                rng={},
                cursor=0,
                training_digest="",
                world_size=1,
                metrics={"reward": 0.5},
            )
            parent_digest, parent = self._parent
            digest, manifest = self._log.publish_delta(self._layout, parent, parent_digest, [delta.part], step)  # type: ignore[arg-type]
            advance([Piece("w", 0, self._bits)], delta)
        self._parent, self.version = (digest, manifest), manifest.version
        head = Head(run_id=self._run_id, version=self.version, manifest=digest, epoch=self._epoch)
        before = await self._etcd.get(keys.head(self._run_id))
        compare = Compare(keys.head(self._run_id), "mod", before.mod_revision if before else 0)
        assert (await self._etcd.txn([compare], [Put(keys.head(self._run_id), wire.encode_json(head))])).succeeded

    async def close(self) -> None:
        await self._etcd.close()
