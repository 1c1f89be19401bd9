"""The compiled loops of `compiled.py`, loaded at their first use.

Importing numba takes seconds and a hundred megabytes, which a node agent or a controller, who import this package for
its names and digests, need not spend.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from whimbrel.delta import compiled

    return getattr(compiled, name)
