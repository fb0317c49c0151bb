"""A step as the other ranks are told of it."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.kv.layer_gate import LayerGate
from services.worker.parallel.orders import PrefixInPart, RunStep, step_meta, step_order, unpacked
from shared.codec import decode, encode
from shared.messages.base import pack_int32


def test_a_step_arrives_as_it_was_sent() -> None:
    """Rows, contexts, the used part of page tables, tokens, wanted rows, and prefixes in part."""
    tables = [np.array([4, 1, 9, 8], dtype=np.int32), np.array([2, 7], dtype=np.int32)]
    gate = LayerGate(timeout_s=1)
    meta = ForwardMeta.build([Segment(5, 2, tables[0]), Segment(1, 7, tables[1])], 4, "cpu", gate)
    ids, positions = torch.arange(6) + 100, torch.tensor([2, 3, 4, 5, 6, 7])

    part = PrefixInPart(number=9, segment=1, start=0, end=4, pages=pack_int32([5]))
    sent = step_order(3, ids, positions, meta, torch.tensor([4, 5]), in_part=(part,), ended=[7, 8])
    order = decode(encode(sent), type(sent))
    arrived = step_meta(order, 4, torch.device("cpu"), None)

    assert isinstance(order, RunStep)
    assert order.waits
    assert [len(pages) // 4 for pages in order.pages] == [2, 2]
    assert torch.equal(arrived.slots, meta.slots)
    assert [segment.length for segment in arrived.segments] == [7, 8]
    assert torch.equal(unpacked(order.ids), ids)
    assert torch.equal(unpacked(order.positions), positions)
    assert unpacked(order.last_rows).tolist() == [4, 5]
    assert order.in_part == (part,)
    assert unpacked(order.ended).tolist() == [7, 8]
