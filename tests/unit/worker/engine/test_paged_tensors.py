"""What the GPU kernel is given."""

from __future__ import annotations

import numpy as np

from services.worker.engine.forward_meta import ForwardMeta, Segment


def test_paged_tensors_describe_the_step() -> None:
    """On any device but the CPU the meta carries row offsets, contexts and a padded page table."""
    tables = [np.array([4, 2, 7], dtype=np.int32), np.array([1], dtype=np.int32)]
    meta = ForwardMeta.build([Segment(3, 6, tables[0]), Segment(2, 0, tables[1])], 4, "meta")

    assert meta.paged is not None
    assert meta.paged.cu_rows.shape == (3,)
    assert meta.paged.page_table.shape == (2, 3)
    assert (meta.paged.max_rows, meta.paged.max_length) == (3, 9)
    assert ForwardMeta.build([Segment(3, 6, tables[0])], 4, "cpu").paged is None
