"""The model side of the worker: a model runner computes logits, and a sampler turns them into tokens.

There is one seam, ``ModelRunner.forward(ids, positions, meta, last_rows) -> logits``.
"""
