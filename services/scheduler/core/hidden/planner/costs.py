"""What one layer of one token costs: bytes in either form, and microseconds of computing (HCache 3.2).

The paper's formulas are for multi-head attention; here widths are taken from the model, so that they hold for grouped
queries and for any feed-forward network, too. With heads * head_dim = kv_heads * head_dim = D and 12 D² parameters a
layer they are the paper's: ``C_hidden`` 4 N D² FLOP, ``C_token`` 24 N D² and attention, which counts each pair of
tokens once (2 N² D; the paper writes N² D, with the same growth).
"""

from __future__ import annotations

from dataclasses import dataclass

FLOP_PER_MULTIPLY_ADD = 2.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Of a decoder-only transformer, per device."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_parameters: int  # Of one layer.
    dtype_bytes: int

    @property
    def kv_bytes(self) -> int:
        """K and V of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def hidden_bytes(self) -> int:
        """The hidden state of a token at one layer."""
        return self.hidden * self.dtype_bytes

    @property
    def projection_share(self) -> float:
        """Part of a layer's matrix products that makes K and V: 1/6 where the paper's formulas hold."""
        return 2 * self.hidden * self.kv_heads * self.head_dim / self.layer_parameters


def costs_of_shape(shape: ModelShape, *, product_flops: float, attention_flops: float) -> LayerCosts:
    """Costs by the formulas of HCache 3.2, at these FLOP a second of matrix products and of attention."""
    per_us = product_flops / 1e6
    token_us = FLOP_PER_MULTIPLY_ADD * shape.layer_parameters / per_us
    return LayerCosts(
        layers=shape.layers,
        kv_bytes=shape.kv_bytes,
        hidden_bytes=shape.hidden_bytes,
        hidden_us=token_us * shape.projection_share,
        token_us=token_us,
        pair_us=2 * FLOP_PER_MULTIPLY_ADD * shape.heads * shape.head_dim / (attention_flops / 1e6),
    )


def costs_from_speed(
    shape: ModelShape, *, flat_us: float, context_us: float, hidden_us: float | None = None
) -> LayerCosts:
    """Costs from what a worker was measured to take for a token through all layers.

    ``flat_us`` without context, ``context_us`` more for each token of context, ``hidden_us`` to make K and V of all
    layers from hidden states: where that is not measured yet, its share of the arithmetic.
    """
    projecting = flat_us * shape.projection_share if hidden_us is None else hidden_us
    return LayerCosts(
        layers=shape.layers,
        kv_bytes=shape.kv_bytes,
        hidden_bytes=shape.hidden_bytes,
        hidden_us=projecting / shape.layers,
        token_us=flat_us / shape.layers,
        pair_us=context_us / shape.layers,
    )
