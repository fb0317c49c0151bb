"""Quantised weights as strips of codes (``codes.h``), which kernels unpack in registers.

Decode at small batches is bound by reading weights, and codes are a half or a quarter of bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.worker.engine.fused.strips import huge_pages
from services.worker.engine.quantised.codes import Codes, codes_of
from services.worker.native.fused import LANES, SCALE_FORMS, Matrix, MatrixStruct
from shared.errors import InvariantViolated

BITS = (4, 8)
_ALIGNMENT = 64


def mergeable(modules: Sequence[torch.nn.Module]) -> list[Codes] | None:
    """Return the codes of linear ``modules`` that become one matrix; None where kernels cannot use them."""
    found = [codes for module in modules if (codes := codes_of(module)) is not None]
    kinds = {(codes.bits, codes.inputs, codes.scales.shape[1], codes.scales.dtype) for codes in found}
    if len(found) < len(modules) or len(kinds) != 1:
        return None
    first = found[0]
    fits = first.bits in BITS and first.group % LANES == 0 and first.scales.dtype in SCALE_FORMS
    return found if fits else None


def coded_bytes(parts: Sequence[Codes]) -> int:
    """Return the bytes of memory that the matrix of ``parts`` takes."""
    return sum(size for _, size in _sizes(parts))


class CodedMemory:
    """Memory for matrices of codes, in huge pages where the system gives them."""

    def __init__(self, nbytes: int, dtype: torch.dtype) -> None:
        """``dtype`` is what kernels compute with."""
        self._free = huge_pages(nbytes)
        self._step = 4 // dtype.itemsize  # Inputs that kernels take together.

    def pack(self, parts: Sequence[Codes]) -> Matrix:
        """Pack ``parts``, which are :func:`mergeable`, into one matrix, one behind the other.

        All but the last fill whole strips. Raises InvariantViolated when no memory was taken for it.
        """
        if coded_bytes(parts) > len(self._free):
            raise InvariantViolated("there is no room for these codes")
        first = parts[0]
        places: dict[str, torch.Tensor] = {}
        for name, size in _sizes(parts):
            places[name], self._free = self._free[:size], self._free[size:]
        strips = [-(-codes.outputs // LANES) for codes in parts]
        begin = 0
        for codes, count in zip(parts, strips, strict=True):
            laid = {"codes": _units(codes), "scales": _by_strip(codes.scales)}
            if "offsets" in places:
                offsets = codes.offsets
                laid["offsets"] = _by_strip(
                    torch.zeros_like(codes.scales, dtype=torch.int8) if offsets is None else offsets
                )
            for name, tensor in laid.items():
                raw = tensor.contiguous().view(torch.uint8).flatten()
                start = begin * (len(raw) // count)
                places[name][start : start + len(raw)].copy_(raw)
            begin += count
        struct = MatrixStruct(
            places["codes"].data_ptr(),
            first.inputs // self._step,
            sum(strips),
            first.bits,
            first.group,
            SCALE_FORMS[first.scales.dtype],
            places["scales"].data_ptr(),
            places["offsets"].data_ptr() if "offsets" in places else None,
        )
        return Matrix(struct, first.inputs, places["codes"])


def _sizes(parts: Sequence[Codes]) -> list[tuple[str, int]]:
    """Return name and bytes of each array of a matrix of ``parts``."""
    first = parts[0]
    outputs = sum(-(-codes.outputs // LANES) * LANES for codes in parts)
    numbers = outputs * first.scales.shape[1]
    sizes = [("codes", outputs * first.inputs * first.bits // 8), ("scales", numbers * first.scales.itemsize)]
    if any(codes.offsets is not None for codes in parts):
        sizes.append(("offsets", numbers))
    return [(name, -(-size // _ALIGNMENT) * _ALIGNMENT) for name, size in sizes]


def _units(codes: Codes) -> torch.Tensor:
    """Return uint8 [strips, ...] in the order of ``codes.h``."""
    biased = (_whole_strips(codes.values).int() + (1 << codes.bits - 1)).to(torch.uint8)
    inputs = biased.view(-1, LANES, codes.inputs // 4, 4)
    if codes.bits == 4:
        inputs = inputs[:, :, 0::2] | inputs[:, :, 1::2] << 4
    return inputs.transpose(1, 2)


def _by_strip(numbers: torch.Tensor) -> torch.Tensor:
    """Return [outputs, groups] as [strips, groups, LANES]."""
    return _whole_strips(numbers).view(-1, LANES, numbers.shape[1]).transpose(1, 2)


def _whole_strips(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` with zeros behind them, so that they fill whole strips."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % LANES))
