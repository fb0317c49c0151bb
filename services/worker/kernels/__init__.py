"""Triton kernels over the paged pool, each tested against a plain-torch oracle.

They run on a GPU, and, for tests, on CPU tensors under ``TRITON_INTERPRET=1``, which must be set before Triton is
imported for the first time. Importing this package imports Triton.
"""

from services.worker.kernels.kv_write import kv_write
from services.worker.kernels.latent_attention import latent_attention
from services.worker.kernels.latent_write import latent_write
from services.worker.kernels.paged_attention import paged_attention
from services.worker.kernels.rms_norm import add_rms_norm
from services.worker.kernels.rope_write import rope_write
from services.worker.kernels.silu_mul import silu_mul

__all__ = [
    "add_rms_norm",
    "kv_write",
    "latent_attention",
    "latent_write",
    "paged_attention",
    "rope_write",
    "silu_mul",
]
