"""Workers' output: plain files that outlive the agent, bounded by size, read from their end.

A worker writes straight into its file (append mode), not into a pipe: a pipe would break when the agent dies. The file
is therefore cut by copy and truncate; the few lines written between the two are lost, which only happens to a worker
that has just printed WORKER_LOG_BYTES.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from agents.daemon.records import WorkerFolders
from whimbrel import ids, limits
from whimbrel.errors import NotFound, UsageError
from whimbrel.limits import LOG_COPY_BYTES
from whimbrel.wire.node import LogsReply, LogsRequest

LOG_NAME: Final = "worker.log"
_OLD_NAME: Final = "worker.log.1"


def open_log(folder: Path) -> int:
    """A descriptor of the worker's log for its standard output and error. The caller closes it.

    A link in the file's place is never followed: the folder is writable by the worker.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(folder / LOG_NAME, flags, 0o640)


def rotate(folder: Path, limit_bytes: int = limits.WORKER_LOG_BYTES) -> bool:
    """Move the log's end to the older file and empty it once it is larger than the limit; returns whether it was."""
    try:
        source = os.open(folder / LOG_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # none yet, or the worker put something else there: nothing of ours grows
        return False
    try:
        size_bytes = os.fstat(source).st_size
        if size_bytes <= limit_bytes:
            return False
        try:
            _copy_end(source, size_bytes, min(size_bytes, limit_bytes), folder)
        finally:  # without room for the copy the bound still holds: better short than without end
            os.ftruncate(source, 0)  # in append mode the worker goes on at offset 0
        return True
    finally:
        os.close(source)


def _copy_end(source: int, size_bytes: int, kept_bytes: int, folder: Path) -> None:
    draft = folder / f"{_OLD_NAME}.part"
    draft.unlink(missing_ok=True)
    position = size_bytes - kept_bytes
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640), "wb") as copy:
        while position < size_bytes:
            block = os.pread(source, min(LOG_COPY_BYTES, size_bytes - position), position)
            if not block:
                break
            copy.write(block)
            position += len(block)
    draft.replace(folder / _OLD_NAME)


def read_tail(folder: Path, tail_bytes: int) -> tuple[str, int]:
    """The last `tail_bytes` of the output over both files, and the size of the current one in bytes."""
    data, size_bytes = _read_end(folder / LOG_NAME, tail_bytes)
    if len(data) < tail_bytes:
        older, _ = _read_end(folder / _OLD_NAME, tail_bytes - len(data))
        data = older + data
    return data.decode("utf-8", errors="replace"), size_bytes


def _read_end(path: Path, tail_bytes: int) -> tuple[bytes, int]:
    try:
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", 0
    with os.fdopen(source, "rb") as file:
        size_bytes = os.fstat(source).st_size
        file.seek(max(0, size_bytes - tail_bytes))
        return file.read(tail_bytes), size_bytes


def answer_logs(folders: WorkerFolders, request: LogsRequest) -> LogsReply:
    """The end of a worker's output.

    Raises:
        UsageError: a name that cannot be a run's or worker's, or a size below 1.
        NotFound: this node never ran that worker, or that epoch of it.
    """
    if not ids.is_id(request.run_id, "run") or not ids.is_name(request.worker):
        raise UsageError("That is no name of a run or worker.", hint="Give the run's id and the worker's name.")
    if request.tail_bytes < 1 or (request.epoch is not None and request.epoch < 1):
        raise UsageError("tail_bytes and epoch are at least 1.", hint="Correct the value.")
    epochs = folders.epochs(request.run_id, request.worker)
    epoch = request.epoch if request.epoch is not None else (epochs[-1] if epochs else 0)
    if epoch not in epochs:
        raise NotFound(
            f"This node has no output of {request.run_id}/{request.worker}"
            + (f" at epoch {request.epoch}." if request.epoch is not None else "."),
            hint="Ended epochs are kept for a while only.",
        )
    folder = folders.of(request.run_id, request.worker, epoch)
    text, size_bytes = read_tail(folder.path, min(request.tail_bytes, limits.LOG_TAIL_BYTES))
    return LogsReply(run_id=request.run_id, worker=request.worker, epoch=epoch, text=text, size_bytes=size_bytes)
