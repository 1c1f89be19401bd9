"""The KV cache of a batch whose rows come and go.

Rows are padded on the left to a common width. Rotary positions are part of the stored keys, so a row may be shifted to
another column: joining pads on the left, leaving selects rows and trims columns that nobody uses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class BatchCache:
    """Keys and values of each layer, [rows, heads, width, size], and which columns each row really has."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], mask: Tensor) -> None:
        self._layers = layers
        self.mask = mask
        """[rows, width] int64, 1 where a token is."""

    @classmethod
    def of(cls, cache: DynamicCache, mask: Tensor) -> BatchCache:
        """Take over what a forward pass has filled."""
        layers: list[tuple[Tensor, Tensor]] = []
        for layer in cache.layers:
            assert isinstance(layer, DynamicLayer), "the model must keep plain keys and values"
            assert layer.keys is not None, "a forward pass fills every layer"
            assert layer.values is not None, "a forward pass fills every layer"
            layers.append((layer.keys, layer.values))
        return cls(layers, mask)

    def as_transformers(self) -> DynamicCache:
        """For the next forward pass, which extends it."""
        return DynamicCache(ddp_cache_data=self._layers)

    def select(self, rows: Tensor) -> BatchCache:
        """Only these rows, in this order; a row may occur several times."""
        mask = self.mask[rows]
        used = mask.any(dim=0)
        first = int(used.to(torch.int8).argmax()) if len(used) else 0
        return BatchCache([(k[rows][:, :, first:], v[rows][:, :, first:]) for k, v in self._layers], mask[:, first:])

    def join(self, other: BatchCache) -> BatchCache:
        """The rows of both, those of `other` last."""
        width = max(self.mask.shape[1], other.mask.shape[1])
        layers = [
            (torch.cat((_widen(k, width), _widen(k2, width))), torch.cat((_widen(v, width), _widen(v2, width))))
            for (k, v), (k2, v2) in zip(self._layers, other._layers, strict=True)
        ]
        return BatchCache(layers, torch.cat((_pad(self.mask, width), _pad(other.mask, width))))


def _widen(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, 0, width - values.shape[2], 0))


def _pad(mask: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(mask, (width - mask.shape[1], 0))
