"""A module ``flashinfer`` that has its paged prefill wrapper, in plain torch: it holds callers to the documented API.

https://docs.flashinfer.ai/api/attention.html: ``plan`` takes int32 offsets of queries and pages, page numbers, and the
entries of each last page, from 1 to the page's size; ``run`` takes [rows, heads, head_dim] and a tuple of pools. With
``causal`` the last query stands at the last key. ``window_left`` keys before a row's own are visible, -1: all.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    planned = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._plan: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        tensors = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(each.dtype == torch.int32 for each in tensors)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert causal
        assert sm_scale is not None
        type(self).planned += 1
        self._plan = {
            "rows": qo_indptr.tolist(), "pages": paged_kv_indptr.tolist(), "indices": paged_kv_indices.long(),
            "last": paged_kv_last_page_len.tolist(), "shape": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "scale": sm_scale, "left": window_left, "cap": logits_soft_cap, "dtypes": (q_data_type, kv_data_type),
        }  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        plan, (k_pool, v_pool) = self._plan, paged_kv_cache
        heads, kv_heads, head_dim, page_size = plan["shape"]
        assert q.is_contiguous()
        assert q.shape == (plan["rows"][-1], heads, head_dim)
        assert k_pool.shape[1:] == v_pool.shape[1:] == (page_size, kv_heads, head_dim)
        assert (q.dtype, k_pool.dtype) == plan["dtypes"]
        out = torch.empty_like(q)
        for number, last in enumerate(plan["last"]):
            first, end = plan["rows"][number : number + 2]
            pages = plan["indices"][plan["pages"][number] : plan["pages"][number + 1]]
            length = (len(pages) - 1) * page_size + last
            key, value = (pool[pages].flatten(0, 1)[:length].float() for pool in (k_pool, v_pool))
            key, value = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (key, value))
            scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), key) * plan["scale"]
            if plan["cap"]:
                scores = plan["cap"] * torch.tanh(scores / plan["cap"])
            behind = torch.arange(length - (end - first), length)[:, None] - torch.arange(length)
            hidden = (behind < 0) | ((behind > plan["left"]) if plan["left"] >= 0 else torch.zeros_like(behind).bool())
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype)
        return out


def module() -> ModuleType:
    """To stand in ``sys.modules``."""
    made: Any = ModuleType("flashinfer")
    made.__spec__ = __spec__
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return made  # type: ignore[no-any-return]
