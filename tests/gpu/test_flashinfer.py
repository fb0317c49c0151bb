"""FlashInfer computes what the oracle does on this GPU, where it is installed: ordinary steps, and graphs of them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from services.worker.proving.flashinfer_proofs import prove_flashinfer
from services.worker.proving.table import ServedShape
from shared.messages.pools import KvGeometry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "softcap"),
    [(32, 8, 128, 16, 0.0), (40, 8, 128, 1, 0.0), (28, 4, 128, 64, 0.0), (14, 2, 64, 16, 0.0), (8, 4, 256, 16, 50.0)],
)
def test_it_passes_its_proof_with_heads_of_common_models(
    dtype: str, heads: int, kv_heads: int, head_dim: int, page_size: int, softcap: float
) -> None:
    """Llama's, Qwen's, which are no power of two to a KV head, and Gemma's with windows and a soft cap."""
    geometry = KvGeometry(layers=2, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)

    prove_flashinfer(
        ServedShape(device="cuda:0", geometry=geometry, query_heads=heads, windows=(0, 512), softcap=softcap)
    )
