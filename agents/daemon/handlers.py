"""Calls that others make on this node: `probe`, `workers`, `logs`. They answer from what is here, now; none changes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from agents.daemon.logs import answer_logs
from agents.daemon.processes import Processes
from whimbrel import wire
from whimbrel.clock import Clock
from whimbrel.wire.node import LogsRequest, ProbeReply, WorkersReply

Handler = Callable[[bytes], Awaitable[bytes]]


def make_handlers(
    node_id: str, incarnation: str, processes: Processes, clock: Clock, owners_heard_at: Callable[[], float | None]
) -> Mapping[str, Handler]:
    """The agent's calls by name; see `whimbrel.wire.node` for what they take and give."""
    started = clock.monotonic()

    async def probe(_payload: bytes) -> bytes:
        now, heard_at = clock.monotonic(), owners_heard_at()
        return wire.encode_message(
            ProbeReply(
                node_id=node_id,
                incarnation=incarnation,
                uptime_s=now - started,
                owners_age_s=-1.0 if heard_at is None else now - heard_at,
                workers=processes.statuses(),
                processes=processes.process_states(),
            )
        )

    async def workers(_payload: bytes) -> bytes:
        return wire.encode_message(WorkersReply(node_id=node_id, incarnation=incarnation, workers=processes.statuses()))

    async def logs(payload: bytes) -> bytes:
        request = wire.decode_message(payload, LogsRequest)
        return wire.encode_message(await asyncio.to_thread(answer_logs, processes.folders, request))

    return {"probe": probe, "workers": workers, "logs": logs}
