"""The ranks of one trainer: who they are, and the few exchanges that must give the same bits on each of them.

Sums are taken in rank order from gathered values, so that no reduction algorithm decides the last bit.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whimbrel.limits import RANKS_TIMEOUT_S


class Ranks:
    """All ranks of this trainer; a single process needs no process group."""

    def __init__(self, rank: int = 0, world_size: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._control = control

    @classmethod
    def start(cls, rank: int, world_size: int, epoch: int) -> Ranks:
        """Join the process group that torchrun's environment describes.

        The rendezvous keys carry the epoch: a rank that comes back must not meet the addresses of the dead ones.
        """
        if world_size == 1:
            return cls()
        timeout = datetime.timedelta(seconds=RANKS_TIMEOUT_S)
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=None if hosted else world_size,
            is_master=rank == 0 and not hosted,
            timeout=timeout,
        )
        prefix = PrefixStore(f"epoch{epoch}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=prefix, rank=rank, world_size=world_size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        return cls(rank, world_size, control)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone speaks with etcd and the controller."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable value on every rank; what other ranks pass is ignored."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def sum(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Sums over the ranks, float64, added in rank order: bit-equal on every rank."""
        total = np.zeros(len(values), np.float64)
        for part in self.gather(np.asarray(values, np.float64)):
            total = total + part
        return total

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
