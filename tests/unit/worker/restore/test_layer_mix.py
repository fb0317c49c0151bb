"""A mix says for every layer how it comes back."""

from __future__ import annotations

import pytest

from services.worker.restore.layer_mix import LayerMix
from shared.errors import InvariantViolated


def test_the_order_is_recompute_hidden_load() -> None:
    """First layers from tokens, then from hidden states, then as KV."""
    mix = LayerMix(1, 2, 1)

    assert [mix.means(layer) for layer in range(mix.layers)] == ["recompute", "hidden", "hidden", "load"]
    assert (mix.hidden_layers, mix.loaded_layers) == (range(1, 3), range(3, 4))


def test_every_mix_of_a_model() -> None:
    """(L + 1)(L + 2) / 2 of them, all different."""
    mixes = list(LayerMix.every(6))

    assert len(mixes) == len({(mix.recomputed, mix.from_hidden, mix.loaded) for mix in mixes}) == 28
    assert {mix.layers for mix in mixes} == {6}


def test_no_layers_is_no_mix() -> None:
    """Nor are fewer than none."""
    for counts in ((0, 0, 0), (2, -1, 1)):
        with pytest.raises(InvariantViolated):
            LayerMix(*counts)
