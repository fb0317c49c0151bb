"""Costs of a layer for tests of partitions."""

from services.scheduler.core.hidden.partition import LayerCosts


def costs(
    layers: int,
    *,
    kv_bytes: float = 2.0,
    hidden_bytes: float = 1.0,
    hidden_us: float = 0.5,
    token_us: float = 3.0,
    pair_us: float = 0.0,
) -> LayerCosts:
    """Costs of a layer, as in multi-head attention unless said otherwise."""
    return LayerCosts(
        layers=layers,
        kv_bytes=kv_bytes,
        hidden_bytes=hidden_bytes,
        hidden_us=hidden_us,
        token_us=token_us,
        pair_us=pair_us,
    )
