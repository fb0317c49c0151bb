"""The check for models that no worker on a GPU serves, by their plane map."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from services.worker.engine.kernel_limits import MAX_HEAD_DIM, MAX_RANK, MAX_ROPE
from services.worker.kv.planes import HeadsKept, LatentsKept, PlaneMap, StateKept, latent_ranks
from shared.errors import UnsupportedModel


def check_device(planes: PlaneMap, device: str, *, is_exact: bool = False) -> None:
    """Raise UnsupportedModel for pages that attention on ``device``, or exact mode there, cannot read."""
    if planes.is_identity or torch.device(device).type == "cpu":
        return
    has_states = any(isinstance(layer.kept, StateKept) for layer in planes.layers)
    if is_exact and (has_states or latent_ranks(planes)):
        raise UnsupportedModel(f"--exact: its pages hold {planes.contents}, for which there is no exact kernel")
    too_wide = sorted(set(_too_wide(planes)))
    if too_wide:
        raise UnsupportedModel(
            f"its pages hold {', '.join(too_wide)}: wider than kernels for GPUs read, choose --device cpu"
        )


def _too_wide(planes: PlaneMap) -> Iterator[str]:
    for kept in (layer.kept for layer in planes.layers):
        if isinstance(kept, LatentsKept) and (kept.rank > MAX_RANK or kept.rope > MAX_ROPE):
            yield f"latents of {kept.rank} + {kept.rope} values (at most {MAX_RANK} + {MAX_ROPE})"
        if isinstance(kept, HeadsKept) and kept.dim > MAX_HEAD_DIM:
            yield f"heads of {kept.dim} values (at most {MAX_HEAD_DIM})"
