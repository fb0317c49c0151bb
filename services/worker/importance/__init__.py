"""Importance-informed loading: bring only those tokens of a prefix onto the device that the request's own tokens look
at.

:mod:`identification` finds them with the keys of a few probe heads, :mod:`selection` turns scores into sets,
:mod:`important_prefix` reads them layer by layer, :mod:`speculation` reads ahead for the next layer, and
:mod:`importance_step` attends over them in the model's forward pass. What it computes is inexact by design: it belongs
to fidelity ``importance(ratio)`` and never to an exact namespace. After IMPRESS (Chen et al., FAST 2025) and
HyperInfer.
"""
