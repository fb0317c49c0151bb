"""Linear layers whose weights are stored the way oneDNN computes with them, for CPUs.

Measured on an 88M-parameter Llama with one thread: half the time per step at batch 8 in float32 and bfloat16
alike, 10 to 25% off prefill. What is worth as much: with at least ``LEAST_ROWS`` rows the result of a row does
not depend, to the bit, on how many other rows there are, so a decoding request gets the same logits alone and in
any batch. Fewer rows are padded, which is also faster than the matrix-vector kernel.

So are other numbers of rows, to one of few. oneDNN compiles a primitive for every shape and keeps 1,024 of them, half
a MiB each, and a request with a new shape waits for the compiler. Measured with the three linear shapes of the bundled
model and batches of 4 to 256 rows: 390 MiB of primitives, with 16 sizes from each power of two to the next 80 MiB; and
a tenth less time, though 2% of the rows are padding, because round numbers of rows are computed faster.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.nn.functional import pad

LEAST_ROWS = 4
_SIZE_BITS = 5
"""Leading bits that tell padded numbers of rows apart: 16 of them from each power of two to the next."""

_EXPECTED_ROWS = 8
"""oneDNN chooses the layout for this many; layouts chosen for 8 and 64 are equally good at every size."""


def padded_rows(rows: int) -> int:
    """How many rows are computed for ``rows`` (at least 1): a multiple of LEAST_ROWS, and from 64 rows on at most a
    sixteenth more.
    """
    step = max(LEAST_ROWS, 1 << max(0, (rows - 1).bit_length() - _SIZE_BITS))
    return -(-rows // step) * step


class PackedWeight:
    """A weight ``[out_features, in_features]`` with its bias, as oneDNN has it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` of ``[R, in_features]``, R at least 1: ``[R, out_features]``."""
        rows = x.shape[0]
        missing = padded_rows(rows) - rows
        if missing:
            x = pad(x, (0, 0, 0, missing))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y[:rows]


class PackedLinear(torch.nn.Module):
    """``x @ weight.T + bias``, as ``torch.nn.Linear``. ``weight`` only tells shape, dtype and device."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.weight = linear.weight.new_zeros(()).expand(linear.weight.shape)
        self._packed = PackedWeight(linear.weight.detach(), self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        shape = (*x.shape[:-1], self.out_features)
        x = x.reshape(-1, self.in_features)
        if x.shape[0] == 0:
            return x.new_empty(shape)
        return self._packed.product(x).view(shape)


def packed_dtypes() -> set[torch.dtype]:
    """In which oneDNN computes on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return set()
    dtypes = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        dtypes.add(torch.float16)
    return dtypes


def is_packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN computes with a weight of this type on this device."""
    return weight.device.type == "cpu" and weight.dtype in packed_dtypes()


def pack_linears(model: Any) -> int:
    """Replace every plain linear layer of ``model`` whose dtype oneDNN computes in and whose weight no other module
    reads; returns how many.

    Weights that are tied to an embedding are copied, all others are moved.
    """
    packed = 0
    for parent in list(model.modules()):
        kind: Any = type(parent)
        for name, child in list(parent.named_children()):
            # Not subclasses: they may compute something else. Nor what is not called, but read.
            is_plain = type(child) is torch.nn.Linear and is_packable(child.weight)
            if is_plain and not _reads_weight(kind, name):
                setattr(parent, name, PackedLinear(child))
                packed += 1
    return packed


@functools.cache
def _reads_weight(parent: type[torch.nn.Module], name: str) -> bool:
    """Whether the code of ``parent`` multiplies by the weight of its linear layer ``name`` itself: some routers do."""
    try:
        return f"self.{name}.weight" in inspect.getsource(parent)
    except (OSError, TypeError):  # No source: a class that was made at run time.
        return False
