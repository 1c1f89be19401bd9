"""Serves chunks of this node to the members of its cluster, takes payloads from them, and answers probes.

Knows digests and bytes, not what they mean. Disk access happens in threads, so that a slow disk delays one transfer and
not the answers to others.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from whimbrel.delta import content_digest
from whimbrel.errors import (
    Conflict,
    Corrupt,
    LimitReached,
    MissingChunk,
    NotFound,
    TimedOut,
    Unauthorized,
    Unreachable,
    WhimbrelError,
)
from whimbrel.limits import (
    CHUNK_DISK_THREADS,
    CHUNK_MAX_BYTES,
    CHUNK_PUTS_MAX,
    CONNECTIONS_MAX,
    FRAME_MAX_BYTES,
    IDLE_TIMEOUT_S,
    IO_TIMEOUT_S,
    SLICE_BYTES,
)
from whimbrel.log import get_logger
from whimbrel.transport import frames
from whimbrel.transport.frames import Call, Get, Hello, Put, Reply, Request, Size

ANSWER_MAX_BYTES: Final = FRAME_MAX_BYTES - 1024
"""What a handler may answer: it must fit into one frame with its envelope."""

Handler = Callable[[bytes], Awaitable[bytes]]
Answer = TypeVar("Answer")

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
        scratch: ChunkSink | None = None,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        self.address = ""
        self.bytes_sent = 0
        self._host, self._port = host, port
        self._token = token
        self._sources = list(sources)
        self._sink = sink
        self._scratch = scratch or sink
        self._handlers = dict(handlers or {})
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._puts = asyncio.Semaphore(CHUNK_PUTS_MAX)
        self._disk = ThreadPoolExecutor(CHUNK_DISK_THREADS, thread_name_prefix="chunk-disk")

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
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the other side is gone or silent; it resumes on a new connection
        except (_Dropped, Corrupt) as error:
            log.warning("connection dropped", reason=str(error))
        except asyncio.CancelledError:
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) > CONNECTIONS_MAX:
            error = LimitReached(f"More than {CONNECTIONS_MAX} connections.", hint="Try another source.")
            await _send(writer, frames.refusal(error))
            return
        if not await self._greet(reader, writer):
            return
        while True:
            request = await _receive(reader, IDLE_TIMEOUT_S)
            try:
                await self._answer(request, reader, writer)
            except WhimbrelError as error:
                await _send(writer, frames.refusal(error))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        hello = await _receive(reader, IO_TIMEOUT_S)
        error: WhimbrelError | None = None
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            error = Unauthorized("The chunk server does not know this token.", hint="Use the cluster's token.")
        elif hello.protocol != frames.TRANSPORT_PROTOCOL:
            error = Conflict(
                f"The chunk server speaks protocol {frames.TRANSPORT_PROTOCOL}, not {hello.protocol}.",
                hint="Install the same release of Whimbrel on all nodes.",
            )
        if error is not None:
            await _send(writer, frames.refusal(error))
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
                held = await self._on_disk(self._find, request.digest)
                await _send(writer, Reply(ok=True, size=-1 if held is None else held[1]))
            case Call():
                await _send(writer, Reply(ok=True, payload=await self._call(request)))
            case Hello():
                raise Conflict("This connection has been greeted already.")

    def _find(self, digest: str) -> tuple[ChunkSource, int] | None:
        for source in self._sources:
            size = source.size(digest)
            if size is not None:
                return source, size
        return None

    async def _send_chunk(self, request: Get, writer: asyncio.StreamWriter) -> None:
        held = await self._on_disk(self._find, request.digest)
        if held is None:
            raise MissingChunk(f"Chunk {request.digest} is not held here.")
        source, size = held
        # One that asks for more than there is learns the size and decides.
        position = min(max(request.offset, 0), size)
        # The first read comes before the reply: if it fails, that is still a refusal and not a broken transfer.
        data = await self._read(source, request.digest, position, size)
        await _send(writer, Reply(ok=True, nbytes=size - position, size=size))
        while position < size:
            if not data:
                raise _Dropped(f"chunk {request.digest} ended after {position} of {size} bytes")
            writer.write(data)
            async with asyncio.timeout(IO_TIMEOUT_S):
                await writer.drain()
            position += len(data)
            self.bytes_sent += len(data)
            try:
                data = await self._read(source, request.digest, position, size)
            except WhimbrelError as error:
                # The other side is reading bytes of the chunk: nothing else can be said to it any more.
                raise _Dropped(error.message) from error

    async def _read(self, source: ChunkSource, digest: str, position: int, size: int) -> bytes:
        length = min(SLICE_BYTES, size - position)
        return await self._on_disk(source.get, digest, position, length) if length else b""

    async def _take_chunk(self, request: Put, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sink = self._sink if request.lasting else self._scratch
        if sink is None or not 0 <= request.nbytes <= CHUNK_MAX_BYTES:
            error: WhimbrelError = LimitReached(f"A chunk of {request.nbytes} bytes is over {CHUNK_MAX_BYTES}.")
            if sink is None:
                error = Conflict("This chunk server takes no chunks.", hint="Send it to another node.")
            # Its bytes are on the way already, so the connection cannot be used on.
            await _send(writer, frames.refusal(error))
            raise _Dropped(error.message)
        async with self._puts:
            async with asyncio.timeout(IO_TIMEOUT_S + request.nbytes / SLICE_BYTES):
                data = await reader.readexactly(request.nbytes)
            if await asyncio.to_thread(content_digest, data) != request.digest:
                raise Corrupt(f"The bytes sent are not chunk {request.digest}.", hint="Send them again.")
            await self._on_disk(sink.put, request.digest, data)
        await _send(writer, Reply(ok=True, size=request.nbytes))

    async def _call(self, request: Call) -> bytes:
        handler = self._handlers.get(request.name)
        if handler is None:
            raise NotFound(f"There is no call {request.name!r} here.")
        try:
            async with asyncio.timeout(IO_TIMEOUT_S):
                answer = await handler(request.payload)
        except TimeoutError as error:
            raise TimedOut(f"{request.name} took more than {IO_TIMEOUT_S:.0f} s.") from error
        except WhimbrelError:
            raise
        except Exception as error:
            log.exception("a call failed", call=request.name)
            raise WhimbrelError(f"{request.name} failed: {error}", hint="See the log of that node.") from error
        if len(answer) > ANSWER_MAX_BYTES:
            raise LimitReached(f"The answer to {request.name} has {len(answer)} bytes; {ANSWER_MAX_BYTES} fit.")
        return answer

    async def _on_disk(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        """Run a store's method in a thread. A disk that fails is this source's trouble: others are asked."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._disk, lambda: function(*arguments))
        except OSError as error:
            log.error("the chunk store fails", reason=str(error))
            raise Unreachable(f"The node's chunk store fails: {error}.", hint="Look at its disk.") from error


class _Dropped(Exception):
    """The connection is of no further use; the other side learns it from its end."""


async def _receive(reader: asyncio.StreamReader, timeout_s: float) -> Request:
    async with asyncio.timeout(timeout_s):
        head = await reader.readexactly(frames.LENGTH.size)
    async with asyncio.timeout(IO_TIMEOUT_S):
        return frames.unpack_request(await reader.readexactly(frames.frame_length(head)))


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(frames.pack(reply))
    async with asyncio.timeout(IO_TIMEOUT_S):
        await writer.drain()
