"""What one layer of one token costs: bytes in either form, and microseconds of computing (HCache 3.2).

The paper's formulas are for multi-head attention; here widths are taken from the model, so that they hold for grouped
queries and for any feed-forward network, too. With heads * head_dim = kv_heads * head_dim = D and 12 D² parameters a
layer they are the paper's: ``C_hidden`` 4 N D² FLOP, ``C_token`` 24 N D² and attention, which counts each pair of
tokens once (2 N² D; the paper writes N² D, with the same growth).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.rates import compute_fit
from shared.messages.pools import DTYPE_BYTES

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Of a layer: all figures are for one token, in bytes and microseconds."""

    layers: int
    kv_bytes: float
    hidden_bytes: float
    hidden_us: float  # K and V from the hidden state.
    token_us: float  # The whole layer but for attention.
    pair_us: float = 0.0  # Attention to one token of the context.

    def recompute_us(self, start: int, end: int) -> float:
        """Computing tokens [start, end) in one layer, each attending to all before it (HCache 3.2, T_rec)."""
        return (end - start) * self.token_us + self.pair_us * (end * end - start * start) / 2

    @property
    def hidden_is_smaller(self) -> bool:
        """Whether a hidden state takes fewer bytes than the KV that it stands for: not under grouped queries."""
        return self.hidden_bytes < self.kv_bytes


def layer_costs(state: CellState, worker: Worker) -> LayerCosts | None:
    """What a token costs a worker in one layer, by whatever means; None where it has no profile. Does not mutate.

    The profile is of one process alone on its machine (HCache 4.1.2): computing costs what was observed since, if
    anything was. A worker that cannot restore from hidden states has them cost the bytes of KV, so that they never win.
    """
    profile, geometry = worker.restoration, state.geometry
    if profile is None or geometry is None:
        return None
    fit = compute_fit(state, worker)
    token, pair = profile.token_us, profile.pair_us
    if fit.reports:
        token, pair = fit.token_and_pair_us()
        token, pair = token / geometry.layers, pair / geometry.layers
    kv_bytes = 2 * geometry.half_bytes / geometry.page_size
    return LayerCosts(
        layers=geometry.layers,
        kv_bytes=kv_bytes,
        hidden_bytes=profile.hidden * DTYPE_BYTES[geometry.dtype] if profile.hidden else kv_bytes,
        hidden_us=profile.hidden_us,
        token_us=token,
        pair_us=pair,
    )
