"""Serves chunks of this node to the members of its cluster, takes payloads from them, and answers probes.

Knows digests and bytes, not what they mean. Disk access happens in threads, so that a slow disk delays one transfer and
not the answers to others.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from whimbrel.delta import content_digest
from whimbrel.errors import Corrupt, LimitReached, MissingChunk, Unauthorized, UsageError, WhimbrelError
from whimbrel.limits import CHUNK_MAX_BYTES, CONNECTIONS_MAX, IDLE_TIMEOUT_S, IO_TIMEOUT_S
from whimbrel.log import get_logger
from whimbrel.transport import frames
from whimbrel.transport.frames import Call, Get, Hello, Put, Reply, Request, Size

SLICE_BYTES: Final = 1024 * 1024
"""Read and sent at a time, so that one transfer holds little memory."""

Handler = Callable[[bytes], Awaitable[bytes]]

log = get_logger("chunks")


class ChunkSource(Protocol):
    """Where chunks are read from."""

    def size(self, digest: str) -> int | None: ...

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes: ...


class ChunkSink(Protocol):
    """Where chunks that others send are kept; durable when `put` returns."""

    def put(self, digest: str, data: bytes) -> None: ...


class ChunkServer:
    """A TCP server in the running event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        sources: Sequence[ChunkSource],
        sink: ChunkSink | None = None,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        self.address = ""
        self.bytes_sent = 0
        self._host, self._port = host, port
        self._token = token
        self._sources = list(sources)
        self._sink = sink
        self._handlers = dict(handlers or {})
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises WhimbrelError when the port is in use."""
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port)
        except OSError as error:
            raise WhimbrelError(
                f"The chunk server cannot listen on {self._host}:{self._port}: {error.strerror}.",
                hint="Choose another port.",
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"{self._host}:{port}"

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=2.0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the other side is gone or silent; it resumes on a new connection
        except Corrupt as error:
            log.warning("connection dropped", reason=error.message)
        except asyncio.CancelledError:
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) > CONNECTIONS_MAX:
            error = LimitReached(f"More than {CONNECTIONS_MAX} connections.", hint="Try another source.")
            await _send(writer, _refusal(error))
            return
        if not await self._greet(reader, writer):
            return
        while True:
            request = await _receive(reader, IDLE_TIMEOUT_S)
            try:
                await self._answer(request, reader, writer)
            except WhimbrelError as error:
                await _send(writer, _refusal(error))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        hello = await _receive(reader, IO_TIMEOUT_S)
        known = isinstance(hello, Hello) and hmac.compare_digest(hello.token.encode(), self._token.encode())
        if not known:
            error = Unauthorized("The chunk server does not know this token.", hint="Use the cluster's token.")
            await _send(writer, _refusal(error))
            return False
        await _send(writer, Reply(ok=True))
        return True

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match request:
            case Get():
                await self._send_chunk(request, writer)
            case Put():
                await self._take_chunk(request, reader, writer)
            case Size():
                held = await asyncio.to_thread(self._find, request.digest)
                await _send(writer, Reply(ok=True, size=-1 if held is None else held[1]))
            case Call():
                await _send(writer, Reply(ok=True, payload=await self._call(request)))
            case Hello():
                raise UsageError("A second hello.")

    def _find(self, digest: str) -> tuple[ChunkSource, int] | None:
        for source in self._sources:
            size = source.size(digest)
            if size is not None:
                return source, size
        return None

    async def _send_chunk(self, request: Get, writer: asyncio.StreamWriter) -> None:
        held = await asyncio.to_thread(self._find, request.digest)
        if held is None:
            raise MissingChunk(f"Chunk {request.digest} is not held here.")
        source, size = held
        if not 0 <= request.offset <= size:
            raise UsageError(f"Offset {request.offset} is outside the {size} bytes of chunk {request.digest}.")
        # The first read comes before the reply: if it fails, that is still a refusal and not a broken transfer.
        data = await asyncio.to_thread(source.get, request.digest, request.offset, SLICE_BYTES)
        await _send(writer, Reply(ok=True, nbytes=size - request.offset, size=size))
        position = request.offset
        while data:
            writer.write(data)
            async with asyncio.timeout(IO_TIMEOUT_S):
                await writer.drain()
            position += len(data)
            self.bytes_sent += len(data)
            if position >= size:
                return
            data = await asyncio.to_thread(source.get, request.digest, position, SLICE_BYTES)
        raise Corrupt(f"Chunk {request.digest} ended after {position} of {size} bytes.")

    async def _take_chunk(self, request: Put, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not 0 <= request.nbytes <= CHUNK_MAX_BYTES:
            # Its bytes are on the way already, so the connection cannot be used on.
            await _send(writer, _refusal(LimitReached(f"A chunk of {request.nbytes} bytes is over {CHUNK_MAX_BYTES}.")))
            raise Corrupt(f"a chunk of {request.nbytes} bytes was offered")
        async with asyncio.timeout(IO_TIMEOUT_S + request.nbytes / SLICE_BYTES):
            data = await reader.readexactly(request.nbytes)
        if self._sink is None:
            raise UsageError("This chunk server takes no chunks.")
        if content_digest(data) != request.digest:
            raise Corrupt(f"The bytes sent are not chunk {request.digest}.", hint="Send them again.")
        await asyncio.to_thread(self._sink.put, request.digest, data)
        await _send(writer, Reply(ok=True, size=request.nbytes))

    async def _call(self, request: Call) -> bytes:
        handler = self._handlers.get(request.name)
        if handler is None:
            raise UsageError(f"There is no call {request.name!r} here.")
        async with asyncio.timeout(IO_TIMEOUT_S):
            return await handler(request.payload)


async def _receive(reader: asyncio.StreamReader, timeout_s: float) -> Request:
    async with asyncio.timeout(timeout_s):
        head = await reader.readexactly(frames.LENGTH.size)
    async with asyncio.timeout(IO_TIMEOUT_S):
        return frames.unpack_request(await reader.readexactly(frames.frame_length(head)))


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(frames.pack(reply))
    async with asyncio.timeout(IO_TIMEOUT_S):
        await writer.drain()


def _refusal(error: WhimbrelError) -> Reply:
    return Reply(ok=False, code=error.code, message=str(error))
