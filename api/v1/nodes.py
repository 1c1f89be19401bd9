"""`/v1/nodes`: the machines, and what the user wants of them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request

from api.services import Services
from api.v1 import models, present
from api.v1.reads import services_of
from orchestrator.db import tables
from whimbrel.clock import SystemClock

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])

NodeName = Annotated[str, Path(max_length=80, description="The node's name.")]

_MARKS: dict[str, tuple[bool, bool, str]] = {
    "cordon": (True, False, "takes no new workers"),
    "uncordon": (False, False, "takes workers again"),
    "drain": (True, True, "takes no new workers, and its workers move away"),
}
"""Verb to (cordoned, draining, what that means)."""
_HOLDING = frozenset({"starting", "running", "paused", "unreachable"})
"""States of a worker that takes a slot of its node."""


@router.get("")
async def list_nodes(request: Request) -> models.Page[models.Node]:
    """Every node that ever joined, by name."""
    services = services_of(request)
    rows = sorted(await services.fleet.nodes(), key=lambda row: row.id)
    return models.Page[models.Node](items=await _present(services, rows))


@router.get("/{node}")
async def get_node(request: Request, node: NodeName) -> models.Node:
    """One node."""
    services = services_of(request)
    return (await _present(services, [await services.fleet.node(node)]))[0]


@router.post("/{node}/{verb}", status_code=202)
async def mark_node(request: Request, node: NodeName, verb: Literal["cordon", "uncordon", "drain"]) -> models.Node:
    """Say what is wanted of a node; it is durable when this answers."""
    services = services_of(request)
    cordoned, draining, meaning = _MARKS[verb]
    row = await services.fleet.mark_node(node, cordoned=cordoned, draining=draining)
    await services.events.append(f"node_{verb}", f"Node {node} {meaning}, as asked.", subject=f"node {node}")
    services.controller.wake()
    return (await _present(services, [row]))[0]


async def _present(services: Services, rows: list[tables.Node]) -> list[models.Node]:
    now = SystemClock().wall()
    held: dict[str, list[str]] = {}
    for worker in await services.fleet.workers():
        if worker.state in _HOLDING:
            held.setdefault(worker.node_id, []).append(f"{worker.run_id}/{worker.name}")
    return [present.node(row, sorted(held.get(row.id, [])), now) for row in rows]
