"""Leases live as long as their owner, and no longer; leadership is proven by writes (laws 4 and 5)."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.coordination.test_views import until
from whimbrel.coordination import Compare, Election, Etcd, EtcdServer, LeaseKeeper, Put, keys
from whimbrel.errors import Fenced, Unreachable

TTL_S = 2


async def test_a_lease_outlives_a_blocked_event_loop(etcd_server: EtcdServer) -> None:
    keeper = LeaseKeeper([etcd_server.endpoint], "/lease/blocked", b"me", TTL_S)
    await asyncio.to_thread(keeper.start)
    time.sleep(3 * TTL_S)  # blocking the loop is the point
    assert keeper.valid()
    assert keeper.re_registrations == 0
    etcd = Etcd([etcd_server.endpoint])
    assert await etcd.get("/lease/blocked") is not None
    await asyncio.to_thread(keeper.close)
    assert await etcd.get("/lease/blocked") is None, "an orderly end removes the record at once"
    await etcd.close()


async def test_a_lease_that_vanished_is_registered_again_with_the_same_record(etcd_server: EtcdServer) -> None:
    keeper = LeaseKeeper([etcd_server.endpoint], "/lease/vanished", b"the same", TTL_S)
    await asyncio.to_thread(keeper.start)
    etcd = Etcd([etcd_server.endpoint])
    await etcd.revoke_lease(keeper.lease)
    await until(lambda: keeper.re_registrations == 1)
    found = await etcd.get("/lease/vanished")
    assert found is not None
    assert found.value == b"the same"
    await asyncio.to_thread(keeper.close)
    await etcd.close()


async def test_a_keeper_says_in_time_that_its_lease_may_be_gone_and_comes_back(own_etcd: EtcdServer) -> None:
    keeper = LeaseKeeper([own_etcd.endpoint], "/lease/outage", b"me", TTL_S)
    await asyncio.to_thread(keeper.start)
    await asyncio.to_thread(own_etcd.kill)
    await until(lambda: not keeper.valid(), timeout_s=TTL_S + 1)
    await asyncio.to_thread(own_etcd.start)
    await until(keeper.valid)
    await asyncio.to_thread(keeper.close)


async def test_law_4_a_lease_is_not_granted_to_a_worker_with_a_newer_owner(etcd_server: EtcdServer) -> None:
    etcd = Etcd([etcd_server.endpoint])
    old = await etcd.put("/own/x", b"first")
    await etcd.put("/own/x", b"second")
    keeper = LeaseKeeper([etcd_server.endpoint], "/lease/fenced", b"zombie", TTL_S, guard=Compare("/own/x", "mod", old))
    with pytest.raises(Fenced):
        await asyncio.to_thread(keeper.start)
    assert await etcd.get("/lease/fenced") is None
    await etcd.close()


async def test_a_lease_that_cannot_be_had_is_an_error_with_a_deadline() -> None:
    keeper = LeaseKeeper(["127.0.0.1:1"], "/lease/none", b"x", TTL_S)
    with pytest.raises(Unreachable):
        await asyncio.to_thread(keeper.start, 1.0)


async def test_law_4_one_leader_at_a_time_and_a_deposed_one_cannot_write(own_etcd: EtcdServer) -> None:
    first = Election([own_etcd.endpoint], "elsewhere:1:a", "http://a")
    second = Election([own_etcd.endpoint], "elsewhere:2:b", "http://b")
    assert await first.campaign_once()
    assert not await second.campaign_once()
    etcd = Etcd([own_etcd.endpoint])
    guard = first.leader_compare()
    assert (await etcd.txn([guard], [Put("/w", b"1")])).succeeded
    await etcd.delete(keys.LEADER)
    assert await second.campaign_once()
    assert second.epoch > first.epoch
    assert not (await etcd.txn([guard], [Put("/w", b"2")])).succeeded
    leader = await second.current()
    assert leader is not None
    assert leader.holder == "elsewhere:2:b"
    for thing in (first, second, etcd):
        await thing.close()


async def test_a_new_controller_takes_over_at_once_from_a_dead_process_of_its_host(own_etcd: EtcdServer) -> None:
    import os
    import subprocess

    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = Election([own_etcd.endpoint], f"{os.uname().nodename}:{gone.pid}:x", "http://dead")
    assert await dead.campaign_once()
    next_one = Election([own_etcd.endpoint], f"{os.uname().nodename}:{os.getpid()}:y", "http://next")
    began = time.monotonic()
    while not await next_one.campaign_once():
        assert time.monotonic() - began < 2
    await next_one.close()
    await dead.close()
