"""The shape that kernels are proven with: what a model's configuration says, before its weights fill the GPU.

The processes that prove need some hundred megabytes of the GPU each, which a worker has before it loads and may not
have afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.worker.kv.device_pool import DTYPE_NAMES
from services.worker.parallel.division import Share, head_dim_of, kv_heads_of
from services.worker.proving.table import ServedShape
from shared.messages.pools import KvGeometry

WHOLE = Share(0, 1)


def expected_shape(
    config: Any,
    windows: Sequence[int | None],
    *,
    chunks: Sequence[int | None] = (),
    dtype: torch.dtype,
    page_size: int,
    device: str | torch.device,
    share: Share = WHOLE,
    store_port: int = 0,
) -> ServedShape:
    """What a model of ``config`` computes in one process; ``windows`` and ``chunks`` are those of its layers."""
    # Of a model whose layers differ, the first one's; what all have is seen once it is loaded.
    layer = next(iter(getattr(config, "per_layer_config", None) or ()), config)
    geometry = KvGeometry(
        layers=len(windows),
        kv_heads=len(share.kv_heads(kv_heads_of(layer))),
        head_dim=head_dim_of(layer),
        page_size=page_size,
        dtype=DTYPE_NAMES[dtype],
    )
    return ServedShape(
        device=str(device),
        geometry=geometry,
        query_heads=int(config.num_attention_heads) // share.ranks,
        windows=tuple(dict.fromkeys(window or 0 for window in windows)),
        chunks=tuple(dict.fromkeys(chunk for chunk in chunks if chunk is not None)),
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        rank=share.rank,
        ranks=share.ranks,
        store_port=store_port,
    )
