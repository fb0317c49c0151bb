"""Kernels whose result for a row is the same to the bit whatever else is computed, and however the rows are cut.

The names are those of :mod:`services.worker.kernels`. Two things decide a row's bits: which numbers are added in which
order, and which instructions add them. The first is fixed by the source: tiles, splits and the order of merging depend
on a row's own position and on the model's shapes, never on how many rows there are. The second follows from one
compiled kernel serving every number of rows, so nothing that differs from step to step is specialised on or sizes a
tile.
"""

from services.worker.kernels.exact.attention import paged_attention
from services.worker.kernels.kv_write import kv_write

__all__ = ["kv_write", "paged_attention"]
