"""Segments of a batch that was made for the GPU's kernels."""

from __future__ import annotations

from services.worker.engine.forward_meta import Segment
from tests.unit.worker.kernels.paged_batches import Batch


def segments_of(batch: Batch) -> list[Segment]:
    """What ``batch.paged`` says, on the host."""
    edges = batch.paged.cu_rows.tolist()
    return [
        Segment(end - start, context, pages)
        for start, end, context, pages in zip(
            edges, edges[1:], batch.paged.context.tolist(), batch.paged.page_table.numpy(), strict=False
        )
    ]
