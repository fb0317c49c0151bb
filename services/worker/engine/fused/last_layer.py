"""The rows that go through the attention and the MLP of the last layer: those whose logits are wanted.

Nothing reads the last layer's output for any other row, whose keys and values are written before. Of a prefill chunk
that is all rows but one, or all of them while more of the prompt is to come.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment


@dataclass(frozen=True, slots=True)
class LastLayer:
    """``rows`` int64 [K] of the step, ascending, as a step of their own; ``meta`` is None where K is 0.

    ``last_rows`` int64 [R] are the wanted rows among them.
    """

    rows: torch.Tensor
    meta: ForwardMeta | None
    last_rows: torch.Tensor


def last_layer(meta: ForwardMeta, last_rows: torch.Tensor) -> LastLayer | None:
    """Return the rest of a step of several rows a request when only ``last_rows`` are wanted.

    ``last_rows`` are int64 [R], each below the step's rows. The result is None if the rest is the whole step.

    A segment is reduced to its last row, nothing, or not at all: how a row is computed must depend on what is asked of
    its own request alone.
    """
    if meta.rows == len(meta.segments):
        return None
    wanted = np.unique(last_rows.numpy())
    ends = np.cumsum([segment.rows for segment in meta.segments])
    rows, segments, start, seen = [], [], 0, 0
    for segment, end in zip(meta.segments, ends.tolist(), strict=True):
        until = int(np.searchsorted(wanted, end))
        own = wanted[seen:until]
        if len(own) == 1 and own[0] == end - 1:
            rows.append(own)
            segments.append(Segment(1, segment.length - 1, segment.pages))
        elif len(own):
            rows.append(np.arange(start, end))
            segments.append(segment)
        start, seen = end, until
    kept = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
    if len(kept) == meta.rows:
        return None
    return LastLayer(
        torch.from_numpy(kept),
        ForwardMeta.build(segments, meta.page_size, "cpu") if segments else None,
        torch.from_numpy(np.searchsorted(kept, last_rows.numpy())),
    )
