"""Fetches chunks from whoever has them, over several connections at once, and verifies each.

A connection that breaks in the middle of a chunk is opened again and the transfer goes on at the byte it had reached. A
chunk whose bytes do not match its digest is fetched again from another source. Only complete, verified chunks leave
this module.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from whimbrel.delta import content_digest
from whimbrel.errors import Corrupt, LimitReached, MissingChunk, StorageFull, Unauthorized, Unreachable, WhimbrelError
from whimbrel.limits import CHUNK_MAX_BYTES, CONNECT_TIMEOUT_S, IO_TIMEOUT_S, TRANSFER_RETRIES, TRANSFER_STREAMS
from whimbrel.transport import frames
from whimbrel.transport.frames import Call, Get, Hello, Put, Reply, Request, Size

RECEIVE_BYTES: Final = 256 * 1024
RETRY_PAUSE_S: Final = 0.2
"""Before all sources are asked again, times the number of rounds so far."""
_ERRORS: Final = {kind.code: kind for kind in (MissingChunk, Unauthorized, LimitReached, StorageFull, Corrupt)}


class ChunkClient:
    """A client for many servers. Thread-safe."""

    def __init__(
        self,
        token: str,
        *,
        streams: int = TRANSFER_STREAMS,
        on_corrupt: Callable[[str, str], None] | None = None,
    ) -> None:
        self.bytes_received = 0
        self.retries = 0
        self.resumed = 0
        """Transfers that went on at the byte they had reached."""
        self.repaired = 0
        """Chunks that arrived corrupt and were fetched again."""
        self._token = token
        self._on_corrupt = on_corrupt
        self._pool = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="chunks")
        self._idle: dict[str, list[_Connection]] = {}
        self._lock = threading.Lock()

    def fetch(self, digests: Sequence[str], sources: Sequence[str]) -> dict[str, bytes]:
        """Fetch chunks from sources given as host:port, best first.

        Raises:
            MissingChunk: no source holds one of them.
            Corrupt: every source has wrong bytes for one of them.
            Unreachable: no source could be reached.
        """
        wanted = list(dict.fromkeys(digests))
        futures = [self._pool.submit(self._fetch_one, digest, list(sources)) for digest in wanted]
        try:
            return {digest: future.result() for digest, future in zip(wanted, futures, strict=True)}
        finally:
            for future in futures:
                future.cancel()

    def put(self, address: str, data: bytes) -> str:
        """Store a chunk at a server; returns its digest once it is durable there."""
        digest = content_digest(data)
        self._ask(address, Put(digest, len(data)), data)
        return digest

    def size(self, address: str, digest: str) -> int | None:
        """The chunk's size at a server, None when it is not there."""
        size = self._ask(address, Size(digest)).size
        return None if size < 0 else size

    def call(self, address: str, name: str, payload: bytes = b"", timeout_s: float = 5.0) -> bytes:
        """Ask the process behind a server something."""
        return self._ask(address, Call(name, payload), timeout_s=timeout_s).payload

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    # -- one chunk -----------------------------------------------------------------------------------------------------
    def _fetch_one(self, digest: str, sources: list[str]) -> bytes:
        failure: WhimbrelError = MissingChunk(f"No source for chunk {digest} is known.", hint="Is any node up?")
        missing: set[str] = set()
        for attempt in range(TRANSFER_RETRIES):
            if attempt:
                time.sleep(RETRY_PAUSE_S * attempt)
            for source in sources:
                try:
                    return self._fetch_from(digest, source)
                except MissingChunk as error:
                    missing.add(source)
                    failure = error
                except Corrupt as error:
                    self._count(repaired=1)
                    if self._on_corrupt is not None:
                        self._on_corrupt(digest, source)
                    failure = error
                except Unreachable as error:
                    self._count(retries=1)
                    failure = error
            if missing >= set(sources):
                raise MissingChunk(
                    f"Chunk {digest} is held by none of {len(sources)} sources.", hint="A node that has it may be away."
                )
        raise failure

    def _fetch_from(self, digest: str, source: str) -> bytes:
        """One chunk from one source, resumed after breaks as long as each attempt brings it further."""
        got = bytearray()
        while True:
            before = len(got)
            try:
                self._receive(digest, source, got)
            except _Broken as error:
                if len(got) == before:
                    raise Unreachable(f"{source} broke off: {error}.", hint="Another source is tried.") from error
                self._count(resumed=1)
                continue
            if content_digest(got) != digest:
                raise Corrupt(f"{source} sent other bytes than chunk {digest}.", hint="It is fetched from elsewhere.")
            return bytes(got)

    def _receive(self, digest: str, source: str, got: bytearray) -> None:
        connection = self._connect(source)
        try:
            reply = connection.ask(Get(digest, len(got)))
            if reply.size > CHUNK_MAX_BYTES or reply.nbytes != reply.size - len(got):
                raise Corrupt(f"{source} announces {reply.size} bytes for chunk {digest}.")
            before = len(got)
            try:
                connection.read_into(got, reply.nbytes)
            finally:
                self._count(bytes_received=len(got) - before)
        except BaseException:
            connection.close()
            raise
        self._give_back(source, connection)

    def _ask(self, address: str, request: Request, data: bytes = b"", *, timeout_s: float = IO_TIMEOUT_S) -> Reply:
        # A pooled connection may have been closed by its server meanwhile, hence one more try on a fresh one.
        for fresh in (False, True):
            connection = self._connect(address, fresh=fresh)
            try:
                reply = connection.ask(request, data, timeout_s=timeout_s)
            except _Broken as error:
                connection.close()
                if fresh or not connection.pooled:
                    raise Unreachable(f"{address} broke off: {error}.", hint="Is that node up?") from error
                continue
            except BaseException:
                connection.close()
                raise
            self._give_back(address, connection)
            return reply
        raise AssertionError("the loop returns or raises")

    # -- connections ---------------------------------------------------------------------------------------------------
    def _connect(self, address: str, *, fresh: bool = False) -> _Connection:
        if not fresh:
            with self._lock:
                idle = self._idle.get(address)
                if idle:
                    return idle.pop()
        return _Connection(address, self._token)

    def _give_back(self, address: str, connection: _Connection) -> None:
        connection.pooled = True
        with self._lock:
            self._idle.setdefault(address, []).append(connection)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


