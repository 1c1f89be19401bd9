"""The node's chunk cache, kept within its bound: it only saves transfers, so anything in it may go at any time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from whimbrel import limits

_PRUNE_TO: Final = 0.9
"""Pruning goes somewhat below the bound, so that it is not done again for the next chunk."""


def prune_cache(folder: Path, limit_bytes: int = limits.CACHE_BYTES) -> int:
    """Delete the oldest files until the folder is within the limit; returns the bytes freed.

    A reader that has a deleted chunk open still reads it to its end; the next one fetches it again.
    """
    found: list[tuple[float, int, str]] = []
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            try:
                status = os.lstat(path)
            except OSError:  # pruned or replaced meanwhile
                continue
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    if total <= limit_bytes:
        return 0
    freed = 0
    for _, size, path in sorted(found):
        if total - freed <= limit_bytes * _PRUNE_TO:
            break
        try:
            os.unlink(path)
        except OSError:
            continue
        freed += size
    return freed
