"""The shape that kernels are proven with, from a model's configuration, before its weights fill the GPU.

The processes that prove need some hundred megabytes of the GPU each, which a worker has before it loads and may not
have afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from services.worker.kv.device_pool import DTYPE_NAMES
from services.worker.parallel.division import Share, head_dim_of, kv_heads_of, layer_configs
from services.worker.proving.table import ServedShape
from shared.messages.pools import FLOAT8, KvDtype, KvGeometry

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
    kv_dtype: KvDtype = "auto",
) -> ServedShape:
    """Return the shape of what a model of ``config`` computes in one process.

    ``windows`` and ``chunks`` are of its layers, and ``kv_dtype`` is the worker's setting.
    """
    first = layer_configs(config)[0]
    if not getattr(first, "num_attention_heads", None):  # No layer attends, so any heads show as much.
        first = SimpleNamespace(num_attention_heads=share.ranks, hidden_size=share.ranks * 64)
    geometry = KvGeometry(
        layers=len(windows),
        kv_heads=len(share.kv_heads(kv_heads_of(first))),
        head_dim=head_dim_of(first),
        page_size=page_size,
        dtype=FLOAT8 if kv_dtype == "fp8" else DTYPE_NAMES[dtype],
    )
    return ServedShape(
        device=str(device),
        geometry=geometry,
        query_heads=int(first.num_attention_heads) // share.ranks,
        windows=tuple(dict.fromkeys(window or 0 for window in windows)),
        chunks=tuple(dict.fromkeys(chunk for chunk in chunks if chunk is not None)),
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        rank=share.rank,
        ranks=share.ranks,
        store_port=store_port,
        dtype=DTYPE_NAMES[dtype] if geometry.is_rounded else "",
    )
