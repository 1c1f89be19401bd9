"""Where a worker goes: a node that is certainly there, with a free slot, the emptiest first, ties by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.health import reports
from orchestrator.core.world import Worker, World


@dataclass
class Slots:
    """Free slots per node while a plan is made; taking one is seen by the next placement of the same plan."""

    free: dict[str, int]
    used: dict[str, int]
    closed: dict[str, str] = field(default_factory=dict[str, str])
    """Nodes that take no worker, with the reason in two or three words."""

    @classmethod
    def of(cls, world: World) -> Slots:
        """Count what is owned now. A part that is owned on a node takes a slot there, whatever its health."""
        used = {node.node_id: 0 for node in world.nodes}
        for run in world.runs:
            for worker in run.workers:
                if worker.owner is not None and worker.owner.running:
                    used[worker.owner.node_id] = used.get(worker.owner.node_id, 0) + 1
        closed: dict[str, str] = {}
        for node in world.nodes:
            if node.cordoned or node.draining:
                closed[node.node_id] = "draining" if node.draining else "cordoned"
            elif not node.lease.present or node.state == "lost":
                closed[node.node_id] = "lost" if node.state == "lost" else "unreachable"
            elif not reports(world, node):
                closed[node.node_id] = "silent"
        free = {node.node_id: node.slots - used[node.node_id] for node in world.nodes}
        return cls(free, used, closed)

    def release(self, worker: Worker) -> None:
        """The worker leaves its node; its slot there may be taken in the same plan."""
        if worker.owner is not None and worker.owner.running and worker.owner.node_id in self.free:
            self.free[worker.owner.node_id] += 1
            self.used[worker.owner.node_id] -= 1

    def take(self, node_id: str) -> None:
        self.free[node_id] -= 1
        self.used[node_id] += 1

    def best(self, *, prefer: str = "", avoid: frozenset[str] = frozenset()) -> str | None:
        """The node for one more worker, or None: `prefer` if it can, nodes in `avoid` only if no other can."""
        able = [node_id for node_id, free in self.free.items() if free > 0 and node_id not in self.closed]
        if not able:
            return None
        return min(able, key=lambda node_id: (node_id in avoid, node_id != prefer, self.used[node_id], node_id))

    def shortage(self) -> str:
        """Why no node can take a worker, as a sentence."""
        if not self.free:
            return "No node has joined yet; start an agent with `whimbrel agent`."
        open_nodes = [node_id for node_id in self.free if node_id not in self.closed]
        if not open_nodes:
            states = ", ".join(f"{node_id} is {why}" for node_id, why in sorted(self.closed.items()))
            return f"No node takes workers: {states}."
        full = ", ".join(sorted(open_nodes))
        return f"All slots are taken on {full}; add a node or raise its slots."
