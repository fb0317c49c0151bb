"""A prefix held in memory, as a source of keys, K and V (``services.worker.importance.prefix_source``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.worker.importance.key_codes import rounded
from shared.messages.sparse_reads import code_bytes


class StoredPrefix:
    """KV held token by token outside of any pool, with the probe heads' keys stored a second time, apart from the rest
    and rounded, so that reading them touches nothing else (IMPRESS 6.5).
    """

    def __init__(self, kv: torch.Tensor, probe_heads: Sequence[int], start: int = 0) -> None:
        """kv ``[layers, 2, tokens, kv_heads, head_dim]``, of tokens from ``start`` on, is referred to, not copied."""
        self.start, self.end, self.tokens = start, start + kv.shape[2], kv.shape[2]
        self.kv_heads = kv.shape[3]
        self.token_bytes = 2 * kv.shape[3] * kv.shape[4] * kv.element_size()
        self._kv = kv
        self._apart = {head: rounded(kv[:, 0, :, head]) for head in probe_heads}

    def probe_keys(self, layer: int, heads: Sequence[int], start: int, layers: int = 1) -> tuple[torch.Tensor, int]:
        """Of heads that are apart, rounded."""
        rows = slice(start - self.start, None)
        if all(head in self._apart for head in heads):
            keys = torch.stack([self._apart[head][layer, rows] for head in heads])
            return keys, keys[..., 0].numel() * code_bytes(keys.shape[-1])
        keys = torch.stack([self._kv[layer, 0, rows, head] for head in heads])
        return keys, keys.nbytes

    def keys(self, layer: int, start: int) -> torch.Tensor:
        return self._kv[layer, 0, start - self.start :].transpose(0, 1)

    def prefetch_keys(self, layer: int, layers: int, heads: Sequence[int], start: int) -> bool:
        """They are here."""
        return True

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        return self._kv[layer].index_select(1, tokens - self.start).transpose(1, 2)

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.kv_heads, device=tokens.device)[:, None]
        return self._kv[layer, 1][tokens - self.start, heads]
