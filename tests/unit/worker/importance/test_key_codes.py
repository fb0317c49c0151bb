"""Keys rounded to codes: storages and evaluations round alike, and little is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.storage.sparse.key_codes import encode_keys
from services.worker.importance.key_codes import decode_keys, rounded
from shared.messages.sparse_reads import code_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def served(keys: torch.Tensor) -> torch.Tensor:
    """Keys by way of a copy: encoded by a storage, decoded by a worker."""
    dtype = str(keys.dtype).removeprefix("torch.")
    encoded = torch.from_numpy(encode_keys(keys.contiguous().view(torch.uint8).numpy(), dtype))
    assert encoded.shape == (*keys.shape[:-1], code_bytes(keys.shape[-1]))
    return decode_keys(encoded, keys.shape[-1])


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    head_dim=st.sampled_from([1, 3, 8, 128]),
    exponent=st.integers(-45, 37),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_what_is_served_is_what_an_evaluation_rounds_to(dtype: str, head_dim: int, exponent: int, seed: int) -> None:
    """To the bit, for the least values of a float and the largest; a code is off by half of the scale at most."""
    values = torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    keys = values.to(DTYPES[dtype])

    found = served(keys)

    assert torch.equal(found.nan_to_num(), rounded(keys).nan_to_num())
    largest = keys.float().abs().amax(-1, keepdim=True)
    if largest.isfinite().all():
        assert ((found - keys.float()).abs() <= largest / 127 * 0.51 + 1e-43).all()


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -float("inf")])
def test_a_key_that_is_not_finite_stays_so(worst: float) -> None:
    """Its neighbours are not concerned, and zeros stay zeros."""
    keys = torch.tensor([[1.0, worst], [1.0, -2.0], [0.0, 0.0]])

    found = served(keys)

    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], keys[1:], atol=0.01, rtol=0.0)
    assert torch.equal(rounded(keys).isnan(), found.isnan())
