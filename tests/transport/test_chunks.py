"""Chunks cross broken, lying and hostile connections and arrive whole or not at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.transport.links import TOKEN, Proxy, keep
from whimbrel.checkpoint import MemoryStore
from whimbrel.delta import content_digest
from whimbrel.errors import Corrupt, MissingChunk, Unauthorized, Unreachable, WhimbrelError
from whimbrel.limits import CHUNK_MAX_BYTES
from whimbrel.transport import ChunkClient, ChunkServer, call_async, frames


@pytest_asyncio.fixture
async def store() -> MemoryStore:
    return MemoryStore()


@pytest_asyncio.fixture
async def server(store: MemoryStore) -> AsyncIterator[ChunkServer]:
    async def shout(payload: bytes) -> bytes:
        return payload.upper()

    server = ChunkServer("127.0.0.1", 0, TOKEN, sources=[store], sink=store, handlers={"shout": shout})
    await server.start()
    yield server
    await server.close()


@pytest.fixture
def client() -> Iterator[ChunkClient]:
    client = ChunkClient(TOKEN)
    yield client
    client.close()


async def test_many_chunks_arrive_over_parallel_streams(
    server: ChunkServer, store: MemoryStore, client: ChunkClient
) -> None:
    digests = [keep(store, 300_000 + number) for number in range(12)] + [keep(store, 0)]
    fetched = await asyncio.to_thread(client.fetch, digests, ["127.0.0.1:1", server.address])
    assert {digest: content_digest(data) for digest, data in fetched.items()} == {digest: digest for digest in digests}


async def test_a_broken_transfer_goes_on_at_the_byte_it_had_reached(
    server: ChunkServer, store: MemoryStore, client: ChunkClient
) -> None:
    nbytes = 1_000_000
    digest = keep(store, nbytes)
    proxy = Proxy(server.address, cut_after=300_000)
    fetched = await asyncio.to_thread(client.fetch, [digest], [proxy.address])
    assert content_digest(fetched[digest]) == digest
    assert client.resumed >= 3
    assert client.bytes_received == nbytes, "no byte of the chunk crossed twice"
    proxy.close()


async def test_a_corrupt_chunk_is_fetched_again_from_another_source(server: ChunkServer, store: MemoryStore) -> None:
    digest = keep(store, 200_000)
    liar = Proxy(server.address, flips=True)
    reported: list[tuple[str, str]] = []
    client = ChunkClient(TOKEN, on_corrupt=lambda digest, source: reported.append((digest, source)))
    fetched = await asyncio.to_thread(client.fetch, [digest], [liar.address, server.address])
    assert content_digest(fetched[digest]) == digest
    assert reported == [(digest, liar.address)]
    assert client.repaired == 1
    client.close()
    liar.close()


async def test_wrong_bytes_everywhere_are_never_returned(
    server: ChunkServer, store: MemoryStore, client: ChunkClient
) -> None:
    digest = keep(store, 200_000)
    liar = Proxy(server.address, flips=True)
    with pytest.raises(Corrupt):
        await asyncio.to_thread(client.fetch, [digest], [liar.address])
    liar.close()


async def test_a_chunk_that_nobody_has_is_named(server: ChunkServer, client: ChunkClient) -> None:
    with pytest.raises(MissingChunk, match="0" * 32):
        await asyncio.to_thread(client.fetch, ["0" * 32], [server.address])
    for sources in (["127.0.0.1:1"], ["127.0.0.1:1", server.address], [server.address, "127.0.0.1:1"]):
        with pytest.raises(Unreachable):  # the one that is away may have it
            await asyncio.to_thread(client.fetch, ["0" * 32], sources)


async def test_a_chunk_sent_is_durable_under_its_own_digest_only(
    server: ChunkServer, store: MemoryStore, client: ChunkClient
) -> None:
    digest = await asyncio.to_thread(client.put, server.address, b"payload")
    assert store.get(digest) == b"payload"
    with pytest.raises(Corrupt):
        await asyncio.to_thread(client._ask, server.address, frames.Put("0" * 32, 7), b"payload")
    assert store.size("0" * 32) is None
    assert await asyncio.to_thread(client.size, server.address, digest) == 7


async def test_an_oversized_chunk_is_refused_before_it_is_read(server: ChunkServer, client: ChunkClient) -> None:
    with pytest.raises(WhimbrelError, match="over"):
        await asyncio.to_thread(client._ask, server.address, frames.Put("0" * 32, CHUNK_MAX_BYTES + 1))


async def test_a_wrong_token_gets_a_reason_and_nothing_else(server: ChunkServer, store: MemoryStore) -> None:
    digest = keep(store, 10)
    stranger = ChunkClient("another token")
    with pytest.raises(Unauthorized):
        await asyncio.to_thread(stranger.fetch, [digest], [server.address])
    stranger.close()


async def test_garbage_does_not_disturb_the_server(
    server: ChunkServer, store: MemoryStore, client: ChunkClient
) -> None:
    host, _, port = server.address.rpartition(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, frames.LENGTH.pack(3) + b"abc"):
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(junk)
            await asyncio.sleep(0.05)
    digest = keep(store, 1_000)
    assert digest in await asyncio.to_thread(client.fetch, [digest], [server.address])


async def test_calls_reach_the_process_behind_the_server(server: ChunkServer) -> None:
    assert await call_async(server.address, TOKEN, "shout", b"hello") == b"HELLO"
    with pytest.raises(WhimbrelError, match="no call"):
        await call_async(server.address, TOKEN, "nothing")


async def test_what_need_not_last_goes_to_the_scratch_store_and_is_served_from_there(client: ChunkClient) -> None:
    lasting, scratch = MemoryStore(), MemoryStore()
    server = ChunkServer("127.0.0.1", 0, TOKEN, sources=[lasting, scratch], sink=lasting, scratch=scratch)
    await server.start()
    kept = await asyncio.to_thread(client.put, server.address, b"a finished group")
    passing = await asyncio.to_thread(lambda: client.put(server.address, b"an unfinished one", lasting=False))
    assert lasting.size(kept) is not None
    assert (lasting.size(passing), scratch.size(kept)) == (None, None)
    fetched = await asyncio.to_thread(client.fetch, [kept, passing], [server.address])
    assert fetched == {kept: b"a finished group", passing: b"an unfinished one"}
    await server.close()
