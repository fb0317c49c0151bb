"""Importance-informed loading: bring onto the device only the prefix tokens that a request's own tokens look at.

:mod:`identification` finds them with the keys of a few probe heads, :mod:`selection` turns scores into sets,
:mod:`important_prefix` reads them layer by layer, from the disk by way of :mod:`disk_prefix`, :mod:`kept_kv` keeps what
was chosen, and :mod:`importance_step` attends over it in the model's forward pass. What it computes is inexact by
design and belongs to one request: it is never cached (ADR 0015). After IMPRESS (Chen et al., FAST 2025) and HyperInfer.
"""
