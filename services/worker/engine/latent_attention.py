"""Attention to latents in the pool, by the cheaper of two forms (:mod:`services.worker.engine.latents`).

*Absorbed*: the expansion is taken into the query, and all heads attend to the latents themselves, as heads of one KV
head. Nothing is expanded, but scores and sums are over ``rank + rope`` values. *Expanded*: K and V of the context are
expanded from its latents, a few heads at a time, and attended to as those of any model. That pays where many rows use
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import pad

from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.latents import Latents
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.uploads import upload
from services.worker.kv.device_pool import DevicePool
from shared.messages.pools import DTYPE_BYTES

EXPANDED_BYTES = 32 * 2**20
"""Bytes of K and V that are expanded at once on a CPU, if one head does not take more."""

_Attend = Callable[[AttentionCall], torch.Tensor]


class ExpandedPages:
    """K and V of a few expanded heads, read in place of a pool: [pages, page_size, heads, dim] each."""

    def __init__(self, pool: DevicePool) -> None:
        """Begin without K and V, with the geometry and the device of ``pool``.

        ``halves`` [2, pages, page_size, heads, dim] is set anew for every group of heads that is expanded.
        """
        self._pool = pool
        self.geometry = pool.geometry
        self.halves = torch.empty(2, 0)

    @property
    def device(self) -> torch.device:
        """The device of the pool whose latents are expanded."""
        return self._pool.device

    def k(self, _layer: int) -> torch.Tensor:
        """Return the expanded K, whatever the layer."""
        return self.halves[0]

    def v(self, _layer: int) -> torch.Tensor:
        """Return the expanded V, whatever the layer."""
        return self.halves[1]


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows of a step, int64 [n] (None: all), and their attention. ``pages`` int64: those to expand, if any."""

    rows: torch.Tensor | None
    attend: _Attend
    pages: torch.Tensor | None = None


class LatentAttention:
    """The backend of :class:`~services.worker.engine.planed_step.PlanedStep` for pools in which layers keep latents."""

    def __init__(
        self,
        pool: DevicePool,
        attention: AttentionBackend,
        over: Callable[[ExpandedPages], AttentionBackend],
        *,
        absorbed: AttentionBackend | None = None,
        expanded_bytes: int | None = None,
    ) -> None:
        """Attend over ``pool``: by ``attention`` in layers without latents, by ``absorbed`` to latents.

        By default ``absorbed`` is ``attention``. ``over`` makes the backend for K and V that were expanded, up to
        ``expanded_bytes`` (by default ``EXPANDED_BYTES``) at once.
        """
        self._pool = pool
        self._attention, self._latent = attention, absorbed or attention
        self._made = ExpandedPages(pool)
        self._expanded = over(self._made)
        self._expanded_bytes = EXPANDED_BYTES if expanded_bytes is None else expanded_bytes

    def for_step(self, meta: ForwardMeta) -> _Attend:
        """Return the attention of one step, which divides its rows between both forms once for each kind of layer."""
        attend_all = self._attention.for_step(meta)
        absorbed = attend_all if self._latent is self._attention else self._latent.for_step(meta)
        shares: dict[float, list[_Share]] = {}

        def attend(call: AttentionCall) -> torch.Tensor:
            if call.latents is None:
                return attend_all(call)
            most = call.latents.absorbed_rows
            if most not in shares:  # Once per step and kind of layer.
                shares[most] = self._divide(meta, most, absorbed)
            heads, rows = call.query.shape[1:3]
            output = call.query.new_empty(rows, heads, call.value_dim)
            for share in shares[most]:
                part = call if share.rows is None else replace(call, query=call.query[:, :, share.rows])
                found = self._absorbed(part, share) if share.pages is None else self._expand(part, share)
                output[slice(None) if share.rows is None else share.rows] = found
            return output

        return attend

    def _divide(self, meta: ForwardMeta, most: float, absorbed: _Attend) -> list[_Share]:
        """Return the rows of segments up to ``most`` rows long, which are absorbed, and those of longer ones."""
        ends = np.cumsum([segment.rows for segment in meta.segments])
        sides: tuple[list[int], list[int]] = [], []
        for number, segment in enumerate(meta.segments):
            sides[segment.rows > most].append(number)
        short, long = (
            [np.arange(ends[number] - meta.segments[number].rows, ends[number]) for number in side] for side in sides
        )
        if not long:
            return [_Share(None, absorbed)]
        device = self._pool.device
        shares = [_Share(upload([np.concatenate(long)], device)[0], *self._over_expanded(meta, sides[1]))]
        if short:
            part = ForwardMeta.build([meta.segments[number] for number in sides[0]], meta.page_size, device)
            shares.append(_Share(upload([np.concatenate(short)], device)[0], self._latent.for_step(part)))
        return shares

    def _over_expanded(self, meta: ForwardMeta, numbers: list[int]) -> tuple[_Attend, torch.Tensor]:
        """Return the attention of these segments over their own pages, expanded one after the other, and the pages."""
        pages, segments, first = [], [], 0
        for number in numbers:
            segment = meta.segments[number]
            count = pages_for(segment.length, meta.page_size)
            pages.append(segment.pages[:count].astype(np.int64))
            segments.append(Segment(segment.rows, segment.context, np.arange(first, first + count, dtype=np.int32)))
            first += count
        step = ForwardMeta.build(segments, meta.page_size, self._pool.device)
        return self._expanded.for_step(step), upload([np.concatenate(pages)], self._pool.device)[0]

    def _absorbed(self, call: AttentionCall, share: _Share) -> torch.Tensor:
        latents = _of(call)
        return latents.values(share.attend(latents.absorbed(call)))

    def _expand(self, call: AttentionCall, share: _Share) -> torch.Tensor:
        latents = _of(call)
        assert share.pages is not None
        kept = self._pool.k(call.layer).index_select(0, share.pages)[:, :, 0]
        heads, dim = call.query.shape[1], latents.expanded_dim
        query = pad(call.query, (0, dim - call.query.shape[-1]))
        head_bytes = 2 * kept[..., 0].numel() * dim * DTYPE_BYTES[self._pool.geometry.dtype]
        step = min(heads, max(1, self._expanded_bytes // head_bytes))
        found = []
        for first in range(0, heads, step):
            some = slice(first, first + step)
            self._made.halves = latents.expanded(kept, some, dim)
            sinks = None if call.sinks is None else call.sinks[some]
            found.append(share.attend(replace(call, layer=0, query=query[:, some], sinks=sinks, latents=None)))
        return torch.cat(found, dim=1)[:, :, : latents.value_dim]


def _of(call: AttentionCall) -> Latents:
    assert call.latents is not None
    return call.latents
