"""From the log's bits to a torch model's parameters, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from whimbrel.delta import Bits, Change, Layout
from whimbrel.errors import Corrupt, UsageError

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def as_values(bits: Bits, dtype: str) -> Tensor:
    """A tensor of the log's dtype over these bits, without a copy."""
    return torch.from_numpy(bits.view(_SIGNED[bits.dtype.itemsize])).view(TORCH_DTYPES[dtype])


class ModelWeights:
    """The parameters of a model by the names that the log uses.

    A wider compute dtype (float32 on CPU, for a log of bf16) holds the very values, so the published bits can be read back.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Raises UsageError: model and log do not have the same tensors."""
        held = dict(model.state_dict(keep_vars=True))
        self._dtypes = {spec.name: spec.dtype for spec in layout.tensors}
        unknown = [name for name in self._dtypes if name not in held]
        # A tied tensor is in the log once, under its canonical name; it shares its storage with that one here.
        logged = {held[name].data_ptr() for name in self._dtypes if name in held}
        missing = [
            name for name, tensor in held.items() if name not in self._dtypes and tensor.data_ptr() not in logged
        ]
        if unknown or missing:
            raise UsageError(
                f"The model made from the log's config.json has other tensors than the log: {(unknown + missing)[:3]}.",
                hint="Use the transformers release that the trainer uses.",
            )
        self._flat = {}
        for spec in layout.tensors:
            tensor = held[spec.name].detach()
            if tuple(tensor.shape) != tuple(spec.shape) or not tensor.is_contiguous():
                raise UsageError(f"Tensor {spec.name} is {tuple(tensor.shape)} in the model, {spec.shape} in the log.")
            self._flat[spec.name] = tensor.view(-1)

    def fill(self, tensors: Mapping[str, Bits]) -> None:
        """Set every parameter to these bits."""
        for name, flat in self._flat.items():
            flat.copy_(as_values(tensors[name], self._dtypes[name]))

    def patch(self, changes: Iterable[Change]) -> None:
        """Overwrite the changed elements. Absolute values: doing it twice is the same as once."""
        for change in changes:
            flat = self._flat[change.name]
            positions = torch.from_numpy(change.positions).to(flat.device)
            flat[positions] = as_values(change.bits, self._dtypes[change.name]).to(flat.device, flat.dtype)

    def bits(self, name: str) -> Bits:
        """The log's bits of a parameter as the model holds it now, flat; a copy."""
        dtype = TORCH_DTYPES[self._dtypes[name]]
        flat = self._flat[name]
        if dtype == torch.bfloat16 and flat.dtype == torch.float32:
            # The upper halves, which is exact also for NaN; a cast would make all NaN one.
            return (flat.cpu().view(torch.int32).numpy().view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        values = flat.to(dtype).cpu().contiguous()
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        found = values.view(signed).numpy()
        return found.view(f"u{found.dtype.itemsize}")

    def check(self, tensors: Mapping[str, Bits]) -> None:
        """Compare all bits with the host copy. Raises Corrupt."""
        for name in self._flat:
            if not np.array_equal(self.bits(name), tensors[name]):
                raise Corrupt(f"The engine's {name} does not hold the bits of the version it should.")
