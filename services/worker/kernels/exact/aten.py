"""torch's own operators, computed by kernels whose rows do not depend on the batch.

Any module of any model that multiplies matrices or takes means calls one of a few operators, so replacing these reaches
all of them: linear layers and heads, merged weights, RMS norms written as a mean of squares, layer norms, and the
log-softmax of logprobs. The other operators of a model are checked when it is proven
(:mod:`services.worker.engine.exactness`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.worker.kernels.exact import rows
from services.worker.kernels.exact.matmul import matmul, product
from shared.errors import UnsupportedModel

_Library: Any = torch.library.Library  # torch leaves it without types.


def replace_operators(key: str) -> Any:
    """Replace :data:`REPLACED` by our kernels in this process, on tensors of a dispatch key such as ``CUDA``.

    The replacement holds as long as the result lives, a ``torch.library.Library``.
    """
    library: Any = _Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of each operator that had a kernel of its own; replacing it is the purpose.
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel.*")
        for name, function in REPLACED.items():
            library.impl(name, function, key)
    return library


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return matmul(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a[None], b[None])[0]


def _addmm(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    return product(a[None], b[None], added, beta=beta, alpha=alpha)[0]


def _mean(
    x: torch.Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,  # noqa: FBT002 - so the operator is called.
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = sorted({each % x.dim() for each in dim}) if dim else list(range(x.dim()))
    kept = [each for each in range(x.dim()) if each not in dims]
    found = rows.mean(x.permute(*kept, *dims).flatten(len(kept)))
    return found.reshape([1 if each in dims else size for each, size in enumerate(x.shape)]) if keepdim else found


def _native_layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outer = x.shape[: x.dim() - len(shape)]
    found, means, deviations = rows.layer_norm(x.reshape(*outer, -1), weight, bias, eps)
    statistics = [*outer, *(1 for _ in shape)]
    return found.view(x.shape), means.view(statistics), deviations.view(statistics)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if dim % x.dim() != x.dim() - 1:
        raise UnsupportedModel(f"--exact has a log-softmax of the last dimension only, not of {dim}")
    return rows.log_softmax(x, torch.float32 if half_to_float else x.dtype)


REPLACED: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "mm": _mm,
    "addmm": _addmm,
    "bmm": product,
    "mean.dim": _mean,
    "native_layer_norm": _native_layer_norm,
    "_log_softmax": _log_softmax,
}
"""Replacements, by the operators' names in ``torch.ops.aten``."""
