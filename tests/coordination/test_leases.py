"""Leases live as long as their owner, and no longer (laws 4 and 5)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from tests.coordination.waiting import until
from whimbrel.coordination import Compare, Etcd, EtcdServer, LeaseKeeper
from whimbrel.errors import Fenced, Unreachable

TTL_S = 2
ZOMBIE = """
import sys, threading
from whimbrel.coordination import BlockingEtcd, Compare, LeaseKeeper, Put
endpoint, epoch = sys.argv[1], int(sys.argv[2])
guard, fenced = Compare("/own/z", "mod", epoch), threading.Event()
keeper = LeaseKeeper([endpoint], "/lease/zombie", b"z", 2, guard=guard, on_fenced=lambda _reason: fenced.set())
keeper.start()
etcd = BlockingEtcd([endpoint])
print("holds", flush=True)
sys.stdin.readline()
valid = keeper.valid()
print(f"valid={valid}", f"written={etcd.txn([guard], [Put('/z', b'late')]).succeeded}", flush=True)
print("fenced" if fenced.wait(10) else "not fenced", flush=True)
"""


async def test_a_lease_outlives_a_blocked_event_loop(etcd_server: EtcdServer) -> None:
    keeper = LeaseKeeper([etcd_server.endpoint], "/lease/blocked", b"me", TTL_S)
    await asyncio.to_thread(keeper.start)
    spin_until = time.monotonic() + TTL_S
    while time.monotonic() < spin_until:  # first with the interpreter to itself as far as it can have it
        sum(range(100))
    time.sleep(2 * TTL_S)  # blocking the loop is the point
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


async def test_a_step_of_the_wall_clock_changes_nothing(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = LeaseKeeper([etcd_server.endpoint], "/lease/clock", b"me", TTL_S)
    await asyncio.to_thread(keeper.start)
    for wall_s in (0.0, 1e10):
        monkeypatch.setattr(time, "time", lambda wall_s=wall_s: wall_s)
        await asyncio.sleep(TTL_S / 2)
        assert keeper.valid()
    assert keeper.re_registrations == 0
    await asyncio.to_thread(keeper.close)


async def test_a_key_removed_under_a_living_lease_is_put_again(etcd_server: EtcdServer) -> None:
    keeper = LeaseKeeper([etcd_server.endpoint], "/lease/removed", b"same", TTL_S)
    await asyncio.to_thread(keeper.start)
    lease = keeper.lease
    etcd = Etcd([etcd_server.endpoint])
    await etcd.delete("/lease/removed")
    await until(lambda: keeper.re_registrations == 1)
    found = await etcd.get("/lease/removed")
    assert found is not None
    assert (found.value, found.lease) == (b"same", lease)
    await asyncio.to_thread(keeper.close)
    await etcd.close()


@pytest.mark.usefixtures("short_calls")
async def test_an_update_made_while_etcd_is_away_arrives_when_it_is_back(own_etcd: EtcdServer) -> None:
    keeper = LeaseKeeper([own_etcd.endpoint], "/lease/update", b"old", TTL_S)
    await asyncio.to_thread(keeper.start)
    own_etcd.pause()
    try:
        keeper.update(b"new")
        await until(lambda: not keeper.valid(), timeout_s=TTL_S + 1)
    finally:
        own_etcd.resume()
    await until(keeper.valid)
    etcd = Etcd([own_etcd.endpoint])
    found = await etcd.get("/lease/update")
    assert found is not None
    assert found.value == b"new"
    await asyncio.to_thread(keeper.close)
    await etcd.close()


async def test_the_newest_announcement_wins_and_the_older_one_comes_back_when_it_goes(etcd_server: EtcdServer) -> None:
    older = LeaseKeeper([etcd_server.endpoint], "/lease/twice", b"older", TTL_S)
    newer = LeaseKeeper([etcd_server.endpoint], "/lease/twice", b"newer", TTL_S)
    await asyncio.to_thread(older.start)
    await asyncio.to_thread(newer.start)
    await until(lambda: older.displaced)
    assert not older.valid()
    etcd = Etcd([etcd_server.endpoint])
    await etcd.revoke_lease(older.lease)
    await asyncio.sleep(TTL_S / 2)
    found = await etcd.get("/lease/twice")
    assert found is not None
    assert found.value == b"newer"
    assert newer.valid()
    assert newer.re_registrations == 0
    await asyncio.to_thread(newer.close)
    await until(older.valid)
    assert not older.displaced
    await asyncio.to_thread(older.close)
    await etcd.close()


async def test_law_4_a_keeper_whose_owner_was_replaced_is_fenced_and_puts_nothing(etcd_server: EtcdServer) -> None:
    etcd = Etcd([etcd_server.endpoint])
    epoch = await etcd.put("/own/y", b"first")
    reasons: list[str] = []
    keeper = LeaseKeeper(
        *([etcd_server.endpoint], "/lease/deposed", b"old", TTL_S),
        guard=Compare("/own/y", "mod", epoch),
        on_fenced=reasons.append,
    )
    await asyncio.to_thread(keeper.start)
    await etcd.put("/own/y", b"second")
    await etcd.revoke_lease(keeper.lease)
    await until(lambda: bool(reasons))
    assert not keeper.valid()
    assert await etcd.get("/lease/deposed") is None
    assert len(reasons) == 1
    await asyncio.to_thread(keeper.close)
    await etcd.close()


async def test_law_4_a_process_that_was_stopped_over_its_lease_wakes_without_it(etcd_server: EtcdServer) -> None:
    etcd = Etcd([etcd_server.endpoint])
    epoch = await etcd.put("/own/z", b"first")
    zombie = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, etcd_server.endpoint, str(epoch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert zombie.stdin is not None
    assert zombie.stdout is not None
    try:
        assert (await asyncio.to_thread(zombie.stdout.readline)).strip() == "holds"
        zombie.send_signal(signal.SIGSTOP)
        while await etcd.get("/lease/zombie") is not None:
            await asyncio.sleep(0.1)
        await etcd.put("/own/z", b"second")
        zombie.stdin.write("\n")
        zombie.stdin.flush()
        zombie.send_signal(signal.SIGCONT)
        said = (await asyncio.to_thread(zombie.stdout.readline)).split()
        assert said == ["valid=False", "written=False"]
        assert (await asyncio.to_thread(zombie.stdout.readline)).strip() == "fenced"
        assert await etcd.get("/lease/zombie") is None
    finally:
        zombie.kill()
        await asyncio.to_thread(zombie.wait)
        await etcd.close()
