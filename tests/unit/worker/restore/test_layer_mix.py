"""A mix says for every layer how it comes back."""

from __future__ import annotations

import pytest

from bench.layer_mixes import every_mix
from services.worker.restore.layer_mix import LayerMix
from shared.errors import InvariantViolated
from shared.messages.pools import KvGeometry


def test_the_order_is_recompute_hidden_load() -> None:
    """First layers from tokens, then from hidden states, then as KV."""
    mix = LayerMix(1, 2, 1)

    assert [mix.means(layer) for layer in range(mix.layers)] == ["recompute", "hidden", "hidden", "load"]
    assert (mix.hidden_layers, mix.loaded_layers) == (range(1, 3), range(3, 4))


def test_every_mix_of_a_model() -> None:
    """(L + 1)(L + 2) / 2 of them, all different."""
    mixes = list(every_mix(6))

    assert len(mixes) == len({(mix.recomputed, mix.from_hidden, mix.loaded) for mix in mixes}) == 28
    assert {mix.layers for mix in mixes} == {6}


def test_no_layers_is_no_mix() -> None:
    """Nor are fewer than none."""
    for counts in ((0, 0, 0), (2, -1, 1)):
        with pytest.raises(InvariantViolated):
            LayerMix(*counts)


@pytest.mark.parametrize(
    ("recomputed", "expected"),
    [
        (0, LayerMix(1, 2, 3)),
        (1, LayerMix(1, 2, 3)),
        (2, LayerMix(2, 1, 3)),
        (4, LayerMix(4, 0, 2)),
        (6, LayerMix(6, 0, 0)),
    ],
)
def test_the_mix_of_hidden_pages(recomputed: int, expected: LayerMix) -> None:
    """Layers that pages lack are recomputed at the least; what they hold of a recomputed layer is left alone."""
    geometry = KvGeometry(
        layers=6, kv_heads=2, head_dim=4, page_size=4, dtype="float32", hidden=8, absent=1, from_hidden=2
    )

    assert LayerMix.of_hidden(geometry, recomputed) == expected


def test_more_layers_than_there_are_make_no_mix() -> None:
    """A plan for another model."""
    geometry = KvGeometry(layers=2, kv_heads=2, head_dim=4, page_size=4, dtype="float32", absent=1)

    with pytest.raises(InvariantViolated):
        LayerMix.of_hidden(geometry, 3)
