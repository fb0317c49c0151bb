"""The weights of a model as strips, and modules over them that replace the model's own.

A weight is kept once. Code that calls modules of the model by themselves, as restoration from hidden states does, finds
there parts of the merged matrices that the fused forward reads, and gets the same bits from them.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.native.fused import LANES, FusedKernels, Matrix, MatrixStruct
from shared.errors import InvariantViolated


def huge_pages(nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes] of zeros, in huge pages where the system gives them."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # Private, because systems seldom give huge pages to shared memory.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # The system's kernel may have none.
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Through numpy, because a tensor by itself would not keep the mapping alive.
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


class StripMemory:
    """Memory for strips, in huge pages where the system gives them: decode reads all of it for every token."""

    def __init__(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """``shapes`` are [outputs, inputs] of all matrices that will be packed."""
        self._step = 4 // dtype.itemsize  # Inputs that lie together.
        self.numbers = sum(-(-outputs // LANES) * LANES * inputs for outputs, inputs in shapes)
        self._free = huge_pages(self.numbers * dtype.itemsize).view(dtype)

    def pack(self, weights: Sequence[torch.Tensor]) -> Matrix:
        """Pack ``weights`` [outputs, inputs] into one matrix, one behind the other; all but the last fill whole strips.

        Raises InvariantViolated when it was not among the shapes that memory was taken for.
        """
        inputs = weights[0].shape[1]
        strips = [-(-len(weight) // LANES) for weight in weights]
        size = sum(strips) * LANES * inputs
        if size > len(self._free):
            raise InvariantViolated("there is no room for these weights")
        memory, self._free = self._free[:size], self._free[size:]
        laid = memory.view(-1, inputs // self._step, LANES, self._step)
        for weight, count in zip(weights, strips, strict=True):
            whole = len(weight) // LANES
            laid[:whole].copy_(_by_strip(weight[: whole * LANES], self._step))
            if count > whole:  # New memory is zero, and so are the outputs that do not exist.
                rest = weight[whole * LANES :]
                laid[whole, :, : len(rest)].copy_(rest.view(len(rest), -1, self._step).transpose(0, 1))
            laid = laid[count:]
        return Matrix(MatrixStruct(memory.data_ptr(), inputs // self._step, sum(strips)), inputs, memory)


def _by_strip(weight: torch.Tensor, step: int) -> torch.Tensor:
    """Return [strips * LANES, inputs] seen as [strips, inputs / step, LANES, step]."""
    return weight.view(len(weight) // LANES, LANES, weight.shape[1] // step, step).transpose(1, 2)


class StripLinear(torch.nn.Module):
    """A linear layer over a matrix of strips: ``x @ weight.T + bias``, as ``torch.nn.Linear``."""

    def __init__(
        self, kernels: FusedKernels, matrix: Matrix, bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> None:
        """Compute with ``matrix``. ``outputs`` is given where the matrix has more, to fill its last strip."""
        super().__init__()
        self.in_features, self.out_features = matrix.inputs, outputs or matrix.outputs
        self._kernels, self._matrix, self._bias = kernels, matrix, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        rows = x.reshape(-1, self.in_features)
        result = self._kernels.linear(self._matrix, self._bias, rows)[:, : self.out_features]
        return result.reshape(*x.shape[:-1], self.out_features)


class StripEmbedding(torch.nn.Module):
    """``torch.nn.Embedding`` over the matrix of a head that is tied to it."""

    def __init__(self, kernels: FusedKernels, matrix: Matrix, vocabulary: int) -> None:
        """Take the first ``vocabulary`` outputs of ``matrix`` for tokens; any others fill its last strip."""
        super().__init__()
        self._kernels, self._matrix, self._vocabulary = kernels, matrix, vocabulary

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden] for ids int64 [...]. Raises InvariantViolated for a token that does not exist."""
        flat = ids.reshape(-1).contiguous()
        if self._kernels.first_outside(flat, self._vocabulary) >= 0:
            raise InvariantViolated(f"a token is not among the {self._vocabulary} of the model")
        result = torch.empty(len(flat), self._matrix.inputs, dtype=self._kernels.dtype)
        self._kernels.embed(self._matrix, flat, result)
        return result.view(*ids.shape, -1)


class StripNorm(torch.nn.Module):
    """RMSNorm with the bits of the fused forward."""

    def __init__(self, kernels: FusedKernels, weight: torch.Tensor, eps: float) -> None:
        """Keep ``weight`` [width], contiguous and of the data type of ``kernels``; it is not copied."""
        super().__init__()
        self._kernels, self._weight, self._eps = kernels, weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., width], normed."""
        return self._kernels.norm(x, self._weight, self._eps)
