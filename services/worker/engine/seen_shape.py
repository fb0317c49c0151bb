"""The input of attention in a loaded model, as far as its configuration does not tell it: for the proofs of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from services.worker.engine.latents import Latents
from services.worker.engine.probe import layout_of
from services.worker.kv.planes import PlaneMap
from services.worker.proving.table import HeadsShape, LatentsShape, ServedShape

EXPANDED_HEADS = 2
"""Heads of K and V that a proof expands from latents: each is attended to by itself, so two show as much as many."""


def seen_shape(shape: ServedShape, model: Any, planes: PlaneMap) -> ServedShape:
    """Return ``shape`` with the geometry of the model's pages, and with what its attention calls show.

    They show sinks, heads and latents. ``model`` attends through the attention interface.
    """
    calls = layout_of(model, (1, 2))
    if not calls:  # All layers carry states.
        return shape
    sinks = any(call.sinks is not None for call in calls)
    shape = msgspec.structs.replace(shape, geometry=planes.geometry, has_sinks=sinks)
    if planes.is_identity:
        return shape
    heads: dict[HeadsShape, None] = {}
    latents: dict[LatentsShape, None] = {}
    for call in calls:
        query_heads = call.query.shape[1]
        if call.latents is not None:
            kept = LatentsShape(
                query_heads=query_heads, rank=call.latents.rank, rope=call.latents.rope, row_values=planes.width
            )
            latents[kept] = None
            heads[_expanded(call.latents)] = None
            continue
        group = query_heads // call.key.shape[1]
        heads.update(dict.fromkeys(_parts(planes, call.layer, group)))
    return msgspec.structs.replace(shape, heads=tuple(heads), latents=tuple(latents))


def _parts(planes: PlaneMap, layer: int, group: int) -> Iterator[HeadsShape]:
    for part in planes.parts_of(layer):
        yield HeadsShape(
            query_heads=part.heads * group, kv_heads=part.heads, head_dim=part.dim, row_values=planes.width
        )


def _expanded(latents: Latents) -> HeadsShape:
    dim = latents.expanded_dim
    return HeadsShape(
        query_heads=EXPANDED_HEADS, kv_heads=EXPANDED_HEADS, head_dim=dim, row_values=EXPANDED_HEADS * dim
    )
