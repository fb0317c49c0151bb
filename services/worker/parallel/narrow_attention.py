"""Attention of a rank in models whose classes derive the width of a head from the hidden size.

Such a class (GPT-NeoX, GPT-J, StableLM, OPT) divides ``hidden_size`` by the number of heads, so with a rank's heads
alone its heads would be wider. Its modules are taken from a model whose hidden size is a rank's part, too: there heads
are as wide as in the whole model. Linear layers that read or write whole hidden states get these sides again.
"""

from __future__ import annotations

from typing import Any

import torch

from services.worker.parallel.plan import DivisionPlan, Style
from services.worker.parallel.shared_linears import replace_module
from services.worker.parallel.stored_weights import StoredWeights
from shared.errors import UnsupportedModel

_SIDES: tuple[Style, ...] = ("colwise", "rowwise")


def narrow_attention(model: Any, narrow: Any, plan: DivisionPlan, weights: StoredWeights) -> None:
    """Give ``model`` modules of ``narrow`` where linear layers that a rank has some columns of have all of them.

    Both have a rank's heads; the hidden size of ``narrow`` is divided as well. Weights are undefined afterwards.
    Raises UnsupportedModel for projections whose order is not known.
    """
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in whole_layers(model, plan, weights)):
        linears = [name for style in _SIDES for name in plan.divided(model, style) if name.rpartition(".")[0] == parent]
        fused = [name for name in linears if "qkv" in name.rpartition(".")[2]]
        if fused:  # CodeGen's lie in four groups, however many ranks there are; GPT-NeoX's follow one another by head.
            raise UnsupportedModel(f"{fused[0]} has queries, keys and values in an order that no group divides")
        made_narrow = narrow.get_submodule(parent)
        for module in made_narrow.modules():
            if hasattr(module, "config"):
                module.config = model.config  # It says which attention is called, and may be changed.
        replace_module(model, parent, made_narrow)
        for name in linears:
            mine, stored = narrow.get_submodule(name), weights.get(f"{name}.weight")
            if stored is not None and len(stored.shape) == 2:
                rows, columns = mine.weight.shape
                rows, columns = (rows, stored.shape[1]) if plan.style(name) == "colwise" else (stored.shape[0], columns)
                made = torch.nn.Linear(columns, rows, bias=mine.bias is not None, dtype=mine.weight.dtype)
                replace_module(model, name, made)


def whole_layers(model: Any, plan: DivisionPlan, weights: StoredWeights) -> list[str]:
    """Return the linear layers that a rank has some columns of, by the plan, and that have all of them in ``model``."""
    found: list[str] = []
    for name in plan.divided(model, "rowwise"):
        module, stored = model.get_submodule(name), weights.get(f"{name}.weight")
        is_whole = stored is not None and tuple(stored.shape) == tuple(module.weight.shape)
        if type(module) is torch.nn.Linear and is_whole and not _is_of_a_layer(name):
            found.append(name)
    return found


def _is_of_a_layer(name: str) -> bool:
    """Return whether the module is a layer's own, and not in its attention or MLP."""
    return name.split(".")[-2].isdecimal()
