"""A view of a prefix converges to the truth, whatever happened to its watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aetcd import rpc

from whimbrel.coordination import BlockingEtcd, Compare, Delete, Etcd, EtcdServer, PrefixView, Put


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> float:
    """Wait for a condition; returns the seconds it took, fails when it does not come."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "the condition did not come true"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def test_a_transaction_changes_all_keys_in_one_revision_or_none(etcd_server: EtcdServer) -> None:
    etcd = Etcd([etcd_server.endpoint])
    first = await etcd.put("/txn/a", b"1")
    done = await etcd.txn(
        [Compare("/txn/a", "mod", first)], [Put("/txn/b", b"2"), Put("/txn/c", b"3"), Delete("/txn/a")]
    )
    assert done.succeeded
    found, _ = await etcd.list("/txn/")
    assert {item.key: item.mod_revision for item in found} == {"/txn/b": done.revision, "/txn/c": done.revision}
    refused = await etcd.txn([Compare("/txn/b", "create", 0)], [Put("/txn/c", b"never")])
    assert not refused.succeeded
    kept = await etcd.get("/txn/c")
    assert kept is not None
    assert kept.value == b"3"
    await etcd.close()


async def test_a_view_follows_puts_and_deletes(etcd_server: EtcdServer) -> None:
    etcd = Etcd([etcd_server.endpoint])
    await etcd.put("/follow/old", b"0")
    view = PrefixView([etcd_server.endpoint], "/follow/")
    await view.start()
    assert await view.wait_ready(5)
    assert set(view.items) == {"/follow/old"}
    await etcd.put("/follow/new", b"1")
    await etcd.put("/elsewhere", b"1")
    await etcd.delete("/follow/old")
    await until(lambda: set(view.items) == {"/follow/new"})
    await view.close()
    await etcd.close()


async def test_a_view_converges_after_etcd_was_killed_and_started_again(own_etcd: EtcdServer) -> None:
    view = PrefixView([own_etcd.endpoint], "/v/")
    await view.start()
    etcd = Etcd([own_etcd.endpoint])
    await etcd.put("/v/a", b"1")
    await until(lambda: "/v/a" in view.items)
    await asyncio.to_thread(own_etcd.kill)
    await until(lambda: not view.healthy)
    assert set(view.items) == {"/v/a"}, "what was known stays visible while etcd is away"
    await asyncio.to_thread(own_etcd.start)
    fresh = Etcd([own_etcd.endpoint])
    await fresh.delete("/v/a")
    await fresh.put("/v/b", b"2")
    await until(lambda: view.healthy and set(view.items) == {"/v/b"})
    for thing in (view, etcd, fresh):
        await thing.close()


async def test_a_stopped_etcd_is_noticed_although_its_connections_stay_open(own_etcd: EtcdServer) -> None:
    view = PrefixView([own_etcd.endpoint], "/v/")
    await view.start()
    assert await view.wait_ready(5)
    await until(lambda: view.healthy)
    own_etcd.pause()
    await until(lambda: not view.healthy)
    own_etcd.resume()
    await until(lambda: view.healthy)
    await view.close()


async def test_a_view_whose_history_was_compacted_away_lists_again(own_etcd: EtcdServer) -> None:
    etcd = Etcd([own_etcd.endpoint])
    view = PrefixView([own_etcd.endpoint], "/c/")
    await etcd.put("/c/0", b"x")
    await view._list()  # the view has listed but does not watch yet
    for number in range(20):
        await etcd.put("/c/1", str(number).encode())
    await etcd.delete("/c/0")
    latest = await etcd.put("/other", b"x")
    await etcd._call(lambda client: client.kvstub.Compact(rpc.CompactionRequest(revision=latest, physical=True)))
    await view.start()
    await until(lambda: set(view.items) == {"/c/1"} and view.items["/c/1"].value == b"19")
    await etcd.put("/c/2", b"y")
    await until(lambda: "/c/2" in view.items)
    await view.close()
    await etcd.close()


def test_the_blocking_face_watches_from_its_own_thread(etcd_server: EtcdServer) -> None:
    etcd = BlockingEtcd([etcd_server.endpoint])
    seen: list[set[str]] = []
    stop = etcd.watch("/block/", lambda items: seen.append(set(items)))
    etcd.put("/block/1", b"1")
    deadline = time.monotonic() + 10
    while {"/block/1"} not in seen and time.monotonic() < deadline:
        time.sleep(0.02)
    assert seen[-1] == {"/block/1"}
    stop()
    etcd.close()
