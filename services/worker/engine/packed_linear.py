"""Linear layers whose weights are stored the way oneDNN computes with them, for CPUs.

Measured on an 88M-parameter Llama with one thread: half the time per step at batch 8 in float32 and bfloat16
alike, 10 to 25% off prefill. As important: with at least ``LEAST_ROWS`` rows the result of a row does
not depend, to the bit, on how many other rows there are, so a decoding request gets the same logits alone and in
any batch. Fewer rows are padded, which is also faster than the matrix-vector kernel. One exception was found: with
AMX, bfloat16 and more than 1,024 inputs, sums are split differently from 33 rows on
(docs/results/what-did-not-work.md).

Other numbers are padded, too, to one of few. oneDNN compiles a primitive for every shape and keeps 1,024 of them, half
a MiB each, and a request with a new shape waits for the compiler. Measured with the three linear shapes of the bundled
model and batches of 4 to 256 rows: 390 MiB of primitives, with 16 sizes from each power of two to the next 80 MiB; and
a tenth less time, though 2% of the rows are padding, because round numbers of rows are computed faster.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.nn.functional import linear, pad

LEAST_ROWS = 4
_SIZE_BITS = 5
"""Leading bits in which padded numbers of rows may differ: 16 numbers from each power of two to the next."""

_EXPECTED_ROWS = 8
"""oneDNN chooses the layout for this many; layouts chosen for 8 and 64 are equally good at every size."""


def padded_rows(rows: int) -> int:
    """Return how many rows are computed for ``rows`` (at least 1).

    It is a multiple of LEAST_ROWS, and from 64 rows on at most a sixteenth more.
    """
    step = max(LEAST_ROWS, 1 << max(0, (rows - 1).bit_length() - _SIZE_BITS))
    return -(-rows // step) * step


class PackedWeight:
    """A weight ``[out_features, in_features]`` with its bias, in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Pack ``weight``, on a CPU and of one of :func:`packed_dtypes`; it is not kept.

        ``bias`` is [out_features], or None for no bias.
        """
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was before."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, ``[R, out_features]``, for x ``[R, in_features]``, R at least 1."""
        rows = x.shape[0]
        missing = padded_rows(rows) - rows
        if missing:
            x = pad(x, (0, 0, 0, missing))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y[:rows]


class PackedLinear(torch.nn.Module):
    """A linear layer, ``x @ weight.T + bias``, as ``torch.nn.Linear``.

    ``weight`` only tells shape, dtype and device.
    """

    computes_rows_alone = True

    def __init__(self, linear: torch.nn.Linear) -> None:
        """Pack the weight of ``linear``, which :func:`is_packable` must allow; ``linear`` itself is not kept."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._shape = linear.weight.new_zeros(()).expand(linear.weight.shape)
        self._packed = PackedWeight(linear.weight.detach(), self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """Zeros of the weight's shape, ``[out_features, in_features]``, in no memory."""
        return self._shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        shape = (*x.shape[:-1], self.out_features)
        x = x.reshape(-1, self.in_features)
        if x.shape[0] == 0:
            return x.new_empty(shape)
        return self._packed.product(x).view(shape)


class ReadLinear(PackedLinear):
    """A packed linear layer whose weight can be read, at the price of unpacking it each time."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight, ``[out_features, in_features]``, unpacked."""
        return self._packed.weight


def packed_dtypes() -> set[torch.dtype]:
    """Return the data types in which oneDNN computes on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return set()
    dtypes = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        dtypes.add(torch.float16)
    return dtypes


def conversion(dtype: torch.dtype) -> str:
    """Return what to tell an operator where oneDNN computes ``dtype`` by converting on this CPU; "" where it does not.

    On processors without instructions for bfloat16 a prefill takes several times as long as in float32.
    """
    if dtype in packed_dtypes() or torch.float32 not in packed_dtypes():
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"this processor has no instructions for {name}: with --dtype float32 a prefill is several times faster"


def is_packable(weight: torch.Tensor) -> bool:
    """Return whether oneDNN computes with a weight of this type on this device."""
    return weight.device.type == "cpu" and weight.dtype in packed_dtypes()


def pack_linears(model: Any) -> int:
    """Replace the plain linear layers of ``model`` that can be packed, and return how many.

    Those are all whose dtype oneDNN computes in and whose weight no other module reads; classes of models that compute
    the same product are among them. Weights that are tied to an
    embedding are copied, all others are moved.
    """
    packed = 0
    for parent in list(model.modules()):
        kind: Any = type(parent)
        for name, child in list(parent.named_children()):
            # Not layers that are not called, but read.
            if _is_plain(child) and not _reads_weight(kind, name):
                setattr(parent, name, PackedLinear(child))
                packed += 1
    return packed


def pack_read_linears(model: Any) -> None:
    """Replace the linear layers of ``model`` that :func:`pack_linears` leaves, but that their parents call as well.

    Where code reads the weight after all, it is unpacked for it.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_plain(child) and _calls(type(parent), name):
                setattr(parent, name, ReadLinear(child))


def _is_plain(module: Any) -> bool:
    """Return whether ``module`` is a linear layer that can be packed.

    Classes derived from ``torch.nn.Linear`` may compute something else than it does.
    """
    if not isinstance(module, torch.nn.Linear) or not is_packable(module.weight):
        return False
    return type(module) is torch.nn.Linear or _computes_the_product(module)


@torch.inference_mode()
def _computes_the_product(module: torch.nn.Linear) -> bool:
    """Return whether ``module`` gives rows of random numbers their products with its weight, but for rounding."""
    rows = torch.randn(LEAST_ROWS, module.in_features, generator=torch.Generator().manual_seed(0))
    rows = rows.to(module.weight.dtype)
    wanted = linear(rows, module.weight, module.bias)
    try:
        found = module(rows)
    except Exception:  # It takes something else than rows.
        return False
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return bool((found - wanted).abs().max() <= torch.finfo(wanted.dtype).eps * 64 * wanted.abs().max())


def _reads_weight(parent: Any, name: str) -> bool:
    """Return whether code of ``parent`` itself reads the weight of its linear layer ``name``, as some routers do."""
    return f"self.{name}.weight" in _source(parent)


def _calls(parent: Any, name: str) -> bool:
    return f"self.{name}(" in _source(parent)


@functools.cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # No source: a class that was made at run time.
        return ""
