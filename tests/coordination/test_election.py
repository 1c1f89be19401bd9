"""One controller leads; leadership is proven by writes, never believed (law 4)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.coordination.waiting import until
from whimbrel import wire
from whimbrel.coordination import Compare, Election, Etcd, EtcdServer, Put, keys
from whimbrel.limits import LEADER_LEASE_TTL_S
from whimbrel.wire.cluster import Leader

HERE = os.uname().nodename


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    """A client of an etcd without a leader key."""
    client = Etcd([etcd_server.endpoint])
    await client.delete(keys.LEADER)
    yield client
    await client.close()


async def test_law_4_one_leader_at_a_time_and_a_deposed_one_cannot_write(etcd: Etcd) -> None:
    first = Election([*etcd.endpoints], "elsewhere:1:a", "http://a")
    second = Election([*etcd.endpoints], "elsewhere:2:b", "http://b")
    assert await first.campaign_once()
    assert not await second.campaign_once()
    guard = Compare(keys.LEADER, "create", first.epoch)
    assert (await etcd.txn([guard], [Put("/w", b"1")])).succeeded
    await etcd.delete(keys.LEADER)
    assert await second.campaign_once()
    assert second.epoch > first.epoch
    assert not (await etcd.txn([guard], [Put("/w", b"2")])).succeeded
    leader = await second.current()
    assert leader is not None
    assert leader.holder == "elsewhere:2:b"
    for thing in (first, second):
        await thing.close()


async def test_a_new_controller_takes_over_at_once_from_a_dead_process_of_its_host(etcd: Etcd) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = Election([*etcd.endpoints], f"{HERE}:{gone.pid}:x", "http://dead")
    assert await dead.campaign_once()
    next_one = Election([*etcd.endpoints], f"{HERE}:{os.getpid()}:y", "http://next")
    began = time.monotonic()
    while not await next_one.campaign_once():
        assert time.monotonic() - began < 2
    await next_one.close()
    await dead.close()


async def test_of_many_candidates_one_leads(etcd: Etcd) -> None:
    candidates = [Election(etcd.endpoints, f"elsewhere:{number}:x", "http://x") for number in range(5)]
    won = await asyncio.gather(*(candidate.campaign_once() for candidate in candidates))
    assert sum(won) == 1
    assert [candidate.is_leader() for candidate in candidates] == won
    await candidates[won.index(True)].resign()
    assert any([await candidate.campaign_once() for candidate in candidates]), "who resigns makes room at once"
    await asyncio.gather(*(candidate.close() for candidate in candidates))


async def test_a_leader_whose_key_is_another_one_s_learns_it(etcd: Etcd) -> None:
    first = Election(etcd.endpoints, "elsewhere:1:a", "http://a")
    assert await first.campaign_once()
    epoch = first.epoch
    assert await first.campaign_once()
    assert first.epoch == epoch, "a term goes on as long as its key stands"
    usurper = wire.encode_json(Leader(holder="elsewhere:2:b", url="http://b"))
    await etcd.put(keys.LEADER, usurper)
    await until(lambda: not first.is_leader(), timeout_s=LEADER_LEASE_TTL_S)
    assert not await first.campaign_once()
    found = await etcd.get(keys.LEADER)
    assert found is not None
    assert found.value == usurper, "and does not take it back"
    await first.close()


async def test_a_leader_key_that_vanished_begins_a_new_term(etcd: Etcd) -> None:
    leader = Election(etcd.endpoints, "elsewhere:1:a", "http://a")
    assert await leader.campaign_once()
    epoch = leader.epoch
    old = Compare(keys.LEADER, "create", epoch)
    await etcd.delete(keys.LEADER)
    await until(lambda: not leader.is_leader(), timeout_s=LEADER_LEASE_TTL_S)
    while not await leader.campaign_once():
        await asyncio.sleep(0.05)
    assert leader.epoch > epoch
    assert not (await etcd.txn([old], [Put("/w", b"late")])).succeeded
    assert (await etcd.txn([Compare(keys.LEADER, "create", leader.epoch)], [Put("/w", b"now")])).succeeded
    await leader.close()


@pytest.mark.usefixtures("short_calls")
async def test_a_leader_without_etcd_stops_before_its_lease_can_have_expired(own_etcd: EtcdServer) -> None:
    leader = Election([own_etcd.endpoint], "elsewhere:1:a", "http://a")
    assert await leader.campaign_once()
    own_etcd.pause()
    try:
        assert await until(lambda: not leader.is_leader()) < LEADER_LEASE_TTL_S
    finally:
        own_etcd.resume()
    await until(lambda: leader.is_leader() or leader._keeper is None or leader._keeper.valid())
    assert await leader.campaign_once()
    await leader.close()


async def test_a_holder_that_lives_or_is_elsewhere_or_speaks_otherwise_is_waited_for(etcd: Etcd) -> None:
    candidate = Election(etcd.endpoints, "elsewhere:1:a", "http://a")
    living = Leader(holder=f"{HERE}:{os.getpid()}:x", url="http://x")
    distant = Leader(holder="another-host:1:x", url="http://x")
    for value in (wire.encode_json(living), wire.encode_json(distant), b"of a later release"):
        await etcd.put(keys.LEADER, value)
        assert not await candidate.campaign_once()
        found = await etcd.get(keys.LEADER)
        assert found is not None
        assert found.value == value
    await candidate.close()
