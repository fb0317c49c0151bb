"""Rotary embeddings that do not depend on the rest of the batch.

"longrope" and "dynamic" choose their frequencies by the longest position of the batch, so a token's KV would depend on
the other requests of its step. Here every batch is taken to reach to the end of the configured context: longrope then
uses its long factors always if that context is longer than the one of pretraining and its short factors always if it is
not, and dynamic NTK scaling never begins, because no context goes beyond the configuration's
``max_position_embeddings``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shared.logs import get_logger

_BATCH_DEPENDENT = ("longrope", "dynamic")


def pin_rotations(model: Any, context: int) -> None:
    """Have the rotary embeddings of ``model`` compute every batch as one that reaches position ``context - 1``."""
    for name, module in model.named_modules():
        types = sorted(_rope_types(getattr(module, "rope_type", None)) & set(_BATCH_DEPENDENT))
        if types:
            module.forward = partial(_pinned, module.forward, context - 1)
            get_logger("worker.engine").info("rope_is_pinned", module=name, rope_types=types, context_tokens=context)


def _rope_types(found: object) -> set[str]:
    """Return the one type of a model, or one for each type of layer."""
    if isinstance(found, dict):
        return {str(each) for each in found.values()}
    return set() if found is None else {str(found)}


def _pinned(
    forward: Callable[..., Any], last: int, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward`` for positions int64 [batch, T] and one more, ``last``, whose angles are dropped again."""
    # Tables may be filled beyond the context; no request reads those entries.
    within = position_ids.clamp(max=last)
    reaching = torch.cat([within, within.new_full((len(within), 1), last)], dim=1)
    angles = forward(x, reaching, *args, **kwargs)
    return tuple(each[:, :-1] for each in angles) if isinstance(angles, tuple) else angles[:, :-1]
