"""The oracle itself, against torch's own attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.paged_batches import Shape, make_batch


def test_the_oracle_is_attention() -> None:
    """For a chunk behind a context it equals scaled_dot_product_attention under an explicit mask, window included."""
    batch = make_batch(Shape(((6, 10),), heads=4, kv_heads=2, page_size=4))
    pages = batch.paged.page_table[0, :4].long()
    key, value = (pool[pages].flatten(0, 1)[:16].transpose(0, 1) for pool in (batch.k_pool, batch.v_pool))
    position, keys = torch.arange(10, 16)[:, None], torch.arange(16)[None]

    for window in (None, 5):
        mask = keys <= position
        if window is not None:
            mask &= keys > position - window
        expected = scaled_dot_product_attention(
            batch.q.transpose(0, 1), key, value, attn_mask=mask, scale=0.3, enable_gqa=True
        ).transpose(0, 1)

        actual = oracles.paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, scaling=0.3, window=window)

        torch.testing.assert_close(actual, expected)
