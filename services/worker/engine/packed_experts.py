"""The experts of a layer, on CPUs: every expert's products are those of a packed linear layer.

The library computes an expert's rows together, so how a row is rounded depends on which other rows go to the same
expert. Packed layers compute a row alike beside any others (:mod:`~services.worker.engine.packed_linear`), and here a
row's results are added in the order of its own choices. Products that choose experts are made for as many rows as
packed ones at least, for the same reason. So experts give a row the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from services.worker.engine.packed_linear import LEAST_ROWS, PackedWeight, packed_dtypes

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(torch.nn.Module):
    """What the library's module ``experts`` computes, whose weights are moved here."""

    def __init__(self, experts: Any) -> None:
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
        """hidden [T, width]; chosen int64 and weights [T, k]: the experts of each row. [T, width]."""
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
    """Replace the experts of every layer of ``model`` that can be packed; returns how many layers."""
    dtypes = packed_dtypes()
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _can_be_packed(child, dtypes):
                _pad_routers(parent, child.down_proj.shape[0])
                setattr(parent, name, PackedExperts(child))
                packed += 1
    return packed


def _pad_routers(block: Any, experts: int) -> None:
    """Let modules of ``block`` that choose among so many ``experts`` compute no fewer rows than packed layers do."""
    for module in block.children():
        weight = getattr(module, "weight", None)
        if type(module) is not torch.nn.Linear and weight is not None and weight.dim() == 2 and len(weight) == experts:
            padding = _Padding()
            module.register_forward_pre_hook(padding.add)
            module.register_forward_hook(padding.cut)


class _Padding:
    """Rows that a module is given beside its own, and whose results are cut off."""

    def __init__(self) -> None:
        self._rows = 0

    def add(self, _module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the first input, [..., T, width], with rows of zeros where T is less than oneDNN's least."""
        hidden, *others = inputs
        self._rows = hidden.shape[-2]
        return pad(hidden, (0, 0, 0, max(0, LEAST_ROWS - self._rows))), *others

    def cut(self, _module: torch.nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
        """``output``, a tensor [..., T, any] or several."""
        if isinstance(output, tuple):
            return tuple(part[..., : self._rows, :] for part in output)
        return output[..., : self._rows, :]


def _can_be_packed(module: Any, dtypes: set[torch.dtype]) -> bool:
    """Whether it is experts as the library's decorator makes them, without norms of their own."""
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
