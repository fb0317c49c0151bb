"""The epoch of what kernels compute.

KV that is kept is KV that would be computed now, to the bit: what two kernels round differently is never mixed. So the
epoch is part of every model's fingerprint, and of namespaces by it. **Raise it whenever the KV or hidden states of some
model, on some device, may differ in any bit from what they were**; what is cached is then computed again.
``python -m tools.numerics`` names the sources that have changed since it was last thought of, and a test fails until it
was.
"""

NUMERICS_EPOCH = 2
