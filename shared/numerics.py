"""The epoch of the kernels' numerics.

Cached KV equals KV that would be computed now, to the bit: results that two kernels round differently are never mixed.
So the epoch is part of every model's fingerprint, and of namespaces by it. **Raise it whenever the KV or hidden states
of some model, on some device, may differ in any bit from before**; cached KV is then computed again. ``python -m
tools.numerics`` names the sources that have changed since the epoch was last considered, and a test fails until it was.
"""

NUMERICS_EPOCH = 2
