"""The widest rows that the attention kernels read, for those that import no Triton."""

from __future__ import annotations

MAX_HEAD_DIM = 512
"""Values of a head, as many as layers without a window of Gemma 4 have."""

MAX_RANK, MAX_ROPE = 512, 128
"""Values of latents: as much rank as any published model has, and twice as much rope."""
