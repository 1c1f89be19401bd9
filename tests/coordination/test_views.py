"""A view of a prefix converges to the truth, whatever happened to its watch."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from aetcd import rpc

from tests.coordination.waiting import until
from whimbrel.coordination import BlockingEtcd, Change, Compare, Delete, Etcd, EtcdServer, PrefixView, Put
from whimbrel.coordination.etcd import Watch


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


@pytest.mark.usefixtures("short_calls")
async def test_a_stopped_etcd_is_noticed_although_its_connections_stay_open(own_etcd: EtcdServer) -> None:
    view = PrefixView([own_etcd.endpoint], "/v/")
    await view.start()
    assert await view.wait_ready(5)
    own_etcd.pause()
    try:
        stopped_at = time.monotonic()
        view._take([Change("/v/late", 1, None)])  # one that was still under way proves nothing about now
        await until(lambda: not view.healthy)
        assert view.last_confirmed < stopped_at
    finally:
        own_etcd.resume()
    await until(lambda: view.healthy and view.last_confirmed > stopped_at)
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


async def test_a_change_that_the_watch_lost_is_found_all_the_same(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = Etcd([etcd_server.endpoint])
    await etcd.put("/lost/old", b"0")
    view = PrefixView([etcd_server.endpoint], "/lost/")

    async def deaf(_watch: Watch, timeout_s: float) -> list[Change] | None:
        await asyncio.sleep(timeout_s)
        return None

    monkeypatch.setattr(Watch, "read", deaf)
    await view.start()
    await until(lambda: set(view.items) == {"/lost/old"})
    await etcd.put("/lost/new", b"1")
    await until(lambda: set(view.items) == {"/lost/old", "/lost/new"}, timeout_s=5)
    await etcd.delete("/lost/old")
    await until(lambda: set(view.items) == {"/lost/new"}, timeout_s=5)
    assert view.losses == 0
    await view.close()
    await etcd.close()


async def test_a_transaction_is_seen_whole_or_not_at_all(etcd_server: EtcdServer) -> None:
    etcd = Etcd([etcd_server.endpoint])
    view = PrefixView([etcd_server.endpoint], "/whole/")
    seen: list[set[bytes]] = []
    view.on_change.append(lambda: seen.append({item.value for item in view.items.values()}))
    await view.start()
    for number in range(60):
        value = str(number).encode()
        await etcd.txn([], [Put("/whole/a", value), Put("/whole/b", value)])
    await until(lambda: bool(seen) and seen[-1] == {b"59"})
    assert all(len(values) <= 1 for values in seen)
    await view.close()
    await etcd.close()


async def test_a_callback_that_fails_neither_ends_the_view_nor_silences_the_others(etcd_server: EtcdServer) -> None:
    etcd = Etcd([etcd_server.endpoint])
    view = PrefixView([etcd_server.endpoint], "/callback/")
    heard: list[int] = []
    view.on_change += [lambda: 1 // 0, lambda: heard.append(len(view.items))]
    await view.start()
    await etcd.put("/callback/a", b"1")
    await until(lambda: 1 in heard)
    await etcd.put("/callback/b", b"1")
    await until(lambda: 2 in heard)
    assert view.healthy
    await view.close()
    await etcd.close()


@pytest.mark.parametrize("seed", range(3))
async def test_a_view_converges_whatever_happens_to_its_connection(etcd_server: EtcdServer, seed: int) -> None:
    chance = random.Random(seed)
    prefix = f"/storm{seed}/"
    etcd = Etcd([etcd_server.endpoint])
    view = PrefixView([etcd_server.endpoint], prefix)
    await view.start()
    for _ in range(150):
        key = f"{prefix}{chance.randrange(8)}"
        match chance.randrange(10):
            case 0 if view._etcd._client is not None:
                await view._etcd._drop(view._etcd._client)
            case 1 | 2 | 3:
                await etcd.delete(key)
            case _:
                await etcd.put(key, str(chance.random()).encode())
    truth = {item.key: item for item in (await etcd.list(prefix))[0]}
    await until(lambda: view.healthy and view.items == truth)
    await view.close()
    await etcd.close()
