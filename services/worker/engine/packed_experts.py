"""The experts of a layer, on CPUs: every expert's products are those of a packed linear layer.

The library computes an expert's rows together, so how a row is rounded depends on which other rows go to the same
expert. Packed layers compute a row alike beside any others (:mod:`~services.worker.engine.packed_linear`), and here a
row's results are added in the order of its own choices. Routers, which choose experts, compute with packed weights,
too. So experts give a row the same bits in any batch, where oneDNN's products do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from services.worker.engine.packed_linear import PackedWeight, packed_dtypes

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(torch.nn.Module):
    """The library's module ``experts`` with packed weights."""

    computes_rows_alone = True

    def __init__(self, experts: Any) -> None:
        """Move the weights of ``experts`` here, packed: its own are empty afterwards.

        The module is kept, because its activation is still called.
        """
        super().__init__()
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        self._up = _packed(experts, first)
        self._down = _packed(experts, "down_proj")
        for name in _WEIGHTS:
            if hasattr(experts, name):
                weight = getattr(experts, name)
                setattr(experts, name, torch.nn.Parameter(weight.new_empty(0), requires_grad=False))
        self._experts = experts
        self._activation = experts._apply_gate if experts.has_gate else experts.act_fn

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the experts' sum [T, width] for hidden [T, width]; chosen int64 and weights [T, k] by row."""
        rows, count = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=len(self._up)).tolist()
        results = hidden.new_empty(rows * count, hidden.shape[1])
        for expert, mine in enumerate(torch.split(order, sizes)):
            if len(mine):
                inner = self._activation(self._up[expert].product(hidden[mine // count]))
                results[mine] = self._down[expert].product(inner)
        # Sums of half precision are made in float32 and rounded once.
        weighted = results.view(rows, count, -1) * weights[..., None]
        return weighted.sum(dim=1).to(hidden.dtype)


def pack_experts(model: Any) -> int:
    """Replace the experts of every layer of ``model`` that can be packed; return how many layers."""
    dtypes = packed_dtypes()
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _can_be_packed(child, dtypes):
                _pack_routers(parent, child.down_proj.shape[0])
                setattr(parent, name, PackedExperts(child))
                packed += 1
    return packed


def _pack_routers(block: Any, experts: int) -> None:
    """Have modules of ``block`` that choose among so many ``experts`` compute as packed layers do."""
    for module in block.children():
        weight = getattr(module, "weight", None)
        if type(module) is not torch.nn.Linear and weight is not None and weight.dim() == 2 and len(weight) == experts:
            module.forward = partial(_routed, module.forward, _RouterProducts(weight))


def _routed(forward: Callable[..., Any], products: _RouterProducts, *args: Any, **kwargs: Any) -> Any:
    with products:
        return forward(*args, **kwargs)


class _RouterProducts(TorchFunctionMode):
    """While it is entered, products with a router's weight, cast or not, are those of a packed weight.

    The library's routers call ``linear`` themselves, and MKL's product of a row may depend on how many there are.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight.detach()
        self._packed: dict[torch.dtype, PackedWeight | None] = {}  # By the type that it is cast to.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute what is a product with the weight; do all else as it is."""
        if func is linear:
            rows, weight, *bias = args
            packed = self._packing(weight, *bias, **(kwargs or {}))
            if packed is not None:
                return packed.product(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:-1], len(weight))
        return func(*args, **(kwargs or {}))

    def _packing(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight | None:
        """Return the router's weight in the type of ``weight``, packed when first met; None for another weight."""
        if weight.shape != self._weight.shape:
            return None
        if weight.dtype not in self._packed:
            is_same = torch.equal(weight, self._weight.to(weight.dtype)) and weight.dtype in packed_dtypes()
            self._packed[weight.dtype] = PackedWeight(weight.detach(), bias) if is_same else None
        return self._packed[weight.dtype]


def _can_be_packed(module: Any, dtypes: set[torch.dtype]) -> bool:
    """Return whether ``module`` is experts as the library's decorator makes them, without norms of their own."""
    down = getattr(module, "down_proj", None)
    return (
        hasattr(module, "is_transposed")
        and hasattr(module, "has_gate")
        and not getattr(module, "has_post_expert_norm", False)
        and isinstance(down, torch.nn.Parameter)
        and down.dim() == 3
        and down.dtype in dtypes
    )


def _packed(experts: Any, name: str) -> list[PackedWeight]:
    weights = getattr(experts, name).detach()
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    rows = [weight.t().contiguous() if experts.is_transposed else weight for weight in weights]
    return [PackedWeight(weight, bias) for weight, bias in zip(rows, biases, strict=True)]
