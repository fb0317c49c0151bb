"""The cache that state layers meet is the library's, for one call."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from services.worker.engine.states.carried import CarriedStates, States, pack, parts_of, unpack


def _library() -> DynamicCache:
    cache = DynamicCache()
    cache.layers.append(LinearAttentionLayer(2))
    return cache


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 5), (7, 1, 3)])
def test_a_convolution_is_given_and_keeps_what_the_library_gives_and_keeps(lengths: tuple[int, ...]) -> None:
    """Handing states in and taking them out between calls changes nothing."""
    library, states = _library(), States()
    generator = torch.Generator().manual_seed(0)

    for length in lengths:
        inputs = torch.randn(2, 3, length, generator=generator)
        expected = library.update_conv_state(inputs, 0, state_idx=1, conv_kernel_size=4)
        cache = CarriedStates(states)
        given = cache.update_conv_state(inputs, 0, state_idx=1, conv_kernel_size=4)
        states = unpack(pack(cache.states, parts_of(cache.states)), parts_of(cache.states))

        assert torch.equal(given, expected)
        assert torch.equal(states["conv", 1], library.get_conv_state(0, state_idx=1))


def test_states_keep_their_data_types() -> None:
    """A float32 recurrent state beside a bfloat16 convolution comes back to the bit."""
    states: States = {
        ("conv", 0): torch.randn(2, 3, 4).bfloat16(),
        ("recurrent", 0): torch.randn(2, 5, 2),
        ("conv", 2): torch.arange(6).view(2, 3),
    }
    parts = parts_of(states)

    found = unpack(pack(states, parts), parts)

    assert found.keys() == states.keys()
    assert all(torch.equal(found[key], states[key]) and found[key].dtype == states[key].dtype for key in states)


def test_a_state_of_another_shape_is_not_packed() -> None:
    """Its bytes would be read as those of another state."""
    parts = parts_of({("conv", 0): torch.zeros(1, 3, 4)})

    with pytest.raises(ValueError, match="conv state"):
        pack({("conv", 0): torch.zeros(1, 3, 5)}, parts)


def test_recurrent_states_are_kept_in_the_data_type_of_the_first() -> None:
    """As the library's cache, which copies into the memory that it has."""
    cache = CarriedStates({("recurrent", 0): torch.zeros(1, 2)})

    cache.update_recurrent_state(torch.ones(1, 2, dtype=torch.float64), 0)

    assert cache.states["recurrent", 0].dtype == torch.float32