class _Broken(Exception):
    """The connection ended or timed out."""


class _Connection:
    """One greeted TCP connection."""

    def __init__(self, address: str, token: str) -> None:
        self.pooled = False
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise Unreachable(f"{address} cannot be reached: {error}.", hint="Is that node up?") from error
        try:
            self.ask(Hello(frames.TRANSPORT_PROTOCOL, token))
        except _Broken as error:
            self.close()
            raise Unreachable(f"{address} does not greet: {error}.", hint="Is that node up?") from error
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request, data: bytes = b"", *, timeout_s: float = IO_TIMEOUT_S) -> Reply:
        """Send a request and read its reply; raises the error that a refusal stands for, or _Broken."""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(frames.pack(request))
            if data:
                self._socket.sendall(data)
            head = self._exactly(frames.LENGTH.size)
            reply = frames.unpack_reply(self._exactly(frames.frame_length(head)))
        except OSError as error:
            raise _Broken(str(error) or type(error).__name__) from error
        if not reply.ok:
            raise _ERRORS.get(reply.code, WhimbrelError)(reply.message)
        return reply

    def read_into(self, got: bytearray, nbytes: int) -> None:
        """Append exactly nbytes raw bytes; what came before a break stays."""
        left = nbytes
        while left:
            try:
                data = self._socket.recv(min(left, RECEIVE_BYTES))
            except OSError as error:
                raise _Broken(str(error) or type(error).__name__) from error
            if not data:
                raise _Broken("the connection was closed")
            got += data
            left -= len(data)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, nbytes: int) -> bytes:
        got = bytearray()
        self.read_into(got, nbytes)
        return bytes(got)


async def call_async(address: str, token: str, name: str, payload: bytes = b"", timeout_s: float = 5.0) -> bytes:
    """Ask the process behind a chunk server something, from an event loop. Raises as `ChunkClient.call` does."""
    client = ChunkClient(token, streams=1)
    try:
        async with asyncio.timeout(timeout_s + CONNECT_TIMEOUT_S):
            return await asyncio.to_thread(client.call, address, name, payload, timeout_s)
    except TimeoutError as error:
        raise Unreachable(f"{address} did not answer within {timeout_s:.0f} s.", hint="Is that node up?") from error
    finally:
        client.close()
