"""Layouts of groups whose ranks keep what they are told, without a model, and pools of such groups in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from services.worker.engine.probe import FoundKept
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import HeadsKept, Kept, SharedKept
from services.worker.parallel.division import Share
from services.worker.parallel.group_layout import GroupLayout, group_layout
from services.worker.parallel.group_pool import GroupPool, PartOfPool


def layout_of(kept: Sequence[Kept], ranks: int, page_size: int) -> GroupLayout:
    """The layout of a model whose layers keep this in float32, over so many ranks."""
    layers = [SimpleNamespace(num_key_value_heads=each.heads if isinstance(each, HeadsKept) else 1) for each in kept]
    config = SimpleNamespace(
        model_type="made", is_heterogeneous=True, per_layer_config=layers, num_hidden_layers=len(kept)
    )
    sources = {layer: each.source for layer, each in enumerate(kept) if isinstance(each, SharedKept)}
    owned = [kept[each.source] if isinstance(each, SharedKept) else each for each in kept]
    mine = [_of_rank(each, ranks) for each in owned]
    for layer, source in sources.items():
        layers[layer].num_key_value_heads = layers[source].num_key_value_heads
    return group_layout(FoundKept(tuple(mine), sources, "float32"), config, ranks, page_size)


def pool_of(layout: GroupLayout, pages: int, prefix: str) -> GroupPool:
    """A pool whose parts are all in this process."""
    parts = [
        PartOfPool.of_rank(
            rank,
            layout,
            DevicePool.create(layout.part.geometry, pages, device="cpu", shm_prefix=prefix, planes=layout.part),
        )
        for rank in range(layout.ranks)
    ]
    return GroupPool(layout.whole, parts, [part.pool.handle() for part in parts])


def _of_rank(kept: Kept, ranks: int) -> Kept:
    if not isinstance(kept, HeadsKept):
        return kept
    return replace(kept, heads=len(Share(0, ranks).kv_heads(kept.heads)))
