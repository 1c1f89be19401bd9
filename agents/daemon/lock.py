"""One agent per node: a lock on the node's folder keeps a second one of this machine out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whimbrel.errors import Conflict


@contextmanager
def node_lock(folder: Path) -> Iterator[None]:
    """Hold the node's folder. The kernel lets go of the lock when the process ends, however it does.

    Raises:
        Conflict: another agent holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
            raise Conflict(
                f"An agent of node {folder.name} runs already (process {holder or 'unknown'}, {folder}).",
                hint="Stop it first, or give this one another name with --node.",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        yield
    finally:
        os.close(descriptor)
