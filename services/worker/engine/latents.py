"""Multi-head latent attention over the rows that it keeps: one a token for all heads, not K and V of every head.

Models of that kind (DeepSeek-V2, arXiv 2405.04434, section 2.1) compress K and V of a token to a latent vector and a
rotated part of the key. Their modules expand these to K and V in a method of its own, ``expand_kv``, just before they
call attention. Where a model is loaded with our attention, the method hands the latent row on instead, and attention
over the pool reads latents (:mod:`services.worker.engine.latent_attention`). With any other attention the module is
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.functional import pad

from services.worker.engine.attention import ATTENTION_NAME, AttentionCall
from services.worker.engine.packed_linear import padded_rows

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class Latents:
    """How one attention module expands its latents. Not to be used before its weights are loaded."""

    def __init__(self, module: Any) -> None:
        """Keep the sizes of ``module`` and its method ``expand_kv`` as it is now, before that is replaced."""
        self._expand: Expand = module.expand_kv
        self._like = next(module.parameters())
        self.rank, self.rope, self.nope, self.value_dim = (int(getattr(module, size)) for size in _SIZES)

    @property
    def expanded_dim(self) -> int:
        """Values of a head of K and V; the narrower of both is padded."""
        return max(self.nope + self.rope, self.value_dim)

    @property
    def absorbed_rows(self) -> float:
        """Rows of one request up to which attention to latents takes fewer operations than expanding them.

        A key is expanded in ``rank * (nope + value_dim)`` products a head, and each row saves ``2 * (rank - nope)`` by
        it.
        """
        saved = 2 * (self.rank - self.nope)
        return self.rank * (self.nope + self.value_dim) / saved if saved > 0 else math.inf

    @cached_property
    def _ups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices of the expansion, for keys [heads, nope, rank] and for values [heads, value_dim, rank]."""
        # Expanding unit vectors shows the matrices, however the module stores them.
        units = torch.eye(self.rank, dtype=self._like.dtype, device=self._like.device)[None, None]
        key, value = self._expand(units, units.new_zeros(1, 1, self.rank, self.rope))
        return key[0, :, :, : self.nope].transpose(1, 2).contiguous(), value[0].transpose(1, 2).contiguous()

    def absorbed(self, call: AttentionCall) -> AttentionCall:
        """Return the same attention with latents for keys and values.

        It is ``call`` with query [1, heads, T, rank + rope]. K's half of the expansion is taken into the query, and V's
        is left to :meth:`values` (the same section, "absorbed").
        """
        unrotated, rotated = call.query[..., : self.nope], call.query[..., self.nope :]
        query = torch.cat((_rows_by(unrotated[0], self._ups[0])[None], rotated), dim=-1)
        return replace(call, query=query, value=call.key, latents=None)

    def values(self, output: torch.Tensor) -> torch.Tensor:
        """Return [T, heads, value_dim] from the attention output of :meth:`absorbed`, [T, heads, rank + rope]."""
        return _rows_by(output[:, :, : self.rank].transpose(0, 1), self._ups[1].transpose(1, 2)).transpose(0, 1)

    def expanded(self, kept: torch.Tensor, heads: slice, dim: int) -> torch.Tensor:
        """Return K and V of ``heads`` for rows ``kept`` [pages, page_size, rank + rope].

        They are [2, pages, page_size, heads, dim], padded with zeros to ``dim``.
        """
        latent, rotated = kept[..., : self.rank], kept[..., self.rank :]
        ups = [up[heads] for up in self._ups]
        made = kept.new_zeros(2, *kept.shape[:2], len(ups[0]), dim)
        for half, up in zip(made, ups, strict=True):
            half[..., : up.shape[1]] = (latent @ up.flatten(0, 1).T).view(half.shape[:3] + up.shape[1:2])
        made[0, ..., self.nope : self.nope + self.rope] = rotated[:, :, None]
        return made


def _rows_by(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return [heads, T, n] times [heads, n, m], each row to the same bits in any batch, like packed linear layers."""
    missing = padded_rows(rows.shape[1]) - rows.shape[1]
    return (pad(rows, (0, 0, 0, missing)) @ matrix)[:, : rows.shape[1]]


def keep_latents(model: Any) -> None:
    """Have the modules of ``model`` that attend to latents hand them to our attention unexpanded."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and all(hasattr(module, size) for size in _SIZES):
            module.latents = Latents(module)
            module.expand_kv = partial(_handed_on, module.config, module.expand_kv)


def _handed_on(
    config: Any, expand: Expand, latent: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V for attention.

    For our attention, K is the row of latent [1, 1, T, rank] and rotated [1, 1, T, rope], and V its first part; for any
    other, both are what ``expand`` returns.
    """
    if config._attn_implementation != ATTENTION_NAME:
        return expand(latent, rotated)
    row = torch.cat((latent, rotated), dim=-1)
    return row, row[..., : latent.shape[-1]]
