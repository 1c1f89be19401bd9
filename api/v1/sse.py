"""Server-sent events, resumable by id.

Readers hold no queue: each reads its own next events from the database, in bounded batches, when the tail has moved.
A slow reader therefore costs nothing but its own delay, and cannot lose an event that the database still has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from api.v1.models import Event
from whimbrel.errors import LimitReached, WhimbrelError
from whimbrel.limits import SSE_HEARTBEAT_S, SSE_QUEUE, SSE_READERS_MAX, TAIL_POLL_S
from whimbrel.log import get_logger

MEDIA_TYPE: Final = "text/event-stream"

ReadAfter = Callable[[int, int], Awaitable[tuple[list[Event], int]]]
"""(after, limit) to events in order of their ids, and the id up to which all were looked at."""


class EventTail:
    """Knows the newest event id and wakes readers when it moves."""

    def __init__(self, newest: Callable[[], Awaitable[int]], heartbeat_s: float = SSE_HEARTBEAT_S) -> None:
        self._newest = newest
        self._heartbeat_s = heartbeat_s
        self._moved = asyncio.Condition()
        self._readers = 0
        self._id = -1
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._log = get_logger("events")

    @property
    def readers(self) -> int:
        return self._readers

    async def close(self) -> None:
        """End all streams, so that a shutdown need not wait for readers to leave."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        async with self._moved:
            self._moved.notify_all()

    async def open(self, after: int | None, read: ReadAfter) -> AsyncIterator[bytes]:
        """A stream that begins after `after`, or with what comes next when it is None.

        Raises:
            LimitReached: too many streams are open.
        """
        if self._readers >= SSE_READERS_MAX:
            raise LimitReached(
                f"{SSE_READERS_MAX} event streams are open already.", hint="Close some dashboards, or poll /v1/events."
            )
        start = await self._newest() if after is None else after
        return self._stream(start, read)

    async def _stream(self, after: int, read: ReadAfter) -> AsyncIterator[bytes]:
        self._readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="event-tail")
        try:
            yield f"id: {after}\nevent: ready\ndata: {{}}\n\n".encode()
            while not self._closing:
                events, upto = await read(after, SSE_QUEUE)
                for event in events:
                    yield encode_event(event)
                moved, after = upto > after, upto
                if not moved and not await self._wait(after):
                    yield b": heartbeat\n\n"
        finally:
            self._readers -= 1

    async def _wait(self, after: int) -> bool:
        """Wait until the tail is beyond `after`; False when a heartbeat is due first."""
        try:
            async with asyncio.timeout(self._heartbeat_s), self._moved:
                await self._moved.wait_for(lambda: self._closing or self._id > after)
        except TimeoutError:
            return False
        return True

    async def _watch(self) -> None:
        while True:
            if self._readers:
                try:
                    newest = await self._newest()
                except WhimbrelError as error:  # readers wait; heartbeats go on; the next look tries again
                    self._log.warning("the newest event cannot be read", reason=str(error))
                    newest = self._id
                if newest != self._id:
                    async with self._moved:
                        self._id = newest
                        self._moved.notify_all()
            await asyncio.sleep(TAIL_POLL_S)


def encode_event(event: Event) -> bytes:
    """One event as it goes over the wire; JSON has no raw line ends, so one data line is enough."""
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()
