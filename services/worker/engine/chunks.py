"""Attention in chunks (Llama 4): a layer's rows see keys of their own chunk only.

The library's models express chunks only in the masks that they hand to attention. Our attention gets no mask, so the
chunk is set on each attention module when the model is loaded. The checks at load try prompts far shorter than a chunk;
for them :func:`shortened` shortens the chunks, both in the configuration, from which masks are made, and on the
modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from services.worker.engine.attention import CHUNK

CHUNKED = "chunked_attention"
"""The type of layers that attend in chunks, in a configuration."""

_FIELD = "attention_chunk_size"


def expected_chunks(config: Any) -> list[int | None]:
    """Return the keys of a chunk in each layer, as the configuration has it; None is no chunk."""
    chunk = getattr(config, _FIELD, None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [chunk] * int(config.num_hidden_layers)
    return [chunk if kind == CHUNKED else None for kind in kinds]


def tell_chunks(model: Any, chunks: Sequence[int | None]) -> None:
    """Set the chunk of each layer of ``model``, in keys, on its modules; None sets nothing."""
    if any(chunk is not None for chunk in chunks):
        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int) and layer < len(chunks) and chunks[layer] is not None:
                setattr(module, CHUNK, chunks[layer])


def chunks_of(model: Any) -> dict[int, int]:
    """Return the chunks that are set on modules of ``model``, in keys by layer."""
    return {module.layer_idx: module.__dict__[CHUNK] for module in model.modules() if CHUNK in module.__dict__}


@contextmanager
def shortened(model: Any, tokens: int) -> Iterator[None]:
    """Shorten the chunks of ``model`` within the block to less than half of ``tokens`` keys.

    So prompts of so many tokens lie in three chunks or more. Where queries are scaled by their position
    (``floor_scale``), that distance is shortened likewise.
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
