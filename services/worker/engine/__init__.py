"""The model side of the worker: one seam, ``ModelRunner.forward(ids, positions, meta, last_rows) -> logits``,
and the sampler that turns logits into tokens.
"""
