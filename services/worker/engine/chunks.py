"""Attention in chunks (Llama 4): a layer's rows see keys of their own chunk only.

The library's models say so in the masks that they hand to attention, and in nothing else that they hand over. Ours is
handed no mask, so each attention module is told its chunk when the model is loaded. The checks at load try prompts far
shorter than a chunk; for them chunks are shortened, in the configuration, which masks are made of, and in what the
modules were told (:func:`shortened`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from services.worker.engine.attention import CHUNK

CHUNKED = "chunked_attention"
"""The type of such layers in a configuration."""

_FIELD = "attention_chunk_size"


def expected_chunks(config: Any) -> list[int | None]:
    """Keys of a chunk in each layer, as the configuration has it; None is no chunk."""
    chunk = getattr(config, _FIELD, None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [chunk] * int(config.num_hidden_layers)
    return [chunk if kind == CHUNKED else None for kind in kinds]


def tell_chunks(model: Any, chunks: Sequence[int | None]) -> None:
    """Have attention of each layer of ``model`` attend in its chunk of ``chunks``."""
    if any(chunk is not None for chunk in chunks):
        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int) and layer < len(chunks) and chunks[layer] is not None:
                setattr(module, CHUNK, chunks[layer])


def chunks_of(model: Any) -> dict[int, int]:
    """Return the chunks that the configuration gives modules, by layer."""
    return {module.layer_idx: module.__dict__[CHUNK] for module in model.modules() if CHUNK in module.__dict__}


@contextmanager
def shortened(model: Any, tokens: int) -> Iterator[None]:
    """Within this block chunks of ``model`` have less than half of ``tokens`` keys, so that prompts of so many tokens
    lie in three or more; queries that are scaled by their position (``floor_scale``) are scaled as far from the start.
    """
    short = max(1, tokens // 2 - 1)
    kept = []
    for module in model.modules():
        config = getattr(module, "config", None)
        for owner, field in ((module, CHUNK), (config, _FIELD), (module, "floor_scale")):
            found = None if owner is None else owner.__dict__.get(field)
            if isinstance(found, int) and found > short:
                kept.append((owner, field, found))
                setattr(owner, field, short)
    try:
        yield
    finally:
        for owner, field, found in reversed(kept):
            setattr(owner, field, found)
