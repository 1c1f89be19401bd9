"""Asks the process behind a chunk server something, from an event loop, without threads: a probe must not queue behind
others that wait for dead nodes."""

from __future__ import annotations

import asyncio

from whimbrel.errors import Unreachable
from whimbrel.transport import frames
from whimbrel.transport.frames import Call, Hello, Reply


async def call_async(address: str, token: str, name: str, payload: bytes = b"", timeout_s: float = 5.0) -> bytes:
    """The answer to a call. `timeout_s` covers everything, the connection included.

    Raises:
        Unreachable: no answer in time. Unauthorized: wrong token. NotFound: there is no such call.
        WhimbrelError: whatever the handler raised.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(address, token, Call(name, payload))
    except TimeoutError as error:
        raise Unreachable(f"{address} did not answer within {timeout_s:.0f} s.", hint="Is that node up?") from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Unreachable(f"{address} cannot be reached: {error}.", hint="Is that node up?") from error


async def _ask(address: str, token: str, call: Call) -> bytes:
    host, port = frames.host_and_port(address)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for request in (Hello(frames.TRANSPORT_PROTOCOL, token), call):
            writer.write(frames.pack(request))
            await writer.drain()
            reply = await _receive(reader)
            if not reply.ok:
                raise frames.error_of(reply)
        return reply.payload
    finally:
        writer.close()


async def _receive(reader: asyncio.StreamReader) -> Reply:
    head = await reader.readexactly(frames.LENGTH.size)
    return frames.unpack_reply(await reader.readexactly(frames.frame_length(head)))
