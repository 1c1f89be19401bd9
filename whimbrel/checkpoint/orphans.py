"""Chunks that nobody names: of writers that were killed, of results that were refused. Found twice, a day apart, they go.

A chunk is written before anything names it, and a finished group's payload may wait for its step for as long as a run is
paused. So a chunk is an orphan only when it was unnamed at one look and still is ORPHANS_KEPT_S later. A payload that is
wanted after all costs its group a second sampling, no more.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

import msgspec

from whimbrel.checkpoint.stores import CHUNKS, Store, chunk_name
from whimbrel.limits import ORPHANS_KEPT_S


def sweep_orphans(store: Store, run_id: str, named: Collection[str], now: datetime | None = None) -> list[str]:
    """Delete what was an orphan long enough, note what is one now; returns the digests deleted.

    Args:
        named: every digest that a manifest of any run of the store names, manifests included.
    """
    now = now or datetime.now(UTC)
    record = f"runs/{run_id}/orphans"
    before = _read(store.read(record))
    unnamed = {name.rpartition("/")[2] for name in store.list(CHUNKS)} - set(named)
    due = sorted(each for each in unnamed if each in before and _age_s(before[each], now) >= ORPHANS_KEPT_S)
    for digest in due:
        store.delete(chunk_name(digest))
    after = {each: before.get(each, now) for each in unnamed.difference(due)}
    if after != before:
        # A crash between the two forgets since when each was seen: they stay a while longer.
        store.delete(record)
        if after:
            store.create(record, msgspec.json.encode(after, order="sorted"))
    return due


def _read(data: bytes | None) -> dict[str, datetime]:
    try:
        return msgspec.json.decode(data, type=dict[str, datetime]) if data else {}
    except msgspec.MsgspecError:
        return {}  # written by another release: every orphan is seen for the first time again


def _age_s(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds()
