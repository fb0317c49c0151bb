"""A model's shape, and what a layer of it costs by the formulas of HCache 3.2."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.hidden.partition import LayerCosts

FLOP_PER_MULTIPLY_ADD = 2.0


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
