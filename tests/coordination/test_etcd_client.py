"""What etcd says reaches the caller as what it is: a refusal, a lost lease, or no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aetcd
import pytest
import pytest_asyncio

from whimbrel.coordination import BlockingEtcd, Compare, Etcd, EtcdServer, KeyValue, Put
from whimbrel.errors import NotFound, Unreachable, WhimbrelError

MIB = 1024 * 1024


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    client = Etcd([etcd_server.endpoint])
    yield client
    await client.close()


async def test_who_gives_up_on_a_connection_cancels_nobody_else_s_task(own_etcd: EtcdServer) -> None:
    etcd = Etcd([own_etcd.endpoint], timeout_s=1.0)
    await etcd.put("/x", b"1")
    own_etcd.pause()
    try:
        first = asyncio.create_task(etcd.get("/x"))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(etcd.get("/x"))
        for task in (first, second):
            with pytest.raises(Unreachable):
                await task
    finally:
        own_etcd.resume()
    task = asyncio.create_task(etcd.get("/x"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):  # whereas a real cancellation is one
        await task
    assert await etcd.get("/x") is not None
    await etcd.close()


async def test_a_second_endpoint_is_used_when_the_first_is_dead(etcd_server: EtcdServer) -> None:
    etcd = Etcd(["127.0.0.1:1", etcd_server.endpoint])
    with pytest.raises(Unreachable):
        await etcd.put("/x", b"1")
    assert await etcd.put("/x", b"1") > 0
    await etcd.close()


async def test_a_lost_lease_is_not_an_outage(etcd: Etcd) -> None:
    lease = await etcd.grant_lease(60)
    await etcd.put("/leased", b"1", lease=lease)
    await etcd.revoke_lease(lease)
    await etcd.revoke_lease(lease)
    assert await etcd.refresh_lease(lease) == 0
    with pytest.raises(NotFound):
        await etcd.put("/leased", b"2", lease=lease)
    with pytest.raises(NotFound):
        await etcd.txn([], [Put("/leased", b"2", lease)])


async def test_a_request_that_etcd_refuses_is_not_asked_again(etcd: Etcd) -> None:
    with pytest.raises(WhimbrelError, match="duplicate key") as caught:
        await etcd.txn([], [Put("/twice", b"1"), Put("/twice", b"2")])
    assert not isinstance(caught.value, Unreachable)
    for nbytes in (MIB * 7 // 4, 3 * MIB):
        with pytest.raises(WhimbrelError, match=r"larger? ") as caught:
            await etcd.put("/large", bytes(nbytes))
        assert not isinstance(caught.value, Unreachable)


async def test_a_full_etcd_says_so(own_etcd: EtcdServer) -> None:
    host, _, port = own_etcd.endpoint.rpartition(":")
    operator = aetcd.Client(host, int(port))
    await operator.create_alarm()
    etcd = Etcd([own_etcd.endpoint])
    with pytest.raises(Unreachable, match="full") as caught:
        await etcd.put("/x", b"1")
    assert "alarm disarm" in caught.value.hint
    assert await etcd.get("/x") is None, "reading goes on"
    await operator.disarm_alarm()
    assert await etcd.put("/x", b"1") > 0
    await etcd.close()
    await operator.close()


async def test_a_prefix_larger_than_grpc_s_own_bound_is_listed(etcd: Etcd) -> None:
    for number in range(5):
        await etcd.put(f"/large/{number}", bytes(MIB))
    assert sum(len(item.value) for item in (await etcd.list("/large/"))[0]) == 5 * MIB
    for number in range(5):
        await etcd.delete(f"/large/{number}")


async def test_compares_mean_here_what_they_mean_in_etcd(etcd: Etcd) -> None:
    lease = await etcd.grant_lease(60)
    await etcd.delete("/compare")
    await etcd.put("/compare", b"1")
    await etcd.put("/compare", b"2", lease=lease)
    found = await etcd.get("/compare")
    assert found is not None
    candidates: list[tuple[str, KeyValue | None]] = [("/compare", found), ("/absent", None)]
    for key, now in candidates:
        for compare in (
            *(Compare(key, "create", value) for value in (0, found.create_revision, found.mod_revision)),
            *(Compare(key, "mod", value) for value in (0, found.create_revision, found.mod_revision)),
            *(Compare(key, "value", value) for value in (b"1", b"2", b"")),
            *(Compare(key, "lease", value) for value in (lease, lease + 1)),
        ):
            assert (await etcd.txn([compare], [])).succeeded == compare.holds(now), compare


def test_the_blocking_face_ends_cleanly_and_says_so_afterwards(etcd_server: EtcdServer) -> None:
    etcd = BlockingEtcd([etcd_server.endpoint])
    etcd.watch("/x", lambda _items: None)
    etcd.put("/x", b"1")
    etcd.close()
    assert not etcd._thread.is_alive()
    with pytest.raises(Unreachable, match="closed"):
        etcd.get("/x")
    etcd.close()
