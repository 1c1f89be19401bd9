"""A transfer survives its sources: servers that restart, freeze, lose chunks or lie in the middle of one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import pytest_asyncio

from tests.transport.links import TOKEN, Proxy, keep
from whimbrel.checkpoint import MemoryStore
from whimbrel.delta import content_digest
from whimbrel.errors import Conflict, MissingChunk, NotFound, TimedOut, Unreachable, UsageError, WhimbrelError
from whimbrel.transport import ChunkClient, ChunkServer, call_async, client, connection, frames, server

NBYTES = 3_000_000
SLICE = server.SLICE_BYTES


class Rotten(MemoryStore):
    """A store that fails, in one way or another, behind the first slice of a chunk."""

    def __init__(self, failure: Exception | None = None, *, lies: bool = False, fails_at: int = SLICE) -> None:
        super().__init__()
        self.failure, self.lies, self.fails_at = failure, lies, fails_at

    def get(self, digest: str, offset: int = 0, length: int | None = None) -> bytes:
        if offset >= self.fails_at and self.failure is not None:
            raise self.failure
        data = super().get(digest, offset, length)
        return bytes(len(data)) if self.lies else data


async def serve(store: MemoryStore, port: int = 0) -> ChunkServer:
    made = ChunkServer("127.0.0.1", port, TOKEN, sources=[store], sink=store)
    await made.start()
    return made


@pytest_asyncio.fixture
async def good() -> AsyncIterator[tuple[ChunkServer, MemoryStore]]:
    store = MemoryStore()
    made = await serve(store)
    yield made, store
    await made.close()


@pytest.fixture
def fetcher() -> Iterator[ChunkClient]:
    made = ChunkClient(TOKEN)
    yield made
    made.close()


@pytest.mark.parametrize("failure", [MissingChunk("pruned meanwhile"), OSError(5, "Input/output error")])
async def test_a_source_that_loses_a_chunk_midway_is_followed_by_another_without_a_byte_twice(
    good: tuple[ChunkServer, MemoryStore], fetcher: ChunkClient, failure: Exception
) -> None:
    server, store = good
    digest = keep(store, NBYTES)
    rotten = Rotten(failure)
    rotten.put(digest, store.get(digest))
    first = await serve(rotten)
    fetched = await asyncio.to_thread(fetcher.fetch, [digest], [first.address, server.address])
    assert content_digest(fetched[digest]) == digest
    assert first.bytes_sent == SLICE
    assert fetcher.bytes_received == NBYTES
    assert fetcher.repaired == 0, "nothing that is no chunk byte was taken for one"
    await first.close()


async def test_a_source_whose_disk_fails_at_once_is_passed_over(
    good: tuple[ChunkServer, MemoryStore], fetcher: ChunkClient
) -> None:
    server, store = good
    digest = keep(store, 10)
    rotten = Rotten(OSError(5, "Input/output error"), fails_at=0)
    rotten.put(digest, store.get(digest))
    first = await serve(rotten)
    assert digest in await asyncio.to_thread(fetcher.fetch, [digest], [first.address, server.address])
    with pytest.raises(Unreachable, match="Input/output"):
        await asyncio.to_thread(fetcher.fetch, [digest], [first.address])
    await first.close()


async def test_a_liar_that_breaks_off_does_not_spoil_what_honest_sources_send(
    good: tuple[ChunkServer, MemoryStore],
) -> None:
    server, store = good
    digest = keep(store, NBYTES)
    liar = Rotten(OSError("gone"), lies=True)
    liar.put(digest, store.get(digest))
    first = await serve(liar)
    blamed: list[str] = []
    fetcher = ChunkClient(TOKEN, on_corrupt=lambda _digest, source: blamed.append(source))
    fetched = await asyncio.to_thread(fetcher.fetch, [digest], [first.address, server.address])
    assert content_digest(fetched[digest]) == digest
    assert blamed == [], "who of two sources was wrong is not known, so nobody is accused"
    fetcher.close()
    await first.close()


async def test_a_restarted_server_is_used_at_once(fetcher: ChunkClient) -> None:
    store = MemoryStore()
    digests = [keep(store, 1_000) for _ in range(4)]
    first = await serve(store)
    await asyncio.to_thread(fetcher.fetch, digests, [first.address])
    await first.close()
    second = await serve(store, int(first.address.rpartition(":")[2]))
    began = time.monotonic()
    await asyncio.to_thread(fetcher.fetch, digests, [second.address])
    assert await asyncio.to_thread(fetcher.put, second.address, b"x") == content_digest(b"x")
    assert fetcher.retries == 0
    assert time.monotonic() - began < 2
    await second.close()


async def test_a_frozen_source_delays_the_first_chunks_only(
    good: tuple[ChunkServer, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.5)
    server, store = good
    digests = [keep(store, 1_000) for _ in range(12)]
    fetcher = ChunkClient(TOKEN, streams=2)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # accepts, as the kernel does for a stopped process
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        began = time.monotonic()
        assert len(await asyncio.to_thread(fetcher.fetch, digests, [address, server.address])) == 12
        assert time.monotonic() - began < 4
        assert fetcher.retries == 2, "one for each stream"
        with pytest.raises(Unreachable):
            await call_async(address, TOKEN, "probe", timeout_s=0.5)
        with pytest.raises(Unreachable):
            await asyncio.to_thread(fetcher.call, address, "probe", b"", 0.5)
    fetcher.close()


async def test_a_transfer_that_gets_nowhere_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TRANSFER_DEADLINE_S", 0.5)
    store = MemoryStore()
    digest = keep(store, 400_000)
    made = await serve(store)
    proxy = Proxy(made.address, cut_after=60)  # some bytes of the chunk with each connection, for ever
    fetcher = ChunkClient(TOKEN)
    began = time.monotonic()
    with pytest.raises(Unreachable):
        await asyncio.to_thread(fetcher.fetch, [digest], [proxy.address])
    assert time.monotonic() - began < 5
    fetcher.close()
    proxy.close()
    await made.close()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_the_links_do_chunks_are_right_or_an_error_says_why(seed: int) -> None:
    chance = random.Random(seed)
    store = MemoryStore()
    digests = [keep(store, chance.randrange(400_000)) for _ in range(6)]
    made = await serve(store)
    proxies = [
        Proxy(made.address, cut_after=chance.choice([0, 20_000, 150_000]), flips=chance.random() < 0.4)
        for _ in range(3)
    ]
    fetcher = ChunkClient(TOKEN, streams=3)
    fetched: dict[str, bytes] = {}
    if all(proxy.flips for proxy in proxies):
        with contextlib.suppress(WhimbrelError):  # only where nobody is honest may it fail
            fetched = await asyncio.to_thread(fetcher.fetch, digests, [proxy.address for proxy in proxies])
    else:
        fetched = await asyncio.to_thread(fetcher.fetch, digests, [proxy.address for proxy in proxies])
        assert set(fetched) == set(digests)
    assert all(content_digest(data) == digest for digest, data in fetched.items())
    fetcher.close()
    for proxy in proxies:
        proxy.close()
    await made.close()


async def test_errors_cross_the_wire_as_what_they_are() -> None:
    async def refuse(payload: bytes) -> bytes:
        raise UsageError("No such log.", hint="Look again.")

    async def fail(payload: bytes) -> bytes:
        raise ValueError("a defect")

    async def dawdle(payload: bytes) -> bytes:
        raise TimeoutError

    async def flood(payload: bytes) -> bytes:
        return bytes(2_000_000)

    handlers = {"refuse": refuse, "fail": fail, "dawdle": dawdle, "flood": flood}
    made = ChunkServer("127.0.0.1", 0, TOKEN, sources=[], handlers=handlers)
    await made.start()
    fetcher = ChunkClient(TOKEN)
    with pytest.raises(UsageError) as caught:
        await call_async(made.address, TOKEN, "refuse")
    assert caught.value.message == "No such log."
    assert caught.value.hint == "Look again."
    for name, kind in {"nothing": NotFound, "dawdle": TimedOut, "fail": WhimbrelError, "flood": WhimbrelError}.items():
        with pytest.raises(kind):
            await asyncio.to_thread(fetcher.call, made.address, name)
    with pytest.raises(Conflict, match="takes no chunks"):
        await asyncio.to_thread(fetcher.put, made.address, b"x")
    fetcher.close()
    await made.close()


async def test_another_protocol_is_refused_with_the_reason(good: tuple[ChunkServer, MemoryStore]) -> None:
    host, port = frames.host_and_port(good[0].address)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(frames.pack(frames.Hello(99, TOKEN)))
    head = await reader.readexactly(4)
    reply = msgspec.msgpack.decode(await reader.readexactly(frames.frame_length(head)), type=frames.Reply)
    assert not reply.ok
    assert "protocol" in reply.message
    assert await reader.read() == b"", "and the connection is closed"
    writer.close()


async def test_connections_are_bounded_and_the_next_one_is_told(
    good: tuple[ChunkServer, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    made, _store = good
    first, second = ChunkClient(TOKEN), ChunkClient(TOKEN)
    assert await asyncio.to_thread(first.size, made.address, "0" * 32) is None
    with pytest.raises(Unreachable):
        await asyncio.to_thread(second.size, made.address, "0" * 32)
    first.close()
    second.close()


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:99999", "host:x"])
async def test_what_is_no_address_is_unreachable(address: str, fetcher: ChunkClient) -> None:
    with pytest.raises(Unreachable):
        await call_async(address, TOKEN, "probe")
    with pytest.raises(Unreachable):
        await asyncio.to_thread(fetcher.size, address, "0" * 32)
