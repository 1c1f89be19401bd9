"""The policy in training: a Hugging Face causal LM that computes with exactly the published bits, and its fp32 masters.

Masters are kept apart from the model's parameters. The parameters always hold the masters' bf16 cast (as float32 values on
CPU, where bf16 arithmetic is slow; as bf16 on CUDA), so the trainer's log-probs are those of the version that rollouts hold.
With several ranks FSDP2 shards every parameter by rows; masters are this rank's rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agents.trainer.ranks import Ranks
from whimbrel.delta import Layout, Piece, TensorSpec, state_digest
from whimbrel.errors import Corrupt, UsageError


@dataclass
class Shard:
    """This rank's rows of one parameter."""

    name: str
    """In the Hugging Face checkpoint; of tied parameters the first."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Flat offset of the first element in the whole parameter."""
    parameter: nn.Parameter
    master: Tensor
    """1-D float32."""
    gradient: Tensor
    """1-D float32: the sum over the micro-batches of a step."""

    @property
    def stop(self) -> int:
        """Flat offset after the last element."""
        return self.start + self.master.numel()

    def local(self) -> Tensor:
        """This rank's part of the model's parameter, 1-D, sharing its memory."""
        return _local(self.parameter).view(-1)


class Policy:
    """Model, masters and their relation. The same on every rank but for the rows that it holds."""

    def __init__(self, model: nn.Module, ranks: Ranks, device: torch.device | None = None) -> None:
        """Take over a model with float32 parameters on CPU; its values become the masters.

        Raises:
            UsageError: the model cannot be trained here; one sentence says why.
        """
        _require_trainable(model)
        self.ranks = ranks
        self.device = device or torch.device("cpu")
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.layout = Layout.of(TensorSpec(name, "BF16", tuple(value.shape)) for name, value in whole.items())
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator,union-attr]
        model.to(device=self.device, dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        model.train()
        if ranks.world_size > 1:
            _shard(model, self.device)
        self.model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.shards = [
            _shard_of(name, parameter, whole[name], self.device) for name, parameter in model.named_parameters()
        ]
        self.cast()

    def forward(self, inputs: Tensor, keep: int) -> Tensor:
        """Logits of the last `keep` positions of each row: [rows, keep, vocabulary]."""
        if self._keeps_logits:
            return self.model(input_ids=inputs, use_cache=False, logits_to_keep=keep).logits
        return self.model(input_ids=inputs, use_cache=False).logits[:, -keep:]

    @torch.no_grad()
    def cast(self) -> None:
        """Set the model's parameters to the masters' bf16 values."""
        for shard in self.shards:
            shard.local().copy_(shard.master.to(torch.bfloat16))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the parameters' gradients to the shards' float32 sums, and clear them."""
        for shard in self.shards:
            if shard.parameter.grad is not None:
                shard.gradient.add_(_local(shard.parameter.grad).reshape(-1))
                shard.parameter.grad = None

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for shard in self.shards:
            shard.gradient.zero_()
            shard.parameter.grad = None

    @torch.no_grad()
    def pieces(self) -> list[Piece]:
        """The bf16 bits that the model computes with, of this rank's rows; fresh memory. Empty shards are left out."""
        return [
            Piece(shard.name, shard.start, _bf16_bits(shard.local())) for shard in self.shards if shard.master.numel()
        ]

    def state_digest(self) -> str:
        """Digest of the policy's bits over all ranks, as a manifest has it."""
        parts = self.ranks.gather(state_digest(self.layout, self.pieces()))
        return f"{sum(parts) % 2**64:016x}"

    @torch.no_grad()
    def load(self, masters: Mapping[str, NDArray[np.float32]]) -> None:
        """Set the masters from whole arrays, and cast.

        Raises:
            Corrupt: an array is missing or has another shape.
        """
        for shard in self.shards:
            shard.master.copy_(_rows(masters, shard.name, shard))
        self.cast()

    @torch.no_grad()
    def adopt(self, bits: Mapping[str, NDArray[np.uint16]]) -> int:
        """Where the masters' cast differs from these whole, flat bf16 bits, take their value; returns how many here."""
        changed = 0
        for shard in self.shards:
            if not shard.master.numel():
                continue
            wanted = np.ascontiguousarray(bits[shard.name].reshape(-1)[shard.start : shard.stop])
            differs = torch.from_numpy(wanted != _bf16_bits(shard.master)).to(self.device)
            values = torch.from_numpy(wanted.view(np.int16)).view(torch.bfloat16).float().to(self.device)
            shard.master.copy_(torch.where(differs, values, shard.master))
            changed += int(differs.sum())
        self.cast()
        return changed


def _rows(arrays: Mapping[str, NDArray[np.float32]], key: str, shard: Shard) -> Tensor:
    array = arrays.get(key)
    if array is None or tuple(array.shape) != shard.shape:
        found = "missing" if array is None else f"of shape {array.shape}"
        raise Corrupt(f"The training state's {key} is {found}; the model needs {shard.shape}.")
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1)[shard.start : shard.stop].astype(np.float32))


def rows_of(arrays: Mapping[str, NDArray[np.float32]], key: str, shard: Shard) -> Tensor:
    """This rank's rows of a whole array, 1-D float32. Raises Corrupt."""
    return _rows(arrays, key, shard)


def _bf16_bits(values: Tensor) -> NDArray[Any]:
    return values.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _shard_of(name: str, parameter: nn.Parameter, whole: Tensor, device: torch.device) -> Shard:
    shape, start = tuple(whole.shape), 0
    if isinstance(parameter, DTensor):
        # Rows are dealt like torch.chunk: equal blocks of the rounded-up size, the last ones shorter or empty.
        mesh = parameter.device_mesh
        block = -(-shape[0] // mesh.size())
        start = min(mesh.get_local_rank() * block, shape[0]) * math.prod(shape[1:])
    length = _local(parameter).numel()
    master = whole.reshape(-1)[start : start + length].clone().to(device)
    assert master.numel() == length, f"{name}: the shard does not lie where its rank expects it"
    return Shard(name, shape, start, parameter, master, torch.zeros_like(master))


def _shard(model: nn.Module, device: torch.device) -> None:
    """Apply FSDP2 to each decoder layer and to the rest; after each pass only this rank's rows stay."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layers: set[str] = set(getattr(model, "_no_split_modules", None) or [])
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=precision)


def _require_trainable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.dim() == 0:
            raise UsageError(
                f"Parameter {name} of the model cannot be trained: it is a {parameter.dim()}-d {parameter.dtype}."
            )
    transient = {f"{prefix}.{name}".lstrip(".") for prefix, module in model.named_modules()
                 for name in module._non_persistent_buffers_set}  # fmt: skip
    kept = [name for name, _ in model.named_buffers() if name not in transient]
    if kept:
        raise UsageError(
            f"The model keeps state in buffers ({kept[0]}), which are not part of a policy version.",
            hint="Use a model whose whole state is in its parameters.",
        )
