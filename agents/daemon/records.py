"""What the agent keeps on disk of each epoch of a worker, so that its successor can adopt or account for it.

Layout below `nodes/NODE/workers/RUN/WORKER/EPOCH/`: `worker.json` (intent, then processes), `ended.json` (how it
ended, and whether the controller has recorded that), `worker.log`, and what the worker itself writes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from whimbrel import ids, limits
from whimbrel.errors import Corrupt
from whimbrel.wire import decode_json, encode_json
from whimbrel.wire.cluster import Role
from whimbrel.wire.work import WorkerExit

_LIVES: Final = "worker.json"
_ENDED: Final = "ended.json"


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True):
    """Names one process for ever: pid and start time within one boot."""

    rank: int
    pid: int
    started_ticks: int


class WorkerFile(msgspec.Struct, frozen=True, kw_only=True):
    """`worker.json`: written before the first process starts and again after each of them."""

    run_id: str
    worker: str
    role: Role
    epoch: int
    start: int
    ranks: int
    boot_id: str
    memory_kills: int = 0
    """The machine's count of kills for memory when the worker started."""
    processes: list[ProcessMark] = []


class EndedFile(msgspec.Struct, frozen=True, kw_only=True):
    """`ended.json`: this epoch is over here and never starts again."""

    exit: WorkerExit
    recorded: bool = False
    """The controller has it; it needs no more reporting."""


class OrderlyExit(msgspec.Struct, frozen=True, kw_only=True):
    """`exit.json` / `exit-RANK.json`, written by a worker process itself as its last act."""

    code: int
    message: str = ""


@dataclass(frozen=True)
class EpochFolder:
    """The folder of one epoch of one worker."""

    path: Path

    def write_worker(self, record: WorkerFile) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        _write_durably(self.path / _LIVES, record)

    def read_worker(self) -> WorkerFile | None:
        return _read(self.path / _LIVES, WorkerFile)

    def write_ended(self, record: EndedFile) -> None:
        _write_durably(self.path / _ENDED, record)

    def read_ended(self) -> EndedFile | None:
        return _read(self.path / _ENDED, EndedFile)

    def read_orderly_exit(self, rank: int) -> OrderlyExit | None:
        """What the process of this rank wrote of its own end, if it came so far."""
        names = [f"exit-{rank}.json", *(["exit.json"] if rank == 0 else [])]
        return next((found for name in names if (found := _read(self.path / name, OrderlyExit))), None)


class WorkerFolders:
    """All epoch folders of a node."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def of(self, run_id: str, worker: str, epoch: int) -> EpochFolder:
        """The folder of an epoch; names come from etcd and are checked before they become a path.

        Raises:
            Corrupt: a name that cannot be a run's or worker's.
        """
        if not ids.is_id(run_id, "run") or not ids.is_name(worker) or epoch <= 0:
            raise Corrupt(f"{run_id}/{worker}@{epoch} names no worker.", hint="Was the key written by hand?")
        return EpochFolder(self.root / run_id / worker / str(epoch))

    def epochs(self, run_id: str, worker: str) -> list[int]:
        """Epochs of a worker that this node has a folder of, oldest first."""
        folder = self.root / run_id / worker
        if not folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())

    def all(self) -> Iterator[tuple[str, str, int, EpochFolder]]:
        """(run, worker, epoch, folder) of everything on disk."""
        if not self.root.is_dir():
            return
        for run in sorted(entry for entry in self.root.iterdir() if entry.is_dir()):
            for worker in sorted(entry for entry in run.iterdir() if entry.is_dir()):
                for epoch in self.epochs(run.name, worker.name):
                    yield run.name, worker.name, epoch, EpochFolder(worker / str(epoch))

    def prune(self, run_id: str, worker: str) -> list[int]:
        """Delete folders of ended and recorded epochs beyond WORKER_DIRS_KEPT; returns those that went."""
        gone: list[int] = []
        for epoch in self.epochs(run_id, worker)[: -limits.WORKER_DIRS_KEPT]:
            folder = self.of(run_id, worker, epoch)
            ended = folder.read_ended()
            if ended is not None and ended.recorded:
                self.remove(folder)
                gone.append(epoch)
        return gone

    def remove(self, folder: EpochFolder) -> None:
        """Delete the folder of an epoch, and those of its worker and run when they hold nothing more."""
        shutil.rmtree(folder.path, ignore_errors=True)
        for parent in (folder.path.parent, folder.path.parent.parent):
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return decode_json(path.read_bytes(), kind)
    except (OSError, Corrupt):  # a torn file of a crash says as little as none
        return None


def _write_durably(path: Path, record: object) -> None:
    """Replace the file in one step; it is on the disk when this returns."""
    draft = path.with_suffix(".part")
    with draft.open("wb") as file:
        file.write(encode_json(record))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
