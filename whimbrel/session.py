"""For a training loop of one's own: publish its policy versions to a weight log, and read them back.

    with Session.start("my-run", store=Path("store"), etcd=["127.0.0.1:2379"]) as session:
        session.restore_into(model)                       # the newest committed version, if there is one
        ...
        session.publish(model.state_dict(), metrics={"loss": loss})

What it gives: lossless deltas, a hash-chained history that can be verified and exported, one committed head, and fencing: a
later session of the same run takes over, and the earlier one cannot write any more. What it does not: the optimizer's state and
the batches stay the loop's own business. With several ranks, gather whole tensors and publish from rank 0.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from whimbrel import wire
from whimbrel.checkpoint import (
    DirectoryStore,
    HostWeights,
    LogReader,
    Manifest,
    StepRecord,
    Store,
    WeightLog,
    store_fetch,
)
from whimbrel.commit import HeadCommitter
from whimbrel.coordination import BlockingEtcd, keys
from whimbrel.delta import Layout, Piece, TensorSpec
from whimbrel.errors import UsageError
from whimbrel.ids import is_name
from whimbrel.wire.cluster import Ownership

WORKER: Final = "session"
"""The part of the run that a session owns; never that of a controller's trainer."""

_DTYPES: Final = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_WIDTHS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Session:
    """The one writer of a run's log, outside any controller. Not thread-safe."""

    def __init__(self, run_id: str, store: Store, etcd: BlockingEtcd, epoch: int) -> None:
        self.run_id = run_id
        self._etcd = etcd
        self._log = WeightLog(store, run_id, epoch)
        self._fetch = store_fetch(store)
        self._committer = HeadCommitter(etcd, run_id, WORKER, epoch)
        self._host = HostWeights(run_id)
        self._head: tuple[str, Manifest] | None = None

    @classmethod
    def start(cls, run_id: str, *, store: Path | Store, etcd: Sequence[str]) -> Session:
        """Take the run over from any earlier session and read its newest committed version.

        Args:
            store: folder of the weight log, or a store.
            etcd: host:port of etcd's endpoints.

        Raises:
            UsageError: not a usable name, or a controller's trainer writes this run's log.
            Unreachable: etcd does not answer. ChainGap, MissingChunk, Corrupt: the log cannot be read.
        """
        if not is_name(run_id):
            raise UsageError(f"{run_id!r} cannot name a run.", hint="Use lower case, digits and inner hyphens.")
        client = BlockingEtcd(etcd)
        try:
            if client.get(keys.owner(run_id, "trainer")) is not None:
                raise UsageError(f"The run {run_id} belongs to a controller, whose trainer writes its log.")
            owner = Ownership(
                run_id=run_id,
                worker=WORKER,
                role="trainer",
                node_id=socket.gethostname(),
                state="running",
                reason=f"process {os.getpid()}",
            )
            epoch = client.put(keys.owner(run_id, WORKER), wire.encode_json(owner))
            session = cls(run_id, DirectoryStore(store) if isinstance(store, Path) else store, client, epoch)
            session._read_head()
        except BaseException:
            client.close()
            raise
        return session

    @property
    def version(self) -> int:
        """The newest committed version; -1 before the first."""
        return self._head[1].version if self._head else -1

    def publish(
        self,
        weights: Mapping[str, Tensor],
        *,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Manifest:
        """Write these weights as the next version and commit it. After Unreachable or StorageFull, call it again.

        Args:
            weights: whole tensors by name, in the dtype that readers shall hold; of tensors that share memory the first.
            files: configuration and tokenizer files, kept with version 0.

        Raises:
            UsageError: names, dtypes or shapes differ from the version before. Fenced: a later session took over.
            StorageFull; Unreachable: etcd did not answer, and the commit may or may not have happened.
        """
        layout, pieces = _pieces(weights)
        self._read_head()  # an earlier call may have committed without hearing of it
        if self._head is None:
            parts = [self._log.write_anchor(layout, pieces)]
            digest, manifest = self._log.publish_anchor(layout, 0, parts, files=files, metrics=metrics)
        else:
            assert self._host.layout is not None, "a version was read"
            if layout.digest != self._host.layout.digest:
                raise UsageError(
                    f"The weights have other names, dtypes or shapes than version {self.version} of {self.run_id}.",
                    hint="A run keeps its layout; start another run for another model.",
                )
            base = [Piece(piece.name, 0, self._host.tensors[piece.name]) for piece in pieces]
            delta = self._log.write_delta(layout, base, pieces)
            step = StepRecord(step=self.version, metrics=dict(metrics or {}))
            digest, manifest = self._log.publish_delta(
                layout, self._head[1], self._head[0], [delta.part], step, metrics=metrics
            )
        self._committer.commit(manifest.version, digest)
        self._log.mark_committed(digest, manifest)
        self._take(digest)
        return manifest

    def latest(self) -> dict[str, Tensor]:
        """Copies of the tensors of the newest committed version; empty before the first."""
        tensors: dict[str, Tensor] = {}
        dtypes = {name: dtype for dtype, name in _DTYPES.items()}
        for spec in self._host.layout.tensors if self._host.layout else ():
            bits = self._host.tensors[spec.name]
            signed = torch.from_numpy(bits.copy().view(bits.dtype.str.replace("u", "i") if bits.itemsize > 1 else "u1"))
            tensors[spec.name] = signed.view(dtypes[spec.dtype]).reshape(spec.shape)
        return tensors

    def restore_into(self, model: torch.nn.Module) -> int:
        """Copy the newest committed version into a model; returns the version, -1 when there is none.

        Raises:
            UsageError: the model has other names or shapes.
        """
        found = self.latest()
        if found:
            try:
                missing, unexpected = model.load_state_dict(found, strict=False)
            except RuntimeError as error:
                raise UsageError(f"Version {self.version} does not fit the model: {error}") from error
            shared = _shared_names(model.state_dict())
            if unexpected or set(missing) - shared:
                raise UsageError(f"Version {self.version} does not fit the model: {(missing, unexpected)}.")
        return self.version

    def close(self) -> None:
        """End the connection; what was committed stays."""
        self._etcd.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _read_head(self) -> None:
        head = self._committer.read()
        if head is not None:
            self._take(head.manifest)

    def _take(self, digest: str) -> None:
        if self._head is not None and self._head[0] == digest == self._host.manifest_digest:
            return
        # A new reader each time: what it remembers of a long run would grow without end.
        reader = LogReader(self._fetch, self.run_id)
        if digest != self._host.manifest_digest:
            reader.restore(self._host, digest)
        self._head = (digest, reader.manifest(digest))


def _pieces(weights: Mapping[str, Tensor]) -> tuple[Layout, list[Piece]]:
    shared = _shared_names(weights)
    specs: list[TensorSpec] = []
    pieces: list[Piece] = []
    for name, tensor in weights.items():
        if name in shared:
            continue
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"Tensor {name} has dtype {tensor.dtype}, which the weight log cannot carry.")
        specs.append(TensorSpec(name, _DTYPES[tensor.dtype], tuple(tensor.shape)))
        flat = tensor.detach().cpu().contiguous().view(-1).view(_WIDTHS[tensor.element_size()]).numpy()
        pieces.append(Piece(name, 0, flat.view(np.dtype(f"u{tensor.element_size()}"))))
    return Layout.of(specs), pieces


def _shared_names(weights: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors that are the same memory as one named before them."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    shared: set[str] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and place in seen:
            shared.add(name)
        seen.add(place)
    return shared
